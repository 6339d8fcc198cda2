"""What people say answers a question: proposals, which an operator looks at before they are used.

A small file, written whole at each change: so none of what was taken out of it is left in it, nor
beside it once the daemon has started again (`crypto.durable.sweep`). A document's text is not in
it, only its name and that of the passage.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from crypto.durable import write
from daemon.learning.options import LearningError
from daemon.library.readers.bounds import fault_of
from daemon.library.readers.documents import Pair

_FORMAT: Final = "hanse-proposals-1"
_KEYS: Final = {
    "question": str,
    "document_id": str,
    "passage_id": str,
    "token": str,
    "answers": bool,
    "unix_s": int,
}
MOST: Final = 1000
"""Votes that wait for an operator."""
MOST_OF_A_TOKEN: Final = 200
MOST_BYTES: Final = 1 << 20
"""Of all votes, as they stand in the file: each change writes it anew."""


class ProposalRefused(LearningError):
    """A vote can't be kept; the text says why and what to do."""


@dataclass(frozen=True)
class Vote:
    """That a document, at a passage of it, answers a question or does not.

    ``token``: of who says so. ``passage_id`` "": the document as a whole.
    """

    question: str
    document_id: str
    passage_id: str
    token: str
    answers: bool
    unix_s: int

    @property
    def proposal(self) -> str:
        """What it is about: the same for all who say something of this question and document."""
        told = json.dumps([self.question, self.document_id]).encode()
        return hashlib.sha256(told).hexdigest()[:16]


@dataclass(frozen=True)
class Proposal:
    """A question and a document, with what was said of them, oldest first."""

    id: str
    votes: tuple[Vote, ...]

    @property
    def pair(self) -> Pair:
        """As it is learned from the operator's word on: a validation pair, of no training."""
        first = self.votes[0]
        return Pair(first.question, (first.document_id,), "valid")

    @property
    def passage_id(self) -> str:
        """Where the answer is, by whoever last said that there is one; else by whoever spoke."""
        ranked = sorted(self.votes, key=lambda vote: (vote.answers, vote.unix_s))
        return ranked[-1].passage_id


class Proposals:
    """The proposals of one site. Every method raises ProposalRefused where the file is damaged."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        self._turn = asyncio.Lock()

    async def vote(
        self, token: str, question: str, document_id: str, passage_id: str, *, answers: bool
    ) -> None:
        """Keep what somebody says; of the same question and passage it replaces what they said.

        That one passage of a document does not answer takes back nothing of another one.

        Raises ProposalRefused where too much waits already, or the question is no pair's.
        """
        vote = Vote(question, document_id, passage_id, token, answers, int(self._now()))
        if fault := fault_of(Pair(question, (document_id,))):
            raise ProposalRefused(f"this can't be kept: {fault}")
        await self._changed(lambda votes: [*_without_same(votes, vote), vote], adding=token)

    async def waiting(self) -> list[Proposal]:
        """All that wait, the oldest first."""
        async with self._turn:
            votes = await asyncio.to_thread(_read, self._path)
        found: dict[str, list[Vote]] = {}
        for vote in votes:
            found.setdefault(vote.proposal, []).append(vote)
        proposals = [Proposal(name, tuple(them)) for name, them in found.items()]
        return sorted(proposals, key=lambda one: (one.votes[0].unix_s, one.id))

    async def forget(self, ids: Collection[str]) -> None:
        """Forget these proposals, whoever's they are."""
        await self._changed(lambda votes: [one for one in votes if one.proposal not in ids])

    async def forget_token(self, name: str) -> int:
        """Forget what was said with this token; how many votes these were."""
        return await self._changed(lambda votes: [one for one in votes if one.token != name])

    async def forget_documents(self, ids: Collection[str]) -> None:
        """Forget what was said of these documents."""
        gone = frozenset(ids)
        await self._changed(lambda votes: [one for one in votes if one.document_id not in gone])

    async def _changed(
        self, change: Callable[[list[Vote]], list[Vote]], *, adding: str = ""
    ) -> int:
        """How many votes there are less. ``adding``: a token's, which must leave it in bounds."""
        async with self._turn:
            # A task of its own: whoever asked may hang up, and the next waits for it all the same.
            work = asyncio.ensure_future(asyncio.to_thread(self._rewrite, change, adding))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise

    def _rewrite(self, change: Callable[[list[Vote]], list[Vote]], adding: str) -> int:
        before = _read(self._path)
        after = change(before)
        if after == before:
            return 0
        content = _written(after)
        if adding:
            _check_bounds(after, content, adding)
        try:
            if after:
                write(self._path, content)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            cause = f"cannot write {self._path}: {error.strerror or error}"
            raise ProposalRefused(f"{cause}; free space on that disk and try again") from error
        return len(before) - len(after)


def _without_same(votes: Iterable[Vote], vote: Vote) -> list[Vote]:
    said = (vote.token, vote.proposal, vote.passage_id)
    return [one for one in votes if (one.token, one.proposal, one.passage_id) != said]


def _check_bounds(votes: list[Vote], content: bytes, token: str) -> None:
    waits = "wait for an operator's look (`fedctl pairs review`): try again later"
    if sum(one.token == token for one in votes) > MOST_OF_A_TOKEN:
        raise ProposalRefused(f"{MOST_OF_A_TOKEN} votes of the token {token!r} {waits}")
    if len(votes) > MOST or len(content) > MOST_BYTES:
        raise ProposalRefused(f"as many votes as this site keeps {waits}")


def _written(votes: list[Vote]) -> bytes:
    lines = [{"format": _FORMAT, "votes": len(votes)}, *map(asdict, votes)]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def _read(path: Path) -> list[Vote]:
    """The votes of the file; none where there is no file. Raises ProposalRefused."""
    try:
        with path.open("rb") as file:
            content = file.read(2 * MOST_BYTES)
        head, *lines = map(json.loads, content.splitlines())
        votes = [Vote(**line) for line in lines if _is_sound(line)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if head != {"format": _FORMAT, "votes": len(votes)} or len(votes) != len(lines):
        raise _damaged(path, "it is cut short or of another format")
    return votes


def _is_sound(line: object) -> bool:
    return (
        isinstance(line, dict)
        and line.keys() == _KEYS.keys()
        and all(type(line[name]) is kind for name, kind in _KEYS.items())
    )


def _damaged(path: Path, cause: str) -> ProposalRefused:
    return ProposalRefused(
        f"cannot read what people have proposed in {path}: {cause}; put a backup of it back, or "
        "delete it: what waits for an operator's look is lost then, and nothing else"
    )
