"""Keys: ECDSA P-256 signatures, sealing for one recipient, and the files they lie in.

Files are written whole or not at all. A private key has mode 0600 before its
first byte is written, so there is no moment at which another user of the
machine can open it, and one that others could read is refused.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from crypto import durable

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

_OTHERS = 0o077  # any right of group or others
_MAX_PEM = 16 * 1024
MAX_SIGNATURE_BYTES = 80  # DER of two 256-bit integers takes at most 72

# HPKE (RFC 9180), base mode: DHKEM(P-256, HKDF-SHA256), HKDF-SHA256 (RFC 5869),
# ChaCha20-Poly1305 (RFC 8439).
_SUITE = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_SEAL_VERSION = b"\x01"
_SEAL_INFO = b"hanse-seal-v1\0"
_MIN_SEALED = 1 + 65 + 16  # version, ephemeral point (SEC 1 §2.3.3, uncompressed), tag


class IdentityError(Exception):
    """A key, certificate or signature was refused: what was found, expected, and the remedy."""


# ---- keys and signatures ----------------------------------------------------


def new_key() -> PrivateKey:
    """A fresh P-256 key from the operating system's randomness."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    """PKCS #8 PEM, without a password: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def parse_key(pem: bytes, path: Path) -> PrivateKey:
    """The key in a PEM file; ``path`` is for the message of IdentityError."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(
            f"{path} is not a private key in PEM without a password: restore it, or make a new "
            "one (`fedctl site init`)"
        ) from error
    if not isinstance(key, PrivateKey) or key.curve.name != "secp256r1":
        raise IdentityError(f"{path} is not a P-256 key: make one with `fedctl site init`")
    return key


def read_key(path: Path, remedy: str) -> PrivateKey:
    """The key in a file that only its owner may read (see `read_bounded`)."""
    return parse_key(read_bounded(path, _MAX_PEM, remedy=remedy, private=True), path)


def p256(key: object, what: str) -> PublicKey:
    """``key`` when it is a P-256 public key, else IdentityError: no other is used here."""
    if not isinstance(key, PublicKey) or key.curve.name != "secp256r1":
        raise IdentityError(f"the key of {what} is not P-256: make it with `fedctl site init`")
    return key


def sign(key: PrivateKey, payload: bytes) -> bytes:
    """ECDSA P-256 SHA-256 signature, DER, at most 72 bytes."""
    return key.sign(payload, ec.ECDSA(hashes.SHA256()))


def check_signature(key: PublicKey, signature: bytes, payload: bytes, signer: str) -> None:
    """Raises IdentityError, naming ``signer``, unless the signature is over these bytes."""
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise IdentityError(
            f"the signature by {signer} has {len(signature)} bytes, at most "
            f"{MAX_SIGNATURE_BYTES} are possible: get it again from its author"
        )
    try:
        key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise IdentityError(
            f"the signature is not by {signer} over these bytes: they were changed, or signed "
            "with another key; get them again from their author"
        ) from error


# ---- sealing ----------------------------------------------------------------


def seal(key: PublicKey, plaintext: bytes, context: bytes) -> bytes:
    """Encrypt so that only the holder of one private key can read it, in one context.

    HPKE in base mode (RFC 9180 §5.1.1): the ephemeral and the recipient's key
    are bound by the KEM (§4.1), ``context`` by ``info``, as §8.1 advises for a
    single message. Every message has a key of its own, so no nonce repeats.
    Output: version (1 byte), ephemeral point (65), ciphertext, tag (16).
    """
    return _SEAL_VERSION + _SUITE.encrypt(plaintext, key, _SEAL_INFO + context)


def unseal(key: PrivateKey, sealed: bytes, context: bytes) -> bytes:
    """The plaintext; IdentityError when key or context differ, or a bit was changed."""
    if sealed[:1] != _SEAL_VERSION or len(sealed) < _MIN_SEALED:
        raise IdentityError(
            f"sealed in an unknown form (version {sealed[:1].hex() or 'missing'}, {len(sealed)} "
            f"bytes), expected version {_SEAL_VERSION.hex()}: bring both sites to one release"
        )
    try:
        return _SUITE.decrypt(sealed[1:], key, _SEAL_INFO + context)
    except (InvalidTag, ValueError) as error:
        raise IdentityError(
            "cannot unseal: sealed for another certificate or another context, or damaged; the "
            "sender must seal it for the certificate in use (after `fedctl site install`, "
            "restart fedd)"
        ) from error


# ---- where a site's key is --------------------------------------------------


class KeyHolder(Protocol):
    """All that is done with a site's private key beside TLS: the seam for a hardware token.

    `FileKey` is the only one so far. One for PKCS #11 would be made in `holder_of` and
    sign with CKM_ECDSA (r and s of 32 bytes each, to be put into DER) and unseal with
    CKM_ECDH1_DERIVE, the rest of RFC 9180 §4.1 being hashing. TLS is not behind this seam:
    grpcio takes its key as PEM, so with a token TLS needs a key and a certificate of its
    own. The authority's key is used by ``cryptography`` through its own interface,
    ``EllipticCurvePrivateKey``: an object with its ``sign`` and ``public_key`` will do there.
    """

    def public_key(self) -> PublicKey:
        """The public half, as in the certificate."""

    def sign(self, payload: bytes) -> bytes:
        """As `sign`."""

    def unseal(self, sealed: bytes, context: bytes) -> bytes:
        """As `unseal`; raises IdentityError."""


@dataclass(frozen=True)
class FileKey:
    """A key that was read from a file and is in this process's memory."""

    _key: PrivateKey = field(repr=False)

    def public_key(self) -> PublicKey:
        """The public half."""
        return self._key.public_key()

    def sign(self, payload: bytes) -> bytes:
        """As `sign`."""
        return sign(self._key, payload)

    def unseal(self, sealed: bytes, context: bytes) -> bytes:
        """As `unseal`."""
        return unseal(self._key, sealed, context)


