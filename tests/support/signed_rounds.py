"""What the sites of a small federation sign in one attempt, without a network.

    >>> stage = Stage("abcd", faulty_sites=1)
    >>> bundle = stage.bundle([stage.promised(site) for site in "abcd"])
    >>> known = stage.statement(bundle)
    >>> lock = stage.lock(known, version=b"v" * 32)

Everything is as honest sites make it; a test changes one thing and has it read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from peers.attempts.bundle import (
    Bundle,
    Ground,
    Promised,
    derive_plan,
    make,
    read_bundle,
    read_promised,
)
from peers.attempts.modes import mode_of
from peers.attempts.statement import EncodedStatement, HeldLock, read_lock, scale_digest
from peers.wire.manifest import FederationManifest, ManifestSite
from peers.wire.signing import Keys, Kind, digest_of, name_of, sign, sign_bytes
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, GENESIS, SHAPE, SimulatedKeys, plan

EXPONENTS = (1, 2)
VERSION = hashlib.sha256(b"version").digest()


def manifest_of(
    sites: Sequence[str], faulty_sites: int | None = 1, version: int = 1
) -> FederationManifest:
    """A manifest of these sites, all of which take part."""
    listed = tuple(ManifestSite(site, f"{site}:1") for site in sorted(sites))
    return FederationManifest(FEDERATION, version, listed, faulty_sites)


class Stage:
    """A federation in round 1, and what its sites sign there."""

    def __init__(
        self,
        sites: Sequence[str] = "abcd",
        *,
        faulty_sites: int = 1,
        training: pb.TrainingPlan | None = None,
        keys: Callable[[str], Keys] = SimulatedKeys,
        manifest: FederationManifest | None = None,
    ) -> None:
        self.manifest = manifest or manifest_of(sites, faulty_sites)
        self.manifests = {self.manifest.version: self.manifest}
        self.keys = {site: keys(site) for site in self.manifest.enabled_ids}
        self.sites = self.manifest.enabled_ids
        self.us = self.keys[self.sites[0]]  # whose eyes these are
        self.run = self.run_of(training or plan(min_participants=3))

    def run_of(self, training: pb.TrainingPlan, **changed: object) -> pb.Signed:
        """A person at the first site asks for rounds."""
        fields: dict[str, object] = {
            "generation": 1,
            "run_id": "run",
            "requested_by": self.sites[0],
            "target_round": 9,
            "federation_id": self.manifest.federation_id,
        }
        run = pb.Run(plan=training, **{**fields, **changed})  # type: ignore[arg-type]
        return sign(self.keys[self.sites[0]], Kind.RUN, run)

    def ground(self, attempt: int = 0) -> Ground:
        return Ground(self.manifest.federation_id, self.manifest, 1, attempt, GENESIS)

    # ---- promises -----------------------------------------------------------------------------

    def promise(self, attempt: int = 0, **changed: object) -> pb.Promise:
        fields: dict[str, object] = {
            "federation_id": self.manifest.federation_id,
            "manifest_digest": self.manifest.digest,
            "manifest_version": self.manifest.version,
            "round": 1,
            "attempt": attempt,
            "run_digest": name_of(self.run),
            "parent_digest": GENESIS,
            "shape_digest": SHAPE,
            "num_examples": 100,
            "willing": True,
            "incarnation": bytes(16),
        }
        return pb.Promise(**{**fields, **changed})  # type: ignore[arg-type]

    def promised(
        self,
        site: str,
        attempt: int = 0,
        *,
        lock: HeldLock | None = None,
        stated: EncodedStatement | None = None,
        tried: int = 0,
        **changed: object,
    ) -> pb.Promised:
        """A site's promise, with what it names."""
        promise, message = self.promise(attempt, tried=tried, **changed), pb.Promised()
        if lock is not None:
            promise.lock.CopyFrom(lock.name)
            message.lock.CopyFrom(lock.message)
        if stated is not None:
            promise.stated.attempt = stated.message.attempt
            promise.stated.digest = stated.digest
            message.stated.CopyFrom(self.signed_statement(site, stated))
        message.promise.CopyFrom(sign(self.keys[site], Kind.PROMISE, promise))
        return message

    def read_promised(self, message: pb.Promised) -> Promised:
        return read_promised(message, self.us, self.manifest, self.manifests.get)

    def message(self, promised: Sequence[pb.Promised], attempt: int = 0) -> pb.Bundle:
        """What an honest coordinator forwards of these promises."""
        return make(self.ground(attempt), self.run, map(self.read_promised, promised))

    def read(self, message: pb.Bundle, attempt: int = 0) -> Bundle:
        return read_bundle(message, self.ground(attempt), self.us, self.manifests.get)

    def bundle(self, promised: Sequence[pb.Promised] | None = None, attempt: int = 0) -> Bundle:
        """The bundle of these promises, or of everybody's."""
        promised = promised or [self.promised(site, attempt) for site in self.sites]
        return self.read(self.message(promised, attempt), attempt)

    def plan(self, bundle: Bundle | None = None, attempt: int = 0) -> pb.Plan:
        return derive_plan(bundle or self.bundle(attempt=attempt), self.ground(attempt))

    # ---- statements ---------------------------------------------------------------------------

    def signed_statement(self, site: str, known: EncodedStatement) -> pb.Signed:
        by = sign_bytes(self.keys[site], Kind.STATEMENT, known.raw)
        return pb.Signed(
            body=known.raw, site=by.site, signature=by.signature, certificate=by.certificate
        )

    def contribution(
        self, site: str, made: pb.Plan, exponents: Sequence[int] = EXPONENTS
    ) -> pb.Signed:
        untagged = not mode_of(made).tag_bytes(made, site)
        told = pb.Contribution(
            plan_digest=digest_of(made),
            scale_digest=scale_digest(exponents),
            upload_digest=hashlib.sha256(site.encode()).digest(),
            nonce=b"" if untagged else b"n" * 16,
        )
        return sign(self.keys[site], Kind.CONTRIBUTION, told)

    def statement_of(
        self,
        bundle: Bundle | None = None,
        attempt: int = 0,
        *,
        sites: Sequence[str] = (),
        made: pb.Plan | None = None,
        exponents: Sequence[int] = EXPONENTS,
        kind: pb.StatementKind.ValueType = pb.SUM,
        **changed: object,
    ) -> pb.Statement:
        """The statement of a sum of these sites' updates, or of everybody's."""
        bundle = bundle or self.bundle(attempt=attempt)
        made = made or self.plan(bundle, attempt)
        masked = made.training.mode == pb.MASKING
        fields: dict[str, object] = {
            **self._agreed(bundle, attempt),
            "kind": kind,
            "plan": made,
            "scale_exponents": exponents,
            "contributions": [
                self.contribution(site, made, exponents)
                for site in sites or [one.site for one in made.participants]
            ],
            "sum_digest": hashlib.sha256(b"sum").digest(),
            "roster_digest": hashlib.sha256(b"roster").digest() if masked else b"",
        }
        if not masked:
            fields["commitment"] = sign(
                self.keys[made.key_dealer],
                Kind.KEY_COMMITMENT,
                pb.KeyCommitment(
                    plan_digest=digest_of(made), public_digest=b"p" * 32, secret_digest=b"s" * 32
                ),
            )
        return pb.Statement(**{**fields, **changed})  # type: ignore[arg-type]

    def statement(self, bundle: Bundle | None = None, attempt: int = 0) -> EncodedStatement:
        return EncodedStatement.of(self.statement_of(bundle, attempt))

    def restated(self, lock: HeldLock, bundle: Bundle, attempt: int) -> EncodedStatement:
        """The version of a lock, stated again in a later attempt."""
        return EncodedStatement.of(
            pb.Statement(
                **self._agreed(bundle, attempt),  # type: ignore[arg-type]
                kind=pb.RESTATED,
                root_digest=lock.root.digest,
                model_digest=lock.applied.model_digest,
            )
        )

    def _agreed(self, bundle: Bundle, attempt: int) -> dict[str, object]:
        return {
            "federation_id": self.manifest.federation_id,
            "manifest_digest": self.manifest.digest,
            "manifest_version": self.manifest.version,
            "round": 1,
            "attempt": attempt,
            "parent_digest": GENESIS,
            "run_digest": bundle.run_digest,
            "bundle_digest": bundle.digest,
        }

    # ---- certificates, proofs, locks ----------------------------------------------------------

    def certified(
        self, known: EncodedStatement, sites: Sequence[str] = ()
    ) -> pb.StatementCertificate:
        """With the signatures of these sites, or of everybody."""
        return pb.StatementCertificate(
            statement=known.raw,
            signatures=[
                sign_bytes(self.keys[site], Kind.STATEMENT, known.raw)
                for site in sites or self.sites
            ],
        )

    def applied(self, site: str, known: EncodedStatement, version: bytes = VERSION) -> pb.Signed:
        """A site has opened the sum, and this is what it made of it."""
        told = pb.Applied(root_digest=known.digest, model_digest=version, mean_loss=0.5)
        return sign(self.keys[site], Kind.APPLIED, told)

    def lock_of(
        self, known: EncodedStatement, sites: Sequence[str] = (), version: bytes = VERSION
    ) -> pb.Lock:
        """Certificate and proof: these sites, or f + 1, have opened it."""
        appliers = sites or self.sites[: self.manifest.tolerated + 1]
        return pb.Lock(
            certificate=self.certified(known),
            proof=[self.applied(site, known, version) for site in appliers],
        )

    def read_lock(self, lock: pb.Lock) -> HeldLock:
        return read_lock(lock, self.us, self.manifests.get)

    def lock(self, known: EncodedStatement | None = None, version: bytes = VERSION) -> HeldLock:
        """The lock of a sum, or of the sum of the first attempt."""
        return self.read_lock(self.lock_of(known or self.statement(), version=version))
