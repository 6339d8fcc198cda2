"""What a site does when one that it has to do with lies: one machine, and forged messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle
from peers.attempts.participation import Participation
from peers.attempts.statement import EncodedStatement, HeldLock, value_of
from peers.rounds import runs
from peers.rounds.pacemaker import Pacemaker, reached
from peers.wire.certificates import CertificateError, certificate_of, sign_vote
from peers.wire.errors import LocalProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, TIMING, World, plan
from tests.support.one_machine import Alone, lead_of, refused, sent, stated
from tests.support.signed_rounds import EXPONENTS, VERSION, Stage, manifest_of

LAST = 2**32 - 2  # of all attempts that there are


# ---- attempts: nobody is pushed, and numbers don't run away --------------------------------


@pytest.mark.parametrize("attempt", [1, 2, 17, LAST])
def test_a_prepare_of_a_later_attempt_pushes_nobody_into_it(attempt: int) -> None:
    """Once, whoever it came from, an attempt of 2^32 - 2 was the last that a site ever entered."""
    alone = Alone()
    alone.begins()
    lead = lead_of(attempt)
    effects = alone.hears(lead, alone.prepare(lead, attempt)) if lead != "a" else []
    assert alone.promised == 0
    assert not sent(effects, pb.Promised)


def test_one_site_that_promises_far_attempts_takes_nobody_along() -> None:
    alone = Alone()
    alone.begins()
    for attempt in (5, 1000, LAST):
        alone.hears("d", alone.stage.promised("d", attempt))
        alone.hears("c", alone.stage.promised("d", attempt))  # passed on, it is still one site's
    assert alone.promised == 0
    message = pb.Bundle(round=1, attempt=LAST, run=alone.stage.run)
    message.promises.append(alone.stage.promised("d", LAST).promise)
    alone.hears("d", message)
    assert alone.promised == 0


def test_where_more_sites_are_than_may_lie_a_site_follows_and_no_farther() -> None:
    """Of two that are ahead one is honest: as far as both have come."""
    alone = Alone()
    alone.begins()
    alone.hears("d", alone.stage.promised("d", LAST))
    alone.hears("c", alone.stage.promised("c", 6))
    assert alone.promised == 6
    assert reached({"b": 2, "c": 6, "d": LAST}, 2) == 6
    assert reached({"d": LAST}, 2) == -1
    assert reached({"b": 2, "c": 6, "d": LAST}, 3) == 2
    assert reached({}, 1) == -1


def test_a_site_goes_to_the_next_attempt_when_its_patience_is_over() -> None:
    """With a dead coordinator, and with one that says nothing that gets on."""
    alone = Alone()
    alone.begins()
    began = alone.now
    effects = alone.goes_on()
    assert alone.promised == 1
    assert alone.now == pytest.approx(began + TIMING.patience(0))
    assert {send.to for send in sent(effects, pb.Promised)} == set("bcd"), "all hear of it"
    assert {send.to for send in sent(effects, pb.RunWish)} == set("bcd")


def test_the_next_coordinator_can_not_pre_empt_the_attempt_under_way() -> None:
    """c's turn is next: its Prepare waits until a goes on."""
    alone = Alone()
    alone.begins()
    for attempt in (1, 5, 9):
        alone.hears("c", alone.prepare("c", attempt))
    assert alone.promised == 0
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    assert alone.machine._here.part is not None, "attempt 0 goes on with a in it"


def test_repeating_itself_holds_no_attempt_up() -> None:
    pace = Pacemaker(TIMING)
    pace.entered(0, 0.0)
    assert pace.until == TIMING.patience(0)
    pace.got_on("bundle", 0, 5.0, train=True)
    first = pace.until
    assert first == 5.0 + TIMING.patience(0, 1) + TIMING.train(0)
    pace.got_on("bundle", 0, 50.0, train=True)
    assert pace.until == first, "each sign of life counts once"
    pace.got_on("state", 0, 50.0)
    assert pace.until == 50.0 + TIMING.patience(0, 3)
    pace.ended(0, 51.0)
    assert pace.until == 51.0 + TIMING.retry(0)
    pace.ended(0, 0.0)
    pace.ended(0, 90.0)
    assert pace.until == TIMING.retry(0), "nor does an end put the next attempt off"
    pace.nothing()
    assert pace.idle


