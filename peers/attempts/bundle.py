"""What an attempt rests on: the promises of a quorum, and the plan that follows. PURE.

The coordinator chooses nothing: it forwards promises, and every site derives from them
who takes part, with which weight, who deals the key, and whether an earlier sum has to
be made again. Weights are clipped so that no site stands out for any other
(docs/decisions/0023); a sum in which one site dominates is that site's update.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peers.attempts.modes import mode_of, objection
from peers.attempts.statement import (
    EncodedStatement,
    HeldLock,
    ManifestOf,
    read_contributions,
    read_lock,
)
from peers.plans import policy, robust
from peers.plans.policy import weakening
from peers.plans.weights import clipped, too_dominant
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest, coordinator_of
from peers.wire.signing import Keys, Kind, must_be, name_of, read
from proto import federation_pb2 as pb

_BUNDLE = b"hanse-bundle-v2\0"


class PlanFails(Exception):
    """No plan follows from these promises; the text says why."""


@dataclass(frozen=True)
class Ground:
    """Where an attempt stands: what all that is said in it must agree on."""

    federation_id: str
    manifest: FederationManifest
    round: int
    attempt: int
    parent_digest: bytes
    parent_certificate: pb.Certificate | None = None  # none of the first version

    @property
    def coordinator(self) -> str:
        """The site that runs it."""
        return coordinator_of(self.manifest, self.round, self.attempt)

    def statement(
        self, kind: pb.StatementKind.ValueType, bundle_digest: bytes, run_digest: bytes
    ) -> pb.Statement:
        """The frame of every statement of this attempt."""
        return pb.Statement(
            federation_id=self.federation_id,
            manifest_digest=self.manifest.digest,
            manifest_version=self.manifest.version,
            round=self.round,
            attempt=self.attempt,
            parent_digest=self.parent_digest,
            run_digest=run_digest,
            bundle_digest=bundle_digest,
            kind=kind,
        )


@dataclass(frozen=True)
class Promised:
    """A promise, read, and what it names."""

    message: pb.Promised
    promise: pb.Promise
    lock: HeldLock | None

    @property
    def site(self) -> str:
        """Who promises."""
        return self.message.promise.site


@dataclass(frozen=True)
class Bundle:
    """The promises of an attempt, read."""

    message: pb.Bundle
    run: pb.Run
    promises: Mapping[str, pb.Promise]
    certificates: Mapping[str, bytes]
    lock: HeldLock | None
    repeated: pb.Statement | None
    digest: bytes

    @property
    def run_digest(self) -> bytes:
        """SHA-256 of the run as it was signed."""
        return name_of(self.message.run)


# ---- promises ------------------------------------------------------------------


def read_promised(
    message: pb.Promised, keys: Keys, manifest: FederationManifest, manifest_of: ManifestOf
) -> Promised:
    """Check a promise, and that what it names is behind it.

    Raises CertificateError for signatures, RemoteProtocolError for anything else.
    """
    promise = read(keys, Kind.PROMISE, pb.Promise, message.promise, manifest)
    site = message.promise.site
    must_be(promise.federation_id == manifest.federation_id, site, "promises elsewhere")
    must_be(promise.HasField("lock") == message.HasField("lock"), site, "hides its lock")
    must_be(promise.HasField("stated") == message.HasField("stated"), site, "hides a statement")
    lock = None
    if message.HasField("lock"):
        lock = read_lock(message.lock, keys, manifest_of)
        must_be(lock.name == promise.lock, site, "names another lock than it shows")
        must_be(lock.root.message.round == promise.round, site, "shows a lock of another round")
        must_be(lock.name.attempt < promise.attempt, site, "shows a lock of a later attempt")
    if message.HasField("stated"):
        must_be(message.stated.site == site, site, "shows another's statement as its own")
        _read_stated(message.stated, promise, keys, manifest_of)
    return Promised(message, promise, lock)


def _read_stated(
    signed: pb.Signed, promise: pb.Promise, keys: Keys, manifest_of: ManifestOf
) -> pb.Statement:
    """The sum that somebody signed earlier in this round, with everyone's contributions."""
    known = EncodedStatement.parse(signed.body)
    statement = known.message
    site = signed.site
    manifest = manifest_of(statement.manifest_version)
    if manifest is None or manifest.digest != statement.manifest_digest:
        raise RemoteProtocolError(f"{site} signed a statement under a manifest not known here")
    read(keys, Kind.STATEMENT, pb.Statement, signed, manifest, past=True)
    must_be(known.digest == promise.stated.digest, site, "names another statement than it shows")
    must_be(
        statement.kind == pb.SUM
        and (statement.round, statement.parent_digest) == (promise.round, promise.parent_digest)
        and statement.attempt == promise.stated.attempt < promise.attempt,
        site,
        "shows a statement that is no earlier sum of this round",
    )
    read_contributions(statement, keys, manifest, past=True)
    _check_whole(statement, manifest, site)
    return statement


