"""Parts of the learning benchmark by hand: other sites' answers, and verdicts on claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.learning.retriever.peer_negatives import AskingTerms
from tests.learning_bench import report
from tests.learning_bench.cells import Cell, Work
from tests.learning_bench.claims import checked
from tests.learning_bench.recipes.foreign import Sites
from tests.learning_bench.recipes.learning import Part
from tests.learning_bench.recipes.named import Named
from tests.learning_bench.recipes.recipes import Alone, Recipe
from tests.learning_bench.worlds import World

AXES = np.eye(8, dtype=np.float32)


def test_exact_answers_are_the_nearest_of_all_sites() -> None:
    near = (0.8 * AXES[0] + 0.6 * AXES[1]).astype(np.float32)
    sites = Sites([np.stack([AXES[1], AXES[2]]), np.stack([near, AXES[3]])], _how("exact"), 1)
    first, second = sites.fetch(np.stack([AXES[0], AXES[2]]))
    np.testing.assert_array_equal(first[0], near)
    np.testing.assert_array_equal(second[0], AXES[2])
    assert first.shape == second.shape == (2, 8)


def test_noised_passages_stay_as_they_were_noised() -> None:
    sites = Sites([AXES[:4], AXES[4:]], _how("noisy"), 1)
    answers = np.concatenate([np.concatenate(sites.fetch(AXES)) for _ in range(3)])
    assert len(np.unique(answers, axis=0)) <= 8
    assert not (answers[:, None] == AXES).all(axis=2).any()
    assert np.linalg.norm(answers, axis=1) == pytest.approx(1.0, abs=1e-5)
    again = Sites([AXES[:4], AXES[4:]], _how("noisy"), 1).fetch(AXES)
    np.testing.assert_array_equal(np.concatenate(again), answers[: len(np.concatenate(again))])


def test_a_bucket_answers_with_what_lies_on_the_same_sides() -> None:
    sites = Sites([np.stack([AXES[0], -AXES[0]])], AskingTerms("bucket", 1e-6, 8, 1), 1)
    (found,) = sites.fetch(AXES[:1])
    assert float(found[0] @ AXES[0]) > 0.99


@pytest.mark.parametrize(
    ("gain", "verdict"), [(0.1, "held"), (-0.1, "not held"), (0.0, "undecided")]
)
def test_a_claim_is_held_by_its_whole_interval(gain: float, verdict: str) -> None:
    chance = np.random.Generator(np.random.Philox(key=1))
    base = chance.uniform(0.3, 0.6, 200)
    noise = chance.normal(0.0, 0.02, 200) * 1.0
    rows = {
        "FedAvg": [_cell(base)],
        "centralised": [_cell(base)],
        "pfedrag": [_cell(base + gain + noise - noise.mean())],
    }
    found = {claim.claim: claim.verdict for claim in checked(rows)}
    assert found["pfedrag above FedAvg"] == verdict
    recall = found["federated reaches 95 % of centralised Recall@5"]
    assert recall == ("held" if gain >= 0 else "not held")


def test_a_curve_is_of_all_sites_and_of_seeds_that_every_point_has() -> None:
    """A federation that grows asks fewer questions, or others, at the same share of pairs."""
    world = World("medquad", "", Path(), ("north", "south"), {})
    ours, alone = Named("hanse", "hanse"), Alone("each site alone", "each")

    def work(recipe: Recipe, share: float, seed: int = 0, sites: Any = world.sites) -> Work:
        return Work(world, recipe, Part(sites, share, seed))

    level = {work(ours, 0.5): 0.6, work(ours, 1.0): 0.8}
    level |= {work(alone, 0.5): 0.4, work(alone, 1.0): 0.5}
    level |= {work(ours, 1.0, sites=("north",)): 0.1, work(ours, 0.5, 1): 0.2}
    done = {made: _cell(np.full(4, value)) for made, value in level.items()}
    done[Work(world, ours, Part(("north",)), held_out="south")] = _cell(np.full(4, 0.3))
    table = report._curve_table(done, "test")
    assert "own corpus (one seed)" in table
    assert "| hanse | 0.600 [0.600, 0.600] | 0.800 [0.800, 0.800] |" in table
    assert "| **hanse over each site alone** | +0.200 [+0.200, +0.200] | +0.300" in table

    rest = [work(ours, 1.0, 1), work(alone, 0.5, 1), work(alone, 1.0, 1)]
    done |= {made: _cell(np.full(4, 0.2)) for made in rest}
    table = report._curve_table(done, "test")
    assert "own corpus (2 seeds)" in table
    assert "| hanse | 0.400 [0.400, 0.400] | 0.500 [0.500, 0.500] |" in table


def test_claims_without_their_cells_are_not_made() -> None:
    assert checked({"hanse": [_cell(np.ones(3))]}) == []


def test_a_recipe_is_known_by_its_choices() -> None:
    same = Named("hanse", "hanse").identity
    assert Named("hanse", "by another name").identity == same
    for other in (
        Named("hanse", stage_two=False),
        Named("hanse", bits=8),
        Named("hanse", changes=(("temperature", 0.1),)),
        Named("pdd-as2"),
    ):
        assert other.identity != same
    assert not Named("hanse", stage_two=False).personal
    assert Named("hanse").personal


def _how(level: Any) -> AskingTerms:
    return AskingTerms(level, 0.05, 8, 2)


def _cell(scores: np.typing.NDArray[np.float64]) -> Cell:
    test = {
        "sites": ["north"] * len(scores),
        "scores": {"mrr@10": scores.tolist(), "recall@5": scores.tolist()},
    }
    return Cell({"tests": {"test": test}, "cost": {"trained_values": 1_000_000}})
