"""Defences of a daemon, each to be taken out, to show that an attack needs it to be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from daemon.jobs.sums import ckks
from daemon.state import membership
from peers.attempts import bundle, coordination, participation, statement
from peers.attempts import effects as do
from peers.attempts.lead import AttemptFails
from peers.attempts.participation import Participation
from peers.attempts.statement import EncodedStatement, ManifestOf
from peers.plans import weights as plan_weights
from peers.rounds import acceptor, adoption, replica, run_in_force, runs
from peers.rounds.acceptor import Acceptor
from peers.rounds.pacemaker import reached
from peers.rounds.protocol import Protocol
from peers.rounds.replica import Replica
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Keys, Kind, read
from proto import federation_pb2 as pb
from tests.attacks.programs.planting import FOR_GOOD, put, without

DIFFERENCE = 'must_be(same, lead, "states another sum of integers stated before")'


def unverified(
    _keys: Keys, _kind: Kind, as_a: Any, signed: pb.Signed, _manifest: Any, *, past: bool = False
) -> Any:
    """What is said, whoever signed it."""
    del past
    return as_a.FromString(signed.body)


def proven_by_anyone(
    proof: Iterable[pb.Signed], root: EncodedStatement, keys: Keys, manifest_of: ManifestOf
) -> pb.Applied:
    """The proof of a version, as one site alone gives it."""
    manifest = statement.manifest_named(root.message, manifest_of)
    first, *_ = proof
    return read(keys, Kind.APPLIED, pb.Applied, first, manifest, past=True)


# ---- what keeps a liar from learning --------------------------------------------------


def without_promises() -> None:
    """What a bundle says that sites have promised, and that a run is, is not verified.

    Nor is it held against what they have said before (that would accuse the victims), or
    against the run in force.
    """
    put(bundle, "read", unverified)
    put(Replica, "note", lambda *_: None)
    put(Acceptor, "_is_of_another_run", lambda *_: False)


def without_weights() -> None:
    """Examples count as they are told: nobody asks whether one site stands out."""
    put(bundle, "clipped", lambda examples, _tolerated: dict(examples))
    put(plan_weights, "stands_out", lambda *_, **__: False)


def without_scale() -> None:
    """Contributions to a sum may be on scales that differ from the one that is stated."""
    without(
        FOR_GOOD,
        statement,
        "read_contributions",
        "agreed = (contribution.plan_digest, contribution.scale_digest) == (plan, scale)",
        instead="agreed = contribution.plan_digest == plan",
    )
    put(participation, "read_contributions", statement.read_contributions)
    text = 'must_be(same, lead, "states another scale than follows from what all told")'
    without(FOR_GOOD, Participation, "check_own", text, instead="pass")


def without_one_statement() -> None:
    """A site signs as many sums of an attempt as it is shown, of the same integers, too."""
    text = "signed = self._stated_in(message.attempt, question=question)"
    without(FOR_GOOD, Acceptor, "on_state", text, instead="signed = None")
    without(FOR_GOOD, Acceptor, "_check_difference", DIFFERENCE, instead="pass")


def without_repeating() -> None:
    """Each attempt draws its own sum, whatever was opened before."""
    put(bundle, "_to_be_repeated", lambda *_: None)


def without_drawing() -> None:
    """All attempts of a round train alike and sum the same integers, of whichever sites."""
    without(FOR_GOOD, bundle, "derive_plan", "draw=ground.attempt,", instead="draw=0,")
    for module in (coordination, acceptor):
        put(module, "derive_plan", bundle.derive_plan)
    without(FOR_GOOD, Acceptor, "_check_difference", DIFFERENCE, instead="pass")


def without_proof_of_version() -> None:
    """One site that says that it has opened the sum is enough."""
    put(statement, "read_proof", proven_by_anyone)


def without_proof_of_sum() -> None:
    """A key holder applies what it is sent, as if there were no proof (in its worker)."""
    put(ckks, "_check_proof", lambda *_: None)


OF_SUMS: dict[str, Callable[[], None]] = {
    "promises": without_promises,
    "weights": without_weights,
    "scale": without_scale,
    "one statement": without_one_statement,
    "repeating": without_repeating,
    "drawing": without_drawing,
    "proof of version": without_proof_of_version,
}
OF_WORKERS: dict[str, Callable[[], None]] = {"proof": without_proof_of_sum}


# ---- what keeps a liar from deciding --------------------------------------------------


def without_others() -> None:
    """One site's promise of a later attempt takes everybody there: no f + 1."""
    vars(replica)["reached"] = lambda numbers, _sites: reached(numbers, 1)


