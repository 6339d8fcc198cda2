"""A sequence of certificates, or of manifests, as one object: each behind its length. PURE."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import MAX_BYTES as MANIFEST_BYTES
from peers.wire.messages import check
from proto import federation_pb2 as pb

_LENGTH = struct.Struct(">I")
_LARGEST = 2 * 1024 * 1024  # 256 votes with certificates of 4 KiB, and room


def pack_certificates(certificates: Iterable[pb.Certificate], *, at_most: int = 2**62) -> bytes:
    """Certificates, oldest first, for a CERTIFICATES object.

    Ends before ``at_most`` bytes are exceeded; a peer then asks for the rest.
    """
    return _pack((certificate.SerializeToString() for certificate in certificates), at_most)


def unpack_certificates(packed: bytes) -> list[pb.Certificate]:
    """What `pack_certificates` packed; bounds are checked, signatures are not.

    Raises RemoteProtocolError when a peer sent anything else.
    """
    certificates: list[pb.Certificate] = []
    for raw in _unpack(packed, "certificate", _LARGEST):
        try:
            certificate = pb.Certificate.FromString(raw)
        except DecodeError as error:
            raise RemoteProtocolError("a certificate can't be parsed") from error
        check(certificate)
        certificates.append(certificate)
    return certificates


def pack_manifests(signed: Iterable[bytes], *, at_most: int = 2**62) -> bytes:
    """Signed manifest files, oldest first, for a MANIFESTS object; bounded as certificates are."""
    return _pack(signed, at_most)


def unpack_manifests(packed: bytes) -> list[bytes]:
    """What `pack_manifests` packed, unread: `peers.wire.manifest.parse_signed` verifies each.

    Raises RemoteProtocolError when a peer sent anything else.
    """
    return list(_unpack(packed, "manifest", MANIFEST_BYTES))


def _pack(items: Iterable[bytes], at_most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for raw in items:
        size += _LENGTH.size + len(raw)
        if size > at_most:
            break
        parts += [_LENGTH.pack(len(raw)), raw]
    return b"".join(parts)


def _unpack(packed: bytes, what: str, largest: int) -> Iterator[bytes]:
    start = 0
    while start < len(packed):
        if len(packed) - start < _LENGTH.size:
            raise RemoteProtocolError(f"a {what}'s length is cut off")
        (length,) = _LENGTH.unpack_from(packed, start)
        start += _LENGTH.size
        if length > largest or length > len(packed) - start:
            raise RemoteProtocolError(f"a {what} of {length} bytes does not fit")
        yield packed[start : start + length]
        start += length
