"""What one site makes of others that contradict themselves, and of its own state gone back.

The rest of what a liar may say to one site: tests/peers/rounds/test_lying_coordinators.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.coordination import Coordination
from peers.attempts.statement import EncodedStatement, value_of
from peers.rounds.recall import GREETED_S
from peers.wire.certificates import CertificateError, sign_vote
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Kind, name_of, sign
from proto import federation_pb2 as pb
from tests.simulation.network import TIMING, World
from tests.support.good_messages import statement
from tests.support.one_machine import Alone, lead_of, refused, sent
from tests.support.signed_rounds import EXPONENTS, Stage


def test_nobody_is_accused_by_what_somebody_else_says_that_it_applied() -> None:
    alone = Alone()
    alone.begins()
    alone.at_attempt(3)  # its own turn
    for version in (b"x" * 32, b"y" * 32):
        told = pb.Applied(root_digest=b"r" * 32, model_digest=version, mean_loss=0.5)
        body = told.SerializeToString(deterministic=True)
        forged = pb.Signed(body=body, site="c", signature=b"junk", certificate=b"junk")
        with refused("d brings what another site applied"):
            alone.hears("d", pb.AppliedSum(round=1, attempt=3, applied=forged))
        with pytest.raises(CertificateError):
            alone.hears("c", pb.AppliedSum(round=1, attempt=3, applied=forged))
    assert not alone.machine.accused


def test_a_statement_that_another_site_signed_is_not_shown_as_ones_own() -> None:
    """In a bundle without that site, nobody could repeat it."""
    alone = Alone()
    alone.begins()
    known = alone.stage.statement()
    named = alone.stage.promised("b", 3, stated=known)
    named.stated.CopyFrom(alone.stage.signed_statement("d", known))
    with refused("b shows another's statement as its own"):
        alone.hears("b", named)


def test_what_its_own_attempt_refuses_at_a_deadline_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal that left the deadline in the past would be raised for ever."""
    alone = Alone()
    alone.begins()
    alone.at_attempt(3)
    assert alone.machine._here.coordination is not None

    def refuses(_self: Coordination, _now: float) -> list[do.Effect]:
        raise RemoteProtocolError("b lies")

    monkeypatch.setattr(Coordination, "timeout", refuses)
    while alone.machine._here.coordination is not None and alone.promised == 3:
        alone.ticks()
    assert alone.now < 1_000


def test_an_attempt_that_was_ended_does_not_get_on() -> None:
    alone = Alone()
    alone.begins()
    ended = pb.Ended(federation_id="simulated", round=1, attempt=0, reason="x")
    by = sign(alone.stage.keys["b"], Kind.ENDED, ended)
    alone.hears("b", pb.EndedAttempt(ended=by))
    soon = alone.machine._here.pace.until
    assert soon - alone.now <= TIMING.retry(0)
    alone.hears("b", pb.Openings(round=1, attempt=0))
    assert alone.machine._here.pace.until == soon


def test_two_sites_one_of_them_restored_do_not_repeat_promises_for_ever() -> None:
    """It knows that it signed in attempt 2, and of its promises only an older one."""
    world = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
    stage = Stage(manifest=world.manifest)
    wish = pb.RunWish(run=stage.run)
    for site in "ad":
        for peer in set("cd" if site == "a" else "abc"):
            world.site(site).step(do.MessageReceived(peer, pb.Remembered(round=1)), 1.0)
        world.site(site).step(do.MessageReceived("b", wish), 1.0)
        world.site(site).step(do.Tick(), 2.0)
    known = EncodedStatement.of(stage.statement_of(stage.bundle(attempt=2), 2))
    lost = pb.Remembered(round=1, statement=stage.signed_statement("a", known))
    world.site("a").step(do.MessageReceived("b", lost), 2.0)
    assert world.site("a").durable.promised == 2
    now = world.site("d").next_wakeup()
    waiting = [("d", e) for e in sent(world.site("d").step(do.Tick(), now), pb.Promised)]
    said = 0
    while waiting:
        sender, send = waiting.pop()
        said += 1
        assert said < 20
        if send.to in ("a", "d"):
            effects = world.site(send.to).step(do.MessageReceived(sender, send.body), now)
            waiting += [(send.to, e) for e in sent(effects, pb.Promised)]


