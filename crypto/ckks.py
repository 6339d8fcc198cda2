"""Exact integer sums under CKKS: round keys, encryption, addition, decryption.

The only home of TenSEAL (its SEAL layer); every exception of it is translated
to CryptoError at this door.

Only additions happen, so a ciphertext lives under one 60-bit prime and no
Galois or relinearisation keys exist. What crosses a wire is never a SEAL
stream: SEAL's own format may be compressed, and a compressed stream of a few
bytes from a peer can unfold to gigabytes before SEAL looks at it. A *block* is
the ciphertext's raw little-endian 64-bit words, its length fixed by the
parameters; the SEAL framing around them is ours, made from our own parameters,
so a peer chooses residues and nothing else, and SEAL checks each against the
prime on load. Contexts are raw words in the same way.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from crypto.parameters import SEED_BYTES, WORD, CkksParameters, choose_parameters
from crypto.quantize import CryptoError, Slots

__all__ = [
    "CkksParameters",
    "CryptoError",
    "DealtKey",
    "RoundKey",
    "RunningSum",
    "choose_parameters",
    "deal",
    "make_ready",
]

# Of encryptions that come out compressible; under a sound key one in far more than 2^40 does.
_TRIES = 4

_PRNG_HEADER = 17  # SEAL's header (16 bytes) and the generator's kind, before a seed

# ---- SEAL at the door -----------------------------------------------------------


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, IndexError, TypeError, OverflowError) as error:
        raise CryptoError(f"{what}: {error}") from error


class _Scratch:
    """A file in memory: SEAL's bindings load from and save to paths only.

    It never touches a disk, so keys may pass through it; `wipe` after they did.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("seal", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._descriptor}"

    def put(self, *parts: bytes) -> str:
        os.pwritev(self._descriptor, parts, 0)
        return self.path

    def take(self, saved: Any) -> bytes:
        saved.save(self.path)
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def wipe(self) -> None:
        size = os.fstat(self._descriptor).st_size
        os.pwrite(self._descriptor, bytes(size), 0)
        os.ftruncate(self._descriptor, 0)

    def __del__(self) -> None:
        os.close(self._descriptor)


class _Compressed(Exception):
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
            raise _Compressed
        content.append(stream[position + 3 : position + 3 + size])
        position += 3 + size
    return b"".join(content)


@dataclass(frozen=True)
class _Frame:
    """SEAL's framing, uncompressed, around the bytes of one kind of object.

    Stream: ``before``, ``words`` bytes of residues, ``middle``, ``tail`` bytes
    (the seed of a seeded ciphertext). A peer provides words and tail alone.
    """

    before: bytes
    words: int
    middle: bytes = b""
    tail: int = 0

    @classmethod
    def learn(cls, stream: bytes, words: int, middle: int = 0, tail: int = 0) -> _Frame:
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


class _Seal:
    """SEAL's machinery for one set of parameters; holds no round's key."""

    def __init__(self, parameters: CkksParameters) -> None:
        # Imported with the first key and not with this module: the daemon's main
        # process imports the names above and must not carry SEAL.
        from tenseal import sealapi

        self.api: Any = sealapi
        degree, primes = parameters.degree, list(parameters.primes)
        with _translated("SEAL refused the parameters"):
            chosen = self.api.EncryptionParameters(self.api.SCHEME_TYPE.CKKS)
            chosen.set_poly_modulus_degree(degree)
            chosen.set_coeff_modulus(self.api.CoeffModulus.Create(degree, primes))
            self.context = self.api.SEALContext(chosen, True, self.api.SEC_LEVEL_TYPE.TC128)
            if not self.context.parameters_set():
                raise CryptoError("SEAL refused the parameters as less than 128-bit secure")
            self.encoder = self.api.CKKSEncoder(self.context)
            self.evaluator = self.api.Evaluator(self.context)
        self.scale = 2.0**parameters.scale_bits
        self.scratch = _Scratch()
        self._learn_frames(parameters)

    def _learn_frames(self, parameters: CkksParameters) -> None:
        """From a key that is thrown away: no knowledge of SEAL's field order is needed."""
        polynomial = parameters.degree * WORD
        chain = len(parameters.primes)
        secret, public = self.new_keys()
        encryptor = self.api.Encryptor(self.context, secret)
        plain, cipher = self.api.Plaintext(), self.api.Ciphertext()
        self.encoder.encode([0.0], self.scale, plain)
        encryptor.encrypt_symmetric(plain, cipher)
        take = self.scratch.take
        self.full = _Frame.learn(take(cipher), 2 * polynomial)
        seeded = take(encryptor.encrypt_symmetric(plain))
        self.seeded = _Frame.learn(seeded, polynomial, _PRNG_HEADER, SEED_BYTES)
        self.public = _Frame.learn(take(public), 2 * polynomial * chain)
        self.secret = _Frame.learn(take(secret), polynomial * chain)
        self.scratch.wipe()

    def new_keys(self) -> tuple[Any, Any]:
        """A fresh secret and public key, from the operating system's randomness."""
        with _translated("SEAL could not make a key"):
            generator = self.api.KeyGenerator(self.context)
            public = self.api.PublicKey()
            generator.create_public_key(public)
            return generator.secret_key(), public

    def load(self, empty: Any, frame: _Frame, raw: bytes, what: str) -> Any:
        """``empty`` filled from raw bytes of exactly the right length; SEAL checks residues."""
        if len(raw) != frame.size:
            raise CryptoError(f"{what} has {len(raw)} bytes; expected {frame.size}")
        with _translated(f"{what} was refused"):
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
def _seal(parameters: CkksParameters) -> _Seal:
    return _Seal(parameters)


