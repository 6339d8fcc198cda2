"""What passages are found by: levels, headings and titles, on real questions.

    python -m tests.benchmarks.retrieval --data DATA [--cache FOLDER] [--only nhlbi finance]

Seven institutions of MedQuAD, each in its own documents, and FinanceBench's whole
development corpus, encoder as it comes. Weights are chosen as a site chooses them, on
validation questions (of FinanceBench: those of every other company), and others judge.
Writes docs/results/retrieval.jsonl, a line a corpus, and from it retrieval.md.

What is embedded is kept in the cache, so that it can be interrupted and taken up again;
all of it takes about an hour of two cores.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.kinds import RetrievalLevel
from crypto.arrays import Float32
from daemon.answering.embedding import Sentence
from daemon.answering.extractive import sentences_of
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import Interval, figures_of
from daemon.evaluation.rankings import Questions, Retrieved, found_by, judged_rankings, weigh
from daemon.jobs import learning
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.dense.index import DenseIndex, build_index
from daemon.library.levels import Sentences
from daemon.library.readers.documents import Pair
from daemon.library.search import RankingWeights
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from tests.benchmarks.retrieval.corpora import Corpus, filings, institution
from tests.benchmarks.retrieval.gold_sentences import Gold, gold_of, measured_by_sentences
from tests.benchmarks.retrieval.page import page

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SITES = ("cancergov", "gard", "ghr", "mplus_topics", "nhlbi", "niddk", "ninds")
FINANCE = "finance"
LEVELS: tuple[RetrievalLevel, ...] = ("passage", "sentence", "both")
_MOST_BYTES = 8 << 30
_AT_ONCE = 64  # passages whose sentences are encoded together
_METRICS = ("mrr@10", "hit@1", "hit@10")


@dataclass(frozen=True)
class Read:
    """What the encoder reads of passages: with what stands above them, or them alone."""

    name: str
    of_passage: Callable[[Passage], str]
    of_sentence: Callable[[Sentence], str]


READ = (
    Read("with headings", lambda one: one.embedding_text, lambda one: one.embedding_text),
    Read("text alone", lambda one: one.text, lambda one: one.text),
)


class Embedding:
    """A library as an encoder embeds it, read in one way; kept in a file."""

    def __init__(self, encoder: Encoder, library: Library, read: Read, cache: Path) -> None:
        self._encoder, self._read = encoder, read
        # A third of the time; no vector is further than a cosine of 0.996 from the full one.
        self._model = copy.deepcopy(encoder.model).to(torch.bfloat16)
        self.passages = {one.rowid: one for one in library.passages()}
        self._kept = SentenceFeatures.open(cache / "embedded.sqlite3", most_bytes=_MOST_BYTES)
        self._name = read.name.encode()

    def encode(self, texts: Sequence[str]) -> Float32:
        """[n, d], rows of length 1."""
        return self._encoder.encode(texts, model=self._model)

    def _key(self, kind: bytes, text: str) -> bytes:
        return hashlib.sha256(kind + self._name + b"\0" + text.encode()).digest()

    def _encoded(
        self, kind: bytes, of: Iterable[Passage], texts_of: Callable[[Passage], list[str]]
    ) -> dict[int, Float32]:
        """[n, d] of each of these passages by its label; what is not kept is encoded."""
        keys = {one.rowid: self._key(kind, one.embedding_text) for one in of}
        digest = self._encoder.digest
        found = self._kept.of_whole(digest, list(keys.values()))
        waiting = [label for label, key in keys.items() if key not in found]
        for start in range(0, len(waiting), _AT_ONCE):
            some = {label: texts_of(self.passages[label]) for label in waiting[start:][:_AT_ONCE]}
            encoded = self.encode([text for one in some.values() for text in one])
            ends = np.cumsum([len(one) for one in some.values()])[:-1]
            for (label, texts), vectors in zip(some.items(), np.split(encoded, ends), strict=True):
                self._kept.put(digest, keys[label], texts, vectors, whole=True)
                found[keys[label]] = vectors.astype(np.float16).astype(np.float32)
            _told(f"{self._read.name}, {kind.decode()}", start + len(some), len(waiting))
        return {label: found[key] for label, key in keys.items()}

    @cached_property
    def index(self) -> DenseIndex:
        """The passages, to be searched."""
        vectors = self._encoded(
            b"passages", self.passages.values(), lambda one: [self._read.of_passage(one)]
        )
        labels = np.array(sorted(vectors), np.int64)
        return build_index(labels, np.concatenate([vectors[label] for label in labels.tolist()]))

    def sentences(self, of: Iterable[Passage]) -> dict[int, Float32]:
        """The sentences [n, d] of each of these passages, by its label."""
        return self._encoded(
            b"sentences", of, lambda one: [self._read.of_sentence(s) for s in sentences_of(one)]
        )

    def at(self, level: RetrievalLevel) -> Sentences | None:
        """How passages are compared at that level."""
        if level == "passage":
            return None

        def passages(labels: list[int]) -> dict[int, Passage]:
            return {label: self.passages[label] for label in labels}

        def vectors(passages: Sequence[Passage]) -> list[Float32]:
            return list(self.sentences(passages).values())

        return Sentences(level, passages, vectors)


def measured(corpus: Corpus, cache: Path, gold: Sequence[Gold]) -> dict[str, Any]:
    """Figures of a corpus: by what is read and compared, and what of it is chosen."""
    cache.mkdir(parents=True, exist_ok=True)
    spec = RetrieverSpec(threads=2, device="cpu")
    learning.ingest(spec, cache / "library.sqlite3", corpus.documents, [], passage_tokens=220)
    encoder = retriever_for(spec).encoder
    rows = []
    best: dict[tuple[str, RetrievalLevel], Judged] = {}
    by_sentence: dict[str, Any] = {}
    with Library.open(cache / "library.sqlite3", read_only=True) as library:
        titles = Titles(library.titles())
        for read in READ:
            embedding = Embedding(encoder, library, read, cache)
            for level in LEVELS:
                asked = _Asked(library, titles, embedding, level)
                chosen = asked.found(corpus.chosen_on)
                weights = weigh(library, corpus.chosen_on, chosen.met)
                on = asked.judged(corpus.chosen_on, chosen, weights).mean("mrr@10")
                judged = asked.found(corpus.judged_on)
                untitled = replace(weights, title=0.0)
                row = {
                    "read": read.name,
                    "level": level,
                    "title": weights.title,
                    "words": weights.words,
                    "chosen_on": on,
                    **_figures(asked.judged(corpus.judged_on, judged, weights)),
                    "untitled": asked.judged(corpus.judged_on, judged, untitled).mean("mrr@10"),
                    "meaning": _meaning(asked, corpus, judged),
                }
                rows.append(row)
                best[read.name, level] = asked.judged(corpus.judged_on, judged, weights)
                print(json.dumps(row), flush=True)
            if gold:
                by_sentence[read.name] = measured_by_sentences(
                    *(gold, library, embedding.passages),
                    embedding.sentences(embedding.passages.values()),
                    *(embedding.encode, embedding.index),
                )
    return {
        "corpus": corpus.name,
        "passages": len(embedding.passages),
        "questions": [len(corpus.chosen_on), len(corpus.judged_on)],
        "rows": rows,
        "kinds": _by_kind(corpus, best),
        "gold": by_sentence,
    }


@dataclass(frozen=True)
class _Asked:
    library: Library
    titles: Titles
    embedding: Embedding
    level: RetrievalLevel

    def found(self, pairs: Sequence[Pair]) -> Retrieved:
        vectors = self.embedding.encode([pair.query for pair in pairs])
        return found_by(
            *(self.library, self.embedding.index, self.titles, pairs, vectors),
            self.embedding.at(self.level),
        )

    def judged(self, pairs: Sequence[Pair], found: Retrieved, weights: RankingWeights) -> Judged:
        return judged_rankings(self.library, pairs, Questions(found, None, weights))["fused"]


def _meaning(asked: _Asked, corpus: Corpus, found: Retrieved) -> float:
    """MRR@10 by meaning alone: no words, no titles."""
    return asked.judged(corpus.judged_on, found, RankingWeights(0.0, 0.0)).mean("mrr@10")


def _by_kind(
    corpus: Corpus, best: dict[tuple[str, RetrievalLevel], Judged]
) -> dict[str, dict[str, Any]]:
    """MRR@10 by kinds of questions, read with headings."""
    names = sorted({kind for kinds in corpus.kinds for kind in kinds})
    table = {}
    for name in names:
        rows = [row for row, kinds in enumerate(corpus.kinds) if name in kinds]
        means: dict[str, float] = {
            level: float(best["with headings", level].scores["mrr@10"][rows].mean())
            for level in LEVELS
        }
        table[name] = {"questions": len(rows), **means}
    return table


def _figures(judged: Judged) -> dict[str, list[float]]:
    def triple(one: Interval) -> list[float]:
        return [round(value, 4) for value in (one.mean, one.low, one.high)]

    figures = figures_of(judged)
    return {name: triple(figures[name]) for name in _METRICS}


def _told(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total or done % (_AT_ONCE * 50) == 0:
        print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


def corpora(data: Path, only: Iterable[str]) -> Iterator[tuple[str, Corpus]]:
    """Those of that name, or all."""
    wanted = set(only) or {*SITES, FINANCE}
    for site in SITES:
        if site in wanted:
            yield site, institution(data, site)
    if FINANCE in wanted:
        yield FINANCE, filings(data)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="What passages are found by.")
    parser.add_argument("--data", type=Path, default=os.environ.get("HANSE_DATA"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hanse-retrieval")
    parser.add_argument("--only", nargs="*", default=(), help=f"of {', '.join(SITES)}, {FINANCE}")
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    asked = parser.parse_args()
    kept = RESULTS / "retrieval.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    newest = {line["name"]: line for line in map(json.loads, lines)}
    if not asked.page:
        if asked.data is None:
            parser.error("name the data: --data or HANSE_DATA")
        for name, corpus in corpora(asked.data, asked.only):
            gold = gold_of(name, corpus)
            newest[name] = {"name": name, **measured(corpus, asked.cache / name, gold)}
            kept.write_text("".join(json.dumps(line) + "\n" for line in newest.values()))
    (RESULTS / "retrieval.md").write_text(page(list(newest.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
