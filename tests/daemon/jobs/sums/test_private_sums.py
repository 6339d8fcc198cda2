"""The noise of a decrypted sum, and what a site adds to its update before anything leaves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32
from crypto.privacy import LOSS_CLIP, Mechanism, NoiseTerms
from crypto.quantize import LOSS_BOUND, CryptoError
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding, NewVersion, Summed, SumTerms, measure_update
from daemon.state.versions import ShapeManifest, read_version, write_version
from tests.daemon.jobs.sums.proofs import LEAD, check_of, proven

SHAPE = ShapeManifest("private", (("a", (150, 100)), ("b", (5000,))))
HOLDER, COORDINATOR = (1, 0), (1, 1)
# Of four participants at least three contribute, and one of them may look on.
TERMS = NoiseTerms(clip_norm=0.25, multiplier=0.8, sharers=2)
SURE = 5.2  # deviations: fails by chance once in 5 million runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A key holder and a coordinator of one key for four contributors; an empty folder."""
    new_key()
    return tmp_path


def new_key() -> None:
    for left in (HOLDER, COORDINATOR):
        ckks.forget(*left)
    dealt = ckks.deal_key(*HOLDER, 4, 16)
    ckks.hold_context(*COORDINATOR, dealt.public, secret=False, contributors=4, bits=16)


def summed(
    folder: Path, vectors: list[Float32], *, loss: float = 0.0, weights: list[float] | None = None
) -> tuple[NewVersion, Float32]:
    """One round of these updates; the outcome, and the sum as the holders read it."""
    new_key()  # a key holder takes one claim an attempt
    weights = weights or [1.0] * len(vectors)
    sites = [f"site-{number}" for number in range(len(vectors))]
    ckks.start_sum(*COORDINATOR, SHAPE.sizes, check_of(LEAD, sites))
    exponents: list[int] = []
    for number, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
        path = folder / f"{number}.npy"
        np.save(path, np.append(vector, loss / LOSS_BOUND).astype(np.float32))
        exponents = measure_update(path, SHAPE.sizes, weight, None, (TERMS, 16))
        blob = folder / f"{number}.bin"
        check = check_of(sites[number], sites)
        hiding = Hiding(weight, exponents, noise=TERMS)
        ckks.encrypt_update(*HOLDER, path, SHAPE.sizes, hiding, blob, check=check)
        ckks.add_update(*COORDINATOR, sites[number], blob)
    finished = ckks.finish_sum(*COORDINATOR, folder / "sum")
    zero, _ = write_version(folder, SHAPE.digest, np.zeros(SHAPE.total, dtype=np.float32))
    applied = ckks.apply_sum(
        *HOLDER,
        folder / "sum",
        SumTerms(
            *(SHAPE.sizes, exponents, sum(weights), zero),
            *(SHAPE.digest, folder, Summed(TERMS, 0.0, len(vectors))),
        ),
        answer=proven(HOLDER, COORDINATOR, check_of(sites[0], sites), finished),
    )
    got = read_version(folder, applied.model_digest, SHAPE.digest)
    return applied, got * np.float32(sum(weights))


@pytest.mark.parametrize("contributors", [4, 3])
def test_the_sum_carries_the_noise_that_is_accounted_for(folder: Path, contributors: int) -> None:
    """Also when one of four drops out; and the two whose noise an onlooker does not know do."""
    nothing = [np.zeros(SHAPE.total, dtype=np.float32)] * contributors
    _, total = summed(folder, nothing)
    wanted = (TERMS.multiplier * TERMS.clip_norm) ** 2 * contributors / TERMS.sharers
    bound = SURE * math.sqrt(2 / SHAPE.total)
    mechanism = Mechanism.of(TERMS, 16)
    # Below C by less than a unit: the grid's clip norm is a whole number of units.
    assert abs(total.var() / wanted - 1) < bound + 2 / mechanism.clip_units
    assert abs(total.mean()) < SURE * math.sqrt(wanted / SHAPE.total)
    # Without one contributor's noise, which that one knows, the sum still has what it needs.
    unknown = total.var() * (contributors - 1) / contributors
    assert unknown > (TERMS.multiplier * TERMS.clip_norm) ** 2 * (1 - bound - 0.01)


