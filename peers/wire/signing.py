"""What a site says for good: signed, kept and passed on byte by byte. PURE.

A coordinator carries other sites' words. So that it can't change them, and so that a
site that says two things can be shown to have said both, each is signed as the very
bytes that travel. A label for the kind of message goes before them: a signature under
one kind means nothing under another.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.messages import check, parse_signed
from proto import federation_pb2 as pb

M = TypeVar("M", bound=Message)


class Kind(Enum):
    """What is signed, by its label."""

    RUN = b"hanse-run-v2\0"
    PROMISE = b"hanse-promise-v2\0"
    KEY_COMMITMENT = b"hanse-key-commitment-v2\0"
    EXPONENTS = b"hanse-exponents-v2\0"
    CONTRIBUTION = b"hanse-contribution-v2\0"
    STATEMENT = b"hanse-statement-v2\0"
    PRODUCTS = b"hanse-products-v2\0"
    APPLIED = b"hanse-applied-v2\0"
    ENDED = b"hanse-ended-v2\0"


class Keys(Protocol):
    """This site's key, and whom it believes (daemon/state/membership.py)."""

    def sign(self, payload: bytes) -> pb.Signature:
        """This site's signature, with its current certificate."""

    def verify(
        self, payload: bytes, signature: pb.Signature, manifest: FederationManifest, *, past: bool
    ) -> None:
        """Raises CertificateError unless an enabled site of ``manifest`` signed, as it says.

        ``past``: the signer's certificate may have expired since.
        """


def digest_of(message: Message) -> bytes:
    """SHA-256 (32 bytes) of a message's encoding, fields in order of their numbers."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def name_of(signed: pb.Signed) -> bytes:
    """SHA-256 (32 bytes) of what was signed: the name of a run, or of a statement."""
    return hashlib.sha256(signed.body).digest()


def sign(keys: Keys, kind: Kind, message: Message) -> pb.Signed:
    """This site says ``message`` for good."""
    body = message.SerializeToString(deterministic=True)
    return signed_by(body, keys.sign(kind.value + body))


def sign_bytes(keys: Keys, kind: Kind, body: bytes) -> pb.Signature:
    """This site's signature under the encoding of a message that travels beside it."""
    return keys.sign(kind.value + body)


def signature_of(signed: pb.Signed | pb.Vote) -> pb.Signature:
    """The signature without what it is under."""
    return pb.Signature(
        site=signed.site, signature=signed.signature, certificate=signed.certificate
    )


def signed_by(body: bytes, by: pb.Signature) -> pb.Signed:
    """A signature with what it is under."""
    return pb.Signed(body=body, site=by.site, signature=by.signature, certificate=by.certificate)


def verify(
    keys: Keys,
    kind: Kind,
    body: bytes,
    signature: pb.Signature,
    manifest: FederationManifest,
    *,
    past: bool = False,
) -> None:
    """Raises CertificateError unless that site of the manifest has signed these bytes."""
    keys.verify(kind.value + body, signature, manifest, past=past)


def read(
    keys: Keys,
    kind: Kind,
    as_a: type[M],
    signed: pb.Signed,
    manifest: FederationManifest,
    *,
    past: bool = False,
) -> M:
    """The message that was signed, in its bounds.

    Raises CertificateError for a signature that is not its site's, RemoteProtocolError
    for what is no such message, or in another encoding.
    """
    check(signed)
    verify(keys, kind, signed.body, signature_of(signed), manifest, past=past)
    return parse_signed(as_a, signed.body)


def must_be(holds: object, sender: str, complaint: str) -> None:
    """Raises RemoteProtocolError, with who is to blame, unless it holds."""
    if not holds:
        raise RemoteProtocolError(f"{sender} {complaint}")
