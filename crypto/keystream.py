"""Masks: integers mod 2^m, and the keystreams that are added to them.

A site's b-bit integers become words of 16, 32 or 64 bits, the smallest in which
the sum of all contributors still fits with its sign. Sums wrap around in the ring
of integers mod 2^m, where a uniform mask hides a word perfectly and disappears
when it is subtracted, so the unmasked sum is exact.

A mask is the keystream of ChaCha20 (RFC 8439 §2.4) under a key of its own. A key
makes one mask and nothing else, so that nonce and counter may begin at zero.

Nothing here touches a disk or a clock, and nothing draws randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from crypto.arrays import Int32
from crypto.quantize import CryptoError

Words = NDArray[Any]  # unsigned, little-endian, of the ring's width
Integers = NDArray[Any]  # signed, of the same width

MAX_CONTRIBUTORS = 256
MIN_BITS, MAX_BITS = 2, 32
# 32 GiB of the widest words: an eighth of what ChaCha20's 32-bit block counter can number.
MAX_VALUES = 2**32

# Bytes of keystream at a time: fits the second-level cache (measured 5.2 to 6.2 GB/s from
# 64 KiB to 256 KiB, 1.1 GB/s with 8 MiB), and bounds the memory whatever a vector's length.
BLOCK_BYTES = 128 * 1024
_ZEROS = bytes(BLOCK_BYTES)
_KEY_BYTES = 32


@dataclass(frozen=True)
class Ring:
    """Integers mod 2^m in which sums of ``contributors`` ``bits``-bit integers are exact."""

    bits: int
    contributors: int

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise CryptoError(f"bits = {self.bits}: masked integers have {MIN_BITS} to {MAX_BITS}")
        if not 2 <= self.contributors <= MAX_CONTRIBUTORS:
            raise CryptoError(
                f"contributors = {self.contributors}: a sum hides its parts from 2 on, and "
                f"{MAX_CONTRIBUTORS} is the most that a federation has"
            )

    @property
    def limit(self) -> int:
        """Largest |integer| that one contributor may send: 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def word_bits(self) -> int:
        """m: the sum of all contributors' integers fits, with its sign."""
        needed = self.bits + (self.contributors - 1).bit_length()
        return next(width for width in (16, 32, 64) if width >= needed)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a word, on the wire and in memory."""
        return np.dtype(f"<u{self.word_bits // 8}")

    def size(self, values: int) -> int:
        """Bytes of a masked vector."""
        return values * self.word_bits // 8

    def to_words(self, integers: Int32, values: int) -> Words:
        """A site's integers in the ring, a new array of shape [values].

        Raises CryptoError when there are more or fewer, or one is beyond the limit:
        it would spill into the sum's sign.
        """
        if integers.dtype != np.int32 or integers.shape != (values,):
            raise CryptoError(
                f"expected {values} int32 values, got {integers.dtype} of shape {integers.shape}"
            )
        # As Python's integers: the absolute value of int32's least does not fit int32.
        if max(int(integers.max()), -int(integers.min())) > self.limit:
            raise CryptoError(f"an integer is beyond ±{self.limit}, the limit of {self.bits} bits")
        return integers.astype(self.dtype)  # two's complement: the ring's own representation

    def parse(self, data: bytes, values: int) -> Words:
        """A peer's masked vector, read-only; every word is valid, so its length is all there is."""
        if len(data) != self.size(values):
            raise CryptoError(
                f"a masked vector of {values} values has {self.size(values)} bytes, not {len(data)}"
            )
        return np.frombuffer(data, dtype=self.dtype)

    def to_integers(self, words: Words, contributors: int) -> Integers:
        """The signed sum that unmasked words stand for: the same memory, no copy of it.

        Raises CryptoError when one is larger than ``contributors`` sites can have
        sent: then a mask is left in it, or a site sent what no honest site sends.
        """
        integers = words.view(np.dtype(f"<i{self.word_bits // 8}"))
        if max(int(integers.max()), -int(integers.min())) > contributors * self.limit:
            raise CryptoError(
                "the unmasked sum was refused: an integer exceeds what the contributors can have "
                "sent. A mask did not fit, or a contributor sent what no honest site sends; the "
                "attempt must fail"
            )
        return integers


def add_masks(words: Words, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the masks of these 32-byte keys to ``words``, in place, and subtract those.

    One block of the vector at a time takes all masks, so that it is fetched from
    memory once; a second thread gains nothing that a round would notice (5 masks of
    1.2 M 32-bit words take 5 ms).
    """
    streams: list[tuple[Callable[[Any], object], np.ufunc]] = [
        *((keystream(key), np.add) for key in plus),
        *((keystream(key), np.subtract) for key in minus),
    ]
    buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
    step = BLOCK_BYTES // words.itemsize
    for start in range(0, words.size, step):
        block = words[start : start + step]
        for fill, operation in streams:
            fill(buffer)  # a last, shorter block uses the first of its words
            operation(block, buffer.view(words.dtype)[: block.size], out=block)


def keystream(key: bytes) -> Callable[[Any], object]:
    """Fills a buffer of BLOCK_BYTES with the next bytes of a keystream."""
    if len(key) != _KEY_BYTES:
        raise CryptoError(f"a mask's key has {_KEY_BYTES} bytes, not {len(key)}")
    # `cryptography` takes counter and nonce in one: 16 zero bytes (see the module's text).
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda buffer: encryptor.update_into(_ZEROS, buffer)
