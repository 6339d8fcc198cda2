"""Schedules in which a coordinator lies about sums, or keeps honest ones from theirs.

Most are a row of the table of lies that tests/attacks/ goes by. Some lies only cost
attempts: what must be so then, the schedule says itself, by `claim`. The liar is c, the
first coordinator b, of four sites.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from peers.attempts import effects as do
from peers.attempts.statement import EncodedStatement
from peers.rounds.runs import following
from peers.wire.certificates import RULES, sign_vote
from peers.wire.manifest import coordinator_of
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, GENESIS, signature
from tests.simulation.scenarios.invariants import claim
from tests.simulation.scenarios.scripts import LIAR, Script, among


def hears(script: Script, then: Callable[[pb.Prepare], None]) -> None:
    """Whenever an honest attempt begins the liar does that, and nothing else ever."""
    seen: set[int] = set()

    def passes(sender: str, _to: str, body: do.Body) -> bool:
        if sender != LIAR and isinstance(body, pb.Prepare) and body.attempt not in seen:
            seen.add(body.attempt)
            script.at(script.now, then, body)
        return True

    script.passes, script.silent = passes, True


def _promise_of(script: Script, prepare: pb.Prepare, attempt: int) -> pb.Promised:
    """The liar's, of an attempt of its choice."""
    promise = pb.Promise.FromString(prepare.promise.promise.body)
    promise.attempt = attempt
    promise.ClearField("lock")
    promise.ClearField("stated")
    return pb.Promised(promise=sign(script.keys, Kind.PROMISE, promise))


def commits_at_once(script: Script, why: str) -> None:
    """The first coordinator is honest, and so its attempt decides the round."""
    script.run_for(1_000.0)
    commits = [script.disks[site].commits.get(1) for site in script.honest]
    attempts = [one.certificate.attempt if one is not None else None for one in commits]
    claim(set(attempts) == {0}, f"honest attempts fail: {why}")


# ---- row 1 -------------------------------------------------------------------------------


def one_has_most_examples() -> None:
    """Row 1, with no lie at all: honest counts of which one outweighs all others together.

    Clipped, all four are summed; as they were told, no sum of them may be opened.
    """
    script = Script()
    script.examples["a"] = 1000
    script.set_willing("a", willing=True)
    script.passes = among(*"abcd")
    script.train("b", rounds=1)
    commits_at_once(script, "whoever has most examples is in no sum")


# ---- row 11 ------------------------------------------------------------------------------


def _summed(script: Script) -> EncodedStatement:
    """What c has summed, in its first attempt, and would state."""
    lead = script.site(LIAR)
    states = script.passes
    script.passes = lambda sender, to, body: (
        states(sender, to, body) and not (sender == LIAR and _kind(body) == pb.SUM)
    )
    script.until(
        lambda: lead._here.coordination is not None and lead._here.coordination.phase == "state",
        5_000.0,
    )
    coordination = lead._here.coordination
    known = coordination._tally.known if coordination is not None else None
    if known is None:
        raise LookupError("the script has gone another way")
    script.silent = True
    return known


def _kind(body: do.Body) -> pb.StatementKind.ValueType | None:
    """What is asked to be signed."""
    return pb.Statement.FromString(body.statement).kind if isinstance(body, pb.State) else None


def _less(known: EncodedStatement, without: str = "b") -> EncodedStatement:
    """The same, without b's update, or without those of several."""
    statement = pb.Statement()
    statement.CopyFrom(known.message)
    kept = [one for one in statement.contributions if one.site not in without]
    del statement.contributions[:]
    statement.contributions.extend(kept)
    return EncodedStatement.of(statement)


def _goes_on(script: Script) -> None:
    script.passes, script.silent = among(*"abcd"), False
    script.run_until_committed(1)


