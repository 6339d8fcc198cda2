"""Round keys: sums exact at the extremes, and what a peer may not send."""

from __future__ import annotations

import math
import pickle
from functools import lru_cache

import numpy as np
import pytest

from crypto.arrays import Int32
from crypto.ckks.parameters import (
    BITS,
    MAX_CONTRIBUTORS,
    MAX_MODULUS_BITS,
    CkksParameters,
    choose_parameters,
)
from crypto.ckks.sums import DealtKey, RoundKey, RunningSum, deal
from crypto.quantize import RESIDUAL_LIMIT, CryptoError, Slots, pack, unpack


class Site:
    """A round's two kinds of key, and a sum of one block."""

    def __init__(self, parameters: CkksParameters) -> None:
        self.parameters = parameters
        self.packing = parameters.packing
        self.dealt = deal(parameters)
        self.holder = RoundKey(parameters, self.dealt.secret, secret=True)
        self.coordinator = RoundKey(parameters, self.dealt.public, secret=False)

    def decrypted_sum(self, rows: list[Slots]) -> Slots:
        """One contributor encrypts under the public key, the others under the secret one."""
        total = RunningSum(self.parameters, 1)
        for number, row in enumerate(rows):
            key = self.holder if number else self.coordinator
            total.add(0, key.encrypt(row))
        return self.holder.decrypt(total.block(0))[None, :]


@lru_cache(maxsize=256)
def site(contributors: int, bits: int) -> Site:
    return Site(choose_parameters(contributors, bits))


