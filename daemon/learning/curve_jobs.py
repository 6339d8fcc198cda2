"""The learning worker's job that judges one committed version on the site's validation pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daemon.learning import jobs, material
from daemon.learning.personal import embedded_by
from daemon.learning.spec import RetrieverSpec
from daemon.retrieval.library import Library

if TYPE_CHECKING:
    from daemon.learning.models import Retriever
    from daemon.retrieval.documents import Pair
    from daemon.retrieval.judging import Labels


@dataclass(frozen=True)
class VersionScores:
    """Means of every metric of `daemon.learning.evaluation`, over so many questions."""

    means: dict[str, float]
    questions: int


class NotIndexed(Exception):
    """The version can't be judged without its index, and that is not there (any more)."""


def judge_version(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    index_root: Path,
    model_digest: bytes,
    most: int,
) -> VersionScores:
    """Judge a version's own ranking on the pairs of split valid, at most ``most`` of them.

    Where features are cached all passages are searched; otherwise the version's
    index is, since to embed them anew would take longer than the training did. Raises
    NotIndexed, EvaluationError when there are no such pairs, VersionError, LibraryError.
    """
    from daemon.retrieval.judging import held_out, judged

    retriever = jobs.retriever_for(spec)
    with Library.open(library_path) as library:
        _, pairs = held_out(library, "valid", most=most)
        jobs.load_serving(spec, retriever, versions, model_digest)
        if retriever.uses_features and spec.personal == "none":
            found = _exact(library, retriever, pairs)
        else:
            embedded = embedded_by(spec.personal, spec.personal_folder, model_digest)
            found = _by_index(library, retriever, pairs, index_root, embedded)
        document_of = {passage.rowid: passage.document_id for passage in library.passages()}
        scores = judged(found, pairs, document_of)
    return VersionScores(scores.means(), scores.questions)


def _exact(library: Library, retriever: Retriever, pairs: list[Pair]) -> Labels:
    from daemon.retrieval.judging import exact

    queries = [pair.query for pair in pairs]
    asked = retriever.embed_queries(queries, material.query_features(library, retriever, queries))
    labels, vectors = material.embedded(library, retriever)
    return exact(asked, labels, vectors)


def _by_index(
    library: Library, retriever: Retriever, pairs: list[Pair], root: Path, embedded: bytes
) -> Labels:
    from daemon.retrieval import index
    from daemon.retrieval.judging import DEPTH

    path = index.index_path(root, embedded, library.content_digest())
    try:
        opened = index.load_index(path, embedded)
    except index.IndexDamaged as error:
        raise NotIndexed(str(error)) from error
    queries = [pair.query for pair in pairs]
    asked = retriever.embed_queries(queries, material.query_features(library, retriever, queries))
    labels, _ = opened.search(np.ascontiguousarray(asked), DEPTH)
    return [list(row) for row in labels.tolist()]