def test_only_its_coordinator_ends_an_attempt() -> None:
    alone = Alone()
    alone.begins()
    before = alone.machine.next_wakeup()

    def end(by: str, attempt: int = 0, federation: str = "simulated") -> pb.EndedAttempt:
        told = pb.Ended(federation_id=federation, round=1, attempt=attempt, reason="over")
        return pb.EndedAttempt(ended=sign(alone.stage.keys[by], Kind.ENDED, told))

    with refused("c ends an attempt that it does not run"):
        alone.hears("c", end("c"))
    with refused("ends an attempt of another federation"):
        alone.hears("b", end("b", federation="elsewhere"))
    forged = end("c")
    forged.ended.site = "b"
    with pytest.raises(CertificateError):
        alone.hears("c", forged)
    alone.hears("c", end("c", attempt=1))
    failed = pb.AttemptFailed(round=1, attempt=0, reason="over")
    alone.hears("c", failed)
    alone.hears("b", failed)
    assert alone.machine.next_wakeup() == before
    effects = alone.hears("c", end("b"))  # whoever brings it: b has signed it
    assert alone.machine.next_wakeup() < before
    assert {send.to for send in sent(effects, pb.EndedAttempt)} == set("bcd"), "all hear of it"
    assert alone.hears("d", end("b")) == [], "once"
    alone.goes_on()
    assert alone.promised == 1


def test_who_has_left_an_attempt_is_not_brought_back_to_it_by_its_end() -> None:
    """Sites that rest would tell each other of it for ever, and people that it has failed."""
    alone = Alone()
    alone.begins()
    run = alone.machine.run
    assert run is not None
    stop = runs.following(run, "c", FEDERATION, "stop", 0, run.plan)
    alone.hears("c", pb.RunWish(run=sign(alone.stage.keys["c"], Kind.RUN, stop)))
    assert alone.machine._here.pace.idle
    ended = pb.Ended(federation_id=FEDERATION, round=1, attempt=0, reason="stopped")
    by = sign(alone.stage.keys["b"], Kind.ENDED, ended)
    assert alone.hears("d", pb.EndedAttempt(ended=by)) == []


# ---- what is not signed changes nothing ----------------------------------------------------


def test_a_forged_ahead_is_looked_into_and_changes_nothing() -> None:
    """Once it ended the attempt of an honest coordinator."""
    alone = Alone()
    alone.begins()
    before = alone.machine.durable
    forged = pb.Certificate(body=pb.VoteBody(round=50, model_digest=bytes(32)))
    effects = alone.hears("d", pb.Ahead(round=1, certificate=forged))
    assert effects == [do.FetchCertificates("d", 0)]
    effects = alone.hears("d", pb.Behind(round=1, attempt=0, head_round=0))
    assert not sent(effects, object)
    assert alone.machine.durable == before


def committed(alone: Alone, sites: str, **changed: object) -> pb.Certificate:
    body = value_of(alone.stage.lock(), alone.stage.manifest)
    for name, value in changed.items():
        setattr(body, name, value)
    votes = [sign_vote(alone.stage.keys[site].sign, body, 0) for site in sites]
    return certificate_of(0, votes, 0)


@pytest.mark.parametrize("told", ["commit", "certificates"])
def test_a_commit_of_too_few_votes_is_not_adopted_nor_its_version_fetched(told: str) -> None:
    alone = Alone()
    alone.begins()
    before = alone.machine.durable

    def tell(certificate: pb.Certificate) -> list[do.Effect]:
        if told == "commit":
            return alone.hears("b", pb.Commit(certificate=certificate))
        return alone.takes(do.CertificatesArrived((certificate,)))

    with pytest.raises(CertificateError, match="no quorum"):
        tell(committed(alone, "bc"))
    forged = committed(alone, "bcd")
    forged.votes[0].signature = b"forged"
    with pytest.raises(CertificateError, match="bad signature of b"):
        tell(forged)
    with refused("does not follow round 0"):
        tell(committed(alone, "bcd", parent_digest=bytes(32)))
    assert alone.machine.durable == before
    (fetch,) = tell(committed(alone, "bcd"))
    assert isinstance(fetch, do.FetchVersion)
    assert alone.machine.head_round == 0, "and not before its version is here"
    alone.takes(do.VersionHere(VERSION))
    assert alone.machine.head_round == 1


