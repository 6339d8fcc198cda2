"""Two signatures of one site that contradict each other: kept, passed on, shown. PURE.

A site signs one promise an attempt, one sum, one question, one version of a sum, one
vote. Who has signed two breaks the protocol, or runs twice on one state; which of these
is for people to find out. Until then nobody waits for the attempts that it leads.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from peers.wire.certificates import vote_payload
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.messages import parse_signed
from peers.wire.signing import Keys, Kind, must_be, read, signature_of, signed_by
from proto import federation_pb2 as pb

_REMEMBERED: Final = 512  # of a site, in a round: more than its attempts say

_SIGNED_AS: Final = {
    pb.TWO_PROMISES: (Kind.PROMISE, pb.Promise),
    pb.TWO_STATEMENTS: (Kind.STATEMENT, pb.Statement),
    pb.TWO_APPLIED: (Kind.APPLIED, pb.Applied),
}

WORDS: Final = {
    pb.TWO_PROMISES: "two promises of one attempt",
    pb.TWO_STATEMENTS: "two statements of one attempt",
    pb.TWO_APPLIED: "two versions of one sum",
    pb.TWO_VOTES: "two votes of one attempt",
}

_About = tuple[int, tuple[int, ...] | bytes]  # the kind; round and attempt, or the sum


class SignedWords:
    """What sites have signed in the round under way, as far as this one has seen it."""

    def __init__(self) -> None:
        self._signed: dict[str, OrderedDict[_About, pb.Signed]] = {}

    def forget(self) -> None:
        """Another round begins."""
        self._signed.clear()

    def note(self, kind: pb.EvidenceKind.ValueType, signed: pb.Signed) -> pb.Evidence | None:
        """Remember what was verified; evidence when it contradicts what was before.

        A site that floods us pushes out words of its own, and of nobody else.
        """
        said = self._signed.setdefault(signed.site, OrderedDict())
        known = said.setdefault((kind, _about(kind, signed.body)), signed)
        if len(said) > _REMEMBERED:
            said.popitem(last=False)
        if known.body == signed.body or _say_the_same(kind, known, signed):
            return None
        return pb.Evidence(kind=kind, first=known, second=signed)

    def vote(self, vote: pb.Vote) -> pb.Evidence | None:
        """As `note`, of a vote whose signature was verified."""
        return self.note(pb.TWO_VOTES, _wrapped(vote))

    def latest_promise(self, site: str) -> pb.Signed | None:
        """The promise of the latest attempt that this site has signed."""
        promises = self._of(site, pb.TWO_PROMISES)
        return promises[max(promises)] if promises else None

    def latest_statement(self, site: str, *, question: bool = False) -> pb.Signed | None:
        """The last sum that this site has stated, or restated; or the last question."""
        statements = {
            about: signed
            for about, signed in self._of(site, pb.TWO_STATEMENTS).items()
            if about[2] == question
        }
        return statements[max(statements)] if statements else None

    def statement(self, site: str, round_: int, attempt: int) -> pb.Signed | None:
        """The sum that this site has stated, or restated, in an attempt."""
        return self._of(site, pb.TWO_STATEMENTS).get((round_, attempt, False))

    def latest_vote(self, site: str) -> pb.Vote | None:
        """The vote of the latest attempt that this site has cast."""
        votes = self._of(site, pb.TWO_VOTES)
        return pb.Vote.FromString(votes[max(votes)].body) if votes else None

    def _of(self, site: str, kind: pb.EvidenceKind.ValueType) -> dict[tuple[int, ...], pb.Signed]:
        """What a site has signed in each attempt."""
        return {
            about: signed
            for (its, about), signed in self._signed.get(site, OrderedDict()).items()
            if its == kind and isinstance(about, tuple)
        }


def _about(kind: pb.EvidenceKind.ValueType, body: bytes) -> tuple[int, ...] | bytes:
    """What a site may sign only one of."""
    if kind == pb.TWO_PROMISES:
        promise = pb.Promise.FromString(body)
        return promise.round, promise.attempt
    if kind == pb.TWO_STATEMENTS:
        statement = pb.Statement.FromString(body)
        return statement.round, statement.attempt, statement.kind == pb.QUESTION
    if kind == pb.TWO_APPLIED:
        return pb.Applied.FromString(body).root_digest
    vote = pb.Vote.FromString(body)
    return vote.body.round, vote.attempt


def _say_the_same(kind: pb.EvidenceKind.ValueType, first: pb.Signed, second: pb.Signed) -> bool:
    """Whether two that were signed bind their site to one and the same.

    Votes differ by what they say: each signature of the same words has other bytes. A site
    whose state went back may promise what it has promised, after another start.
    """
    if kind == pb.TWO_VOTES:
        return pb.Vote.FromString(first.body).body == pb.Vote.FromString(second.body).body
    if kind == pb.TWO_PROMISES:
        one, other = pb.Promise.FromString(first.body), pb.Promise.FromString(second.body)
        one.incarnation = other.incarnation = b""
        return one == other
    return first.body == second.body


def _wrapped(vote: pb.Vote) -> pb.Signed:
    return signed_by(vote.SerializeToString(deterministic=True), signature_of(vote))


def _must_be_of(manifest: FederationManifest, site: str, federation_id: str) -> None:
    """What a site signs in another federation, with a key that counts here too, is no matter."""
    must_be(federation_id == manifest.federation_id, site, "is accused of words said elsewhere")


def check_evidence(evidence: pb.Evidence, keys: Keys, manifest: FederationManifest) -> str:
    """The site that contradicts itself.

    Raises CertificateError, RemoteProtocolError when this shows no such thing.
    """
    first, second, kind = evidence.first, evidence.second, evidence.kind
    site = first.site
    must_be(second.site == site, site, "and another site are accused together")
    if kind == pb.TWO_VOTES:
        for one in (first, second):
            vote = parse_signed(pb.Vote, one.body)
            must_be(vote.site == site, site, "is accused of another site's vote")
            _must_be_of(manifest, site, vote.body.federation_id)
            payload = vote_payload(vote.body, vote.attempt)
            keys.verify(payload, signature_of(vote), manifest, past=True)
    else:
        label, as_a = _SIGNED_AS[kind]
        for one in (first, second):
            said: Any = read(keys, label, as_a, one, manifest, past=True)
            if not isinstance(said, pb.Applied):  # the sum that it names is of one federation
                _must_be_of(manifest, site, said.federation_id)
    if _say_the_same(kind, first, second) or _about(kind, first.body) != _about(kind, second.body):
        raise RemoteProtocolError(f"{site} is accused of what does not contradict itself")
    return site
