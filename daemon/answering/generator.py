"""What a generator is: a question and passages to an answer with citations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from daemon.learning.generator.in_use import InUse
from daemon.library.catalogue.near_duplicates import Copies
from daemon.library.readers.documents import Kind
from daemon.library.search import Ranked
from daemon.process.chat_client import Likelihood

_LONGEST_CAUSE = 300  # characters
Told = Callable[[str], None]
"""Hears an answer while it is written: what of it is certain so far, from its begin."""


@dataclass(frozen=True)
class Citation:
    """Where a statement comes from; ``number`` is its [n] in the answer, 0 for none."""

    number: int
    document_id: str
    passage_id: str
    title: str
    text: str  # the sentence that is cited, or a whole passage
    score: float  # of the passage, fused; greater is better
    context: str = ""  # what stands above the passage: a heading, the header of its table
    kind: Kind = "text"  # of the passage
    page: int = 0  # on which it begins, from 1; 0: no pages
    copies: Copies | None = None  # of the passage: what says nearly the same
    unsupported: bool = False  # a statement cites it that it does not support; kept, and marked
    ocr: bool = False  # some of the passage was read from a picture


@dataclass(frozen=True)
class Asking:
    """What of one question is otherwise than the settings say.

    ``prompt``: of `daemon.answering.prompts`, "" as the settings have it. ``measured``: say how
    probable what a language model writes is to it, and these ``references``. ``values``: of
    the federated generator that writes, `InUse()` its base model's; None: who writes is as set.
    """

    prompt: str = ""
    measured: bool = False
    references: tuple[str, ...] = ()
    values: InUse | None = None


AS_SET = Asking()


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer whose [n] marks number its citations; without citations nothing was found.

    ``instead``: why another generator wrote it than the one that was chosen; "": that one did.
    ``cut_short``: why it ends before its end, where its begin was told while it was written.
    ``failed``: the chosen one could not write, or not to the end. ``dropped``: statements that
    were taken out, for what they cite does not support them. ``prompt``: that a language model was
    asked by; "": none was. ``likelihood``: where that was to be measured, and one wrote.
    ``generator_digest``: of the trained version that wrote it; b"": none did.
    """

    text: str
    citations: tuple[Citation, ...]
    instead: str = ""
    cut_short: str = ""
    failed: bool = False
    dropped: int = 0
    prompt: str = ""
    likelihood: Likelihood | None = None
    generator_digest: bytes = b""


@dataclass(frozen=True)
class FilledPrompt:
    """What a language model is sent: of how many passages, and of how many ``tokens``."""

    text: str
    given: int
    tokens: int


class Generator(Protocol):
    """Writes an answer from passages and from nothing else."""

    def generate(
        self,
        question: str,
        passages: Sequence[Ranked],
        how: Asking = AS_SET,
        told: Told | None = None,
    ) -> GeneratedAnswer:
        """Answer from ``passages``, best first; there may be none.

        ``told`` is for one that writes piece by piece. The answer begins with what it heard.
        Where ``how`` measures it hears nothing.
        """

    def filled(self, kind: str, question: str, passages: Sequence[Ranked]) -> FilledPrompt:
        """What a language model is sent for it, or would be; raises LearningError, NoRoomError."""


def cause_of(error: Exception) -> str:
    """What went wrong, on a line, as people are told it; a path may be in it."""
    said = " ".join(str(error).encode(errors="replace").decode().split())
    return said[:_LONGEST_CAUSE] or type(error).__name__


def cite(number: int, ranked: Ranked, text: str) -> Citation:
    """The citation of a passage, or of one of its sentences or rows."""
    passage = ranked.passage
    context = passage.context if text == passage.text else passage.above(text)
    return Citation(
        number,
        passage.document_id,
        passage.id,
        passage.title,
        text,
        float(ranked.score),
        context,
        passage.kind,
        passage.page,
        ranked.copies,
        ocr=passage.ocr,
    )
