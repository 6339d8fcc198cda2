"""What a site takes back of what it has signed, as its peers tell it, and what it tells them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.statement import EncodedStatement, HeldLock, value_of
from peers.rounds.recall import GREETED_S
from peers.wire.certificates import CertificateError, sign_vote
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest, ManifestSite
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, TIMING, World
from tests.support.one_machine import Alone, lead_of, refused, sent
from tests.support.signed_rounds import Stage


def restated(stage: Stage, lock: HeldLock, attempt: int) -> HeldLock:
    """The same version, certified once more in a later attempt."""
    promises = [stage.promised(site, attempt, lock=lock) for site in "abcd"]
    again = stage.restated(lock, stage.bundle(promises, attempt), attempt)
    shown = pb.Lock(certificate=stage.certified(again), root=lock.root.raw)
    shown.proof.extend(lock.message.proof)
    return stage.read_lock(shown)


def bare(promised: pb.Promised) -> pb.Promised:
    """As a bundle shows it: without what it names."""
    return pb.Promised(promise=promised.promise)


def test_who_has_named_a_sum_that_nobody_shows_stands_still() -> None:
    alone = Alone(unheard="cd")
    named = alone.stage.promised("a", 5, stated=alone.stage.statement())
    alone.hears("d", pb.Remembered(round=1, promise=bare(named)))
    alone.begins()
    for _ in range(4):
        assert not sent(alone.ticks(), pb.Promised)
    assert alone.promised == 5


def test_who_is_alone_and_owes_what_it_has_named_asks_and_shows_nothing() -> None:
    alone = Alone(unheard="d")
    alone.begins()
    while alone.promised < 2:
        alone.goes_on()
    named = alone.stage.promised("a", 1, lock=alone.stage.lock())
    alone.hears("d", pb.Remembered(round=1, promise=bare(named)))
    effects = alone.ticks()
    assert sent(effects, pb.Recall)
    assert not sent(effects, pb.Promised)


def test_what_is_owed_stays_owed_whatever_else_is_told() -> None:
    alone = Alone(unheard="cd")
    named = alone.stage.promised("a", 5, lock=alone.stage.lock())
    alone.hears("d", pb.Remembered(round=1, promise=bare(named)))
    later = alone.stage.signed_statement("a", alone.stage.statement(attempt=7))
    alone.hears("c", pb.Remembered(round=1, statement=later))
    assert alone.promised == 7
    alone.begins()
    assert not sent(alone.ticks(), pb.Promised)


def test_of_two_locks_that_it_is_told_the_later_one_stays() -> None:
    alone = Alone(unheard="cd")
    low = alone.stage.lock()
    high = restated(alone.stage, low, 3)
    first = alone.stage.promised("a", 5, lock=high)
    second = alone.stage.promised("a", 6, lock=low)
    alone.hears("d", pb.Remembered(round=1, promise=first))
    alone.hears("c", pb.Remembered(round=1, promise=second))
    assert alone.state.lock == high.message


def test_a_lock_that_it_has_not_named_is_not_taken() -> None:
    alone = Alone(unheard="d")
    alone.hears("d", pb.Remembered(round=1, lock=alone.stage.lock().message))
    assert not alone.state.HasField("lock")


def test_an_older_vote_does_not_take_the_place_of_a_later_one() -> None:
    alone = Alone(unheard="cd")
    low = alone.stage.lock()
    high = restated(alone.stage, low, 3).message
    value, keys = value_of(low, alone.stage.manifest), alone.stage.keys["a"]
    for peer, attempt in (("d", 3), ("c", 0)):
        vote = sign_vote(keys.sign, value, attempt)
        alone.hears(peer, pb.Remembered(round=1, vote=vote, lock=high))
    assert alone.state.vote.attempt == 3


def test_another_promise_of_the_same_attempt_is_said_to_people() -> None:
    alone = Alone(unheard="d")
    alone.begins()
    other = alone.stage.promised("a", 0, num_examples=1)
    effects = alone.hears("d", pb.Remembered(round=1, promise=other))
    assert any(isinstance(one, do.WentBack) for one in effects)


def test_a_site_that_is_told_of_a_later_attempt_leaves_its_own() -> None:
    alone = Alone(unheard="d")
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    alone.hears("b", alone.everybody(0).message)
    alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 3)))
    assert not sent(alone.takes(do.LocalTrained(1, 3, (1, 2))), pb.Trained)


def test_the_manifest_that_it_has_first_promised_by_comes_back() -> None:
    alone = Alone(unheard="d")
    alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 0)))
    assert alone.state.began == 1


def test_a_promise_that_is_told_is_repeated_whole_or_not_at_all() -> None:
    """Without what it names its peers would refuse it."""
    for shown in (True, False):
        alone = Alone(unheard="d")
        lock = alone.stage.lock()
        answer = pb.Remembered(round=1, promise=bare(alone.stage.promised("a", 5, lock=lock)))
        if shown:
            answer.lock.CopyFrom(lock.message)
        alone.hears("d", answer)
        assert alone.promised == 5
        assert alone.state.HasField("promise") == shown
        if shown:
            assert alone.state.promise.lock == lock.message


def test_a_promise_whose_sum_nobody_shows_is_not_repeated_either() -> None:
    for shown in (True, False):
        alone = Alone(unheard="d")
        known = alone.stage.statement()
        answer = pb.Remembered(round=1, promise=bare(alone.stage.promised("a", 5, stated=known)))
        if shown:
            answer.statement.CopyFrom(alone.stage.signed_statement("a", known))
        alone.hears("d", answer)
        assert alone.state.HasField("promise") == shown


def test_one_answer_less_than_a_quorum_is_waited_for_a_phase() -> None:
    """Of four, of which one may lie: of two that have answered one is honest, of one none."""
    alone = Alone(unheard="bcd")
    whole = alone.machine._recall.until
    assert whole >= TIMING.phase(0)
    alone.hears("b", pb.Remembered(round=1))
    assert alone.machine._recall.until == whole
    alone.hears("c", pb.Remembered(round=1))
    assert alone.machine._recall.until == alone.now + max(GREETED_S, TIMING.straggler(0) / 2)


def test_who_asks_what_it_has_said_takes_no_proof() -> None:
    """It may have voted for another one in the same attempt."""
    alone = Alone(unheard="cd")
    proven = pb.Proven(round=1, attempt=0, lock=alone.stage.lock().message)
    assert alone.hears("b", proven) == []
    for peer in "cd":
        alone.hears(peer, pb.Remembered(round=1))
    assert any(isinstance(one, do.FetchVersion) for one in alone.hears("b", proven))


def test_a_proof_by_quorums_of_another_manifest_is_not_voted_for() -> None:
    alone = Alone()
    first = alone.stage.manifest
    newer = FederationManifest(first.federation_id, 2, first.sites, first.tolerated)
    alone.world.manifests[2] = newer
    alone.takes(do.ManifestChanged(newer))
    proven = pb.Proven(round=1, attempt=0, lock=alone.stage.lock().message)
    assert alone.hears("b", proven) == []


def test_a_peer_tells_the_lock_of_the_bundle_that_it_is_in() -> None:
    asked = Alone()
    asked.begins()
    asked.at_attempt(2)
    lock = asked.stage.lock()
    others = [asked.stage.promised(site, 2, lock=lock) for site in "bcd"]
    asked.hears("d", asked.stage.bundle([asked.state.promise, *others], 2).message)
    (answer,) = sent(asked.hears("c", pb.Recall(round=1)), pb.Remembered)
    assert lock.message in (answer.body.lock, answer.body.promise.lock)


def test_a_peer_tells_what_an_earlier_promise_has_shown() -> None:
    """The latest one, of a bundle, is bare; a sum was stated again since."""
    asked = Alone()
    asked.begins()
    known = asked.stage.statement(attempt=2)
    later = asked.stage.lock(known)
    asked.hears("d", asked.stage.promised("d", 4, lock=later, stated=known))
    again = restated(asked.stage, later, 4).latest
    asked.machine._here.note(pb.TWO_STATEMENTS, asked.stage.signed_statement("d", again))
    newest = asked.stage.promised("d", 5, lock=later, stated=known)
    asked.machine._here.note(pb.TWO_PROMISES, newest.promise)
    (answer,) = sent(asked.hears("d", pb.Recall(round=1)), pb.Remembered)
    assert answer.body.promise.promise == newest.promise
    assert answer.body.promise.stated == asked.stage.signed_statement("d", known)
    assert answer.body.lock == later.message
    assert EncodedStatement.parse(answer.body.statement.body).message.kind == pb.RESTATED


def test_a_peer_that_has_not_answered_is_asked_back() -> None:
    alone = Alone(unheard="d")
    assert sent(alone.hears("d", pb.Recall(round=1)), pb.Recall)
    alone.hears("d", pb.Remembered(round=1))
    assert not sent(alone.hears("d", pb.Recall(round=1)), pb.Recall)


def test_an_attempt_that_ends_while_a_site_asks_is_not_gone_back_to() -> None:
    alone = Alone()
    alone.begins()
    alone.world.crash("a")
    alone.world.start("a")
    told = pb.Ended(federation_id=FEDERATION, round=1, attempt=0, reason="enough")
    ended = sign(alone.stage.keys["b"], Kind.ENDED, told)
    alone.hears("b", pb.EndedAttempt(ended=ended))
    for peer in "bcd":
        alone.hears(peer, pb.Remembered(round=1))
    effects = alone.goes_on()
    assert not sent(effects, pb.AttemptFailed)
    assert alone.promised == 1


def test_a_question_that_it_has_signed_is_not_taken_for_a_sum() -> None:
    """Its next promise would name a sum that nobody has stated."""
    alone = Alone(unheard="d")
    question = EncodedStatement.of(alone.stage.statement_of(kind=pb.QUESTION))
    told = alone.stage.signed_statement("a", question)
    alone.hears("d", pb.Remembered(round=1, question=told))
    assert list(alone.state.statements) == [told]
    assert not alone.state.HasField("stated")


def test_a_site_that_enough_say_is_behind_waits_for_their_round() -> None:
    """One of them is honest; one alone may lie, and is not waited for."""
    for ahead in ("d", "cd"):
        alone = Alone(unheard="bcd")
        for peer in ahead:
            assert alone.hears(peer, pb.Remembered(round=2)) == [do.FetchCertificates(peer, 0)]
        alone.begins()
        asked = sent(alone.ticks(), pb.Recall)
        assert bool(asked) == (ahead == "cd")
        assert alone.promised == (-1 if asked else 0)


def test_what_it_has_made_of_a_sum_a_site_votes_for_and_nothing_else() -> None:
    alone = Alone()
    alone.begins()
    lock = alone.stage.lock()
    other = alone.stage.lock(version=bytes(32)).applied
    state = pb.RoundState()
    state.CopyFrom(alone.state)
    state.applied.append(other)
    alone.machine._here.durable = replace(alone.machine.durable, state=state)
    alone.hears("b", pb.Proven(round=1, attempt=0, lock=lock.message))
    with refused("proves another version of a sum than this site has made of it"):
        alone.takes(do.VersionHere(lock.applied.model_digest))
    assert not alone.state.HasField("vote")


def ahead_of_an_answer() -> tuple[Alone, EncodedStatement]:
    """In attempt 4, of which it has the bundle, before c answers; the sum of that attempt."""
    alone = Alone(unheard="c")
    alone.begins()
    alone.at_attempt(4)
    bundle = alone.everybody(4)
    alone.hears(lead_of(4), bundle.message)
    return alone, EncodedStatement.of(alone.stage.statement_of(bundle, 4))


def test_a_sum_that_it_is_told_late_of_ends_its_part_as_well() -> None:
    """Its promise of the attempt under way does not name it: it could be drawn anew."""
    alone, known = ahead_of_an_answer()
    old = alone.stage.promised("a", 3, stated=alone.stage.statement(attempt=1))
    alone.hears("c", pb.Remembered(round=1, promise=old))
    assert not sent(alone.hears(lead_of(4), alone.state_of(known)), pb.Stated)
    assert alone.promised == 5


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "bare"])
def test_a_promise_told_late_ends_its_part_in_the_attempt_that_hides_it(
    shown: bool,
) -> None:
    """It has gone on by then, and promised without the lock: it states and votes for nothing."""
    alone, known = ahead_of_an_answer()
    lock = alone.stage.lock(alone.stage.statement(attempt=1))
    old = alone.stage.promised("a", 3, lock=lock)
    effects = alone.hears("c", pb.Remembered(round=1, promise=old if shown else bare(old)))
    assert any(isinstance(one, do.WentBack) for one in effects)
    assert not sent(alone.hears(lead_of(4), alone.state_of(known)), pb.Stated)
    other = alone.stage.lock(known)
    alone.hears(lead_of(4), pb.Proven(round=1, attempt=4, lock=other.message))
    assert not sent(alone.takes(do.VersionHere(other.applied.model_digest)), pb.Vote)
    assert alone.machine._recall.owes(alone.state) == (not shown)


@pytest.mark.parametrize("certified", [1, 3])
@pytest.mark.parametrize(
    "told", ["a vote", "a promise and a vote", "another promise", "a question"]
)
def test_whatever_it_is_told_late_it_votes_for_nothing_that_hides_a_lock(
    told: str, certified: int
) -> None:
    alone, known = ahead_of_an_answer()
    lock = alone.stage.lock(alone.stage.statement(attempt=certified))
    signs = alone.stage.keys["a"].sign
    answer = pb.Remembered(round=1, lock=lock.message)
    if "vote" in told:
        answer.vote.CopyFrom(sign_vote(signs, value_of(lock, alone.stage.manifest), certified))
    if "another" in told:
        answer.promise.CopyFrom(alone.stage.promised("a", 4, lock=lock))
    elif "promise" in told or "question" in told:
        answer.promise.CopyFrom(alone.stage.promised("a", certified + 1, lock=lock))
    if "question" in told:
        asked = EncodedStatement.of(alone.stage.statement_of(attempt=4, kind=pb.QUESTION))
        answer.question.CopyFrom(alone.stage.signed_statement("a", asked))
    alone.machine._here.part = None
    assert sent(alone.hears(lead_of(4), alone.state_of(known)), pb.Stated)
    alone.hears("c", answer)
    other = alone.stage.lock(known)
    alone.hears(lead_of(4), pb.Proven(round=1, attempt=4, lock=other.message))
    assert not sent(alone.takes(do.VersionHere(other.applied.model_digest)), pb.Vote)


def test_a_lock_of_another_round_is_not_owed() -> None:
    """True, and over long ago: shown beside our vote it would never be found again."""
    alone = Alone(unheard="d")
    vote = sign_vote(
        alone.stage.keys["a"].sign, value_of(alone.stage.lock(), alone.stage.manifest), 0
    )
    statement = alone.stage.statement_of(attempt=0)
    statement.round = statement.plan.round = 9
    of_another = alone.stage.lock(EncodedStatement.of(statement)).message
    with refused("shows another round's lock"):
        alone.hears("d", pb.Remembered(round=1, vote=vote, lock=of_another))
    assert alone.state.vote == vote
    assert not alone.machine._recall.owes(alone.state)


@pytest.mark.parametrize("told", ["vote", "promise"])
def test_who_has_signed_under_a_manifest_it_lacks_promises_nothing_yet(
    told: str,
) -> None:
    """Its next promise, by an older one, would hide the lock that it can't read yet."""
    alone = Alone(unheard="d")
    newer = replace(alone.stage.manifest, version=2)
    stage = Stage(manifest=newer)
    lock = stage.lock(stage.statement(attempt=1))
    vote = sign_vote(stage.keys["a"].sign, value_of(lock, newer), 1)
    answer = pb.Remembered(round=1, vote=vote, lock=lock.message)
    if told == "promise":
        answer = pb.Remembered(round=1, promise=stage.promised("a", 2, lock=lock))
    with refused("manifest 2, which is not known here"):
        alone.hears("d", answer)
    alone.begins()
    for _ in range(4):
        assert not sent(alone.goes_on(), pb.Promised)
    said = [one.message for one in alone.machine.wished if isinstance(one, do.Progress)]
    assert any("went back behind manifest 2" in message for message in said)
    alone.world.manifests[2] = newer
    alone.takes(do.ManifestChanged(newer))
    assert alone.state.lock == lock.message, "read as soon as it can be, whoever is there to ask"
    assert not alone.machine._recall.owes(alone.state)


