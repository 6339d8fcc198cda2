"""Rounds with a robust rule, as conversations between simulated sites."""

from __future__ import annotations

import pytest

from peers.attempts import effects as do
from peers.attempts.bundle import PlanFails
from peers.attempts.modes import objection
from peers.attempts.participation import Participation, check_statement
from peers.attempts.statement import EncodedStatement, read_answers
from peers.plans import robust
from peers.plans.policy import Policy
from peers.rounds.runs import RunRefused
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import World, coordinator, plan
from tests.simulation.scenarios.faults import Faults
from tests.simulation.scenarios.updates import HONEST
from tests.simulation.seeds import seeds
from tests.support.signed_rounds import Stage


def world(
    sites: int,
    rule: pb.RobustRule.ValueType,
    f: int,
    *,
    seed: int = 1,
    faults: Faults | None = None,
    least: int | None = None,
) -> World:
    made = World(sites=sites, seed=seed, faults=faults, min_participants=least, faulty_sites=1)
    made.training = robust_plan(rule, f, least)
    return made


def robust_plan(rule: pb.RobustRule.ValueType, f: int, least: int | None = None) -> pb.TrainingPlan:
    training = plan(least or f + 3)
    training.robust, training.byzantine_sites = rule, f
    return training


def around(*distances: float) -> tuple[float, ...]:
    return tuple(value + d for value, d in zip(HONEST, distances, strict=True))


RULES = (pb.ROBUST_NORM, pb.ROBUST_MULTI_KRUM)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [30.0, -10.0])
def test_an_attacker_is_not_in_the_sum_and_its_name_is_signed(
    rule: pb.RobustRule.ValueType, factor: float
) -> None:
    here = world(5, rule, 1)
    here.updates["c"] = tuple(factor * value for value in HONEST)
    here.train("a", rounds=2)
    here.run_until_committed(2)
    for round_ in (1, 2):
        body = here.certificate(round_).body
        assert "c" in body.rejected
        assert "c" not in body.contributors
        assert len(body.contributors) >= 4 if rule == pb.ROBUST_NORM else 4
        report = here.disks["c"].commits[round_].report
        reasons = {one.site: one.reason for one in report.rejections}
        assert ("MADs above" if rule == pb.ROBUST_NORM else "squared distances") in reasons["c"]
        assert "select" in [phase.phase for phase in report.phases]


def test_without_an_attacker_the_norm_filter_rejects_nobody() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.updates |= {"b": around(0.3, 0, 0), "d": around(0, -0.4, 0.1)}
    here.train("b", rounds=1)
    here.run_until_committed(1)
    body = here.certificate(1).body
    assert list(body.contributors) == ["a", "b", "c", "d", "e"]
    assert not body.rejected


def test_krum_sums_no_fewer_than_hide_one_another() -> None:
    here = world(5, pb.ROBUST_KRUM, 1, least=4)
    here.updates |= {name: around(0.01 * k, 0, 0) for k, name in enumerate("abde")}
    here.updates["c"] = (90.0, 0.0, 0.0)
    here.train("b", rounds=1)
    here.run_until_committed(1)
    assert list(here.certificate(1).body.contributors) == ["a", "b", "d", "e"]


@pytest.mark.parametrize("rule", [pb.ROBUST_KRUM, pb.ROBUST_MULTI_KRUM])
def test_a_rule_leaves_two_more_in_a_sum_than_may_lie(rule: pb.RobustRule.ValueType) -> None:
    """Fewer are never summed: every attempt would fail, whatever the run asks for."""
    here = world(5, rule, 1, least=2)
    here.train("b", rounds=1)
    here.run_until_committed(1)
    assert here.certificate(1).attempt == 0
    assert len(here.certificate(1).body.contributors) == 3


def test_nobody_is_asked_for_products_before_all_updates_are_in() -> None:
    """And no product is decrypted, and nothing opened, before a quorum has signed which."""
    here = world(5, pb.ROBUST_NORM, 1, faults=Faults(delay_s=(0.01, 0.01)))
    here.train("a", rounds=1)
    here.run_until_committed(1)
    lead = here.disks["a"].commits[1].report.coordinator
    holder = next(name for name in "abcde" if name != lead)
    said = [
        line.split(": ")[1].split()[0]
        for line in here.transcript
        if f" {lead} -> {holder}: " in line
    ]
    chosen = [word for word in said if word in ("Scale", "State", "Certified", "Proven", "Commit")]
    assert chosen == ["Scale", "State", "Certified", "State", "Certified", "Proven", "Commit"]
    before = here.transcript[: _first(here, ": Compared")]
    assert sum(": Contributed" in line for line in before) == 4
    assert sum(": Stated" in line for line in before) >= here.manifest.quorum - 1


