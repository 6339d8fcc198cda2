"""Proof that a decrypted sum is made of the named sites' updates (docs/decisions/0014).

A linearly homomorphic, one-time authenticator over F_p, p = 2^61 - 1. Key holders share
a secret that the coordinator lacks. It gives each of them a *challenge*, a vector r as
long as an update. A contributor sends with its integers x, for each holder, the *tag*

    <r, x> + pad   (mod p)

which tells the coordinator nothing. When a holder has been told which sum it shall
decrypt, and never before, it tells the coordinator its challenge. The coordinator adds
the tags, and <r, own update>, and the holder compares with <r, sum> + pads. So what the
coordinator did to the sum was done without knowing r: it can only answer for what it
knows, which is what it might as well have contributed itself. With the tags come
commitments to the challenges: a holder with another challenge would learn something of
the coordinator's own update.

Nothing here touches a disk, a clock or a key of its own; nonces are arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from crypto.arrays import Int32, Int64
from crypto.keystream import BLOCK_BYTES, keystream
from crypto.quantize import CryptoError

PRIME = (1 << 61) - 1
CHALLENGE_BYTES = 32
NONCE_BYTES = 16
VALUE_BYTES = 8
COMMITMENT_BYTES = 16  # a lying holder needs a second preimage
# Of an integer: 16 bits and 256 contributors need 24 bits with the sign.
LARGEST = (1 << 24) - 1

_DIGEST_BYTES = 32
_WORD = 8  # bytes of keystream that make an element of F_p
_LIMBS = 4  # of 16 bits, in each such word
_STEP = 1 << 13  # elements at a time
assert _STEP * LARGEST * 0xFFFF < 1 << 53  # noqa: S101  so float64 is exact, in any order
assert BLOCK_BYTES % (_STEP * _WORD) == 0  # noqa: S101  no element lies across two blocks


class UnprovenSum(CryptoError):
    """The decrypted sum is not that of the named contributors' updates."""


@dataclass(frozen=True)
class Check:
    """What all sites of an attempt must agree on, as ``site`` sees it.

    ``agreed``: digest (32 bytes) of whatever gives the integers their meaning, the plan
    above all. ``holders``: all that hold the attempt's secret, so never ``coordinator``.
    """

    site: str
    coordinator: str
    holders: tuple[str, ...]
    agreed: bytes

    def __post_init__(self) -> None:
        if self.coordinator in self.holders or list(self.holders) != sorted({*self.holders}):
            raise CryptoError("key holders are sorted sites other than the coordinator")
        if len(self.agreed) != _DIGEST_BYTES:
            raise CryptoError(f"a digest has {_DIGEST_BYTES} bytes, not {len(self.agreed)}")


@dataclass(frozen=True)
class Claim:
    """What a coordinator says it summed, before it knows a challenge.

    ``sum_digest``: SHA-256 of the encrypted sum. ``nonces``: the contributors, each with
    the nonce of its tags; the coordinator's own is empty.
    """

    sum_digest: bytes
    nonces: tuple[tuple[str, bytes], ...]

    def check(self, check: Check) -> None:
        """Raises CryptoError unless it names sites of this attempt, each once."""
        sites = [site for site, _ in self.nonces]
        if sites != sorted({*sites}) or not {*sites} <= {*check.holders, check.coordinator}:
            raise CryptoError(f"{check.coordinator} names contributors twice, or no participants")
        for site, nonce in self.nonces:
            if len(nonce) != (0 if site == check.coordinator else NONCE_BYTES):
                raise CryptoError(f"the nonce of {site} has {len(nonce)} bytes")
        if len(self.sum_digest) != _DIGEST_BYTES:
            raise CryptoError(f"a digest has {_DIGEST_BYTES} bytes, not {len(self.sum_digest)}")


# ---- arithmetic -----------------------------------------------------------------


