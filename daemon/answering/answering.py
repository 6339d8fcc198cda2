"""The journey of a question: embed, search, generate, cite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daemon.answering.abstention import (
    ALWAYS_ANSWERS,
    NOT_ANSWERED,
    Abstention,
    evidence_of,
)
from daemon.answering.embedding import QuestionEmbedder, SentenceEmbedder
from daemon.answering.generator import (
    AS_SET,
    Asking,
    Citation,
    GeneratedAnswer,
    Generator,
    Told,
    cite,
)
from daemon.library.catalogue.filters import EVERY, Filters, NothingFits
from daemon.library.catalogue.language import language_of_question
from daemon.library.readers.documents import MAX_QUERY_BYTES
from daemon.library.search import USUAL_WEIGHTS, Ranked, RankingWeights, labels_of, search

if TYPE_CHECKING:
    from daemon.answering.cross_encoder import CrossEncoder
    from daemon.learning.retriever.retriever import Retriever
    from daemon.library.dense.index import DenseIndex
    from daemon.library.levels import Sentences
    from daemon.library.store import Library
    from daemon.library.titles import Titles


UNREAD = (
    "It seems to be asked in {language}, and the encoder that finds passages was made for "
    "{known}: ask in that."
)
"""What is said beside, where a question may be answered and its language is not known."""


class QuestionRefusedError(Exception):
    """A question that is not answered: blank or too long."""


@dataclass(frozen=True, kw_only=True)
class Answered(GeneratedAnswer):
    """An answer with all passages that were found, and who answered.

    Without citations the documents do not answer. ``probability``: that they do, 0 .. 1, by the
    evidence; 0 where it is not known. What of it people are told is what the messages of
    control.proto have by the same name (`daemon.control.library_messages.answer_fields`).
    """

    passages: tuple[Citation, ...]  # best first, numbered 0
    model_digest: bytes
    left_out: str = ""  # as `OpenVersion.search` says
    probability: float = 0.0
    unread_language: str = ""  # of the question, which the encoder is not for; ISO 639-1


@dataclass(frozen=True)
class OpenVersion:
    """A model version ready to answer: its retriever, its index, the library and its titles.

    ``weights``: of `daemon.library.search.search`; found on the pairs that ask ``weighed_on``, or
    (none) the usual ones. ``sentences``: where these are compared, and not passages alone.
    ``cross_encoder``: ranks the best anew, where there is one;
    ``lacking``: why there is none although the settings name one. ``abstention``: what is too
    little for an answer.
    ``embed_question`` and ``embed_sentences``: as the retriever does.
    """

    retriever: Retriever
    index: DenseIndex
    library: Library
    titles: Titles
    model_digest: bytes
    embed_question: QuestionEmbedder
    embed_sentences: SentenceEmbedder
    generator: Generator
    sentences: Sentences | None = None
    weights: RankingWeights = USUAL_WEIGHTS
    weighed_on: tuple[str, ...] = ()
    cross_encoder: CrossEncoder | None = None
    lacking: str = ""
    abstention: Abstention = ALWAYS_ANSWERS

    @property
    def weighed_by(self) -> int:
        """How many pairs the weights were found on."""
        return len(self.weighed_on)

    def answer(
        self, question: str, top_k: int, how: Asking = AS_SET, told: Told | None = None
    ) -> Answered:
        """Answer from the ``top_k`` best passages; QuestionRefusedError if it is malformed.

        ``how``, ``told``: as in `daemon.answering.generator.Generator`.
        """
        question = checked(question)
        found, left_out = self._ranked(question, top_k, EVERY)
        # Of all: a cross-encoder may put what scored best behind those that are shown.
        evidence, hits = evidence_of(found), found[:top_k]
        if self.abstention.abstains(evidence):
            answer = GeneratedAnswer(NOT_ANSWERED, ())
        else:
            answer = self.generator.generate(question, hits, how, told)
        text, unread = answer.text, self._unread_language(question)
        if unread and not answer.citations:
            known = ", ".join(sorted(self.retriever.encoder.languages))
            text = f"{text} {UNREAD.format(language=unread, known=known)}"
        return Answered(
            **{**vars(answer), "text": text},
            passages=tuple(cite(0, ranked, ranked.passage.text) for ranked in hits),
            model_digest=self.model_digest,
            left_out=left_out,
            probability=self.abstention.probability(evidence),
            unread_language=unread,
        )

    def search(
        self, question: str, top_k: int, filters: Filters = EVERY
    ) -> tuple[list[Ranked], str]:
        """The ``top_k`` best passages of documents that fit, best first, all different texts.

        What says nearly the same as one of them is told with it, if its document fits, too.
        And why they were ranked without the cross-encoder; "": as was wanted. Raises
        QuestionRefusedError for a malformed question, and where no document fits.
        """
        found, left_out = self._ranked(checked(question), top_k, filters)
        return found[:top_k], left_out

    def _ranked(self, question: str, top_k: int, filters: Filters) -> tuple[list[Ranked], str]:
        """As `search`, with those behind the ``top_k`` that a cross-encoder looked at."""
        try:
            among = labels_of(self.library, filters)
        except NothingFits as error:
            raise QuestionRefusedError(str(error)) from None
        deepest = 0 if self.cross_encoder is None else self.cross_encoder.depth
        found = search(
            self.library,
            self.index,
            self.titles,
            question,
            self.embed_question(question),
            max(top_k, deepest),
            self.weights,
            among,
            self.sentences,
        )
        left_out = self.lacking
        if self.cross_encoder is not None:
            found, left_out = self.cross_encoder.ranked(question, found)
        return found, left_out

    def _unread_language(self, question: str) -> str:
        """As `Answered.unread_language`: "" where the encoder does not say what it is for."""
        known = self.retriever.encoder.languages
        language = language_of_question(question) if known else ""
        return "" if language in known else language

    def close(self) -> None:
        """Close its files; it is of no use afterwards."""
        self.embed_sentences.close()
        self.library.close()


def checked(question: str) -> str:
    """The question without white space around it; raises QuestionRefusedError."""
    question = question.strip()
    if not question:
        raise QuestionRefusedError("the question is blank: write one")
    if len(question.encode(errors="replace")) > MAX_QUERY_BYTES:
        raise QuestionRefusedError(
            f"the question is longer than {MAX_QUERY_BYTES >> 10} KiB: shorten it"
        )
    return question
