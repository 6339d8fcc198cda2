"""What one site makes of others that contradict themselves, and of its own state gone back.

The rest of what a liar may say to one site: tests/test_lying_coordinators.py.
"""

from __future__ import annotations

import pytest

from peers import effects as do
from peers.certificates import CertificateError
from peers.coordination import Coordination
from peers.errors import RemoteProtocolError
from peers.signing import Kind, name_of, sign
from peers.statement import Known
from proto import federation_pb2 as pb
from tests.good_messages import statement
from tests.one_machine import Alone, lead_of, sent
from tests.signed_rounds import Stage
from tests.simulation import TIMING, World
from tests.test_lying_coordinators import refused


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
    assert alone.machine._coordination is not None

    def refuses(_self: Coordination, _now: float) -> list[do.Effect]:
        raise RemoteProtocolError("b lies")

    monkeypatch.setattr(Coordination, "timeout", refuses)
    while alone.machine._coordination is not None and alone.promised == 3:
        alone.ticks()
    assert alone.now < 1_000


def test_an_attempt_that_was_ended_does_not_get_on() -> None:
    alone = Alone()
    alone.begins()
    ended = pb.Ended(federation_id="simulated", round=1, attempt=0, reason="x")
    by = sign(alone.stage.keys["b"], Kind.ENDED, ended)
    alone.hears("b", pb.EndedAttempt(ended=by))
    soon = alone.machine._pace.until
    assert soon - alone.now <= TIMING.retry(0)
    alone.hears("b", pb.Openings(round=1, attempt=0))
    assert alone.machine._pace.until == soon


def test_two_sites_of_which_one_was_restored_do_not_repeat_their_promises_for_ever() -> None:
    """It knows that it signed in attempt 2, and of its promises only an older one."""
    world = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
    stage = Stage(manifest=world.manifest)
    wish = pb.RunWish(run=stage.run)
    for site in "ad":
        for peer in set("abcd") - {site}:
            world.site(site).step(do.Received(peer, pb.Remembered(round=1)), 1.0)
        world.site(site).step(do.Received("b", wish), 1.0)
    known = Known.of(stage.statement_of(stage.bundle(attempt=2), 2))
    lost = pb.Remembered(round=1, statement=stage.signed_statement("a", known))
    world.site("a").step(do.Received("b", lost), 1.0)
    now = world.site("d").next_wakeup()
    waiting = [("d", e) for e in sent(world.site("d").step(do.Tick(), now), pb.Promised)]
    said = 0
    while waiting:
        sender, send = waiting.pop()
        said += 1
        assert said < 20
        if send.to in ("a", "d"):
            effects = world.site(send.to).step(do.Received(sender, send.body), now)
            waiting += [(send.to, e) for e in sent(effects, pb.Promised)]


def test_a_site_that_promises_two_things_is_accused_and_its_turns_are_passed_over() -> None:
    alone = Alone()
    alone.begins()
    alone.hears("c", alone.stage.promised("c", 1))
    effects = alone.hears("b", alone.stage.promised("c", 1, num_examples=7))
    (accused,) = [e for e in effects if isinstance(e, do.Accuse)]
    assert accused.evidence.first.site == "c"
    assert {send.to for send in sent(effects, pb.Evidence)} == {"b", "d"}
    assert not sent(alone.hears("d", accused.evidence), pb.Evidence), "told once"
    alone.ticks()
    assert alone.promised == 1
    began = alone.now
    alone.ticks()
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
    alone = Alone()
    alone.begins()
    mine = alone.stage.promised("a", 4, num_examples=1)
    stated_by_us = alone.stage.signed_statement("a", alone.stage.statement(attempt=4))
    question = statement(pb.QUESTION)
    question.round, question.attempt = 1, 4
    asked_by_us = alone.stage.signed_statement("a", Known.of(question))
    remembered = pb.Remembered(
        round=1, promise=mine.promise, statement=stated_by_us, question=asked_by_us
    )
    effects = alone.hears("b", remembered)
    assert alone.promised == 4
    assert alone.state.promise.promise == mine.promise
    assert list(alone.state.statements) == [stated_by_us, asked_by_us]
    assert do.WentBack(1, "b", "promised attempt 4") in effects
    bundle = alone.everybody(4)
    alone.hears(lead_of(4), bundle.message)
    other = Known.of(alone.stage.statement_of(bundle, 4, rejected=["x"]))
    with refused("b makes two statements in one attempt"):
        alone.hears("b", alone.state_of(other))


def test_nobody_is_told_what_it_has_not_signed() -> None:
    """A liar can't put a site forward by remembering for it."""
    alone = Alone()
    alone.begins()
    for field, theirs, told in (
        ("promise", alone.stage.promised("d", 9).promise, "remembers another's promise"),
        (
            "statement",
            alone.stage.signed_statement("d", alone.stage.statement(attempt=9)),
            "remembers another's statement",
        ),
    ):
        message = pb.Remembered(round=1)
        getattr(message, field).CopyFrom(theirs)
        with refused(f"d {told}"):
            alone.hears("d", message)
        getattr(message, field).site = "a"
        with pytest.raises(CertificateError):
            alone.hears("d", message)
    assert alone.promised == 0


def test_who_asks_is_told_the_last_that_it_has_signed() -> None:
    alone = Alone()
    alone.begins()
    early, late = alone.stage.promised("d", 1), alone.stage.promised("d", 3)
    for promised in (late, early):
        alone.hears("d", promised)
    (answer,) = sent(alone.hears("d", pb.Recall(round=1)), pb.Remembered)
    assert answer.body.promise == late.promise
    (other,) = sent(alone.hears("d", pb.Recall(round=2)), pb.Remembered)
    assert not other.body.HasField("promise")


def test_a_site_signs_nothing_before_it_has_asked_what_it_has_said() -> None:
    """One peer may lie, and one may have forgotten: it waits for a quorum, or a while."""
    world = World(sites=4, seed=1, faulty_sites=1)
    stage, machine = Stage(manifest=world.manifest), world.site("a")
    effects = machine.step(do.Received("b", pb.RunWish(run=stage.run)), 0.5)
    assert not sent(effects, pb.Promised)
    machine.step(do.Received("b", pb.Remembered(round=1)), 0.6)
    machine.step(do.Received("b", pb.Remembered(round=1)), 0.6)
    assert machine.durable.promised == -1
    machine.step(do.Received("c", pb.Remembered(round=1)), 0.7)
    machine.step(do.Tick(), machine.next_wakeup())
    assert machine.durable.promised == 0
    assert (
        name_of(stage.run)
        == pb.Promise.FromString(machine.durable.state.promise.promise.body).run_digest
    )
