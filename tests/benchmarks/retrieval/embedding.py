"""A corpus as the frozen encoder embeds it, read in one way or another, and kept in a file."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from config.kinds import RetrievalLevel
from crypto.arrays import Float32, Int64
from daemon.answering.embedding import Sentence
from daemon.answering.extractive import sentences_of
from daemon.jobs import learning
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.dense.index import DenseIndex, build_index
from daemon.library.levels import Sentences
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from tests.benchmarks.retrieval.corpora import Corpus

LIBRARY = "library.sqlite3"
PASSAGE_TOKENS = 220
_MOST_BYTES = 8 << 30
_AT_ONCE = 64  # passages whose sentences are encoded together


def library_of(corpus: Corpus, spec: RetrieverSpec, cache: Path) -> Path:
    """The corpus as a site's library, kept in ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / LIBRARY
    learning.ingest(spec, path, corpus.documents, [], PASSAGE_TOKENS)
    return path


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
        # A third of the time, where the processor knows such numbers (elsewhere several times as
        # long); no vector is further than a cosine of 0.996 from the full one.
        quick = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._model = copy.deepcopy(encoder.model).to(torch.bfloat16) if quick else encoder.model
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
    def vectors(self) -> tuple[Int64, Float32]:
        """Labels [n], ascending, and vectors [n, d] of all passages."""
        vectors = self._encoded(
            b"passages", self.passages.values(), lambda one: [self._read.of_passage(one)]
        )
        labels = np.array(sorted(vectors), np.int64)
        return labels, np.concatenate([vectors[label] for label in labels.tolist()])

    @cached_property
    def index(self) -> DenseIndex:
        """The passages, to be searched."""
        return build_index(*self.vectors)

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


def _told(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total or done % (_AT_ONCE * 50) == 0:
        print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
