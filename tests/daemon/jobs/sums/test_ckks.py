"""A round's arithmetic, end to end, each site's jobs in a worker process of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.arrays import Float32
from crypto.ckks.parameters import parameters_of
from crypto.ckks.sum_proof import Claim, UnprovenSum, size_of_tags
from crypto.ckks.sums import RoundKey, deal
from crypto.privacy import Mechanism, NoiseTerms
from crypto.quantize import LOSS_BOUND, CryptoError
from daemon.jobs.sums import ckks
from daemon.jobs.sums import integers as integers_
from daemon.jobs.sums.ckks import CkksJobs
from daemon.jobs.sums.integers import Hiding, NewVersion, SumTerms, measure_update
from daemon.jobs.sums.masking import MaskingJobs
from daemon.process.workers import Worker
from daemon.state.versions import ShapeManifest, VersionError, read_version, write_version
from tests.daemon.jobs.sums.proofs import LEAD, check_of, proven

SHAPE = ShapeManifest("test", (("a", (300, 100)), ("b", (500,)), ("c", (1,))))
SIZES = SHAPE.sizes
EXPONENTS = [-3, 2, 0]
WEIGHTS = [1.0, 0.4, 0.75]
LOSSES = [0.31, 1.7, 0.9]
SITES = ["site-0", "site-1", "site-2"]
CHECK = check_of(SITES[0], SITES)


def delta(seed: int) -> Float32:
    vector = np.random.default_rng(seed).normal(size=SHAPE.total).astype(np.float32)
    vector[: SIZES[0]] *= 0.02
    return vector


def write_update(path: Path, vector: Float32, loss: float) -> Path:
    np.save(path, np.append(vector, np.float32(loss / LOSS_BOUND)).astype(np.float32))
    return path


def parent_in(folder: Path) -> bytes:
    return write_version(folder, SHAPE.digest, delta(99))[0]


@asynccontextmanager
async def three_workers() -> AsyncIterator[list[Worker]]:
    async with AsyncExitStack() as stack:
        workers = [Worker(f"crypto-{number}", threads=1) for number in range(3)]
        for worker in workers:
            stack.push_async_callback(worker.stop)
        yield workers


async def encrypted_round(folder: Path, workers: list[Worker], bits: int) -> list[Path]:
    """Site 0 coordinates, site 1 deals the key; returns the updates, which are in the sum."""
    coordinator, dealer, holder = workers
    dealt = await dealer.run(ckks.deal_key, 7, 0, 3, bits)
    await holder.run(ckks.hold_context, 7, 0, dealt.secret, secret=True, contributors=3, bits=bits)
    await coordinator.run(
        ckks.hold_context, 7, 0, dealt.public, secret=False, contributors=3, bits=bits
    )
    await coordinator.run(ckks.start_sum, 7, 0, SIZES, check_of(SITES[0], SITES, SITES[0]))
    measured = []
    for number, worker in enumerate(workers):
        path = write_update(folder / f"{number}.npy", delta(number), LOSSES[number])
        measured.append(await worker.run(measure_update, path, SIZES, WEIGHTS[number]))
    agreed = [max(column) for column in zip(*measured, strict=True)]
    assert agreed == EXPONENTS
    updates = [folder / f"{number}.encrypted" for number in range(3)]
    for number, worker in enumerate(workers):
        blob = await worker.run(
            ckks.encrypt_update,
            *(7, 0, folder / f"{number}.npy", SIZES),
            Hiding(WEIGHTS[number], agreed),
            updates[number],
            check=check_of(SITES[number], SITES, SITES[0]),
        )
        assert blob.digest == hashlib.sha256(updates[number].read_bytes()).digest()
    for number, update in enumerate(updates):
        await coordinator.run(ckks.add_update, 7, 0, SITES[number], update)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 16])
async def test_three_sites_apply_the_same_bits(tmp_path: Path, bits: int) -> None:
    async with three_workers() as workers:
        coordinator, *holders = workers
        updates, total = await encrypted_round(tmp_path, workers, bits), tmp_path / "sum"
        finished = await coordinator.run(ckks.finish_sum, 7, 0, total)
        claim = Claim(finished.digest, finished.nonces)
        applied = []
        for number, holder in enumerate(holders):
            check = check_of(SITES[number + 1], SITES, SITES[0])
            asked = await holder.run(ckks.challenge, 7, 0, check, claim)
            answer = await coordinator.run(ckks.answer_challenge, 7, 0, check.site, asked)
            versions = tmp_path / f"versions-{number}"
            parent = parent_in(versions)
            applied.append(
                await holder.run(
                    ckks.apply_sum,
                    *(7, 0, total),
                    SumTerms(SIZES, EXPONENTS, sum(WEIGHTS), parent, SHAPE.digest, versions),
                    answer=answer,
                )
            )
        assert applied[0] == applied[1]
        check_result(applied[0], tmp_path / "versions-0", bits)

        # The coordinator holds every ciphertext and can open none of them.
        for number, update in enumerate(updates):  # as bare vectors, without their tags
            blob = update.read_bytes()
            update.write_bytes(blob if number == 0 else blob[: -size_of_tags(2)])
        for path in (*updates, total):
            with pytest.raises(CryptoError, match="only the round's public key"):
                await coordinator.run(
                    ckks.apply_sum,
                    *(7, 0, path),
                    SumTerms(SIZES, EXPONENTS, sum(WEIGHTS), parent, SHAPE.digest, versions),
                    answer=answer,
                )
        assert not leaked(tmp_path)


def leaked(folder: Path) -> bool:
    """Whether a key context was written anywhere."""
    return any(b"HNSK" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def check_result(applied: NewVersion, versions: Path, bits: int) -> None:
    got = read_version(versions, applied.model_digest, SHAPE.digest).astype(np.float64)
    updates = [delta(number).astype(np.float64) for number in range(3)]
    weighted = sum(w * u for w, u in zip(WEIGHTS, updates, strict=True)) / sum(WEIGHTS)
    error = np.abs(got - (delta(99) + weighted))
    unit = np.repeat(np.ldexp(1.0, EXPONENTS), SIZES) / (2 ** (bits - 1) - 1)
    assert (error <= 3 * unit / sum(WEIGHTS) + 1e-6).all()
    assert error.max() > 0
    loss = np.average(LOSSES, weights=WEIGHTS)
    assert applied.mean_loss == pytest.approx(loss, abs=3 * 64 / (2 ** (bits - 1) - 1) ** 2)


@pytest.mark.slow
def test_naming_the_jobs_does_not_load_seal() -> None:
    """The daemon's main process imports this module to say what its worker shall do."""
    program = "import sys, daemon.jobs.sums.ckks as jobs; assert 'tenseal' not in sys.modules;"
    program += "jobs.warm_up(3, 16); assert 'tenseal' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def _has_loaded(library: str) -> bool:
    return library in sys.modules