def make_ready(parameters: CkksParameters) -> None:
    """Load SEAL and its tables, so that the first key need not wait for them."""
    _seal(parameters)


# ---- keys -----------------------------------------------------------------------


@dataclass(frozen=True)
class DealtKey:
    """A fresh round key: what the coordinator gets, and what each key holder gets.

    ``secret`` must only travel sealed for its receiver, and never be stored.
    """

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "DealtKey(...)"  # so that no log can ever hold it


_CONTEXT_HEADER = struct.Struct("<4sBB8s")  # magic, version, kind, parameters
_CONTEXT_MAGIC = b"HNSK"
_CONTEXT_VERSION = 1
_PUBLIC, _SECRET = 1, 2


def deal(parameters: CkksParameters) -> DealtKey:
    """Make a round key. Raises CryptoError when SEAL fails."""
    seal = _seal(parameters)
    while True:
        secret, public = seal.new_keys()
        try:
            return DealtKey(
                _context_header(parameters, _PUBLIC) + seal.public.cut(seal.scratch.take(public)),
                _context_header(parameters, _SECRET) + seal.secret.cut(seal.scratch.take(secret)),
            )
        except _Compressed:  # one key in far more than 2^40; the next one is as good
            continue
        finally:
            seal.scratch.wipe()


class RoundKey:
    """What one site holds of a round's key: the public part, or the secret one.

    A site with the secret key encrypts with it, too: three times as fast, a
    tenth of the noise, and half the bytes. Not safe for use by two threads.
    """

    def __init__(self, parameters: CkksParameters, context: bytes, *, secret: bool) -> None:
        """Load a context as `deal` made it; ``secret`` says which kind it must be.

        Everything but the key's own residues comes from ``parameters``, not
        from the peer. Raises CryptoError when kind, parameters or length are
        not exactly the expected ones, or SEAL refuses a residue.
        """
        self.parameters = parameters
        self._seal = seal = _seal(parameters)
        raw = _context_body(parameters, context, _SECRET if secret else _PUBLIC)
        self._decryptor: Any = None
        if secret:
            try:
                key = seal.load(seal.api.SecretKey(), seal.secret, raw, "the secret context")
            finally:
                seal.scratch.wipe()
            with _translated("SEAL refused the secret key"):
                self._decryptor = seal.api.Decryptor(seal.context, key)
                self._encryptor = seal.api.Encryptor(seal.context, key)
        else:
            key = seal.load(seal.api.PublicKey(), seal.public, raw, "the public context")
            with _translated("SEAL refused the public key"):
                self._encryptor = seal.api.Encryptor(seal.context, key)
        self._plain = seal.api.Plaintext()
        self._cipher = seal.api.Ciphertext()

    @property
    def can_decrypt(self) -> bool:
        """Whether this site is a key holder of the round."""
        return self._decryptor is not None

    def encrypt(self, slots: Slots, *, seeded: bool = True) -> bytes:
        """One block from its slots (complex, shape [N/2]).

        Under the secret key it is a seeded block, half as long, unless
        ``seeded`` is false: such a block is quicker to add. Raises CryptoError
        when the key hides nothing: most of it is nought, say.
        """
        seal = self._seal
        with _translated("SEAL could not encrypt"):
            seal.encoder.encode(slots.tolist(), seal.scale, self._plain)
            for _ in range(_TRIES):
                try:
                    return self._encrypt_plain(seeded)
                except _Compressed:  # fresh randomness gives other residues, if the key is sound
                    continue
        raise CryptoError(
            "the round key was refused: what it encrypts is too regular to be hidden; the key "
            "dealer's context is no fresh key"
        )

    def _encrypt_plain(self, seeded: bool) -> bytes:
        seal = self._seal
        if self.can_decrypt and seeded:
            fresh = self._encryptor.encrypt_symmetric(self._plain)
            return seal.seeded.cut(seal.scratch.take(fresh))
        if self.can_decrypt:
            self._encryptor.encrypt_symmetric(self._plain, self._cipher)
        else:
            self._encryptor.encrypt(self._plain, self._cipher)
        return seal.full.cut(seal.scratch.take(self._cipher))

    def decrypt(self, block: bytes) -> Slots:
        """The slots of a block (complex, shape [N/2]), noise included.

        Raises CryptoError at a site that holds only the public key.
        """
        if not self.can_decrypt:
            raise CryptoError(
                "this site holds only the round's public key and cannot decrypt: "
                "the sum goes to the key holders"
            )
        seal = self._seal
        seal.load_block(self._cipher, block)
        with _translated("SEAL could not decrypt"):
            self._decryptor.decrypt(self._cipher, self._plain)
            decoded = seal.encoder.decode_complex(self._plain)
        return np.fromiter(decoded, np.complex128, len(decoded))