def lacking_manifest(version: int = 2) -> tuple[Alone, FederationManifest, HeldLock]:
    """d has told a that it has voted for this lock, under a manifest that a does not have."""
    alone = Alone(unheard="d")
    newer = replace(alone.stage.manifest, version=version)
    stage = Stage(manifest=newer)
    lock = stage.lock()
    vote = sign_vote(stage.keys["a"].sign, value_of(lock, newer), 0)
    with refused(f"manifest {version}, which is not known here"):
        alone.hears("d", pb.Remembered(round=1, vote=vote, lock=lock.message))
    return alone, newer, lock


@pytest.mark.parametrize("here", [False, True], ids=["without it", "with it"])
def test_what_could_not_be_read_is_kept_over_a_restart(here: bool) -> None:
    """People install a manifest and start the daemon: nobody may be there to ask again."""
    alone, newer, lock = lacking_manifest()
    if here:
        alone.world.manifests[2] = alone.world.installed["a"] = newer
    alone.restarts()
    assert (alone.state.lock == lock.message) == here
    assert alone.machine._recall.owes(alone.state) != here
    alone.begins()
    for _ in range(4):
        assert here or not sent(alone.goes_on(), pb.Promised)
    alone.world.manifests[2] = newer
    alone.takes(do.ManifestChanged(newer))
    assert alone.state.lock == lock.message, "whatever d, restarted too, does not know any more"


