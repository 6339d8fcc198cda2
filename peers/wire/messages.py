"""The bounds of every message between sites, checked before anything uses it.

PURE: no IO, no clock. The table `_RULES` has one row for every field of every
message in proto/federation.proto, and a test holds that it has. A field out of
its bounds refuses the whole message with a `RemoteProtocolError` that names the
field, what was found and what was expected.

What is checked here can be told from one message alone. Whether a sender may
say it, and whether it may say it *now*, is decided by the transport and by the
round protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from peers.wire import negative_bounds, signed_bounds
from peers.wire.bounds import (
    Part,
    Rule,
    ascending,
    each,
    free,
    matching,
    number,
    octets,
    one_of,
    real,
    refuse,
    text,
)
from peers.wire.errors import RemoteProtocolError
from peers.wire.signed_bounds import CLIP_NORM, EXPONENTS
from proto import federation_pb2 as pb

PROTOCOL_VERSION: Final = 2
FEATURES: Final = (
    *("adapt-full", "adapt-head", "adapt-lora", "adapt-lora-server"),
    *("ckks", "learning", "masking", "negatives", "privacy", "robust"),
)


try:
    SOFTWARE_VERSION = metadata.version("hanse")[:32]
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    SOFTWARE_VERSION = "0.1.0+source"

MIB: Final = 1 << 20
GIB: Final = 1 << 30

FRAME_BYTES: Final = MIB
MESSAGE_BYTES: Final = 2 * MIB  # what the transport parses at most, frames included
TEXT_LENGTH: Final = 500
MAX_SITES: Final = 256
MAX_COMPARED: Final = 64
MANIFESTS_A_ROUND: Final = 16  # one step a round; before the first one any that a site has seen

# A training loss is clipped to 64 before it is shared; far above that is nonsense.
_LOSS_MAX: Final = 1000.0
INCARNATION_BYTES: Final = 16

# A product lies below the modulus (2^120), in units of far more than one.
_PRODUCT_MAX: Final = 2.0**120

BLOB_BYTES: Final[Mapping[int, int]] = {
    pb.PUBLIC_CONTEXT: 8 * MIB,
    pb.SEALED_CONTEXT: 8 * MIB,
    pb.ENCRYPTED_UPDATE: 64 * GIB,
    pb.ENCRYPTED_SUM: 64 * GIB,
    pb.MODEL_VERSION: 16 * GIB,
    pb.CERTIFICATES: 64 * MIB,
    pb.MANIFESTS: 64 * MIB,
    pb.ENCRYPTED_PRODUCTS: GIB,
}

M = TypeVar("M", bound=Message)


_COUNT = number(0)
_ROUND = number(1)
_ATTEMPT = number(0, 2**32 - 2)  # an attempt has a successor
_SITE = matching("[a-z0-9][a-z0-9-]{0,62}")
_SITE_OR_NONE = matching("([a-z0-9][a-z0-9-]{0,62})?")
_FEDERATION = text(1, 63)
_DIGEST = octets(32, 32)
_REASON = text(0, TEXT_LENGTH)
_CERTIFICATE = octets(1, 4096)
_SOFTWARE = text(0, 32)
_FEATURE_NAMES = each(text(1, 32), 0, 32)
_CONTRIBUTORS = each(_SITE, 2, MAX_SITES, ordered=True)
_REJECTED = each(_SITE, 0, MAX_SITES, ordered=True)
_LOSS = real(0.0, _LOSS_MAX, unknown=True)
_MULTIPLIER = real(0.001, 1000.0)
_PHASES = (
    *("prepare", "plan", "key", "train", "encrypt"),
    *("aggregate", "select", "state", "open", "vote", "commit"),
)
_STATEMENT_BYTES: Final = MIB
_SIGNATURE = octets(1, 80)

_VOTE: dict[str, Rule | Part] = {
    "attempt": _ATTEMPT,
    "body": Part(),
    "site": _SITE,
    "signature": _SIGNATURE,
    "certificate": _CERTIFICATE,
    "mean_loss": _LOSS,
    "next_clip_norm": real(0.0, 1e9),
}
_AT: dict[str, Rule | Part] = {"round": _ROUND, "attempt": _ATTEMPT}


def _all(low: int, high: int, **rules: Rule | Part) -> Rule:
    """A list of messages; ``rules`` take the place of the table's."""

    def one(path: str, message: Message) -> None:
        _walk(message, path, _RULES[type(message)] | rules if rules else None)

    return each(one, low, high)


