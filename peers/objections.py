"""Is what a coordinator says valid here? Raises RemoteProtocolError when it is not. PURE."""

from __future__ import annotations

from peers.coordination import Coordination
from peers.effects import Durable
from peers.errors import RemoteProtocolError
from peers.manifest import FederationManifest
from peers.participation import Participation
from peers.roles import coordinator_of
from proto import federation_pb2 as pb


def check_turn(sender: str, manifest: FederationManifest, round_: int, attempt: int) -> None:
    """Only its coordinator speaks for an attempt."""
    if sender != coordinator_of(manifest, round_, attempt):
        raise RemoteProtocolError(
            f"{sender} does not coordinate attempt {attempt} of round {round_}: it is not its turn"
        )


def check_history(sender: str, prepare: pb.Prepare, head: Durable) -> None:
    """A round is built on the version that was committed before it."""
    if prepare.head_digest != head.head_digest:
        raise RemoteProtocolError(
            f"{sender} builds round {prepare.round} on version "
            f"{prepare.head_digest.hex()[:12]}, committed here is {head.head_digest.hex()[:12]}"
        )


def check_proposal(
    sender: str, accept: pb.Accept, manifest: FederationManifest, head: Durable
) -> None:
    """A value is proposed by its coordinator, on our head, under the manifest in force."""
    check_turn(sender, manifest, accept.round, accept.attempt)
    if accept.value.parent_digest != head.head_digest:
        raise RemoteProtocolError(f"{sender} proposes a version with another parent")
    if accept.value.manifest_version != manifest.version:
        raise RemoteProtocolError(
            f"{sender} proposes a version of manifest {accept.value.manifest_version}, "
            f"in force here is {manifest.version}"
        )


def is_expected(
    part: Participation | None,
    coordination: Coordination | None,
    sender: str,
    kind: pb.BlobKind.ValueType,
) -> bool:
    """Whether a large object of the attempt under way belongs here now, from that sender."""
    if kind == pb.ENCRYPTED_UPDATE:
        return coordination is not None and coordination.expects_update(sender)
    if kind == pb.PUBLIC_CONTEXT:
        return coordination is not None and coordination.expects_context(sender)
    return part is not None and part.expects(sender, kind)