def test_who_promises_two_things_is_accused_and_its_turns_are_passed_over() -> None:
    alone = Alone()
    alone.begins()
    alone.hears("d", alone.stage.promised("d", 0))
    alone.hears("c", alone.stage.promised("c", 1))
    effects = alone.hears("b", alone.stage.promised("c", 1, num_examples=7))
    (accused,) = [e for e in effects if isinstance(e, do.Accuse)]
    assert accused.evidence.first.site == "c"
    assert {send.to for send in sent(effects, pb.Evidence)} == {"b", "d"}
    assert not sent(alone.hears("d", accused.evidence), pb.Evidence), "told once"
    alone.ticks()
    assert alone.promised == 1
    began = alone.now
    alone.goes_on()
    assert (alone.promised, alone.now) == (2, began), "c is not waited for"


def test_evidence_that_shows_nothing_accuses_nobody() -> None:
    alone = Alone()
    alone.begins()
    once = alone.stage.promised("c", 1).promise
    with refused("c is accused of what does not contradict itself"):
        alone.hears("d", pb.Evidence(kind=pb.TWO_PROMISES, first=once, second=once))
    forged = pb.Signed()
    forged.CopyFrom(alone.stage.promised("d", 1, num_examples=7).promise)
    forged.site = "c"
    with pytest.raises(CertificateError):
        alone.hears("d", pb.Evidence(kind=pb.TWO_PROMISES, first=once, second=forged))
    assert not alone.machine.accused


def test_a_site_whose_disk_was_put_back_goes_on_behind_what_it_has_said() -> None:
    """Else it would say it again, otherwise: restored, it looks like a liar."""
    alone = Alone(unheard="b")
    alone.begins()
    mine = alone.stage.promised("a", 4, num_examples=1)
    stated_by_us = alone.stage.signed_statement("a", alone.stage.statement(attempt=4))
    question = statement(pb.QUESTION)
    question.round, question.attempt = 1, 4
    asked_by_us = alone.stage.signed_statement("a", EncodedStatement.of(question))
    remembered = pb.Remembered(round=1, promise=mine, statement=stated_by_us, question=asked_by_us)
    effects = alone.hears("b", remembered)
    assert alone.promised == 4
    assert alone.state.promise.promise == mine.promise
    assert list(alone.state.statements) == [stated_by_us, asked_by_us]
    assert do.WentBack(1, "b", "promised attempt 4") in effects
    bundle = alone.everybody(4)
    alone.hears(lead_of(4), bundle.message)
    other = EncodedStatement.of(alone.stage.statement_of(bundle, 4, rejected=["x"]))
    with refused("b makes two statements in one attempt"):
        alone.hears("b", alone.state_of(other))


def test_a_sum_of_an_earlier_attempt_is_remembered_behind_a_later_promise() -> None:
    """It may have been opened: the next promise names it."""
    alone = Alone(unheard="b")
    known = alone.stage.statement()
    promised = alone.stage.promised("a", 5, stated=known)
    signed = alone.stage.signed_statement("a", known)
    alone.hears("b", pb.Remembered(round=1, promise=promised, statement=signed))
    assert (alone.promised, alone.state.stated) == (5, signed)
    assert [one.attempt for one in alone.state.drawn] == [0]
    for peer in "cd":
        alone.hears(peer, alone.stage.promised(peer, 5))
    alone.begins()
    assert sent(alone.ticks(), pb.AttemptFailed), "nobody waits for its part"
    alone.ticks()
    said = pb.Promise.FromString(alone.state.promise.promise.body)
    assert said.attempt > 5
    assert said.stated.digest == known.digest


def test_a_lock_that_a_peer_shows_is_in_the_next_promise() -> None:
    alone = Alone(unheard="b")
    lock = alone.stage.lock()
    promised = alone.stage.promised("a", 5, lock=lock)
    alone.hears("b", pb.Remembered(round=1, promise=promised))
    for peer in "cd":
        alone.hears(peer, alone.stage.promised(peer, 5))
    alone.begins()
    assert sent(alone.ticks(), pb.AttemptFailed), "nobody waits for its part"
    alone.ticks()
    said = pb.Promise.FromString(alone.state.promise.promise.body)
    assert said.attempt > 5
    assert said.lock == lock.name


