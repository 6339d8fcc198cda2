"""A sequence of certificates as one object: each behind its length. PURE."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from peers.messages import RemoteProtocolError, check
from proto import federation_pb2 as pb

_LENGTH = struct.Struct(">I")
_LARGEST = 2 * 1024 * 1024  # 256 votes with certificates of 4 KiB, and room


def pack_certificates(certificates: Iterable[pb.Certificate]) -> bytes:
    """Certificates, oldest first, for a CERTIFICATES object."""
    parts: list[bytes] = []
    for certificate in certificates:
        raw = certificate.SerializeToString()
        parts += [_LENGTH.pack(len(raw)), raw]
    return b"".join(parts)


def unpack_certificates(packed: bytes) -> list[pb.Certificate]:
    """What `pack_certificates` packed; bounds are checked, signatures are not.

    Raises RemoteProtocolError when a peer sent anything else.
    """
    certificates: list[pb.Certificate] = []
    start = 0
    while start < len(packed):
        if len(packed) - start < _LENGTH.size:
            raise RemoteProtocolError("a certificate's length is cut off")
        (length,) = _LENGTH.unpack_from(packed, start)
        start += _LENGTH.size
        if length > _LARGEST or length > len(packed) - start:
            raise RemoteProtocolError(f"a certificate of {length} bytes does not fit")
        try:
            certificate = pb.Certificate.FromString(packed[start : start + length])
        except DecodeError as error:
            raise RemoteProtocolError("a certificate can't be parsed") from error
        check(certificate)
        certificates.append(certificate)
        start += length
    return certificates