@pytest.mark.slow
async def test_a_site_warms_up_what_its_own_mode_needs() -> None:
    """SEAL for ciphertexts; masks need nothing that takes long."""
    worker = Worker("crypto", threads=1)
    try:
        await MaskingJobs.warm_up(worker, 3, 16, measurable=False)
        assert not await worker.run(_has_loaded, "tenseal")
        await CkksJobs.warm_up(worker, 3, 16, measurable=False)
        assert await worker.run(_has_loaded, "tenseal")
    finally:
        await worker.stop()


# ---- one process, several roles: attempts stand for sites ---------------------------

HOLDER, COORDINATOR = (1, 0), (1, 1)


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    """A key holder and a coordinator of one key; returns an empty folder."""
    for left in [(2, 0), (2, 1), HOLDER, COORDINATOR]:
        ckks.forget(*left)
    dealt = ckks.deal_key(*HOLDER, 3, 16)
    ckks.hold_context(*COORDINATOR, dealt.public, secret=False, contributors=3, bits=16)
    return tmp_path


def test_the_result_is_the_exact_integer_sum(roles: Path) -> None:
    """Integers k sent at scale 2^15 in units of 2^15/32767 come back as their exact mean."""
    shape = ShapeManifest("exact", (("a", (1000,)),))
    chance = np.random.default_rng(3)
    integers = [chance.integers(-32767, 32768, 1000) for _ in range(3)]
    unit = 2.0**15 / 32767
    ckks.start_sum(*COORDINATOR, shape.sizes, check_of(LEAD, SITES))
    for number, part in enumerate(integers):
        path = write_update(roles / "u.npy", (part * unit * (1 - 2**-20)).astype(np.float32), 1.0)
        check = check_of(SITES[number], SITES)
        hiding = Hiding(1.0, [15])
        ckks.encrypt_update(*HOLDER, path, shape.sizes, hiding, roles / "u", check=check)
        ckks.add_update(*COORDINATOR, SITES[number], roles / "u")
    finished = ckks.finish_sum(*COORDINATOR, roles / "sum")
    zero, _ = write_version(roles, shape.digest, np.zeros(1000, dtype=np.float32))
    applied = ckks.apply_sum(
        *HOLDER,
        roles / "sum",
        SumTerms(shape.sizes, [15], 3.0, zero, shape.digest, roles),
        answer=proven(HOLDER, COORDINATOR, check_of(SITES[0], SITES), finished),
    )
    got = read_version(roles, applied.model_digest, shape.digest).astype(np.float64)
    units = got * 3 / unit
    assert np.abs(units - np.rint(units)).max() < 0.02
    assert np.abs(np.rint(units) - sum(integers)).max() <= 3


