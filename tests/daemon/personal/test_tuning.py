"""A site's own query encoder: what trains, what the loss counts, when it is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from crypto.arrays import Float32
from daemon.learning.options import LearningError, TrainingError, TrainingOptions
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.retriever import adapted
from daemon.learning.retriever.training import TrainingSet
from daemon.personal import tuning
from daemon.personal.held_out import Validation
from daemon.personal.tuning import PersonalQueryRetriever, tune
from tests.support.small_models import small_encoder

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln", "loom", "mill"]
OPTIONS = TrainingOptions(
    local_epochs=8, batch_size=4, learning_rate=3e-3, hard_negatives=2, temperature=0.05
)
AXES = torch.eye(3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*SUBJECTS, "care", "keep"])
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


def pairs_about(encoder: Encoder, subjects: list[str] = SUBJECTS) -> TrainingSet:
    queries = [f"what care does the {subject} need?" for subject in subjects]
    passages = [f"keep the {subject} dry, and it will serve for years." for subject in subjects]
    rows = np.arange(len(subjects))
    features = encoder.encode(queries), encoder.encode(passages)
    return TrainingSet(
        Texts(queries, features[0]),
        Texts(passages, features[1]),
        positives=[rows[i : i + 1] for i in rows],
        negatives=[np.roll(rows, -1)[i : i + 1] for i in rows],
        parent=features,
    )


def turned_pairs(encoder: Encoder) -> TrainingSet:
    """Passages in random directions, and queries that lie where these were turned to."""
    pairs, chance = pairs_about(encoder), np.random.Generator(np.random.Philox(key=5))
    told = chance.normal(size=(10, 32)).astype(np.float32)
    told /= np.linalg.norm(told, axis=1, keepdims=True)
    features = np.roll(told, 1, axis=1), told
    texts = (pairs.queries.texts, pairs.passages.texts)
    asks, tells = (Texts(t, f) for t, f in zip(texts, features, strict=True))
    return TrainingSet(asks, tells, pairs.positives, pairs.negatives, features)


def validation_of(pairs: TrainingSet) -> Validation:
    return Validation(pairs.queries, pairs.passages, pairs.positives)


def asked(retriever: PersonalQueryRetriever, pairs: TrainingSet) -> Float32:
    return retriever.embed_queries(pairs.queries.texts, pairs.queries.features)


@pytest.mark.parametrize("adapt", ["head", "lora", "lora_server", "full"])
def test_only_what_is_personal_moves_and_it_comes_back(encoder: Encoder, adapt: str) -> None:
    retriever, pairs = PersonalQueryRetriever.on(encoder, adapt, rank=2), pairs_about(encoder)
    shared = adapted(encoder, adapt, rank=2)
    start, untouched = retriever.vector(), encoder.encode(pairs.queries.texts)
    np.testing.assert_array_equal(start, shared.initial_vector())
    tune(retriever, pairs, replace(OPTIONS, local_epochs=4, learning_rate=5e-2), seed=1)

    np.testing.assert_array_equal(retriever.vector(), start)  # what is exchanged
    told = retriever.embed_passages(pairs.passages.texts, pairs.passages.features)
    expected = shared.embed_passages(pairs.passages.texts, pairs.passages.features)
    np.testing.assert_array_equal(told, expected)
    np.testing.assert_array_equal(encoder.encode(pairs.queries.texts), untouched)
    tuned, arrays = asked(retriever, pairs), retriever.personal_arrays()
    assert np.abs(tuned - untouched).max() > 1e-3

    retriever.load_vector(start)  # a version adopted anew: queries as everybody's
    np.testing.assert_allclose(asked(retriever, pairs), untouched, atol=1e-5)
    retriever.load_personal(arrays)
    np.testing.assert_array_equal(asked(retriever, pairs), tuned)


def test_personal_parameters_that_do_not_fit_are_refused(encoder: Encoder) -> None:
    retriever = PersonalQueryRetriever.on(encoder, "head")
    arrays = retriever.personal_arrays()
    poisoned = {**arrays, "query.0000": np.full_like(arrays["query.0000"], np.nan)}
    for wrong in ({}, poisoned, PersonalQueryRetriever.on(encoder, "lora").personal_arrays()):
        with pytest.raises(LearningError, match="delete the file"):
            retriever.load_personal(wrong)
    with pytest.raises(LearningError, match="one kind"):
        PersonalQueryRetriever(adapted(encoder, "head"), adapted(encoder, "lora"))


def test_tuning_ranks_answers_higher_and_the_same_seed_gives_the_same_bits(
    encoder: Encoder,
) -> None:
    pairs, runs = turned_pairs(encoder), []
    for _ in range(2):
        retriever = PersonalQueryRetriever.on(encoder, "head")
        before = validation_of(pairs).mean_reciprocal_rank(retriever)
        losses: list[float] = []

        def heard(_: int, loss: float, told: list[float] = losses) -> None:
            told.append(loss)

        last = tune(retriever, pairs, OPTIONS, 7, on_epoch=heard)
        assert last == losses[-1] < losses[0]
        assert len(losses) == OPTIONS.local_epochs
        assert validation_of(pairs).mean_reciprocal_rank(retriever) > before + 0.1
        runs.append(b"".join(a.tobytes() for a in retriever.personal_arrays().values()))
    assert runs[0] == runs[1]


def contrast(
    foreign: Float32 | None, queries: torch.Tensor = AXES[:2], same_above: float = 0.95
) -> torch.Tensor:
    """Two queries along two axes; their passages at 0.8 and 0.6; a temperature of 1."""
    told = np.array([[0.8, 0.6, 0.0], [0.6, 0.8, 0.0]], dtype=np.float32)
    texts, rows = Texts(["a", "b"]), np.arange(2)
    pairs = TrainingSet(texts, texts, [rows[:1], rows[1:]], [rows[:0], rows[:0]])
    ground = tuning._Ground(pairs, told, rows, TrainingOptions(temperature=1.0))
    return tuning._contrast(queries, ground, (rows, rows, rows[:0]), foreign, same_above)


def test_foreign_negatives_are_columns_by_hand() -> None:
    plain = -math.log(math.exp(0.8) / (math.exp(0.8) + math.exp(0.6)))
    assert float(contrast(None)) == pytest.approx(plain)
    # One along the third axis (cosine 0 with both), one along the first.
    foreign = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=np.float32)
    first = math.exp(0.8) + math.exp(0.6) + 1 + math.exp(1)
    second = math.exp(0.8) + math.exp(0.6) + 1 + 1
    expected = 0.5 * (math.log(first) + math.log(second)) - 0.8
    assert float(contrast(foreign)) == pytest.approx(expected)


def test_a_foreign_copy_of_a_positive_is_no_negative_of_that_query() -> None:
    copy = np.array([[0.8, 0.6, 0.0]], dtype=np.float32)  # cosine 0.96 with the other positive
    assert float(contrast(copy)) == pytest.approx(float(contrast(None)))
    other = np.array([[0.98, 0.199, 0.0]], dtype=np.float32)  # 0.90 and 0.75: none of them
    assert float(contrast(other)) > float(contrast(None)) + 0.1
    hidden_from_one = float(contrast(other, same_above=0.8))
    assert float(contrast(None)) + 0.1 < hidden_from_one < float(contrast(other)) - 0.1
    assert float(contrast(other, same_above=0.7)) == pytest.approx(float(contrast(None)))


def test_the_gradient_is_that_of_the_formula() -> None:
    foreign = np.array([[0.0, 0.6, 0.8]], dtype=np.float32)
    start = torch.tensor([[0.9, 0.3, 0.2], [0.1, 0.7, 0.4]], requires_grad=True)

    def loss(queries: torch.Tensor) -> torch.Tensor:
        return contrast(foreign, queries)

    (slope,) = torch.autograd.grad(loss(start), start)
    for place in np.ndindex(2, 3):
        step = torch.zeros(2, 3)
        step[place] = 1e-2
        difference = (loss(start + step) - loss(start - step)) / 2e-2
        assert float(slope[place]) == pytest.approx(float(difference), abs=2e-4)


def test_every_step_sends_queries_as_they_are_now(encoder: Encoder) -> None:
    pairs, sent = pairs_about(encoder), []
    retriever = PersonalQueryRetriever.on(encoder, "head")

    def fetch(queries: Float32) -> list[Float32]:
        sent.append(queries)
        return [-q[None] for q in queries]

    options = replace(OPTIONS, local_epochs=2, batch_size=10, batches="topic")
    tune(retriever, pairs, options, 3, fetch)
    assert [q.shape for q in sent] == [(10, 32), (10, 32)]
    features = pairs.queries.features
    assert features is not None
    gap = [np.abs(q[:, None] - features).max(axis=2).min(axis=1).max() for q in sent]
    assert gap[0] < 1e-5 < 1e-4 < gap[1]  # the first as all sites embed them, then its own


def test_noise_changes_directions_and_not_lengths(encoder: Encoder) -> None:
    def run(scale: float) -> bytes:
        retriever = PersonalQueryRetriever.on(encoder, "head")
        turned = [np.roll(q, 1)[None] for q in np.eye(32, dtype=np.float32)]
        answers = [*(scale * t for t in turned[:9]), np.zeros((1, 32), dtype=np.float32)]
        tune(retriever, pairs_about(encoder), replace(OPTIONS, batch_size=10), 3, lambda _: answers)
        return b"".join(a.tobytes() for a in retriever.personal_arrays().values())

    assert run(1.0) == run(4.0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda q: [np.full((1, 32), np.inf, dtype=np.float32) for _ in q],
        lambda q: [np.ones((1, 31), dtype=np.float32) for _ in q],
        lambda q: [np.ones((1, 32), dtype=np.float32) for _ in q[1:]],
    ],
)
def test_unsound_answers_change_nothing(
    encoder: Encoder, answer: Callable[[Float32], list[Float32]]
) -> None:
    retriever, calls = PersonalQueryRetriever.on(encoder, "head"), []

    def fetch(queries: Float32) -> list[Float32]:
        calls.append(1)
        return [-q[None] for q in queries] if len(calls) < 3 else answer(queries)

    with pytest.raises(TrainingError, match="negative"):
        tune(retriever, pairs_about(encoder), OPTIONS, 1, fetch)
    pairs = pairs_about(encoder)
    assert pairs.queries.features is not None
    np.testing.assert_allclose(asked(retriever, pairs), pairs.queries.features, atol=1e-6)


def test_what_validation_does_not_prefer_is_not_kept(encoder: Encoder) -> None:
    pairs = turned_pairs(encoder)
    # Queries that lie on their answers: no encoder but the shared one is as good for them.
    apart = Validation(pairs.passages, pairs.passages, pairs.positives)
    tuned, kept = (PersonalQueryRetriever.on(encoder, "head") for _ in range(2))
    start = kept.personal_arrays()
    assert apart.mean_reciprocal_rank(kept) == 1.0
    tune(tuned, pairs, replace(OPTIONS, learning_rate=0.3), 1)
    assert apart.mean_reciprocal_rank(tuned) < 1.0
    tune(kept, pairs, replace(OPTIONS, learning_rate=0.3), 1, validation=apart)
    for name, value in kept.personal_arrays().items():
        np.testing.assert_array_equal(value, start[name])


def test_reciprocal_ranks_by_hand(encoder: Encoder) -> None:
    retriever = PersonalQueryRetriever.on(encoder, "head")
    axes = np.eye(32, dtype=np.float32)
    told = np.stack([axes[0], axes[1], axes[0] * np.float32(0.6) + axes[1] * np.float32(0.8)])
    passages = Texts(["a", "b", "c"], told)
    queries = Texts(["q", "r", "s"], np.stack([axes[0], axes[0], axes[5]]))
    right = [np.array([1, 2]), np.array([0]), np.array([1])]
    # The second behind the first; the first; and three alike, which count against it.
    score = Validation(queries, passages, right).mean_reciprocal_rank(retriever)
    assert score == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert Validation(Texts([]), passages, []).mean_reciprocal_rank(retriever) == 0.0

    broken = np.stack([axes[0], np.full(32, np.nan, dtype=np.float32)])
    wrong = Texts(["q", "r"], broken)
    ranks = Validation(wrong, passages, [np.array([1, 2]), np.array([0])]).reciprocal_ranks(
        retriever
    )
    assert ranks.tolist() == [1 / 2, 1 / 3], "what is not a number ranks last"


def test_distillation_holds_to_the_shared_query_encoder(encoder: Encoder) -> None:
    pairs = turned_pairs(encoder)

    def moved(options: TrainingOptions) -> float:
        retriever = PersonalQueryRetriever.on(encoder, "head")
        before = asked(retriever, pairs)
        tune(retriever, pairs, options, 1)
        return float(np.abs(asked(retriever, pairs) - before).mean())

    free = moved(OPTIONS)
    assert moved(replace(OPTIONS, distill="matrix", kd_weight=1e3)) < 0.8 * free
    assert moved(replace(OPTIONS, distill="pairs", kd_weight=1e3)) < 0.95 * free
    assert moved(replace(OPTIONS, proximal=1e2)) < 0.8 * free


def test_one_pair_and_no_epoch_are_clear_outcomes(encoder: Encoder) -> None:
    retriever = PersonalQueryRetriever.on(encoder, "head")
    with pytest.raises(TrainingError, match="at least 2"):
        tune(retriever, pairs_about(encoder, SUBJECTS[:1]), OPTIONS, 1)
    assert tune(retriever, pairs_about(encoder), replace(OPTIONS, local_epochs=0), 1) == 0.0
    pairs, unsound = pairs_about(encoder), pairs_about(encoder)
    assert pairs.queries.features is not None
    assert unsound.queries.features is not None
    unsound.queries.features[3, 0] = np.nan
    with pytest.raises(TrainingError, match="lower the learning rate"):
        tune(retriever, unsound, OPTIONS, 1)
    np.testing.assert_allclose(asked(retriever, pairs), pairs.queries.features, atol=1e-6)
