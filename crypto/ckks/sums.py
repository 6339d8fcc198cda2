"""Exact integer sums under CKKS: round keys, encryption, addition, decryption.

Only additions happen here, so no Galois or relinearisation keys exist. A *block*
is a ciphertext's raw little-endian 64-bit words, its length fixed by the
parameters; contexts are raw words in the same way (crypto/ckks/seal_library.py says why).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from crypto.ckks.parameters import WORD, CkksParameters
from crypto.ckks.seal_library import Compressed, seal_of, translated
from crypto.quantize import CryptoError, Slots

# Of encryptions that come out compressible; under a sound key one in far more than 2^40 does.
_TRIES = 4

# ---- keys -----------------------------------------------------------------------


@dataclass(frozen=True)
class DealtKey:
    """A fresh round key: what the coordinator gets, and what each key holder gets.

    ``secret`` must only travel sealed for its receiver, and never be stored.

    The dealer commits itself by signing the SHA-256 of both: who gets one of them
    compares, so all key holders hold one key, and decrypt alike. The digest of
    ``secret`` hides it. Behind a header that everybody knows stand the residues of the
    secret polynomial alone, whose 8192 coefficients are uniform in -1, 0, 1: 12,984
    bits, drawn from a seed of 512. Nor does the digest help anybody to test a guess:
    the public key, which is b + a s with small coefficients, has always allowed that.
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
    seal = seal_of(parameters)
    while True:
        secret, public = seal.new_keys()
        try:
            return DealtKey(
                _context_header(parameters, _PUBLIC) + seal.public.cut(seal.scratch.take(public)),
                _context_header(parameters, _SECRET) + seal.secret.cut(seal.scratch.take(secret)),
            )
        except Compressed:  # one key in far more than 2^40; the next one is as good
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
        self._seal = seal = seal_of(parameters)
        raw = _context_body(parameters, context, _SECRET if secret else _PUBLIC)
        self.decryptor: Any = None
        if secret:
            try:
                key = seal.load(seal.api.SecretKey(), seal.secret, raw, "the secret context")
            finally:
                seal.scratch.wipe()
            with translated("SEAL refused the secret key"):
                self.decryptor = seal.api.Decryptor(seal.context, key)
                self.encryptor = seal.api.Encryptor(seal.context, key)
        else:
            key = seal.load(seal.api.PublicKey(), seal.public, raw, "the public context")
            with translated("SEAL refused the public key"):
                self.encryptor = seal.api.Encryptor(seal.context, key)
        self._plain = seal.api.Plaintext()
        self._cipher = seal.api.Ciphertext()

    @property
    def can_decrypt(self) -> bool:
        """Whether this site is a key holder of the round."""
        return self.decryptor is not None

    def encrypt(self, slots: Slots, *, seeded: bool = True) -> bytes:
        """One block from its slots (complex, shape [N/2]).

        Under the secret key it is a seeded block, half as long, unless
        ``seeded`` is false: such a block is quicker to add. Raises CryptoError
        when the key hides nothing: most of it is nought, say.
        """
        seal = self._seal
        with translated("SEAL could not encrypt"):
            seal.encoder.encode(slots.tolist(), seal.scale, self._plain)
            for _ in range(_TRIES):
                try:
                    return self._encrypt_plain(seeded)
                except Compressed:  # fresh randomness gives other residues, if the key is sound
                    continue
        raise CryptoError(
            "the round key was refused: what it encrypts is too regular to be hidden; the key "
            "dealer's context is no fresh key"
        )

    def _encrypt_plain(self, seeded: bool) -> bytes:
        seal = self._seal
        if self.can_decrypt and seeded:
            fresh = self.encryptor.encrypt_symmetric(self._plain)
            return seal.seeded.cut(seal.scratch.take(fresh))
        if self.can_decrypt:
            self.encryptor.encrypt_symmetric(self._plain, self._cipher)
        else:
            self.encryptor.encrypt(self._plain, self._cipher)
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
        with translated("SEAL could not decrypt"):
            self.decryptor.decrypt(self._cipher, self._plain)
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
        self._seal = seal_of(parameters)
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
        with translated("SEAL could not add an encrypted block"):
            # Not in place: SEAL may refuse a result after it has written it.
            self._seal.evaluator.add(total, self._incoming, self._result)
        self._total[index], self._result = self._result, total

    def subtract(self, index: int, block: bytes) -> None:
        """Take back a block that was added."""
        self._seal.load_block(self._incoming, block)
        with translated("SEAL could not subtract an encrypted block"):
            self._seal.evaluator.sub_inplace(self._total[index], self._incoming)

    def block(self, index: int) -> bytes:
        """The summed block as a full block."""
        total = self._total[index]
        if total is None:
            raise CryptoError("nothing was added to the sum")
        frame = self._seal.full
        try:
            return frame.cut(self._seal.scratch.take(total))
        except Compressed:  # no honest sum is; word by word is slow but right
            words = total.dyn_array()
            count = frame.words // WORD
            return np.fromiter((words.at(i) for i in range(count)), "<u8", count).tobytes()
