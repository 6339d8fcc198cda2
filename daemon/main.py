"""`fedd`: settings -> wiring -> signals -> systemd.

One asyncio process. It starts in an order in which nothing is promised before
it can be kept: settings, identity and manifest (refused at once if wrong), the
retriever's description, durable state, peers, the control socket, and only then
READY.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from config.settings import Settings, SettingsError, load
from crypto.identity import Identity, IdentityError, Trust
from crypto.quantize import CryptoError
from daemon import faultpoints, round_crypto
from daemon.attempts import AttemptLog
from daemon.collection import Collection, CollectionSettings
from daemon.control import ControlError, ControlSocket, Surroundings
from daemon.exchange import Folders
from daemon.learning import jobs as learning_jobs
from daemon.learning.spec import RetrieverSpec
from daemon.learning.terms import LearningError, RetrieverDescription
from daemon.node import Node
from daemon.observe import LoopLag, Notifier, configure_logging
from daemon.retrieval.schema import LibraryError
from daemon.store import Store, StoreError
from daemon.versions import sweep
from daemon.workers import Worker, WorkerCrashed
from peers import effects as do
from peers import robust
from peers.certificates import verify_certificate, verify_vote
from peers.contacts import Tap
from peers.manifest import FederationManifest, ManifestError, parse_signed
from peers.participation import Policy
from peers.protocol import Protocol
from peers.timing import Timing
from peers.transport import KeepInTouch, ListenError, Terms, Transport
from proto import federation_pb2 as pb

log = structlog.get_logger()

# What may be wrong at a start; each says its cause and remedy in one line.
_MISCONFIGURED = (SettingsError, IdentityError, ManifestError)
_REFUSALS = (
    *_MISCONFIGURED,
    StoreError,
    ControlError,
    ListenError,
    LearningError,
    LibraryError,
    WorkerCrashed,
)


_VERIFIED_AT_MOST = 100_000


class Membership:
    """Who this site is and whom it trusts; re-read from disk on SIGHUP."""

    def __init__(self, settings: Settings) -> None:
        """Read identity and manifest. Raises IdentityError or ManifestError."""
        self._files = settings.identity
        self._expected_site = settings.site.id
        self.identity, self.trust, self.manifest, self._signed = self._read()
        self._store: Store | None = None
        self._past: dict[int, FederationManifest] = {}
        self._verified: set[bytes] = set()

    def _read(self) -> tuple[Identity, Trust, FederationManifest, bytes]:
        files = self._files
        identity = Identity.load(files.certificate, files.key, files.authority)
        if self._expected_site not in (None, identity.site_id):
            raise IdentityError(
                f"[site] id is {self._expected_site!r}, the certificate {files.certificate} says "
                f"{identity.site_id!r}: correct the setting or install the right certificate"
            )
        trust = Trust.from_pem(identity.authority_pem)
        try:
            text = files.manifest.read_bytes()
        except OSError as error:
            raise ManifestError(
                f"cannot read the manifest {files.manifest}: {error.strerror}; get the signed "
                "manifest from whoever keeps the federation's authority (`fedctl manifest sign`)"
            ) from error
        manifest = parse_signed(text, trust)
        if manifest.federation_id != identity.federation_id:
            raise ManifestError(
                f"the manifest is of {manifest.federation_id!r}, the certificate of "
                f"{identity.federation_id!r}: install those of one federation"
            )
        return identity, trust, manifest, text

    def reload(self) -> None:
        """Read again; raises, and changes nothing, when that would be a step back."""
        identity, trust, manifest, signed = self._read()
        if identity.site_id != self.identity.site_id:
            raise IdentityError("the new certificate is of another site: restart to become it")
        if manifest.version < self.manifest.version:
            raise ManifestError(
                f"manifest {manifest.version} is older than {self.manifest.version}, which is in "
                "force: a manifest never goes back; sign a newer one"
            )
        self._past_agrees(manifest)
        if self._store is not None:
            self._store.file_manifest(manifest.version, signed)
        self.identity, self.trust, self.manifest, self._signed = identity, trust, manifest, signed
        self._past[manifest.version] = manifest

    def remember(self, store: Store) -> None:
        """File the manifest in force, and know those of the past. Raises StoreError."""
        for signed in store.manifests():
            manifest = parse_signed(signed, self.trust)
            self._past[manifest.version] = manifest
        self._past_agrees(self.manifest)
        store.file_manifest(self.manifest.version, self._signed)
        self._past[self.manifest.version] = self.manifest
        self._store = store

    def _past_agrees(self, manifest: FederationManifest) -> None:
        """Raises ManifestError when another one of the same version is known here."""
        known = self._past.get(manifest.version)
        if known is not None:
            manifest.newer_than(known)

    def knows(self, manifest_version: int) -> bool:
        """Whether certificates of that manifest can be verified here."""
        return manifest_version in self._past

    def learn(self, signed: Sequence[bytes]) -> None:
        """Keep signed manifests that a peer showed us, to verify certificates with.

        The authority's signature makes them good for that, whoever sent them. They
        are not put in force: who may connect is for this site's operator to install.
        Raises ManifestError, and keeps none, when one is not what it should be.
        """
        manifests = [parse_signed(text, self.trust) for text in signed]
        for manifest in manifests:
            self._past_agrees(manifest)
        if self._store is not None:
            learnt = zip((manifest.version for manifest in manifests), signed, strict=True)
            self._store.learn_manifests(list(learnt))
        self._past.update({manifest.version: manifest for manifest in manifests})

    def manifest_of(self, version: int) -> FederationManifest | None:
        """A manifest that was installed here, if it was."""
        return self._past.get(version)

    def verify_vote(self, vote: pb.Vote) -> None:
        """With whom we trust now; a vote under an expired certificate counts for nothing."""
        manifest = self.manifest_of(vote.body.manifest_version) or self.manifest
        verify_vote(vote, self.trust, manifest, at=datetime.now(UTC))

    def verify_certificate(self, certificate: pb.Certificate) -> None:
        """A certificate stays valid after its signers' certificates expired.

        The last ones verified are remembered: who catches up verifies thousands in a
        thread, and the protocol asks once more.
        """
        raw = certificate.SerializeToString(deterministic=True)
        digest = hashlib.sha256(raw).digest()
        if digest in self._verified:
            return
        manifest = self.manifest_of(certificate.body.manifest_version) or self.manifest
        verify_certificate(certificate, self.trust, manifest, at=None)
        if len(self._verified) >= _VERIFIED_AT_MOST:
            self._verified.clear()
        self._verified.add(digest)


@dataclass(frozen=True)
class Workers:
    """The processes that compute, one kind of work each."""

    learning: Worker
    answering: Worker
    crypto: Worker

    @classmethod
    def of(cls, threads: int) -> Workers:
        """Training may use all threads but never at a question's or a round's expense."""
        return cls(
            learning=Worker("learning", threads=threads, nice=5),
            answering=Worker("answering", threads=threads),
            crypto=Worker("crypto", threads=1),
        )

    @property
    def all(self) -> tuple[Worker, ...]:
        """Each of them."""
        return (self.learning, self.answering, self.crypto)

    async def stop(self) -> None:
        """End every worker process."""
        await asyncio.gather(*(worker.stop() for worker in self.all))


class Daemon:
    """The wiring of one site, and its life from start to SIGTERM."""

    def __init__(self, settings: Settings, tap: Tap | None = None) -> None:
        """``tap`` sees every message that crosses; no setting switches one on."""
        self._settings = settings
        self._tap = tap
        self._membership = Membership(settings)
        self._notifier = Notifier.from_environment()
        self._lag = LoopLag()
        self._stopping = asyncio.Event()
        self._ready = False
        self._started = time.monotonic()
        self._reload: Callable[[], None] = lambda: None  # nothing to reload before READY

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; everything started is stopped again."""
        self._on_signals()
        try:
            async with AsyncExitStack() as stack:
                await self._serve(stack)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            # Asked to stop before READY: starting was cut short, which is no failure.
        log.info("stopped")

    async def _serve(self, stack: AsyncExitStack) -> None:
        workers = Workers.of(self._settings.workers.threads)
        stack.push_async_callback(workers.stop)
        log.info("starting", site=self._membership.identity.site_id)
        if faults := os.environ.get(faultpoints.VARIABLE):
            log.warning("a test makes this daemon fail on purpose", faults=faults)
        node = await self._make_node(workers, stack)
        transport = self._make_transport(node)
        node.traffic = lambda: _traffic(transport)
        attempts = AttemptLog(self._settings.site.state_dir / "attempts.sqlite3", node.traffic)
        stack.push_async_callback(asyncio.to_thread, attempts.close)
        node.progress.attempts = attempts
        async with asyncio.TaskGroup() as group:
            running = asyncio.Event()
            tasks = [
                group.create_task(self._lag.run()),
                group.create_task(self._notifier.keep_watchdog_fed()),
                group.create_task(node.collection.run()),
                group.create_task(
                    workers.learning.stop_when_idle(self._settings.workers.idle_stop_s)
                ),
                group.create_task(self._warm_up(workers.crypto)),
                group.create_task(node.run(transport, running.set)),
            ]
            await running.wait()
            node.collection.adopt(node.protocol.durable.head_digest)
            await transport.start()
            stack.push_async_callback(transport.stop, 1.0)
            control = ControlSocket(self._settings.control.socket, self._settings.control.group)
            await control.start(self._surroundings(node, workers))
            stack.push_async_callback(control.stop)
            self._reload = lambda: self._apply_reload(node, transport)
            self._ready = True
            self._notifier.ready(self._line(node))
            log.info("ready", bind=self._settings.network.bind)
            await self._stopping.wait()
            self._notifier.stopping("stopping")
            log.info("stopping")
            for task in tasks:
                task.cancel()

    async def _warm_up(self, crypto: Worker) -> None:
        """The first round should not wait for a library to load."""
        sites = len(self._membership.manifest.enabled_ids)
        rule = self._settings.robust.rule
        if vacuous := robust.warning(rule, sites):
            log.warning(vacuous)
        try:
            bits, measurable = self._settings.training.bits, rule != robust.NONE
            await crypto.run(round_crypto.warm_up, max(2, sites), bits, measurable=measurable)
        except CryptoError as error:
            # A plan of other bits may still work; a round that can't says so itself.
            log.warning("these training.bits can't be encrypted exactly here", cause=str(error))

    async def _make_node(self, workers: Workers, stack: AsyncExitStack) -> Node:
        settings, membership = self._settings, self._membership
        spec = RetrieverSpec(
            encoder=settings.retriever.encoder,
            adapt=settings.retriever.adapt,
            max_tokens=settings.retriever.max_tokens,
            device=settings.retriever.device,
            threads=settings.workers.threads,
        )
        state = settings.site.state_dir
        folders = Folders(
            versions=state / "versions",
            spool=state / "spool" / "attempts",
            arriving=state / "spool" / "arriving",
            residual=state / "residual.npy",
        )
        store = await asyncio.to_thread(_open_state, state)
        stack.callback(store.close)
        await asyncio.to_thread(membership.remember, store)
        described = await workers.learning.run(learning_jobs.describe, spec)
        await asyncio.to_thread(sweep, folders.versions)
        genesis = b""
        if store.fresh:
            genesis = await workers.learning.run(
                learning_jobs.write_initial_version, spec, folders.versions
            )
        shapes = described.shape_manifest
        durable = await asyncio.to_thread(
            store.load, membership.identity.federation_id, shapes.digest, genesis
        )
        collection = Collection(
            spec=spec,
            state=state,
            versions=folders.versions,
            settings=CollectionSettings(
                passage_tokens=settings.retrieval.passage_tokens,
                top_k=settings.retrieval.top_k,
                willing=settings.training.willing,
                min_pairs=settings.training.min_pairs,
            ),
            learning=workers.learning,
            answering=workers.answering,
        )
        await collection.prepare()
        return Node(
            identity=membership.identity,
            trust=membership.trust,
            protocol=self._make_protocol(durable, store, described),
            store=store,
            folders=folders,
            spec=spec,
            shapes=shapes,
            collection=collection,
            learning=workers.learning,
            crypto=workers.crypto,
            history=membership,
            keep_versions=settings.rounds.keep_versions,
            heartbeat_s=settings.rounds.heartbeat_s,
        )

    def _make_protocol(
        self, durable: do.Durable, store: Store, described: RetrieverDescription
    ) -> Protocol:
        settings, membership = self._settings, self._membership
        return Protocol(
            site=membership.identity.site_id,
            federation_id=membership.identity.federation_id,
            manifest=membership.manifest,
            durable=durable,
            head_certificate=store.certificate(durable.head_round),
            shape_digest=described.shape_manifest.digest,
            shared_values=described.shape_manifest.total,
            unix_ms=lambda: time.time_ns() // 1_000_000,
            own_certificate=membership.identity.certificate_der,
            policy=Policy(
                min_participants=settings.training.min_participants,
                max_local_epochs=settings.training.max_local_epochs,
            ),
            timing=Timing(
                phase_s=settings.rounds.phase_deadline_s,
                train_s=settings.rounds.train_deadline_s,
                growth=settings.rounds.attempt_growth,
            ),
            verify_vote=membership.verify_vote,
            verify_certificate=membership.verify_certificate,
            past_manifest=membership.manifest_of,
        )

    def _make_transport(self, node: Node) -> Transport:
        membership = self._membership
        return Transport(
            membership.identity,
            membership.trust,
            membership.manifest,
            self._settings.network.bind,
            self._settings.site.state_dir / "spool" / "incoming",
            node,
            head_round=lambda: node.protocol.head_round,
            terms=Terms(keep_in_touch=KeepInTouch(answering_s=self._settings.rounds.heartbeat_s)),
            tap=self._tap,
        )

    def _surroundings(self, node: Node, workers: Workers) -> Surroundings:
        return Surroundings(
            node=node,
            training=self._settings.training,
            robust=self._settings.robust,
            adapt=self._settings.retriever.adapt,
            encoder=self._settings.retriever.encoder,
            lag=self._lag,
            workers=workers.all,
            started=self._started,
        )

    # ---- signals ---------------------------------------------------------------

    def _on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def stop() -> None:
            self._stopping.set()
            if not self._ready and task is not None:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._reload())

    def _apply_reload(self, node: Node, transport: Transport) -> None:
        """Take a new manifest and certificates into use; keep the old ones if they are wrong."""
        self._notifier.reloading()
        try:
            self._membership.reload()
            transport.reload(self._membership.identity, self._membership.manifest)
        except (IdentityError, ManifestError, StoreError) as error:
            log.error("reload refused, the old manifest and certificates stay", cause=str(error))  # noqa: TRY400
        else:
            node.renew(self._membership.identity, self._membership.trust, self._membership.manifest)
            log.info("reloaded", manifest=self._membership.manifest.version)
        self._notifier.ready(self._line(node))

    def _line(self, node: Node) -> str:
        return (
            f"site {node.identity.site_id}, round {node.protocol.head_round}, "
            f"manifest {node.protocol.manifest.version}"
        )


