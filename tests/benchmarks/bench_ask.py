"""Seconds from question to answer at 10,000 passages, beside a scan of all vectors.

Everything is as a daemon does it: the real encoder, a library, an index and a
worker process with one thread. Text is drawn from the encoder's own words, so
that a word costs as many tokens as in real text; the passages' vectors are
drawn at random as well, since encoding 10,000 passages takes minutes and what a
question costs does not depend on what they say. The control answers the same
questions in turn with the same library, words ranking and generator, but
compares the question with every vector.

    python -m tests.benchmarks.bench_ask [--json]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daemon.answering.answering import OpenVersion
from daemon.jobs import answering as jobs
from daemon.jobs import learning as learning_jobs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.index import DenseIndex
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.search import search
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from daemon.process.workers import Worker

PASSAGES = 10_000
QUESTIONS = 100
WARM_UP = 3
TOP_K = 5
LONG = 600  # passages of a long document
SENTENCES, SENTENCE_WORDS = 6, 16  # of a passage
SEED = 7
CONTROL = "scan of all vectors, same words ranking and generator"

Seconds = NDArray[np.float64]


class ScanIndex(DenseIndex):
    """The control: exact neighbours, by comparing with every vector."""

    def __init__(self, labels: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._labels, self._vectors = labels, vectors
        self.count, self.dimension = vectors.shape

    def search(
        self, queries: NDArray[np.float32], k: int, *, ef: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ``k`` nearest of each query: labels [q, k] and cosines [q, k]."""
        del ef  # a scan leaves nothing out
        cosines = queries @ self._vectors.T  # [q, n]
        nearest = np.argpartition(-cosines, k, axis=1)[:, :k]
        order = np.take_along_axis(nearest, np.argsort(-np.take_along_axis(cosines, nearest, 1)), 1)
        return self._labels[order], np.take_along_axis(cosines, order, 1)


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means faster than the control."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_figures(Path(folder)))


async def _figures(folder: Path) -> list[dict[str, Any]]:
    spec = RetrieverSpec(threads=1)
    learning, answering = Worker("learning", threads=2), Worker("answering", threads=1)
    library = folder / "library.sqlite3"
    try:
        described = await learning.run(learning_jobs.describe, spec)
        words = await learning.run(_words, spec)
        encoder = await learning.run(_encoder_digest, spec)
        _fill(library, words, encoder, described.dimension)
        versions = folder / "versions"
        digest = await learning.run(learning_jobs.write_initial_version, spec, versions)
        index = await learning.run(
            learning_jobs.build_index, spec, library, versions, digest, folder / "index"
        )
        await learning.stop()
        await answering.run(jobs.open_version, spec, library, versions, digest, index)
        ours, control = await _ask_all(answering, words)
        near, scanned = await answering.run(_search_seconds, words)
        titled, untitled = await answering.run(_title_seconds, words)
    finally:
        await learning.stop()
        await answering.stop()
    return [
        _row("ask p50", ours, control, 50),
        _row("ask p99", ours, control, 99),
        _row("dense search alone p50", near, scanned, 50),
        _row("search p50, titles", titled, untitled, 50, "the same search, no titles"),
    ]


async def _ask_all(answering: Worker, words: list[str]) -> tuple[Seconds, Seconds]:
    """Seconds of each question as a caller of the worker waits for them: ours, control."""
    seconds: dict[Any, list[float]] = {jobs.ask: [], _ask_by_scan: []}
    for number, question in enumerate(_questions(words, WARM_UP + QUESTIONS)):
        for ask, taken in seconds.items():  # in turn: both meet the same neighbours
            started = time.perf_counter()
            answered = await answering.run(ask, question, TOP_K)
            if number >= WARM_UP:
                taken.append(time.perf_counter() - started)
            if not answered.citations:
                raise RuntimeError(f"no answer to {question!r}: the benchmark measures nothing")
    return np.array(seconds[jobs.ask]), np.array(seconds[_ask_by_scan])


def _row(
    name: str, ours: Seconds, control: Seconds, percentile: int, what: str = CONTROL
) -> dict[str, Any]:
    value = float(np.percentile(ours, percentile)) * 1000
    base = float(np.percentile(control, percentile)) * 1000
    return {
        "name": f"{name}, {PASSAGES} passages",
        "value": round(value, 3),
        "unit": "ms",
        "control": what,
        "control_value": round(base, 3),
        "ratio": round(base / value, 3),
    }


