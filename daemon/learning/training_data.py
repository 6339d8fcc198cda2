"""What training and asking read from a library: pairs, texts, frozen features, negatives.

Features of the frozen backbone are computed once, where they are first needed, and
kept in the library under the encoder's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows
from daemon.learning.options import EmbeddingProgress, TrainingOptions
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library, Passage
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.training import TrainingSet
    from daemon.pairs.made import Made


_SLICE = 256  # texts embedded between two progress reports, and stored in one transaction
_ALL = 2**62  # no limit, as SQLite counts


def training_set(
    library: Library, retriever: Retriever, plan: TrainingOptions, spec: RetrieverSpec
) -> TrainingSet:
    """The site's pairs with positives and negatives among what may be learned from."""
    from daemon.learning.retriever.retriever import Texts
    from daemon.learning.training import TrainingSet
    from daemon.personal.tiering import rows_by_document

    passages = library.passages(split="train")
    queries, positives = usable_pairs(library, "train", rows_by_document(passages))
    if spec.learn_from == "made":
        queries, positives = [], []
    asked = Texts(queries, query_features(library, retriever, queries))
    told = Texts(
        [passage.embedding_text for passage in passages],
        passage_features(library, retriever, [passage.rowid for passage in passages]),
    )
    none = [np.empty(0, dtype=np.int64) for _ in positives]
    documents = [passage.document_id for passage in passages]
    pairs, sources = _with_made(
        library, retriever, spec, TrainingSet(asked, told, positives, none), documents
    )
    if plan.needs_parent and pairs.positives:
        asked, told = pairs.queries, pairs.passages
        parent = (
            retriever.embed_queries(asked.texts, asked.features),
            retriever.embed_passages(told.texts, told.features),
        )
        negatives = _negatives(library, passages, pairs, sources, parent, plan)
        pairs = replace(pairs, negatives=negatives, parent=parent)
    return pairs


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


def query_features(
    library: Library, retriever: Retriever, queries: Sequence[str]
) -> Float32 | None:
    """[n, d] frozen features of queries, encoded once and cached in the library."""
    if not retriever.uses_features:
        return None
    digest = retriever.encoder.digest
    known = library.query_features(digest, queries)
    missing = [query for query in dict.fromkeys(queries) if query not in known]
    if missing:
        vectors = retriever.encoder.encode(missing)
        library.put_query_features(digest, missing, vectors)
        known.update(zip(missing, vectors, strict=True))
    features = [known[query] for query in queries]
    return np.stack(features) if features else np.zeros((0, retriever.encoder.dimension), "<f4")


def passage_features(
    library: Library, retriever: Retriever, rowids: Sequence[int]
) -> Float32 | None:
    """[n, d] frozen features of those passages; what is missing is encoded first."""
    if not retriever.uses_features:
        return None
    embed_missing(library, retriever)
    labels, features = library.features(retriever.encoder.digest)  # labels ascend
    if not rowids:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    return features[np.searchsorted(labels, np.array(rowids, dtype=np.int64))]


def embed_missing(library: Library, retriever: Retriever) -> int:
    """Features of passages that have none yet, slice by slice; how many those were."""
    digest = retriever.encoder.digest
    missing = library.missing_features(digest, _ALL)
    missing.sort(key=lambda item: len(item[1]))  # equal lengths together: little padding
    for start in range(0, len(missing), _SLICE):
        some = missing[start : start + _SLICE]
        vectors = retriever.encoder.encode([text for _, text in some])
        library.put_features(digest, [rowid for rowid, _ in some], vectors)
        report(EmbeddingProgress(start + len(some), len(missing)))
    return len(missing)


def embedded(library: Library, retriever: Retriever) -> tuple[Rows, Float32]:
    """Labels [n] and current vectors [n, d] of every passage."""
    if retriever.uses_features:
        embed_missing(library, retriever)
        labels, features = library.features(retriever.encoder.digest)
        return labels, retriever.embed_passages([], features)
    passages = library.passages()
    vectors = np.zeros((len(passages), retriever.encoder.dimension), dtype=np.float32)
    for start in range(0, len(passages), _SLICE):
        some = [passage.embedding_text for passage in passages[start : start + _SLICE]]
        vectors[start : start + len(some)] = retriever.embed_passages(some)
        report(EmbeddingProgress(start + len(some), len(passages)))
    return np.array([passage.rowid for passage in passages], dtype=np.int64), vectors


