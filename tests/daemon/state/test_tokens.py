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


def fault(tokens: Tokens, secret: str) -> str:
    """Why a token is refused that is known; "": it is not."""
    found = tokens.find(secret)
    assert found is not None
    return tokens.now(found)[1]


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
    assert (tokens.find(secret), fault(tokens, secret)) == (token, "")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3", clock)
    assert (again.find(secret), fault(again, secret)) == (token, "")
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
        assert tokens.find(wrong) is None


async def test_a_revoked_token_is_refused_at_once_and_for_good(
    tokens: Tokens, tmp_path: Path, clock: Clock
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 90)
    await tokens.revoke("chat")
    assert fault(tokens, secret) == "revoked"
    with pytest.raises(TokenRefused, match="revoked already"):
        await tokens.revoke("chat")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3", clock)
    assert fault(again, secret) == "revoked"
    again.close()


async def test_one_whose_revocation_cannot_be_written_is_refused_all_the_same(
    tokens: Tokens, tmp_path: Path
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 90)
    other = sqlite3.connect(tmp_path / "tokens.sqlite3", isolation_level=None)
    other.execute("ALTER TABLE tokens RENAME TO elsewhere")
    for _ in range(2):  # whoever was told tries again
        with pytest.raises(TokenError, match="check the disk"):
            await tokens.revoke("chat")
        assert fault(tokens, secret) == "revoked"
    other.execute("ALTER TABLE elsewhere RENAME TO tokens")
    other.close()
    await tokens.revoke("chat")  # there is room again
    with pytest.raises(TokenRefused, match="revoked already"):
        await tokens.revoke("chat")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3")
    assert fault(again, secret) == "revoked", "also for a daemon that starts anew"
    again.close()


async def test_a_block_that_could_not_be_written_is_written_by_the_next(
    tokens: Tokens, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "tokens.sqlite3", isolation_level=None)
    other.execute("ALTER TABLE blocked RENAME TO elsewhere")
    with pytest.raises(TokenError, match="check the disk"):
        await tokens.block("oidc:clinic:eve")
    assert tokens.is_blocked("oidc:clinic:eve"), "at once, whatever the disk says"
    other.execute("ALTER TABLE elsewhere RENAME TO blocked")
    other.close()
    await tokens.block("oidc:clinic:eve")
    with pytest.raises(TokenRefused, match="blocked already"):
        await tokens.block("oidc:clinic:eve")
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3")
    assert again.is_blocked("oidc:clinic:eve")
    again.close()


async def test_an_expired_token_is_refused_from_its_last_second_on(
    tokens: Tokens, clock: Clock
) -> None:
    secret, _ = await tokens.create("chat", ["ask"], 2)
    clock.now += 2 * DAY - 1
    assert fault(tokens, secret) == ""
    clock.now += 1
    assert fault(tokens, secret) == "expired"


async def test_a_name_is_given_again_only_when_its_token_is_refused(
    tokens: Tokens, clock: Clock
) -> None:
    first, _ = await tokens.create("chat", ["ask"], 1)
    with pytest.raises(TokenRefused, match="revoke it first"):
        await tokens.create("chat", ["embed"], 1)
    clock.now += DAY
    second, token = await tokens.create("chat", ["embed"], 1)
    assert tokens.find(first) is None, "the old one is no token any more"
    assert (tokens.find(second), fault(tokens, second)) == (token, "")
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
    assert fault(tokens, secret) == "revoked"


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


OLD = """
CREATE TABLE tokens (name TEXT PRIMARY KEY, digest BLOB NOT NULL UNIQUE, scopes TEXT NOT NULL,
    created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL, last_used TEXT NOT NULL,
    revoked_s INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO tokens VALUES ('old', x'00', 'ask search', 1, 9000000000, '', 0);
PRAGMA user_version = 1;
"""


def test_a_token_from_before_collections_may_ask_of_all(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "tokens.sqlite3") as older:
        older.executescript(OLD)
    for _ in range(2):  # it is brought up to date once
        kept = Tokens(tmp_path / "tokens.sqlite3")
        assert [(one.name, one.scopes, one.collections) for one in kept.all] == [
            ("old", ("ask", "search"), None)
        ]
        kept.close()


@pytest.mark.parametrize("damaged", ["", "hr", "null", '"all"', "{}", "[1]", "ALL"])
def test_what_is_no_list_of_collections_is_not_taken_for_all(tmp_path: Path, damaged: str) -> None:
    Tokens(tmp_path / "tokens.sqlite3").close()
    with sqlite3.connect(tmp_path / "tokens.sqlite3") as other:
        values = ("x", b"0", "ask", 1, 2, "", 0, damaged)
        other.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    with pytest.raises(TokenError, match="damaged"):
        Tokens(tmp_path / "tokens.sqlite3")