def test_the_manifest_behind_one_that_is_missing_does_not_make_up_for_it() -> None:
    """What was signed under the one in between can't be read by a newer one either."""
    alone, _, lock = lacking_manifest()
    newest = replace(alone.stage.manifest, version=3)
    alone.world.manifests[3] = newest
    alone.takes(do.ManifestChanged(newest))
    assert alone.state.lock != lock.message
    alone.begins()
    for _ in range(4):
        assert not sent(alone.goes_on(), pb.Promised)


def test_what_a_missing_manifest_signed_is_kept_behind_a_newer_promise() -> None:
    """Which it is told first, and by which it would take the older one to be left behind."""
    alone = Alone(unheard="cd")
    first = alone.stage.manifest
    second, third = replace(first, version=2), replace(first, version=3)
    alone.world.manifests[3] = alone.world.installed["a"] = third
    alone.takes(do.ManifestChanged(third))
    stages = [Stage(manifest=one) for one in (second, third)]
    lock = stages[0].lock()
    vote = sign_vote(stages[0].keys["a"].sign, value_of(lock, second), 0)
    promised = stages[1].promised("a", 1, lock=lock)
    with refused("manifest 2, which is not known here"):
        alone.hears("c", pb.Remembered(round=1, promise=promised, vote=vote))
    assert "behind manifest 2" in alone.machine._recall.what_it_lacks()
    alone.world.manifests[2] = second
    alone.machine._recall.read_again()
    assert alone.state.lock == lock.message