def test_a_commit_under_an_older_manifest_than_the_heads_is_not_adopted() -> None:
    """In which an expelled site, whose key somebody has, has a vote."""
    alone = Alone()
    newer = alone.world.manifests[2] = FederationManifest(
        "simulated", 2, alone.stage.manifest.sites[:3], 1
    )
    alone.takes(do.ManifestChanged(newer))
    first = committed(alone, "abc", manifest_version=2, manifest_digest=newer.digest)
    alone.takes(do.CertificatesArrived((first,)))
    alone.takes(do.VersionHere(VERSION))
    assert alone.machine.head_round == 1
    old = committed(alone, "bcd", round=2, parent_digest=VERSION, model_digest=b"2" * 32)
    for event in (
        do.MessageReceived("b", pb.Commit(certificate=old)),
        do.CertificatesArrived((old,)),
    ):
        with pytest.raises(CertificateError, match="versions do not go back"):
            alone.takes(event)


# ---- statements ---------------------------------------------------------------------------


def test_a_site_signs_one_sum_an_attempt_over_a_restart_too() -> None:
    """Two certified ones would be two versions of a round, and the difference of two sums."""
    alone = Alone()
    known = stated(alone)
    other = EncodedStatement.of(alone.stage.statement_of(alone.everybody(0), rejected=["x"]))
    with refused("b makes two statements in one attempt"):
        alone.hears("b", alone.state_of(other))
    again = alone.hears("b", alone.state_of(known))
    assert [send.body.statement_digest for send in sent(again, pb.Stated)] == [known.digest]
    bundle = alone.everybody(0).message
    alone.restarts()
    alone.hears("b", bundle)
    with refused("b makes two statements in one attempt"):
        alone.hears("b", alone.state_of(other))


