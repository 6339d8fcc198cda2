"""Schedules in which a site's state goes back beside a coordinator that lies.

In all of them an honest peer that is up knows what the site has promised, and tells it. The
site that goes back is a, the liar c, and what c knows of a it keeps to itself.
"""

from __future__ import annotations

from typing import Any

from peers.attempts import effects as do
from peers.wire.certificates import certificate_of, sign_vote
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Kind, sign_bytes, signed_by
from proto import federation_pb2 as pb
from tests.simulation.network import HEARTBEAT_S
from tests.simulation.proofs import SimulatedProofs
from tests.simulation.scenarios.rows import _first_of_c, _less
from tests.simulation.scenarios.scripts import LIAR, Script, among, to_attempt


def _voted_for_c(unseen: Any) -> tuple[Script, list[pb.Vote]]:
    """a and b have voted in c's attempt 1, and say so in attempt 2; d has not seen these."""
    script = Script()
    votes: list[pb.Vote] = []

    def passes(_sender: str, to: str, body: do.Body) -> bool:
        if isinstance(body, pb.Vote):
            votes.append(body)
            return False
        first = isinstance(body, pb.Prepare | pb.Bundle) and body.attempt == 0
        return not first and not (isinstance(body, unseen) and to == "d")

    script.passes = passes
    script.train("b", rounds=1)
    script.until(lambda: script.locked("a", 1) and script.locked("b", 1) and len(votes) == 2)
    script.silent = True
    to_attempt(script, 2)
    return script, votes


def a_lock_that_was_named() -> None:
    """a and b have voted in c's attempt, b commits and goes, and the state of a goes back.

    d has heard a's next promise, which names what a has voted for; c says nothing of it.
    """
    script, votes = _voted_for_c(pb.Proven)
    if not pb.Promise.FromString(script.promised("a").body).HasField("lock"):
        raise LookupError("the script has gone another way")
    script._feed("b", do.MessageReceived(LIAR, pb.Commit(certificate=_withheld(script, votes))))
    script.until(lambda: script.site("b").head_round == 1, 1.0)
    script.crash("b")
    script.restore("a", 100)
    script.passes = among(*"ad")
    script.start("a")
    script.run_for(30.0)
    script.crash(LIAR)  # and forgets what it has proven itself
    run, head = script.disks["d"].durable.signed_run, script.disks["d"].durable.head_digest
    script.disks[LIAR].durable = do.Durable(0, head, promised=2, signed_run=run)
    script.start(LIAR)
    script.silent = False
    script.passes = among(*"acd")
    script.run_until_committed(1)
    script.passes = among(*"abcd")
    script.start("b")
    script.run_for(100.0)


def _withheld(script: Script, votes: list[pb.Vote]) -> pb.Certificate:
    """What c has of the votes for it, and of its own."""
    first = votes[0]
    own = sign_vote(script.keys.sign, first.body, first.attempt)
    signed = {vote.site: vote for vote in (*votes, own) if vote.attempt == first.attempt}
    return certificate_of(first.attempt, [signed[site] for site in sorted(signed)], 0)


def _forgets(script: Script, durable: do.Durable) -> None:
    """The liar begins anew, and will not know what it has had signed."""
    script.crash(LIAR)
    script.disks[LIAR].durable = durable


def _tells_nothing(sender: str, to: str, body: do.Body) -> bool:
    """c does not talk to b, and tells nobody what it has signed; everybody else does."""
    asked = isinstance(body, pb.Recall | pb.Remembered)
    if sender == LIAR and isinstance(body, pb.Remembered):
        return False
    return asked or {sender, to} != {LIAR, "b"}


def a_copy_of_the_round_before() -> None:
    """a has voted in round 2; b knows of its promise, d has slept since round 1.

    Asked of round 1, of which its copy is, d truly knows of nothing, and c says so; b comes
    a moment later.
    """
    script = Script()
    script.training.min_participants = 3
    votes: list[pb.Vote] = []

    def passes(sender: str, to: str, body: do.Body) -> bool:
        if isinstance(body, pb.Vote) and body.body.round == 2:
            votes.append(body)
            return False
        return "d" not in (sender, to)

    script.passes = among(*"abcd")
    script.train("b", rounds=2)
    script.until(lambda: script.disks["d"].durable.state.HasField("vote"))
    script.crash("d")
    script.passes = passes
    script.until(lambda: script.locked("a", 0) and script.locked("b", 0) and len(votes) == 2)
    script.until(lambda: all(script.disks[site].durable.promised == 1 for site in "ab"))
    script.run_for(2.0)
    run, head = script.disks["b"].durable.signed_run, script.disks["b"].durable.head_digest
    while script.disks["a"].durable.head_round:
        script.restore("a", 1)
    _forgets(script, do.Durable(1, head, signed_run=run))
    script.proofs = SimulatedProofs(script.plans, script.random)  # of a worker that is new, too
    script.passes = among(*"acd")
    script.run_for(HEARTBEAT_S - script.now % HEARTBEAT_S + 0.1)  # it has waited before the next
    script.start("d")
    script.start("a")
    script.tell(LIAR, "a", pb.Remembered(round=1))
    script.until(lambda: not script.site("a")._recall.waits)
    script.passes = _tells_nothing
    script.start(LIAR)
    script.until(lambda: script.disks["a"].durable.head_round == 2, 1_000.0)
    script.passes = among(*"abcd")
    commit = pb.Commit(certificate=_withheld(script, votes))
    script._feed("b", do.MessageReceived(LIAR, commit))
    script.run_for(100.0)


def a_newer_manifest() -> None:
    """a has voted under manifest 1, and forgets it; b and d tell it; then manifest 2 is there."""
    script, votes = _voted_for_c(pb.Proven | pb.State)
    script.restore("a", 200)
    first = script.manifest
    second = FederationManifest(first.federation_id, 2, first.sites, first.tolerated)
    script.manifests[2] = script.installed["a"] = second
    for site in "bcd":
        script.install(site, second)
    run, head = script.disks["d"].durable.signed_run, script.disks["d"].durable.head_digest
    to_attempt(script, 5)
    _forgets(script, do.Durable(0, head, promised=4, signed_run=run))
    script.passes, script.silent = _tells_nothing, False
    script.start("a")
    script.start(LIAR)
    script.until(lambda: script.disks["a"].durable.head_round == 1)
    script.passes = among(*"abcd")
    script._feed("b", do.MessageReceived(LIAR, pb.Commit(certificate=_withheld(script, votes))))
    script.run_for(100.0)


def a_sum_that_was_signed() -> None:
    """a and b have signed the sum of all; a forgets it, and c has one without b's made again."""
    script, known = _first_of_c()
    if {by.site for by in script.states("ab", known)} != {"a", "b", LIAR}:
        raise LookupError("the script has gone another way")
    script.restore("a", 1)
    to_attempt(script, 5)
    less = _less(known, without="b")
    state = pb.RoundState(
        stated=signed_by(less.raw, sign_bytes(script.keys, Kind.STATEMENT, less.raw))
    )
    run, head = script.disks["d"].durable.signed_run, script.disks["d"].durable.head_digest
    _forgets(script, do.Durable(0, head, promised=4, state=state, signed_run=run))
    script.passes, script.silent = _tells_nothing, False
    script.start("a")
    script.start(LIAR)
    script.run_for(1_000.0)
