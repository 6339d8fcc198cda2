"""Versions, certificates and manifests between this site's disk and its peers'.

A site that was away asks any peer for what it missed, from the round after its
head on: certificates in pulls of a bounded size, the signed manifests of their
time, and the newest version. What a peer sends is verified before it is kept: a
certificate by the quorum of its manifest, a manifest by the authority's
signature, a version by its name. So it does not matter who is asked, and when one
peer is slow, wrong or gone, the next one goes on where it ended.

What we give away is only what is committed, signed, or named by digest.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import structlog

from crypto.quantize import FRACTION_INTEGERS
from daemon.rounds.readiness import Served
from daemon.state.folder import StateFolder
from daemon.state.store import Store, StoreError
from daemon.state.versions import (
    Shapes,
    VersionError,
    import_version,
    is_sound,
    largest_file,
    version_path,
)
from peers.attempts import effects as do
from peers.attempts.modes import mode_of
from peers.link.transport import PeerTransport
from peers.rounds.protocol import Protocol as RoundProtocol
from peers.wire.certificates import CertificateError
from peers.wire.errors import BlobUnknown, PeerError, RemoteProtocolError
from peers.wire.histories import (
    pack_certificates,
    pack_manifests,
    unpack_certificates,
    unpack_manifests,
)
from peers.wire.manifest import ManifestError
from proto import federation_pb2 as pb

log = structlog.get_logger()

# One pull of history ends at whichever comes first; the next goes on from there.
_CERTIFICATES_A_PULL = 1000
_HISTORY_BYTES_A_PULL = 16 << 20
# Of the disk; the state, the log and the index must not fail because of what a peer sends.
RESERVED_BYTES = 16 << 20

# Of a round, beside what a statement names: the sum of one of them may have to be made again.

_RETRY_S = 5.0
_NOTHING_CAME_S = 1.5
_WRONG = (RemoteProtocolError, CertificateError, ManifestError)
_REFUSED = (PeerError, *_WRONG)


class History(Protocol):
    """Who verifies the past (`daemon.state.membership.LogMembership`). Calls block."""

    def knows(self, manifest_version: int) -> bool:
        """Whether that manifest is here."""

    def learn(self, signed: Sequence[bytes]) -> None:
        """Keep signed manifests to verify with; raises ManifestError, StoreError."""

    def signed_from(self, version: int) -> list[bytes]:
        """The signed manifests of that version and later ones that are here, oldest first."""

    def verify_certificate(self, certificate: pb.Certificate) -> None:
        """Raises CertificateError."""

    @property
    def log_id(self) -> str:
        """Of the log of rounds."""

    @property
    def most_values(self) -> int:
        """Of the versions of any retriever that a manifest names; 0: none names one."""


class Holder(Protocol):
    """Whose head is kept sound; daemon/rounds/driver.py's Driver."""

    served: Served
    protocol: RoundProtocol

    @property
    def transport(self) -> PeerTransport:
        """The way to the peers."""

    def report(self, error: str) -> None:
        """Tell people."""