def _open_state(state: Path) -> Store:
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {state}: {error.strerror}; check [site] state_dir and its disk"
        ) from error
    return Store(state / "state.sqlite3")


def _traffic(transport: Transport) -> tuple[int, int]:
    peers = transport.statistics().values()
    return sum(p.bytes_sent for p in peers), sum(p.bytes_received for p in peers)


def main(tap: Tap | None = None) -> None:
    """Entry point of `fedd`.

    Exit code 0 after SIGTERM; 78 (EX_CONFIG) when a person must change a file
    first, so that systemd does not try again; 2 when trying again may help.
    """
    parser = argparse.ArgumentParser(
        prog="fedd", description="Daemon of one site in a Hanse federation."
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/hanse/fedd.toml"),
        help="settings file (default: %(default)s)",
    )
    arguments = parser.parse_args()
    try:
        settings = load(arguments.config)
        configure_logging(settings.log.level, settings.log.format)
        asyncio.run(_run(Daemon(settings, tap)))
    except _REFUSALS as refusal:
        print(f"fedd: {refusal}", file=sys.stderr)
        sys.exit(os.EX_CONFIG if isinstance(refusal, _MISCONFIGURED) else 2)


async def _run(daemon: Daemon) -> None:
    try:
        await daemon.run()
    except* _REFUSALS as group:
        # Out of the task group it ran in; the first one is the cause.
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


if __name__ == "__main__":
    main()
