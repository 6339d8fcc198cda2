"""From a certificate to a new head: verify it, get the version, then adopt. PURE.

A site adopts a version only with a certificate that its trust verifies, on top
of the version that it has, and only when that version is on its disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from peers.attempts import effects as do
from peers.rounds.replica import Replica
from peers.wire.certificates import check_follows
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb

Commits = tuple[pb.Commit, ...]


class Adoption:
    """Committed rounds that wait for their version. Methods return effects."""

    def __init__(self, here: Replica) -> None:
        self._here = here
        self._waiting: Commits = ()

    @property
    def under_way(self) -> bool:
        """Whether a verified commit waits for its version."""
        return bool(self._waiting)

    def committed(self, commit: pb.Commit) -> list[do.Effect]:
        """The coordinator says that a round is committed."""
        round_, head = commit.certificate.body.round, self._here.head_round
        if round_ <= head:
            return []
        if round_ > head + 1:
            voters = [v.site for v in commit.certificate.votes if v.site != self._here.site]
            return [do.FetchCertificates(voters[0], head)] if voters else []
        return self._adopt_when_here((commit,))

    def certificates(self, certificates: Sequence[pb.Certificate]) -> list[do.Effect]:
        """A peer sent certificates of rounds that we may have missed, oldest first."""
        head = self._here.head_round
        fresh = [c for c in certificates if c.body.round > head]
        known = self._waiting[-1].certificate.body.round if self._waiting else head
        if not fresh or fresh[-1].body.round <= known:
            return []
        return self._adopt_when_here(tuple(pb.Commit(certificate=c) for c in fresh))

    def _adopt_when_here(self, commits: Commits) -> list[do.Effect]:
        """Verify each certificate and the chain from our head, then get the version."""
        here = self._here
        parent, round_ = here.durable.head_digest, here.head_round
        last = here.head_certificate
        for commit in commits:
            body = commit.certificate.body
            # Who joins where the manifest names a retriever need not know the one of the
            # beginning: what round 1 was made of, a quorum has signed.
            begins = last is None and here.manifest.retriever is not None
            known = body.parent_digest if begins else parent
            if (body.round, known) != (round_ + 1, body.parent_digest):
                raise RemoteProtocolError(
                    f"the certificate of round {body.round} does not follow round {round_}"
                )
            check_follows(commit.certificate, last)
            here.verification.certificate(commit.certificate)
            last = commit.certificate
            parent, round_ = body.model_digest, body.round
        self._waiting = commits
        voters = [vote.site for vote in commits[-1].certificate.votes]
        likely = sources(here.site, voters, here.manifest.enabled_ids)
        return [do.FetchVersion(parent, likely)]

    def here(self, digest: bytes) -> Commits:
        """A version is on disk: the commits that waited for it, to be adopted now."""
        if not self._waiting or self._newest() != digest:
            return ()
        commits, self._waiting = self._waiting, ()
        return commits

    def missing(self, digest: bytes) -> None:
        """A version could not be had: tried again when a peer says that it is ahead."""
        if self._waiting and self._newest() == digest:
            self._waiting = ()

    def _newest(self) -> bytes:
        return self._waiting[-1].certificate.body.model_digest


def as_signed(commit: pb.Commit, coordinator: str, plan: pb.Plan | None) -> pb.Commit:
    """A commit whose report says nothing but what is signed, or nobody else can know.

    A coordinator signs no report: what it says of noise, loss and rejected sites could be
    anything. ``plan``: that of the sum, as this site derived or proved it; None: not known.
    Times, and the reason why a site that is rejected was, stay the coordinator's word.
    """
    body, said = commit.certificate.body, commit.report
    report = pb.RoundReport(
        round=body.round,
        attempt=commit.certificate.attempt,
        coordinator=coordinator,
        contributors=body.contributors,
        phases=said.phases,
        shared_values=said.shared_values,
        mean_loss=body.mean_loss,
        rejections=[one for one in said.rejections if one.site in body.rejected],
    )
    if plan is not None:
        report.key_dealer = plan.key_dealer
        report.noise_multiplier, report.clip_norm = plan.noise_multiplier, plan.clip_norm
    return pb.Commit(certificate=commit.certificate, report=report)


def sources(site: str, likely: Sequence[str], everyone: Sequence[str]) -> tuple[str, ...]:
    """Whom to ask for a version: likely holders first, never ourselves."""
    return tuple(dict.fromkeys(name for name in [*likely, *everyone] if name != site))