def _first(here: World, text: str) -> int:
    return next(number for number, line in enumerate(here.transcript) if text in line)


def test_lying_key_holders_change_nothing() -> None:
    here = world(6, pb.ROBUST_NORM, 2, least=4)
    here.updates["c"] = tuple(30 * value for value in HONEST)
    here.misreading = {"e", "f"}
    here.train("a", rounds=3)
    here.run_until_committed(3)
    for round_ in (1, 2, 3):
        body = here.certificate(round_).body
        assert list(body.rejected) == ["c"]
        assert list(body.contributors) == ["a", "b", "d", "e", "f"]


def test_a_plain_round_says_nothing_of_it() -> None:
    here = World(sites=5, seed=1)
    here.train("a", rounds=1)
    here.run_until_committed(1)
    assert not here.certificate(1).body.rejected
    assert "Compare" not in "\n".join(here.transcript)
    assert sum(" b -> c: State " in line for line in here.transcript) == 1


# ---- what goes wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(range(2), range(2, 6)))
@pytest.mark.parametrize("rule", RULES)
def test_robust_rounds_get_through_faults(seed: int, rule: pb.RobustRule.ValueType) -> None:
    """The invariants of the simulation hold, and the attacker is in no sum."""
    faults = Faults(drop=0.03, duplicate=0.1, delay_s=(0.001, 2.0), cut=0.05, fail=0.01)
    here = world(7, rule, 1, seed=seed, faults=faults, least=4)
    here.updates["c"] = tuple(30 * value for value in HONEST)
    here.train("a", rounds=3)
    here.at(20.0, here.crash, "d")
    here.at(60.0, here.start, "d")
    here.run_until_committed(3, within_s=20_000)
    for round_ in (1, 2, 3):
        assert "c" not in here.certificate(round_).body.contributors


def staged(
    rule: pb.RobustRule.ValueType = pb.ROBUST_NORM, f: int = 1, sites: str = "abcde"
) -> Stage:
    return Stage(sites, faulty_sites=1, training=robust_plan(rule, f, 3))


def asked(stage: Stage, sites: str = "abcde", byzantine_sites: int = 1) -> EncodedStatement:
    """The question of an attempt, as it is certified."""
    scale = (2, 2)  # one for all groups
    return EncodedStatement.of(
        stage.statement_of(
            kind=pb.QUESTION, sites=sites, exponents=scale, byzantine_sites=byzantine_sites
        )
    )


def answered(
    stage: Stage, question: EncodedStatement, holder: str, products: tuple[float, ...]
) -> pb.Signed:
    told = pb.Products(question_digest=question.digest, products=products)
    return sign(stage.keys[holder], Kind.PRODUCTS, told)


POISONED = {"c": tuple(30 * value for value in HONEST)}


def numbers(sites: str = "abcde") -> tuple[float, ...]:
    """What honest key holders decrypt when c has sent thirty times the ordinary update."""
    weightless = {name: POISONED.get(name, HONEST) for name in sites}
    limit = 32767.0
    return tuple(
        sum(x * y for x, y in zip(weightless[a], weightless[b], strict=True)) * limit**2
        for a in sites
        for b in sites[: sites.index(a) + 1]
    )


def stated(
    stage: Stage,
    question: EncodedStatement,
    answers: list[pb.Signed],
    *,
    sites: str = "abde",
    rejected: str = "c",
) -> pb.Statement:
    return stage.statement_of(
        sites=sites,
        exponents=(2, 2),
        rejected=list(rejected),
        question_digest=question.digest,
        answers=answers,
    )


def compared() -> tuple[Stage, EncodedStatement, list[pb.Signed]]:
    """A certified question, and what two key holders answer alike."""
    stage = staged()
    question = asked(stage)
    return stage, question, [answered(stage, question, holder, numbers()) for holder in "ac"]


def held_against(stage: Stage, statement: pb.Statement, question: EncodedStatement | None) -> None:
    """As every site does before it signs, and as witnesses do."""
    bundle = stage.bundle()
    check_statement(
        EncodedStatement.of(statement),
        stage.ground(),
        bundle.digest,
        bundle.run_digest,
        stage.plan(),
        stage.us,
        (),
        question,
        frozenset(),
    )


def test_what_is_summed_follows_from_equal_answers_to_a_certified_question() -> None:
    stage, question, answers = compared()
    held_against(stage, stated(stage, question, answers), question)


@pytest.mark.parametrize(("sites", "rejected"), [("abcde", ""), ("abd", "c"), ("acde", "b")])
def test_a_coordinator_that_selects_otherwise_gets_no_signature(sites: str, rejected: str) -> None:
    stage, question, answers = compared()
    wrong = stated(stage, question, answers, sites=sites, rejected=rejected)
    with pytest.raises(RemoteProtocolError, match="by their dot products it would be those of"):
        held_against(stage, wrong, question)


