"""What this site knows of its peers from talking with them.

One record a peer, kept by both directions of the transport: the calls that we
make and those that are made to us. People see it in `fedctl peers`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from peers.wire.manifest import RETRIEVER, model_of
from proto import federation_pb2 as pb

Tap = Callable[[Literal["sent", "received"], str, bytes], None]
"""Called with direction, peer and serialised bytes of every message that crosses."""


@dataclass(frozen=True)
class PeerStatistics:
    """One peer, as seen from here.

    ``last_contact`` is a `time.monotonic` reading in seconds (None: never);
    ``clock_offset_ms`` how far the peer's clock is ahead of ours, give or take
    half a round trip; ``round_trip_ms`` how long the last greeting took on a
    connection that was up already (None: none yet); ``certificate_not_after``
    until when the certificate is valid that the peer last greeted us with (UTC;
    None: it has not greeted this process yet). Bytes are those of serialised messages; ``refused``
    counts the peer's calls that this site turned down, ``over_quota`` those of them
    that were too many or too large (peers/link/quotas.py). ``shut_out``: the version of the
    manifest in which this site takes no part, as the peer said last (0: it takes our calls).
    ``head_round`` is that of the retriever's log, ``other_heads`` those of other models' by its id.
    """

    connected: bool = False
    last_contact: float | None = None
    software_version: str = ""
    head_round: int = 0
    other_heads: Mapping[str, int] = field(default_factory=dict)
    manifest_version: int = 0
    clock_offset_ms: float | None = None
    round_trip_ms: float | None = None
    certificate_not_after: datetime | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    over_quota: int = 0
    shut_out: int = 0
    last_error: str = ""

    def head_of(self, log: str) -> int:
        """The last committed round of a log, as the peer has said; 0: none."""
        own = model_of(log) == RETRIEVER
        return self.head_round if own else self.other_heads.get(log, 0)


class Contacts:
    """The records of all peers, changed by whoever talks with them."""

    def __init__(self, tap: Tap | None = None) -> None:
        self._peers: defaultdict[str, PeerStatistics] = defaultdict(PeerStatistics)
        self._tap = tap

    def statistics(self, site: str) -> PeerStatistics:
        """A peer's record as it is now."""
        return self._peers[site]

    def sent(self, site: str, raw: bytes) -> None:
        """A message to a peer is on its way."""
        self._note(site, bytes_sent=self._peers[site].bytes_sent + len(raw))
        if self._tap is not None:
            self._tap("sent", site, raw)

    def received(self, site: str, raw: bytes) -> None:
        """A message from a peer is here."""
        self._note(
            site,
            bytes_received=self._peers[site].bytes_received + len(raw),
            last_contact=time.monotonic(),
        )
        if self._tap is not None:
            self._tap("received", site, raw)

    def answered(self, site: str) -> None:
        """A call to a peer went well."""
        self._note(site, connected=True, last_contact=time.monotonic(), last_error="", shut_out=0)

    def unreachable(self, site: str, error: str) -> None:
        """A call to a peer did not get through."""
        self._note(site, connected=False, last_error=error)

    def failed(self, site: str, error: str, *, connected: bool) -> None:
        """A call got through and failed: the peer refused or misbehaved.

        ``connected``: it had taken our greeting, so it deals with us all the same.
        """
        self._note(site, connected=connected, last_contact=time.monotonic(), last_error=error)

    def shut_out(self, site: str, manifest_version: int) -> None:
        """A peer takes no call of ours: this site takes no part in its manifest."""
        self._note(site, shut_out=manifest_version)

    def refused(self, site: str, *, too_much: bool) -> None:
        """A peer's call was turned down here; ``too_much``: for its quota."""
        seen = self._peers[site]
        self._note(site, refused=seen.refused + 1, over_quota=seen.over_quota + too_much)

    def introduced(self, site: str, hello: pb.HelloRequest | pb.HelloReply) -> None:
        """A peer said what it runs."""
        self._note(
            site,
            software_version=hello.software_version,
            manifest_version=hello.manifest_version,
        )

    def identified(self, site: str, not_after: datetime) -> None:
        """A peer called with a certificate that is valid until ``not_after``."""
        self._note(site, certificate_not_after=not_after)

    def reported(self, site: str, reply: pb.HelloReply, clock_offset_ms: float) -> None:
        """A peer's answer to our greeting."""
        self.introduced(site, reply)
        self._note(
            site,
            head_round=reply.head_round,
            other_heads={head.log: head.head_round for head in reply.other_heads},
            clock_offset_ms=clock_offset_ms,
        )

    def timed(self, site: str, round_trip_ms: float) -> None:
        """So long did a peer's answer take, with no connection to be made first."""
        self._note(site, round_trip_ms=round_trip_ms)

    def _note(self, site: str, **changes: object) -> None:
        self._peers[site] = replace(self._peers[site], **changes)  # type: ignore[arg-type]