def test_a_promise_is_remembered_with_the_lock_and_the_sum_that_it_names() -> None:
    """Hidden in the next promise, another version could be committed beside the first."""
    asked = Alone()
    asked.begins()
    known, lock = asked.stage.statement(), asked.stage.lock()
    promised = asked.stage.promised("d", 5, lock=lock, stated=known)
    for late in (promised, asked.stage.promised("d", 4)):
        asked.hears("d", late)
    (answer,) = sent(asked.hears("d", pb.Recall(round=1)), pb.Remembered)
    assert answer.body.promise == promised
    alone = Alone(unheard="d")
    ours = alone.stage.promised("a", 5, lock=lock, stated=known)
    alone.hears("d", pb.Remembered(round=1, promise=ours))
    assert alone.state.lock == lock.message
    assert alone.state.stated == alone.stage.signed_statement("a", known)


def test_a_lock_behind_the_one_that_it_has_named_binds_a_site() -> None:
    alone = Alone(unheard="d")
    named = alone.stage.lock()
    later = alone.stage.lock(alone.stage.statement(attempt=3))
    ours = pb.Promised(promise=alone.stage.promised("a", 5, lock=named).promise)
    alone.hears("d", pb.Remembered(round=1, promise=ours, lock=later.message))
    assert alone.state.lock == later.message


def test_who_has_promised_what_nobody_shows_stands_still_and_asks_again() -> None:
    """As long as it does not know what binds it, what it promises next could hide that."""
    alone = Alone(unheard="cd")
    lock = alone.stage.lock()
    whole = alone.stage.promised("a", 5, lock=lock)
    bare = pb.Promised(promise=whole.promise)
    alone.hears("d", pb.Remembered(round=1, promise=bare))
    alone.begins()
    effects = [effect for _ in range(4) for effect in alone.ticks()]
    assert not sent(effects, pb.Promised)
    assert alone.promised == 5
    assert any("stands still" in e.message for e in effects if isinstance(e, do.Progress))
    assert {send.to for send in sent(effects, pb.Recall)} == set("bcd")
    for peer in "bd":
        alone.hears(peer, pb.Remembered(round=1))
    for _ in range(2):
        assert not sent(alone.ticks(), pb.Promised)
    alone.hears("c", pb.Remembered(round=1, promise=whole))
    for peer in "bd":
        alone.hears(peer, alone.stage.promised(peer, 5))
    while alone.promised == 5:
        alone.ticks()
    assert alone.promised == 6
    assert pb.Promise.FromString(alone.state.promise.promise.body).lock == lock.name


def test_a_peer_is_believed_once_about_what_a_site_has_said() -> None:
    """Told again and again what it had its people forget, a site would never be rid of it."""
    alone = Alone()
    alone.hears("b", pb.Remembered(round=1, promise=alone.stage.promised("a", 7)))
    assert alone.promised == -1


def test_what_can_not_be_read_keeps_nothing_else_away() -> None:
    """Of a manifest that its state, put back, does not have: the lock is not taken."""
    alone = Alone(unheard="d")
    statement = alone.stage.statement_of()
    statement.manifest_version = 9
    lock = alone.stage.lock_of(EncodedStatement.of(statement))
    ours = alone.stage.promised("a", 7)
    with refused("manifest 9, which is not known here"):
        alone.hears("d", pb.Remembered(round=1, promise=ours, lock=lock))
    assert alone.promised == 7


def test_a_site_that_was_started_in_an_attempt_signs_nothing_in_it() -> None:
    """It may have signed another sum there, which its disk, put back, does not tell."""
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    bundle = alone.everybody(0)
    known = alone.stage.statement(bundle)
    alone.restarts()
    alone.hears("b", bundle.message)
    effects = alone.hears("b", alone.state_of(known))
    assert not sent(effects, pb.Stated)
    assert any("signs nothing in it" in e.message for e in effects if isinstance(e, do.Progress))


