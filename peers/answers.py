"""What a site answers to a `Prepare`, and says of an attempt that it lost. PURE."""

from __future__ import annotations

from peers import effects as do
from peers.messages import one_line
from proto import federation_pb2 as pb

# An older manifest is good for what was accepted under it, not for training: it may
# name a site that was disabled since.
UNDER_OLDER_MANIFEST = do.Situation(
    0,
    willing=False,
    reason="has a newer federation manifest: install it at the coordinator too (SIGHUP)",
)


def promise(
    head: do.Durable, situation: do.Situation, shape_digest: bytes, certificate: bytes
) -> pb.Promise:
    """We take part, and tell what we have accepted and can contribute."""
    return pb.Promise(
        round=head.head_round + 1,
        attempt=head.promised,
        head_digest=head.head_digest,
        accepted=head.accepted,
        num_examples=situation.num_examples,
        willing=situation.willing,
        reason=one_line(situation.reason),
        shape_digest=shape_digest,
        certificate=certificate,
        complexity=situation.complexity,
    )


def nack(asked: pb.Prepare, promised: int) -> pb.Nack:
    """We have promised a later attempt."""
    return pb.Nack(round=asked.round, attempt=asked.attempt, promised_attempt=promised)


def ahead(asked: pb.Prepare, head: pb.Certificate) -> pb.Ahead:
    """That round is over; here is the proof of a later one."""
    return pb.Ahead(round=asked.round, certificate=head)


def behind(asked: pb.Prepare, head_round: int) -> pb.Behind:
    """We do not know yet that the round before is committed."""
    return pb.Behind(round=asked.round, attempt=asked.attempt, head_round=head_round)


def other_manifest(asked: pb.Prepare, version: int, head: do.Durable) -> pb.AttemptFailed:
    """We can't take part in an attempt under another list of sites; perhaps we never can."""
    reason = (
        f"has federation manifest {version}, the coordinator {asked.manifest_version}: "
        "install the newer one at both (SIGHUP)"
    )
    bound = head.accepted.value.manifest_version if head.accepted else 0
    return pb.AttemptFailed(
        round=asked.round, attempt=asked.attempt, reason=reason, manifest_version=bound
    )


def restarted(round_: int, attempt: int) -> pb.AttemptFailed:
    """Keys, training and votes of this attempt went with the process that had them."""
    reason = "take part any longer: its daemon was restarted"
    return pb.AttemptFailed(round=round_, attempt=max(0, attempt), reason=reason)
