"""Dot products of encrypted updates: what robust rules need, and nothing else decrypted.

The coordinator holds every update as blocks x[j] of one integer a slot
(`crypto.ckks.parameters.choose_measurable`). Once all are here it draws random signs
and sums each site's signed blocks into sketches S[r] = sum_j sign[r, j] x[j], so
that the mean over r of <S_a[r], S_b[r]> is <x_a, x_b> in expectation (Alon, Matias
and Szegedy 1996). A *question* holds one encrypted number for each pair of sites,
and a *probe* for each site; an *answer* is those numbers, from a key holder.

One number and not N/2 of them: the constant coefficient of a polynomial is the
mean of its slots. So of the component that carries the message only that
coefficient is sent, which hides all others perfectly; the components beside it
would give the products away to who knows the key, and are re-randomised with a
fresh encryption of zero. What noise is left is drowned in a number drawn from
+-PRODUCT_PRECISION. docs/decisions/0013 has the argument and what it does not cover.

The probe: an imaginary slot would count *negative* in a norm, and nothing ties a
site to real slots. Multiplied with imaginary random numbers, a sketch of real
slots sums to nothing but noise, whatever they are; an imaginary one does not.

Randomness that decides anything is drawn after the updates are in. Nothing here
keeps state, and every exception is a CryptoError.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float64
from crypto.ckks.parameters import PRODUCT_PRECISION, WORD, CkksParameters
from crypto.ckks.seal_library import Compressed, Frame, seal_of, translated
from crypto.ckks.sums import RoundKey
from crypto.quantize import CryptoError

Words = NDArray[np.uint64]
Signs = NDArray[np.bool_]

SKETCHES = 16
MAX_BLOCKS = 1 << 13
MAX_SITES = 64

# Constant coefficients of probes. Noise: 2^46 measured at 74 blocks, growing with the root
# of their number; an imaginary part of 64 units in one slot of one block gives some 2^61.
_PROBE_FLOOD = 1 << 60
_PROBE_NOISE = 1 << 53
_PROBE_SCALE = 2.0**20

_HEADER = struct.Struct("<4sH8sI")  # magic, version, parameters, sites
_MAGIC = b"HNSG"
_VERSION = 1


@dataclass(frozen=True)
class Answer:
    """What a key holder read: ``products`` [K, K], symmetric, in squared integer units.

    ``imaginary`` [K]: whether a site's update has imaginary parts, which no honest one has.
    """

    products: Float64
    imaginary: NDArray[np.bool_]


def draw_signs(blocks: int) -> Signs:
    """Signs for each sketch and block, shape [SKETCHES, blocks]; True: minus.

    From the operating system: an update that knew them could hide from them.
    """
    if not 1 <= blocks <= MAX_BLOCKS:
        raise CryptoError(
            f"{blocks} blocks an update: dot products have room for {MAX_BLOCKS}; "
            "exchange fewer parameters, or go without a robust rule"
        )
    drawn = np.frombuffer(os.urandom(SKETCHES * blocks), dtype=np.uint8)
    return (drawn & 1).astype(np.bool_).reshape(SKETCHES, blocks)


def question_size(parameters: CkksParameters, sites: int) -> int:
    """Bytes of a question about so many sites, exactly."""
    constant = parameters.levels * WORD
    pairs = sites * (sites + 1) // 2
    return (
        _HEADER.size
        + pairs * (constant + 2 * parameters.polynomial)
        + sites * (constant + parameters.polynomial)
    )


# ---- the coordinator ------------------------------------------------------------


class Sketches:
    """The coordinator's sketches of all sites' updates: needs no secret key."""

    def __init__(self, key: RoundKey, signs: Signs) -> None:
        self._key = key
        self._signs = signs
        self._tools = _tools(key.parameters)
        self._of: dict[str, list[Any]] = {}

    def add(self, site: str, update: Iterable[bytes]) -> None:
        """Sketch one site's update from its blocks. Raises CryptoError when one is refused."""
        seal = self._tools.seal
        sketches: list[Any] = []
        taken, expected = 0, self._signs.shape[1]
        for block in update:
            if taken == expected:
                raise CryptoError(f"an update has more than {expected} blocks")
            loaded = seal.load_block(seal.api.Ciphertext(), block)
            with translated(f"block {taken} could not be sketched"):
                self._take(sketches, loaded, self._signs[:, taken])
            taken += 1
        if taken < expected:
            raise CryptoError(f"an update has {taken} blocks; expected {expected}")
        self._of[site] = sketches

    def _take(self, sketches: list[Any], block: Any, minus: NDArray[np.bool_]) -> None:
        evaluator, fresh = self._tools.seal.evaluator, self._tools.seal.api.Ciphertext
        if not sketches:
            zero = self._tools.zero(self._key)
            for negative in minus:
                first = fresh()
                (evaluator.sub if negative else evaluator.add)(zero, block, first)
                sketches.append(first)
            return
        for sketch, negative in zip(sketches, minus, strict=True):
            (evaluator.sub_inplace if negative else evaluator.add_inplace)(sketch, block)

    def ask(self, sites: Sequence[str], path: Path) -> None:
        """Write the question about these sites, in their order."""
        if not 2 <= len(sites) <= MAX_SITES:
            raise CryptoError(f"{len(sites)} sites: robust rules compare 2 to {MAX_SITES}")
        with path.open("wb") as file:
            file.write(_header(self._key.parameters, len(sites)))
            for place, one in enumerate(sites):
                for other in sites[: place + 1]:
                    file.writelines(self._product(one, other))
            for one in sites:
                file.writelines(self._probe(one))

    def _product(self, one: str, other: str) -> Iterator[bytes]:
        tools = self._tools
        evaluator, fresh = tools.seal.evaluator, tools.seal.api.Ciphertext
        total: Any = None
        with translated("SEAL could not multiply sketches"):
            for left, right in zip(self._of[one], self._of[other], strict=True):
                product = fresh()
                evaluator.multiply(left, right, product)
                if total is None:
                    total = product
                else:
                    evaluator.add_inplace(total, product)
        words = tools.words(tools.product.cut(tools.seal.scratch.take(total)))
        return self._hidden(words, tools.product_flood)

    def _probe(self, site: str) -> Iterator[bytes]:
        tools = self._tools
        evaluator, fresh = tools.seal.evaluator, tools.seal.api.Ciphertext
        total: Any = None
        with translated("SEAL could not probe a sketch"):
            for sketch in self._of[site]:
                product = fresh()
                evaluator.multiply_plain(sketch, tools.imaginary(), product)
                if total is None:
                    total = product
                else:
                    evaluator.add_inplace(total, product)
        words = tools.words(tools.seal.full.cut(tools.seal.scratch.take(total)))
        return self._hidden(words, _PROBE_FLOOD)

    def _hidden(self, words: Words, flood: int) -> Iterator[bytes]:
        """A ciphertext as it may be shown to who can decrypt it: one coefficient of it."""
        tools = self._tools
        zero = tools.words(tools.seal.full.cut(tools.seal.scratch.take(tools.zero(self._key))))
        words[:2] = (words[:2] + zero) % tools.primes[:, None]  # below 2^61: no overflow
        drowned = secrets.randbelow(2 * flood + 1) - flood
        constant = [
            (tools.constant(residues, prime) + drowned) % prime
            for residues, prime in zip(words[0], tools.primes.tolist(), strict=True)
        ]
        yield np.array(constant, dtype="<u8").tobytes()
        yield words[1:].tobytes()


