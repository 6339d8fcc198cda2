"""The extractive generator: an answer made of the best sentences that were found.

Answer-sentence selection. It invents nothing and needs no language model: each
sentence stands in a document as it stands in the answer, a row of a table with its
columns' names. The retriever that found the passages also says which of their sentences are
nearest the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from crypto.arrays import Float32
from daemon.answering.abstention import NOT_ANSWERED
from daemon.answering.embedding import Sentence
from daemon.answering.generator import (
    AS_SET,
    Asking,
    FilledPrompt,
    GeneratedAnswer,
    Told,
    cite,
)
from daemon.answering.options import AS_USUAL
from daemon.answering.prompts.prompts import estimated_tokens, prompt
from daemon.answering.statements.rows import told_row
from daemon.library.contents import Passage
from daemon.library.search import Ranked

# Each sentence considered is encoded while a person waits, unless it is kept, about 10 ms on
# one core. Measured on 56 questions of one institution, as the share of answer
# sentences that come from a right document: 0.50 with 5 passages and 32
# sentences, 0.49 with these at half the time; with neither share nor rank weight 0.45.
# Taken from each passage in turn, for a long first one left no room: on 234 questions of five
# institutions 0.60 of the answers have a sentence that a reader marked, 0.56 before. Of 327
# questions of seven 0.58; with all of their first twelve sentences 0.55, for what stands first
# says more. In a table it does not: of 290 questions for a cell of five filings 0.82 are answered
# by the right row where all rows are looked at, 0.73 with twelve, 0.38 in turn with the others.
_PASSAGES = 3
_CANDIDATES = 12
_ROWS = 64  # of a table's passage; within the usual budget few have more than 40
_SENTENCES = 3  # in an answer, at most
_SHARE = 0.9  # of the best sentence's score that another one needs
_RANK_WEIGHT = 0.97  # a sentence of the next passage counts so much less
_SAME = 0.8  # shared words (Jaccard) from which two sentences say the same
_WORD = re.compile(r"\w+")
_SALUTATION = 8  # words before a comma, at most
_LETTER_HEADER = re.compile(r"(From|To|Cc|Date): ")  # as the reader of mail begins a letter


@dataclass(frozen=True)
class _Candidate:
    source: Ranked
    rank: int  # of its passage, from 0
    sentence: Sentence

    @property
    def position(self) -> int:
        return self.sentence.position

    @property
    def text(self) -> str:
        return self.sentence.text

    @property
    def told(self) -> str:
        """As an answer says it; it cites the text."""
        passage = self.source.passage
        return told_row(passage, self.position) if passage.kind == "table" else self.text


class ExtractiveGenerator:
    """Selects answer sentences by the embedding similarity of question and sentence.

    ``embed_question`` gives float32 [d], ``embed_sentences`` [n, d], of length 1, as the
    model version in use embeds queries and passages.
    """

    def __init__(
        self,
        embed_question: Callable[[str], Float32],
        embed_sentences: Callable[[Sequence[Sentence]], Float32],
    ) -> None:
        self._embed_question = embed_question
        self._embed_sentences = embed_sentences

    def filled(self, kind: str, question: str, passages: Sequence[Ranked]) -> FilledPrompt:
        """What would be sent, were there a language model; tokens are estimated."""
        usual, given = AS_USUAL, [one.passage for one in passages]
        text, held = prompt(kind, question, given, usual.prompt_tokens, estimated_tokens)
        return FilledPrompt(text, held, estimated_tokens(text))

    def generate(
        self,
        question: str,
        passages: Sequence[Ranked],
        how: Asking = AS_SET,  # noqa: ARG002  of language models
        told: Told | None = None,  # noqa: ARG002  it is all there at once
    ) -> GeneratedAnswer:
        """One to three sentences in reading order, each with its [n] and citation; at once."""
        found = _candidates(passages)
        candidates = [one for one in found if _says_something(one, question)] or found
        if not candidates:
            return GeneratedAnswer(NOT_ANSWERED, ())
        scores = self._scores(question, candidates)
        if scores.max() <= 0.0:  # all there is points away from the question
            return GeneratedAnswer(NOT_ANSWERED, ())
        chosen = sorted(_choose(candidates, scores), key=lambda c: (c.rank, c.position))
        citations = tuple(cite(n, c.source, c.text) for n, c in enumerate(chosen, start=1))
        text = " ".join(f"{c.told} [{n}]" for n, c in enumerate(chosen, start=1))
        return GeneratedAnswer(text, citations)

    def _scores(self, question: str, candidates: Sequence[_Candidate]) -> Float32:
        """Cosines [n], 0 .. 1, less for sentences of passages further down."""
        vectors = self._embed_sentences([candidate.sentence for candidate in candidates])
        cosines = np.maximum(vectors @ self._embed_question(question), 0.0)  # [n]
        weights = np.array([_RANK_WEIGHT**c.rank for c in candidates], dtype=np.float32)
        scores: Float32 = cosines * weights
        return scores


def _says_something(one: _Candidate, question: str) -> bool:
    """Not a row without any value, nor what only announces, nor a title that was asked about.

    Of a letter neither its header nor whom it greets: both are found, and answer nothing.
    """
    if one.source.passage.kind == "table":
        return sum(1 for cell in one.text.split("\t") if cell.strip()) > 1 or "\t" not in one.text
    greets = one.text.endswith(",") and len(one.text.split()) <= _SALUTATION
    if greets or one.text.endswith(":") or _of_a_header(one):
        return False
    if one.text.endswith((".", "!", "?", "…", '"', ")", "”", "»")):
        return True
    words, asked = (set(_WORD.findall(text.casefold())) for text in (one.text, question))
    return not words <= asked


def _of_a_header(one: _Candidate) -> bool:
    """Whether it stands in the lines that a letter begins with, or is a part of one of them."""
    passage = one.source.passage
    if not passage.document_id.endswith(".eml") or not _LETTER_HEADER.match(passage.text):
        return False
    return one.text in " ".join(passage.text.partition("\n\n")[0].split())


def sentences_of(passage: Passage) -> list[Sentence]:
    """Those that an answer looks at, from the first; a row of a table says as much as one."""
    text = passage.text
    if passage.kind == "table":
        parts = text.splitlines()[:_ROWS]  # its cells stay apart
    else:
        parts = [" ".join(part.split()) for part in passage.sentences[:_CANDIDATES]]
    return [
        Sentence(passage, position, part, last=position == len(parts) - 1)
        for position, part in enumerate(parts)
    ]


def _candidates(passages: Sequence[Ranked]) -> list[_Candidate]:
    """The rows of tables among the best passages, and the first sentences of the others in turn.

    In reading order.
    """
    rows: list[_Candidate] = []
    of_each: list[list[_Candidate]] = []
    for rank, ranked in enumerate(passages[:_PASSAGES]):
        found = [_Candidate(ranked, rank, sentence) for sentence in sentences_of(ranked.passage)]
        if ranked.passage.kind == "table":
            rows += found
        else:
            of_each.append(found)
    in_turn = [one for some in zip_longest(*of_each) for one in some if one is not None]
    return sorted(rows + in_turn[:_CANDIDATES], key=lambda one: (one.rank, one.position))


def _choose(candidates: Sequence[_Candidate], scores: Float32) -> list[_Candidate]:
    """The best sentences, none far below the best, no two that say the same."""
    chosen: list[_Candidate] = []
    least = _SHARE * float(scores.max())
    for row in np.argsort(-scores, kind="stable"):
        candidate = candidates[int(row)]
        if len(chosen) == _SENTENCES or scores[row] < least:
            break
        if not any(_same(candidate.text, other.text) for other in chosen):
            chosen.append(candidate)
    return chosen


def _same(one: str, other: str) -> bool:
    words, others = set(_WORD.findall(one.lower())), set(_WORD.findall(other.lower()))
    return len(words & others) >= _SAME * max(1, len(words | others))
