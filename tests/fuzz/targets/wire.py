"""Targets: what comes over the wire as messages, and certificates of rounds.

A judge takes hostile bytes to a parser. It returns whether they were accepted,
lets every exception out that the parser does not document, and asserts what
must hold of whatever was accepted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

from google.protobuf.message import DecodeError, Message

from peers.wire.certificates import (
    CertificateError,
    verify_certificate,
    verify_chain,
    vote_payload,
)
from peers.wire.errors import RemoteProtocolError
from peers.wire.histories import pack_certificates, unpack_certificates
from peers.wire.messages import decode, parse
from proto import federation_pb2 as pb
from tests.fuzz.mutators import mutate_bytes, mutate_message
from tests.fuzz.world import AT, FEDERATION, GENESIS, SITES, certificate, chain, vote_body, world
from tests.support.good_messages import BODIES, SIGNED, envelope, hello

_LENGTH = struct.Struct(">I")

# ---- messages: a byte that says which, then the message ---------------------------

_KINDS: tuple[type[Message], ...] = (
    pb.Envelope,
    pb.HelloRequest,
    pb.HelloReply,
    pb.PullRequest,
    pb.PushFrame,
    pb.Frame,
    *dict.fromkeys(type(make()) for make in SIGNED.values()),
)


def judge_message(data: bytes) -> bool:
    """Accepted: bounds hold, and it reads the same when it is written and read again."""
    kind = _KINDS[data[0] % len(_KINDS)] if data else pb.Envelope
    try:
        message = parse(kind, data[1:])
    except RemoteProtocolError:
        return False
    again = parse(kind, message.SerializeToString())
    # Not ==: a loss that is not known is NaN.
    assert _canonical(again) == _canonical(message)
    return True


def _canonical(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def mutate_any_message(data: bytes, chance: Random) -> bytes:
    kind = _KINDS[data[0] % len(_KINDS)] if data else pb.Envelope
    return data[:1] + _mutated(kind, data[1:], chance)


def _mutated(kind: type[Message], raw: bytes, chance: Random) -> bytes:
    try:
        message = decode(kind, raw)
    except RemoteProtocolError:
        return raw
    mutate_message(message, chance)
    return message.SerializeToString()


def message_seeds() -> Iterator[bytes]:
    name = pb.BlobName(kind=pb.MODEL_VERSION, digest=GENESIS)
    frame = pb.Frame(data=b"x", running_sha256=GENESIS, last=True)
    others: tuple[Message, ...] = (
        hello(),
        pb.HelloReply(protocol_version=1, sender="alpha", unix_ms=1),
        pb.PullRequest(federation_id=FEDERATION, sender="beta", name=name),
        pb.PushFrame(federation_id=FEDERATION, sender="beta", name=name, frame=frame),
        frame,
    )
    yield from (b"\0" + envelope(body).SerializeToString() for body in BODIES)
    for number, message in enumerate(others, start=1):
        yield bytes([number]) + message.SerializeToString()
    for make in SIGNED.values():
        yield bytes([_KINDS.index(type(make()))]) + make().SerializeToString()


# ---- a round's certificate ----------------------------------------------------------


def judge_certificate(data: bytes) -> bool:
    """Accepted: a quorum of different, listed sites (of old: a majority), all in one attempt."""
    trust = world().trust
    try:
        found = parse(pb.Certificate, data)
        manifest = world().manifests.get(found.body.manifest_version, world().manifests[1])
        verify_certificate(found, trust, manifest, at=AT)
    except (RemoteProtocolError, CertificateError):
        return False
    needed = manifest.quorum if found.body.rules else manifest.majority
    assert len({vote.site for vote in found.votes}) == len(found.votes) >= needed
    assert {vote.attempt for vote in found.votes} == {found.attempt}
    verify_certificate(found, trust, manifest, at=None)  # nor is it refused as history
    return True


def mutate_certificate(data: bytes, chance: Random) -> bytes:
    """Half of them signed anew, so that what is wrong is something else than a signature."""
    try:
        found = pb.Certificate.FromString(data)
    except DecodeError:
        return data
    mutate_message(found, chance)
    if chance.random() < 0.5:
        _sign_anew(found)
    return found.SerializeToString()


def _sign_anew(found: pb.Certificate) -> None:
    for vote in found.votes:
        if vote.site not in SITES:
            continue
        try:
            payload = vote_payload(found.body, vote.attempt)
        except CertificateError:
            return
        vote.signature = world().sign(vote.site, payload)
        vote.certificate = world().identities[vote.site].certificate_der


def certificate_seeds() -> Iterator[bytes]:
    yield from (found.SerializeToString() for found in [*chain(), *chain(old=2)])


# ---- a file of certificates: catching up ----------------------------------------------


def judge_chain(data: bytes) -> bool:
    """Accepted: it is packed as it was unpacked, and each round continues the one before."""
    try:
        found = unpack_certificates(data)
        again = unpack_certificates(pack_certificates(found))
        assert [_canonical(item) for item in again] == [_canonical(item) for item in found]
        verify_chain(found, world().trust, world().manifests.get, GENESIS)
    except (RemoteProtocolError, CertificateError):
        return False
    assert [item.body.rules for item in found] == sorted(item.body.rules for item in found)
    parents = [GENESIS, *(item.body.model_digest for item in found)]
    assert all(
        item.body.parent_digest == parent for item, parent in zip(found, parents, strict=False)
    )
    return True


def pieces(data: bytes) -> list[bytes]:
    """What lies behind each length; what does not fit is the last piece."""
    found, position = [], 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        found.append(data[position : position + length])
        position += length
    return found


def joined(items: list[bytes]) -> bytes:
    """Each behind its length, as peers/wire/histories.py has it."""
    return b"".join(_LENGTH.pack(len(item)) + item for item in items)


def shuffled(items: list[bytes], chance: Random) -> list[bytes]:
    """One dropped, doubled, or put elsewhere."""
    items, at = list(items), chance.randrange(len(items))
    match chance.randrange(3):
        case 0:
            del items[at]
        case 1:
            items.insert(at, items[at])
        case 2:
            chance.shuffle(items)
    return items


def mutate_chain(data: bytes, chance: Random) -> bytes:
    items = pieces(data)
    if not items:
        return data
    if chance.random() < 0.3:
        return joined(shuffled(items, chance))
    at = chance.randrange(len(items))
    items[at] = mutate_certificate(items[at], chance)
    if chance.random() < 0.1:
        items[at] = mutate_bytes(items[at], chance)
    return joined(items)


def chain_seeds() -> Iterator[bytes]:
    yield pack_certificates(chain())
    yield pack_certificates(chain()[:1])
    yield pack_certificates([chain()[0], certificate(vote_body(2, GENESIS))])
    yield pack_certificates(chain(old=1))
    yield pack_certificates([chain()[0], *chain(old=2)[1:]])