def _with_made(
    library: Library,
    retriever: Retriever,
    spec: RetrieverSpec,
    supplied: TrainingSet,
    documents: list[str],
) -> tuple[TrainingSet, list[str]]:
    """The pairs made here added, if they are learned from; and each text's document.

    Of each pair stands beside its positives what else is right.
    """
    from daemon.pairs.learning import to_learn
    from daemon.pairs.made import with_made

    made = to_learn(spec, documents, supplied.queries.texts)
    queries = query_features(library, retriever, [pair.query for pair in made])
    pairs = with_made(supplied, made, queries, _made_features(library, retriever, supplied, made))
    source = {t: d for m in made for t, d in zip(m.texts, m.documents, strict=True)}
    sources = [*documents, *(source[text] for text in pairs.passages.texts[len(documents) :])]
    return replace(pairs, right=_all_right(pairs, sources)), sources


def _all_right(pairs: TrainingSet, sources: Sequence[str]) -> list[Rows]:
    """Of each pair the rows that answer it, whichever pair says so.

    Every part of an answer that it names, and what is named where the same is asked (case
    and white space aside): a question may stand on two lines, with an answer on each.
    """
    from daemon.evaluation.evaluation import answer_of

    rows_of: dict[str, list[int]] = {}
    for row, document in enumerate(sources):
        rows_of.setdefault(answer_of(document), []).append(row)
    asked = [" ".join(query.split()).casefold() for query in pairs.queries.texts]
    answers: dict[str, set[str]] = {}
    for query, rows in zip(asked, pairs.positives, strict=True):
        answers.setdefault(query, set()).update(answer_of(sources[row]) for row in rows)
    # One array a question, however many lines ask it: a thousand lines are not a million rows.
    right = {
        query: np.array(sorted(row for answer in them for row in rows_of[answer]), dtype=np.int64)
        for query, them in answers.items()
    }
    return [right[query] for query in asked]


def _made_features(
    library: Library, retriever: Retriever, supplied: TrainingSet, made: Sequence[Made]
) -> Float32 | None:
    """[n, d] frozen features of the made texts; those of passages are there already."""
    from daemon.pairs.made import texts_of

    known = supplied.passages.features
    if known is None:
        return None
    texts = texts_of(made)
    row_of = {text: row for row, text in enumerate(supplied.passages.texts)}
    vectors = np.zeros((len(texts), retriever.encoder.dimension), dtype=np.float32)
    others = [n for n, text in enumerate(texts) if text not in row_of]
    here = [n for n, text in enumerate(texts) if text in row_of]
    vectors[here] = known[[row_of[texts[n]] for n in here]]
    # Kept beside those of queries: to the encoder a text is a text.
    found = query_features(library, retriever, [texts[n] for n in others])
    vectors[others] = 0.0 if found is None else found
    return vectors


def _negatives(
    library: Library,
    passages: Sequence[Passage],
    pairs: TrainingSet,
    documents: Sequence[str],
    parent: tuple[Float32, Float32],
    plan: TrainingOptions,
) -> list[Rows]:
    """Hard negatives of each query, as the plan says; ``documents`` are those of the texts."""
    from daemon.learning.retriever.mining import candidates_for, filter_ranked, mine_negatives

    count = plan.hard_negatives if plan.negatives != "in_batch" else 0
    if plan.negatives != "bm25" or count == 0:
        return mine_negatives(*parent, documents, pairs.answers, count)
    row_of = {passage.rowid: row for row, passage in enumerate(passages)}  # of the train split
    ranked = []
    for query, right in zip(pairs.queries.texts, pairs.answers, strict=True):
        found = library.bm25(query, candidates_for(count, right))
        rows = [row_of[rowid] for rowid, _ in found if rowid in row_of]
        ranked.append(np.array(rows, dtype=np.int64))
    return filter_ranked(ranked, parent[1], documents, pairs.answers, count)