def test_a_manifest_of_the_past_that_comes_by_itself_ends_the_wait_for_it() -> None:
    """Who catches up learns it from a peer, and nobody installs it."""
    alone, newer, lock = lacking_manifest()
    alone.begins()
    alone.world.manifests[2] = newer
    for _ in range(3):
        alone.goes_on()
    assert alone.state.lock == lock.message
    assert not alone.machine._recall.owes(alone.state)


def test_a_vote_under_a_missing_manifest_binds_if_nobody_shows_its_lock() -> None:
    alone = Alone(unheard="d")
    newer = replace(alone.stage.manifest, version=2)
    vote = sign_vote(alone.stage.keys["a"].sign, value_of(alone.stage.lock(), newer), 0)
    alone.hears("d", pb.Remembered(round=1, vote=vote))
    assert not alone.state.unread
    alone.begins()
    for _ in range(4):
        assert not sent(alone.goes_on(), pb.Promised)


def test_nobody_makes_a_site_wait_for_a_manifest_that_there_is_not() -> None:
    """Of a vote under one that can't be read its own signature is all that says that it is so."""
    absurd = 2**40
    for site, by in (("a", "d"), ("d", "d")):
        alone = Alone(unheard="d")
        lock = alone.stage.lock()
        body = value_of(lock, replace(alone.stage.manifest, version=absurd))
        vote = sign_vote(alone.stage.keys[by].sign, body, 1)
        vote.site = site
        with pytest.raises((CertificateError, RemoteProtocolError)):
            alone.hears("d", pb.Remembered(round=1, vote=vote, lock=lock.message))
        assert not alone.state.signed_under
        assert not alone.machine._recall.owes(alone.state)


