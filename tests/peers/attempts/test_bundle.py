"""Attacks on what an attempt rests on: promises, their bundle, and the plan that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from peers.attempts import scale
from peers.attempts.bundle import Bundle, PlanFails, derive_plan, read_run
from peers.attempts.statement import EncodedStatement
from peers.wire.certificates import CertificateError
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import parse
from peers.wire.signing import Kind, digest_of, sign
from proto import federation_pb2 as pb
from tests.simulation.network import plan
from tests.support.signed_rounds import EXPONENTS, Stage, manifest_of


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage("abcd", faulty_sites=1)


def refused(match: str) -> pytest.RaisesExc[RemoteProtocolError]:
    return pytest.raises(RemoteProtocolError, match=match)


# ---- exponents: a scale that drowns the others --------------------------------------------


def scaled(
    told: Mapping[str, tuple[int, ...]], counts: dict[str, int] | None = None
) -> tuple[tuple[int, ...], dict[str, str]]:
    participants = [
        pb.Participant(site=site, num_examples=(counts or {}).get(site, 1)) for site in told
    ]
    most = max(one.num_examples for one in participants)
    made = pb.Plan(participants=participants, full_weight=most, training=plan())
    return scale.common_scale(made, told)


@pytest.mark.parametrize("liar", ["a", "b", "c", "d"])
@pytest.mark.parametrize("claimed", [41, 127])
def test_exponents_40_too_high_leave_their_site_out_and_cost_nobody_a_bit(
    liar: str, claimed: int
) -> None:
    told = dict.fromkeys("abcd", (1, 0))
    told[liar] = (claimed, 0)
    exponents, rejected = scaled(told)
    assert exponents == (1, 0)
    assert list(rejected) == [liar]
    assert "at most 64 times as much can be summed" in rejected[liar]


def test_a_large_weight_buys_no_say_about_the_scale() -> None:
    """By weight the liar would be the median, and all others too small to matter."""
    told = {"a": (60,), "b": (1,), "c": (1,)}
    exponents, rejected = scaled(told, {"a": 20, "b": 10, "c": 10})
    assert (exponents, list(rejected)) == ((1,), ["a"])


def test_exponents_a_little_apart_are_all_summed() -> None:
    told = {"a": (1, 3), "b": (7, -3), "c": (2, 0)}
    assert scaled(told) == ((7, 3), {})
    assert scaled({"a": (1,), "b": (8,), "c": (1,)})[0] == (1,)


def test_who_tells_of_another_vector_is_left_out_and_ends_no_attempt() -> None:
    told = {"a": (1, 3), "b": (2, 3), "c": (2,), "d": (1, 1)}
    exponents, rejected = scaled(told)
    assert exponents == (2, 3)
    assert rejected == {"c": "it reports 1 parameter groups, most sites 2: update it"}
    with pytest.raises(ValueError, match="no site reports"):
        scale.common_scale(pb.Plan(training=plan()), {})


def test_a_liar_that_scales_the_same_noise_otherwise_is_left_out() -> None:
    """Each bit that its exponents are off would cost the others' noise one."""
    made = pb.Plan(
        participants=[pb.Participant(site=s, num_examples=1) for s in "abcd"],
        full_weight=1,
        noise_multiplier=1.0,
        training=plan(),
    )
    told = {"a": (1, 1), "b": (2, 1), "c": (1, 1), "d": (1,)}
    exponents, rejected = scale.common_scale(made, told)
    assert exponents == (1, 1)
    assert "scale of the same noise" in rejected["b"]
    assert "1 parameter groups" in rejected["d"]


# ---- a promise ----------------------------------------------------------------------------


def test_an_honest_promise_is_read_with_what_it_names(stage: Stage) -> None:
    lock = stage.lock()
    read = stage.read_promised(stage.promised("b", 3, lock=lock, stated=stage.statement()))
    assert read.site == "b"
    assert read.lock is not None
    assert read.lock.name == lock.name


def test_a_promise_in_the_name_of_another_site_is_refused(stage: Stage) -> None:
    message = stage.promised("b")
    message.promise.site = "c"
    with pytest.raises(CertificateError, match="bad signature of c"):
        stage.read_promised(message)


def test_a_signature_under_another_kind_of_message_is_no_promise(stage: Stage) -> None:
    """The label says what the bytes are, so that nothing signed elsewhere passes for a promise."""
    message = stage.promised("b")
    for kind in set(Kind) - {Kind.PROMISE}:
        message.promise.CopyFrom(sign(stage.keys["b"], kind, stage.promise()))
        with pytest.raises(CertificateError):
            stage.read_promised(message)


