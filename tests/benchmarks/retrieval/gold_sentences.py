"""Sentences that answer, marked by hand: PDD-AS2's two levels on real questions.

gold_sentences.jsonl holds no text: a mark is a document's id and the SHA-256 of a sentence
as `daemon.library.passages.sentences` cuts it there. The marks were made by reading 329 test
questions of seven institutions of MedQuAD with all that answers them, before any way of
ranking sentences was measured. Marked is what one would quote, were it one sentence: one, or
up to three that say it alike.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crypto.arrays import Float32, Int64
from daemon.answering.extractive import sentences_of
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import Interval, figures_of
from daemon.library.contents import Passage
from daemon.library.dense.index import DenseIndex
from daemon.library.levels import RANKED_ANEW
from daemon.library.store import Library
from daemon.library.words import terms
from tests.benchmarks.retrieval.corpora import Corpus

MARKS = Path(__file__).parent / "gold_sentences.jsonl"
DEPTH = 100
_CUTS = (1, 20, 100)

Ranking = Sequence[int]  # rows of sentences, or labels of passages, best first


@dataclass(frozen=True)
class Gold:
    """A question and the sentences that answer it, by document and digest."""

    query: str
    marks: frozenset[tuple[str, str]]


def digest_of(sentence: str) -> str:
    """Of a sentence, however its white space is written."""
    return hashlib.sha256(" ".join(sentence.split()).encode()).hexdigest()


def gold_of(site: str, corpus: Corpus) -> list[Gold]:
    """The marked questions of an institution, those that have an answer."""
    queries = {digest_of(pair.query + pair.positives[0]): pair.query for pair in corpus.judged_on}
    rows = [json.loads(line) for line in MARKS.read_text().splitlines()]
    return [
        Gold(queries[row["question"]], frozenset((doc, digest) for doc, digest in row["marks"]))
        for row in rows
        if row["site"] == site and row["marks"]
    ]


def measured_by_sentences(
    gold: Sequence[Gold],
    library: Library,
    passages: Mapping[int, Passage],
    sentences: Mapping[int, Float32],
    encode: Callable[[Sequence[str]], Float32],
    index: DenseIndex,
) -> dict[str, Any]:
    """The rank of the first right sentence, and passage, of each question, by words and meaning."""
    labels = sorted(passages)
    keys = [
        (passages[label].document_id, digest_of(sentence.text), label)
        for label in labels
        for sentence in sentences_of(passages[label])
    ]
    vectors = np.concatenate([sentences[label] for label in labels])
    owners: Int64 = np.repeat(labels, [len(sentences[label]) for label in labels])
    asked = [
        (one, rows)
        for one in gold
        if (
            rows := {row for row, (doc, digest, _) in enumerate(keys) if (doc, digest) in one.marks}
        )
    ]
    queries = encode([one.query for one, _ in asked])
    words = _Words([s.text for label in labels for s in sentences_of(passages[label])])
    right = [rows for _, rows in asked]
    right_passages = [{int(owners[row]) for row in rows} for rows in right]

    by_meaning, by_best, again, again_best, whole = [], [], [], [], []
    for query in queries:
        cosines = vectors @ query
        order = np.argsort(-cosines, kind="stable")
        by_meaning.append(order[:DEPTH].tolist())
        by_best.append(_owners(owners, order))
        near = index.search(query[np.newaxis], RANKED_ANEW)[0][0]
        whole.append(near[:DEPTH].tolist())
        kept = order[np.isin(owners[order], near)]
        again.append(kept[:DEPTH].tolist())
        again_best.append(_owners(owners, kept))
    lexical = [words.best(one.query) for one, _ in asked]
    lexical_passages = [[r for r, _ in library.bm25(one.query, DEPTH)] for one, _ in asked]

    return {
        "questions": len(asked),
        "without": len(gold) - len(asked),
        "sentence": {
            "BM25": _ranks(lexical, right),
            "all sentences": _ranks(by_meaning, right),
            f"sentences of {RANKED_ANEW} passages": _ranks(again, right),
        },
        "passage": {
            "BM25": _ranks(lexical_passages, right_passages),
            "passages": _ranks(whole, right_passages),
            "all sentences": _ranks(by_best, right_passages),
            f"sentences of {RANKED_ANEW} passages": _ranks(again_best, right_passages),
        },
    }


class _Words:
    """BM25 over sentences, as the library has it over passages."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self._db = sqlite3.connect(":memory:")
        self._db.execute("CREATE VIRTUAL TABLE words USING fts5(text, tokenize='porter unicode61')")
        self._db.executemany(
            "INSERT INTO words(rowid, text) VALUES (?, ?)", list(enumerate(sentences, start=1))
        )

    def best(self, query: str) -> list[int]:
        """Rows of the best sentences."""
        asked = " OR ".join(f'"{term}"' for term in terms(query))
        with closing(self._db.cursor()) as cursor:
            rows = cursor.execute(
                "SELECT rowid - 1 FROM words WHERE words MATCH ? ORDER BY bm25(words) LIMIT ?",
                (asked, DEPTH),
            ).fetchall()
        return [row for (row,) in rows]


def _owners(owners: Int64, order: Int64) -> list[int]:
    """Passages by their best sentence, Eq. 9."""
    return list(dict.fromkeys(owners[order].tolist()))[:DEPTH]


def _ranks(rankings: Sequence[Ranking], wanted: Sequence[set[int]]) -> list[int]:
    """Of the first right one, from 1; 0: none is among those."""
    return [
        next((rank for rank, row in enumerate(ranking, start=1) if row in right), 0)
        for ranking, right in zip(rankings, wanted, strict=True)
    ]


def scored(ranks: Sequence[int]) -> dict[str, Interval]:
    """What `judged` says, with intervals."""
    return figures_of(judged(ranks))


def judged(ranks: Sequence[int]) -> Judged:
    """MRR@10, and Recall@k: whether any right one is among the first k."""
    of = np.array(ranks)
    reciprocal = np.where((of > 0) & (of <= 10), 1.0 / np.maximum(of, 1), 0.0)
    recalls = {f"recall@{cut}": ((of > 0) & (of <= cut)).astype(np.float64) for cut in _CUTS}
    return Judged({"mrr@10": reciprocal, **recalls})