def inner_products(challenges: Sequence[bytes], integers: Int32 | Int64) -> list[int]:
    """<r, integers> mod p for the vector r of each challenge (32 bytes).

    An element of r is a 64-bit word of the challenge's ChaCha20 keystream, mod p: no
    residue is likelier than 9 / 2^64. Raises CryptoError when an integer is beyond
    LARGEST. Memory does not grow with the vector.
    """
    # As Python's integers: the absolute value of int32's least does not fit int32.
    largest = max(int(integers.max(initial=0)), -int(integers.min(initial=0)))
    if integers.ndim != 1 or largest > LARGEST:
        raise CryptoError(f"checksums are of vectors of integers within ±{LARGEST}")
    streams = [keystream(challenge) for challenge in challenges]
    totals = [[0] * _LIMBS for _ in challenges]
    words = np.empty(BLOCK_BYTES, dtype=np.uint8)
    # Four 16-bit limbs a word. As float64, because that multiplies fastest, and exactly.
    limbs = words.view("<u2").reshape(-1, _LIMBS)
    for start in range(0, integers.size, len(limbs)):
        values = integers[start : start + len(limbs)].astype(np.float64)
        for total, fill in zip(totals, streams, strict=True):
            fill(words)
            for at in range(0, values.size, _STEP):
                part = values[at : at + _STEP]
                sums: NDArray[Any] = part @ limbs[at : at + part.size].astype(np.float64)
                for limb, value in enumerate(sums.tolist()):
                    total[limb] += int(value)
    return [sum(part << (16 * limb) for limb, part in enumerate(t)) % PRIME for t in totals]


# ---- key holders ----------------------------------------------------------------


class CheckKey:
    """What key holders know and the coordinator does not, for one attempt.

    ``secret`` is anything that only they have, here the round's secret context;
    the same secret in another attempt gives another key.
    """

    def __init__(self, secret: bytes, round: int, attempt: int) -> None:
        info = b"hanse-sum-check-v1\0" + struct.pack("<QI", round, attempt)
        self._key = HKDF(hashes.SHA256(), 32, None, info).derive(secret)

    def __repr__(self) -> str:
        return "CheckKey(...)"  # so that no log can ever hold it

    def challenge(self, holder: str) -> bytes:
        """A holder's own. Must not leave it before it has a claim, and then for no other."""
        return self._derived(b"challenge", holder.encode())

    def tags(
        self, check: Check, exponents: Sequence[int], integers: Int32 | Int64, nonce: bytes
    ) -> bytes:
        """What a contributor sends with its update: nonce; for each holder tag and commitment.

        ``nonce`` (16 random bytes) must be new for each vector: two tags under one pad
        would tell the difference of two inner products.
        """
        if len(nonce) != NONCE_BYTES:
            raise CryptoError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        challenges = [self.challenge(holder) for holder in check.holders]
        products = inner_products(challenges, integers)
        terms = _terms(check, exponents)
        tags = [nonce]
        for holder, challenge, product in zip(check.holders, challenges, products, strict=True):
            pad = self._pad(terms, holder, check.site, nonce)
            tags += [_to_bytes((product + pad) % PRIME), commitment(challenge)]
        return b"".join(tags)

    def verify(
        self,
        check: Check,
        claim: Claim,
        exponents: Sequence[int],
        integers: Int64,
        answer: bytes,
    ) -> None:
        """Raises UnprovenSum unless these integers are the claimed contributors' sum."""
        claim.check(check)
        terms = _terms(check, exponents)
        [expected] = inner_products([self.challenge(check.site)], integers)
        for site, nonce in claim.nonces:
            if site != check.coordinator:
                expected += self._pad(terms, check.site, site, nonce)
        if expected % PRIME != _from_bytes(answer):
            raise UnprovenSum(_not_theirs(check, claim))

    def _pad(self, terms: bytes, holder: str, site: str, nonce: bytes) -> int:
        # 128 bits mod p: no residue is likelier than (1 + 2^-67) / p.
        wide = self._derived(b"pad", terms, holder.encode(), site.encode(), nonce)[:16]
        return int.from_bytes(wide, "little") % PRIME

    def _derived(self, *parts: bytes) -> bytes:
        return hmac.digest(self._key, _joined(*parts), "sha256")


def _not_theirs(check: Check, claim: Claim) -> str:
    return (
        f"the sum was refused: it is not that of the updates of {', '.join(dict(claim.nonces))}. "
        f"{check.coordinator}, who summed, changed it or told sites different terms; or one of "
        "them sent a tag that does not fit its update. If attempts under other coordinators "
        f"succeed, look at {check.coordinator}; if they fail, at whom all failed ones name"
    )