def _check_whole(statement: pb.Statement, manifest: FederationManifest, site: str) -> None:
    """Raises RemoteProtocolError unless honest sites could have signed such a sum.

    Who has signed it may lie, and it may be alone: of what was sent to it for a sum it
    may not have a smaller one made, nor one of integers that were drawn before.
    """
    plan = statement.plan
    ours = (plan.round, plan.attempt, plan.parent_digest, plan.bundle_digest, plan.faulty_sites)
    its = (
        statement.round,
        statement.attempt,
        statement.parent_digest,
        statement.bundle_digest,
        manifest.tolerated,
    )
    must_be(ours == its, site, "shows a sum by another attempt's plan")
    sites = [one.site for one in statement.contributions]
    enough = len(sites) >= needed_contributors(plan) and not too_dominant(plan, sites)
    must_be(enough, site, "shows a sum that tells too much of one site")


def make(ground: Ground, run: pb.Signed, promised: Iterable[Promised]) -> pb.Bundle:
    """What the coordinator forwards: all promises that agree with its own."""
    ours = sorted(promised, key=lambda one: one.site)
    locks = [one.lock for one in ours if one.lock is not None]
    message = pb.Bundle(
        round=ground.round,
        attempt=ground.attempt,
        run=run,
        promises=[one.message.promise for one in ours],
    )
    if locks:
        highest = max(locks, key=lambda lock: lock.name.attempt)
        message.lock.CopyFrom(highest.message)
    wanted = _to_be_repeated({one.site: one.promise for one in ours}, ground.manifest.tolerated)
    for one in ours:
        if wanted is not None and one.promise.stated.digest == wanted:
            message.stated.CopyFrom(one.message.stated)
            break
    return message


def read_bundle(message: pb.Bundle, ground: Ground, keys: Keys, manifest_of: ManifestOf) -> Bundle:
    """Check a bundle. Raises CertificateError or RemoteProtocolError.

    Its promises are of a quorum, all of this attempt and one run; of the locks that they
    name the highest is in it, proven.
    """
    lead = ground.coordinator
    run = read_run(message.run, keys, ground.manifest)
    run_digest = name_of(message.run)
    agreed = (
        ground.federation_id,
        ground.manifest.digest,
        ground.round,
        ground.attempt,
        ground.parent_digest,
        run_digest,
    )
    promises: dict[str, pb.Promise] = {}
    certificates: dict[str, bytes] = {}
    for signed in message.promises:
        promise = read(keys, Kind.PROMISE, pb.Promise, signed, ground.manifest)
        said = (
            promise.federation_id,
            promise.manifest_digest,
            promise.round,
            promise.attempt,
            promise.parent_digest,
            promise.run_digest,
        )
        must_be(said == agreed, lead, f"bundles a promise of {signed.site} for something else")
        promises[signed.site] = promise
        certificates[signed.site] = signed.certificate
    quorum = ground.manifest.quorum
    must_be(len(promises) >= quorum, lead, f"bundles {len(promises)} promises, {quorum} decide")
    must_be(lead in promises, lead, "leaves its own promise out of the bundle")
    return Bundle(
        message,
        run,
        promises,
        certificates,
        _lock_of(message, promises, keys, manifest_of, lead),
        _repeated(message, run, promises, ground, keys, manifest_of),
        bundle_digest(message.promises),
    )


def _lock_of(
    message: pb.Bundle,
    promises: Mapping[str, pb.Promise],
    keys: Keys,
    manifest_of: ManifestOf,
    lead: str,
) -> HeldLock | None:
    names = [promise.lock for promise in promises.values() if promise.HasField("lock")]
    must_be(bool(names) == message.HasField("lock"), lead, "does not show the bundle's lock")
    if not names:
        return None
    highest = max(names, key=lambda name: name.attempt)
    lock = read_lock(message.lock, keys, manifest_of)
    must_be(lock.name == highest, lead, "shows another lock than the bundle's highest")
    return lock


def _to_be_repeated(promises: Mapping[str, pb.Promise], tolerated: int) -> bytes | None:
    """The digest of the sum that has to be made again; None: a new one is drawn.

    A sum that may have been opened is made again, once, by the same sites: that tells
    nothing new. When f + 1 sites have seen that fail, or two sums are named for one
    attempt, it is drawn anew. They say so by the attempt in which that failed, also who never
    signed it: a site that lies may be the only one that names it.
    """
    named = [promise.stated for promise in promises.values() if promise.HasField("stated")]
    locked = any(promise.HasField("lock") for promise in promises.values())
    if not named or locked:
        return None
    latest = max(name.attempt for name in named)
    digests = {name.digest for name in named if name.attempt == latest}
    if len(digests) != 1:
        return None
    digest = digests.pop()
    tried = sum(promise.tried > latest for promise in promises.values())
    return None if tried > tolerated else digest