def holder_of(pem: bytes, path: Path) -> KeyHolder:
    """Who uses the key of this PEM text; ``path`` is for the message of IdentityError."""
    return FileKey(parse_key(pem, path))


# ---- files ------------------------------------------------------------------


def read_bounded(path: Path, limit: int, *, remedy: str, private: bool = False) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    With ``private`` the file must give no right to group or others: a key that
    others could read must be taken for known. Mode and content come from one
    descriptor, so the file cannot be exchanged between check and reading.
    Raises IdentityError, with ``remedy`` when there is no such file.
    """
    try:
        # O_NONBLOCK: a pipe under that name must not hang us; it is refused below.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IdentityError(f"{path} is missing: {remedy}") from error
    except OSError as error:
        raise IdentityError(
            f"cannot open {path}: {error.strerror}; let it be owned by the user this runs as"
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"{path} is not a regular file: {remedy}")
        if private and mode & _OTHERS:
            raise IdentityError(
                f"others may read the private key {path} (mode {stat.S_IMODE(mode):04o}, "
                f"expected 0600): if someone did, make a new one; otherwise `chmod 600 {path}`"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise IdentityError(f"{path} is larger than {limit} bytes: {remedy}")
    return content


def write_new(path: Path, content: bytes, mode: int, *, remedy: str) -> None:
    """Create ``path`` whole; refuses, with ``remedy``, when it exists already."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            durable.write(path, content, mode, fresh=True)
        except FileExistsError as error:
            raise IdentityError(f"{path} exists and is not overwritten: {remedy}") from error
    except OSError as error:
        raise _unwritable(path, error) from error


def replace(path: Path, content: bytes, mode: int) -> None:
    """Put ``content`` under ``path``: after a crash the old or the new is there, whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, content, mode)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> IdentityError:
    return IdentityError(
        f"cannot write {path}: {error.strerror}; choose a folder you may write to, with room in it"
    )


def rename(old: Path, new: Path) -> None:
    """Put a file of ours in another's place, durably."""
    try:
        old.replace(new)
    except OSError as error:
        raise IdentityError(f"cannot rename {old} to {new.name}: {error.strerror}") from error
    durable.fsync(new.parent)