@pytest.mark.parametrize("field", ["lock", "stated"])
def test_what_a_promise_names_is_shown_with_it(stage: Stage, field: str) -> None:
    """Named and not shown, it could be anything; shown and not named, it binds nobody."""
    message = stage.promised("b", 1, lock=stage.lock(), stated=stage.statement())
    hidden = pb.Promised()
    hidden.CopyFrom(message)
    hidden.ClearField(field)  # type: ignore[arg-type]
    with refused("b hides"):
        stage.read_promised(hidden)
    bare = stage.promised("b", 1)
    getattr(bare, field).CopyFrom(getattr(message, field))
    with refused("b hides"):
        stage.read_promised(bare)


def test_a_promise_that_shows_another_lock_than_it_names_is_refused(stage: Stage) -> None:
    message = stage.promised("b", 1, lock=stage.lock())
    message.lock.CopyFrom(stage.lock(version=b"x" * 32).message)
    with refused("b names another lock than it shows"):
        stage.read_promised(message)


def test_a_promise_that_shows_another_statement_than_it_names_is_refused(stage: Stage) -> None:
    message = stage.promised("b", 1, stated=stage.statement())
    other = stage.statement_of()
    other.sum_digest = bytes(32)
    message.stated.body = other.SerializeToString(deterministic=True)
    with pytest.raises(CertificateError):
        stage.read_promised(message)
    message = stage.promised("b", 1, stated=stage.statement())
    message.stated.CopyFrom(stage.signed_statement("b", EncodedStatement.of(other)))
    with refused("names another statement than it shows"):
        stage.read_promised(message)


def test_a_lock_of_the_same_or_a_later_attempt_is_not_promised_behind(stage: Stage) -> None:
    lock = stage.lock(stage.statement(attempt=3))
    with refused("b shows a lock of a later attempt"):
        stage.read_promised(stage.promised("b", 3, lock=lock))
    assert stage.read_promised(stage.promised("b", 4, lock=lock)).lock


# ---- a bundle -------------------------------------------------------------------------------


def test_all_sites_read_the_same_bundle_and_derive_the_same_plan(stage: Stage) -> None:
    message = stage.message([stage.promised(site) for site in stage.sites])
    plans = set()
    for eyes in stage.sites:
        stage.us = stage.keys[eyes]
        plans.add(digest_of(stage.plan(stage.read(message))))
    stage.us = stage.keys["a"]
    assert len(plans) == 1


def edited(stage: Stage, change: Callable[[pb.Bundle], None], attempt: int = 0) -> pb.Bundle:
    message = stage.message([stage.promised(site, attempt) for site in stage.sites], attempt)
    change(message)
    return message


def swap(site: str, **changed: object) -> Callable[[Stage, pb.Bundle], None]:
    """This site has signed another promise than it should be counted with."""

    def change(stage: Stage, message: pb.Bundle) -> None:
        place = stage.sites.index(site)
        message.promises[place].CopyFrom(stage.promised(site, **changed).promise)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swap("c", attempt=1), "b bundles a promise of c for something else"),
        (swap("c", round=2), "b bundles a promise of c for something else"),
        (swap("c", parent_digest=bytes(32)), "for something else"),
        (swap("c", run_digest=bytes(32)), "for something else"),
        (swap("c", federation_id="elsewhere"), "for something else"),
        (swap("c", manifest_digest=bytes(32)), "for something else"),
        (lambda _, m: m.promises.__delitem__(slice(2, 4)), "b bundles 2 promises, 3 decide"),
        (lambda _, m: m.promises.__delitem__(1), "b leaves its own promise out of the bundle"),
        (lambda s, m: m.lock.CopyFrom(s.lock().message), "b does not show the bundle's lock"),
        (
            lambda s, m: m.stated.CopyFrom(s.signed_statement("a", s.statement())),
            "b does not show the sum that has to be made again",
        ),
    ],
)
def test_a_bundle_that_is_not_of_a_quorums_promises_is_refused(
    stage: Stage, change: Callable[[Stage, pb.Bundle], None], expected: str
) -> None:
    message = edited(stage, lambda bundle: change(stage, bundle))
    with refused(expected):
        stage.read(message)


def test_one_site_is_not_counted_twice_in_a_bundle(stage: Stage) -> None:
    """At the door; and behind it promises are counted by site."""
    message = edited(stage, lambda bundle: bundle.promises.__delitem__(3))
    message.promises.append(message.promises[2])
    with refused("promises is not in ascending order"):
        parse(pb.Bundle, message.SerializeToString())
    del message.promises[0]
    with refused("b bundles 2 promises, 3 decide"):
        stage.read(message)