def sum_less() -> None:
    """Row 11: two sums of one round that differ by one site, in two attempts.

    The sum of all four was stated and not opened; c makes it again, of the very same
    integers, without b's update.
    """
    script = Script()
    script.passes = among(*"abcd", without=pb.AppliedSum)
    script.train("b", rounds=1)
    known = _summed(script)
    if not known.message.plan.scale_exponents:
        raise LookupError("nothing is made again")
    script.states("abd", _less(known))
    _goes_on(script)


def _first_of_c() -> tuple[Script, EncodedStatement]:
    """c leads a first sum: of the attempt of b nothing came."""
    script = Script()
    script.passes = lambda _sender, _to, body: (
        not (isinstance(body, pb.Prepare | pb.Bundle) and body.attempt == 0)
    )
    script.train("b", rounds=1)
    return script, _summed(script)


def two_sums_an_attempt() -> None:
    """Row 11: two statements of one attempt, of the same contributions and another sum."""
    script, known = _first_of_c()
    other = pb.Statement()
    other.CopyFrom(known.message)
    other.sum_digest = hashlib.sha256(b"another sum").digest()
    script.states("abd", known)
    script.states("abd", EncodedStatement.of(other))
    _goes_on(script)


def question_behind_a_sum() -> None:
    """Row 11: a has signed the sum when it is asked what to compare, and then is told another."""
    script = Script()
    script.training.robust, script.training.byzantine_sites = pb.ROBUST_NORM, 1
    questions: list[pb.State] = []

    def passes(_sender: str, to: str, body: do.Body) -> bool:
        if isinstance(body, pb.Prepare | pb.Bundle) and body.attempt == 0:
            return False
        if to == "a" and isinstance(body, pb.State) and _kind(body) == pb.QUESTION:
            questions.append(body)
            return False
        return True

    script.passes = passes
    script.train("b", rounds=1)
    known = _summed(script)
    other = pb.Statement()
    other.CopyFrom(known.message)
    other.sum_digest = hashlib.sha256(b"another sum").digest()
    script.states("abd", known)
    script.tells("a", questions[0])
    if questions[0].statement not in script.signed_by("a"):
        raise LookupError("the script has gone another way")
    script.states("abd", EncodedStatement.of(other))
    _goes_on(script)


def sum_less_an_attempt() -> None:
    """Row 11: the two sums that differ by one site, in one attempt."""
    script, known = _first_of_c()
    script.states("abd", known)
    script.states("abd", _less(known))
    _goes_on(script)


def stated_less_than_summed() -> None:
    """Rows 11 and 13: b's update is in the sum, and is not in what is signed and opened."""
    script, known = _first_of_c()
    less = _less(known)
    signatures = script.states("abd", less)
    if len(signatures) < script.manifest.quorum:
        raise LookupError("a sum of three is not signed")
    certificate = pb.StatementCertificate(statement=less.raw, signatures=signatures)
    script.tells("abd", pb.Certified(round=1, attempt=1, certificate=certificate))
    for holder in "abd":
        script._feed(holder, do.SumArrived(1, 1))
    script.run_for(5.0)
    _goes_on(script)


def sum_of_one() -> None:
    """A sum of b alone: its update."""
    script, known = _first_of_c()
    script.states("abd", _less(known, without="acd"))
    _goes_on(script)


def another_plan() -> None:
    """Rows 1 and 8: b is to weigh 1000 times as much as it has promised."""
    script, known = _first_of_c()
    statement = pb.Statement()
    statement.CopyFrom(known.message)
    statement.plan.participants[1].num_examples *= 1000
    statement.plan.full_weight = statement.plan.participants[1].num_examples
    script.states("ad", EncodedStatement.of(statement))
    _goes_on(script)


