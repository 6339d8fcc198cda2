"""Votes and round certificates: the proof that a model version was committed.

A vote is a site's signature under ``hanse-vote-v2``: *in this attempt I accepted
this version on its proof, and it is on my disk*. A certificate is equal votes of a
quorum of the manifest's sites, so it proves the commit to a site that was away.

Histories begin with rounds of a time when a majority decided (``rules`` 0, signed under
``hanse-vote-v1``). They are verified by their own rules, and none follows a round of
today's.

The attempt is signed too. Equal values voted for in *different* attempts prove
nothing: between them another value may have been chosen, for it takes a quorum of
one attempt to choose one (Castro, Liskov, OSDI 1999, §4.2: a commit matches only what
has its view). A certificate that mixes attempts is refused.

What is signed is encoded here, byte by byte, because protobuf's encoding is not
canonical. Integers are big-endian; texts, byte strings and lists carry their
length, so no two bodies have the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from datetime import datetime

from crypto.identity.keys import MAX_SIGNATURE_BYTES, IdentityError
from crypto.identity.names import ID, LOG
from crypto.identity.trust import Trust
from crypto.identity.x509 import MAX_DER
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb

RULES = 2  # of votes that are cast now
_VOTES = {0: b"hanse-vote-v1\0", RULES: b"hanse-vote-v2\0"}
_PLAN = b"hanse-plan-v1\0"

_DIGEST_BYTES = 32
_MAX_CONTRIBUTORS = 256
_MAX_VOTES = 256


class CertificateError(Exception):
    """A vote or a round certificate was refused: what was found and what was expected."""


# ---- what is signed ---------------------------------------------------------


def vote_payload(body: pb.VoteBody, attempt: int) -> bytes:
    """The bytes that a vote signs. Raises CertificateError when the body is out of bounds."""
    _check_body(body)
    return b"".join(
        (
            _VOTES[body.rules],
            _text(body.federation_id),
            struct.pack(">QIQ", body.round, attempt, body.manifest_version),
            body.parent_digest,  # three digests of 32 bytes each
            body.model_digest,
            body.plan_digest,
            struct.pack(">I", len(body.contributors)),
            *(_text(site) for site in body.contributors),
            # Nothing behind the contributors where nobody was rejected, as ever.
            struct.pack(">I", len(body.rejected)) if body.rejected else b"",
            *(_text(site) for site in body.rejected),
            _todays(body) if body.rules else b"",
        )
    )


def _todays(body: pb.VoteBody) -> bytes:
    """Of one length, so that what goes before it can be nothing else."""
    return b"".join(
        (
            body.manifest_digest,  # two digests of 32 bytes each
            body.statement_digest,
            struct.pack(">dd", body.mean_loss, body.next_clip_norm),
        )
    )


def sign_vote(sign: Callable[[bytes], pb.Signature], body: pb.VoteBody, attempt: int) -> pb.Vote:
    """A site's vote; what it says must be on the site's disk already."""
    by = sign(vote_payload(body, attempt))
    return pb.Vote(
        attempt=attempt,
        body=body,
        site=by.site,
        signature=by.signature,
        certificate=by.certificate,
    )


def certificate_of(attempt: int, votes: Sequence[pb.Vote], unix_ms: int) -> pb.Certificate:
    """The proof of a commit: one body, and the votes for it without their copies of it."""
    certificate = pb.Certificate(attempt=attempt, body=votes[0].body, unix_ms=unix_ms)
    for vote in votes:
        copy = certificate.votes.add()
        copy.CopyFrom(vote)
        copy.ClearField("body")
    return certificate


def plan_digest(plan: pb.TrainingPlan) -> bytes:
    """SHA-256 (32 bytes) of a training plan, over its fields in order of their numbers.

    What a plan does not use is not in its digest, so that the certificates of a time
    when there was no such thing still stand. No two plans pack to the same bytes: each
    optional part has a length of its own, and no two sets of parts have the same.
    """
    packed = struct.pack(
        ">iIIddIQIIQ",
        plan.adapt,
        plan.local_epochs,
        plan.batch_size,
        plan.learning_rate,
        plan.temperature,
        plan.hard_negatives,
        plan.seed,
        plan.bits,
        plan.min_participants,
        plan.max_num_examples,
    )
    if plan.HasField("privacy"):
        privacy = plan.privacy
        packed += struct.pack(
            ">dddddQId",
            privacy.clip_norm,
            privacy.noise_multiplier,
            privacy.noise_floor,
            privacy.noise_decay,
            privacy.loss_threshold,
            privacy.first_round,
            privacy.colluders,
            privacy.clip_quantile,
        )
    if plan.mode != pb.CKKS:
        packed += struct.pack(">4si", b"mode", plan.mode)
    if plan.robust or plan.byzantine_sites:
        packed += struct.pack(">6siI", b"robust", plan.robust, plan.byzantine_sites)
    if plan.HasField("learning"):
        packed += _learning(plan.learning)
    packed += _later(plan, *_PACKED)
    return hashlib.sha256(_PLAN + packed).digest()


def _learning(learning: pb.LearningPlan) -> bytes:
    """136 bytes, more than all other optional parts together."""
    return struct.pack(
        ">8s32siQIiiddiddidddd",
        b"learning",
        learning.recipe.encode("ascii"),  # of at most 32 characters, none of them zero
        learning.negatives,
        learning.bm25_rounds,
        learning.random_negatives,
        learning.batches,
        learning.distill,
        learning.kd_weight,
        learning.proximal,
        learning.start_from,
        learning.dropout,
        learning.weight_decay,
        learning.aggregate,
        learning.server_learning_rate,
        learning.momentum,
        learning.second_momentum,
        learning.adam_tau,
    )


# The last fields of a plan, its privacy and its learning that are packed above.
_PACKED = (15, 8, 16)


def _later(plan: pb.TrainingPlan, *last: int) -> bytes:
    """512 bytes, more than all other optional parts: of fields that came later, where one is set.

    So a field that is added is in the digest, whoever forgets to think of it.
    """
    encoded = b""
    for number, part in enumerate((plan, plan.privacy, plan.learning)):
        for field, value in part.ListFields():
            if field.number > last[number]:
                alone = type(part)(**{field.name: value}).SerializeToString(deterministic=True)
                encoded += struct.pack(">II", number, len(alone)) + alone
    return struct.pack(">512s", b"later" + hashlib.sha256(encoded).digest()) if encoded else b""


def _check_body(body: pb.VoteBody) -> None:
    """Raises CertificateError unless every field is within the bounds of federation.proto."""
    if not LOG.fullmatch(body.federation_id):
        raise CertificateError(f"a vote names a federation, not {body.federation_id[:80]!r}")
    if body.round < 1 or body.manifest_version < 1:
        raise CertificateError(
            f"rounds and manifest versions begin at 1, not {body.round} and {body.manifest_version}"
        )
    for name in ("parent_digest", "model_digest", "plan_digest"):
        size = len(getattr(body, name))
        if size != _DIGEST_BYTES:
            raise CertificateError(f"{name} has {_DIGEST_BYTES} bytes, not {size}")
    sites = list(body.contributors)
    if not 1 <= len(sites) <= _MAX_CONTRIBUTORS:
        raise CertificateError(f"a round has 1 to {_MAX_CONTRIBUTORS} contributors")
    if sites != sorted(set(sites)) or not all(map(ID.fullmatch, sites)):
        raise CertificateError("contributors are site ids, each once, sorted")
    rejected = list(body.rejected)
    if rejected != sorted(set(rejected)) or not all(map(ID.fullmatch, rejected)):
        raise CertificateError("rejected sites are site ids, each once, sorted")
    if len(rejected) > _MAX_CONTRIBUTORS or set(rejected) & set(sites):
        raise CertificateError("a site is a contributor or rejected, and there are at most 256")
    if body.rules not in _VOTES:
        raise CertificateError(f"a vote by rules {body.rules}, which are not known here")
    for name in ("manifest_digest", "statement_digest"):
        size = len(getattr(body, name))
        if size != (_DIGEST_BYTES if body.rules else 0):
            raise CertificateError(f"{name} of {size} bytes in a vote by rules {body.rules}")
    if not (math.isfinite(body.mean_loss) and math.isfinite(body.next_clip_norm)):
        raise CertificateError("a vote names a loss and a clip norm that are numbers")


# ---- verification -----------------------------------------------------------


def verify_vote(
    vote: pb.Vote, trust: Trust, manifest: FederationManifest, *, at: datetime | None
) -> None:
    """Raises CertificateError unless an enabled site of this manifest cast this vote.

    ``at``: the moment at which the signer's certificate must be valid; None for
    votes of the past.
    """
    _check_ground(vote.body, manifest)
    _verify_signature(vote, vote.body, trust, manifest, at=at)


def verify_certificate(
    certificate: pb.Certificate,
    trust: Trust,
    manifest: FederationManifest,
    *,
    at: datetime | None,
) -> None:
    """Raises CertificateError unless a quorum of the manifest voted for this body.

    (A majority, where the body is of a time when that was enough.)

    ``manifest`` is the one of the body's manifest version. Votes carry no body
    of their own (or the same one); each is one site's, of the one attempt. One
    bad vote refuses the whole: an honest coordinator would not have put it in.
    """
    body, votes = certificate.body, certificate.votes
    _check_ground(body, manifest)
    if len(votes) > _MAX_VOTES:
        raise CertificateError(f"a certificate has at most {_MAX_VOTES} votes, not {len(votes)}")
    sites = {vote.site for vote in votes}
    if len(sites) != len(votes):
        raise CertificateError("a site's vote counts once; this certificate has one twice")
    needed, name = (manifest.quorum, "quorum") if body.rules else (manifest.majority, "majority")
    if len(sites) < needed:
        raise CertificateError(
            f"round {body.round} has {len(sites)} votes, a {name} of the "
            f"{len(manifest.enabled_ids)} sites is {needed}"
        )
    for vote in votes:
        if vote.attempt != certificate.attempt:
            raise CertificateError(
                f"{_who(vote)} voted in attempt {vote.attempt}, the certificate is of attempt "
                f"{certificate.attempt}: votes of different attempts do not add up"
            )
        if vote.HasField("body") and vote.body != body:
            raise CertificateError(f"{_who(vote)} voted for something else than the certificate")
        _verify_signature(vote, body, trust, manifest, at=at)


def verify_chain(
    certificates: Sequence[pb.Certificate],
    trust: Trust,
    manifest_of_version: Callable[[int], FederationManifest | None],
    genesis_digest: bytes,
    *,
    first_round: int = 1,
) -> None:
    """Raises CertificateError unless these certificates continue one history without a gap.

    ``genesis_digest`` is the model version before ``first_round``; each round's
    parent is the model of the round before. ``manifest_of_version`` knows the
    manifests of the past; versions may not go back along the chain. Certificates
    of the past are verified without regard to today's date.
    """
    parent, before = genesis_digest, None
    for round_, certificate in enumerate(certificates, start=first_round):
        body = certificate.body
        if body.round != round_:
            raise CertificateError(f"the history has round {body.round} where {round_} belongs")
        if body.parent_digest != parent:
            raise CertificateError(
                f"round {round_} continues version {body.parent_digest.hex()[:12]}, the round "
                f"before made {parent.hex()[:12]}"
            )
        manifest = manifest_of_version(body.manifest_version)
        if manifest is None:
            raise CertificateError(
                f"round {round_} ran under manifest version {body.manifest_version}, which is not "
                "known here: get it from the federation's keeper"
            )
        check_follows(certificate, before)
        verify_certificate(certificate, trust, manifest, at=None)
        parent, before = body.model_digest, certificate


def check_follows(certificate: pb.Certificate, before: pb.Certificate | None) -> None:
    """Raises CertificateError when a round goes back behind the one before it.

    Under an older manifest a site that was expelled since could vote, under older rules
    a majority decide.
    """
    if before is None:
        return
    body, last = certificate.body, before.body
    if body.manifest_version < last.manifest_version:
        raise CertificateError(
            f"round {body.round} ran under manifest {body.manifest_version}, the round before "
            f"under {last.manifest_version}: versions do not go back"
        )
    if body.rules < last.rules:
        raise CertificateError(
            f"round {body.round} was decided by the rules of old, the round before by those of "
            "today: rules do not go back"
        )


def _check_ground(body: pb.VoteBody, manifest: FederationManifest) -> None:
    """The body is well formed and of this federation and manifest."""
    _check_body(body)
    if body.federation_id != manifest.federation_id:
        raise CertificateError(
            f"voted on in federation {body.federation_id!r}, expected {manifest.federation_id!r}"
        )
    if body.manifest_version != manifest.version:
        raise CertificateError(
            f"voted on under manifest version {body.manifest_version}, expected "
            f"{manifest.version}: bring both sites to one manifest"
        )
    if body.rules and body.manifest_digest != manifest.digest:
        raise CertificateError(
            f"voted on under another manifest of version {manifest.version} than the one here"
        )
    if body.rules:
        return  # a sum may be voted on again when one of its contributors was expelled since
    for role, sites in (("contributor", body.contributors), ("rejected", body.rejected)):
        for site in sites:
            if not manifest.enabled(site):
                raise CertificateError(
                    f"{role} {site!r} is not an enabled site of manifest {manifest.version}"
                )


def _verify_signature(
    vote: pb.Vote,
    body: pb.VoteBody,
    trust: Trust,
    manifest: FederationManifest,
    *,
    at: datetime | None,
) -> None:
    if not manifest.enabled(vote.site):
        raise CertificateError(
            f"{_who(vote)} is not an enabled site of manifest {manifest.version}: it has no vote"
        )
    # PEM may be longer than DER where it is parsed: it is a file's form, and no vote's.
    if len(vote.certificate) > MAX_DER or len(vote.signature) > MAX_SIGNATURE_BYTES:
        raise CertificateError(f"the vote of {_who(vote)} is larger than any real one")
    try:
        signer = trust.verify(
            vote.certificate, vote.signature, vote_payload(body, vote.attempt), at=at
        )
    except IdentityError as error:
        raise CertificateError(f"the vote of {_who(vote)} is refused: {error}") from error
    if signer != vote.site:
        raise CertificateError(f"{signer!r} signed a vote in the name of {_who(vote)}")


def _who(vote: pb.Vote) -> str:
    return repr(vote.site[:63])  # of a peer's making: bounded before it is shown


def _text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack(">I", len(raw)) + raw