def _context_header(parameters: CkksParameters, kind: int) -> bytes:
    return _CONTEXT_HEADER.pack(_CONTEXT_MAGIC, _CONTEXT_VERSION, kind, parameters.identity)


def _context_body(parameters: CkksParameters, context: bytes, kind: int) -> bytes:
    expected = _context_header(parameters, kind)
    name = "secret" if kind == _SECRET else "public"
    if context[: len(expected)] != expected:
        raise CryptoError(
            f"the round context was refused: expected a {name} one for "
            f"{parameters.packing.contributors} contributors and {parameters.packing.bits} bits; "
            "the key dealer sent another kind, other parameters or another format version"
        )
    return context[len(expected) :]


# ---- sums -----------------------------------------------------------------------


class RunningSum:
    """A sum of ciphertexts, block by block; needs parameters but no key.

    Memory is one sum, however many are added.
    """

    def __init__(self, parameters: CkksParameters, blocks: int) -> None:
        self._seal = _seal(parameters)
        self._total: list[Any] = [None] * blocks
        self._incoming = self._seal.api.Ciphertext()
        self._result = self._seal.api.Ciphertext()

    def add(self, index: int, block: bytes) -> None:
        """Add a full or seeded block; when it is refused the sum is as before."""
        total = self._total[index]
        if total is None:
            self._total[index] = self._seal.load_block(self._seal.api.Ciphertext(), block)
            return
        self._seal.load_block(self._incoming, block)
        with _translated("SEAL could not add an encrypted block"):
            # Not in place: SEAL may refuse a result after it has written it.
            self._seal.evaluator.add(total, self._incoming, self._result)
        self._total[index], self._result = self._result, total

    def subtract(self, index: int, block: bytes) -> None:
        """Take back a block that was added."""
        self._seal.load_block(self._incoming, block)
        with _translated("SEAL could not subtract an encrypted block"):
            self._seal.evaluator.sub_inplace(self._total[index], self._incoming)

    def block(self, index: int) -> bytes:
        """The summed block as a full block."""
        total = self._total[index]
        if total is None:
            raise CryptoError("nothing was added to the sum")
        frame = self._seal.full
        try:
            return frame.cut(self._seal.scratch.take(total))
        except _Compressed:  # no honest sum is; word by word is slow but right
            words = total.dyn_array()
            count = frame.words // WORD
            return np.fromiter((words.at(i) for i in range(count)), "<u8", count).tobytes()
