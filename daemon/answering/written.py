"""An answer that a language model writes, from the passages found and from nothing else.

The model is given passages and a question and is believed in nothing: what it writes is checked
statement by statement (`daemon.answering.citations`). Where it is not there, fails, is late, or
nothing of what it wrote is supported, the extractive answer stands in, and says why. Where it
says that the passages do not answer, that is the answer: it has read them.

Whoever listens hears each statement once it was checked. From the first supported one on the
answer is the model's: where it fails behind that, the answer ends there and says why.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from daemon.answering.abstention import NOT_ANSWERED
from daemon.answering.citations import StatementCheck
from daemon.answering.generator import (
    AS_SET,
    Asking,
    FilledPrompt,
    GeneratedAnswer,
    Generator,
    Told,
    cause_of,
)
from daemon.answering.options import AnsweringOptions
from daemon.answering.prompts.kinds import kind_of
from daemon.answering.prompts.prompts import prompt
from daemon.learning.language_model import LanguageModelError
from daemon.library.search import Ranked
from daemon.process.chat_client import Likelihood, Sampling
from daemon.process.workers import GivenUp

log = structlog.get_logger()

# What every prompt asks for where the passages say nothing of it.
_SAYS_NO = "not answered"
_ENDS = re.compile(r"[.!?…:;\n]")  # a statement may


class AnswerModel(Protocol):
    """A language model, seen from here."""

    @property
    def version(self) -> bytes:
        """The digest of the version trained together that is in it; b"": none is."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """What its tokenizer reads as more than letters; empty where nobody knows."""

    def room(self, new_tokens: int) -> int:
        """Tokens that a prompt may have beside a reply of so many."""

    def count(self, text: str) -> int:
        """Tokens of a prompt, rather too many than too few."""

    def write(
        self, text: str, sampling: Sampling, within_s: float, told: Told | None = None
    ) -> str:
        """What it writes behind a prompt; raises whatever it likes.

        ``told`` hears what is written so far, if it can, again and again. Raises GivenUp where
        nobody waits for it any more.
        """

    def measured(
        self, text: str, sampling: Sampling, within_s: float, references: Sequence[str]
    ) -> tuple[str, Likelihood]:
        """As `write`, and how probable that and the likeliest of ``references`` are to it.

        Nobody hears it while it is written.
        """


class WrittenGenerator:
    """See `daemon.answering.generator.Generator`; ``otherwise`` stands in.

    ``load``: gives the model that is to write now, anew for each answer: which version of one it
    is may have changed.
    """

    def __init__(
        self, load: Callable[[], AnswerModel], otherwise: Generator, options: AnsweringOptions
    ) -> None:
        self._otherwise, self._options, self._load = otherwise, options, load
        self._lacking = ""
        try:
            load()
        except LanguageModelError as error:  # a start was refused for it; people get answers now
            self._lacking = cause_of(error)
            log.warning("answers are extracted, not written", cause=self._lacking)

    def generate(
        self,
        question: str,
        passages: Sequence[Ranked],
        how: Asking = AS_SET,
        told: Told | None = None,
    ) -> GeneratedAnswer:
        """Statements that the passages support, each with its [n], or the other's answer."""
        if not passages:
            return self._otherwise.generate(question, passages)
        if self._lacking:
            return self._instead(question, passages, self._lacking, failed=True)
        how = replace(how, prompt=kind_of(how.prompt or self._options.prompt, question))
        telling, version = _Telling(told), b""
        try:
            model = self._load()
            version = model.version
            text, likelihood = self._written(model, question, passages, how, telling)
            says_no = text.strip().casefold().rstrip(".") == _SAYS_NO
            if not says_no:
                telling.check.read(text)
        except GivenUp:
            raise
        except Exception as error:  # any: what a stranger's model does nobody can list
            cause = cause_of(error)
            if telling.told_some:
                log.warning("an answer ends before its end", cause=cause)
                left = telling.check.left
                return GeneratedAnswer(
                    left.text,
                    left.citations,
                    cut_short=cause,
                    failed=True,
                    dropped=left.dropped,
                    prompt=how.prompt,
                    generator_digest=version,
                )
            log.warning("an answer is extracted, not written", cause=cause)
            return self._instead(question, passages, cause, failed=True)
        by = GeneratedAnswer(
            "", (), prompt=how.prompt, likelihood=likelihood, generator_digest=version
        )
        if says_no:
            return replace(by, text=NOT_ANSWERED)
        left = telling.check.left
        if not left.supported:
            cause = "nothing of what the language model wrote is supported by what it cites"
            other = self._instead(question, passages, cause, dropped=left.dropped)
            return replace(other, prompt=how.prompt, likelihood=likelihood)
        return replace(by, text=left.text, citations=left.citations, dropped=left.dropped)

    def _written(
        self,
        model: AnswerModel,
        question: str,
        passages: Sequence[Ranked],
        how: Asking,
        telling: _Telling,
    ) -> tuple[str, Likelihood | None]:
        """What the model wrote, while what may be told of it is, and how probable it is to it."""
        options = self._options
        until = time.monotonic() + options.answer_within_s
        filled = self._filled(model, how.prompt, question, passages)
        sampling = Sampling(
            options.new_tokens,
            options.sampling_temperature,
            options.top_p,
            options.sampling_top_k,
            options.repetition_penalty,
            seed=_seed_of(question),
        )
        telling.check = StatementCheck(passages[: filled.given], options.unsupported)
        left = max(0.001, until - time.monotonic())
        if not how.measured:
            heard = telling.hear if telling.told is not None else None
            return model.write(filled.text, sampling, left, heard), None
        return model.measured(filled.text, sampling, left, how.references)

    def filled(self, kind: str, question: str, passages: Sequence[Ranked]) -> FilledPrompt:
        """What the model is sent; raises LanguageModelError, NoRoomError."""
        if self._lacking:
            raise LanguageModelError(self._lacking)
        return self._filled(self._load(), kind, question, passages)

    def _filled(
        self, model: AnswerModel, kind: str, question: str, passages: Sequence[Ranked]
    ) -> FilledPrompt:
        options = self._options
        room = model.room(options.new_tokens)
        if room < 1:
            raise LanguageModelError(
                f"the model reads and writes fewer than {options.new_tokens} tokens: lower "
                "retrieval.new_tokens"
            )
        text, given = prompt(
            kind,
            question,
            [one.passage for one in passages],
            min(options.prompt_tokens, room),
            model.count,
            model.special_tokens,
        )
        return FilledPrompt(text, given, model.count(text))

    def _instead(
        self,
        question: str,
        passages: Sequence[Ranked],
        cause: str,
        *,
        failed: bool = False,
        dropped: int = 0,
    ) -> GeneratedAnswer:
        other = self._otherwise.generate(question, passages)
        return replace(other, instead=cause, failed=failed, dropped=dropped)


class _Telling:
    """Checks what a model writes, and tells who listens what of it is certain."""

    def __init__(self, told: Told | None) -> None:
        self.told = told
        self.check = StatementCheck((), "drop")  # another one, once it is known of which passages
        self.told_some, self._said = False, ""
        self._heard = self._statements = 0
        self._ended = False  # there may be a statement that is whole

    def hear(self, text: str) -> None:
        """What is written so far."""
        came, self._heard = text[self._heard :], len(text)
        self._ended = self._ended or _ENDS.search(came) is not None
        if self.told is None or not self._ended or not any(map(str.isspace, came)):
            return
        self.check.read(text, goes_on=True)
        left = self.check.left
        if left.statements > self._statements:
            self._ended, self._statements = _ENDS.search(came) is not None, left.statements
            # Not before one is supported: where none is, another answer stands in.
            if left.supported and left.text != self._said:
                self.told_some, self._said = True, left.text
                self.told(left.text)


def _seed_of(question: str) -> int:
    """The same question gets the same answer: 31 bits, as all servers take them."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") >> 1