def _bare_vote(path: str, vote: pb.Vote) -> None:
    """A vote inside a certificate, whose body is the certificate's."""
    _walk(vote, path, _VOTE | {"body": Part("absent")})


_RULES: dict[type[Message], dict[str, Rule | Part]] = {
    pb.HelloRequest: {
        "protocol_version": number(1),
        "software_version": _SOFTWARE,
        "features": _FEATURE_NAMES,
        "federation_id": _FEDERATION,
        "sender": _SITE,
        "manifest_version": _COUNT,
    },
    pb.HelloReply: {
        "protocol_version": number(1),
        "software_version": _SOFTWARE,
        "features": _FEATURE_NAMES,
        "sender": _SITE,
        "manifest_version": _COUNT,
        "head_round": _COUNT,
        "unix_ms": _COUNT,
    },
    pb.Receipt: {},
    pb.Frame: {
        "offset": _COUNT,
        "data": octets(0, FRAME_BYTES),
        "running_sha256": _DIGEST,
        "last": free,
    },
    pb.BlobName: {
        "kind": one_of(*BLOB_BYTES),
        "round": _COUNT,
        "attempt": _ATTEMPT,
        "digest": octets(0, 32),
    },
    pb.PushFrame: {
        "federation_id": text(0, 63),
        "sender": _SITE_OR_NONE,
        "name": Part("optional"),
        "total_bytes": _COUNT,
        "frame": Part(),
    },
    pb.PullRequest: {
        "federation_id": _FEDERATION,
        "sender": _SITE,
        "name": Part(),
        "offset": _COUNT,
    },
    pb.Envelope: {
        "federation_id": _FEDERATION,
        "sender": _SITE,
        "manifest_version": _COUNT,
        **{field.name: Part("optional") for field in pb.Envelope.DESCRIPTOR.oneofs[0].fields},
    },
    pb.TrainingPlan: {
        "adapt": one_of(pb.HEAD, pb.LORA, pb.FULL, pb.LORA_SERVER),
        "local_epochs": number(0, 100),
        "batch_size": number(2, 4096),
        "learning_rate": real(0.0, 1.0, above=True),
        "temperature": real(0.001, 10.0),
        "hard_negatives": number(0, 64),
        "seed": free,
        "bits": one_of(8, 12, 16),
        "min_participants": number(2, MAX_SITES),
        "max_num_examples": number(1),
        "robust": one_of(*pb.RobustRule.values()),
        "byzantine_sites": number(0, MAX_COMPARED),
        "mode": one_of(pb.CKKS, pb.MASKING),
        "privacy": Part("optional"),
        "learning": Part("optional"),
    },
    pb.LearningPlan: {
        "recipe": matching("[a-z0-9-]{0,32}"),
        "negatives": one_of(*pb.Negatives.values()),
        "bm25_rounds": _COUNT,
        "random_negatives": number(0, 64),
        "batches": one_of(*pb.Batches.values()),
        "distill": one_of(*pb.Distill.values()),
        "kd_weight": real(0.0, 10_000.0),
        "proximal": real(0.0, 10_000.0),
        "start_from": one_of(*pb.StartFrom.values()),
        "dropout": real(0.0, 0.9),
        "weight_decay": real(0.0, 1.0),
        "aggregate": one_of(*pb.Aggregate.values()),
        "server_learning_rate": real(0.0, 100.0, above=True),
        "momentum": real(0.0, 0.9999),
        "second_momentum": real(0.0, 0.9999),
        "floor": real(0.0, 1.0, above=True),
    },
    pb.PrivacyPlan: {
        "clip_norm": CLIP_NORM,
        "noise_multiplier": _MULTIPLIER,
        "noise_floor": _MULTIPLIER,
        "noise_decay": real(0.0, 1.0, above=True),
        "loss_threshold": real(0.0, _LOSS_MAX),
        "first_round": _ROUND,
        "colluders": number(0, MAX_SITES),
        "clip_quantile": real(0.0, 0.99),
    },
    pb.Signed: {
        "body": octets(1, _STATEMENT_BYTES),
        "site": _SITE,
        "signature": _SIGNATURE,
        "certificate": _CERTIFICATE,
    },
    pb.Signature: {"site": _SITE, "signature": _SIGNATURE, "certificate": _CERTIFICATE},
    pb.Run: {
        "generation": _COUNT,
        "run_id": matching("[0-9a-z-]{1,36}"),
        "requested_by": _SITE,
        "target_round": _COUNT,
        "plan": Part(),
        "federation_id": _FEDERATION,
    },
    pb.RunWish: {"run": Part(), "over": Part("optional")},
    pb.Prepare: {
        **_AT,
        "head_digest": _DIGEST,
        "run": Part(),
        "shape_digest": _DIGEST,
        "manifest_version": _COUNT,
        "promise": Part(),
    },
    pb.Promise: {
        **_AT,
        "federation_id": _FEDERATION,
        "manifest_digest": _DIGEST,
        "manifest_version": _COUNT,
        "run_digest": _DIGEST,
        "parent_digest": _DIGEST,
        "shape_digest": _DIGEST,
        "num_examples": _COUNT,
        "willing": free,
        "reason": _REASON,
        "complexity": real(0.0, 1e6),
        "lock": Part("optional"),
        "stated": Part("optional"),
        "tried": _ATTEMPT,
        "incarnation": octets(INCARNATION_BYTES, INCARNATION_BYTES),
    },
    pb.LockName: {"attempt": _ATTEMPT, "root_digest": _DIGEST, "model_digest": _DIGEST},
    pb.StatedName: {"attempt": _ATTEMPT, "digest": _DIGEST},
    pb.Promised: {"promise": Part(), "lock": Part("optional"), "stated": Part("optional")},
    pb.Bundle: {
        **_AT,
        "run": Part(),
        "promises": _all(1, MAX_SITES),
        "lock": Part("optional"),
        "stated": Part("optional"),
    },
    pb.Behind: {**_AT, "head_round": _COUNT},
    pb.Ahead: {"round": _ROUND, "certificate": Part()},
    pb.Participant: {"site": _SITE, "num_examples": number(1), "certificate": _CERTIFICATE},
    pb.Plan: {
        **_AT,
        "parent_digest": _DIGEST,
        "participants": _all(2, MAX_SITES),
        "key_dealer": _SITE_OR_NONE,
        "training": Part(),
        "shape_digest": _DIGEST,
        "manifest_version": _COUNT,
        "coordinator": _SITE,
        "noise_multiplier": real(0.0, 1000.0),
        "clip_norm": real(0.0, 1e9),
        "least_complexity": real(0.0, 1e6),
        "most_complexity": real(0.0, 1e6),
        "faulty_sites": number(0, MAX_SITES),
        "draw": _ATTEMPT,
        "scale_exponents": each(number(-126, 127), 0, 4096),
        "bundle_digest": _DIGEST,
        "full_weight": number(1),
    },
    pb.PlanAnswer: {**_AT, "accepted": free, "reason": _REASON},
    pb.KeyCommitment: {
        "plan_digest": _DIGEST,
        "public_digest": _DIGEST,
        "secret_digest": _DIGEST,
    },
    pb.KeyCommitted: {**_AT, "commitment": Part()},
    pb.Exponents: {"plan_digest": _DIGEST, "scale_exponents": EXPONENTS},
    pb.Trained: {**_AT, "exponents": Part("optional"), "reason": _REASON},
    pb.Scale: {**_AT, "exponents": _all(1, MAX_SITES)},
    pb.Contribution: {
        "plan_digest": _DIGEST,
        "scale_digest": _DIGEST,
        "upload_digest": _DIGEST,
        "nonce": octets(0, 16),
    },
    pb.Contributed: {**_AT, "contribution": Part()},
    pb.Statement: {
        **_AT,
        "federation_id": _FEDERATION,
        "manifest_digest": _DIGEST,
        "manifest_version": _COUNT,
        "parent_digest": _DIGEST,
        "run_digest": _DIGEST,
        "bundle_digest": _DIGEST,
        "kind": one_of(pb.QUESTION, pb.SUM, pb.RESTATED),
        "plan": Part("optional"),
        "scale_exponents": each(number(-126, 127), 0, 4096),
        "contributions": _all(0, MAX_SITES),
        "rejected": _REJECTED,
        "sum_digest": octets(0, 32),
        "commitment": Part("optional"),
        "roster_digest": octets(0, 32),
        "dropouts": each(_SITE, 0, MAX_SITES, ordered=True),
        "question_digest": octets(0, 32),
        "answers": _all(0, MAX_SITES),
        "byzantine_sites": number(0, MAX_COMPARED),
        "root_digest": octets(0, 32),
        "model_digest": octets(0, 32),
    },
    pb.State: {**_AT, "statement": octets(1, _STATEMENT_BYTES)},
    pb.Stated: {**_AT, "statement_digest": _DIGEST, "signature": Part()},
    pb.StatementCertificate: {
        "statement": octets(1, _STATEMENT_BYTES),
        "signatures": _all(1, MAX_SITES),
    },
    pb.Certified: {**_AT, "certificate": Part()},
    pb.MaskingItem: {"site": _SITE, "content": octets(0, 176)},
    pb.MaskingOrder: {
        **_AT,
        "step": one_of(pb.KEYS, pb.SHARES),
        "items": _all(1, MAX_SITES),
    },
    pb.MaskingAnswer: {
        **_AT,
        "step": one_of(pb.KEYS, pb.SHARES, pb.OPENING),
        "items": _all(1, MAX_SITES),
    },
    pb.Opened: {"site": _SITE, "items": _all(1, MAX_SITES)},
    pb.Openings: {**_AT, "opened": _all(1, MAX_SITES)},
    pb.Products: {
        "question_digest": _DIGEST,
        "products": each(real(-_PRODUCT_MAX, _PRODUCT_MAX), 3, MAX_COMPARED * 65 // 2),
        "imaginary": each(_SITE, 0, MAX_COMPARED, ordered=True),
    },
    pb.Compared: {**_AT, "products": Part()},
    pb.Challenge: {**_AT, "challenge": octets(32, 32)},
    pb.Proof: {**_AT, "answer": octets(8, 8)},
    pb.Applied: {
        "root_digest": _DIGEST,
        "model_digest": _DIGEST,
        "mean_loss": real(0.0, _LOSS_MAX),
        "next_clip_norm": real(0.0, 1e9),
    },
    pb.AppliedSum: {**_AT, "applied": Part()},
    pb.Lock: {
        "certificate": Part(),
        "root": octets(0, _STATEMENT_BYTES),
        "proof": _all(1, MAX_SITES),
    },
    pb.Proven: {**_AT, "lock": Part()},
    pb.VoteBody: {
        "federation_id": _FEDERATION,
        "round": _ROUND,
        "parent_digest": _DIGEST,
        "model_digest": _DIGEST,
        "contributors": _CONTRIBUTORS,
        "manifest_version": _COUNT,
        "plan_digest": _DIGEST,
        "rejected": _REJECTED,
        "rules": one_of(0, 2),
        "manifest_digest": octets(0, 32),
        "statement_digest": octets(0, 32),
        "mean_loss": real(0.0, _LOSS_MAX),
        "next_clip_norm": real(0.0, 1e9),
    },
    pb.Vote: _VOTE,
    pb.Certificate: {
        "attempt": _ATTEMPT,
        "body": Part(),
        "votes": each(_bare_vote, 1, MAX_SITES),
        "unix_ms": _COUNT,
    },
    pb.Commit: {"certificate": Part(), "report": Part("optional")},
    pb.AttemptFailed: {**_AT, "reason": _REASON},
    pb.Ended: {**_AT, "federation_id": _FEDERATION, "reason": _REASON},
    pb.EndedAttempt: {"ended": Part()},
    pb.Evidence: {"kind": one_of(*pb.EvidenceKind.values()[1:]), "first": Part(), "second": Part()},
    pb.Recall: {"round": _ROUND},
    pb.Remembered: {
        "round": _ROUND,
        "promise": Part("optional"),
        "statement": Part("optional"),
        "question": Part("optional"),
        "vote": Part("optional"),
        "lock": Part("optional"),
    },
    pb.RoundState: {
        **dict.fromkeys(("promise", "lock", "vote", "stated"), Part("optional")),
        "statements": _all(0, 2),
        "applied": _all(0, MAX_SITES),
        "tried": _ATTEMPT,
        "drawn": _all(0, 8 * MAX_SITES),
        **dict.fromkeys(("began", "lock_named", "sum_named"), _COUNT),
        "signed_under": each(_COUNT, 0, MANIFESTS_A_ROUND),
        "unread": _all(0, MAX_SITES),
        "over": _all(0, MAX_SITES),
        "put_aside": _all(0, MAX_SITES),
    },
    pb.Unread: {"site": _SITE, "remembered": Part()},
    pb.Drawn: {
        "attempt": _ATTEMPT,
        "sites": each(_SITE, 1, MAX_SITES, ordered=True),
    },
    pb.RoundReport: {
        "round": _ROUND,
        "attempt": _ATTEMPT,
        "coordinator": _SITE,
        # nobody dealt a key when an earlier attempt's value was proposed again
        "key_dealer": _SITE_OR_NONE,
        "contributors": each(_SITE, 0, MAX_SITES, ordered=True),
        "phases": each(lambda path, value: _walk(value, path), 0, 16),
        "shared_values": _COUNT,
        "mean_loss": _LOSS,
        "noise_multiplier": real(0.0, 1000.0),
        "clip_norm": real(0.0, 1e9),
        "rejections": each(lambda path, value: _walk(value, path), 0, MAX_SITES),
    },
    pb.Rejection: {"site": _SITE, "reason": _REASON},
    pb.PhaseTime: {"phase": one_of(*_PHASES), "seconds": real(0.0, 1e9)},
    **negative_bounds.RULES,
}


# ---- rules that join two fields ------------------------------------------------


def _frame(path: str, frame: pb.Frame) -> None:
    # Full frames, so that a slow sender can't keep us for longer than its object is large.
    if len(frame.data) != FRAME_BYTES and not frame.last:
        found = f"{len(frame.data)} bytes"
        raise refuse(f"{path}.data", found, "1048576 bytes in all frames but the last")


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


# Bytes of an item, by step (proto/federation.proto).
_ITEMS = {
    pb.KEYS: octets(97, 176),
    pb.SHARES: octets(82, 82),
    pb.OPENING: octets(33, 33),
}


def _masking(path: str, message: pb.MaskingOrder | pb.MaskingAnswer) -> None:
    _items(path, message.items, message.step)


def _items(path: str, items: Iterable[pb.MaskingItem], step: pb.MaskingStep.ValueType) -> None:
    ascending(f"{path}.items", [item.site for item in items])
    for position, item in enumerate(items):
        _ITEMS[step](f"{path}.items[{position}].content", item.content)


def _openings(path: str, openings: pb.Openings) -> None:
    ascending(f"{path}.opened", [opened.site for opened in openings.opened])
    for position, opened in enumerate(openings.opened):
        _items(f"{path}.opened[{position}]", opened.items, pb.OPENING)


_RELATIONS: dict[type[Message], Callable[[str, Any], None]] = {
    pb.Frame: _frame,
    pb.BlobName: _blob_name,
    pb.PushFrame: _push_frame,
    pb.Envelope: _envelope,
    pb.MaskingOrder: _masking,
    pb.MaskingAnswer: _masking,
    pb.Openings: _openings,
    **signed_bounds.RELATIONS,
    **negative_bounds.RELATIONS,
}


def _walk(message: Message, path: str, rules: Mapping[str, Rule | Part] | None = None) -> None:
    # What is not known has no bounds, and would be kept and passed on with the rest.
    if len(UnknownFieldSet(message)):
        raise refuse(path, "larger than its fields", "no fields but those known")
    for name, rule in (rules or _RULES[type(message)]).items():
        where = f"{path}.{name}"
        if not isinstance(rule, Part):
            rule(where, getattr(message, name))
        elif message.HasField(name):
            if rule.presence == "absent":
                raise refuse(where, "set", "left empty here")
            _walk(getattr(message, name), where)
        elif rule.presence == "required":
            raise refuse(where, "missing", "a value")
    relation = _RELATIONS.get(type(message))
    if relation is not None:
        relation(path, message)


# ---- the doors -------------------------------------------------------------------


def check(message: Message) -> None:
    """Raise RemoteProtocolError unless every field of ``message`` is known and in its bounds."""
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
    check(message)
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
