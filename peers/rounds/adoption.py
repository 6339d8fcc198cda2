"""From a certificate to a new head: verify it, get the version, then adopt. PURE.

A site adopts a version only with a certificate that its trust verifies, on top
of the version that it has, and only when that version is on its disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers.attempts import effects as do
from peers.wire.certificates import check_follows
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb

Commits = tuple[pb.Commit, ...]


class Adoption:
    """Committed rounds that wait for their version. Methods return effects."""

    def __init__(self, site: str, verify: Callable[[pb.Certificate], None]) -> None:
        """``verify`` raises CertificateError."""
        self._site = site
        self._verify = verify
        self._waiting: Commits = ()

    @property
    def under_way(self) -> bool:
        """Whether a verified commit waits for its version."""
        return bool(self._waiting)

    def committed(
        self,
        commit: pb.Commit,
        head: do.Durable,
        last: pb.Certificate | None,
        everyone: Sequence[str],
    ) -> do.Effects:
        """The coordinator says that a round is committed; ``last`` is our head's certificate."""
        round_ = commit.certificate.body.round
        if round_ <= head.head_round:
            return []
        if round_ > head.head_round + 1:
            voters = [v.site for v in commit.certificate.votes if v.site != self._site]
            return [do.FetchCertificates(voters[0], head.head_round)] if voters else []
        return self._adopt_when_here((commit,), head, last, everyone)

    def certificates(
        self,
        certificates: Sequence[pb.Certificate],
        head: do.Durable,
        last: pb.Certificate | None,
        everyone: Sequence[str],
    ) -> do.Effects:
        """A peer sent certificates of rounds that we may have missed, oldest first."""
        fresh = [c for c in certificates if c.body.round > head.head_round]
        known = self._waiting[-1].certificate.body.round if self._waiting else head.head_round
        if not fresh or fresh[-1].body.round <= known:
            return []
        commits = tuple(pb.Commit(certificate=c) for c in fresh)
        return self._adopt_when_here(commits, head, last, everyone)

    def _adopt_when_here(
        self,
        commits: Commits,
        head: do.Durable,
        last: pb.Certificate | None,
        everyone: Sequence[str],
    ) -> do.Effects:
        """Verify each certificate and the chain from our head, then get the version."""
        parent, round_ = head.head_digest, head.head_round
        for commit in commits:
            body = commit.certificate.body
            if (body.round, body.parent_digest) != (round_ + 1, parent):
                raise RemoteProtocolError(
                    f"the certificate of round {body.round} does not follow round {round_}"
                )
            check_follows(commit.certificate, last)
            self._verify(commit.certificate)
            last = commit.certificate
            parent, round_ = body.model_digest, body.round
        self._waiting = commits
        voters = [vote.site for vote in commits[-1].certificate.votes]
        return [do.FetchVersion(parent, sources(self._site, voters, everyone))]

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
