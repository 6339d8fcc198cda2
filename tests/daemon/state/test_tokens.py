"""Tokens: told once, refused when they should be, and nowhere on the disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.state import tokens as module
from daemon.state.tokens import TokenError, TokenRefused, Tokens

DAY = 86_400


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(tmp_path: Path, clock: Clock) -> Iterator[Tokens]:
    kept = Tokens(tmp_path / "tokens.sqlite3", clock)
    yield kept
    kept.close()


async def test_a_token_is_known_again_also_after_a_restart(
    tokens: Tokens, tmp_path: Path, clock: Clock
) -> None:
    secret, token = await tokens.create("chat", ["ask", "search", "ask"], 90)
    assert token.scopes == ("ask", "search")
    assert tokens.find(secret) == (token, "")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3", clock)
    assert again.find(secret) == (token, "")
    again.close()


async def test_no_two_are_alike_and_each_is_long(tokens: Tokens) -> None:
    told = [(await tokens.create(f"t{n}", ["ask"], 1))[0] for n in range(20)]
    assert len(set(told)) == 20
    assert {len(secret) for secret in told} == {len("hanse_") + 43}, "256 bits, in base64"


async def test_the_disk_has_its_hash_alone(tokens: Tokens, tmp_path: Path) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 1)
    kept = bytes_of(tmp_path)
    assert secret.encode() not in kept
    assert secret.removeprefix("hanse_").encode() not in kept
    assert b"chat" in kept


async def test_what_is_no_token_is_found_nowhere(tokens: Tokens) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 1)
    for wrong in ("", "hanse_", secret[:-1], secret + "x", secret.upper(), "chat", "\ud800"):
        assert tokens.find(wrong) == (None, "")


async def test_a_revoked_token_is_refused_at_once_and_for_good(
    tokens: Tokens, tmp_path: Path, clock: Clock
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 90)
    await tokens.revoke("chat")
    assert tokens.find(secret)[1] == "revoked"
    with pytest.raises(TokenRefused, match="revoked already"):
        await tokens.revoke("chat")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3", clock)
    assert again.find(secret)[1] == "revoked"
    again.close()


async def test_one_whose_revocation_cannot_be_written_is_refused_all_the_same(
    tokens: Tokens, tmp_path: Path
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 90)
    other = sqlite3.connect(tmp_path / "tokens.sqlite3", isolation_level=None)
    other.execute("DROP TABLE tokens")
    with pytest.raises(TokenError, match="check the disk"):
        await tokens.revoke("chat")
    assert tokens.find(secret)[1] == "revoked"
    other.close()


async def test_an_expired_token_is_refused_from_its_last_second_on(
    tokens: Tokens, clock: Clock
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 2)
    clock.now += 2 * DAY - 1
    assert tokens.find(secret)[1] == ""
    clock.now += 1
    assert tokens.find(secret)[1] == "expired"


async def test_a_name_is_given_again_only_when_its_token_is_refused(
    tokens: Tokens, clock: Clock
) -> None:
    first, _ = await tokens.create("chat", ["ask"], 1)
    with pytest.raises(TokenRefused, match="revoke it first"):
        await tokens.create("chat", ["embed"], 1)
    clock.now += DAY
    second, token = await tokens.create("chat", ["embed"], 1)
    assert tokens.find(first) == (None, ""), "the old one is no token any more"
    assert tokens.find(second) == (token, "")
    assert [one.name for one in tokens.all] == ["chat"]


async def test_two_who_want_one_name_do_not_both_get_it(tokens: Tokens) -> None:
    made = await asyncio.gather(
        *(tokens.create("chat", ["ask"], 1) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in made) == ["TokenRefused", "tuple"]


async def test_there_are_only_so_many(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    await tokens.create("one", ["ask"], 1)
    await tokens.create("two", ["ask"], 1)
    with pytest.raises(TokenRefused, match="the name of a revoked one"):
        await tokens.create("three", ["ask"], 1)
    await tokens.revoke("one")
    await tokens.create("one", ["ask"], 1)


async def test_of_its_use_the_day_is_kept_and_no_more(tokens: Tokens, clock: Clock) -> None:
    _, token = await tokens.create("chat", ["ask"], 90)
    assert token.last_used == ""
    await tokens.used(token)
    assert tokens.all[0].last_used == "2027-01-15"
    clock.now += DAY
    await tokens.used(token)
    assert tokens.all[0].last_used == "2027-01-16"


async def test_a_use_does_not_bring_a_revoked_token_back(tokens: Tokens) -> None:
    secret, token = await tokens.create("chat", ["ask"], 90)
    await tokens.revoke("chat")
    await tokens.used(token)  # a call that began before
    assert tokens.find(secret)[1] == "revoked"


async def test_a_disk_that_is_full_keeps_nobody_from_asking(tokens: Tokens, tmp_path: Path) -> None:
    _, token = await tokens.create("chat", ["ask"], 90)
    other = sqlite3.connect(tmp_path / "tokens.sqlite3", isolation_level=None)
    other.execute("DROP TABLE tokens")
    await tokens.used(token)
    other.close()


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.sqlite3").write_bytes(b"not a database, but long enough to be read" * 50)
    with pytest.raises(TokenError, match="put a backup of it back"):
        Tokens(tmp_path / "tokens.sqlite3")


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "tokens.sqlite3") as newer:
        newer.execute("PRAGMA user_version = 9")
    with pytest.raises(TokenError, match="newer Hanse"):
        Tokens(tmp_path / "tokens.sqlite3")