def extremes(pattern: str, site: Site, seed: int = 0) -> Int32:
    """One block of integers in -limit .. limit, in the worst arrangements there are."""
    limit, count = site.packing.limit, site.packing.values_per_block
    position = np.arange(count)
    signs = {
        "all greatest": np.ones(count),
        "all least": -np.ones(count),
        "alternating": 1 - 2 * (position % 2),
        "components opposed": np.where(position < count // 2, 1, -1),
        "random": np.random.default_rng(seed).choice([-1, 1], count),
    }[pattern]
    return (signs * limit).astype(np.int32)


PATTERNS = ["all greatest", "all least", "alternating", "components opposed", "random"]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("contributors", [2, 3, 4, 5, 8, 16, 17, 22, 23, 32, 43, 64])
def test_sums_are_exact_at_the_extremes(contributors: int, bits: int) -> None:
    here = site(contributors, bits)
    pattern = PATTERNS[contributors % len(PATTERNS)]
    integers = extremes(pattern, here)
    rows = [pack(integers, here.packing)[0]] * contributors
    total = unpack(here.decrypted_sum(rows), here.packing, integers.size)
    assert (total == contributors * integers.astype(np.int64)).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_sums_are_exact_with_the_most_contributors(bits: int) -> None:
    here = site(MAX_CONTRIBUTORS, bits)
    integers = extremes("all greatest", here)
    total = here.decrypted_sum([pack(integers, here.packing)[0]] * MAX_CONTRIBUTORS)
    assert (unpack(total, here.packing, integers.size) == 256 * here.packing.limit).all()


def test_every_choice_keeps_its_stated_margins() -> None:
    for bits in BITS:
        for contributors in range(2, MAX_CONTRIBUTORS + 1):
            chosen = choose_parameters(contributors, bits)
            assert chosen.noise_margin >= 1
            assert sum(chosen.primes) <= MAX_MODULUS_BITS
            largest = math.sqrt(2) * chosen.packing.largest_component * 2.0**chosen.scale_bits
            assert largest < 2.0**59 * 15 / 16
            assert chosen.packing.largest_component < 2**52  # exact in a double


def test_the_usual_choices() -> None:
    usual = {
        (3, 16): (2, (60,), 23),
        (8, 16): (2, (60,), 21),
        (3, 12): (3, (60, 60), 17),
        (3, 8): (4, (60, 60), 19),
        (64, 16): (1, (60,), 30),
    }
    for (contributors, bits), expected in usual.items():
        chosen = choose_parameters(contributors, bits)
        assert (chosen.packing.digits, chosen.primes, chosen.scale_bits) == expected


@pytest.mark.parametrize(
    ("contributors", "bits", "remedy"),
    [(3, 10, "8, 12 or 16"), (1, 16, "from 2 contributors on"), (257, 16, "256 is the most")],
)
def test_impossible_choices_name_the_remedy(contributors: int, bits: int, remedy: str) -> None:
    with pytest.raises(CryptoError, match=remedy):
        choose_parameters(contributors, bits)


@pytest.mark.parametrize(("contributors", "bits"), [(3, 16), (3, 12)])
@pytest.mark.parametrize("public", [True, False])
def test_the_noise_is_what_the_model_says(contributors: int, bits: int, public: bool) -> None:
    """Both chains; the bound must hold and must not be idle talk either."""
    here = site(contributors, bits)
    key = here.coordinator if public else here.holder
    zero = np.zeros(here.packing.slots, dtype=np.complex128)
    slots = np.concatenate([here.holder.decrypt(key.encrypt(zero)) for _ in range(12)])
    noise = np.concatenate([slots.real, slots.imag]) * 2.0**here.parameters.scale_bits
    single = len(here.parameters.primes) == 1
    variance = (
        (10.5 * (4 * 8192 / 3 + 1) if single else (2 * 8192 / 3 + 2) / 12) if public else 10.6
    )
    assert noise.std() == pytest.approx(math.sqrt(8192 / 2 * variance), rel=0.05)
    bound = RESIDUAL_LIMIT * 2.0**here.parameters.scale_bits / here.parameters.noise_margin
    assert np.abs(noise).max() < bound


def test_too_small_a_scale_is_noticed_and_not_rounded_away() -> None:
    right = choose_parameters(3, 16)
    wrong = CkksParameters(right.packing, right.primes, right.scale_bits - 8)
    here = Site(wrong)
    integers = extremes("random", here)
    total = here.decrypted_sum([pack(integers, here.packing)[0]] * 3)
    with pytest.raises(CryptoError, match="away from an integer"):
        unpack(total, here.packing, integers.size)


# ---- who may decrypt --------------------------------------------------------------


def test_the_coordinator_cannot_decrypt_what_it_holds() -> None:
    here = site(3, 16)
    block = here.holder.encrypt(np.ones(here.packing.slots, dtype=np.complex128))
    assert not here.coordinator.can_decrypt
    with pytest.raises(CryptoError, match="only the round's public key"):
        here.coordinator.decrypt(block)


def test_the_public_context_does_not_contain_the_secret_one() -> None:
    here = site(3, 16)
    secret = here.dealt.secret[-here.parameters.degree * 8 :]
    for start in range(0, len(secret), 64):
        assert secret[start : start + 64] not in here.dealt.public


def test_the_public_context_does_not_load_as_a_secret_one() -> None:
    here = site(3, 16)
    header, public = here.dealt.secret[:14], here.dealt.public[14:]
    with pytest.raises(CryptoError, match="expected a secret one"):
        RoundKey(here.parameters, here.dealt.public, secret=True)
    forged = RoundKey(here.parameters, header + public[: 8192 * 8], secret=True)
    block = here.coordinator.encrypt(np.ones(here.packing.slots, dtype=np.complex128))
    with pytest.raises(CryptoError, match="refused"):
        unpack(forged.decrypt(block)[None, :], here.packing, here.packing.values_per_block)


def test_another_rounds_key_decrypts_to_a_refusal() -> None:
    here = site(3, 16)
    other = Site(here.parameters)
    block = here.holder.encrypt(pack(extremes("random", here), here.packing)[0])
    with pytest.raises(CryptoError, match="under another key"):
        unpack(other.holder.decrypt(block)[None, :], here.packing, here.packing.values_per_block)


def test_a_dealt_key_does_not_show_itself() -> None:
    assert repr(DealtKey(b"public", b"secret")) == "DealtKey(...)"
    assert pickle.loads(pickle.dumps(DealtKey(b"p", b"s"))) == DealtKey(b"p", b"s")  # noqa: S301


def test_equal_updates_encrypt_to_different_blocks() -> None:
    here = site(3, 16)
    slots = np.ones(here.packing.slots, dtype=np.complex128)
    for key in (here.holder, here.coordinator):
        assert key.encrypt(slots) != key.encrypt(slots)


# ---- what a peer may not send -------------------------------------------------------


@pytest.mark.parametrize("secret", [True, False])
def test_contexts_that_are_not_exactly_right_are_refused(secret: bool) -> None:
    here = site(3, 16)
    good = here.dealt.secret if secret else here.dealt.public
    other = here.dealt.public if secret else here.dealt.secret
    elsewhere = deal(choose_parameters(5, 16))
    for bad in (
        b"",
        good[:13],
        good[:-1],
        good + b"\0",
        other,
        elsewhere.secret if secret else elsewhere.public,
        b"HNSX" + good[4:],
        good[:4] + b"\x02" + good[5:],
        good[:-8] + b"\xff" * 8,
        np.random.default_rng(1).bytes(len(good)),
    ):
        with pytest.raises(CryptoError):
            RoundKey(here.parameters, bad, secret=secret)


def test_blocks_that_are_not_exactly_right_leave_the_sum_as_it_was() -> None:
    here = site(3, 16)
    slots = pack(extremes("random", here), here.packing)[0]
    full, seeded = here.coordinator.encrypt(slots), here.holder.encrypt(slots)
    assert (len(full), len(seeded)) == (here.parameters.full_block, here.parameters.seeded_block)
    total = RunningSum(here.parameters, 1)
    total.add(0, seeded)
    before = total.block(0)
    for bad in (
        b"",
        full[:-1],
        seeded[:-1],
        full + b"\0",
        b"\xff" * len(full),
        b"\xff" * len(seeded),
        full[:-8] + (2**60).to_bytes(8, "little"),
        bytes(len(full)),
        full[: len(full) // 2] + bytes(len(full) // 2),  # the second polynomial zero: plaintext
    ):
        with pytest.raises(CryptoError):
            total.add(0, bad)
        assert total.block(0) == before


def test_an_update_that_would_strip_the_sum_of_its_encryption_is_refused() -> None:
    """A contributor that knows the sum so far sends the negative of its random part."""
    here = site(3, 16)
    total = RunningSum(here.parameters, 1)
    total.add(0, here.holder.encrypt(pack(extremes("random", here), here.packing)[0]))
    before = total.block(0)
    words = np.frombuffer(before, dtype="<u8").copy()
    prime = 1152921504606830593  # the 60-bit prime of this chain
    words[8192:] = prime - words[8192:]
    with pytest.raises(CryptoError, match="could not add"):
        total.add(0, words.tobytes())
    assert total.block(0) == before


def test_subtracting_takes_back_to_the_last_bit() -> None:
    here = site(3, 16)
    slots = pack(extremes("random", here), here.packing)[0]
    total = RunningSum(here.parameters, 1)
    total.add(0, here.holder.encrypt(slots))
    before = total.block(0)
    for block in (
        here.holder.encrypt(slots),
        here.holder.encrypt(slots, seeded=False),
        here.coordinator.encrypt(slots),
    ):
        total.add(0, block)
        assert total.block(0) != before
        total.subtract(0, block)
        assert total.block(0) == before


def test_a_block_that_compresses_is_summed_like_any_other() -> None:
    """SEAL writes such a sum compressed; its words must come out all the same."""
    here = site(3, 16)
    block = np.arange(2 * 8192, dtype="<u8").tobytes()
    total = RunningSum(here.parameters, 1)
    total.add(0, block)
    assert total.block(0) == block


def test_an_empty_sum_has_no_block() -> None:
    with pytest.raises(CryptoError, match="nothing was added"):
        RunningSum(choose_parameters(3, 16), 1).block(0)
