"""Training at one site: what the loss counts, what is mined, and that a run can be repeated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from crypto.quantize import LOSS_BOUND
from daemon.learning.batches import training_seed
from daemon.learning.losses import info_nce
from daemon.learning.options import TrainingError, TrainingOptions
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.heads import HeadRetriever
from daemon.learning.retriever.mining import filter_ranked, mine_negatives
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.training import TrainingSet, fit
from tests.support.small_models import small_encoder

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln", "loom", "mill"]
OPTIONS = TrainingOptions(
    local_epochs=6, batch_size=4, learning_rate=3e-3, hard_negatives=2, temperature=0.05
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*SUBJECTS, "care", "keep"])
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


def pairs_about(encoder: Encoder, subjects: list[str] = SUBJECTS) -> TrainingSet:
    queries = [f"what care does the {subject} need?" for subject in subjects]
    passages = [f"keep the {subject} dry, and it will serve for years." for subject in subjects]
    rows = np.arange(len(subjects))
    return TrainingSet(
        Texts(queries, encoder.encode(queries)),
        Texts(passages, encoder.encode(passages)),
        positives=[rows[i : i + 1] for i in rows],
        negatives=[np.roll(rows, -1)[i : i + 1] for i in rows],
    )


def reciprocal_rank(retriever: Retriever, pairs: TrainingSet) -> float:
    queries = retriever.embed_queries(pairs.queries.texts, pairs.queries.features)
    passages = retriever.embed_passages(pairs.passages.texts, pairs.passages.features)
    scores = queries @ passages.T
    right = np.diag(scores)[:, None]
    return float((1 / (1 + (scores > right).sum(axis=1))).mean())


@pytest.mark.parametrize(
    ("adapt", "options"),
    [
        ("head", OPTIONS),
        # The attention of a random encoder hardly looks at the words: larger steps.
        ("lora", replace(OPTIONS, local_epochs=12, batch_size=10, learning_rate=5e-2)),
    ],
)
def test_training_finds_more_and_loses_less(
    encoder: Encoder, adapt: str, options: TrainingOptions
) -> None:
    retriever, pairs = adapted(encoder, adapt), pairs_about(encoder)
    before = reciprocal_rank(retriever, pairs)
    losses: list[tuple[int, float]] = []
    last = fit(retriever, pairs, options, 1, lambda epoch, loss: losses.append((epoch, loss)))
    assert [epoch for epoch, _ in losses] == list(range(1, options.local_epochs + 1))
    assert last == losses[-1][1] < losses[0][1]
    assert reciprocal_rank(retriever, pairs) > before + 0.1


def trained(encoder: Encoder, options: TrainingOptions, seed: int) -> bytes:
    retriever = HeadRetriever(encoder)
    fit(retriever, pairs_about(encoder), options, seed)
    return retriever.vector().tobytes()


def test_the_same_seed_gives_the_same_bits_and_another_one_others(encoder: Encoder) -> None:
    first = trained(encoder, OPTIONS, seed=1)
    torch.manual_seed(99)
    np.random.seed(99)
    assert trained(encoder, OPTIONS, seed=1) == first
    assert trained(encoder, OPTIONS, seed=2) != first


def test_seeds_differ_between_sites_rounds_and_plans() -> None:
    seeds = {
        training_seed(0, 1, "east"),
        training_seed(0, 1, "west"),
        training_seed(0, 2, "east"),
        training_seed(1, 1, "east"),
    }
    assert len(seeds) == 4
    assert training_seed(0, 1, "east") == training_seed(0, 1, "east") < 2**128


def test_a_batch_larger_than_the_data_is_one_step(encoder: Encoder) -> None:
    assert trained(encoder, replace(OPTIONS, batch_size=4096, local_epochs=2), 1) != trained(
        encoder, replace(OPTIONS, local_epochs=0), 1
    )


def test_a_lone_last_pair_is_not_a_batch_of_its_own(encoder: Encoder) -> None:
    retriever = HeadRetriever(encoder)
    pairs = pairs_about(encoder, SUBJECTS[:5])
    losses: list[float] = []
    fit(
        retriever,
        replace(pairs, negatives=[np.empty(0, dtype=np.int64)] * 5),
        replace(OPTIONS, batch_size=4, local_epochs=1, learning_rate=1e-9),
        1,
        lambda _, loss: losses.append(loss),
    )
    everything = torch.from_numpy(pairs.queries.features @ pairs.passages.features.T / 0.05)  # type: ignore[union-attr, operator]
    expected = torch.nn.functional.cross_entropy(everything, torch.arange(5))
    assert losses[0] == pytest.approx(float(expected), rel=1e-4)


def test_no_epoch_trains_nothing(encoder: Encoder) -> None:
    retriever = HeadRetriever(encoder)
    before = retriever.vector().tobytes()
    assert fit(retriever, pairs_about(encoder), replace(OPTIONS, local_epochs=0), 1) == 0.0
    assert retriever.vector().tobytes() == before


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_pairs_are_refused(encoder: Encoder, count: int) -> None:
    with pytest.raises(TrainingError, match=f"{count} usable training pairs.*at least 2"):
        fit(HeadRetriever(encoder), pairs_about(encoder, SUBJECTS[:count]), OPTIONS, 1)


def test_a_loss_that_is_not_finite_is_refused(encoder: Encoder) -> None:
    pairs = pairs_about(encoder)
    assert pairs.queries.features is not None
    pairs.queries.features[3, 0] = np.nan
    with pytest.raises(TrainingError, match=r"became nan in epoch 1.*lower the learning rate"):
        fit(HeadRetriever(encoder), pairs, OPTIONS, 1)


# ---- the loss ---------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_the_positive() -> None:
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    passages = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    shown = torch.zeros(2, 2, dtype=torch.bool)
    loss = info_nce(queries, passages, torch.tensor([0, 1]), shown, temperature=0.5)
    first = -np.log(np.exp(2.0) / (np.exp(2.0) + np.exp(1.2)))
    second = -np.log(np.exp(1.6) / (np.exp(0.0) + np.exp(1.6)))
    assert float(loss) == pytest.approx((first + second) / 2)


def test_a_hidden_passage_does_not_count() -> None:
    queries = torch.tensor([[1.0, 0.0]])
    passages = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    hidden = torch.tensor([[False, True, False]])
    loss = info_nce(queries, passages, torch.tensor([0]), hidden, temperature=1.0)
    assert float(loss) == pytest.approx(-np.log(np.e / (np.e + 1.0)))


def test_the_worst_loss_fits_the_value_it_travels_in() -> None:
    queries = torch.tensor([[1.0, 0.0]])
    passages = torch.tensor([[-1.0, 0.0]] + [[1.0, 0.0]] * 4096)
    shown = torch.zeros(1, 4097, dtype=torch.bool)
    worst = float(info_nce(queries, passages, torch.tensor([0]), shown, temperature=0.05))
    assert 48 < worst < LOSS_BOUND


def loss_of_one_step(encoder: Encoder, texts: list[str], positives: list[list[int]]) -> float:
    queries = [f"what care does the {subject} need?" for subject in SUBJECTS[: len(positives)]]
    pairs = TrainingSet(
        Texts(queries, encoder.encode(queries)),
        Texts(texts, encoder.encode(texts)),
        [np.array(rows) for rows in positives],
        [np.empty(0, dtype=np.int64) for _ in positives],
    )
    return fit(HeadRetriever(encoder), pairs, replace(OPTIONS, local_epochs=1), 1)


def test_two_queries_with_the_same_answer_are_not_each_others_negatives(encoder: Encoder) -> None:
    """One row, or two rows of equal text: there is nothing to tell apart, so nothing to lose."""
    assert loss_of_one_step(encoder, ["keep it dry."], [[0], [0]]) == 0.0
    assert loss_of_one_step(encoder, ["keep it dry.", "keep it dry."], [[0], [1]]) == 0.0
    assert loss_of_one_step(encoder, ["keep it dry.", "ring the bell."], [[0], [1]]) > 0.0


def test_another_positive_of_a_query_is_not_its_negative(encoder: Encoder) -> None:
    texts = ["keep it dry.", "ring the bell."]
    assert loss_of_one_step(encoder, texts, [[0, 1], [0, 1]]) == 0.0


# ---- mining -------------------------------------------------------------------------


def unit(*angles: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    radians = np.radians(angles)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def test_the_nearest_passages_of_other_documents_are_mined_in_order() -> None:
    mined = mine_negatives(
        unit(0), unit(30, 90, -60, 5), ["right", "far", "near", "right"], [np.array([0, 3])], 5
    )
    assert mined[0].tolist() == [2, 1], "only two qualify, nearest first"


def test_near_duplicates_of_a_positive_are_no_negatives() -> None:
    # 30 is the positive; 45 is at 15 degrees from it (cosine 0.966), 50 at 20 (0.940).
    mined = mine_negatives(unit(60), unit(30, 45, 50), ["a", "b", "c"], [np.array([0])], 2)
    assert mined[0].tolist() == [2]


def test_other_parts_of_the_right_answer_are_no_negatives() -> None:
    mined = mine_negatives(
        unit(0), unit(30, -80, -60), ["site/7#0", "site/7#1", "site/70#1"], [np.array([0])], 2
    )
    assert mined[0].tolist() == [2]


def test_near_duplicates_however_many_are_passed_over() -> None:
    """Of a ranking made elsewhere, in which what differs comes after more than are compared."""
    passages = np.concatenate([unit(*[0] * 200), unit(40, 80, 120)])
    documents = [f"d{n}" for n in range(203)]
    (kept,) = filter_ranked([np.arange(1, 203)], passages, documents, [np.array([0])], 2)
    assert kept.tolist() == [200, 201]


def test_nothing_is_mined_when_nothing_is_asked_for_or_everything_is_right() -> None:
    passages = unit(0, 90)
    assert mine_negatives(unit(0), passages, ["a", "b"], [np.array([0])], 0)[0].tolist() == []
    assert mine_negatives(unit(0), passages, ["a", "b"], [np.array([0, 1])], 3)[0].tolist() == []
    assert mine_negatives(np.zeros((0, 2), "<f4"), passages, ["a", "b"], [], 3) == []


def test_many_queries_are_mined_in_slices() -> None:
    chance = np.random.default_rng(3)
    queries = chance.normal(size=(600, 8)).astype(np.float32)
    passages = chance.normal(size=(50, 8)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    right = [np.array([i % 50]) for i in range(600)]
    mined = mine_negatives(queries, passages, [f"d{i}" for i in range(50)], right, 3)
    for i in (0, 255, 256, 599):
        order = [j for j in np.argsort(-(queries[i] @ passages.T)) if j != i % 50]
        kept = [j for j in order if passages[j] @ passages[i % 50] <= 0.95]
        assert mined[i].tolist() == kept[:3]
