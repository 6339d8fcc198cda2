"""What trains and what is exchanged: all weights, projected weights, a site's own student."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from crypto.durable import sweep
from daemon.learning.adaptations import onto_columns, onto_rows
from daemon.learning.options import LearningError, TrainingOptions
from daemon.learning.parameters import copies_of
from daemon.learning.retriever.adaptations import (
    FullRetriever,
    LoraServerRetriever,
)
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.heads import Dropout, HeadRetriever
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.training import TrainingSet, fit
from daemon.personal.store import PersonalState, PersonalStore
from tests.support.small_models import small_encoder

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
OPTIONS = TrainingOptions(local_epochs=2, batch_size=4, learning_rate=1e-3, hard_negatives=0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*SUBJECTS, "care", "keep"])
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


def pairs_of(retriever: Retriever) -> TrainingSet:
    queries = [f"what care does the {subject} need?" for subject in SUBJECTS]
    passages = [f"keep the {subject} dry." for subject in SUBJECTS]
    asked = Texts(queries, retriever.encoder.encode(queries))
    told = Texts(passages, retriever.encoder.encode(passages))
    rows = np.arange(len(SUBJECTS))
    return TrainingSet(
        asked,
        told,
        positives=[rows[i : i + 1] for i in rows],
        negatives=[np.empty(0, dtype=np.int64)] * len(rows),
        parent=(
            retriever.embed_queries(queries, asked.features),
            retriever.embed_passages(passages, told.features),
        ),
    )


@pytest.mark.parametrize("adapt", ["full", "lora_server"])
def test_a_fresh_one_is_its_encoder_and_training_changes_it(encoder: Encoder, adapt: str) -> None:
    retriever = adapted(encoder, adapt)
    texts = ["keep the pump dry."]
    np.testing.assert_allclose(retriever.embed_passages(texts), encoder.encode(texts), atol=1e-6)
    start = retriever.vector()
    assert start.tobytes() == retriever.initial_vector().tobytes()
    before = encoder.encode(texts)
    fit(retriever, pairs_of(retriever), OPTIONS, 1)
    assert np.abs(retriever.vector() - start).max() > 0
    assert np.array_equal(encoder.encode(texts), before), "the encoder itself is never trained"


def test_all_weights_but_the_poolers_are_exchanged(encoder: Encoder) -> None:
    weights = sum(
        value.numel()
        for name, value in encoder.model.named_parameters()
        if not name.startswith("pooler")
    )
    assert FullRetriever(encoder).shape_manifest.total == weights


# ---- projected weights --------------------------------------------------------------


def test_projections_by_hand() -> None:
    change = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert onto_rows(change, torch.tensor([[2.0, 0.0]])).tolist() == [[0.5], [1.5]]
    assert onto_columns(change, torch.tensor([[0.0], [2.0]])).tolist() == [[1.5, 2.0]]
    assert onto_columns(change, torch.zeros(2, 1)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("round_", [1, 2])
def test_the_mean_of_projections_is_the_projection_of_the_mean(
    encoder: Encoder, round_: int
) -> None:
    retriever = LoraServerRetriever(encoder, rank=3)
    chance = np.random.default_rng(0)
    parent = retriever.initial_vector()
    if round_ == 2:  # factors of a version on the way
        parent += np.float32(0.1) * chance.standard_normal(parent.size, dtype=np.float32)
    weights = retriever.parameters()
    torch.manual_seed(0)
    moves = [[0.01 * torch.randn(w.shape) for w in weights] for _ in range(2)]
    mean = [(a + b) / 2 for a, b in zip(*moves, strict=True)]

    def shared(changes: list[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        retriever.begin(round=round_, dropout=0.0, seed=0)
        retriever.load_vector(parent)
        with torch.no_grad():
            for weight, change in zip(weights, changes, strict=True):
                weight.add_(change)
        return retriever.vector() - parent

    apart = (shared(moves[0]) + shared(moves[1])) / 2
    np.testing.assert_allclose(apart, shared(mean), atol=2e-5)
    kinds = {
        name[-1]
        for name, part in retriever.shape_manifest.split(shared(mean)).items()
        if part.any()
    }
    assert kinds == ({"B"} if round_ == 1 else {"A"}), "one factor a round, the other is common"


def test_alternate_rounds_come_near_to_a_change_of_low_rank(encoder: Encoder) -> None:
    """Subspace iteration: what rank r can hold is recovered, though A starts at random."""
    retriever = LoraServerRetriever(encoder, rank=2)
    generator = torch.Generator().manual_seed(1)
    start = [weight.detach().clone() for weight in retriever.parameters()]
    wanted = [
        weight
        + 0.1
        * torch.randn(weight.shape[0], 2, generator=generator)
        @ torch.randn(2, weight.shape[1], generator=generator)
        for weight in start
    ]
    missing: list[float] = []
    for round_ in (1, 2, 3):
        retriever.begin(round=round_, dropout=0.0, seed=0)
        with torch.no_grad():
            for weight, target in zip(retriever.parameters(), wanted, strict=True):
                weight.copy_(target)
        retriever.load_vector(retriever.vector())
        weights = zip(copies_of(retriever.shared_parameters()), wanted, start, strict=True)
        missing.append(max(float((w - t).norm() / (t - s).norm()) for w, t, s in weights))
    assert missing[0] > 0.5, "a random subspace holds little of it"
    assert missing[1] < 0.05


# ---- terms of the loss ----------------------------------------------------------------


def distance(retriever: Retriever, start: list[torch.Tensor]) -> float:
    moved = zip(copies_of(retriever.shared_parameters()), start, strict=True)
    return math.sqrt(sum(float((value - origin).square().sum()) for value, origin in moved))


def test_the_proximal_term_holds_the_parameters_back(encoder: Encoder) -> None:
    moved = []
    for mu in (0.0, 10.0):
        retriever = HeadRetriever(encoder)
        start = copies_of(retriever.shared_parameters())
        fit(retriever, pairs_of(retriever), replace(OPTIONS, proximal=mu), 1)
        moved.append(distance(retriever, start))
    assert moved[1] < 0.7 * moved[0]


@pytest.mark.parametrize("distill", ["pairs", "matrix"])
def test_distillation_holds_the_cosines_back(
    encoder: Encoder, distill: Literal["pairs", "matrix"]
) -> None:
    drift = []
    for weight in (0.0, 1000.0):
        retriever = HeadRetriever(encoder)
        pairs = pairs_of(retriever)
        assert pairs.parent is not None
        options = replace(OPTIONS, distill=distill, kd_weight=weight, local_epochs=8)
        fit(retriever, pairs, options, 1)
        queries = retriever.embed_queries(pairs.queries.texts, pairs.queries.features)
        passages = retriever.embed_passages(pairs.passages.texts, pairs.passages.features)
        before = pairs.parent[0] @ pairs.parent[1].T
        change = queries @ passages.T - before
        drift.append(float(np.abs(np.diag(change) if distill == "pairs" else change).mean()))
    assert drift[1] < 0.5 * drift[0]


def test_the_reported_loss_is_the_contrastive_one_alone(encoder: Encoder) -> None:
    """Else its number, which travels, could not be compared, and would pass its bound."""
    losses = []
    for options in (OPTIONS, replace(OPTIONS, distill="matrix", kd_weight=1e6, proximal=1e6)):
        retriever = HeadRetriever(encoder)
        still = replace(options, learning_rate=1e-12, local_epochs=1)
        losses.append(fit(retriever, pairs_of(retriever), still, 1))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_batches_by_topic_and_random_negatives_train(encoder: Encoder) -> None:
    vectors = set()
    for options in (
        OPTIONS,
        replace(OPTIONS, batches="topic"),
        replace(OPTIONS, random_negatives=2),
        replace(OPTIONS, dropout=0.3),
    ):
        made = []
        for _ in range(2):
            retriever = HeadRetriever(encoder)
            retriever.begin(round=1, dropout=options.dropout, seed=5)
            fit(retriever, pairs_of(retriever), options, 5)
            made.append(retriever.vector().tobytes())
        assert made[0] == made[1], "a run can be repeated"
        vectors.add(made[0])
    assert len(vectors) == 4


def test_dropout_keeps_the_mean_and_drops_a_share() -> None:
    out = Dropout(0.25, seed=3)(torch.ones(200, 200))
    assert float((out == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)
    with pytest.raises(LearningError, match="dropout rate"):
        Dropout(1.0, seed=0)


# ---- what a site keeps ------------------------------------------------------------------


def state(value: float) -> PersonalState:
    return PersonalState({"student": np.full(4, value, dtype=np.float32)}, {"value": value})


def test_training_starts_from_an_earlier_round_never_from_its_own(tmp_path: Path) -> None:
    store = PersonalStore(tmp_path / "personal", b"\x01" * 32)
    assert store.before(5) is None
    for round_ in (1, 2, 4):
        store.keep(round_, state(round_))
    assert [s.facts["value"] for r in (2, 3, 4, 5) if (s := store.before(r))] == [1, 2, 2, 4]
    store.keep(4, state(4.5))  # a second attempt
    assert (found := store.before(5)) is not None
    assert found.arrays["student"].tolist() == [4.5] * 4
    store.keep(12, state(12))
    assert store.before(2) is None, "old rounds go"


def test_what_belongs_to_another_retriever_is_passed_over(tmp_path: Path) -> None:
    PersonalStore(tmp_path, b"\x01" * 32).keep(1, state(1))
    other = PersonalStore(tmp_path, b"\x02" * 32)
    assert other.before(2) is None
    assert not other.pin(b"\x07" * 32)


def test_a_version_answers_with_what_it_was_indexed_with(tmp_path: Path) -> None:
    store = PersonalStore(tmp_path, b"\x01" * 32)
    first, second = b"\x0a" * 32, b"\x0b" * 32
    assert not store.pin(first), "nothing to pin"
    store.keep(1, state(1))
    assert store.pin(first)
    store.keep(2, state(2))
    assert not store.pin(first), "pinned already"
    assert store.pin(second)
    served = [store.serving(digest) for digest in (first, second, b"\x0c" * 32)]
    assert [s and s.facts["value"] for s in served] == [1, 2, None]


def test_a_damaged_file_says_what_to_do_and_leftovers_go(tmp_path: Path) -> None:
    store = PersonalStore(tmp_path, b"\x01" * 32)
    store.keep(1, state(1))
    (tmp_path / "round-1.safetensors").write_bytes(b"damaged")
    with pytest.raises(LearningError, match="delete the file to begin"):
        store.before(2)
    (tmp_path / ".new-0011").write_bytes(b"half")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["round-1.safetensors"]