def test_what_goes_by_a_promise_of_before_its_start_a_site_does_not_sign() -> None:
    """Its disk was put back, nobody remembers, and it promises the same attempt once more."""
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    before = alone.machine.durable
    alone.begins()
    bundle = alone.everybody(0)
    alone.world.disks["a"].durable = before
    alone.restarts()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    assert alone.promised == 0
    (answer,) = sent(alone.hears("b", bundle.message), pb.PlanAnswer)
    assert not answer.body.accepted
    assert not sent(alone.hears("b", alone.state_of(alone.stage.statement(bundle))), pb.Stated)


def test_of_its_starts_a_promise_may_tell_and_nothing_else() -> None:
    """A site that was put back promises again what it has promised: that accuses nobody."""
    alone = Alone()
    alone.begins()
    for incarnation in (b"1" * 16, b"2" * 16):
        alone.hears("d", alone.stage.promised("d", 1, incarnation=incarnation))
    assert not alone.machine.accused
    alone.hears("d", alone.stage.promised("d", 1, num_examples=7))
    assert alone.machine.accused == {"d"}


def test_a_sum_in_a_promise_is_held_against_what_its_site_has_signed() -> None:
    alone = Alone()
    alone.begins()
    one, other = (alone.stage.statement_of(sites=sites) for sites in ("abcd", "bcd"))
    for attempt, known in ((1, EncodedStatement.of(one)), (2, EncodedStatement.of(other))):
        alone.hears("d", alone.stage.promised("d", attempt, stated=known))
    assert alone.machine.accused == {"d"}


def test_a_vote_is_remembered_with_the_lock_that_it_was_cast_for() -> None:
    """Hidden in the next promise, what it was cast for could be overruled."""
    alone = Alone(unheard="d")
    lock = alone.stage.lock()
    vote = sign_vote(alone.stage.keys["a"].sign, value_of(lock, alone.stage.manifest), 0)
    effects = alone.hears("d", pb.Remembered(round=1, vote=vote, lock=lock.message))
    assert (alone.state.vote, alone.state.lock) == (vote, lock.message)
    assert do.WentBack(1, "d", "voted in attempt 0") in effects


def test_a_vote_without_its_lock_is_not_cast_again() -> None:
    alone = Alone(unheard="d")
    lock = alone.stage.lock()
    vote = sign_vote(alone.stage.keys["a"].sign, value_of(lock, alone.stage.manifest), 3)
    alone.hears("d", pb.Remembered(round=1, vote=vote, lock=lock.message))
    assert (alone.state.vote, alone.promised) == (vote, 3)
    assert not alone.machine._recall.owes(alone.state)


def test_a_vote_with_an_unreadable_lock_is_not_cast_but_asked_for_again() -> None:
    """Its state, put back, lacks the manifest that came with what it has voted for.

    A liar may show anything for a lock: what it shows is not owed before it can be read.
    """
    alone = Alone(unheard="d")
    statement = alone.stage.statement_of(attempt=5)
    statement.manifest_version = 9
    unknown = alone.stage.lock_of(EncodedStatement.of(statement))
    value = value_of(alone.stage.lock(), alone.stage.manifest)
    vote = sign_vote(alone.stage.keys["a"].sign, value, 5)
    with refused("manifest 9, which is not known here"):
        alone.hears("d", pb.Remembered(round=1, vote=vote, lock=unknown))
    assert (alone.state.vote, alone.promised) == (vote, 5)
    assert not alone.machine._recall.owes(alone.state)
    newer = replace(alone.stage.manifest, version=2)
    effects = alone.takes(do.ManifestChanged(newer))
    assert {send.to for send in sent(effects, pb.Recall)} == set("bcd"), "it may be read now"


