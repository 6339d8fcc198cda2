"""Seconds from question to answer at 10,000 and at 100,000 passages, and what they go into.

Everything is as a daemon does it, but that nothing is refused: the real encoder, a library,
an index, kept sentences and a worker process with one thread; it has one core for itself,
and on another one documents are embedded all the while. Text is drawn from the encoder's
own words, so that a word costs as many tokens as in real text, few of them common and many
rare; half of a question's words are drawn as those of the passages are, half evenly. To
encode 100,000 passages takes hours: some are, and the features of the others, and of all
sentences, are mixtures of these, so that they lie as an encoder's vectors do (random ones
have no neighbours, and an index that finds that out compares with all). All sentences are
kept: it is a site whose background work is done.

The control answers the same questions in turn as it was done before: it compares the question
with every vector, scores every passage that has one of its words, and encodes the sentences.

Where the machine is shared the seconds are more than the work: the processor's own are told,
too.

    python -m tests.benchmarks.bench_ask [--json] [--level passage|sentence|both]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from config.kinds import RetrievalLevel
from daemon.answering.answering import OpenVersion
from daemon.answering.embedding import KeptSentences
from daemon.answering.extractive import sentences_of
from daemon.answering.generators import GENERATORS
from daemon.answering.options import AS_USUAL, AnsweringOptions
from daemon.jobs import answering as jobs
from daemon.jobs import learning as learning_jobs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library import words as words_ranking
from daemon.library.dense.index import UpdatableIndex
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from daemon.personal.serving import retriever_for
from daemon.process.workers import Worker, import_once
from daemon.state.folder import StateFolder

SIZES = {10_000: 100, 100_000: 50}  # passages, and how many questions are asked of them
WARM_UP = 3
TOP_K = 5
SENTENCES, SENTENCE_WORDS = 6, 16  # of a passage
SEED = 7
CONTROL = "scan of all vectors, all words scored, sentences encoded"

SLICE = 2000  # documents put in at once
ENCODED = 1000  # texts whose vectors the others are mixed of

Seconds = NDArray[np.float64]
Words = NDArray[np.int64]
T = TypeVar("T")


class ScanIndex(UpdatableIndex):
    """The control: exact neighbours, by comparing with every vector."""

    def __init__(self, of: UpdatableIndex, vectors: NDArray[np.float32]) -> None:
        super().__init__(of.base, of.delta, of.gone)
        self._vectors = vectors  # in memory, by label

    def search(
        self, queries: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ``k`` nearest of each query: labels [q, k] and cosines [q, k]."""
        cosines = queries @ self._vectors.T  # [q, n]
        nearest = np.argpartition(-cosines, k, axis=1)[:, :k]
        order = np.take_along_axis(nearest, np.argsort(-np.take_along_axis(cosines, nearest, 1)), 1)
        return self._labels[order], np.take_along_axis(cosines, order, 1)


def figures(level: RetrievalLevel = "passage") -> list[dict[str, Any]]:
    """Rows of figures; a ratio > 1 means faster than the control."""
    import_once(["daemon.jobs.answering", "daemon.learning.retriever.retriever"], threads=1)
    rows = []
    for passages, questions in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(_figures(Path(folder), passages, questions, level))
    return rows


async def _figures(
    folder: Path, passages: int, questions: int, level: RetrievalLevel
) -> list[dict[str, Any]]:
    spec = RetrieverSpec(threads=1)
    learning = Worker("learning", threads=2)
    answering = Worker("answering", threads=1, forked=True)
    core, *others = sorted(os.sched_getaffinity(0))
    other = others[0] if others else None
    state = StateFolder(folder)
    try:
        words = await learning.run(_words, spec)
        await learning.run(_fill, spec, state, words, passages)
        digest = await learning.run(learning_jobs.write_initial_version, spec, state.versions)
        building = replace(spec, threads=2)
        index = await learning.run(
            learning_jobs.build_index, building, state.library, state.versions, digest, state.index
        )
        await learning.stop()
        version = (spec, state.library, state.versions, digest, index, state.sentences)
        opened = []
        # The last one answers: of drawn words most questions would be refused, which is quicker.
        for lost in (AS_USUAL.lost_answers, 0.0):
            started = time.perf_counter()
            options = AnsweringOptions(level=level, lost_answers=lost)
            await answering.run(jobs.open_version, *version, options)
            opened.append(time.perf_counter() - started)
        asked = _questions(words, WARM_UP + questions)
        if other is not None:
            await answering.run(os.sched_setaffinity, 0, {core})
        with _embedding_on(other, spec, words):
            ours, control, processor = await _ask_all(answering, asked)
            parts, of_control = await answering.run(_parts, asked)
    finally:
        await learning.stop()
        await answering.stop()
    name = f"{passages} passages"
    return [
        _row(f"ask p50, {name}", ours, control, 50),
        _row(f"ask p99, {name}", ours, control, 99),
        _row(f"processor time of ask p50, {name}", processor, None, 50),
        _row(f"processor time of ask p99, {name}", processor, None, 99),
        *(_row(f"{part} alone p50, {name}", parts[part], of_control[part], 50) for part in parts),
        _row(f"a version opened, {name}", np.array(opened[:1]), None, 50),
        _row(f"the same again, refusing nothing, {name}", np.array(opened[1:]), None, 50),
    ]