class CatchUp:
    """Fetches what the protocol asks for, and serves what peers may pull."""

    def __init__(
        self,
        *,
        store: Store,
        state: StateFolder,
        shapes: Shapes,
        history: History,
        keep_versions: int,
        feed: Callable[[do.Event], Awaitable[None]],
    ) -> None:
        self.store = store
        self.state = state
        self.shapes = shapes
        self._history = history
        self._keep_versions = keep_versions
        self._feed = feed
        self._suspected = asyncio.Event()  # the head's version may be damaged
        self._suspected.set()
        self._fetching: set[bytes] = set()
        self._active_pulls: set[Path] = set()
        self._read: Counter[bytes] = Counter()  # versions that somebody reads, and how many do
        self._asked: set[str] = set()  # whose certificates are on their way
        # By the site, since somebody last gave any that count: what is wrong with its own.
        self.unverified: dict[str, str] = {}

    # ---- versions ----------------------------------------------------------------

    async def fetch_version(self, effect: do.FetchVersion, transport: PeerTransport) -> None:
        """Have a version on disk, verified: ours, or from the first peer that gives it."""
        digest = effect.model_digest
        if digest in self._fetching:
            return
        reason = await self.have_version(digest, effect.sites, transport)
        if reason:
            await self._feed(do.VersionMissing(digest, reason))
        else:
            await self._feed(do.VersionHere(digest))

    async def have_version(
        self, digest: bytes, sites: Iterable[str], transport: PeerTransport
    ) -> str:
        """As `fetch_version`, for whoever waits here: "", or why it can't be had."""
        self._fetching.add(digest)
        try:
            if await self.is_here(digest):
                return ""
            return await self._from_any(digest, _connected_first(sites, transport), transport)
        except OSError as error:  # our disk: no peer can help
            return f"here: {error}"
        finally:
            self._fetching.discard(digest)

    async def is_here(self, digest: bytes) -> bool:
        """Whether a version is on this site's disk, every byte of it; of whatever retriever."""
        return await asyncio.to_thread(is_sound, self.state.versions, digest)

    async def is_ours(self, digest: bytes) -> bool:
        """Whether it is, and of the retriever in use here: it can answer."""
        return await asyncio.to_thread(is_sound, self.state.versions, digest, self.shapes.digest)

    async def newest_ours(self, head: bytes) -> bytes:
        """The version to answer with from a start on; empty: the encoder as it comes.

        That is the head, also where it has yet to come; or where that is of another retriever,
        the newest version of the one in use that is on the disk.
        """
        if await self.is_ours(head) or not await self.is_here(head):
            return head
        for commit in reversed(await asyncio.to_thread(self.store.rounds, 0, 0)):
            digest = commit.certificate.body.model_digest
            if version_path(self.state.versions, digest).exists() and await self.is_ours(digest):
                return digest
        return b""

    @property
    def _largest_file(self) -> int:
        """Bytes of a version's file at most, ours or what a manifest names."""
        return largest_file(max(self.shapes.total, self._history.most_values))

    async def _from_any(self, digest: bytes, sites: list[str], transport: PeerTransport) -> str:
        """ "" once one of ``sites`` gave it. Who gives nothing does not hold up the next one.

        A site whose packets vanish takes many seconds to fail, and a vote may wait for
        this version: another one is asked as well as soon as no byte comes.
        """
        arriving = self.state.arriving
        await asyncio.to_thread(self._make_room, arriving, 2 * self._largest_file)
        reasons: list[str] = []
        calls: dict[asyncio.Task[None], str] = {}
        size = -1
        try:
            while sites or calls:
                before, size = size, await asyncio.to_thread(_size_of, arriving, digest)
                if sites and (not calls or size == before):
                    site = sites.pop(0)
                    calls[asyncio.create_task(self._pull(transport, site, digest))] = site
                done, _ = await asyncio.wait(
                    calls, timeout=_NOTHING_CAME_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    site = calls.pop(task)
                    try:
                        task.result()
                    except (PeerError, VersionError) as error:
                        reasons.append(f"{site}: {error}")
                    else:
                        return ""
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return "; ".join(reasons) or "nobody to ask"

    async def _pull(self, transport: PeerTransport, site: str, digest: bytes) -> None:
        """From where an earlier transfer ended, at whichever peer and before whichever crash."""
        incoming = self.state.arriving / f"{_arriving_name(digest)}.{site}"
        await asyncio.to_thread(_inherit, incoming, digest, self._active_pulls)
        self._active_pulls.add(incoming)
        try:
            if not await asyncio.to_thread(incoming.exists):  # whole, but the disk was full
                name = pb.BlobName(kind=pb.MODEL_VERSION, digest=digest)
                await transport.pull(site, name, incoming, at_most=self._largest_file)
            await asyncio.to_thread(import_version, incoming, self.state.versions, digest)
        finally:
            self._active_pulls.discard(incoming)
        await asyncio.to_thread(_discard_all, self.state.arriving, digest)

    def _make_room(self, folder: Path, size: int) -> None:
        """Forget what arrived in part of versions that nobody waits for any more."""
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {_arriving_name(digest) for digest in self._fetching}
        for path in folder.glob("version-*"):
            if path.name.partition(".")[0] not in wanted:
                path.unlink(missing_ok=True)
        why_not = no_room(folder, size)
        if why_not is not None:
            raise OSError(errno.ENOSPC, why_not)

    def suspect_head(self) -> None:
        """A version here proved to be damaged; perhaps the one that all of ours builds on."""
        self._suspected.set()

    async def keep_head_sound(self, driver: Holder) -> None:
        """Fetch the head's version again whenever it is missing or damaged."""
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            digest = driver.protocol.durable.head_digest
            if await self.is_here(digest):
                continue
            # Who has the base model makes the first version at each start; who hasn't lacks it.
            lacks_first = driver.protocol.head_round == 0
            if lacks_first:
                log.info("the first version is not here", model=digest.hex()[:12])
            else:
                log.warning("the model version is missing or damaged", model=digest.hex()[:12])
            peers = [site for site, p in driver.transport.statistics().items() if p.connected]
            reason = await self.have_version(digest, peers, driver.transport)
            if reason:
                if not lacks_first:
                    driver.report(f"model version {digest.hex()[:12]} is damaged here: {reason}")
                await asyncio.sleep(_RETRY_S)
                self._suspected.set()
            else:
                log.info("model version fetched again", model=digest.hex()[:12])
                await self._feed(do.VersionHere(digest))  # the protocol may have asked meanwhile
                if await self.is_ours(digest):
                    driver.served.adopt(digest)

    async def forget_old_versions(self, keep: set[bytes]) -> None:
        """Remove versions beside the newest few and `keeping`, so that the disk stays bounded."""
        recent = await asyncio.to_thread(self.store.recent_versions, self._keep_versions)
        kept = keep | recent | set(+self._read)
        await asyncio.to_thread(_remove_versions, self.state.versions, kept)

    @contextmanager
    def keeping(self, digests: Sequence[bytes]) -> Iterator[None]:
        """Meanwhile none of these versions is removed."""
        self._read.update(digests)
        try:
            yield
        finally:
            self._read.subtract(digests)

    # ---- certificates and manifests --------------------------------------------------

    async def fetch_certificates(
        self, effect: do.FetchCertificates, transport: PeerTransport
    ) -> None:
        """Get the certificates that we missed, verified, from whoever has them."""
        chain: list[pb.Certificate] = []
        for site in self._whom_to_ask(effect, transport):
            if site in self._asked:  # one that takes its time holds up no other
                continue
            length = len(chain)
            self._asked.add(site)
            try:
                await self._extend(chain, site, effect.after, transport)
            except _REFUSED as error:
                log.info("certificates not fetched", peer=site, cause=str(error))
                if isinstance(error, _WRONG):
                    self.unverified[site] = str(error)
            except (OSError, StoreError) as error:
                log.warning("certificates not fetched: our disk", cause=str(error))
                return
            finally:
                self._asked.discard(site)
            if len(chain) > length:
                self.unverified.clear()
                await self._feed(do.CertificatesArrived(tuple(chain)))

    def _whom_to_ask(self, effect: do.FetchCertificates, transport: PeerTransport) -> list[str]:
        """The site that said so first, then whoever else is ahead, the farthest first."""
        seen = transport.statistics()
        heads = {site: peer.head_of(self._history.log_id) for site, peer in seen.items()}
        ahead = [site for site, head in heads.items() if head > effect.after]
        ahead.sort(key=lambda site: -heads[site])
        return _connected_first(dict.fromkeys([effect.site, *ahead]), transport)

    async def _extend(
        self, chain: list[pb.Certificate], site: str, after: int, transport: PeerTransport
    ) -> None:
        """Pull what that site has beyond ``chain``, until it has no more.

        What was verified stays in ``chain`` when a later pull fails.
        """
        while True:
            first = after + len(chain) + 1
            name = pb.BlobName(kind=pb.CERTIFICATES, round=first)
            packed = await self._pull_history(transport, site, name)
            certificates = await asyncio.to_thread(unpack_certificates, packed)
            if not certificates:
                return
            _check_order(certificates, first, chain[-1].body.model_digest if chain else None)
            await self._learn_manifests(site, certificates, transport)
            # In a thread: thousands of signatures must not hold up the daemon.
            await asyncio.to_thread(self._verify, certificates)
            chain += certificates

    def _verify(self, certificates: Sequence[pb.Certificate]) -> None:
        for certificate in certificates:
            self._history.verify_certificate(certificate)

    async def _learn_manifests(
        self, site: str, certificates: Sequence[pb.Certificate], transport: PeerTransport
    ) -> None:
        """The manifests of these certificates' time, if we lack one."""
        versions = {certificate.body.manifest_version for certificate in certificates}
        missing = sorted(version for version in versions if not self._history.knows(version))
        while missing:
            name = pb.BlobName(kind=pb.MANIFESTS, round=missing[0])
            packed = await self._pull_history(transport, site, name)
            signed = await asyncio.to_thread(unpack_manifests, packed)
            await asyncio.to_thread(self._history.learn, signed)
            still = [version for version in missing if not self._history.knows(version)]
            if missing[0] in still:
                raise RemoteProtocolError(
                    f"it sent certificates of manifest {missing[0]} and not that manifest"
                )
            missing = still

    async def _pull_history(self, transport: PeerTransport, site: str, name: pb.BlobName) -> bytes:
        """One pull: small enough for memory, and it starts anew after a restart."""
        incoming = self.state.arriving / f"history-{name.kind}-{site}-{name.round}"
        await asyncio.to_thread(incoming.parent.mkdir, parents=True, exist_ok=True)
        try:
            await transport.pull(site, name, incoming)
            return await asyncio.to_thread(incoming.read_bytes)
        finally:
            await asyncio.to_thread(_discard, incoming)

    # ---- what peers may have -----------------------------------------------------------

    async def source(self, sender: str, name: pb.BlobName) -> Path | bytes:
        """What a peer may pull: history, and model versions by name. Raises BlobUnknown."""
        if name.kind == pb.MODEL_VERSION:
            return await self._sound_version(name.digest)
        if name.kind == pb.CERTIFICATES:
            rounds = await asyncio.to_thread(
                self.store.rounds_from, name.round, _CERTIFICATES_A_PULL
            )
            certificates = [commit.certificate for commit in rounds]
            return pack_certificates(certificates, at_most=_HISTORY_BYTES_A_PULL)
        if name.kind == pb.MANIFESTS:
            manifests = await asyncio.to_thread(self._history.signed_from, name.round)
            return pack_manifests(manifests, at_most=_HISTORY_BYTES_A_PULL)
        raise BlobUnknown(f"{pb.BlobKind.Name(name.kind)} is not for pulling (asked by {sender})")

    async def _sound_version(self, digest: bytes) -> Path:
        """A damaged one is not handed on; it is fetched again if it is still needed."""
        path = version_path(self.state.versions, digest)
        if await self.is_here(digest):
            return path
        if await asyncio.to_thread(path.exists):
            self.suspect_head()
        raise BlobUnknown(f"no version {digest.hex()[:12]} here")


def too_large(
    kind: pb.BlobKind.ValueType, size: int, plan: pb.Plan | None, shapes: Shapes
) -> str | None:
    """None when an object of the attempt under way may have ``size`` bytes, else why not."""
    if plan is None:
        return "the attempt is only beginning here"
    if kind not in (pb.ENCRYPTED_UPDATE, pb.ENCRYPTED_SUM, pb.ENCRYPTED_PRODUCTS):
        return None  # keys: bounded by their kind (peers/wire/messages.py)
    most = mode_of(plan).largest(kind, plan, shapes.total + FRACTION_INTEGERS)
    if size <= most:
        return None
    name = "the dot products" if kind == pb.ENCRYPTED_PRODUCTS else "a vector"
    return f"{size} bytes are more than the {most} that {name} of this plan can have"


def no_room(folder: Path, size: int) -> str | None:
    """None when ``size`` bytes leave what is reserved of the disk, else why not."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    if size <= free - RESERVED_BYTES:
        return None
    return (
        f"{size} bytes do not fit on the disk: {free} are free, {RESERVED_BYTES} must stay so. "
        "Free some space on it"
    )


def _connected_first(sites: Iterable[str], transport: PeerTransport) -> list[str]:
    """In the order given, but who did not answer of late comes last."""
    seen = transport.statistics()
    return sorted(sites, key=lambda site: site not in seen or not seen[site].connected)


def _check_order(certificates: Sequence[pb.Certificate], first: int, parent: bytes | None) -> None:
    """Raises RemoteProtocolError unless each certificate follows the one before."""
    for round_, certificate in enumerate(certificates, start=first):
        body = certificate.body
        if body.round != round_ or parent not in (None, body.parent_digest):
            raise RemoteProtocolError(
                f"the certificate of round {body.round} does not follow round {round_ - 1}"
            )
        parent = body.model_digest


def _remove_versions(versions: Path, keep: set[bytes]) -> None:
    names = {digest.hex() for digest in keep}
    for path in versions.glob("*.safetensors"):
        if path.stem not in names:
            path.unlink(missing_ok=True)


def _arriving_name(digest: bytes) -> str:
    return f"version-{digest.hex()}"


def _size_of(folder: Path, digest: bytes) -> int:
    """Bytes of a version that have arrived so far."""
    size = 0
    for path in folder.glob(f"{_arriving_name(digest)}.*"):
        with suppress(FileNotFoundError):  # it was renamed just now
            size += path.stat().st_size
    return size


def _inherit(incoming: Path, digest: bytes, active: set[Path]) -> None:
    """Go on from the most that any earlier pull of this version has left behind.

    Every site has the same bytes; if one has not, the digest of its next frame tells.
    """
    left = [
        path
        for path in incoming.parent.glob(f"{_arriving_name(digest)}.*")
        if path.with_name(path.name.removesuffix(".part")) not in active
    ]
    most = max(left, key=lambda path: path.stat().st_size, default=None)
    if most is not None:
        part = ".part" if most.suffix == ".part" else ""
        most.rename(incoming.with_name(incoming.name + part))


def _discard_all(folder: Path, digest: bytes) -> None:
    for path in folder.glob(f"{_arriving_name(digest)}.*"):
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".part").unlink(missing_ok=True)