def test_a_site_that_was_only_restarted_is_told_its_promise_and_goes_on() -> None:
    """What it is told is on its disk: nothing went back."""
    alone = Alone()
    alone.begins()
    lock = alone.stage.lock()
    alone.hears("b", pb.Proven(round=1, attempt=0, lock=lock.message))
    alone.takes(do.VersionHere(lock.applied.model_digest))
    vote = alone.state.vote
    alone.goes_on()
    promise = alone.state.promise
    alone.world.crash("a")
    alone.world.start("a")
    told = pb.Remembered(round=1, promise=promise, vote=vote)
    effects = alone.hears("b", told)
    assert not any(isinstance(one, do.WentBack) for one in effects)
    assert (alone.promised, alone.state.promise) == (1, promise)


def test_what_is_no_lock_is_not_owed() -> None:
    """A liar has heard its vote, and shows garbage beside it: nobody could ever show the lock."""
    alone = Alone(unheard="cd")
    lock = alone.stage.lock()
    vote = sign_vote(alone.stage.keys["a"].sign, value_of(lock, alone.stage.manifest), 0)
    unsigned = pb.Lock()
    unsigned.CopyFrom(lock.message)
    for signature in unsigned.certificate.signatures:
        signature.signature = bytes(64)
    with pytest.raises(CertificateError):
        alone.hears("c", pb.Remembered(round=1, vote=vote, lock=unsigned))
    assert (alone.state.vote, alone.promised) == (vote, 0)
    assert not alone.machine._recall.owes(alone.state)
    alone.hears("d", pb.Remembered(round=1, vote=vote, lock=lock.message))
    assert alone.state.lock == lock.message, "what it has voted by it takes, whoever came first"