def _repeated(
    message: pb.Bundle,
    run: pb.Run,
    promises: Mapping[str, pb.Promise],
    ground: Ground,
    keys: Keys,
    manifest_of: ManifestOf,
) -> pb.Statement | None:
    lead = ground.coordinator
    digest = _to_be_repeated(promises, ground.manifest.tolerated)
    shown = name_of(message.stated) if message.HasField("stated") else None
    must_be(shown == digest, lead, "does not show the sum that has to be made again")
    if digest is None:
        return None
    by = message.stated.site
    must_be(by in promises and promises[by].stated.digest == digest, lead, "shows another's sum")
    statement = _read_stated(message.stated, promises[by], keys, manifest_of)
    gone = [
        one.site
        for one in statement.contributions
        if one.site not in promises or not promises[one.site].willing
    ]
    # Without one of them it can't be made; a run that protects more wants none without that;
    # and what was compared is not what is uploaded the second time. It is drawn anew.
    training = statement.plan.training
    less = weakening(training, run.plan)
    return None if gone or less or robust.is_robust(training) else statement


def bundle_digest(promises: Iterable[pb.Signed]) -> bytes:
    """32 bytes that name the promises, in their order."""
    hashed = hashlib.sha256(_BUNDLE)
    for signed in promises:
        hashed.update(struct.pack(">I", len(signed.body)) + signed.body)
    return hashed.digest()


def read_run(signed: pb.Signed, keys: Keys, manifest: FederationManifest) -> pb.Run:
    """A run as the site that wants it signed it. Raises CertificateError, RemoteProtocolError."""
    run = read(keys, Kind.RUN, pb.Run, signed, manifest, past=True)
    must_be(run.requested_by == signed.site, signed.site, "signs another site's run")
    must_be(run.federation_id == manifest.federation_id, signed.site, "runs another federation")
    return run


# ---- the plan --------------------------------------------------------------------


def derive_plan(bundle: Bundle, ground: Ground) -> pb.Plan:
    """The plan that follows from a bundle, at every site alike. Raises PlanFails.

    Noise may depend on what the round before certified.
    """
    manifest, lead, training = ground.manifest, ground.coordinator, bundle.run.plan
    if manifest.objection:
        raise PlanFails(manifest.objection)
    shape = bundle.promises[lead].shape_digest
    plan = pb.Plan(
        round=ground.round,
        attempt=ground.attempt,
        parent_digest=ground.parent_digest,
        training=training,
        shape_digest=shape,
        manifest_version=manifest.version,
        coordinator=lead,
        faulty_sites=manifest.tolerated,
        bundle_digest=bundle.digest,
        draw=ground.attempt,
    )
    examples: dict[str, int] = {}
    if bundle.repeated is None:
        willing = {
            site: promise
            for site, promise in sorted(bundle.promises.items())
            if promise.willing and promise.num_examples > 0 and promise.shape_digest == shape
        }
        needed = needed_participants(training, manifest.tolerated)
        if len(willing) < needed:
            raise PlanFails(
                f"{len(willing)} of {len(manifest.enabled_ids)} sites can train, "
                f"the plan needs {needed}"
            )
        if why_not := objection(training, len(willing)):
            raise PlanFails(why_not)
        most = training.max_num_examples
        counts = {site: min(one.num_examples, most) for site, one in willing.items()}
        examples = clipped(counts, manifest.tolerated)
        plan.full_weight = max(examples.values())
        if known := [one.complexity for one in willing.values() if one.complexity]:
            plan.least_complexity, plan.most_complexity = min(known), max(known)
        plan.noise_multiplier, plan.clip_norm = policy.noise_of_round(
            training, ground.round, ground.parent_certificate
        )
    else:
        _as_before(plan, bundle.repeated)
        before = {one.site: one.num_examples for one in bundle.repeated.plan.participants}
        examples = {one.site: before[one.site] for one in bundle.repeated.contributions}
    for site, count in sorted(examples.items()):
        certificate = bundle.certificates[site]
        plan.participants.add(site=site, num_examples=count, certificate=certificate)
    plan.key_dealer = mode_of(plan).dealer(lead, sorted(examples))
    return plan


def _as_before(plan: pb.Plan, repeated: pb.Statement) -> None:
    """The sum is to be the same to the last bit: all that its integers depend on stays."""
    before = repeated.plan
    plan.training.CopyFrom(before.training)
    plan.shape_digest = before.shape_digest
    plan.full_weight, plan.draw = before.full_weight, before.draw
    plan.noise_multiplier, plan.clip_norm = before.noise_multiplier, before.clip_norm
    plan.least_complexity, plan.most_complexity = before.least_complexity, before.most_complexity
    plan.scale_exponents.extend(repeated.scale_exponents)


def needed_participants(training: pb.TrainingPlan, tolerated: int) -> int:
    """The fewest sites that may begin an attempt: enough stay honest when f of them lie."""
    return max(robust.participants_needed(training), tolerated + 2)


def needed_contributors(plan: pb.Plan) -> int:
    """The fewest updates that a sum may be of; a sum that is made again is of all of them."""
    least = robust.least_summed(plan)
    if plan.scale_exponents:
        least = max(least, len(plan.participants))
    return max(least, mode_of(plan).least_contributors(plan))
