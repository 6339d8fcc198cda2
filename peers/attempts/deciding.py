"""The coordinator's tallies: signatures, versions, votes; each ends with enough equal ones. PURE.

    statement -> signatures of a quorum -> f + 1 equal versions -> votes of a quorum

What is counted is checked here, one by one; that it is enough, every site checks again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from peers.attempts.bundle import Ground
from peers.attempts.statement import Known, ManifestOf, read_lock, value_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Keys, Kind, must_be, verify
from proto import federation_pb2 as pb


@dataclass
class Tally:
    """What sites have signed of one attempt, at its coordinator."""

    ground: Ground
    keys: Keys
    manifest_of: ManifestOf
    known: Known | None = None
    certificate: pb.StatementCertificate | None = None
    signatures: dict[str, pb.Signature] = field(default_factory=dict)
    applied: dict[str, pb.Signed] = field(default_factory=dict)
    votes: dict[str, pb.Vote] = field(default_factory=dict)
    _value: pb.VoteBody | None = None

    @property
    def proving(self) -> int:
        """Equal versions that prove one: of f + 1 sites one is honest."""
        return self.ground.manifest.tolerated + 1

    # ---- signatures --------------------------------------------------------------

    def begin(self, known: Known) -> None:
        """This is what is to be signed now."""
        self.known, self.signatures, self.certificate = known, {}, None

    def stated(self, sender: str, message: pb.Stated) -> pb.StatementCertificate | None:
        """A site signed the statement; with a quorum it is certain, once."""
        known = self.known
        if known is None or self.certificate is not None:
            return None
        if message.statement_digest != known.digest or sender in self.signatures:
            return None
        signature, manifest = message.signature, self.ground.manifest
        must_be(signature.site == sender, sender, "brings another site's signature")
        verify(self.keys, Kind.STATEMENT, known.raw, signature, manifest)
        self.signatures[sender] = signature
        if len(self.signatures) < manifest.quorum:
            return None
        self.certificate = pb.StatementCertificate(
            statement=known.raw,
            signatures=[self.signatures[site] for site in sorted(self.signatures)],
        )
        return self.certificate

    # ---- versions ----------------------------------------------------------------

    def opened(self, sender: str, message: pb.AppliedSum) -> pb.Lock | None:
        """Somebody has opened the sum; f + 1 equal versions prove it."""
        known = self.known
        if known is None or self.certificate is None:
            return None
        signed = message.applied
        told = pb.Applied.FromString(signed.body)  # read by peers/rounds/protocol.py
        must_be(told.root_digest == known.digest, sender, "applied another sum")
        self.applied.setdefault(sender, signed)
        body, count = self._most()
        if count < self.proving:
            return None
        proof = [self.applied[s] for s in sorted(self.applied) if self.applied[s].body == body]
        return pb.Lock(certificate=self.certificate, proof=proof)

    def _most(self) -> tuple[bytes, int]:
        return Counter(one.body for one in self.applied.values()).most_common(1)[0]

    def hopeless(self, openers: Set[str]) -> str:
        """Why no version can be proven any more by these; empty while one can."""
        left = len(openers - set(self.applied))
        if not self.applied or self._most()[1] + left >= self.proving:
            return ""
        seen = ", ".join(
            f"{site} {pb.Applied.FromString(one.body).model_digest.hex()[:12]}"
            for site, one in sorted(self.applied.items())
        )
        return f"those who opened the sum differ, no version is proven: {seen}"

    # ---- votes -------------------------------------------------------------------

    def prove(self, lock: pb.Lock) -> None:
        """This is what is voted for from now on."""
        held = read_lock(lock, self.keys, self.manifest_of)
        self._value = value_of(held, self.ground.manifest)

    def voted(self, vote: pb.Vote, own: str) -> list[pb.Vote]:
        """A verified vote: equal ones of a quorum, with our own, once there are.

        It is waited for, so that the coordinator, too, has the version.
        """
        if vote.site in self.votes:
            return []
        if vote.body != self._value:
            raise RemoteProtocolError(f"{vote.site} votes for something else than was proven")
        self.votes[vote.site] = vote
        if len(self.votes) < self.ground.manifest.quorum or own not in self.votes:
            return []
        return [self.votes[site] for site in sorted(self.votes)]