def test_a_site_asks_in_every_round_until_all_have_answered_in_one() -> None:
    """Who was away may know of a later round, in which it has signed as well."""
    for away in ("d", ""):
        world = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
        world.train("b", rounds=2)
        world.run_until_committed(1)
        world.crash("a")
        if away:
            world.crash(away)
        world.start("a")
        asked = world.now
        world.run_until_committed(2)
        rounds = [
            line.split("Recall ")[1].split(".")[0]
            for line in world.transcript
            if " a -> c: Recall" in line and float(line.split()[0]) >= asked
        ]
        assert sorted(set(rounds)) == (["2", "3"] if away else ["2"])


def test_answers_of_two_rounds_are_not_counted_together() -> None:
    alone = Alone(unheard="d")
    assert alone.machine._recall.asks
    alone.machine._recall.new_round()
    alone.hears("d", pb.Remembered(round=1))
    assert alone.machine._recall.asks
    for peer in "bc":
        alone.hears(peer, pb.Remembered(round=1))
    assert not alone.machine._recall.asks


def test_who_says_late_that_it_is_in_a_later_round_is_fetched_from() -> None:
    alone = Alone(unheard="b")
    assert alone.hears("b", pb.Remembered(round=5)) == [do.FetchCertificates("b", 0)]


def test_who_votes_without_a_promise_keeps_to_its_manifest_as_well() -> None:
    """Two steps later its lock would count no more, and its next promise hide it."""
    alone = Alone()
    lock = alone.stage.lock()
    alone.hears("b", pb.Proven(round=1, attempt=0, lock=lock.message))
    assert sent(alone.takes(do.VersionHere(lock.applied.model_digest)), pb.Vote)
    assert alone.state.began == 1
    first = alone.stage.manifest
    for version, sites in ((2, "abcde"), (3, "abcdef")):
        entries = tuple(ManifestSite(site, f"{site}:1", True) for site in sites)
        newer = FederationManifest(first.federation_id, version, entries, 1)
        alone.world.manifests[version] = newer
        alone.takes(do.ManifestChanged(newer))
    assert alone.machine.manifest.version == 2
    assert alone.machine._recall.held_lock == lock
