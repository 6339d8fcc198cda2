"""What people propose: kept in bounds, replaced, forgotten, and damaged."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crypto.durable import sweep
from daemon.pairs import proposals as module
from daemon.pairs.proposals import MOST, MOST_OF_A_TOKEN, ProposalRefused, Proposals

ROPE = "Who tars the rope?"


def bytes_in(folder: Path) -> bytes:
    return b"".join(one.read_bytes() for one in folder.iterdir())


def killed_in_the_midst(path: Path) -> None:
    """A process that does nothing but change it."""
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from daemon.pairs.proposals import Proposals\n"
        "async def go():\n"
        "    kept = Proposals(Path(sys.argv[1]))\n"
        "    for n in range(100000):\n"
        "        await kept.vote('bob', 'zyxomma?', 'x.md', '', answers=bool(n % 2))\n"
        "        if n == 2: print('begun', flush=True)\n"
        "asyncio.run(go())\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def now() -> list[float]:
    return [1_800_000_000.0]


@pytest.fixture
def kept(tmp_path: Path, now: list[float]) -> Proposals:
    return Proposals(tmp_path / "proposals.jsonl", lambda: now[0])


async def said(kept: Proposals) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    return [
        (one.pair.query, one.pair.positives[0], [(v.token, v.answers) for v in one.votes])
        for one in await kept.waiting()
    ]


async def test_votes_on_one_question_and_document_are_one_proposal(
    kept: Proposals, now: list[float]
) -> None:
    await kept.vote("ada", ROPE, "rope.md", "rope.md@1", answers=True)
    now[0] += 60
    await kept.vote("bob", ROPE, "rope.md", "rope.md@2", answers=False)
    await kept.vote("bob", ROPE, "sail.md", "", answers=True)
    assert await said(kept) == [
        (ROPE, "rope.md", [("ada", True), ("bob", False)]),
        (ROPE, "sail.md", [("bob", True)]),
    ]
    first, _ = await kept.waiting()
    assert first.pair.split == "valid"
    assert first.passage_id == "rope.md@1", "where somebody says that the answer is"
    assert len(first.id) == 16


async def test_who_changes_their_mind_has_one_vote(kept: Proposals) -> None:
    for answers in (True, True, False):
        await kept.vote("ada", ROPE, "rope.md", "", answers=answers)
    assert await said(kept) == [(ROPE, "rope.md", [("ada", False)])]


async def test_a_no_of_one_passage_takes_back_no_yes_of_another(kept: Proposals) -> None:
    await kept.vote("ada", ROPE, "rope.md", "rope.md@1", answers=True)
    await kept.vote("ada", ROPE, "rope.md", "rope.md@2", answers=False)
    [one] = await kept.waiting()
    assert [(vote.passage_id, vote.answers) for vote in one.votes] == [
        ("rope.md@1", True),
        ("rope.md@2", False),
    ]
    assert one.passage_id == "rope.md@1"


async def test_what_is_forgotten_is_in_no_byte_of_the_folder(
    kept: Proposals, tmp_path: Path
) -> None:
    await kept.vote("ada", ROPE, "rope.md", "", answers=True)
    await kept.vote("bob", "Where is the quaxolith?", "vault.md", "", answers=True)
    await kept.vote("cyd", "Is it gilded?", "green.md", "", answers=True)
    [quaxolith] = [one for one in await kept.waiting() if "quax" in one.pair.query]
    await kept.forget([quaxolith.id])
    await kept.forget_documents(["green.md"])
    left = bytes_in(tmp_path)
    assert ROPE.encode() in left
    assert b"quaxolith" not in left
    assert b"gilded" not in left
    assert await kept.forget_token("nobody") == 0
    assert await kept.forget_token("ada") == 1
    assert bytes_in(tmp_path) == b""


async def test_no_token_fills_it_and_all_together_have_bounds(
    kept: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OF_A_TOKEN", 3)
    monkeypatch.setattr(module, "MOST", 4)
    for n in range(3):
        await kept.vote("ada", f"{n}?", "rope.md", "", answers=True)
    with pytest.raises(ProposalRefused, match="3 votes of the token 'ada' wait for an operator"):
        await kept.vote("ada", "one more?", "rope.md", "", answers=False)
    await kept.vote("ada", "2?", "rope.md", "", answers=False)  # it replaces one
    await kept.vote("bob", "3?", "rope.md", "", answers=True)
    with pytest.raises(ProposalRefused, match="as many votes as this site keeps wait"):
        await kept.vote("cyd", "4?", "rope.md", "", answers=True)
    assert len(await kept.waiting()) == 4
    assert (MOST_OF_A_TOKEN, MOST) == (200, 1000)


async def test_bytes_have_a_bound_and_a_question_one_of_pairs(
    kept: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 3000)
    await kept.vote("ada", "x" * 1500, "rope.md", "", answers=True)
    with pytest.raises(ProposalRefused, match="as many votes as this site keeps"):
        await kept.vote("bob", "y" * 1500, "rope.md", "", answers=True)
    with pytest.raises(ProposalRefused, match="this can't be kept: a pair's query has up to"):
        await kept.vote("bob", "ä" * 16_000, "rope.md", "", answers=True)
    with pytest.raises(ProposalRefused, match="needs a query"):
        await kept.vote("bob", " ", "rope.md", "", answers=True)


async def test_votes_at_once_are_all_kept(kept: Proposals) -> None:
    await asyncio.gather(
        *(kept.vote(f"t{n}", ROPE, "rope.md", "", answers=bool(n % 2)) for n in range(20))
    )
    [one] = await kept.waiting()
    assert len(one.votes) == 20


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]\n",
        b'{"format": "hanse-proposals-1", "votes": 2}\n',
        b'{"format": "hanse-proposals-2", "votes": 0}\n',
        b'{"format": "hanse-proposals-1", "votes": 1}\n{"question": 1}\n',
        b"\xff\n",
    ],
)
async def test_a_damaged_file_is_told_with_what_to_do(
    kept: Proposals, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "proposals.jsonl").write_bytes(content)
    with pytest.raises(ProposalRefused, match=r"put a backup of it back, or delete it"):
        await kept.waiting()
    with pytest.raises(ProposalRefused):
        await kept.vote("ada", ROPE, "rope.md", "", answers=True)
    assert (tmp_path / "proposals.jsonl").read_bytes() == content, "nothing is written over it"


async def test_a_kill_in_the_midst_leaves_the_old_or_the_new(
    kept: Proposals, tmp_path: Path
) -> None:
    await kept.vote("ada", ROPE, "rope.md", "", answers=True)
    for _ in range(3):
        await asyncio.to_thread(killed_in_the_midst, tmp_path / "proposals.jsonl")
        assert {one.pair.query for one in await kept.waiting()} == {ROPE, "zyxomma?"}
    await kept.forget_documents(["x.md"])
    sweep(tmp_path)  # as at the next start
    assert b"zyxomma" not in bytes_in(tmp_path)