# ---- a key holder ---------------------------------------------------------------


def answer(key: RoundKey, path: Path, sites: int) -> Answer:
    """Decrypt a question about so many sites: one number a pair, one verdict a site.

    Raises CryptoError unless the file is exactly of the expected size, its header
    that of these parameters, and every residue below its prime.
    """
    if not key.can_decrypt:
        raise CryptoError("this site holds no secret key of the round and cannot answer")
    parameters = key.parameters
    products = np.empty((sites, sites))
    imaginary = np.empty(sites, dtype=np.bool_)
    with _opened(path, parameters, sites) as file:
        tools = _tools(parameters)
        for one in range(sites):
            for other in range(one + 1):
                number = tools.read(key, file, 3) / tools.unit
                products[one, other] = products[other, one] = number
        for one in range(sites):
            imaginary[one] = abs(tools.read(key, file, 2)) > _PROBE_FLOOD + _PROBE_NOISE
    return Answer(products, imaginary)


def _header(parameters: CkksParameters, sites: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, parameters.identity, sites)


def _opened(path: Path, parameters: CkksParameters, sites: int) -> BinaryIO:
    if not 2 <= sites <= MAX_SITES:
        raise CryptoError(f"a question is about 2 to {MAX_SITES} sites, not {sites}")
    try:
        file = path.open("rb")
        size = path.stat().st_size
    except OSError as error:
        raise CryptoError(f"cannot read the question {path.name}: {error}") from error
    expected = question_size(parameters, sites)
    if size != expected or file.read(_HEADER.size) != _header(parameters, sites):
        file.close()
        raise CryptoError(
            f"the question about {sites} sites was refused: {size} bytes, expected {expected} "
            "and the header of this round's parameters"
        )
    return file


# ---- both -----------------------------------------------------------------------