def test_what_was_compared_is_what_is_summed() -> None:
    """Else a coordinator has an honest update compared, and another one added."""
    stage, question, answers = compared()
    other = stated(stage, question, answers)
    mine = pb.Contribution.FromString(other.contributions[1].body)
    mine.upload_digest = bytes(32)
    other.contributions[1].CopyFrom(sign(stage.keys["b"], Kind.CONTRIBUTION, mine))
    with pytest.raises(RemoteProtocolError, match="b sums another update than was compared"):
        held_against(stage, other, question)


def test_whom_the_rule_rejects_is_in_what_is_signed() -> None:
    stage, question, answers = compared()
    wrong = stated(stage, question, answers, rejected="")
    why = "b rejects nobody; by what sites have signed it would be c"
    with pytest.raises(RemoteProtocolError, match=why):
        held_against(stage, wrong, question)


def test_a_sum_is_not_signed_where_nothing_was_asked() -> None:
    """A run that asked for a robust rule gets one: its plan follows from what was signed."""
    stage = staged()
    question = asked(stage)
    plain = stage.statement_of(exponents=(2, 2))
    for known in (None, question):
        with pytest.raises(RemoteProtocolError, match="by a question that is not certified"):
            held_against(stage, plain, known)
    weaker = stage.statement_of(exponents=(2, 2))
    weaker.plan.training.robust, weaker.plan.training.byzantine_sites = pb.ROBUST_NONE, 0
    with pytest.raises(RemoteProtocolError, match="another plan than follows from the promises"):
        held_against(stage, weaker, None)
    without = Stage("abcde", training=plan(3))
    with pytest.raises(RemoteProtocolError, match="selects where nothing was compared"):
        held_against(without, without.statement_of(question_digest=question.digest), None)
    with pytest.raises(RemoteProtocolError, match="compares without a robust rule"):
        held_against(without, without.statement_of(kind=pb.QUESTION), None)


def test_a_second_question_in_an_attempt_is_not_answered() -> None:
    """Other signs, other numbers: two answers would tell more than one."""
    stage = staged()
    part = Participation("a", stage.ground(), stage.plan(), stage.keys["a"])
    (decrypt,) = [e for e in part.certified(asked(stage)) if isinstance(e, do.DecryptProducts)]
    assert decrypt.sites == tuple("abcde")
    assert part.certified(asked(stage, "abde")) == []
    (said,) = part.worked(do.ProductsDecrypted(1, 0, numbers(), ()))
    assert isinstance(said, do.Send)
    lead = Participation("b", stage.ground(), stage.plan(), stage.keys["b"])
    assert lead.certified(asked(stage)) == [], "it holds no key"


def test_a_site_signs_no_second_question_in_an_attempt() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.train("a", rounds=1)
    while ": Certified " not in here.text():
        here.step()
    line = next(line for line in here.transcript if ": Certified " in line)
    lead, witness = line.split()[1], line.split()[3].rstrip(":")
    site = here.site(witness)
    question = next(
        signed
        for signed in site.durable.state.statements
        if pb.Statement.FromString(signed.body).kind == pb.QUESTION
    )
    other = pb.Statement.FromString(question.body)
    other.sum_digest = bytes(32)
    state = pb.State(round=1, attempt=0, statement=other.SerializeToString(deterministic=True))
    with pytest.raises(RemoteProtocolError, match=f"{lead} makes two statements in one attempt"):
        site.step(do.MessageReceived(lead, state), here.now)


def test_as_many_may_lie_as_the_run_says_whatever_its_coordinator_asks() -> None:
    """With none of them the rule would reject nobody, and the liar be in the sum."""
    here = world(5, pb.ROBUST_MULTI_KRUM, 1)
    here.train("a", rounds=1)
    lead = coordinator(here, 1)
    witness = next(site for site in "abcde" if site != lead)
    while (
        under_way := here.site(lead)._here.coordination
    ) is None or under_way._tally.known is None:
        here.step()
    honest = under_way._tally.known.message
    assert (honest.kind, honest.byzantine_sites) == (pb.QUESTION, 1)
    for site in (witness, lead):
        while here.site(site)._here.bundle is None:
            here.step()
    lying = pb.Statement.FromString(under_way._tally.known.raw)
    lying.byzantine_sites = 0
    with pytest.raises(RemoteProtocolError, match=f"{lead} compares as if 0 might lie"):
        here.site(witness)._acceptor._check_statement(EncodedStatement.of(lying))
    here.site(witness)._acceptor._check_statement(under_way._tally.known)