def test_a_question_that_comes_late_does_not_make_it_forget_the_sum() -> None:
    """Of two sums of one attempt two versions could be committed."""
    alone = Alone()
    known = stated(alone)
    bundle = alone.everybody(0)
    question = EncodedStatement.of(
        alone.stage.statement_of(bundle, kind=pb.QUESTION, byzantine_sites=0)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(alone.machine._acceptor, "_check_statement", lambda _question: None)
        assert len(sent(alone.hears("b", alone.state_of(question)), pb.Stated)) == 1
    assert [one.body for one in alone.state.statements] == [known.raw, question.raw]
    other = EncodedStatement.of(alone.stage.statement_of(bundle, sum_digest=b"2" * 32))
    with refused("b makes two statements in one attempt"):
        alone.hears("b", alone.state_of(other))


def test_a_statement_waits_for_its_bundle_and_comes_from_its_coordinator() -> None:
    alone = Alone()
    alone.begins()
    bundle = alone.everybody(0)
    known = alone.stage.statement(bundle)
    with refused("c does not coordinate attempt 0"):
        alone.hears("c", alone.state_of(known))
    assert not alone.hears("b", alone.state_of(known))
    assert not alone.state.statements


def test_nothing_of_an_attempt_that_was_left_is_signed() -> None:
    alone = Alone()
    alone.begins()
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    alone.at_attempt(1)
    assert alone.hears("b", alone.state_of(alone.stage.statement(bundle))) == []
    assert not alone.state.statements


def locked(alone: Alone) -> tuple[HeldLock, Bundle]:
    """Attempt 1, into which somebody brings the lock of attempt 0."""
    lock = alone.stage.lock()
    alone.begins()
    alone.at_attempt(1)
    bundle = alone.everybody(1, lock=lock)
    alone.hears("c", bundle.message)
    return lock, bundle


def test_where_a_version_may_be_committed_no_other_is_stated() -> None:
    alone = Alone()
    lock, bundle = locked(alone)
    anew = alone.stage.statement_of(
        bundle, 1, made=alone.stage.plan(alone.stage.bundle(attempt=1), 1)
    )
    with refused("c states a new sum where one may be committed"):
        alone.hears("c", alone.state_of(EncodedStatement.of(anew)))
    for name, value in (("model_digest", b"x" * 32), ("root_digest", b"x" * 32)):
        other = alone.stage.restated(lock, bundle, 1).message
        setattr(other, name, value)
        with refused("c restates another version than its promises name"):
            alone.hears("c", alone.state_of(EncodedStatement.of(other)))
    effects = alone.hears("c", alone.state_of(alone.stage.restated(lock, bundle, 1)))
    assert len(sent(effects, pb.Stated)) == 1


def test_where_none_may_be_committed_none_is_stated_again() -> None:
    """A lock that no promise of the bundle names: of a liar's making, or long overtaken."""
    alone = Alone()
    alone.begins()
    alone.at_attempt(1)
    bundle = alone.everybody(1)
    alone.hears("c", bundle.message)
    with refused("c restates another version than its promises name"):
        alone.hears("c", alone.state_of(alone.stage.restated(alone.stage.lock(), bundle, 1)))


def test_of_integers_that_were_stated_in_one_sum_no_other_is_signed() -> None:
    """Two sums of the same integers differ by one site's update.

    d signed a smaller sum of attempt 0, and those who have signed the whole one are left
    out of the bundle of attempt 1; a, which is one of them, signs nothing there, and opens
    nothing.
    """
    alone = Alone()
    known = stated(alone)
    smaller = EncodedStatement.of(alone.stage.statement_of(alone.everybody(0), sites="bcd"))
    alone.at_attempt(1)
    promised = [alone.stage.promised(site, 1) for site in "bc"]
    bundle = alone.stage.bundle([*promised, alone.stage.promised("d", 1, stated=smaller)], 1)
    assert bundle.repeated is not None
    made = alone.stage.plan(bundle, 1)
    assert made.draw == known.message.plan.draw == 0
    alone.hears("c", bundle.message)
    alone.machine._here.part = None
    less = EncodedStatement.of(
        alone.stage.statement_of(bundle, 1, made=made, sites="bcd", exponents=EXPONENTS)
    )
    assert not sent(alone.hears("c", alone.state_of(less)), pb.Stated)
    certificate = alone.stage.certified(less, "bcd")
    with refused("c states another sum of integers stated before"):
        alone.hears("c", pb.Certified(round=1, attempt=1, certificate=certificate))


def test_a_sum_that_was_made_again_in_vain_is_drawn_anew() -> None:
    """Else what fails once more for the same reason is made again for ever."""
    alone = Alone()
    known = stated(alone)
    alone.at_attempt(1)
    bundle = alone.everybody(1, stated=known)
    alone.hears("c", bundle.message)
    alone.machine._here.part = None
    again = EncodedStatement.of(alone.stage.statement_of(bundle, 1))
    assert again.message.plan.draw == 0
    assert len(sent(alone.hears("c", alone.state_of(again)), pb.Stated)) == 1
    alone.at_attempt(2)
    told = pb.Promise.FromString(alone.state.promise.promise.body)
    assert (told.stated.attempt, told.tried) == (1, 2)
    assert alone.stage.plan(alone.everybody(2, stated=again, tried=told.tried), 2).draw == 2


# ---- votes and locks ------------------------------------------------------------------------


def proven(alone: Alone, lock: pb.Lock, attempt: int = 0) -> pb.Proven:
    return pb.Proven(round=1, attempt=attempt, lock=lock)


def test_a_vote_is_cast_on_a_proof_with_version_and_lock_on_disk() -> None:
    alone = Alone()
    alone.begins()
    lock = alone.stage.lock()
    (fetch,) = alone.hears("b", proven(alone, lock.message))
    assert isinstance(fetch, do.FetchVersion)
    assert not alone.state.HasField("vote"), "not before the version is here"
    effects = alone.takes(do.VersionHere(VERSION))
    (vote,) = sent(effects, pb.Vote)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(do.Persist) < effects.index(vote)
    assert (alone.state.vote, alone.state.lock) == (vote.body, lock.message)
    assert vote.to == "b"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda lock: lock.proof.__delitem__(1), "1 sites have opened the sum, 2 prove"),
        (lambda lock: lock.certificate.signatures.__delitem__(slice(2, 4)), "2 signatures"),
    ],
)
def test_no_vote_for_a_vector_that_nobody_has_proven(
    spoil: Callable[[pb.Lock], None], expected: str
) -> None:
    alone = Alone()
    alone.begins()
    message = pb.Lock()
    message.CopyFrom(alone.stage.lock().message)
    spoil(message)
    with refused(expected):
        alone.hears("b", proven(alone, message))
    assert alone.takes(do.VersionHere(VERSION)) == []