def contribution_of_another_attempt() -> None:
    """Row 11: what d has sent in attempt 0, which came to nothing, in a sum of attempt 1."""
    script = Script()
    script.passes = lambda _sender, _to, body: not (isinstance(body, pb.State) and not body.attempt)
    script.train("b", rounds=1)
    script.until(lambda: _contributed(script) is not None)
    before = _contributed(script)
    known = _summed(script)
    statement = pb.Statement()
    statement.CopyFrom(known.message)
    if before is None or statement.contributions[3] == before:
        raise LookupError("the script has gone another way")
    statement.contributions[3].CopyFrom(before)
    script.states("abd", EncodedStatement.of(statement))
    _goes_on(script)


def _contributed(script: Script) -> pb.Signed | None:
    """What d has signed of its update in the attempt that it is in."""
    part = script.site("d")._here.part
    return part._contribution if part is not None else None


# ---- row 9 -------------------------------------------------------------------------------


def far_ahead() -> None:
    """Row 9: whoever prepares hears of a committed round, and of an attempt far away."""
    script = Script()
    vote = pb.VoteBody(
        federation_id=script.manifest.federation_id,
        round=1,
        parent_digest=GENESIS,
        model_digest=hashlib.sha256(b"made up").digest(),
        contributors=[*"abc"],
        manifest_version=1,
        plan_digest=bytes(32),
        rules=RULES,
        manifest_digest=script.manifest.digest,
        statement_digest=bytes(32),
    )
    forged = pb.Certificate(body=vote, attempt=0)
    forged.votes.append(sign_vote(script.keys.sign, vote, 0))
    for site in "abd":  # signed by c in their names
        forged.votes.add(site=site, signature=signature(LIAR, vote.model_digest))
    # To be fetched, if anybody believes it.
    script.disks[LIAR].commits[1] = pb.Commit(certificate=forged)
    script.disks[LIAR].versions.add(vote.model_digest)

    def lies(prepare: pb.Prepare) -> None:
        for site in "abd":
            script.tell(LIAR, site, _promise_of(script, prepare, 2**31))
            script.tell(LIAR, site, pb.Ahead(round=1, certificate=forged))

    hears(script, lies)
    script.train("b", rounds=1)
    commits_at_once(script, "somebody says that it is ahead")


# ---- evidence ----------------------------------------------------------------------------


def applied_in_anothers_name() -> None:
    """Two versions of one sum are brought as a's, who has signed neither."""
    script = Script()

    def lies(prepare: pb.Prepare) -> None:
        for version in (bytes(32), GENESIS):
            applied = pb.Applied(root_digest=bytes(32), model_digest=version)
            brought = pb.AppliedSum(round=1, attempt=prepare.attempt)
            brought.applied.CopyFrom(sign(script.keys, Kind.APPLIED, applied))
            brought.applied.site = "a"
            for site in "bd":
                script.tell(LIAR, site, brought)

    hears(script, lies)
    script.train("b", rounds=1)
    commits_at_once(script, "somebody brings what another one is said to have applied")


# ---- row 12 ------------------------------------------------------------------------------


def prepares_its_own() -> None:
    """Row 12: whenever an honest attempt begins the liar prepares its own next one."""
    script = Script()

    def lies(prepare: pb.Prepare) -> None:
        ours = prepare.attempt + 1
        while coordinator_of(script.manifest, 1, ours) != LIAR:
            ours += 1
        own = pb.Prepare()
        own.CopyFrom(prepare)
        own.attempt = ours
        own.promise.CopyFrom(_promise_of(script, prepare, ours))
        for site in "abd":
            script.tell(LIAR, site, own)

    hears(script, lies)
    script.train("b", rounds=1)
    commits_at_once(script, "somebody prepares attempts of its own")