@pytest.mark.parametrize(
    ("vector", "refusal"),
    [
        (np.zeros(SHAPE.total, dtype=np.float32), "expected 30502"),
        (np.zeros(SHAPE.total + 2, dtype=np.float32), "expected 30502"),
        (np.zeros(0, dtype=np.float32), "expected 30502"),
        (np.zeros(SHAPE.total + 1, dtype=np.float64), "float64"),
        (np.full(SHAPE.total + 1, np.nan, dtype=np.float32), "not finite"),
        (np.append(np.full(SHAPE.total, np.inf), 0).astype(np.float32), "NaN or infinity"),
    ],
)
def test_a_bad_update_is_refused_at_its_own_site(
    roles: Path, vector: np.ndarray, refusal: str
) -> None:
    np.save(roles / "u.npy", vector)
    with pytest.raises(CryptoError, match=refusal):
        measure_update(roles / "u.npy", SIZES, 1.0)
    with pytest.raises(CryptoError, match=refusal):
        ckks.encrypt_update(
            *(*HOLDER, roles / "u.npy", SIZES, Hiding(1.0, EXPONENTS), roles / "u.encrypted"),
            check=CHECK,
        )
    assert not (roles / "u.encrypted").exists()


def test_missing_and_pickled_updates_are_refused(roles: Path) -> None:
    with pytest.raises(CryptoError, match="cannot be read"):
        measure_update(roles / "nowhere.npy", SIZES, 1.0)
    np.save(roles / "u.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(CryptoError, match="cannot be read"):
        measure_update(roles / "u.npy", SIZES, 1.0)


def test_a_scale_below_our_own_is_refused(roles: Path) -> None:
    path = write_update(roles / "u.npy", delta(0), 0.1)
    lowered = [EXPONENTS[0], EXPONENTS[1] - 1, EXPONENTS[2]]
    with pytest.raises(CryptoError, match="group 1 is below ours"):
        hiding = Hiding(1.0, lowered)
        ckks.encrypt_update(*HOLDER, path, SIZES, hiding, roles / "u", check=CHECK)


def test_what_rounding_drops_is_sent_later(roles: Path) -> None:
    """Error feedback: over rounds the sum of what was sent approaches what was meant."""
    sizes = [SHAPE.total]
    ckks.deal_key(2, 0, 3, 8)
    residual, update = roles / "residual.npy", roles / "u.npy"
    meant = delta(5)
    for round_ in range(3):
        write_update(update, meant, 0.5)
        exponents = measure_update(update, sizes, 1.0, residual)
        before = integers_.with_residual(meant, residual)
        ckks.encrypt_update(
            *(2, 0, update, sizes, Hiding(1.0, exponents, residual), roles / "u"), check=CHECK
        )
        assert residual.exists() == (round_ > 0)  # a round that fails leaves it as it was
        integers_.keep_residual(residual)
        integers_.keep_residual(residual)  # committing twice is no error
        kept = np.load(residual)
        assert np.abs(kept).max() <= 2.0 ** exponents[0] / 127
        assert kept.std() > 0
        sent_units = (before.astype(np.float64) - kept) * 127 / 2.0 ** exponents[0]
        assert np.abs(sent_units - np.rint(sent_units)).max() < 1e-3
    with pytest.raises(CryptoError, match="the residual"):
        measure_update(write_update(update, meant[:-1], 0.5), [SHAPE.total - 1], 1.0, residual)


def test_two_attempts_are_held_and_older_ones_forgotten(roles: Path) -> None:
    ckks.deal_key(2, 0, 3, 16)
    with pytest.raises(CryptoError, match="no key is held for round 1, attempt 0"):
        ckks.start_sum(*HOLDER, SIZES, CHECK)
    ckks.start_sum(*COORDINATOR, SIZES, check_of(LEAD, SITES))
    ckks.forget(*COORDINATOR)
    ckks.forget(*COORDINATOR)
    with pytest.raises(CryptoError, match="no key is held"):
        ckks.finish_sum(*COORDINATOR, roles / "sum")


def test_a_sum_that_was_not_started_takes_nothing(roles: Path) -> None:
    with pytest.raises(CryptoError, match="no sum was started"):
        ckks.add_update(*COORDINATOR, "a", roles / "u")


def test_a_context_for_other_parameters_is_refused(roles: Path) -> None:
    dealt = ckks.deal_key(2, 0, 3, 16)
    for contributors, bits in ((4, 8), (5, 16)):
        with pytest.raises(CryptoError, match="the round context was refused"):
            ckks.hold_context(2, 1, dealt.secret, secret=True, contributors=contributors, bits=bits)
    with pytest.raises(CryptoError, match="no key is held"):
        ckks.start_sum(2, 1, SIZES, CHECK)


# ---- what the dealer commits itself to ---------------------------------------------------


def test_who_holds_a_context_says_which_one(roles: Path) -> None:
    """So that a holder notices a key that is not the one the dealer has signed."""
    dealt, other = (ckks.deal_key(2, 0, 3, 16) for _ in range(2))
    for number, (context, secret) in enumerate(((dealt.secret, True), (dealt.public, False))):
        held = ckks.hold_context(2, 1, context, secret=secret, contributors=3, bits=16)
        assert held == hashlib.sha256(context).digest()
        assert held != hashlib.sha256((other.secret, other.public)[number]).digest()


@pytest.mark.parametrize("measurable", [False, True])
def test_the_secret_that_a_digest_hides_is_uniformly_ternary(measurable: bool) -> None:
    """What the secret context serialises to: 8192 coefficients of -1, 0, 1, nothing else.

    Decrypting (0, 1) gives the secret polynomial, whose slots are its values at the odd
    powers of a root of unity; a Fourier transform makes its coefficients of them.
    """
    parameters = parameters_of(3, 16, measurable=measurable)
    dealt = deal(parameters)
    primes, degree = len(parameters.primes), parameters.degree
    assert len(dealt.secret) == 14 + 8 * primes * degree
    half = parameters.full_block // 2
    one = np.ones(half // 8, dtype="<u8").tobytes()  # the constant 1, transformed
    slots = RoundKey(parameters, dealt.secret, secret=True).decrypt(bytes(half) + one)
    powers = [pow(3, j, 2 * degree) for j in range(degree // 2)]
    values = np.zeros(2 * degree, dtype=np.complex128)
    values[powers] = slots * 2.0**parameters.scale_bits
    values[[2 * degree - power for power in powers]] = values[powers].conj()
    found = np.fft.fft(values)[:degree] / degree
    coefficients = np.rint(found.real)
    assert np.abs(found - coefficients).max() < 1e-3
    counts = [int((coefficients == value).sum()) for value in (-1, 0, 1)]
    assert sum(counts) == degree
    assert all(abs(count - degree / 3) < 6 * np.sqrt(degree * 2 / 9) for count in counts)


# ---- the same integers in two attempts ---------------------------------------------------


def summed(number: int, folder: Path, bits: int) -> bytes:
    """The digest of the version that an attempt makes of three kept updates, and new keys."""
    holder, coordinator = HOLDER, COORDINATOR
    for role in (holder, coordinator):
        ckks.forget(*role)
    dealt = ckks.deal_key(*holder, 3, bits)
    ckks.hold_context(*coordinator, dealt.public, secret=False, contributors=3, bits=bits)
    ckks.start_sum(*coordinator, SIZES, check_of(LEAD, SITES))
    for site, weight in zip(SITES, WEIGHTS, strict=True):
        out = folder / f"{site}-{number}"
        written = ckks.encrypt_update(
            *(*holder, folder / f"{site}.npy", SIZES),
            Hiding(weight, EXPONENTS, kept=folder / f"{site}.kept"),
            out,
            check=check_of(site, SITES),
        )
        raw = out.read_bytes()
        assert (written.digest, written.size) == (hashlib.sha256(raw).digest(), len(raw))
        assert written.nonce == raw[-size_of_tags(3) :][:16]
        ckks.add_update(*coordinator, site, out)
    finished = ckks.finish_sum(*coordinator, folder / "sum")
    applied = ckks.apply_sum(
        *holder,
        folder / "sum",
        SumTerms(SIZES, EXPONENTS, sum(WEIGHTS), parent_in(folder), SHAPE.digest, folder),
        answer=proven(holder, coordinator, check_of(SITES[0], SITES), finished),
    )
    return applied.model_digest


@pytest.mark.parametrize("bits", [8, 16])
def test_two_attempts_of_a_round_sum_the_same_integers(roles: Path, bits: int) -> None:
    """Under another key, and without what training left: the same version, bit for bit."""
    for number, site in enumerate(SITES):
        write_update(roles / f"{site}.npy", delta(number), LOSSES[number])
    first = summed(1, roles, bits)
    uploaded = (roles / "site-0-1").read_bytes()
    for site in SITES:
        (roles / f"{site}.npy").unlink()
    assert summed(2, roles, bits) == first
    assert (roles / "site-0-2").read_bytes() != uploaded
    for number, site in enumerate(SITES):  # drawn anew, it is another sum
        write_update(roles / f"{site}.npy", delta(number), LOSSES[number])
        (roles / f"{site}.kept").unlink()
    assert summed(3, roles, bits) != first


def test_the_coordinators_own_update_has_no_nonce(roles: Path) -> None:
    path = write_update(roles / "u.npy", delta(0), 0.1)
    ckks.start_sum(*COORDINATOR, SIZES, check_of(LEAD, SITES))
    written = ckks.encrypt_update(
        *(*COORDINATOR, path, SIZES, Hiding(1.0, EXPONENTS), roles / "u"),
        check=check_of(LEAD, SITES),
    )
    assert written.nonce == b""


def kept_at(folder: Path, name: str = "kept", **changed: Any) -> Path:
    """Integers of delta(0), kept under these terms or others; or those that are."""
    terms: dict[str, Any] = {"weight": 1.0, "exponents": EXPONENTS, "bits": 16, "noise": None}
    terms |= changed
    residual = folder / "residual.npy" if terms["bits"] < 16 else None
    write_update(folder / "u.npy", delta(0), 0.1)
    hiding = Hiding(terms["weight"], terms["exponents"], residual, terms["noise"], folder / name)
    sizes = terms.get("sizes", SIZES)
    integers_.integers_of(folder / "u.npy", sizes, hiding, terms["bits"])
    return folder / name


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": 0.5},
        {"weight": float(np.nextafter(1.0, 0.0))},
        {"exponents": [EXPONENTS[0], EXPONENTS[1] + 1, EXPONENTS[2]]},
        {"bits": 12},
        {"sizes": (SIZES[0] - 1, SIZES[1] + 1, SIZES[2])},
        {"noise": NoiseTerms(1.0, 1.0, 2), "exponents": [4, 4, 4]},
    ],
)
def test_kept_integers_are_sent_under_their_own_terms_alone(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = kept_at(tmp_path)
    before = path.read_bytes()
    with pytest.raises(CryptoError, match="kept under another scale"):
        kept_at(tmp_path, **changed)
    assert path.read_bytes() == before
    kept_at(tmp_path)


def test_noise_is_kept_with_what_it_is_added_to(tmp_path: Path) -> None:
    """Drawn anew, two sums would tell more than is accounted for."""
    noise = NoiseTerms(1.0, 1.0, 2)
    terms: dict[str, Any] = {"noise": noise, "exponents": [Mechanism.of(noise, 16).exponent] * 3}
    path = kept_at(tmp_path, **terms)
    (tmp_path / "u.npy").unlink()
    hiding = Hiding(1.0, terms["exponents"], None, noise, path)
    first, second = (integers_.integers_of(tmp_path / "u.npy", SIZES, hiding, 16) for _ in range(2))
    assert first.dtype == np.int64
    assert np.array_equal(first, second)
    with pytest.raises(CryptoError, match="kept under another scale"):
        kept_at(tmp_path, **terms | {"noise": NoiseTerms(1.0, 1.0, 3)})


def test_damaged_kept_integers_are_refused_and_not_made_anew(tmp_path: Path) -> None:
    path = kept_at(tmp_path)
    good = path.read_bytes()
    for at in (0, 4, 5, 6, 40, 75, 200, len(good) - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CryptoError, match=r"damaged or none|kept under another"):
            kept_at(tmp_path)
    for raw in (b"", good[:40], good[:-1], good + b"0"):
        path.write_bytes(raw)
        with pytest.raises(CryptoError, match="damaged or none"):
            kept_at(tmp_path)
    with pytest.raises(CryptoError, match="cannot be read"):
        kept_at(tmp_path, "")
    path.write_bytes(good)
    kept_at(tmp_path)


def test_integers_are_kept_before_anything_is_encrypted(roles: Path) -> None:
    """Whole, or not at all: where they can't be, nothing leaves."""
    path = write_update(roles / "u.npy", delta(0), 0.1)
    arguments = (*HOLDER, path, SIZES)
    for nowhere in (roles / "none" / "kept", roles / ("k" * 250)):
        with pytest.raises(OSError, match=r"No such file|name too long"):
            hiding = Hiding(1.0, EXPONENTS, kept=nowhere)
            ckks.encrypt_update(*arguments, hiding, roles / "u", check=CHECK)
    assert sorted(one.name for one in roles.iterdir()) == ["u.npy"]
    unusable = roles / "u"
    unusable.mkdir()  # the upload can't be written: what is kept stays, for the next attempt
    with pytest.raises(OSError, match="u"):
        hiding = Hiding(1.0, EXPONENTS, kept=roles / "kept")
        ckks.encrypt_update(*arguments, hiding, unusable, check=CHECK)
    assert (roles / "kept").exists()


def test_a_repeated_upload_leaves_its_residual_once(tmp_path: Path) -> None:
    """And the residual is that of the integers in the sum, whoever drew others in between."""
    residual, pending = tmp_path / "residual.npy", tmp_path / "residual.npy.pending"
    np.save(residual, (delta(7) * 0.01).astype(np.float32))
    in_use = np.load(residual)
    first = kept_at(tmp_path, "first", bits=8)
    left = np.load(pending)
    kept_at(tmp_path, "first", bits=8)  # sent again
    assert np.array_equal(np.load(pending), left)
    assert np.array_equal(np.load(residual), in_use)
    kept_at(tmp_path, "second", bits=8)  # an attempt that drew anew
    assert not np.array_equal(np.load(pending), left)
    kept_at(tmp_path, "first", bits=8)  # and one that sums the first once more
    assert np.array_equal(np.load(pending), left)
    hiding = Hiding(1.0, EXPONENTS, residual, kept=first)
    integers = integers_.integers_of(tmp_path / "none", SIZES, hiding, 8)
    meant = delta(0) + in_use
    unit = np.repeat(np.ldexp(1.0, EXPONENTS), SIZES) / 127
    assert np.abs(meant - integers[: SHAPE.total] * unit - left).max() < 1e-6
    integers_.keep_residual(residual)
    assert np.array_equal(np.load(residual), left)


def test_the_committed_sum_says_which_residual_is_kept(tmp_path: Path) -> None:
    residual, pending = tmp_path / "residual.npy", tmp_path / "residual.npy.pending"
    first = kept_at(tmp_path, "first", bits=8)
    left = np.load(pending)
    kept_at(tmp_path, "second", bits=8)
    integers_.keep_residual(residual, first)  # not what the later attempt left
    integers_.keep_residual(residual, first)
    assert np.array_equal(np.load(residual), left)
    assert not pending.exists()
    # A sum of 16 bits leaves nothing, and what waits from another attempt is not for it.
    kept_at(tmp_path, "second", bits=8)
    integers_.keep_residual(residual, kept_at(tmp_path, "third"))
    assert np.array_equal(np.load(residual), left)
    assert not pending.exists()
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CryptoError, match="damaged"):
        integers_.keep_residual(residual, first)
    assert np.array_equal(np.load(residual), left)


# ---- applying ----------------------------------------------------------------------------


def apply(
    role: tuple[int, int],
    folder: Path,
    answer: bytes,
    *,
    weight: float = 2.0,
    parent: bytes | None = None,
) -> NewVersion:
    digest = parent_in(folder / "versions") if parent is None else parent
    return ckks.apply_sum(
        *role,
        folder / "sum",
        SumTerms(SIZES, EXPONENTS, weight, digest, SHAPE.digest, folder / "versions"),
        answer=answer,
    )


def test_a_sum_under_another_key_is_refused_and_no_version_written(roles: Path) -> None:
    ckks.start_sum(*COORDINATOR, SIZES, check_of(LEAD, SITES))
    path = write_update(roles / "u.npy", delta(0), 0.1)
    for site in SITES[:2]:
        check = check_of(site, SITES)
        hiding = Hiding(1.0, EXPONENTS)
        ckks.encrypt_update(*HOLDER, path, SIZES, hiding, roles / "u", check=check)
        ckks.add_update(*COORDINATOR, site, roles / "u")
    finished = ckks.finish_sum(*COORDINATOR, roles / "sum")
    with pytest.raises(CryptoError, match="nothing was claimed of this sum"):
        apply(HOLDER, roles, bytes(8))
    answer = proven(HOLDER, COORDINATOR, check_of(SITES[0], SITES), finished)
    with pytest.raises(CryptoError, match="came after a sum was claimed"):
        ckks.hold_context(*HOLDER, b"", secret=True, contributors=3, bits=16)
    with pytest.raises(UnprovenSum):
        apply(HOLDER, roles, bytes(8))
    ckks.deal_key(*COORDINATOR, 3, 16)
    with pytest.raises(CryptoError, match="under another key"):
        apply(COORDINATOR, roles, answer)
    for weight in (0.0, -1.0, float("nan"), float("inf"), 3.5):
        with pytest.raises(CryptoError, match="total weight"):
            apply(HOLDER, roles, answer, weight=weight)
    with pytest.raises(VersionError):
        apply(HOLDER, roles, answer, parent=bytes(32))
    assert len(list((roles / "versions").iterdir())) == 1
    assert apply(HOLDER, roles, answer).mean_loss == pytest.approx(0.1, abs=1e-6)