def test_a_site_votes_for_one_version_of_a_sum_and_never_for_another() -> None:
    """More liars than may be prove a second one: what a site has applied itself still stands."""
    alone = Alone()
    alone.begins()
    lock, other = alone.stage.lock(), alone.stage.lock(version=b"x" * 32)
    alone.hears("b", proven(alone, lock.message))
    alone.takes(do.VersionHere(VERSION))
    voted = alone.state.vote
    alone.world.watch.liars.add("b")
    alone.hears("b", proven(alone, other.message))
    with refused("b proves another version of a sum than this site has made of it"):
        alone.takes(do.VersionHere(b"x" * 32))
    assert alone.state.vote == voted


def test_of_a_sum_that_others_made_another_version_of_a_site_signs_none() -> None:
    """It has voted for theirs: its own would be a second one, and accuse it."""
    alone = Alone()
    known = stated(alone)
    alone.hears("b", proven(alone, alone.stage.lock_of(known)))
    assert sent(alone.takes(do.VersionHere(VERSION)), pb.Vote)
    part = Participation("a", alone.stage.ground(), known.message.plan, alone.stage.keys["a"])
    part.worked(do.ContextHeld(1, 0, b"s" * 32))
    part.certified(known)
    made = do.SumOpened(1, 0, known.digest, b"x" * 32, 0.5)
    with pytest.raises(LocalProtocolError, match="applied twice, with another result"):
        alone.machine._acceptor.opened(part, made)
    assert not sent(alone.machine.wished, pb.AppliedSum)


def test_a_site_votes_in_no_attempt_that_it_has_left() -> None:
    alone = Alone()
    alone.begins()
    lock = alone.stage.lock()
    alone.hears("b", proven(alone, lock.message))
    alone.at_attempt(1)
    assert not sent(alone.takes(do.VersionHere(VERSION)), pb.Vote)
    assert alone.hears("b", proven(alone, lock.message)) == []
    assert not alone.state.HasField("vote")
    with refused("b proves a version of another attempt"):
        alone.hears("b", proven(alone, lock.message, attempt=1))


def test_a_site_that_is_cut_off_waits_where_the_others_can_find_it() -> None:
    """It would go from attempt to attempt, and never again be in the same one as they."""
    alone = Alone()
    alone.begins()
    for _ in range(8):
        effects = alone.ticks()
    assert alone.promised == 0
    assert 0 < alone.machine.next_wakeup() - alone.now <= TIMING.retry(0)
    assert {send.to for send in sent(effects, pb.Promised)} == set("bcd"), "it says where it is"
    assert {send.to for send in sent(effects, pb.RunWish)} == set("bcd")
    assert all(send.body == alone.state.promise for send in sent(effects, pb.Promised))
    alone.hears("c", alone.stage.promised("c", 9))
    alone.ticks()
    assert alone.promised == 0, "one site may lie"
    alone.hears("b", alone.stage.promised("b", 0))
    came = alone.now
    alone.ticks()
    assert alone.promised == 1
    assert alone.now == came + TIMING.patience(0), "its patience begins when they have come"


def test_an_attempt_is_left_when_a_quorum_is_in_it_not_before() -> None:
    """Of five, of which one may lie, four decide: two others, one of them a liar, are too few."""
    alone = Alone(sites=5)
    alone.begins()
    for peer in "cd":
        alone.hears(peer, alone.stage.promised(peer, 0))
    alone.ticks()
    assert alone.promised == 0
    alone.hears("e", alone.stage.promised("e", 0))
    alone.ticks()
    assert alone.promised == 1