def _terms(check: Check, exponents: Sequence[int]) -> bytes:
    """Digest of what the integers mean: who was told something else makes other pads."""
    scale = struct.pack(f"<{len(exponents)}i", *exponents)
    sites = _joined(check.coordinator.encode(), *(holder.encode() for holder in check.holders))
    return hashlib.sha256(_joined(check.agreed, scale, sites)).digest()


def _joined(*parts: bytes) -> bytes:
    """One encoding for each sequence of parts."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def size_of_tags(holders: int) -> int:
    """Bytes of the tags that go with an update when there are so many key holders."""
    return NONCE_BYTES + holders * (VALUE_BYTES + COMMITMENT_BYTES)


# ---- coordinator ----------------------------------------------------------------


class TagTally:
    """The tags that came with the updates in a sum, and the coordinator's own integers."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._tags: dict[str, Tags] = {}
        self._own: Int32 | None = None

    def own(self, integers: Int32 | Int64) -> None:
        """Keep what the coordinator itself contributes until the challenges come."""
        self._own = integers.astype(np.int32)

    def add(self, site: str, tags: Tags) -> None:
        """A contributor's tags, when its update is in the sum."""
        self._tags[site] = tags

    def nonces(self, contributors: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
        """For the claim: exactly these contributors, sorted."""
        nonces = {site: tags.nonce for site, tags in self._tags.items()}
        nonces[self.check.coordinator] = b""
        return tuple((site, nonces[site]) for site in sorted(contributors))

    def answer(self, contributors: Iterable[str], holder: str, challenge: bytes) -> bytes:
        """What one holder will compare with the sum of exactly these contributors' updates.

        It is a function of the sum and of pads that the holder knows, so it tells nothing
        else; with another challenge than the one that the contributors' tags are for it
        would. Raises CryptoError, naming the contributors, when they committed to another.
        """
        if holder not in self.check.holders:
            raise CryptoError(f"{holder} is no key holder of this attempt")
        if len(challenge) != CHALLENGE_BYTES:
            raise CryptoError(f"a challenge has {CHALLENGE_BYTES} bytes, not {len(challenge)}")
        place = self.check.holders.index(holder)
        others = [site for site in contributors if site != self.check.coordinator]
        promised = commitment(challenge)
        if wrong := [s for s in others if self._tags[s].commitments[place] != promised]:
            raise CryptoError(
                f"{holder} sent another challenge than {', '.join(sorted(wrong))} made tags for: "
                "one of them is faulty, or the key dealer sent them different keys"
            )
        total = sum(self._tags[site].values[place] for site in others)
        if self.check.coordinator in contributors and self._own is not None:
            total += inner_products([challenge], self._own)[0]
        return _to_bytes(total % PRIME)


@dataclass(frozen=True)
class Tags:
    """A contributor's tags as they were parsed: for each holder, in their order."""

    nonce: bytes
    values: tuple[int, ...]
    commitments: tuple[bytes, ...]

    @classmethod
    def parse(cls, data: bytes, holders: int) -> Tags:
        """Raises CryptoError unless there is one for each holder, canonical."""
        step = VALUE_BYTES + COMMITMENT_BYTES
        expected = size_of_tags(holders)
        if len(data) != expected:
            raise CryptoError(
                f"tags for {holders} key holders have {expected} bytes, not {len(data)}"
            )
        parts = [data[at : at + step] for at in range(NONCE_BYTES, expected, step)]
        return cls(
            data[:NONCE_BYTES],
            tuple(_from_bytes(part[:VALUE_BYTES]) for part in parts),
            tuple(part[VALUE_BYTES:] for part in parts),
        )


def commitment(challenge: bytes) -> bytes:
    """Binds to a challenge, which has 256 bits of entropy and so stays hidden."""
    return hashlib.sha256(b"hanse-sum-check-commitment-v1\0" + challenge).digest()[
        :COMMITMENT_BYTES
    ]


def _to_bytes(value: int) -> bytes:
    return value.to_bytes(VALUE_BYTES, "little")


def _from_bytes(data: bytes) -> int:
    value = int.from_bytes(data, "little")
    if len(data) != VALUE_BYTES or value >= PRIME:
        raise CryptoError(f"a checksum is {VALUE_BYTES} bytes below 2^61 - 1: the peer is faulty")
    return value
