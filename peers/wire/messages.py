"""The bounds of every message between sites, checked before anything uses it.

PURE: no IO, no clock. The table `_RULES` has one row for every field of every
message in proto/federation.proto, whose options say what it may hold. A field out
of its bounds refuses the whole message with a `RemoteProtocolError` that names the
field, what was found and what was expected.

What is checked here can be told from one message alone. Whether a sender may
say it, and whether it may say it *now*, is decided by the transport and by the
round protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from peers.wire import negative_bounds, signed_bounds
from peers.wire.bounds import (
    Part,
    Parts,
    Rule,
    ascending,
    most,
    number,
    octets,
    refuse,
    rule_for,
    rule_of,
)
from peers.wire.errors import RemoteProtocolError
from proto import bounds
from proto import federation_pb2 as pb

PROTOCOL_VERSION: Final = 2
FEATURES: Final = tuple(
    sorted(
        [
            *(
                f"adapt-{name.replace('_', '-')}"
                for name in bounds.names_of(pb.Adapt.DESCRIPTOR).values()
            ),
            *bounds.names_of(pb.Mode.DESCRIPTOR).values(),
            *("learning", "negatives", "privacy", "robust"),
        ]
    )
)


try:
    SOFTWARE_VERSION = metadata.version("hanse")[:32]
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    SOFTWARE_VERSION = "0.1.0+source"

MIB: Final = 1 << 20
GIB: Final = 1 << 30
FRAME_BYTES: Final = most("Frame", "data")
MESSAGE_BYTES: Final = 2 * FRAME_BYTES  # what the transport parses at most, frames included
TEXT_LENGTH: Final = most("AttemptFailed", "reason")
INCARNATION_BYTES: Final = most("Promise", "incarnation")
# One step of the manifest a round; before the first one any that a site has seen.
MANIFESTS_A_ROUND: Final = bounds.of("RoundState", "signed_under").items.most

BLOB_BYTES: Final[Mapping[int, int]] = {
    kind.number: int(bounds.holds_of(kind).most)
    for kind in pb.BlobKind.DESCRIPTOR.values
    if kind.number
}

M = TypeVar("M", bound=Message)


_RULES: dict[type[Message], dict[str, Rule | Part | Parts]] = {
    getattr(pb, name): {field.name: rule_of(field) for field in described.fields}
    for name, described in pb.DESCRIPTOR.message_types_by_name.items()
}


# ---- rules that join two fields ------------------------------------------------


_DIGEST = rule_for("Frame", "running_sha256")
_FEDERATION = rule_for("PullRequest", "federation_id")
_SITE = rule_for("PullRequest", "sender")
_ROUND = rule_for("Prepare", "round")


def _frame(path: str, frame: pb.Frame) -> None:
    # Full frames, so that a slow sender can't keep us for longer than its object is large.
    if len(frame.data) != FRAME_BYTES and not frame.last:
        size = f"{len(frame.data)} bytes"
        raise refuse(f"{path}.data", size, f"{FRAME_BYTES} bytes in all frames but the last")


def _blob_name(path: str, name: pb.BlobName) -> None:
    if name.kind == pb.MODEL_VERSION:
        _DIGEST(f"{path}.digest", name.digest)
    else:
        octets(0, 0)(f"{path}.digest", name.digest)
    if name.kind in (pb.MODEL_VERSION, pb.CERTIFICATES, pb.MANIFESTS):
        number(0, 0)(f"{path}.attempt", name.attempt)
    else:
        _ROUND(f"{path}.round", name.round)


def _push_frame(path: str, push: pb.PushFrame) -> None:
    """The first frame says who sends what; no later one does."""
    if push.frame.offset:
        if push.federation_id or push.sender or push.HasField("name") or push.total_bytes:
            raise refuse(path, "a later frame with a name", "the name in the first frame only")
        return
    _FEDERATION(f"{path}.federation_id", push.federation_id)
    _SITE(f"{path}.sender", push.sender)
    if not push.HasField("name"):
        raise refuse(f"{path}.name", "missing", "what the object is, in the first frame")
    number(0, BLOB_BYTES[push.name.kind])(f"{path}.total_bytes", push.total_bytes)


def _envelope(path: str, envelope: pb.Envelope) -> None:
    if envelope.WhichOneof("body") is None:
        raise refuse(
            f"{path}.body", "missing", f"one message of protocol version {PROTOCOL_VERSION}"
        )


_RELATIONS: dict[type[Message], Callable[[str, Any], None]] = {
    pb.Frame: _frame,
    pb.BlobName: _blob_name,
    pb.PushFrame: _push_frame,
    pb.Envelope: _envelope,
    **signed_bounds.RELATIONS,
    **negative_bounds.RELATIONS,
}


def _walk(message: Message, path: str, without: str = "") -> None:
    for name, rule in _RULES[type(message)].items():
        where = f"{path}.{name}"
        if name == without:
            if message.HasField(name):
                raise refuse(where, "set", "left empty here")
        elif isinstance(rule, Parts):
            parts = getattr(message, name)
            rule.length(where, parts)
            for position, part in enumerate(parts):
                _walk(part, f"{where}[{position}]", rule.without)
                if rule.content is not None:
                    content: Any = part.content
                    rule.content(message)(f"{where}[{position}].content", content)
            if rule.by_site:
                ascending(where, [part.site for part in parts])
        elif not isinstance(rule, Part):
            rule(where, getattr(message, name))
        elif message.HasField(name):
            _walk(getattr(message, name), where)
        elif rule.presence == "required":
            raise refuse(where, "missing", "a value")
    relation = _RELATIONS.get(type(message))
    if relation is not None:
        relation(path, message)


# ---- the doors -------------------------------------------------------------------


def check(message: Message) -> None:
    """Raise RemoteProtocolError unless every field of ``message`` is known and in its bounds."""
    copied = type(message)()
    copied.CopyFrom(message)
    check_unshared(copied)


def check_unshared(message: Message) -> None:
    """As `check`, without a copy: a message that is refused may have lost what is not known."""
    # What is not known has no bounds, and would be kept and passed on with the rest. Looked
    # for by size: of each such field Python would make an object, of a million in 2 MiB.
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise refuse(type(message).__name__, "larger than its fields", "no fields but those known")
    _walk(message, type(message).__name__)


def decode(kind: type[M], raw: bytes) -> M:
    """Parse without checking bounds; raises RemoteProtocolError for anything but a ``kind``."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise RemoteProtocolError(
            f"{len(raw)} bytes that are no {kind.__name__} of protocol version {PROTOCOL_VERSION}"
        ) from error


def parse(kind: type[M], raw: bytes) -> M:
    """Parse and check; raises RemoteProtocolError."""
    message = decode(kind, raw)
    check_unshared(message)
    return message


def parse_signed(kind: type[M], raw: bytes) -> M:
    """As `parse`, of bytes that somebody has signed, in the one encoding that everybody makes.

    Written otherwise the same could be of any length, and have any number of names.
    """
    message = parse(kind, raw)
    if message.SerializeToString(deterministic=True) != raw:
        name = kind.__name__
        raise refuse(name, "in another encoding than everybody's", "its fields in order, each once")
    return message


def one_line(text: str) -> str:
    """``text`` as a free text may be sent: printable, one line, at most 500 characters."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= TEXT_LENGTH else f"{line[: TEXT_LENGTH - 3]}..."