def test_a_bundle_with_a_forged_promise_is_refused(stage: Stage) -> None:
    forged = sign(stage.keys["d"], Kind.PROMISE, stage.promise(num_examples=10**6))
    forged.site = "c"
    message = edited(stage, lambda bundle: bundle.promises[2].CopyFrom(forged))
    with pytest.raises(CertificateError, match="bad signature of c"):
        stage.read(message)


def test_a_bundle_may_not_hide_the_highest_lock_that_its_promises_name(stage: Stage) -> None:
    low, high = stage.lock(), stage.lock(stage.statement(attempt=1), version=b"h" * 32)
    promised = [
        stage.promised("a", 2, lock=low),
        stage.promised("b", 2, lock=high),
        stage.promised("c", 2),
        stage.promised("d", 2),
    ]
    message = stage.message(promised, 2)
    bundle = stage.read(message, 2)
    assert bundle.lock is not None
    assert bundle.lock.name == high.name
    message.lock.CopyFrom(low.message)
    with refused("d shows another lock than the bundle's highest"):
        stage.read(message, 2)
    message.ClearField("lock")
    with refused("d does not show the bundle's lock"):
        stage.read(message, 2)


def test_a_bundle_names_one_run_signed_where_a_person_asked(stage: Stage) -> None:
    others = stage.run_of(plan(min_participants=2))
    with refused("for something else"):
        stage.read(edited(stage, lambda bundle: bundle.run.CopyFrom(others)))
    forged = stage.run_of(plan(min_participants=3), requested_by="b")
    with refused("a signs another site's run"):
        read_run(forged, stage.us, stage.manifest)
    with refused("a runs another federation"):
        read_run(stage.run_of(plan(), federation_id="elsewhere"), stage.us, stage.manifest)


def test_a_run_has_one_encoding(stage: Stage) -> None:
    """Two would be two names of one run: sites that have one each promise nothing together."""
    run = pb.Run.FromString(stage.run.body)
    halves = (
        run.SerializeToString(deterministic=True) + pb.Run(run_id=run.run_id).SerializeToString()
    )
    unknown = stage.run.body + b"\xa2\x06\x01x"
    for body in (halves, unknown):
        assert pb.Run.FromString(body).run_id == run.run_id
        by = stage.keys["a"].sign(Kind.RUN.value + body)
        again = pb.Signed(body=body, site="a", signature=by.signature, certificate=by.certificate)
        with refused("Run is "):
            read_run(again, stage.us, stage.manifest)


# ---- the plan: nobody's to choose ------------------------------------------------------------


def test_a_plan_says_what_the_signed_run_says_and_nobody_can_take_it_out() -> None:
    """Privacy, robust rule and mode are the person's who asked, byte by byte."""
    training = plan(min_participants=3)
    training.robust, training.byzantine_sites = pb.ROBUST_NORM, 1
    training.privacy.CopyFrom(
        pb.PrivacyPlan(
            clip_norm=0.5,
            noise_multiplier=2.0,
            noise_floor=1.0,
            noise_decay=1.0,
            first_round=1,
            colluders=1,
        )
    )
    stage = Stage("abcde", training=training)
    bundle = stage.bundle()
    made = derive_plan(bundle, stage.ground())
    assert made.training == training
    assert (made.clip_norm, made.noise_multiplier) == (0.5, 2.0)
    weaker = stage.run_of(plan(min_participants=3))
    message = stage.message([stage.promised(site) for site in stage.sites])
    message.run.CopyFrom(weaker)
    with refused("for something else"):
        stage.read(message)


def test_who_takes_part_and_with_what_weight_is_what_each_has_promised(stage: Stage) -> None:
    told = {"a": 10, "b": 10, "c": 10, "d": 100_000}
    made = stage.plan(stage.bundle([stage.promised(s, num_examples=n) for s, n in told.items()]))
    assert {one.site: one.num_examples for one in made.participants} == {
        "a": 10, "b": 10, "c": 10, "d": 20,
    }  # fmt: skip
    assert made.full_weight == 20
    assert (made.coordinator, made.key_dealer) == ("b", "c")


def test_a_weight_counts_up_to_the_runs_bound(stage: Stage) -> None:
    training = plan(min_participants=3)
    training.max_num_examples = 12
    bounded = Stage("abcd", training=training)
    told = {"a": 10, "b": 11, "c": 20, "d": 30}
    made = bounded.plan(
        bounded.bundle([bounded.promised(s, num_examples=n) for s, n in told.items()])
    )
    assert [one.num_examples for one in made.participants] == [10, 11, 12, 12]