def test_a_promise_whose_lock_can_not_be_read_binds_a_site_all_the_same() -> None:
    alone = Alone(unheard="d")
    statement = alone.stage.statement_of(attempt=5)
    statement.manifest_version = 9
    unknown = alone.stage.lock_of(EncodedStatement.of(statement))
    ours = alone.stage.promised("a", 6, lock=alone.stage.lock(alone.stage.statement(attempt=5)))
    ours.lock.CopyFrom(unknown)
    with refused("manifest 9, which is not known here"):
        alone.hears("d", pb.Remembered(round=1, promise=ours))
    assert alone.promised == 6
    alone.begins()
    early = alone.stage.lock(alone.stage.statement(attempt=1))
    alone.hears("c", pb.Proven(round=1, attempt=1, lock=early.message))
    assert not sent(alone.takes(do.VersionHere(early.applied.model_digest)), pb.Vote)
    for _ in range(4):
        assert not sent(alone.ticks(), pb.Promised)


def test_what_an_old_promise_has_named_is_not_hidden_by_a_newer_one() -> None:
    """Told late, behind a promise of this start: of the same attempt, or of an earlier one."""
    for attempt in (1, 0):
        alone = Alone(unheard="cd")
        lock = alone.stage.lock()
        alone.begins()
        alone.ticks()
        alone.goes_on()
        ours = alone.state.promise
        old = alone.stage.promised("a", attempt, lock=lock if attempt else None)
        bare = pb.Promised(promise=old.promise)
        alone.hears("d", pb.Remembered(round=1, promise=bare))
        alone.hears("c", pb.Remembered(round=1, promise=ours))
        assert alone.machine._recall.owes(alone.state) == bool(attempt)


def test_a_site_states_nothing_in_an_attempt_that_it_is_told_it_was_in() -> None:
    """Also where it has promised that attempt once more, before anybody told it."""
    alone = Alone(unheard="d")
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    bundle = alone.everybody(0)
    alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 0)))
    answers = sent(alone.hears("b", bundle.message), pb.PlanAnswer)
    assert not any(one.body.accepted for one in answers)
    known = alone.stage.statement(bundle)
    assert not sent(alone.hears("b", alone.state_of(known)), pb.Stated)


def test_a_site_restates_nothing_where_it_is_told_late_that_it_was() -> None:
    """It may have signed a sum there, and forgotten it."""
    for told in (False, True):
        alone = Alone(unheard="d")
        alone.begins()
        alone.at_attempt(1)
        lock = alone.stage.lock()
        bundle = alone.everybody(1, lock=lock)
        if told:
            alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 1)))
        alone.hears("c", bundle.message)
        effects = alone.hears("c", alone.state_of(alone.stage.restated(lock, bundle, 1)))
        assert bool(sent(effects, pb.Stated)) == (not told)


def test_integers_of_before_a_start_are_stated_by_who_knows_it_stated_them() -> None:
    """Of two sums of one draw the difference is what one of them is without."""
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    alone.at_attempt(5)
    assert alone.machine._recall.since == 0
    alone.restarts()
    alone.at_attempt(6)
    assert alone.machine._recall.since == 6
    first = alone.stage.statement(attempt=5)
    again = alone.everybody(6, stated=first)
    alone.hears("d", again.message)
    if again.repeated is None:
        raise LookupError("nothing is made again")
    known = EncodedStatement.of(alone.stage.statement_of(again, 6))
    with refused("states integers of before this site's start again"):
        alone.hears("d", alone.state_of(known))


def test_a_refused_answer_is_believed_no_second_time() -> None:
    alone = Alone(unheard="d")
    other = alone.stage.statement_of()
    other.round = other.plan.round = 7
    lock = alone.stage.lock_of(EncodedStatement.of(other))
    with refused("d shows another round's lock"):
        alone.hears("d", pb.Remembered(round=1, lock=lock))
    alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 7)))
    assert alone.promised == -1
    assert not sent(alone.hears("d", pb.Recall(round=1)), pb.Recall)


def test_who_lands_in_another_round_asks_again_what_it_has_said_there() -> None:
    """Its state may be of any round: until one is committed with its vote it can't know."""
    world = World(sites=4, seed=1, faulty_sites=1)
    world.train("a", rounds=3)
    world.run_until_committed(1)
    world.crash("a")
    world.run_until_committed(2)
    world.start("a")
    world.run_until_committed(3)
    asked = [line for line in world.transcript if " a -> b: Recall" in line]
    assert {line.rsplit(" ", 1)[1].split(".")[0] for line in asked} >= {"1", "2", "3"}


