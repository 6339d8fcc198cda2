"""From a version's digest to a retriever that answers with it, and with what is the site's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from crypto.arrays import Float32
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.layers import layer_of
from daemon.personal.store import PersonalStore
from daemon.state.versions import read_version

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever


def open_retriever(spec: RetrieverSpec) -> Retriever:
    """Load the encoder, put the chosen adaptation and layer on it, at its starting vector.

    Raises EncoderError when the encoder cannot be had, LearningError when the
    adaptation or the layer does not fit it.
    """
    from daemon.learning.retriever.encoder import Encoder

    encoder = Encoder.load(
        spec.encoder,
        max_tokens=spec.max_tokens,
        device=spec.device,
        threads=spec.threads,
        options=spec.reading,
    )
    return layer_of(spec).on(encoder, spec)


@functools.lru_cache(maxsize=1)
def retriever_for(spec: RetrieverSpec) -> Retriever:
    """The worker's one loaded retriever; raises EncoderError when it cannot be had."""
    return open_retriever(spec)


def store_of(spec: RetrieverSpec, retriever: Retriever) -> PersonalStore:
    """Where this site keeps what is its own for this kind of retriever."""
    return PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)


def load_version(retriever: Retriever, versions: Path, digest: bytes) -> Float32:
    """Make the version current, and give its vector; raises VersionError."""
    vector = read_version(versions, digest, retriever.shape_manifest.digest)
    retriever.load_vector(vector)
    return vector


def load_serving(
    spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes
) -> None:
    """Make a version current as it answers: with the personal layer it was indexed with.

    Raises VersionError when the version is missing or damaged, LearningError when the
    site's personal parameters are; the retriever stays as it was then.
    """
    layer = layer_of(spec)
    vector = read_version(versions, model_digest, retriever.shape_manifest.digest)
    state = store_of(spec, retriever).serving(model_digest) if layer.kept else None
    layer.load(retriever, vector, state)