@pytest.mark.parametrize(
    "unfit", [{"willing": False}, {"num_examples": 0}, {"shape_digest": bytes(32)}]
)
def test_who_cannot_train_takes_no_part_and_its_promise_counts(
    stage: Stage, unfit: dict[str, object]
) -> None:
    promised = [stage.promised(site) for site in "abc"]
    bundle = stage.bundle([*promised, stage.promised("d", **unfit)])  # type: ignore[arg-type]
    assert [one.site for one in stage.plan(bundle).participants] == ["a", "b", "c"]
    two = stage.bundle([*promised[:2], *(stage.promised(s, **unfit) for s in "cd")])  # type: ignore[arg-type]
    with pytest.raises(PlanFails, match="2 of 4 sites can train, the plan needs 3"):
        stage.plan(two)


def test_a_sum_is_of_two_honest_sites_more_than_may_lie() -> None:
    """Else what an honest site sends is all that liars do not know of the sum."""
    stage = Stage("abcdefg", faulty_sites=2, training=plan(min_participants=2))
    promised = [stage.promised(site, willing=site in "abc") for site in stage.sites]
    with pytest.raises(PlanFails, match="3 of 7 sites can train, the plan needs 4"):
        stage.plan(stage.bundle(promised))
    short = Stage(manifest=manifest_of("ab", 1))
    with pytest.raises(PlanFails, match="Let 1 more take part"):
        short.plan()


# ---- a sum that may have been opened is made again --------------------------------------------


def repeating(
    stage: Stage,
    stated: EncodedStatement,
    *,
    tried: str = "",
    without: str = "",
    unwilling: str = "",
) -> Bundle:
    """The bundle of attempt 1, in which all but ``without`` promise that they signed a sum."""
    promised = [
        stage.promised(
            site, 1, stated=stated, tried=int(site in tried), willing=site not in unwilling
        )
        for site in stage.sites
        if site not in without
    ]
    return stage.bundle(promised, 1)


def test_a_stated_sum_is_made_again_to_the_last_bit(stage: Stage) -> None:
    """By the same sites, of the same integers, on the same scale: that tells nothing new."""
    told = {"a": 20, "b": 30, "c": 20, "d": 20}
    first = stage.bundle([stage.promised(site, num_examples=n) for site, n in told.items()])
    stated = EncodedStatement.of(stage.statement_of(first, sites="abc"))
    again = stage.plan(repeating(stage, stated), 1)
    assert [one.site for one in again.participants] == ["a", "b", "c"]
    assert tuple(again.scale_exponents) == EXPONENTS
    before = stated.message.plan
    assert (again.draw, again.full_weight) == (0, before.full_weight)
    assert [one.num_examples for one in again.participants] == [20, 30, 20]
    assert again.training == before.training


def test_one_site_that_signed_it_is_enough_to_have_it_made_again(stage: Stage) -> None:
    stated = stage.statement()
    promised = [stage.promised(site, 1) for site in "abc"]
    bundle = stage.bundle([*promised, stage.promised("d", 1, stated=stated)], 1)
    assert stage.plan(bundle, 1).draw == 0


def test_it_is_drawn_anew_when_more_sites_than_may_lie_have_seen_it_fail(stage: Stage) -> None:
    stated = stage.statement()
    assert stage.plan(repeating(stage, stated, tried="d"), 1).draw == 0, "one may lie"
    anew = stage.plan(repeating(stage, stated, tried="cd"), 1)
    assert (anew.draw, list(anew.scale_exponents)) == (1, [])


def test_a_sum_that_only_a_liar_names_is_not_made_again_for_ever(stage: Stage) -> None:
    """Nobody else has signed it; who has seen it fail says so all the same."""
    named = stage.promised("b", 1, stated=stage.statement())
    others = [stage.promised(site, 1) for site in "acd"]
    assert stage.plan(stage.bundle([named, *others], 1), 1).draw == 0, "it may have been opened"
    seen = [stage.promised(site, 1, tried=1) for site in "acd"]
    assert stage.plan(stage.bundle([named, *seen], 1), 1).draw == 1


