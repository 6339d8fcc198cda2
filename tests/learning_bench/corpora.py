"""Asking: a corpus held in memory, and the two kinds of rankers that search it.

Dense search here is exact (every cosine), so that a recipe is judged and not the
index. The daemon's index finds nearly all of it; its tests say how much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32
from daemon.learning.retriever.retriever import Retriever
from daemon.library.store import Library
from daemon.personal.store import PersonalState
from daemon.personal.tiered_head import take_up
from daemon.personal.tiers import TieredHeadRetriever
from daemon.personal.tuning import PersonalQueryRetriever
from tests.learning_bench.worlds import DataError

DEPTH = 100  # passages judged of each ranking, as `fedctl eval` has it
_QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Corpus:
    """A library's passages: documents, texts and frozen features [n, d], in one order."""

    path: Path
    documents: NDArray[np.str_]
    texts: tuple[str, ...]
    features: Float32


class Ranker(Protocol):
    """A trained (or untrained) way to search."""

    def rank(self, queries: Sequence[str], corpus: Corpus) -> list[list[str]]:
        """Documents for each query, best first, at most DEPTH passages deep."""


@lru_cache(maxsize=16)
def corpus_at(path: Path, encoder_digest: bytes) -> Corpus:
    """A library's passages with their features; raises DataError unless all have theirs."""
    with Library.open(path, read_only=True) as library:
        passages = library.passages()
        labels, features = library.features(encoder_digest)
    if [passage.rowid for passage in passages] != labels.tolist():
        raise DataError(f"{path}: not all passages are embedded yet")
    documents = np.array([passage.document_id for passage in passages])
    return Corpus(path, documents, tuple(p.embedding_text for p in passages), features)


@dataclass(frozen=True)
class Words:
    """BM25 over title and text, as the daemon has it."""

    def rank(self, queries: Sequence[str], corpus: Corpus) -> list[list[str]]:
        """See `Ranker`."""
        with Library.open(corpus.path, read_only=True) as library:
            document_of = {p.rowid: p.document_id for p in library.passages()}
            return [[document_of[rowid] for rowid, _ in library.bm25(q, DEPTH)] for q in queries]


@dataclass(frozen=True, eq=False)
class Dense:
    """A retriever with the parameters ``vector``, and a site's own; cosines of all passages."""

    retriever: Retriever
    vector: Float32
    own: PersonalState | None = None

    def rank(self, queries: Sequence[str], corpus: Corpus) -> list[list[str]]:
        """See `Ranker`."""
        self.retriever.load_vector(self.vector)
        if isinstance(self.retriever, TieredHeadRetriever):
            take_up(self.retriever, self.own)
        elif isinstance(self.retriever, PersonalQueryRetriever) and self.own is not None:
            self.retriever.load_personal(self.own.arrays)
        features = None
        if self.retriever.uses_features:
            with Library.open(corpus.path, read_only=True) as library:
                known = library.query_features(self.retriever.encoder.digest, queries)
            features = np.stack([known[query] for query in queries])
        asked = self.retriever.embed_queries(queries, features)
        told = self._told(corpus)
        rankings: list[list[str]] = []
        for start in range(0, len(asked), _QUERIES_AT_ONCE):
            for row in asked[start : start + _QUERIES_AT_ONCE] @ told.T:
                rankings.append(corpus.documents[_best(row)].tolist())
        return rankings

    def _told(self, corpus: Corpus) -> Float32:
        """The corpus embedded with these parameters: sites that share both share that work."""
        content = hashlib.sha256(self.vector.tobytes())
        # A query encoder changes no passage; a layer behind the head does.
        if self.own is not None and isinstance(self.retriever, TieredHeadRetriever):
            for name, values in sorted(self.own.arrays.items()):
                content.update(name.encode() + values.tobytes())
        key = (id(self.retriever), content.digest(), corpus.path)
        if key not in _embedded:
            if len(_embedded) >= _CORPORA_KEPT:
                _embedded.pop(next(iter(_embedded)))
            if self.retriever.uses_features:
                _embedded[key] = self.retriever.embed_passages(corpus.texts, corpus.features)
            else:
                _embedded[key] = self._encoded(content.digest(), corpus.texts)
        return _embedded[key]

    def _encoded(self, version: bytes, texts: Sequence[str]) -> Float32:
        """Through the whole encoder: a text that another corpus holds as well, once."""
        if _encoded_by.get("version") != version:
            _encoded_by.update(version=version, vectors={})
        vectors: dict[str, Float32] = _encoded_by["vectors"]
        missing = sorted({text for text in texts if text not in vectors}, key=len)
        if missing:
            vectors.update(zip(missing, self.retriever.embed_passages(missing), strict=True))
        return np.stack([vectors[text] for text in texts])


_embedded: dict[tuple[int, bytes, Path], Float32] = {}
_CORPORA_KEPT = 8
_encoded_by: dict[str, Any] = {}  # the last version, and its vectors by text


def _best(cosines: Float32) -> NDArray[np.int64]:
    """Rows of the DEPTH greatest, greatest first; equal ones by row."""
    depth = min(DEPTH, len(cosines))
    found = np.argpartition(-cosines, depth - 1)[:depth]
    return found[np.lexsort((found, -cosines[found]))]