@pytest.mark.slow
def test_each_value_has_noise_of_its_own(folder: Path) -> None:
    """Neighbours, parameter groups and sites share none of it."""
    _, total = summed(folder, [np.zeros(SHAPE.total, dtype=np.float32)] * 3)
    for lag in (1, 2, 100, SHAPE.sizes[0]):
        together = float(np.corrcoef(total[lag:], total[:-lag])[0, 1])
        assert abs(together) < SURE / math.sqrt(SHAPE.total - lag)
    _, other = summed(folder, [np.zeros(SHAPE.total, dtype=np.float32)] * 3)
    assert abs(np.corrcoef(total, other)[0, 1]) < SURE / math.sqrt(SHAPE.total)


def test_the_sum_is_of_clipped_updates(folder: Path) -> None:
    """Three huge equal updates: their direction comes through, at three times C."""
    vector = np.zeros(SHAPE.total, dtype=np.float32)
    vector[:4] = 100.0
    _, total = summed(folder, [vector] * 3)
    along = float(total[:4].sum() / 2.0)
    noise = math.sqrt(3 / TERMS.sharers) * TERMS.multiplier * TERMS.clip_norm
    assert abs(along - 3 * TERMS.clip_norm * 0.968) < SURE * noise


@pytest.mark.slow
def test_the_loss_is_noised_with_the_rest_and_stays_a_loss(folder: Path) -> None:
    # Many, for most come out at one of the two ends: all at one end in less than one of 10^6 runs.
    told = [
        summed(folder, [np.zeros(SHAPE.total, dtype=np.float32)] * 3, loss=2.0)[0].mean_loss
        for _ in range(30)
    ]
    assert len(set(told)) > 1
    assert all(0.0 <= loss <= LOSS_CLIP for loss in told)


def test_scales_tell_nothing_of_the_update(folder: Path) -> None:
    scales = set()
    for seed, size in ((1, 1e-6), (2, 1.0), (3, 1e6)):
        vector = np.random.default_rng(seed).normal(size=SHAPE.total + 1) * size
        vector[-1] = 0.1
        np.save(folder / "u.npy", vector.astype(np.float32))
        found = measure_update(folder / "u.npy", SHAPE.sizes, 0.5, None, (TERMS, 16))
        scales.add(tuple(found))
    assert scales == {(Mechanism.of(TERMS, 16).exponent,) * 2}


def test_another_scale_than_the_plans_is_refused(folder: Path) -> None:
    """On a coarser grid the same integers of noise would be of less noise."""
    np.save(folder / "u.npy", np.zeros(SHAPE.total + 1, dtype=np.float32))
    right = Mechanism.of(TERMS, 16).exponent
    for exponents in ([right + 1, right], [right, right - 1]):
        with pytest.raises(CryptoError, match="under this plan's noise every scale exponent"):
            ckks.encrypt_update(
                *(*HOLDER, folder / "u.npy", SHAPE.sizes),
                Hiding(1.0, exponents, noise=TERMS),
                folder / "u.bin",
                check=check_of("site-0", ["site-0"]),
            )
    assert not (folder / "u.bin").exists()


def test_error_feedback_is_off_under_noise(folder: Path) -> None:
    """What clipping cut off must not come back round after round."""
    np.save(folder / "u.npy", np.ones(SHAPE.total + 1, dtype=np.float32))
    exponents = [Mechanism.of(TERMS, 16).exponent] * 2
    ckks.encrypt_update(
        *(*HOLDER, folder / "u.npy", SHAPE.sizes),
        Hiding(1.0, exponents, folder / "residual.npy", TERMS),
        folder / "u.bin",
        check=check_of("site-0", ["site-0"]),
    )
    assert not list(folder.glob("residual*"))
