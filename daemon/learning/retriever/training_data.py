"""What training and asking read from a library: pairs, texts, frozen features, negatives.

Features of the frozen backbone are computed once, where they are first needed, and
kept in the library under the encoder's digest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows
from daemon.learning.options import EmbeddingProgress, TrainingOptions
from daemon.library.contents import Passage
from daemon.library.store import Library
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Encoder
    from daemon.learning.retriever.reading import Side
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet


_SLICE = 64  # texts embedded between two progress reports, and stored in one transaction
_ALL = 2**62  # no limit, as SQLite counts


def usable_pairs(
    library: Library, split: str, rows_of: dict[str, list[int]]
) -> tuple[list[str], list[Rows]]:
    """Queries of a split, and for each the rows of its positives: those that have any."""
    queries: list[str] = []
    positives: list[Rows] = []
    for pair in library.pairs(split):
        right = [row for document in pair.positives for row in rows_of.get(document, ())]
        if right:  # a pair whose documents are all held out teaches nothing
            queries.append(pair.query)
            positives.append(np.unique(np.array(right, dtype=np.int64)))
    return queries, positives


def rows_by_document(passages: Sequence[Passage]) -> dict[str, list[int]]:
    """Where in a table each document's passages are."""
    rows: dict[str, list[int]] = {}
    for row, passage in enumerate(passages):
        rows.setdefault(passage.document_id, []).append(row)
    return rows


def query_features(
    library: Library, retriever: Retriever, queries: Sequence[str]
) -> Float32 | None:
    """[n, d] frozen features of queries, encoded once and cached in the library."""
    if not retriever.uses_features:
        return None
    return frozen_queries(library, retriever.encoder, queries, keep=True)


def text_features(library: Library, retriever: Retriever, texts: Sequence[str]) -> Float32 | None:
    """[n, d] frozen features of texts that are no passage here, and are read as passages are."""
    if not retriever.uses_features:
        return None
    reading = retriever.encoder.reading
    return _frozen(library, retriever.encoder, texts, reading.passage, keep=True)


def frozen_queries(
    library: Library, encoder: Encoder, queries: Sequence[str], *, keep: bool = False
) -> Float32:
    """[n, d] what the encoder alone makes of queries: those in the library's cache, and the rest.

    ``keep``: what was encoded is put there; the library must be open for writing.
    """
    return _frozen(library, encoder, queries, encoder.reading.query, keep=keep)


def _frozen(
    library: Library, encoder: Encoder, texts: Sequence[str], side: Side, *, keep: bool
) -> Float32:
    # What is read as a query is kept under its text, however queries are read; the encoder's
    # digest has that. Where passages are read otherwise, what is read as they are is apart.
    asked = side == encoder.reading.query
    key_of = {text: text if asked else f"{side.prompt}\0{text}" for text in texts}
    known = library.query_features(encoder.digest, list(key_of.values()))
    missing = [text for text, key in key_of.items() if key not in known]
    if missing:
        vectors = encoder.encode(missing, side=side)
        keys = [key_of[text] for text in missing]
        if keep:
            library.put_query_features(encoder.digest, keys, vectors)
        known.update(zip(keys, vectors, strict=True))
    features = [known[key_of[text]] for text in texts]
    return np.stack(features) if features else np.zeros((0, encoder.dimension), "<f4")


def passage_features(
    library: Library, retriever: Retriever, rowids: Sequence[int]
) -> Float32 | None:
    """[n, d] frozen features of those passages; what is missing is encoded first."""
    if not retriever.uses_features:
        return None
    embed_missing(library, retriever.encoder)
    labels, features = library.features(retriever.encoder.digest)  # labels ascend
    if not rowids:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    return features[np.searchsorted(labels, np.array(rowids, dtype=np.int64))]


def embed_missing(
    library: Library, encoder: Encoder, seconds: float = math.inf
) -> EmbeddingProgress:
    """Features of passages that have none yet, slice by slice: of how many, of how many.

    For so many ``seconds`` and one slice more; reports `EmbeddingProgress`, and what is done
    stays done when it is cut short.
    """
    until = time.monotonic() + seconds
    missing = library.missing_features(encoder.digest, _ALL)
    missing.sort(key=lambda item: len(item[1]))  # equal lengths together: little padding
    progress = EmbeddingProgress(0, len(missing))
    while progress.done < len(missing) and (not progress.done or time.monotonic() < until):
        some = missing[progress.done : progress.done + _SLICE]
        vectors = encoder.encode([text for _, text in some], side=encoder.reading.passage)
        library.put_features(encoder.digest, [rowid for rowid, _ in some], vectors)
        progress = EmbeddingProgress(progress.done + len(some), len(missing))
        report(progress)
    return progress


def embedded(
    library: Library, retriever: Retriever, rowids: Sequence[int] | None = None
) -> tuple[Rows, Float32]:
    """Labels [n], ascending, and current vectors [n, d] of every passage, or of these."""
    if retriever.uses_features:
        embed_missing(library, retriever.encoder)
        labels, features = library.features(retriever.encoder.digest, rowids)
        return labels, retriever.embed_passages([], features)
    if rowids is None:
        passages = library.passages()
    else:
        passages = sorted(library.passages_by_rowid(rowids).values(), key=lambda one: one.rowid)
    vectors = np.zeros((len(passages), retriever.encoder.dimension), dtype=np.float32)
    for start in range(0, len(passages), _SLICE):
        some = [passage.embedding_text for passage in passages[start : start + _SLICE]]
        vectors[start : start + len(some)] = retriever.embed_passages(some)
        report(EmbeddingProgress(start + len(some), len(passages)))
    return np.array([passage.rowid for passage in passages], dtype=np.int64), vectors


def hard_negatives(
    library: Library,
    passages: Sequence[Passage],
    pairs: TrainingSet,
    documents: Sequence[str],
    parent: tuple[Float32, Float32],
    options: TrainingOptions,
) -> list[Rows]:
    """Hard negatives of each query, as the options say; ``documents`` are those of the texts."""
    from daemon.learning.retriever.mining import candidates_for, filter_ranked, mine_negatives

    count = options.hard_negatives if options.negatives != "in_batch" else 0
    if options.negatives != "bm25" or count == 0:
        return mine_negatives(*parent, documents, pairs.answers, count)
    row_of = {passage.rowid: row for row, passage in enumerate(passages)}  # of the train split
    ranked = []
    for query, right in zip(pairs.queries.texts, pairs.answers, strict=True):
        hits = library.bm25(query, candidates_for(count, right))
        rows = [row_of[rowid] for rowid, _ in hits if rowid in row_of]
        ranked.append(np.array(rows, dtype=np.int64))
    return filter_ranked(ranked, parent[1], documents, pairs.answers, count)