def test_a_sum_that_was_selected_is_not_made_again() -> None:
    """Nobody compares the second time: whoever was benign then uploads what it likes now."""
    for rule, again in ((pb.ROBUST_NONE, True), (pb.ROBUST_NORM, False)):
        stage = Stage(training=robust_plan(rule, 1, 2))
        known = stage.statement()
        promised = [stage.promised(site, 1, stated=known) for site in "abcd"]
        bundle = stage.bundle(promised, 1)
        assert (bundle.repeated is not None) == again
        assert (stage.plan(bundle, 1).draw == 1) == (not again)


def test_a_plan_whose_rule_has_too_few_sites_is_refused_where_it_is_asked() -> None:
    for sites, f, least, said in ((3, 1, 3, "4 participants are needed"), (6, 2, 4, "at least 7")):
        here = world(sites, pb.ROBUST_KRUM, f, least=least)
        with pytest.raises(RunRefused, match=said):
            here.site("a").step(do.RunRequested("r", 1, here.training), here.now)


def test_no_plan_follows_where_its_rule_does_not_hold() -> None:
    assert "needs at least 4 participants" in objection(robust_plan(pb.ROBUST_NORM, 1, 2), 3)
    stage = Stage("abcde", training=robust_plan(pb.ROBUST_KRUM, 1, 2))
    few = [stage.promised(site, willing=site in "abcd") for site in stage.sites]
    with pytest.raises(PlanFails, match="krum"):
        stage.plan(stage.bundle(few))


def test_a_site_that_requires_a_rule_declines_plans_without_one() -> None:
    strict = Policy(min_participants=2, max_local_epochs=10, robust_required=True)
    assert "--robust RULE" in strict.objection(plan(3))
    assert strict.objection(world(5, pb.ROBUST_NORM, 1).training) == ""


def test_masked_updates_are_not_compared() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.training.mode = pb.MASKING
    with pytest.raises(RunRefused, match="masked ones can't be compared"):
        here.site("a").step(do.RunRequested("r", 1, here.training), here.now)


# ---- what key holders say --------------------------------------------------------------------


def test_no_two_liars_move_the_numbers_whoever_answers_first() -> None:
    """Of three equal answers one is honest, and so they are what was decrypted: a coordinator
    can wait for them, and can not choose among others."""
    stage = staged(f=2, sites="abcdefg")
    question = asked(stage, "abcdefg", 2)
    assert robust.answers_needed(question.message.plan) == 3
    honest = [answered(stage, question, h, numbers("abcdefg")) for h in "acd"]
    lies = [answered(stage, question, h, (1.0,) * 28) for h in "ef"]
    told = read_answers(honest, question, stage.us, stage.manifest)
    chosen = robust.choose(stage.plan(), question.message, told, 2)
    assert (chosen.kept, list(chosen.rejected)) == (tuple("abdefg"), ["c"])
    for answers, expected in (
        (lies, "b shows 2 answers, 3 are needed"),
        ([*lies, honest[0]], "b shows answers that differ"),
    ):
        with pytest.raises(RemoteProtocolError, match=expected):
            read_answers(answers, question, stage.us, stage.manifest)


def test_one_more_must_answer_alike_than_may_lie_by_manifest_or_run() -> None:
    for f, byzantine, needed in ((1, 0, 2), (1, 2, 3), (2, 1, 3), (0, 0, 1)):
        training = pb.TrainingPlan(byzantine_sites=byzantine)
        assert robust.answers_needed(pb.Plan(faulty_sites=f, training=training)) == needed


def test_answers_without_a_key_or_to_another_question_count_for_nothing() -> None:
    stage = staged()
    question, other = asked(stage), asked(stage, "abde")
    lead = [answered(stage, question, holder, numbers()) for holder in "ab"]
    with pytest.raises(RemoteProtocolError, match="shows the answer of a site without the key"):
        read_answers(lead, question, stage.us, stage.manifest)
    elsewhere = [answered(stage, other, holder, numbers()) for holder in "ac"]
    with pytest.raises(RemoteProtocolError, match="b shows answers to another question"):
        read_answers(elsewhere, question, stage.us, stage.manifest)
    few = pb.Products(question_digest=question.digest, products=[1.0] * 3)
    with pytest.raises(RemoteProtocolError, match="an answer has 3 products, not 15"):
        robust.choose(stage.plan(), question.message, few, 0)


def test_one_site_is_not_two_answers() -> None:
    """Its answer twice would be f + 1 equal ones, none of them honest."""
    stage = staged()
    question = asked(stage)
    lie = answered(stage, question, "e", (1.0,) * 15)
    with pytest.raises(RemoteProtocolError, match="b shows 1 answers, 2 are needed"):
        read_answers([lie, lie], question, stage.us, stage.manifest)
