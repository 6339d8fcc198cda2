"""Jobs of the answering worker: open a model version, answer, evaluate.

The worker keeps one open version. A newer one is opened beside it and takes its
place only when all of it is sound, so a question always meets a whole version.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daemon.learning.evaluation import Metrics, judge
from daemon.learning.intervals import Interval, figures_of
from daemon.learning.jobs import load_serving
from daemon.learning.spec import RetrieverSpec
from daemon.retrieval.answering import Answered, OpenVersion
from daemon.retrieval.index import load_index
from daemon.retrieval.library import Library, LibraryCounts
from daemon.retrieval.search import reciprocal_rank_fusion

if TYPE_CHECKING:
    from daemon.learning.models import Retriever

Float32 = NDArray[np.float32]

# Passages judged for each question: several may be of one answer, and ten
# different answers must remain.
_EVALUATION_DEPTH = 100


class NotOpenError(Exception):
    """No model version is open in this worker (it is fresh, or was started anew)."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of the open version on one split.

    ``dense`` is what training changes; ``fused`` is what a question meets.
    ``figures``: of "dense", "bm25" and "fused" every metric of
    `daemon.learning.evaluation` with its interval; they stay at the site.
    """

    dense: Metrics
    fused: Metrics
    figures: dict[str, dict[str, Interval]]
    model_digest: bytes
    seconds: float


_open: OpenVersion | None = None


def open_version(
    spec: RetrieverSpec, library_path: Path, versions: Path, model_digest: bytes, index_path: Path
) -> None:
    """Make a model version with its index the one that answers.

    Raises EncoderError, VersionError, IndexDamaged or LibraryError; the version
    that was open before stays open then.
    """
    global _open
    retriever = _retriever(spec)
    index = load_index(index_path, model_digest)
    library = Library.open(library_path, read_only=True)
    # Last, all of it or nothing: the encoder is shared with the version before,
    # its parameters are what changes.
    try:
        load_serving(spec, retriever, versions, model_digest)
    except BaseException:
        library.close()
        raise
    previous, _open = _open, OpenVersion(retriever, index, library, model_digest)
    if previous is not None:
        previous.library.close()


def ask(question: str, top_k: int) -> Answered:
    """Answer a question from the open version; raises QuestionRefusedError, NotOpenError."""
    return _opened().answer(question, top_k)


def evaluate(split: str) -> Evaluation:
    """Score the open version on the library's pairs of that split ("test" unless chosen).

    Raises EvaluationError when there are none, NotOpenError.
    """
    started = time.monotonic()
    version = _opened()
    pairs = version.library.pairs(split)
    vectors = _query_vectors(version, [pair.query for pair in pairs])
    document_of = {passage.rowid: passage.document_id for passage in version.library.passages()}
    rankings: dict[str, list[list[str]]] = {"dense": [], "bm25": [], "fused": []}
    nearest, _ = version.index.search(vectors, _EVALUATION_DEPTH)
    for pair, labels in zip(pairs, nearest.tolist(), strict=True):
        by_words = [rowid for rowid, _ in version.library.bm25(pair.query, _EVALUATION_DEPTH)]
        both = [rowid for rowid, _ in reciprocal_rank_fusion([labels, by_words])]
        for name, found in (("dense", labels), ("bm25", by_words), ("fused", both)):
            rankings[name].append(_documents(found, document_of))
    positives = [set(pair.positives) for pair in pairs]
    judged = {name: judge(ranking, positives) for name, ranking in rankings.items()}
    return Evaluation(
        dense=judged["dense"].metrics(),
        fused=judged["fused"].metrics(),
        figures={name: figures_of(one) for name, one in judged.items()},
        model_digest=version.model_digest,
        seconds=time.monotonic() - started,
    )


def counts(library_path: Path) -> LibraryCounts:
    """Sizes of the library at that path; all zero where there is none yet."""
    if not library_path.exists():
        return LibraryCounts()
    with Library.open(library_path, read_only=True) as library:
        return library.counts()


def _opened() -> OpenVersion:
    if _open is None:
        raise NotOpenError("no model version is open yet: ingest documents, then ask again")
    return _open


@functools.lru_cache(maxsize=1)
def _retriever(spec: RetrieverSpec) -> Retriever:
    # Here, not at the top: the daemon's main process names these jobs and must
    # not load torch.
    from daemon.learning.models import open_retriever

    return open_retriever(spec)


def _query_vectors(version: OpenVersion, queries: list[str]) -> Float32:
    """float32 [n, d], from cached features where the learning worker left them."""
    retriever = version.retriever
    if not queries:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    if not retriever.uses_features:
        return retriever.embed_queries(queries)
    known = version.library.query_features(retriever.encoder.digest, queries)
    missing = [query for query in dict.fromkeys(queries) if query not in known]
    if missing:
        known.update(zip(missing, retriever.encoder.encode(missing), strict=True))
    return retriever.embed_queries(queries, np.stack([known[query] for query in queries]))


def _documents(labels: list[int], document_of: dict[int, str]) -> list[str]:
    """Documents by their best passage, each once; passages that are gone are passed over."""
    return list(dict.fromkeys(document_of[label] for label in labels if label in document_of))
