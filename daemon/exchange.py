"""Versions and certificates between this site's disk and its peers'.

What a peer sends is verified against its name, or by the protocol, before it is
kept; what we give away is only what is committed or named by digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from daemon.store import Store
from daemon.versions import (
    ShapeManifest,
    VersionError,
    import_version,
    read_version,
    version_path,
)
from peers import effects as do
from peers.certificate_file import pack_certificates, unpack_certificates
from peers.messages import BlobUnknown, PeerError
from peers.transport import Transport
from proto import federation_pb2 as pb

log = structlog.get_logger()

_KEPT_VERSIONS = 5
_CERTIFICATES_A_PULL = 1000


@dataclass(frozen=True)
class Folders:
    """Where a site keeps what is not in a database."""

    versions: Path
    spool: Path
    residual: Path


class Exchange:
    """Fetches what the protocol asks for, and serves what peers may pull."""

    def __init__(
        self,
        store: Store,
        folders: Folders,
        shapes: ShapeManifest,
        feed: Callable[[do.Event], Awaitable[None]],
    ) -> None:
        self._store = store
        self._folders = folders
        self._shapes = shapes
        self._feed = feed
        self._fetching: set[bytes] = set()
        self._catching_up = False

    async def fetch_version(self, effect: do.FetchVersion, transport: Transport) -> None:
        """Have a version on disk, verified: ours, or from the first peer that gives it."""
        digest = effect.model_digest
        if digest in self._fetching:
            return
        self._fetching.add(digest)
        try:
            reasons = []
            if await self._version_is_here(digest):
                await self._feed(do.VersionHere(digest))
                return
            for site in effect.sites:
                try:
                    await self._pull_version(transport, site, digest)
                except (PeerError, VersionError, OSError) as error:
                    reasons.append(f"{site}: {error}")
                else:
                    await self._feed(do.VersionHere(digest))
                    return
            await self._feed(do.VersionMissing(digest, "; ".join(reasons) or "nobody to ask"))
        finally:
            self._fetching.discard(digest)

    async def _version_is_here(self, digest: bytes) -> bool:
        try:
            await asyncio.to_thread(
                read_version, self._folders.versions, digest, self._shapes.digest
            )
        except VersionError:
            return False
        return True

    async def _pull_version(self, transport: Transport, site: str, digest: bytes) -> None:
        incoming = self._folders.spool / f"version-{digest.hex()}"
        name = pb.BlobName(kind=pb.MODEL_VERSION, digest=digest)
        await transport.pull(site, name, incoming)
        await asyncio.to_thread(
            import_version, incoming, self._folders.versions, digest, self._shapes.digest
        )

    async def fetch_certificates(self, effect: do.FetchCertificates, transport: Transport) -> None:
        """Get the certificates that we missed; the protocol verifies them."""
        if self._catching_up:
            return
        self._catching_up = True
        incoming = self._folders.spool / f"certificates-{effect.site}"
        try:
            name = pb.BlobName(kind=pb.CERTIFICATES, round=effect.after + 1)
            await transport.pull(effect.site, name, incoming)
            packed = await asyncio.to_thread(incoming.read_bytes)
            certificates = unpack_certificates(packed)
            await self._feed(do.CertificatesArrived(effect.site, tuple(certificates)))
        except (PeerError, OSError) as error:
            log.info("certificates not fetched", peer=effect.site, cause=str(error))
        finally:
            self._catching_up = False
            await asyncio.to_thread(incoming.unlink, missing_ok=True)

    async def source(self, sender: str, name: pb.BlobName) -> Path | bytes:
        """What a peer may pull: committed certificates, model versions by name."""
        if name.kind == pb.MODEL_VERSION:
            path = version_path(self._folders.versions, name.digest)
            if await asyncio.to_thread(path.exists):
                return path
            raise BlobUnknown(f"no version {name.digest.hex()[:12]} here")
        if name.kind == pb.CERTIFICATES:
            rounds = await asyncio.to_thread(
                self._store.rounds_from, name.round, _CERTIFICATES_A_PULL
            )
            return pack_certificates([commit.certificate for commit in rounds])
        raise BlobUnknown(f"{pb.BlobKind.Name(name.kind)} is not for pulling (asked by {sender})")

    async def forget_old_versions(self, keep: set[bytes]) -> None:
        """Remove versions beside the newest few, so that the disk stays bounded."""
        recent = await asyncio.to_thread(self._store.recent_versions, _KEPT_VERSIONS)
        await asyncio.to_thread(_remove_versions, self._folders.versions, keep | recent)


def _remove_versions(versions: Path, keep: set[bytes]) -> None:
    names = {digest.hex() for digest in keep}
    for path in versions.glob("*.safetensors"):
        if path.stem not in names:
            path.unlink(missing_ok=True)
