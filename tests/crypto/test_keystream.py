"""The ring that masked sums are taken in, and the keystream that masks are."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.keystream import Ring, add_masks


def test_words_are_the_smallest_in_which_the_sum_fits() -> None:
    widths = {
        (bits, sites): Ring(bits, sites).word_bits
        for bits, sites in (
            (8, 256),
            (8, 2),
            (14, 4),
            (14, 5),
            (16, 2),
            (16, 256),
            (24, 256),
            (25, 256),
        )
    }
    assert widths == {
        (8, 256): 16,
        (8, 2): 16,
        (14, 4): 16,
        (14, 5): 32,
        (16, 2): 32,
        (16, 256): 32,
        (24, 256): 32,
        (25, 256): 64,
    }
    assert Ring(16, 5).size(1_200_000) == 4 * 1_200_000  # 4 bytes a value


@settings(deadline=None)
@given(st.integers(2, 32), st.integers(2, 256), st.sampled_from([-1, 1]))
def test_extreme_sums_stay_in_the_ring(bits: int, contributors: int, sign_: int) -> None:
    ring = Ring(bits, contributors)
    words = ring.to_words(np.array([sign_ * ring.limit], dtype=np.int32), 1)
    total = (words.astype(np.uint64) * np.uint64(contributors)).astype(ring.dtype)
    assert ring.to_integers(total, contributors)[0] == sign_ * ring.limit * contributors


def test_a_mask_is_chacha20_of_rfc_8439() -> None:
    """§2.4.2 and appendix A.1, test vector 1: key, counter and nonce of zeros."""
    words = np.zeros(4, dtype="<u4")
    add_masks(words, [bytes(32)], [])
    assert words.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


@pytest.mark.parametrize("values", [1, 7, 32_768, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_masks_are_one_keystream_whatever_the_length(values: int, dtype: str) -> None:
    key = bytes(range(32))
    words = np.zeros(values, dtype=dtype)
    add_masks(words, [key], [])
    whole = (
        Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(words.nbytes * b"\0")
    )
    assert words.tobytes() == whole
    add_masks(words, [], [key])
    assert not words.any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=32, max_size=32), max_size=4), st.integers(1, 40_000))
def test_masks_cancel(keys: list[bytes], values: int) -> None:
    before = np.random.default_rng(1).integers(0, 2**32, values, dtype=np.uint32)
    words = before.copy()
    add_masks(words, keys, keys[:1])
    add_masks(words, keys[:1], keys)
    assert np.array_equal(words, before)
