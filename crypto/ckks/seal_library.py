"""SEAL at the door: the only home of TenSEAL.

Every exception of it is translated to CryptoError here. What crosses a wire is
never a SEAL stream: SEAL's own format may be compressed, and a compressed stream
of a few bytes from a peer can unfold to gigabytes before SEAL looks at it. Keys,
ciphertexts and what is made of them are raw little-endian 64-bit words of a
length that the parameters fix; the SEAL framing around them is ours, made from
our own parameters, so a peer chooses residues and nothing else, and SEAL checks
each against its prime on load.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from crypto.ckks.parameters import SEED_BYTES, WORD, CkksParameters
from crypto.quantize import CryptoError

_PRNG_HEADER = 17  # SEAL's header (16 bytes) and the generator's kind, before a seed


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Any exception of SEAL's becomes a CryptoError that begins with ``what``."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError, TypeError, OverflowError) as error:
        raise CryptoError(f"{what}: {error}") from error


class Scratch:
    """A file in memory: SEAL's bindings load from and save to paths only.

    It never touches a disk, so keys may pass through it; `wipe` after they did.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("seal", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._descriptor}"
        self._close = os.close  # the module may be gone before the last of these is

    def put(self, *parts: bytes) -> str:
        """Write a stream; returns the path that SEAL loads it from."""
        os.pwritev(self._descriptor, parts, 0)
        return self.path

    def take(self, saved: Any) -> bytes:
        """The stream that SEAL saves an object as."""
        saved.save(self.path)
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def wipe(self) -> None:
        """Leave nothing of what was in it."""
        size = os.fstat(self._descriptor).st_size
        os.pwrite(self._descriptor, bytes(size), 0)
        os.ftruncate(self._descriptor, 0)

    def __del__(self) -> None:
        self._close(self._descriptor)


class Compressed(Exception):
    """SEAL's stream was compressible after all; its words must be had another way."""


