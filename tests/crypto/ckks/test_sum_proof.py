"""Checksums against Python's own integers; tags, claims and answers at their bounds."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st

from crypto.arrays import Int64
from crypto.ckks import sum_proof
from crypto.ckks.sum_proof import (
    COMMITMENT_BYTES,
    LARGEST,
    NONCE_BYTES,
    PRIME,
    VALUE_BYTES,
    Check,
    CheckKey,
    Claim,
    Tags,
    TagTally,
    UnprovenSum,
    inner_products,
)
from crypto.quantize import CryptoError

SITES = ("a", "b", "c", "d")
EXPONENTS = (-3, 2)
AGREED = hashlib.sha256(b"the plan").digest()
KEY = CheckKey(b"what the key dealer sealed", 7, 1)


def check_at(site: str, *, coordinator: str = "a", agreed: bytes = AGREED) -> Check:
    return Check(site, coordinator, tuple(s for s in SITES if s != coordinator), agreed)


def expanded(challenge: bytes, values: int) -> list[int]:
    """The vector of a challenge, word by word, with another call of the library."""
    stream = Cipher(algorithms.ChaCha20(challenge, bytes(16)), mode=None).encryptor()
    raw = stream.update(bytes(8 * values))
    return [int.from_bytes(raw[8 * i : 8 * i + 8], "little") % PRIME for i in range(values)]


def reference(challenge: bytes, integers: np.ndarray) -> int:
    pairs = zip(expanded(challenge, integers.size), integers.tolist(), strict=True)
    return int(sum(r * x for r, x in pairs)) % PRIME


# ---- arithmetic ---------------------------------------------------------------------------


@given(
    st.integers(0, 2**32),
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=3),
    st.one_of(st.integers(0, 40), st.integers(8185, 8200), st.integers(16380, 16400)),
    st.sampled_from([1, 127, 2**15 - 1, LARGEST]),
    st.sampled_from([np.int32, np.int64]),
)
@pytest.mark.slow
def test_an_inner_product_is_that_of_big_integers(
    seed: int, challenges: list[bytes], size: int, largest: int, dtype: type[Any]
) -> None:
    integers = np.random.default_rng(seed).integers(-largest, largest + 1, size).astype(dtype)
    assert inner_products(challenges, integers) == [reference(c, integers) for c in challenges]


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_integers_and_extreme_words_are_exact(
    monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    """Every partial sum at its largest: one bit more and float64 would round."""

    def ones(_: bytes) -> Any:
        return lambda buffer: buffer.fill(255)

    monkeypatch.setattr(sum_proof, "keystream", ones)
    size = 3 * 8192 + 1
    integers = np.full(size, sign * LARGEST, dtype=np.int64)
    assert inner_products([bytes(32)], integers) == [size * (2**64 - 1) * sign * LARGEST % PRIME]


@pytest.mark.parametrize("value", [LARGEST + 1, -LARGEST - 1, 2**31 - 1, -(2**31)])
def test_integers_that_would_not_be_exact_are_refused(value: int) -> None:
    with pytest.raises(CryptoError, match="integers within"):
        inner_products([bytes(32)], np.array([0, value], dtype=np.int32))


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 50))
def test_it_is_linear(seed: int, count: int, size: int) -> None:
    parts = np.random.default_rng(seed).integers(-(2**15), 2**15, (count, size))
    challenge = KEY.challenge("b")
    each = [inner_products([challenge], part)[0] for part in parts]
    assert inner_products([challenge], parts.sum(axis=0)) == [sum(each) % PRIME]


# ---- tags, claims, answers -----------------------------------------------------------------


def proven(
    vectors: dict[str, np.ndarray], *, coordinator: str = "a", holder: str = "b"
) -> tuple[Check, Claim, bytes]:
    """An honest coordinator's part for the sites in ``vectors``, which need not be all."""
    tally = TagTally(check_at(coordinator, coordinator=coordinator))
    for number, (site, vector) in enumerate(vectors.items()):
        if site == coordinator:
            tally.own(vector)
        else:
            check = check_at(site, coordinator=coordinator)
            nonce = bytes([number]) * NONCE_BYTES
            tags = KEY.tags(check, EXPONENTS, vector, nonce)
            tally.add(site, Tags.parse(tags, len(check.holders)))
    claim = Claim(bytes(32), tally.nonces(vectors))
    return (
        check_at(holder, coordinator=coordinator),
        claim,
        tally.answer(vectors, holder, KEY.challenge(holder)),
    )


def drawn(seed: int, sites: str) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {site: chance.integers(-32767, 32768, 300).astype(np.int32) for site in sites}


def sum_of(vectors: dict[str, np.ndarray]) -> Int64:
    total = np.zeros(300, dtype=np.int64)
    for vector in vectors.values():
        total += vector
    return total


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.sets(st.sampled_from(SITES), min_size=1),
    st.sampled_from(SITES),
    st.data(),
)
def test_whoever_contributes_the_true_sum_is_proven_and_no_other(
    seed: int, contributing: set[str], coordinator: str, data: st.DataObject
) -> None:
    vectors = drawn(seed, "".join(sorted(contributing)))
    holder = data.draw(st.sampled_from(check_at("", coordinator=coordinator).holders))
    check, claim, answer = proven(vectors, coordinator=coordinator, holder=holder)
    total = sum_of(vectors)
    KEY.verify(check, claim, EXPONENTS, total, answer)

    place = data.draw(st.integers(0, total.size - 1))
    total[place] += data.draw(st.sampled_from([-(2**17), -1, 1, 2**17]))
    with pytest.raises(UnprovenSum, match="is not that of the updates of"):
        KEY.verify(check, claim, EXPONENTS, total, answer)


