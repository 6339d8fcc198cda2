"""The learning worker's job that judges one committed version on the site's validation pairs.

As what it can be judged, its *kind*:

=========  ==========================================================================
shared     the version as it was committed, and as every site has it
any other  with what is this site's own beside it, by which the site answers: a name of
           `retriever.personal`. Where the version answers nowhere without that
           (`Layer.pinned_by_index`), "shared" is what there was before the site had it
=========  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.personal.layers import layer_of
from daemon.personal.serving import load_serving, load_version, retriever_for, store_of
from daemon.personal.store import embedded_by, own_digest

if TYPE_CHECKING:
    from daemon.evaluation.rankings import Labels
    from daemon.learning.retriever.retriever import Retriever
    from daemon.library.readers.documents import Pair

SHARED = "shared"


@dataclass(frozen=True)
class VersionScores:
    """Means of every metric of `daemon.evaluation.evaluation`, over so many questions.

    ``own_digest`` is that of `kinds_of`.
    """

    kind: str
    own_digest: bytes
    means: dict[str, float]
    questions: int


class NotIndexed(Exception):
    """The version can't be judged without its index, and that is not there (any more)."""


def kinds_of(spec: RetrieverSpec, model_digest: bytes) -> dict[str, bytes]:
    """As what a version can be judged here, and the digest of the site's own in it.

    That of "shared" is empty. Reads a file.
    """
    layer = layer_of(spec)
    own = own_digest(spec.personal_folder, model_digest) if layer.kept else b""
    if not own:
        return {SHARED: b""}
    return {layer.name: own} if layer.pinned_by_index else {SHARED: b"", layer.name: own}


def judge_version(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    index_root: Path,
    model_digest: bytes,
    most: int,
    known: frozenset[bytes] = frozenset(),
) -> list[VersionScores]:
    """Judge a version's own ranking on the pairs of split valid, at most ``most`` of them.

    As each of `kinds_of` whose digest is not among the ``known``. Where features are
    cached all passages are searched; otherwise the index is that the passages went into,
    since to embed them anew would take longer than the training did, and a kind without
    one is left out. Raises NotIndexed when nothing is known then, EvaluationError when
    there are no such pairs, VersionError, LibraryError.
    """
    from daemon.evaluation.rankings import held_out, judged

    retriever = retriever_for(spec)
    kinds = _sound_kinds(spec, retriever, model_digest)
    scores: list[VersionScores] = []
    missing: NotIndexed | None = None
    with Library.open(library_path) as library:
        _, pairs = held_out(library, "valid", most=most)
        document_of = library.document_of()
        for kind, own in kinds.items():
            if own in known:
                continue
            if kind == SHARED and not layer_of(spec).pinned_by_index:
                load_version(retriever, versions, model_digest)
            else:
                load_serving(spec, retriever, versions, model_digest)
            # The shared one has an index of its own as long as the site's own has none.
            by_own = kind != SHARED or len(kinds) == 1
            embedded = _embedded_by(spec, model_digest) if by_own else model_digest
            try:
                labels = _hits(library, retriever, pairs, spec, index_root, embedded)
            except NotIndexed as error:
                missing = error
                continue
            scored = judged(labels, pairs, document_of)
            scores.append(VersionScores(kind, own, scored.means(), scored.questions))
    if missing is not None and not scores and not known:
        raise missing
    return scores


def _sound_kinds(
    spec: RetrieverSpec, retriever: Retriever, model_digest: bytes
) -> dict[str, bytes]:
    """`kinds_of`, without a file of another retriever or another setting: it is not used."""
    kinds = kinds_of(spec, model_digest)
    if spec.personal not in kinds:
        return kinds
    state = store_of(spec, retriever).serving(model_digest)
    return kinds if layer_of(spec).holds(state) else {SHARED: b""}


def _embedded_by(spec: RetrieverSpec, model_digest: bytes) -> bytes:
    return embedded_by(spec.personal, spec.personal_folder, model_digest)


def _hits(
    library: Library,
    retriever: Retriever,
    pairs: list[Pair],
    spec: RetrieverSpec,
    root: Path,
    embedded: bytes,
) -> Labels:
    queries = [pair.query for pair in pairs]
    vectors = retriever.embed_queries(
        queries, training_data.query_features(library, retriever, queries)
    )
    # What is pinned to the version when the index is made is not known before.
    if retriever.uses_features and not layer_of(spec).pinned_by_index:
        from daemon.evaluation.rankings import exact

        return exact(vectors, *training_data.embedded(library, retriever))
    from daemon.evaluation.rankings import DEPTH
    from daemon.library.dense import folder as index_folder

    path = index_folder.index_path(root, embedded, library.content_digest())
    try:
        opened = index_folder.load_index(path, embedded, options=spec.index)
    except index_folder.IndexDamaged as error:
        raise NotIndexed(str(error)) from error
    labels, _ = opened.search(np.ascontiguousarray(vectors), DEPTH)
    return [list(row) for row in labels.tolist()]
