"""A newer manifest goes from peer to peer, so that an expulsion reaches every site at once.

Every greeting tells the version that its sender has. Whoever hears of a newer one pulls
it, verifies the authority's signature, and puts it in force as if its operator had
installed it and reloaded. One site with the new manifest is enough; what it says it has
costs a liar's peers one small pull a heartbeat (docs/decisions/0008).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog

from daemon.state.membership import Membership
from daemon.state.store import StoreError
from peers.link.transport import Transport
from peers.wire.errors import PeerError
from peers.wire.histories import unpack_manifests
from peers.wire.manifest import FederationManifest, ManifestError, parse_signed
from proto import federation_pb2 as pb

log = structlog.get_logger()

# Of one pull: sixteen manifests of the largest size, thousands of usual ones.
_AT_MOST = 16 << 20

Apply = Callable[[str], Awaitable[None]]


class ManifestGossip:
    """Takes newer manifests from peers into force."""

    def __init__(
        self, membership: Membership, transport: Transport, folder: Path, apply: Apply
    ) -> None:
        """``folder`` is for what arrives; ``apply`` tells the rest of the daemon, and from whom."""
        self._membership = membership
        self._transport = transport
        self._folder = folder
        self._apply = apply
        self._told: dict[str, str] = {}  # the last complaint about each peer

    async def run(self, *, adopting: bool) -> None:
        """Until cancelled. Without ``adopting`` only tell people that there is a newer one."""
        while True:
            await self._transport.newer_manifest.wait()
            self._transport.newer_manifest.clear()
            for site, version in self._transport.who_has_newer_manifests().items():
                if not adopting:
                    self._complain(
                        site, f"it has manifest {version}; [identity] adopt_manifests is off here"
                    )
                elif await self._adopt_from(site):
                    break

    async def _adopt_from(self, site: str) -> bool:
        before = self._membership.manifest.version
        try:
            signed = await self._pull(site, before + 1)
            manifests = await asyncio.to_thread(self._verified, signed)
            self._membership.adopt(manifests)
        except (PeerError, ManifestError, StoreError, OSError) as error:
            self._complain(site, str(error))
            return False
        version = self._membership.manifest.version
        log.info("manifest adopted", peer=site, before=before, manifest=version)
        await self._apply(site)
        return True

    async def _pull(self, site: str, first: int) -> list[bytes]:
        incoming = self._folder / f"manifests-{site}"
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        try:
            name = pb.BlobName(kind=pb.MANIFESTS, round=first)
            await self._transport.pull(site, name, incoming, at_most=_AT_MOST)
            packed = await asyncio.to_thread(incoming.read_bytes)
        finally:
            for left in (incoming, incoming.with_name(f"{incoming.name}.part")):
                await asyncio.to_thread(left.unlink, missing_ok=True)
        return unpack_manifests(packed)

    def _verified(self, signed: list[bytes]) -> list[tuple[FederationManifest, bytes]]:
        # By an authority that is in office: one that another has followed signs nothing new.
        trust, now = self._membership.trust, datetime.now(UTC)
        return [(parse_signed(text, trust, at=now), text) for text in signed]

    def _complain(self, site: str, cause: str) -> None:
        if self._told.get(site) != cause:
            self._told[site] = cause
            log.warning("a peer's newer manifest is not in force here", peer=site, cause=cause)