def test_a_proof_is_for_one_holder_set_of_sites_plan_scale_and_attempt() -> None:
    vectors = drawn(1, "abcd")
    total = sum_of(vectors)
    check, claim, answer = proven(vectors)
    KEY.verify(check, claim, EXPONENTS, total, answer)
    fewer = replace(claim, nonces=claim.nonces[:-1])
    nonces = [nonce for _, nonce in claim.nonces]
    exchanged = [nonces[0], nonces[2], nonces[1], nonces[3]]
    swapped = replace(claim, nonces=tuple(zip("abcd", exchanged, strict=True)))
    other_terms = check_at("b", agreed=hashlib.sha256(b"another plan").digest())
    wrong: list[tuple[CheckKey, Check, Claim, tuple[int, ...]]] = [
        (KEY, check, fewer, EXPONENTS),
        (KEY, check, swapped, EXPONENTS),
        (KEY, check_at("c"), claim, EXPONENTS),
        (KEY, other_terms, claim, EXPONENTS),
        (KEY, replace(check, holders=("b", "c", "d", "e")), claim, EXPONENTS),
        (KEY, check, claim, (-3, 3)),
        (CheckKey(b"what the key dealer sealed", 7, 2), check, claim, EXPONENTS),
        (CheckKey(b"what the key dealer sealed", 8, 1), check, claim, EXPONENTS),
        (CheckKey(b"what another dealer sealed", 7, 1), check, claim, EXPONENTS),
    ]
    for key, seen_by, said, exponents in wrong:
        with pytest.raises(UnprovenSum):
            key.verify(seen_by, said, exponents, total, answer)


def test_tags_of_equal_vectors_differ_and_look_uniform() -> None:
    """What the coordinator sees are pads: here their mean, within five deviations."""
    vector = np.zeros(3, dtype=np.int32)
    values: list[int] = []
    for number in range(400):
        tags = KEY.tags(check_at("b"), EXPONENTS, vector, number.to_bytes(NONCE_BYTES, "little"))
        values += Tags.parse(tags, 3).values
    assert len(set(values)) == len(values)
    assert abs(np.mean(values) / PRIME - 0.5) < 5 / np.sqrt(12 * len(values))


def test_the_key_shows_nothing() -> None:
    assert repr(KEY) == "CheckKey(...)"
    with pytest.raises(CryptoError, match="a nonce has 16 bytes"):
        KEY.tags(check_at("b"), EXPONENTS, np.zeros(3, dtype=np.int32), b"")


@given(st.binary(max_size=100), st.integers(1, 4))
def test_tags_are_parsed_within_bounds(data: bytes, holders: int) -> None:
    step = VALUE_BYTES + COMMITMENT_BYTES
    right = len(data) == NONCE_BYTES + holders * step
    values = [
        int.from_bytes(data[at : at + VALUE_BYTES], "little")
        for at in range(NONCE_BYTES, len(data), step)
    ]
    if right and all(value < PRIME for value in values):
        assert list(Tags.parse(data, holders).values) == values
    else:
        with pytest.raises(CryptoError):
            Tags.parse(data, holders)


@pytest.mark.parametrize(("value", "canonical"), [(0, True), (PRIME - 1, True), (PRIME, False)])
def test_a_checksum_has_one_encoding(value: int, canonical: bool) -> None:
    data = bytes(NONCE_BYTES) + value.to_bytes(VALUE_BYTES, "little") + bytes(COMMITMENT_BYTES)
    if canonical:
        assert Tags.parse(data, 1).values == (value,)
    else:
        with pytest.raises(CryptoError, match="below 2\\^61 - 1"):
            Tags.parse(data, 1)


@pytest.mark.parametrize(
    "nonces",
    [
        (("b", bytes(16)), ("b", bytes(16))),
        (("c", bytes(16)), ("b", bytes(16))),
        (("b", bytes(16)), ("x", bytes(16))),
        (("a", bytes(16)), ("b", bytes(16))),
        (("a", b""), ("b", b"")),
        (("a", b""), ("b", bytes(17))),
    ],
)
def test_a_claim_names_participants_once_each(nonces: tuple[tuple[str, bytes], ...]) -> None:
    with pytest.raises(CryptoError):
        Claim(bytes(32), nonces).check(check_at("b"))


def test_what_can_be_no_check_or_claim_is_refused() -> None:
    for holders in (("a", "b"), ("c", "b"), ("b", "b")):
        with pytest.raises(CryptoError, match="key holders are"):
            Check("b", "a", holders, AGREED)
    with pytest.raises(CryptoError, match="32 bytes"):
        Check("b", "a", ("b",), b"")
    with pytest.raises(CryptoError, match="32 bytes"):
        Claim(b"", (("b", bytes(16)),)).check(check_at("b"))
    tally = TagTally(check_at("a"))
    with pytest.raises(CryptoError, match="no key holder"):
        tally.answer([], "a", bytes(32))
    with pytest.raises(CryptoError, match="a challenge has 32 bytes"):
        tally.answer([], "b", bytes(31))