async def test_collections_are_kept_by_name(tokens: Tokens, tmp_path: Path, clock: Clock) -> None:
    named = ["hr/2024", "sales", "hr", "/sales/", "hr 2"]
    _, token = await tokens.create("clerk", ["ask"], 90, named)
    assert token.collections == ("hr", "hr 2", "sales"), "what lies in another says nothing more"
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3", clock)
    assert again.all == [token]
    again.close()


@pytest.mark.parametrize("names", [[], [""], ["/"], ["hr", "//"], ["x" * 101]])
async def test_no_name_is_no_collection(tokens: Tokens, names: list[str]) -> None:
    with pytest.raises(TokenRefused, match="a name of 1 to 100"):
        await tokens.create("clerk", ["ask"], 90, names)
    assert tokens.all == []


async def test_figures_are_not_for_who_may_ask_of_some(tokens: Tokens) -> None:
    with pytest.raises(TokenRefused, match="figures are of all documents"):
        await tokens.create("clerk", ["ask", "metrics"], 90, ["hr"])
    await tokens.create("watch", ["metrics"], 90)
    with pytest.raises(TokenRefused, match="figures are of all documents"):
        await tokens.change("watch", collections=["hr"])
    await tokens.create("clerk", ["ask"], 90, ["hr"])
    with pytest.raises(TokenRefused, match="figures are of all documents"):
        await tokens.change("clerk", ["metrics"])


async def test_rights_change_and_what_is_not_named_stays(tokens: Tokens, tmp_path: Path) -> None:
    secret, first = await tokens.create("clerk", ["ask"], 90, ["hr"])
    await tokens.change("clerk", collections=["sales", "law"])
    assert tokens.now(first)[0].collections == ("law", "sales")
    await tokens.change("clerk", ["search", "ask"])
    found = tokens.find(secret)
    assert found is not None
    assert (found.scopes, found.collections) == (("search", "ask"), ("law", "sales"))
    await tokens.change("clerk", all_documents=True)
    tokens.close()
    again = Tokens(tmp_path / "tokens.sqlite3")
    assert (again.all[0].scopes, again.all[0].collections) == (("search", "ask"), None)
    again.close()


async def test_a_change_says_what_is_to_change(tokens: Tokens, clock: Clock) -> None:
    await tokens.create("clerk", ["ask"], 1, ["hr"])
    for asked in ({}, {"collections": ["x"], "all_documents": True}):
        with pytest.raises(TokenRefused, match="say what the token may ask of"):
            await tokens.change("clerk", **asked)  # type: ignore[arg-type]  # of either kind
    with pytest.raises(TokenRefused, match="no token 'other'"):
        await tokens.change("other", all_documents=True)
    clock.now += DAY
    with pytest.raises(TokenRefused, match="is expired"):
        await tokens.change("clerk", all_documents=True)


async def test_less_holds_also_where_it_cannot_be_written(tokens: Tokens, tmp_path: Path) -> None:
    secret, _ = await tokens.create("clerk", ["ask", "search"], 90, ["hr", "law/2024", "sales"])
    other = sqlite3.connect(tmp_path / "tokens.sqlite3", isolation_level=None)
    other.execute("ALTER TABLE tokens RENAME TO elsewhere")
    with pytest.raises(TokenError, match="check the disk"):
        await tokens.change("clerk", ["ask", "embed"], ["hr/2024", "law", "new"])
    found = tokens.find(secret)
    assert found is not None
    assert (found.scopes, found.collections) == (("ask",), ("hr/2024", "law/2024"))
    with pytest.raises(TokenError, match="check the disk"):
        await tokens.change("clerk", collections=["new"])
    assert tokens.now(found)[0].collections == (), "nothing is in both"
    other.execute("ALTER TABLE elsewhere RENAME TO tokens")
    await tokens.used(found)
    other.close()
    tokens.close()
    Tokens(tmp_path / "tokens.sqlite3").close()  # it can be read


async def test_a_name_that_was_given_anew_is_another_token(tokens: Tokens) -> None:
    _, first = await tokens.create("clerk", ["ask"], 1, ["hr"])
    await tokens.revoke("clerk")
    await tokens.create("clerk", ["ask"], 1)
    assert tokens.now(first)[1] == "revoked"
