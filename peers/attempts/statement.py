"""What an attempt is about: stated, signed by a quorum, and then opened. PURE.

    statement  ->  certificate (a quorum has signed it)  ->  applied (f + 1 alike: the proof)
               ->  lock (both, kept by whoever votes)    ->  votes (a quorum: the commit)

A statement fixes the version that is made of it: whose contributions are in the sum, on
which scale, under which key or masks, each in its owner's own words. So an attempt has
one statement, a statement has one version, and whoever opens it opens the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from peers.attempts.modes import mode_of
from peers.plans import robust
from peers.wire.certificates import RULES, plan_digest
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.messages import check, parse_signed
from peers.wire.signing import Keys, Kind, digest_of, must_be, read, verify
from proto import federation_pb2 as pb

_SCALE = b"hanse-scale-v2\0"

ManifestOf = Callable[[int], FederationManifest | None]


@dataclass(frozen=True)
class EncodedStatement:
    """A statement as it travels, and what it says."""

    raw: bytes
    message: pb.Statement

    @classmethod
    @lru_cache(maxsize=16)
    def parse(cls, raw: bytes) -> EncodedStatement:
        """Raises RemoteProtocolError when it is none, or out of bounds."""
        return cls(raw, parse_signed(pb.Statement, raw))

    @classmethod
    def of(cls, message: pb.Statement) -> EncodedStatement:
        """One that is made here."""
        check(message)
        return cls(message.SerializeToString(deterministic=True), message)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256, 32 bytes: its name."""
        return hashlib.sha256(self.raw).digest()

    @property
    def contributors(self) -> tuple[str, ...]:
        """Whose contributions are in it, sorted."""
        return tuple(one.site for one in self.message.contributions)


@dataclass(frozen=True)
class HeldLock:
    """A version that may be committed somewhere: certificate and proof, read."""

    message: pb.Lock
    latest: EncodedStatement
    root: EncodedStatement
    applied: pb.Applied

    @property
    def name(self) -> pb.LockName:
        """How a promise names it; locks are ordered by its attempt."""
        return pb.LockName(
            attempt=self.latest.message.attempt,
            root_digest=self.root.digest,
            model_digest=self.applied.model_digest,
        )


# ---- reading -----------------------------------------------------------------------


def read_certificate(
    certificate: pb.StatementCertificate,
    keys: Keys,
    manifest_of: ManifestOf,
    *,
    past: bool = True,
) -> EncodedStatement:
    """The statement that a quorum of its manifest has signed.

    Raises CertificateError for a signature, RemoteProtocolError for anything else.
    """
    known = EncodedStatement.parse(certificate.statement)
    manifest = manifest_named(known.message, manifest_of)
    signers = {one.site for one in certificate.signatures}
    if len(signers) < manifest.quorum or len(signers) != len(certificate.signatures):
        raise RemoteProtocolError(
            f"a statement has {len(signers)} signatures, {manifest.quorum} of the "
            f"{len(manifest.enabled_ids)} sites decide"
        )
    for signature in certificate.signatures:
        verify(keys, Kind.STATEMENT, known.raw, signature, manifest, past=past)
    return known


def manifest_named(statement: pb.Statement, manifest_of: ManifestOf) -> FederationManifest:
    """The manifest that a statement was made under. Raises RemoteProtocolError."""
    manifest = manifest_of(statement.manifest_version)
    if manifest is None or manifest.digest != statement.manifest_digest:
        raise RemoteProtocolError(
            f"a statement goes by manifest {statement.manifest_version}, which is not known here"
        )
    if manifest.federation_id != statement.federation_id:
        raise RemoteProtocolError("a statement is of another federation")
    return manifest


def read_lock(lock: pb.Lock, keys: Keys, manifest_of: ManifestOf) -> HeldLock:
    """Check a lock: certificate and proof. Raises CertificateError, RemoteProtocolError."""
    latest = read_certificate(lock.certificate, keys, manifest_of)
    if latest.message.kind == pb.SUM:
        root = latest
        if lock.root:
            raise RemoteProtocolError("a lock shows the same statement twice")
    elif latest.message.kind == pb.RESTATED:
        root = EncodedStatement.parse(lock.root)
        if root.digest != latest.message.root_digest or root.message.kind != pb.SUM:
            raise RemoteProtocolError("a lock shows another sum than it restates")
    else:
        raise RemoteProtocolError("a lock is of a sum, not of a question")
    if (root.message.round, root.message.parent_digest) != (
        latest.message.round,
        latest.message.parent_digest,
    ):
        raise RemoteProtocolError("a lock restates the sum of another round")
    applied = read_proof(lock.proof, root, keys, manifest_of)
    if latest is not root and applied.model_digest != latest.message.model_digest:
        raise RemoteProtocolError("a lock proves another version than it restates")
    return HeldLock(lock, latest, root, applied)


def read_proof(
    proof: Iterable[pb.Signed], root: EncodedStatement, keys: Keys, manifest_of: ManifestOf
) -> pb.Applied:
    """What f + 1 sites, one of them honest, made of a sum. Raises as `read_lock`."""
    manifest = manifest_named(root.message, manifest_of)
    proof = list(proof)
    sites = {signed.site for signed in proof}
    if len(sites) <= manifest.tolerated or len(sites) != len(proof):
        raise RemoteProtocolError(
            f"{len(sites)} sites have opened the sum, {manifest.tolerated + 1} prove a version"
        )
    if len({signed.body for signed in proof}) != 1:
        raise RemoteProtocolError("a proof is of versions that differ")
    for signed in proof:
        applied = read(keys, Kind.APPLIED, pb.Applied, signed, manifest, past=True)
    if applied.root_digest != root.digest:
        raise RemoteProtocolError("a proof is of another sum")
    return applied