def without_farthest() -> None:
    """A run's number may be any."""
    runs.FARTHEST = 2**64


def without_proof() -> None:
    """Whoever has opened a sum, or says so, proves its version alone: no f + 1."""

    def anyones(
        proof: Iterable[pb.Signed], _root: EncodedStatement, _keys: Keys, _manifest_of: ManifestOf
    ) -> pb.Applied:
        return pb.Applied.FromString(next(iter(proof)).body)

    vars(statement)["read_proof"] = anyones


def without_order() -> None:
    """A certificate may be under an older manifest than the round before it."""
    vars(adoption)["check_follows"] = lambda *_: None


def without_check_of_ahead() -> None:
    """Somebody who says that a round is over is believed at once."""

    def believing(self: Protocol, sender: str, message: pb.Ahead) -> None:
        if self._here.coordination is not None:
            raise AttemptFails(f"{sender} is ahead, at round {message.certificate.body.round}")

    Protocol._on_ahead = believing  # type: ignore[method-assign]


def without_patience() -> None:
    """A Prepare of a later attempt takes a site there at once."""
    on_prepare = Protocol._on_prepare

    def following(self: Protocol, sender: str, message: pb.Prepare) -> None:
        on_prepare(self, sender, message)
        if message.round == self.head_round + 1 and message.attempt > self.durable.promised:
            self._synchronizer.enter(message.attempt)

    Protocol._on_prepare = following  # type: ignore[method-assign]


def without_company() -> None:
    """A site goes on by itself, and keeps to itself that an attempt has ended."""
    tell = Replica.tell_others

    def telling(self: Replica, *bodies: do.Body) -> None:
        tell(self, *(body for body in bodies if not isinstance(body, pb.EndedAttempt)))

    Replica.has_quorum = property(lambda _self: True)  # type: ignore[assignment,method-assign]
    Replica.tell_others = telling  # type: ignore[method-assign]


def without_comparison_of_runs() -> None:
    """A later run stands, whatever it takes away."""
    runs.weakens = lambda *_: ""


def without_what_is_over() -> None:
    """Nobody remembers which runs were over, or put aside."""
    runs.last_of_each = lambda *_: []


def without_the_run_in_force() -> None:
    """What was promised once is begun whenever it is shown, also where it was left."""
    Acceptor._is_of_another_run = lambda *_: False  # type: ignore[method-assign]
    never = property(lambda _self: -1, lambda _self, _attempt: None)
    Replica.left = never  # type: ignore[assignment]


def without_newest_certificate() -> None:
    """A certificate that a site has replaced is as good as the new one."""
    membership.Signatures._must_be_current = lambda *_: None  # type: ignore[method-assign]


def without_signed_runs() -> None:
    """A run is whose it says it is."""

    def anyones(signed: pb.Signed, _keys: Keys, _manifest: FederationManifest) -> pb.Run:
        return pb.Run.FromString(signed.body)

    vars(bundle)["read_run"] = anyones
    vars(run_in_force)["read_run"] = anyones


OF_DECISIONS: dict[str, Callable[[], None]] = {
    "others": without_others,
    "farthest": without_farthest,
    "proof": without_proof,
    "order": without_order,
    "ahead": without_check_of_ahead,
    "patience": without_patience,
    "company": without_company,
    "weakening": without_comparison_of_runs,
    "what is over": without_what_is_over,
    "the run in force": without_the_run_in_force,
    "newest certificate": without_newest_certificate,
    "signed runs": without_signed_runs,
}