def test_a_coordinator_remembers_a_vote_with_a_lock_it_has_not_voted_for() -> None:
    alone = Alone()
    alone.begins()
    lock = alone.stage.lock()
    alone.hears("b", pb.Proven(round=1, attempt=0, lock=lock.message))
    (answer,) = sent(alone.hears("d", pb.Recall(round=1)), pb.Remembered)
    assert answer.body.lock == lock.message
    assert not alone.state.HasField("lock")


def test_a_lock_of_another_round_is_not_taken() -> None:
    alone = Alone(unheard="b")
    other = alone.stage.statement_of()
    other.round = other.plan.round = 7
    lock = alone.stage.lock_of(EncodedStatement.of(other))
    with refused("b shows another round's lock"):
        alone.hears("b", pb.Remembered(round=1, lock=lock))


def test_before_it_knows_what_it_has_said_a_site_takes_no_part() -> None:
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    bundle = alone.everybody(0)
    alone.world.crash("a")
    alone.world.start("a")
    assert not sent(alone.hears("b", bundle.message), pb.PlanAnswer)
    assert not sent(alone.takes(do.LocalTrained(1, 0, EXPONENTS)), pb.Trained)


def test_nobody_is_told_what_it_has_not_signed() -> None:
    """A liar can't put a site forward by remembering for it."""
    stage = Alone().stage
    for field, theirs, told in (
        ("promise", stage.promised("d", 9), "remembers another's promise"),
        (
            "statement",
            stage.signed_statement("d", stage.statement(attempt=9)),
            "remembers another's statement",
        ),
    ):
        message = pb.Remembered(round=1)
        getattr(message, field).CopyFrom(theirs)
        honest, forged = Alone(unheard="d"), Alone(unheard="d")
        with refused(f"d {told}"):
            honest.hears("d", message)
        theirs_no_more = getattr(message, field)
        (theirs_no_more.promise if field == "promise" else theirs_no_more).site = "a"
        with pytest.raises(CertificateError):
            forged.hears("d", message)
        assert honest.promised == forged.promised == -1


def test_who_asks_is_told_the_last_that_it_has_signed() -> None:
    alone = Alone()
    alone.begins()
    early, late = alone.stage.promised("d", 1), alone.stage.promised("d", 3)
    for promised in (late, early):
        alone.hears("d", promised)
    (answer,) = sent(alone.hears("d", pb.Recall(round=1)), pb.Remembered)
    assert answer.body.promise == late
    (other,) = sent(alone.hears("d", pb.Recall(round=2)), pb.Remembered)
    assert not other.body.HasField("promise")


def test_a_site_signs_nothing_before_it_has_asked_what_it_has_said() -> None:
    """One peer may lie, and one may have forgotten: it waits for a quorum, or a while.

    No longer: who coordinates the attempt waits for it a moment, no more.
    """
    world = World(sites=4, seed=1, faulty_sites=1)
    stage, machine = Stage(manifest=world.manifest), world.site("a")
    effects = machine.step(do.MessageReceived("b", pb.RunWish(run=stage.run)), 0.5)
    assert not sent(effects, pb.Promised)
    machine.step(do.MessageReceived("b", pb.Remembered(round=1)), 0.6)
    machine.step(do.MessageReceived("b", pb.Remembered(round=1)), 0.6)
    machine.step(do.Tick(), machine._here.pace.until)
    assert machine.durable.promised == -1
    told = machine._here.now
    machine.step(do.MessageReceived("c", pb.Remembered(round=1)), told)
    waits = machine.next_wakeup() - told
    assert 0 < waits <= max(GREETED_S, machine._here.timing.straggler(0) / 2), (
        "d may have more to tell; not for long"
    )
    machine.step(do.MessageReceived("d", pb.Remembered(round=1)), told)
    assert machine.next_wakeup() == told
    machine.step(do.Tick(), told)
    assert machine.durable.promised == 0
    assert (
        name_of(stage.run)
        == pb.Promise.FromString(machine.durable.state.promise.promise.body).run_digest
    )