def read_contributions(
    statement: pb.Statement, keys: Keys, manifest: FederationManifest, *, past: bool = False
) -> dict[str, pb.Contribution]:
    """Each contributor's own words: all of this plan, and on this scale.

    Raises CertificateError, or RemoteProtocolError when one is not.
    """
    lead = statement.plan.coordinator
    plan, scale = digest_of(statement.plan), scale_digest(statement.scale_exponents)
    participants = {one.site for one in statement.plan.participants}
    contributions: dict[str, pb.Contribution] = {}
    for signed in statement.contributions:
        site = signed.site
        contribution = read(keys, Kind.CONTRIBUTION, pb.Contribution, signed, manifest, past=past)
        must_be(site in participants, lead, f"sums an update of {site}, which takes no part")
        agreed = (contribution.plan_digest, contribution.scale_digest) == (plan, scale)
        must_be(agreed, lead, f"sums an update that {site} made for something else")
        tagged = len(contribution.nonce) == mode_of(statement.plan).tag_bytes(statement.plan, site)
        must_be(tagged, lead, f"shows tags of {site} that prove nothing")
        contributions[site] = contribution
    return contributions


def scale_digest(exponents: Sequence[int]) -> bytes:
    """32 bytes that name a scale."""
    return hashlib.sha256(_SCALE + struct.pack(f">{len(exponents)}i", *exponents)).digest()


# ---- what is voted for ---------------------------------------------------------------


def value_of(lock: HeldLock, manifest: FederationManifest) -> pb.VoteBody:
    """What a site votes for on the strength of a lock, under the manifest of the attempt."""
    root = lock.root.message
    return pb.VoteBody(
        federation_id=root.federation_id,
        round=root.round,
        parent_digest=root.parent_digest,
        model_digest=lock.applied.model_digest,
        contributors=lock.root.contributors,
        manifest_version=manifest.version,
        plan_digest=plan_digest(root.plan.training),
        rejected=root.rejected,
        rules=RULES,
        manifest_digest=manifest.digest,
        statement_digest=lock.root.digest,
        mean_loss=lock.applied.mean_loss,
        next_clip_norm=lock.applied.next_clip_norm,
    )


# ---- robust rounds -------------------------------------------------------------------


def check_selection(
    statement: pb.Statement,
    question: EncodedStatement | None,
    keys: Keys,
    manifest: FederationManifest,
) -> Collection[str]:
    """A robust rule's selection follows from what f + 1 key holders have signed alike.

    Returns whom it rejects. Raises RemoteProtocolError, CertificateError.
    """
    plan, lead = statement.plan, statement.plan.coordinator
    if not robust.is_robust(plan.training):
        must_be(not statement.question_digest, lead, "selects where nothing was compared")
        return ()
    if question is None or question.digest != statement.question_digest:
        raise RemoteProtocolError(f"{lead} selects by a question that is not certified here")
    answer = read_answers(statement.answers, question, keys, manifest)
    try:
        chosen = robust.choose(plan, question.message, answer, 0)
    except ValueError as error:
        raise RemoteProtocolError(f"{lead} selects: {error}") from error
    compared = {one.site: one for one in question.message.contributions}
    same = all(compared.get(one.site) == one for one in statement.contributions)
    must_be(same, lead, "sums another update than was compared")
    contributors = tuple(one.site for one in statement.contributions)
    must_be(
        contributors == chosen.kept,
        lead,
        f"sums the updates of {list(contributors)}; by their dot products it would be those of "
        f"{list(chosen.kept)}",
    )
    return chosen.rejected


def read_answers(
    answers: Iterable[pb.Signed],
    question: EncodedStatement,
    keys: Keys,
    manifest: FederationManifest,
) -> pb.Products:
    """What f + 1 key holders decrypted alike, of which one is honest."""
    answers = list(answers)
    plan = question.message.plan
    needed = robust.answers_needed(plan)
    lead, sites = plan.coordinator, {one.site for one in answers}
    must_be(len(sites) >= needed, lead, f"shows {len(sites)} answers, {needed} are needed")
    must_be(len({one.body for one in answers}) == 1, lead, "shows answers that differ")
    holders = mode_of(plan).holders(plan)
    for signed in answers:
        must_be(signed.site in holders, lead, "shows the answer of a site without the key")
        products = read(keys, Kind.PRODUCTS, pb.Products, signed, manifest)
    must_be(products.question_digest == question.digest, lead, "shows answers to another question")
    return products


def weights_of(statement: pb.Statement) -> Mapping[str, float]:
    """Each contributor's weight in the sum, at most 1."""
    full = statement.plan.full_weight
    examples = {one.site: one.num_examples for one in statement.plan.participants}
    return {one.site: examples[one.site] / full for one in statement.contributions}


def named_sums(state: pb.RoundState) -> list[tuple[bytes, pb.Statement]]:
    """The sums that a site's state names, with their digests: the last signed, and the locked."""
    raw = [state.stated.body, state.lock.root or state.lock.certificate.statement]
    return [(hashlib.sha256(one).digest(), pb.Statement.FromString(one)) for one in raw if one]
