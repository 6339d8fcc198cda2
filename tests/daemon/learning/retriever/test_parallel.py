"""A retriever trained in two processes is the one that one process trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.learning.options import TrainingError
from daemon.learning.parameters import copies_of
from daemon.learning.retriever import parallel
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.spec import RetrieverSpec
from tests.daemon.learning.retriever.test_training import OPTIONS, SUBJECTS, pairs_about
from tests.support.small_models import small_encoder

# Of what training changed, in the L2 norm. Measured: 2e-5 (full), 6e-6 (lora): the order of
# sums, and padding that reaches to the longest text of a slice and not of the batch.
TOLERANCE = 5e-4
# Everything at once that a loss is made of: the terms that go through embeddings, and those
# that do not.
HARD = replace(
    OPTIONS, local_epochs=3, batch_size=5, distill="pairs", proximal=0.1, weight_decay=0.01
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*SUBJECTS, "care", "keep"])
    return RetrieverSpec(encoder=str(folder), max_tokens=48, device="cpu", threads=2)


def retriever_of(spec: RetrieverSpec) -> Retriever:
    encoder = Encoder.load(spec.encoder, max_tokens=48, device="cpu", threads=1)
    return adapted(encoder, spec.adapt, rank=spec.lora_rank, alpha=spec.lora_alpha)


def trained(spec: RetrieverSpec) -> tuple[np.ndarray, list[tuple[int, float]]]:
    """The change of the shared vector, and what was told of each epoch."""
    retriever = retriever_of(spec)
    pairs = pairs_about(retriever.encoder, SUBJECTS[:9])  # batches of five and four
    assert pairs.queries.features is not None
    assert pairs.passages.features is not None
    pairs = replace(pairs, parent=(pairs.queries.features, pairs.passages.features))
    anchor = copies_of(retriever.shared_parameters())
    start = retriever.vector()
    # A student that has moved on from what the proximal term holds it to.
    retriever.load_vector(start + np.linspace(-1e-3, 1e-3, len(start), dtype=np.float32))
    epochs: list[tuple[int, float]] = []
    last = parallel.train(
        spec, retriever, pairs, HARD, 5, lambda epoch, loss: epochs.append((epoch, loss)), anchor
    )
    assert last == epochs[-1][1]
    return retriever.vector() - start, epochs


@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_two_processes_make_the_update_of_one(spec: RetrieverSpec, adapt: str) -> None:
    spec = replace(spec, adapt=adapt)  # type: ignore[arg-type]
    one, told = trained(spec)
    two, told_too = trained(replace(spec, processes=2))
    difference = float(np.linalg.norm(two - one) / np.linalg.norm(one))
    assert difference < TOLERANCE
    assert [epoch for epoch, _ in told] == [epoch for epoch, _ in told_too] == [1, 2, 3]
    np.testing.assert_allclose(
        [loss for _, loss in told_too], [loss for _, loss in told], rtol=1e-4
    )


def test_a_loss_that_is_not_finite_is_told_and_changes_nothing(spec: RetrieverSpec) -> None:
    spec = replace(spec, adapt="lora", processes=2)
    retriever = retriever_of(spec)
    before = retriever.vector().tobytes()
    pairs, hot = pairs_about(retriever.encoder), replace(OPTIONS, temperature=1e-45)
    with pytest.raises(TrainingError, match=r"the training loss became .* no update was made"):
        parallel.train(spec, retriever, pairs, hot, 1)
    assert retriever.vector().tobytes() == before


def test_a_head_on_cached_features_trains_in_one_process(
    spec: RetrieverSpec, tmp_path: Path
) -> None:
    gone = replace(spec, encoder=str(tmp_path / "nowhere"), adapt="head", processes=2)
    retriever = retriever_of(replace(spec, adapt="head"))
    parallel.train(gone, retriever, pairs_about(retriever.encoder), OPTIONS, 1)
    assert retriever.vector().any(), "a second process would have looked for the encoder"