# ---- what runs in the answering worker --------------------------------------------

_scanning: OpenVersion | None = None


def _scan() -> OpenVersion:
    """The open version with every vector in memory instead of its index."""
    global _scanning
    if _scanning is None:
        version = jobs._opened()
        labels, features = version.library.features(version.retriever.encoder.digest)
        vectors = version.retriever.embed_passages([], features)
        _scanning = replace(version, index=ScanIndex(labels, vectors))
    return _scanning


def _ask_by_scan(question: str, top_k: int) -> object:
    return _scan().answer(question, top_k)


def _search_seconds(words: list[str]) -> tuple[Seconds, Seconds]:
    """Seconds of each dense search of 50 passages: with the index, by scan."""
    version, scan = jobs._opened(), _scan()
    taken: tuple[list[float], list[float]] = ([], [])
    for question in _questions(words, QUESTIONS):
        vector = version.retriever.embed_queries([question])
        for index, seconds in zip((version.index, scan.index), taken, strict=True):
            started = time.perf_counter()
            index.search(vector, 50)
            seconds.append(time.perf_counter() - started)
    return np.array(taken[0]), np.array(taken[1])


def _title_seconds(words: list[str]) -> tuple[Seconds, Seconds]:
    """Seconds of each search that names a document, with titles and without.

    Documents are as long as filings, so that as many passages as ever are looked at.
    """
    version = jobs._opened()
    rows = version.library.titles()
    titles = Titles((row[0], str(n // LONG), words[n // LONG]) for n, row in enumerate(rows))
    taken: tuple[list[float], list[float]] = ([], [])
    for number, question in enumerate(_questions(words, QUESTIONS)):
        named = " ".join(words[(number + more) % (PASSAGES // LONG)] for more in range(5))
        vector = version.retriever.embed_queries([question])[0]
        for known, seconds in zip((titles, Titles(())), taken, strict=True):
            started = time.perf_counter()
            search(version.library, version.index, known, f"{question} {named}", vector, TOP_K)
            seconds.append(time.perf_counter() - started)
    return np.array(taken[0]), np.array(taken[1])


# ---- drawn text ---------------------------------------------------------------------


def _words(spec: RetrieverSpec) -> list[str]:
    """5,000 words that are one token each, the commonest first."""
    vocabulary: dict[str, int] = retriever_for(spec).encoder.tokenizer.get_vocab()
    plain = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
    return sorted(plain, key=vocabulary.__getitem__)[:5000]


def _encoder_digest(spec: RetrieverSpec) -> bytes:
    return retriever_for(spec).encoder.digest


def _fill(path: Path, words: list[str], encoder_digest: bytes, dimension: int) -> None:
    """A library of one-passage documents with a drawn feature for each."""
    rng = np.random.default_rng(SEED)
    # Few words are common and many are rare, as in any language (Zipf).
    chances = 1.0 / np.arange(1, len(words) + 1)
    size = (PASSAGES, SENTENCES, SENTENCE_WORDS)
    drawn = rng.choice(len(words), size=size, p=chances / chances.sum())
    documents = [
        Document(
            f"d{number}",
            " ".join(words[word] for word in passage[0, :3]),
            " ".join(
                " ".join(words[word] for word in sentence).capitalize() + "."
                for sentence in passage
            ),
        )
        for number, passage in enumerate(drawn)
    ]
    whole = SentenceSplitter(lambda text: len(text.split()), SENTENCES * SENTENCE_WORDS)
    with Library.open(path) as library:
        library.put_documents(documents, splitter=whole)
        rowids = [passage.rowid for passage in library.passages()]
        vectors = rng.normal(size=(len(rowids), dimension)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        library.put_features(encoder_digest, rowids, vectors)


def _questions(words: list[str], count: int) -> list[str]:
    rng = np.random.default_rng(SEED + 1)
    return [" ".join(rng.choice(words, size=8)).capitalize() + "?" for _ in range(count)]


if __name__ == "__main__":
    for row in figures():
        if "--json" in sys.argv[1:]:
            print(json.dumps(row))
        else:
            print(
                f"{row['name']}: {row['value']} {row['unit']} "
                f"(control {row['control_value']}: {row['control']}; ratio {row['ratio']})"
            )