def ends_for_one() -> None:
    """c ends the attempts that it leads for b alone; a and d have its bundle, and wait.

    It tells b what a and d promise, and promises b an attempt that never comes: so b would
    go on before them, and the three that are honest never be in the same attempt again.
    """
    script = Script()

    def answers(promised: pb.Promised) -> None:
        at = pb.Promise.FromString(promised.promise.body).attempt
        if coordinator_of(script.manifest, 1, at) == LIAR:
            ended = pb.Ended(federation_id=FEDERATION, round=1, attempt=at, reason="enough")
            told = pb.EndedAttempt(ended=sign(script.keys, Kind.ENDED, ended))
            script.tell(LIAR, "b", told)
        far = pb.Promise.FromString(promised.promise.body)
        far.attempt = 2**20
        far.ClearField("lock")
        far.ClearField("stated")
        script.tell(LIAR, "b", pb.Promised(promise=sign(script.keys, Kind.PROMISE, far)))

    def passes(sender: str, to: str, body: do.Body) -> bool:
        first = isinstance(body, pb.Prepare | pb.Bundle) and body.attempt == 0
        if sender == LIAR and to != "b":
            return isinstance(body, pb.Prepare | pb.Bundle | pb.RunWish | pb.Remembered)
        if to == LIAR and isinstance(body, pb.Promised):
            if sender == "b":
                script.at(script.now, answers, body)
                return False
            script.at(script.now, script.tell, LIAR, "b", body)
        ours = isinstance(body, pb.Promised | pb.EndedAttempt | pb.RunWish | pb.Remembered)
        return not first and (sender != LIAR or ours)

    script.passes = passes
    script.train("b", rounds=1)
    script.run_for(20_000.0)
    commits = [script.disks[site].commits.get(1) for site in script.honest]
    attempts = [one.certificate.attempt for one in commits if one is not None]
    claim(len(attempts) == 3, "honest attempts fail: the liar ends its own for one site")
    claim(max(attempts) <= 3, "honest attempts fail: the liar ends its own for one site")


def says_a_stopped_run_again() -> None:
    """Row 12: what a person has stopped begins again, and what is asked for instead does not."""
    script = Script()

    def asks(site: str, noise: float) -> pb.Signed:
        script.training.ClearField("privacy")
        if noise:
            script.training.privacy.CopyFrom(
                pb.PrivacyPlan(
                    clip_norm=1.0,
                    noise_multiplier=noise,
                    noise_floor=noise,
                    noise_decay=1.0,
                    first_round=1,
                )
            )
        script.train(site, rounds=50)
        signed = script.disks[site].durable.signed_run
        claim(signed is not None, "the script has gone another way")
        return signed or pb.Signed()

    script.passes = among(*script.everybody, without=pb.Prepare)
    noisy = asks("b", 1.0)
    script.run_for(1.0)
    script.stop("a")
    script.run_for(1.0)
    plain = asks("d", 0.0)
    script.run_for(1.0)
    for said in (noisy, plain, noisy):
        script.tells(script.honest, pb.RunWish(run=said))
    script.stop("a")
    script.run_for(1.0)
    for said in (noisy, plain, noisy):
        script.tells(script.honest, pb.RunWish(run=said))
    script.passes = among(*script.everybody)
    script.run_for(600.0)
    for site in script.honest:
        run = script.machines[site].run
        stopped = (
            run is not None and run.requested_by == "a" and not script.machines[site]._here.active
        )
        claim(stopped, "a run that a person has stopped goes on")


def supersedes() -> None:
    """Row 12: a run of the liar's takes the place of a person's, without its noise."""
    script = Script()
    privacy = pb.PrivacyPlan(
        clip_norm=1.0, noise_multiplier=1.0, noise_floor=1.0, noise_decay=1.0, first_round=1
    )
    script.training.privacy.CopyFrom(privacy)

    def lies(prepare: pb.Prepare) -> None:
        asked = pb.Run.FromString(prepare.run.body)
        plan = pb.TrainingPlan()
        plan.CopyFrom(asked.plan)
        plan.ClearField("privacy")
        ours = following(asked, LIAR, asked.federation_id, "ours", asked.target_round + 1, plan)
        for site in "abd":
            script.tell(LIAR, site, pb.RunWish(run=sign(script.keys, Kind.RUN, ours)))

    hears(script, lies)
    script.train("b", rounds=1)
    commits_at_once(script, "somebody has a run of its own")
