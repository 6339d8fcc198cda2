"""The inversion audit as a worker's job: a site's texts under one model version.

The attackers are thrown away with the worker: no text and no trained value leaves it
but figures, and examples when the operator asks for some. Nothing heavy is imported
before the job runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32
from daemon.inversion.exposure import AuditOptions, Exposure, ExposureError, ExposureProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training_data import frozen_queries
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.inversion.inversion_audit import Divided
    from daemon.learning.retriever.retriever import Retriever
    from daemon.library.contents import Passage
    from daemon.library.store import Library


def audit_embeddings(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: AuditOptions,
) -> Exposure:
    """Audit the embeddings of this site's texts under one model version.

    Reports `ExposureProgress`. Raises ExposureError when there is too little to audit,
    VersionError or EncoderError when the version or the encoder cannot be had.
    """
    from daemon.inversion.inversion_audit import audit_vectors

    report(ExposureProgress("texts", 0.0))  # before torch is loaded: people see that it began
    options.check()
    started = time.monotonic()
    embedded = embedded_texts(spec, library_path, versions, model_digest)
    texts, vectors, queries, retriever = embedded
    seed = model_digest  # of the projections: public, as it is between sites
    return audit_vectors(texts, vectors, queries, retriever, seed, options, started)


def embedded_texts(
    spec: RetrieverSpec, library_path: Path, versions: Path, model_digest: bytes
) -> tuple[Divided, Float32, Float32, Retriever]:
    """A site's texts, their embeddings under a version (passages [n, d], queries [q, d])."""
    from daemon.inversion.inversion_audit import divided
    from daemon.library.store import Library
    from daemon.personal.serving import load_serving, open_retriever

    with Library.open(library_path, read_only=True) as library:
        texts = divided(library)
        retriever = open_retriever(spec)
        load_serving(spec, retriever, versions, model_digest)
        vectors = _passage_vectors(library, retriever, texts.passages)
        return texts, vectors, _query_vectors(library, retriever, texts.queries), retriever


def _passage_vectors(
    library: Library, retriever: Retriever, passages: Sequence[Passage]
) -> Float32:
    """[n, d] as the version embeds them."""
    if not retriever.uses_features:
        return retriever.embed_passages([passage.embedding_text for passage in passages])
    labels, features = library.features(retriever.encoder.digest)
    if len(labels) != len(passages):
        raise ExposureError(
            f"{len(passages) - len(labels)} of {len(passages)} passages are not embedded yet: "
            "wait until `fedctl ingest` has ended"
        )
    return retriever.embed_passages([], features)


def _query_vectors(library: Library, retriever: Retriever, queries: Sequence[str]) -> Float32:
    """[q, d] as the version embeds them; what has no cached features is encoded."""
    if not queries:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    if not retriever.uses_features:
        return retriever.embed_queries(queries)
    return retriever.embed_queries([], frozen_queries(library, retriever.encoder, queries))