def test_it_is_drawn_anew_when_a_contributor_is_not_there_to_repeat_it(stage: Stage) -> None:
    stated = stage.statement()
    assert stage.plan(repeating(stage, stated, unwilling="d"), 1).draw == 1
    assert stage.plan(repeating(stage, stated, without="d"), 1).draw == 1
    lesser = EncodedStatement.of(stage.statement_of(sites="abc"))
    assert stage.plan(repeating(stage, lesser, unwilling="d"), 1).draw == 0, "d was not in it"


def test_it_is_drawn_anew_for_a_run_that_protects_more() -> None:
    """A sum that nobody else has seen would undo what a person has asked for since."""
    stage = Stage("abcd", faulty_sites=1)
    stated = stage.statement()
    training = plan(min_participants=3)
    stage.run = stage.run_of(training, generation=2, run_id="same")
    assert stage.plan(repeating(stage, stated), 1).draw == 0
    privacy = training.privacy
    privacy.noise_multiplier = privacy.noise_floor = 2.0
    privacy.clip_norm = privacy.noise_decay = privacy.first_round = 1
    stage.run = stage.run_of(training, generation=3, run_id="private")
    anew = stage.plan(repeating(stage, stated), 1)
    assert (anew.draw, anew.noise_multiplier) == (1, 2.0)


def test_it_is_drawn_anew_when_two_sums_are_named_for_one_attempt(stage: Stage) -> None:
    promised = [stage.promised(site, 1, stated=stage.statement()) for site in "abc"]
    other = EncodedStatement.of(stage.statement_of(sites="abc"))
    bundle = stage.bundle([*promised, stage.promised("d", 1, stated=other)], 1)
    assert bundle.repeated is None
    assert stage.plan(bundle, 1).draw == 1


def test_a_lock_goes_before_a_sum_that_was_only_stated(stage: Stage) -> None:
    stated, lock = stage.statement(), stage.lock()
    promised = [stage.promised(site, 1, stated=stated, lock=lock) for site in stage.sites]
    bundle = stage.bundle(promised, 1)
    assert bundle.lock is not None
    assert bundle.repeated is None


def test_a_bundle_may_not_hide_the_sum_that_has_to_be_made_again(stage: Stage) -> None:
    promised = [stage.promised(site, 1, stated=stage.statement()) for site in stage.sites]
    message = stage.message(promised, 1)
    message.ClearField("stated")
    with refused("c does not show the sum that has to be made again"):
        stage.read(message, 1)


def test_a_sum_of_too_few_is_not_made_again_because_a_liar_says_it_signed(
    stage: Stage,
) -> None:
    """It ran attempt 0, kept what was sent to it, and stated nothing: now of two, one of them
    its own."""
    lone = EncodedStatement.of(stage.statement_of(sites="ab"))
    with refused("b shows a sum that tells too much of one site"):
        stage.read_promised(stage.promised("b", 1, stated=lone))
    message = stage.message([stage.promised(site, 1) for site in stage.sites], 1)
    lie = stage.promised("b", 1, stated=lone)
    message.promises[1].CopyFrom(lie.promise)
    message.stated.CopyFrom(lie.stated)
    with refused("b shows a sum that tells too much of one site"):
        stage.read(message, 1)


def test_a_sum_in_which_one_site_stands_out_is_not_made_again(stage: Stage) -> None:
    stage = Stage("abcde")
    told = {"a": 40, "b": 20, "c": 20, "d": 2, "e": 2}
    first = stage.bundle([stage.promised(site, num_examples=n) for site, n in told.items()])
    bare = EncodedStatement.of(stage.statement_of(first, sites="ade"))
    with refused("b shows a sum that tells too much of one site"):
        stage.read_promised(stage.promised("b", 1, stated=bare))


def test_contributions_of_an_earlier_draw_are_no_sum_of_a_later_attempt(
    stage: Stage,
) -> None:
    """Sites remember the last draw that they have stated: of the one before, a part of the
    sum would tell the difference."""
    first = stage.bundle()
    made = stage.plan(first)
    late = stage.statement_of(stage.bundle(attempt=2), 2, sites="abc", made=made)
    with refused("b shows a sum by another attempt's plan"):
        stage.read_promised(stage.promised("b", 3, stated=EncodedStatement.of(late)))


def test_a_sum_of_liars_alone_is_not_made_again() -> None:
    """By a plan of their own, which says that two are enough."""
    stage = Stage("abcdefg", faulty_sites=2)
    made = stage.plan()
    made.faulty_sites, made.training.min_participants = 0, 2
    theirs = EncodedStatement.of(stage.statement_of(sites="ab", made=made))
    with refused("b shows a sum by another attempt's plan"):
        stage.read_promised(stage.promised("b", 1, stated=theirs))
