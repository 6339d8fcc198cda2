"""A federation whose sites vote, without a network: for tests of what a commit proves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from peers.wire.certificates import (
    RULES,
    certificate_of,
    plan_digest,
    sign_vote,
    verify_certificate,
)
from peers.wire.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb
from tests.crypto.identity.forgery import IdentityKeys

NOW = datetime.now(UTC) + timedelta(hours=1)  # later than what a slow run makes
GENESIS = hashlib.sha256(b"initial").digest()
ENABLED = ("alpha", "beta", "delta", "epsilon", "gamma")  # zeta is listed, but disabled
QUORUM = ("alpha", "beta", "delta", "gamma")  # of five, of which one may lie


@dataclass(frozen=True)
class Federation:
    identities: dict[str, Identity]
    trust: Trust
    manifest: FederationManifest

    def vote(self, site: str, body: pb.VoteBody, attempt: int = 0) -> pb.Vote:
        keys = IdentityKeys(self.identities[site], self.trust, NOW)
        return sign_vote(keys.sign, body, attempt)

    def certify(self, body: pb.VoteBody, *sites: str, attempt: int = 0) -> pb.Certificate:
        votes = [self.vote(site, body, attempt) for site in sites or QUORUM]
        return certificate_of(attempt, votes, unix_ms=1)

    def verify(self, certificate: pb.Certificate) -> None:
        verify_certificate(certificate, self.trust, self.manifest, at=NOW)


MANIFEST = FederationManifest(
    "med",
    3,
    (
        *(ManifestSite(site, f"{site}:7443") for site in ENABLED),
        ManifestSite("zeta", "zeta:7443", enabled=False),
    ),
)


def a_body(
    round_: int = 1,
    parent: bytes = GENESIS,
    model: bytes | None = None,
    manifest: FederationManifest = MANIFEST,
) -> pb.VoteBody:
    return pb.VoteBody(
        federation_id="med",
        round=round_,
        parent_digest=parent,
        model_digest=model or hashlib.sha256(b"model %d" % round_).digest(),
        contributors=["alpha", "beta", "gamma"],
        manifest_version=manifest.version,
        plan_digest=plan_digest(pb.TrainingPlan(local_epochs=1)),
        rules=RULES,
        manifest_digest=manifest.digest,
        statement_digest=hashlib.sha256(b"statement %d" % round_).digest(),
        mean_loss=0.5,
        next_clip_norm=0.25,
    )


def of_old(body: pb.VoteBody) -> pb.VoteBody:
    """As votes were when a majority decided: nothing of today's is in it."""
    old = pb.VoteBody()
    old.CopyFrom(body)
    for field in ("rules", "manifest_digest", "statement_digest", "mean_loss", "next_clip_norm"):
        old.ClearField(field)
    return old


def edit(field: str, value: object) -> Callable[[pb.VoteBody], None]:
    def apply(body: pb.VoteBody) -> None:
        if isinstance(value, list):
            getattr(body, field)[:] = value
        else:
            setattr(body, field, value)

    return apply