class _Tools:
    """Frames of what only this file makes, and arithmetic on single coefficients."""

    def __init__(self, parameters: CkksParameters) -> None:
        if parameters.packing.components != 1 or parameters.levels != 2:
            raise CryptoError("these parameters have no room for dot products")
        self.seal = seal = seal_of(parameters)
        self.degree, self.levels = parameters.degree, parameters.levels
        moduli = seal.context.first_context_data().parms().coeff_modulus()
        self.primes: Words = np.array([m.value() for m in moduli], dtype=np.uint64)
        self._modulus = math.prod(self.primes.tolist())
        # <S, S'> of SKETCHES sketches, as a constant coefficient: the mean over N/2 slots.
        self.unit = SKETCHES * seal.scale**2 * 2 / self.degree
        self.product_flood = int(PRODUCT_PRECISION * parameters.packing.limit**2 * self.unit)
        self._learn(parameters)

    def _learn(self, parameters: CkksParameters) -> None:
        seal = self.seal
        secret, _ = seal.new_keys()
        encryptor = seal.api.Encryptor(seal.context, secret)
        plain, cipher, product = seal.api.Plaintext(), seal.api.Ciphertext(), seal.api.Ciphertext()
        seal.encoder.encode(self._drawn(), _PROBE_SCALE, plain)
        self._plain = Frame.learn(seal.scratch.take(plain), parameters.polynomial)
        encryptor.encrypt_symmetric(plain, cipher)
        seal.evaluator.multiply(cipher, cipher, product)
        self.product = Frame.learn(seal.scratch.take(product), 3 * parameters.polynomial)

    def words(self, raw: bytes) -> Words:
        """Residues of shape [polynomials, primes, N], a copy that may be written to."""
        return np.frombuffer(raw, dtype="<u8").reshape(-1, self.levels, self.degree).copy()

    def zero(self, key: RoundKey) -> Any:
        """A fresh encryption of zero, under the scale of updates."""
        fresh, plain = self.seal.api.Ciphertext(), self.seal.api.Plaintext()
        with translated("SEAL could not encrypt zero"):
            self.seal.encoder.encode([0.0], self.seal.scale, plain)
            key.encryptor.encrypt(plain, fresh)
        return fresh

    def imaginary(self) -> Any:
        """A random plaintext whose every slot is imaginary, exactly.

        Encoding rounds, so t may have a real part of one unit in some coefficient;
        t - conj(t) has none. Conjugation, X -> 1/X, turns the order of residues
        round: the k-th of them belongs to the root with the bit-reversed exponent
        2 k + 1, and 2 N - (2 k + 1) is that of N - 1 - k.
        """
        seal = self.seal
        plain = seal.api.Plaintext()
        with translated("SEAL could not encode a probe"):
            seal.encoder.encode(self._drawn(), _PROBE_SCALE, plain)
        words = self.words(self._plain.cut(seal.scratch.take(plain)))[0]
        primes = self.primes[:, None]
        exact = (words + (primes - words[:, ::-1])) % primes
        return seal.load(seal.api.Plaintext(), self._plain, exact.tobytes(), "a probe")

    def _drawn(self) -> list[complex]:
        """Imaginary integers of 16 bits, one a slot: of few values many sums would be zero."""
        drawn = np.frombuffer(os.urandom(self.degree), dtype=np.int16)
        slots: list[complex] = (1j * drawn).tolist()
        return slots

    def constant(self, residues: Words, prime: int) -> int:
        """The constant coefficient of a polynomial given by its N residues: their mean."""
        low = int((residues & np.uint64(0xFFFFFFFF)).sum())
        high = int((residues >> np.uint64(32)).sum())
        mean: int = ((high << 32) + low) * pow(self.degree, -1, prime) % prime
        return mean

    def read(self, key: RoundKey, file: BinaryIO, components: int) -> int:
        """The constant coefficient, centred, of the next ciphertext of a question.

        Only that coefficient of its first component was sent: the constant
        polynomial stands for it, so the other coefficients come out as junk.
        """
        seal = self.seal
        constant = np.frombuffer(file.read(self.levels * WORD), dtype="<u8")
        size = (components - 1) * self.levels * self.degree * WORD
        raw = np.repeat(constant, self.degree).tobytes() + file.read(size)
        frame = self.product if components == 3 else seal.full
        cipher = seal.load(seal.api.Ciphertext(), frame, raw, "a question")
        plain = seal.api.Plaintext()
        with translated("SEAL could not decrypt a question"):
            key.decryptor.decrypt(cipher, plain)
        try:
            words = self.words(self._plain.cut(seal.scratch.take(plain)))[0]
        except Compressed as error:
            raise CryptoError("a question was refused: it was not re-randomised") from error
        primes = self.primes.tolist()
        constants = [self.constant(part, prime) for part, prime in zip(words, primes, strict=True)]
        return self._centred(constants, primes)

    def _centred(self, residues: list[int], primes: list[int]) -> int:
        """The integer of least magnitude with these residues (Chinese remainder theorem)."""
        total = 0
        for residue, prime in zip(residues, primes, strict=True):
            others = self._modulus // prime
            total += residue * others * pow(others, -1, prime)
        least: int = total % self._modulus
        return least - self._modulus if least > self._modulus // 2 else least


@lru_cache(maxsize=4)
def _tools(parameters: CkksParameters) -> _Tools:
    return _Tools(parameters)