@contextmanager
def _embedding_on(core: int | None, spec: RetrieverSpec, words: list[str]) -> Iterator[None]:
    """Meanwhile a process embeds texts on that core; None: there is no other core."""
    if core is None:
        yield
        return
    context = multiprocessing.get_context("forkserver")
    begun = context.Event()
    embedding = context.Process(target=_embed_for_ever, args=(core, spec, words, begun))
    embedding.start()
    try:
        if not begun.wait(120.0):
            raise RuntimeError("no documents are embedded: the benchmark measures something else")
        yield
        if not embedding.is_alive():
            raise RuntimeError("documents were embedded for a part of the time only")
    finally:
        embedding.kill()
        embedding.join()


def _embed_for_ever(core: int, spec: RetrieverSpec, words: list[str], begun: Any) -> None:
    os.sched_setaffinity(0, {core})
    encoder = retriever_for(spec).encoder
    rng = np.random.default_rng(SEED)
    while True:
        drawn = _drawn(words, rng, (64, SENTENCES * SENTENCE_WORDS))
        encoder.encode([" ".join(words[word] for word in one) for one in drawn])
        begun.set()


async def _ask_all(answering: Worker, asked: list[str]) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds of each question as a caller of the worker waits for them: ours, control.

    And the processor's seconds that ours took in the worker.
    """
    seconds: dict[Any, list[float]] = {_ask: [], _ask_as_before: []}
    processor = []
    for number, question in enumerate(asked):
        for ask, taken in seconds.items():  # in turn: both meet the same neighbours
            started = time.perf_counter()
            used = await answering.run(ask, question)
            if number >= WARM_UP:
                taken.append(time.perf_counter() - started)
                processor += [used] * (ask is _ask)
    return np.array(seconds[_ask]), np.array(seconds[_ask_as_before]), np.array(processor)


def _row(name: str, ours: Seconds, control: Seconds | None, percentile: int) -> dict[str, Any]:
    value = float(np.percentile(ours, percentile)) * 1000
    base = None if control is None else float(np.percentile(control, percentile)) * 1000
    return {
        "name": name,
        "value": round(value, 3),
        "unit": "ms",
        "control": "" if base is None else CONTROL,
        "control_value": None if base is None else round(base, 3),
        "ratio": None if base is None else round(base / value, 3),
    }


# ---- what runs in the answering worker --------------------------------------------

_before: OpenVersion | None = None


def _as_before() -> OpenVersion:
    """The open version with every vector in memory instead of its index, and nothing kept."""
    global _before
    if _before is None:
        version = jobs.opened_version()
        assert isinstance(version.index, UpdatableIndex)
        _, features = version.library.features(version.retriever.encoder.digest)
        vectors = version.retriever.embed_passages([], features)
        sentences = KeptSentences(version.retriever, None)
        _before = replace(
            version,
            index=ScanIndex(version.index, vectors),
            embed_sentences=sentences,
            generator=GENERATORS[AS_USUAL.generator](version.embed_question, sentences, AS_USUAL),
        )
    return _before


@contextmanager
def _all_words() -> Iterator[None]:
    """Every passage that has a word of the question is scored, as in a small library."""
    bound = words_ranking._MOST_POSTINGS
    words_ranking._MOST_POSTINGS = 2**62
    try:
        yield
    finally:
        words_ranking._MOST_POSTINGS = bound


def _ask(question: str) -> float:
    started = time.process_time()
    answered = jobs.ask(question, TOP_K)
    if not answered.citations:
        raise RuntimeError(f"no answer to {question!r}: the benchmark measures nothing")
    return time.process_time() - started


def _ask_as_before(question: str) -> float:
    started = time.process_time()
    with _all_words():
        _as_before().answer(question, TOP_K)
    return time.process_time() - started


def _parts(asked: list[str]) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
    """Seconds of what an answer is made of, of each question: ours, control."""
    ours, control = _parts_of(jobs.opened_version(), asked), {}
    with _all_words():
        control = _parts_of(_as_before(), asked)
    return ours, control


def _parts_of(version: OpenVersion, asked: list[str]) -> dict[str, Seconds]:
    taken: dict[str, list[float]] = {}

    def timed(part: str, what: Callable[[], T]) -> T:
        started = time.perf_counter()
        done = what()
        taken.setdefault(part, []).append(time.perf_counter() - started)
        return done

    for question in asked:
        vector = timed("question", functools.partial(version.embed_question, question))
        timed("dense search", functools.partial(version.index.search, vector[np.newaxis], 50))
        timed("words", functools.partial(version.library.bm25, question, 50))
        hits, _ = timed("search", functools.partial(version.search, question, TOP_K))
        timed("sentences", functools.partial(version.generator.generate, question, hits))
    return {part: np.array(seconds[WARM_UP:]) for part, seconds in taken.items()}


# ---- drawn text ---------------------------------------------------------------------


def _words(spec: RetrieverSpec) -> list[str]:
    """5,000 words that are one token each, the commonest first."""
    vocabulary: dict[str, int] = retriever_for(spec).encoder.tokenizer.get_vocab()
    plain = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
    return sorted(plain, key=vocabulary.__getitem__)[:5000]


def _drawn(words: list[str], chance: np.random.Generator, size: tuple[int, ...]) -> Words:
    """Numbers of words: few are common and many are rare, as in any language (Zipf)."""
    chances = 1.0 / np.arange(1, len(words) + 1)
    return chance.choice(len(words), size=size, p=chances / chances.sum())


def _fill(spec: RetrieverSpec, state: StateFolder, words: list[str], passages: int) -> None:
    """A library of one-passage documents with a drawn feature for each and for its sentences."""
    encoder = retriever_for(spec).encoder
    rng = np.random.default_rng(SEED)
    drawn = _drawn(words, rng, (ENCODED, SENTENCES * SENTENCE_WORDS))
    encoded = encoder.encode([" ".join(words[word] for word in one) for one in drawn])
    splitter = SentenceSplitter(lambda text: len(text.split()), SENTENCES * SENTENCE_WORDS)
    with (
        Library.open(state.library) as library,
        closing(SentenceFeatures.open(state.sentences)) as kept,
    ):
        for start in range(0, passages, SLICE):
            size = (min(SLICE, passages - start), SENTENCES, SENTENCE_WORDS)
            drawn = _drawn(words, rng, size)
            library.put_documents(
                (_document(words, start + row, one) for row, one in enumerate(drawn)),
                splitter=splitter,
            )
        for start in range(1, passages + 1, SLICE):
            found = library.passages_by_rowid(range(start, start + SLICE))
            library.put_features(encoder.digest, list(found), _mixed(rng, encoded, len(found)))
            for passage in found.values():
                texts = [sentence.embedding_text for sentence in sentences_of(passage)]
                vectors = _mixed(rng, encoded, len(texts))
                kept.put(encoder.digest, passage.content, texts, vectors, whole=True)


def _document(words: list[str], number: int, drawn: Words) -> Document:
    sentences = [" ".join(words[word] for word in sentence) for sentence in drawn]
    title = " ".join(words[word] for word in drawn[0, :3])
    return Document(f"d{number}", title, " ".join(f"{one.capitalize()}." for one in sentences))


def _mixed(
    rng: np.random.Generator, encoded: NDArray[np.float32], count: int
) -> NDArray[np.float32]:
    """[count, d] vectors between three of those [n, d], of length 1."""
    rows = rng.integers(len(encoded), size=(count, 3))
    shares = rng.dirichlet(np.ones(3), count).astype(np.float32)  # [count, 3]
    vectors = np.einsum("ns,nsd->nd", shares, encoded[rows])
    mixed: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return mixed


def _questions(words: list[str], count: int) -> list[str]:
    rng = np.random.default_rng(SEED + 1)
    common = _drawn(words, rng, (count, 4))
    others = rng.integers(len(words), size=(count, 4))
    numbers = np.concatenate([common, others], axis=1)
    return [" ".join(words[word] for word in one).capitalize() + "?" for one in numbers]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--level", choices=get_args(RetrievalLevel), default="passage")
    wanted = parser.parse_args()
    for row in figures(wanted.level):
        if wanted.json:
            print(json.dumps(row))
        else:
            beside = f"control {row['control_value']}: {row['control']}; ratio {row['ratio']}"
            print(f"{row['name']}: {row['value']} {row['unit']} ({beside})")