def _unframed(stream: bytes) -> bytes:
    """The content of a stream that *our own* SEAL wrote: 16-byte header, one zstd frame.

    SEAL's bindings always ask for zstd. Residues of a 60-bit prime are too
    nearly random to be compressed (1.4 % of entropy is missing, zstd wants
    1.6 %), so zstd stores them in raw blocks, and the content is cut out.
    Formats: seal/serialization.h; RFC 8878 §3.1.1.
    """
    if stream[5] == 0:
        return stream[16:]
    descriptor = stream[20]
    single_segment = descriptor >> 5 & 1
    size_field = (single_segment, 2, 4, 8)[descriptor >> 6]
    position = 21 + (1 - single_segment) + size_field
    content = []
    last = 0
    while not last:
        header = int.from_bytes(stream[position : position + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind != 0:
            raise Compressed
        content.append(stream[position + 3 : position + 3 + size])
        position += 3 + size
    return b"".join(content)


@dataclass(frozen=True)
class Frame:
    """SEAL's framing, uncompressed, around the bytes of one kind of object.

    Stream: ``before``, ``words`` bytes of residues, ``middle``, ``tail`` bytes
    (the seed of a seeded ciphertext). A peer provides words and tail alone.
    """

    before: bytes
    words: int
    middle: bytes = b""
    tail: int = 0

    @classmethod
    def learn(cls, stream: bytes, words: int, middle: int = 0, tail: int = 0) -> Frame:
        """The frame of an object that our own SEAL saved."""
        content = _unframed(stream)
        after = len(content) - tail - middle
        # Byte 5 of the header is the compression (0: none), then the stream's size.
        header = stream[:5] + b"\0" + stream[6:8] + struct.pack("<Q", 16 + len(content))
        before = header + content[: after - words]
        return cls(before, words, content[after : after + middle], tail)

    @property
    def size(self) -> int:
        """Bytes of an object without its frame."""
        return self.words + self.tail

    def around(self, raw: bytes) -> tuple[bytes, ...]:
        """The stream that SEAL loads."""
        return self.before, raw[: self.words], self.middle, raw[self.words :]

    def cut(self, stream: bytes) -> bytes:
        """The object's own bytes out of a stream that our own SEAL saved."""
        content = _unframed(stream)
        start = len(self.before) - 16
        seed = start + self.words + len(self.middle)
        return content[start : start + self.words] + content[seed : seed + self.tail]


class Seal:
    """SEAL's machinery for one set of parameters; holds no round's key."""

    def __init__(self, parameters: CkksParameters) -> None:
        # Imported with the first key and not with this module: the daemon's main
        # process imports the names above and must not carry SEAL.
        from tenseal import sealapi

        self.api: Any = sealapi
        degree, primes = parameters.degree, list(parameters.primes)
        with translated("SEAL refused the parameters"):
            chosen = self.api.EncryptionParameters(self.api.SCHEME_TYPE.CKKS)
            chosen.set_poly_modulus_degree(degree)
            chosen.set_coeff_modulus(self.api.CoeffModulus.Create(degree, primes))
            self.context = self.api.SEALContext(chosen, True, self.api.SEC_LEVEL_TYPE.TC128)
            if not self.context.parameters_set():
                raise CryptoError("SEAL refused the parameters as less than 128-bit secure")
            self.encoder = self.api.CKKSEncoder(self.context)
            self.evaluator = self.api.Evaluator(self.context)
        self.scale = 2.0**parameters.scale_bits
        self.scratch = Scratch()
        self._learn_frames(parameters)

    def _learn_frames(self, parameters: CkksParameters) -> None:
        """From a key that is thrown away: no knowledge of SEAL's field order is needed."""
        polynomial = parameters.polynomial
        key_polynomial = len(parameters.primes) * parameters.degree * WORD
        secret, public = self.new_keys()
        encryptor = self.api.Encryptor(self.context, secret)
        plain, cipher = self.api.Plaintext(), self.api.Ciphertext()
        self.encoder.encode([0.0], self.scale, plain)
        encryptor.encrypt_symmetric(plain, cipher)
        take = self.scratch.take
        self.full = Frame.learn(take(cipher), 2 * polynomial)
        seeded = take(encryptor.encrypt_symmetric(plain))
        self.seeded = Frame.learn(seeded, polynomial, _PRNG_HEADER, SEED_BYTES)
        self.public = Frame.learn(take(public), 2 * key_polynomial)
        self.secret = Frame.learn(take(secret), key_polynomial)
        self.scratch.wipe()

    def new_keys(self) -> tuple[Any, Any]:
        """A fresh secret and public key, from the operating system's randomness."""
        with translated("SEAL could not make a key"):
            generator = self.api.KeyGenerator(self.context)
            public = self.api.PublicKey()
            generator.create_public_key(public)
            return generator.secret_key(), public

    def load(self, empty: Any, frame: Frame, raw: bytes, what: str) -> Any:
        """``empty`` filled from raw bytes of exactly the right length; SEAL checks residues."""
        if len(raw) != frame.size:
            raise CryptoError(f"{what} has {len(raw)} bytes; expected {frame.size}")
        with translated(f"{what} was refused"):
            empty.load(self.context, self.scratch.put(*frame.around(raw)))
        return empty

    def load_block(self, empty: Any, block: bytes) -> Any:
        """A ciphertext from a full or a seeded block."""
        frame = self.seeded if len(block) == self.seeded.size else self.full
        self.load(empty, frame, block, "an encrypted block")
        if empty.is_transparent():
            raise CryptoError("an encrypted block was refused: it is not encrypted")
        return empty


@lru_cache(maxsize=4)
def seal_of(parameters: CkksParameters) -> Seal:
    """SEAL's machinery for these parameters, made once. Raises CryptoError."""
    return Seal(parameters)


def make_ready(parameters: CkksParameters) -> None:
    """Load SEAL and its tables, so that the first key need not wait for them."""
    seal_of(parameters)
