"""What a site trains on: supplied pairs, made ones, or both, as its operator chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import answer_of
from daemon.library.store import Library
from daemon.pairs.made import Made, learnable, merged, read, texts_of, with_made

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet


def to_learn(spec: RetrieverSpec, documents: Sequence[str], supplied: Sequence[str]) -> list[Made]:
    """The made pairs that this site trains on; raises PairError when their file is damaged.

    ``documents`` are those that may be learned from, ``supplied`` the queries that
    are trained on beside them: to a query that somebody asked, his is the answer.
    One pair a query, whatever kinds made it.
    """
    if spec.learn_from == "supplied":
        return []
    queries = {" ".join(query.split()).casefold() for query in supplied}
    usable = learnable(read(Path(spec.made_pairs)), set(documents))
    return [pair for pair in merged(usable) if pair.query.casefold() not in queries]


def training_pairs(spec: RetrieverSpec, library: Library) -> int:
    """How many pairs this site would train on now; raises PairError as `to_learn`."""
    if spec.learn_from == "supplied":
        return library.counts().pairs_train
    documents = {passage.document_id for passage in library.passages(split="train")}
    supplied = [
        pair.query
        for pair in library.pairs("train")
        if spec.learn_from != "made" and not documents.isdisjoint(pair.positives)
    ]
    return len(supplied) + len(to_learn(spec, [*documents], supplied))


def training_set(
    library: Library, retriever: Retriever, plan: TrainingOptions, spec: RetrieverSpec
) -> TrainingSet:
    """The site's pairs with positives and negatives among what may be learned from."""
    from daemon.learning.retriever.encoder import Texts
    from daemon.learning.retriever.training import TrainingSet

    passages = library.passages(split="train")
    queries, positives = training_data.usable_pairs(
        library, "train", training_data.rows_by_document(passages)
    )
    if spec.learn_from == "made":
        queries, positives = [], []
    reading = retriever.encoder.reading
    query_texts = Texts(
        queries,
        training_data.query_features(library, retriever, queries),
        reading.query,
    )
    passage_texts = Texts(
        [passage.embedding_text for passage in passages],
        training_data.passage_features(library, retriever, [passage.rowid for passage in passages]),
        reading.passage,
    )
    none = [np.empty(0, dtype=np.int64) for _ in positives]
    documents = [passage.document_id for passage in passages]
    pairs, sources = _with_made(
        library,
        retriever,
        spec,
        TrainingSet(query_texts, passage_texts, positives, none),
        documents,
    )
    if plan.needs_parent and pairs.positives:
        query_texts, passage_texts = pairs.queries, pairs.passages
        parent = (
            retriever.embed_queries(query_texts.texts, query_texts.features),
            retriever.embed_passages(passage_texts.texts, passage_texts.features),
        )
        negatives = training_data.hard_negatives(library, passages, pairs, sources, parent, plan)
        pairs = replace(pairs, negatives=negatives, parent=parent)
    return pairs


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
    made = to_learn(spec, documents, supplied.queries.texts)
    queries = training_data.query_features(library, retriever, [pair.query for pair in made])
    pairs = with_made(supplied, made, queries, _made_features(library, retriever, supplied, made))
    source = {t: d for m in made for t, d in zip(m.texts, m.documents, strict=True)}
    sources = [*documents, *(source[text] for text in pairs.passages.texts[len(documents) :])]
    return replace(pairs, right=_all_right(pairs, sources)), sources


def _all_right(pairs: TrainingSet, sources: Sequence[str]) -> list[Rows]:
    """Of each pair the rows that answer it, whichever pair says so.

    Every part of an answer that it names, and what is named where the same is asked (case
    and white space aside): a question may stand on two lines, with an answer on each.
    """
    rows_of: dict[str, list[int]] = {}
    for row, document in enumerate(sources):
        rows_of.setdefault(answer_of(document), []).append(row)
    queries = [" ".join(query.split()).casefold() for query in pairs.queries.texts]
    answers: dict[str, set[str]] = {}
    for query, rows in zip(queries, pairs.positives, strict=True):
        answers.setdefault(query, set()).update(answer_of(sources[row]) for row in rows)
    # One array a question, however many lines ask it: a thousand lines are not a million rows.
    right = {
        query: np.array(sorted(row for answer in them for row in rows_of[answer]), dtype=np.int64)
        for query, them in answers.items()
    }
    return [right[query] for query in queries]


def _made_features(
    library: Library, retriever: Retriever, supplied: TrainingSet, made: Sequence[Made]
) -> Float32 | None:
    """[n, d] frozen features of the made texts; those of passages are there already."""
    known = supplied.passages.features
    if known is None:
        return None
    texts = texts_of(made)
    row_of = {text: row for row, text in enumerate(supplied.passages.texts)}
    vectors = np.zeros((len(texts), retriever.encoder.dimension), dtype=np.float32)
    others = [n for n, text in enumerate(texts) if text not in row_of]
    here = [n for n, text in enumerate(texts) if text in row_of]
    vectors[here] = known[[row_of[texts[n]] for n in here]]
    features = training_data.text_features(library, retriever, [texts[n] for n in others])
    vectors[others] = 0.0 if features is None else features
    return vectors