def test_orders_that_its_plan_does_not_have_hold_no_attempt_up() -> None:
    alone = Alone()
    alone.begins()
    lead, until = lead_of(0), alone.machine.next_wakeup()
    dripped: list[do.Body] = [
        pb.MaskingOrder(round=1, step=pb.KEYS),
        pb.Proof(round=1),
        pb.Openings(round=1),
        pb.Scale(round=1),
    ]
    for order in dripped:
        alone.hears(lead, order)
    assert alone.machine.next_wakeup() == until, "before there is a plan"
    alone.hears(lead, alone.everybody(0).message)
    until = alone.machine.next_wakeup()
    alone.now += 1.0
    for order in (dripped[0], dripped[2]):
        alone.hears(lead, order)
    assert alone.machine.next_wakeup() == until, "of masking, in a round that masks nothing"


def test_a_site_left_alone_by_its_manifest_stands_still_and_says_so() -> None:
    """Of two sites one is expelled: the other is a quorum by itself, and no federation."""
    world = World(sites=2, seed=1, faulty_sites=0, min_participants=2)
    world.train("a", rounds=3)
    world.run_until_committed(1)
    machine, sites = world.site("a"), world.manifest.sites
    left = replace(world.manifest, version=2, sites=(sites[0], replace(sites[1], enabled=False)))
    world.manifests[2] = left
    machine.step(do.ManifestChanged(left), world.now)
    said = [one.message for one in machine.wished if isinstance(one, do.Progress)]
    assert any(left.objection in message for message in said)
    assert machine.next_wakeup() == float("inf")


def test_a_vote_counts_as_a_promise_of_its_attempt() -> None:
    """It can be cast in a later attempt than was promised: below it nothing is signed any more."""
    alone = Alone()
    alone.begins()
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    late = alone.stage.lock(alone.stage.statement(attempt=2))
    alone.hears("d", proven(alone, late.message, attempt=2))
    (vote,) = sent(alone.takes(do.VersionHere(VERSION)), pb.Vote)
    assert vote.to == "d"
    assert alone.promised == 2
    assert not alone.state.HasField("promise"), "an older one is not repeated"
    assert alone.hears("b", alone.state_of(alone.stage.statement(bundle))) == []
    effects = alone.ticks()
    (promise, *_) = sent(effects, pb.Promised)
    told = pb.Promise.FromString(promise.body.promise.body)
    assert (told.attempt, told.lock) == (3, late.name), "and the next promise shows its lock"


def test_a_lock_of_the_few_sites_of_the_beginning_is_nobodys_lock() -> None:
    """One liar, and the key of a site that was expelled: a quorum of their list."""
    alone = Alone()
    founders, newer = manifest_of("bd", 0, 1), manifest_of("abcd", 1, 2)
    alone.world.manifests.update({1: founders, 2: newer})
    alone.takes(do.ManifestChanged(newer))
    alone.stage = Stage(manifest=newer)
    alone.begins()
    few = Stage(manifest=founders, training=plan(min_participants=2))
    forged = few.lock_of(few.statement(), version=b"EVIL" * 8, sites=["b"])
    with refused("goes by manifest 1, which is not known here"):
        alone.hears("b", proven(alone, forged, attempt=0))
    promised = alone.stage.promised("b", 1, lock=few.read_lock(forged))
    with refused("goes by manifest 1, which is not known here"):
        alone.hears("b", promised)
    assert alone.machine.durable.state.vote.ByteSize() == 0


# ---- in a whole federation ------------------------------------------------------------------


class Hoarding(World):
    """b signs the sum of its own attempt, tells nobody, and contributes to nobody's again."""

    def _send(self, sender: str, to: str, body: do.Body) -> None:
        leads = lead_of(getattr(body, "attempt", 0)) == "b"
        hoards = isinstance(body, pb.State) and leads and to != "b"
        if sender != "b" or not (hoards or (isinstance(body, pb.Contributed) and not leads)):
            super()._send(sender, to, body)


@pytest.mark.parametrize("mode", [pb.CKKS, pb.MASKING], ids=["ckks", "masking"])
def test_a_sum_that_a_liar_keeps_to_itself_costs_two_attempts(mode: pb.Mode.ValueType) -> None:
    """Its own one, and one in which the others see that it can't be made again."""
    world = Hoarding(sites=4, seed=3, min_participants=2, faulty_sites=1, mode=mode)
    world.watch.liars.add("b")
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt <= 3
