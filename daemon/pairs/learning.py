"""What a site trains on: supplied pairs, made ones, or both, as its operator chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.pairs.made import Made, learnable, merged, read


def to_learn(spec: RetrieverSpec, documents: Sequence[str], supplied: Sequence[str]) -> list[Made]:
    """The made pairs that this site trains on; raises PairError when their file is damaged.

    ``documents`` are those that may be learned from, ``supplied`` the queries that
    are trained on beside them: to a query that somebody asked, his is the answer.
    One pair a query, whatever kinds made it.
    """
    if spec.learn_from == "supplied":
        return []
    asked = {" ".join(query.split()).casefold() for query in supplied}
    usable = learnable(read(Path(spec.made_pairs)), set(documents))
    return [pair for pair in merged(usable) if pair.query.casefold() not in asked]


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
