"""A site's update as the integers that are hidden and added, and a sum of them as a version.

Jobs of the crypto worker that are the same whatever hides the integers:
daemon/jobs/sums/ckks.py encrypts them, daemon/jobs/sums/masking.py masks them.

The exchanged vector is the shared delta and one trailing value, the site's mean
training loss divided by LOSS_BOUND: so the others only ever see the loss as a
sum. It is encoded as two integers, for eight bits would be too few for a number
that people read. Under differential privacy these two are the loss and the count
of crypto/privacy.py, clipped and noised like everything else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from config.recipes import ServerOptions
from crypto.arrays import Float32, Float64, Int32, Int64
from crypto.durable import whole
from crypto.privacy import (
    Mechanism,
    NoiseTerms,
    clipped_integers,
    discrete_gaussian,
    loss_of_sum,
    next_clip_norm,
)
from crypto.quantize import (
    FRACTION_INTEGERS,
    LOSS_BOUND,
    CryptoError,
    check_exponents,
    dequantise_fraction_sum,
    dequantise_sum,
    quantise,
    quantise_fraction,
    scale_exponents,
)
from daemon.jobs.sums.kept_integers import KeptIntegers, Making, keep, kept_residual, recall
from daemon.learning import server_step
from daemon.learning.options import LearningError
from daemon.state.versions import read_whole_version, write_version
from peers.wire.vectors import BlobInfo

# Measured: 110 MiB of data with SEAL's tables loaded, and some 20 bytes a value in an
# honest round (docs/decisions/0010); several times that, so that only a bomb meets it.
_MEMORY_BYTES = 1 << 30
_MEMORY_A_VALUE = 128


def memory_bound(values: int) -> int:
    """Bytes of data that the crypto worker of a site with so many shared values may hold."""
    return _MEMORY_BYTES + _MEMORY_A_VALUE * values


@dataclass(frozen=True)
class Uploaded(BlobInfo):
    """The update that was written: what a site signs as its contribution.

    ``nonce``: of the tags behind it; at the coordinator, which makes none, empty.
    """

    nonce: bytes = b""


@dataclass(frozen=True)
class Hiding:
    """An update that is to be hidden: on which scale, with which noise, and what is kept of it.

    ``exponents``: the agreed scale, one a parameter group. With ``residual`` (for bits < 16)
    what rounding dropped in earlier rounds is added first, and what it drops now is kept
    beside it until `keep_residual` (error feedback: Karimireddy et al. 2019).

    With ``noise`` the update is clipped, and this site's share of noise is added to the
    integers before anything is hidden; there is no error feedback then.

    With ``kept`` the integers are written there before anything is hidden, and where that
    file exists they are sent again as they are, noise, rounding and what they leave of a
    residual included: nothing is read of the update then.
    """

    weight: float
    exponents: Sequence[int]
    residual: Path | None = None
    noise: NoiseTerms | None = None
    kept: Path | None = None


@dataclass(frozen=True)
class NewVersion:
    """The new version's name, and the contributors' weighted mean training loss.

    ``next_clip_norm``: where the clip norm follows a quantile; 0: it does not.
    """

    model_digest: bytes
    mean_loss: float
    next_clip_norm: float = 0.0


@dataclass(frozen=True)
class Summed:
    """What of a round's noise matters for its sum.

    ``quantile``: the share of updates that the next clip norm should leave as they
    are, of ``contributors``; 0: the norm is fixed.
    """

    terms: NoiseTerms
    quantile: float
    contributors: int


@dataclass(frozen=True)
class SumTerms:
    """What the integers of a sum mean, and what becomes of them.

    ``sizes``: values a parameter group, ``exponents`` its scale; ``total_weight``: what the
    sum is divided by. The new version is that of ``shape_digest`` made of ``parent_digest``,
    in the folder ``versions``. ``summed``: the sum's noise; ``server``: what becomes of the mean.
    """

    sizes: Sequence[int]
    exponents: Sequence[int]
    total_weight: float
    parent_digest: bytes
    shape_digest: bytes
    versions: Path
    summed: Summed | None = None
    server: ServerOptions = field(default_factory=ServerOptions)


def measure_update(
    update_path: Path,
    sizes: Sequence[int],
    weight: float,
    residual_path: Path | None = None,
    noise: tuple[NoiseTerms, int] | None = None,
) -> list[int]:
    """Scale exponents of the shared delta, one a group: what `Trained` tells the others.

    ``residual_path`` as in `Hiding`. With ``noise`` (and the plan's bits) they
    follow from the plan and tell nothing. Raises CryptoError when the update is
    missing, of the wrong length, or not finite.
    """
    delta, _ = read_update(update_path, sizes)
    if noise is not None:
        return [Mechanism.of(*noise).exponent] * len(sizes)
    return scale_exponents(with_residual(delta, residual_path), sizes, weight)


def integers_of(
    update_path: Path, sizes: Sequence[int], hiding: Hiding, bits: int
) -> Int32 | Int64:
    """This site's update as the integers that are hidden and added, whatever hides them.

    Of the shared delta, and two of the loss. Raises CryptoError when the update is missing,
    of the wrong length or not finite, when the agreed scale is too small for it, or when what
    is kept was made under another scale, weight, bits or noise, or is damaged.
    """
    residual, noise = hiding.residual, hiding.noise
    fed_back = residual is not None and noise is None
    check_exponents(sizes, hiding.exponents)
    making = Making(sizes, hiding.exponents, hiding.weight, bits, noise, fed_back)
    recalled = None if hiding.kept is None else recall(hiding.kept, making)
    if recalled is None:
        recalled = _made(update_path, making, residual)
        if hiding.kept is not None:
            keep(hiding.kept, making, recalled)
    if residual is not None and recalled.residual is not None:
        # Also when they are sent again: an attempt between may have left its own there.
        _write_residual(residual, recalled.residual)
    return recalled.integers


def _made(update_path: Path, making: Making, residual_path: Path | None) -> KeptIntegers:
    """New integers, and what they leave of the update and of the residual in use."""
    sizes, exponents, weight, bits = making.sizes, making.exponents, making.weight, making.bits
    delta, loss = read_update(update_path, sizes)
    if making.noise is not None:
        mechanism = agreed_mechanism(making.noise, bits, exponents)
        clipped = clipped_integers(delta, loss, weight, bits, mechanism)
        return KeptIntegers(_noised(clipped, mechanism), None)
    delta = with_residual(delta, residual_path)
    if residual_path is None:
        _check_scale(scale_exponents(delta, sizes, weight), exponents)
    rng = np.random.Generator(np.random.SFC64(int.from_bytes(os.urandom(32), "little")))
    integers = np.empty(making.values, dtype=np.int32)
    integers[: delta.size] = quantise(delta, sizes, weight, exponents, bits, rng)
    integers[delta.size :] = quantise_fraction(weight * loss / LOSS_BOUND, bits, rng)
    if residual_path is None:
        return KeptIntegers(integers, None)
    sent = dequantise_sum(integers[: delta.size], sizes, exponents, bits) / weight
    return KeptIntegers(integers, (delta - sent).astype(np.float32))


def _noised(integers: Int64, mechanism: Mechanism) -> Int64:
    """With this site's share of noise, from the kernel's cryptographic source."""
    return integers + discrete_gaussian(integers.size, mechanism.deviation, mechanism.tail)


def agreed_mechanism(noise: NoiseTerms, bits: int, exponents: Sequence[int]) -> Mechanism:
    """On a coarser grid than the plan's, the noise would be less than what is accounted for."""
    mechanism = Mechanism.of(noise, bits)
    if any(exponent != mechanism.exponent for exponent in exponents):
        raise CryptoError(
            f"under this plan's noise every scale exponent is {mechanism.exponent}, the "
            f"agreed ones are {sorted(set(exponents))}: this attempt must fail"
        )
    return mechanism


def apply_integers(integers: Int64, bits: int, terms: SumTerms) -> NewVersion:
    """Make the new version from the exact sum of integers; errors as of `ckks.apply_sum`."""
    summed, weight = terms.summed, terms.total_weight
    shared, (units, rest) = integers[:-FRACTION_INTEGERS], integers[-FRACTION_INTEGERS:]
    mechanism = agreed_mechanism(summed.terms, bits, terms.exponents) if summed else None
    mean: Float64 = dequantise_sum(shared, terms.sizes, terms.exponents, bits)
    mean /= weight
    parent, moments = read_whole_version(terms.versions, terms.parent_digest, terms.shape_digest)
    try:
        version, carried = server_step.step(parent, mean, moments, terms.server)
    except LearningError as error:
        raise CryptoError(str(error)) from error
    digest, _ = write_version(terms.versions, terms.shape_digest, version, carried)
    if summed is None or mechanism is None:
        loss = dequantise_fraction_sum(int(units), int(rest), bits)
        # A contributor may send any integer there: what is told is a loss all the same.
        return NewVersion(digest, min(max(LOSS_BOUND * loss / weight, 0.0), LOSS_BOUND))
    mean_loss = loss_of_sum(int(units), weight, mechanism)
    if not summed.quantile:
        return NewVersion(digest, mean_loss)
    norm, contributors = summed.terms.clip_norm, summed.contributors
    adapted = next_clip_norm(norm, summed.quantile, int(rest), contributors, mechanism)
    return NewVersion(digest, mean_loss, adapted)


def keep_residual(residual_path: Path, kept_path: Path | None = None) -> None:
    """The round is committed with this site's update: its residual replaces the old one.

    ``kept_path``: the integers that are in the committed sum. Where two attempts drew
    integers of their own, what waits is what the later ones left, and only the file
    says what those in the sum did. Raises CryptoError, the residual as it was, when
    that file is damaged.
    """
    pending = _pending(residual_path)
    if kept_path is not None:
        residual = kept_residual(kept_path)
        if residual is None:
            pending.unlink(missing_ok=True)
        else:
            _write_residual(residual_path, residual)
    if pending.exists():
        pending.rename(residual_path)


def read_update(path: Path, sizes: Sequence[int]) -> tuple[Float32, float]:
    """The shared delta, and the mean loss clipped to 0 .. LOSS_BOUND."""
    vector = _read_vector(path, sum(sizes) + 1, "the update")
    share = float(vector[-1])
    if not math.isfinite(share):
        raise CryptoError("the training loss is not finite: training diverged; lower its rate")
    return vector[:-1], min(max(share, 0.0), 1.0) * LOSS_BOUND


def _read_vector(path: Path, length: int, what: str) -> Float32:
    try:
        vector = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CryptoError(f"{what} {path.name} cannot be read: {error}") from error
    if vector.dtype != np.float32 or vector.shape != (length,):
        raise CryptoError(
            f"{what} {path.name} has {vector.dtype} of shape {vector.shape}; "
            f"expected {length} float32 values"
        )
    checked: Float32 = vector
    return checked


def with_residual(delta: Float32, residual_path: Path | None) -> Float32:
    """The delta, and what rounding dropped of earlier ones; raises CryptoError."""
    if residual_path is None or not residual_path.exists():
        return delta
    return delta + _read_vector(residual_path, delta.size, "the residual")


def _write_residual(residual_path: Path, residual: Float32) -> None:
    """Beside the one in use: an update that is never added must not change it."""
    pending = _pending(residual_path)
    with whole(pending, lasting=False) as unfinished, unfinished.open("wb") as file:
        np.save(file, residual, allow_pickle=False)


def _pending(residual_path: Path) -> Path:
    return residual_path.with_name(residual_path.name + ".pending")


def _check_scale(own: Sequence[int], agreed: Sequence[int]) -> None:
    """A scale below our own would clip our update: values would be lost without a word."""
    for group, (ours, theirs) in enumerate(zip(own, agreed, strict=True)):
        if theirs < ours:
            raise CryptoError(
                f"the agreed scale exponent {theirs} for group {group} is below ours, {ours}: "
                "it is not the largest of all; this attempt must fail"
            )
