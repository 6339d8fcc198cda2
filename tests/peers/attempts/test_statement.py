"""Attacks on what an attempt is about: its statement, the certificate, the proof, the lock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import pytest

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle
from peers.attempts.participation import Participation, check_statement
from peers.attempts.scale import Scaled, read_scale
from peers.attempts.statement import (
    EncodedStatement,
    HeldLock,
    read_certificate,
    read_lock,
    value_of,
)
from peers.wire import signing
from peers.wire.certificates import CertificateError, verify_vote, vote_payload
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.messages import parse
from peers.wire.signing import Kind, digest_of, sign, sign_bytes
from proto import federation_pb2 as pb
from tests.simulation.network import plan
from tests.support.signed_rounds import EXPONENTS, VERSION, Stage, manifest_of


@pytest.fixture(scope="module")
def stage() -> Stage:
    """Four sites, of which one may lie; b coordinates, c deals the key."""
    return Stage("abcd", faulty_sites=1)


def refused(match: str) -> pytest.RaisesExc[RemoteProtocolError]:
    return pytest.raises(RemoteProtocolError, match=match)


def certificate(stage: Stage, message: pb.StatementCertificate) -> EncodedStatement:
    return read_certificate(message, stage.us, stage.manifests.get)


# ---- the certificate of a statement --------------------------------------------------------


def test_a_quorum_of_signatures_certifies_a_statement(stage: Stage) -> None:
    known = stage.statement()
    assert certificate(stage, stage.certified(known, "acd")).digest == known.digest


def test_fewer_do_not_and_no_site_counts_twice(stage: Stage) -> None:
    known = stage.statement()
    with refused("a statement has 2 signatures, 3 of the 4 sites decide"):
        certificate(stage, stage.certified(known, "ac"))
    with refused("a statement has 2 signatures, 3 of the 4"):
        certificate(stage, stage.certified(known, "aac"))
    with refused("a statement has 3 signatures"):
        certificate(stage, stage.certified(known, "aacd"))


def test_of_three_sites_two_can_not_be_told_another_sum_each() -> None:
    """The quorum is all three: whichever the liar shows to one, the other has to sign it, too."""
    three = Stage("abc", faulty_sites=1)
    one, other = three.statement(), EncodedStatement.of(three.statement_of(rejected=["x"]))
    with refused("a statement has 2 signatures, 3 of the 3 sites decide"):
        certificate(three, three.certified(one, "ab"))
    with refused("a statement has 2 signatures, 3 of the 3 sites decide"):
        certificate(three, three.certified(other, "bc"))


def test_signatures_under_one_statement_are_none_under_another(stage: Stage) -> None:
    message = stage.certified(stage.statement())
    message.statement = stage.statement_of(rejected=["x"]).SerializeToString(deterministic=True)
    with pytest.raises(CertificateError, match="bad signature of a"):
        certificate(stage, message)


def test_a_vote_or_a_promise_with_the_same_bytes_certifies_nothing(stage: Stage) -> None:
    known, message = stage.statement(), stage.certified(stage.statement())
    for signature in message.signatures:
        signature.CopyFrom(stage.keys[signature.site].sign(Kind.PROMISE.value + known.raw))
    with pytest.raises(CertificateError, match="bad signature of a"):
        certificate(stage, message)


def test_a_statement_is_certified_by_the_manifest_that_it_names(stage: Stage) -> None:
    """Who was expelled since signs no more, and who came since does not count for it."""
    known = stage.statement()
    with refused("goes by manifest 1, which is not known here"):
        read_certificate(stage.certified(known), stage.us, lambda _: None)
    for other in (manifest_of("abce"), manifest_of("abcd", 0)):
        with refused("goes by manifest 1, which is not known here"):
            read_certificate(stage.certified(known), stage.us, {1: other}.get)


# ---- the proof of a version ----------------------------------------------------------------


def read(stage: Stage, lock: pb.Lock) -> HeldLock:
    return read_lock(lock, stage.us, stage.manifests.get)


def test_more_sites_than_may_lie_prove_a_version(stage: Stage) -> None:
    known = stage.statement()
    held = read(stage, stage.lock_of(known, "ad"))
    assert held.name == pb.LockName(attempt=0, root_digest=known.digest, model_digest=VERSION)


def test_a_version_that_only_a_liar_made_is_not_proven(stage: Stage) -> None:
    """An Accept of any vector, once: the coordinator's word was enough for it."""
    known = stage.statement()
    with refused("1 sites have opened the sum, 2 prove a version"):
        read(stage, stage.lock_of(known, "b", version=b"poison".ljust(32)))
    twice = stage.lock_of(known, "bb")
    with refused("1 sites have opened the sum, 2 prove a version"):
        read(stage, twice)
    with refused("a proof is of versions that differ"):
        mixed = stage.lock_of(known, "a")
        mixed.proof.append(stage.applied("b", known, b"poison".ljust(32)))
        read(stage, mixed)


def test_a_version_without_a_certified_sum_is_not_proven(stage: Stage) -> None:
    """Two liars of seven may say what they made of a sum; three are needed, and a quorum."""
    known = stage.statement()
    lock = stage.lock_of(known)
    del lock.certificate.signatures[:2]
    with refused("a statement has 2 signatures"):
        read(stage, lock)


def test_what_was_made_of_another_sum_proves_nothing(stage: Stage) -> None:
    known, other = stage.statement(), EncodedStatement.of(stage.statement_of(rejected=["x"]))
    lock = stage.lock_of(known)
    del lock.proof[:]
    lock.proof.extend(stage.applied(site, other) for site in "ab")
    with refused("a proof is of another sum"):
        read(stage, lock)


def test_loss_and_clip_norm_are_proven_with_the_version(stage: Stage) -> None:
    """One that lies about them is not equal to the honest ones, and so not in the proof."""
    known = stage.statement()
    lie = pb.Applied(root_digest=known.digest, model_digest=VERSION, mean_loss=0.0)
    lock = stage.lock_of(known, "a")
    lock.proof.append(sign(stage.keys["b"], Kind.APPLIED, lie))
    with refused("a proof is of versions that differ"):
        read(stage, lock)


def test_a_question_is_no_sum_and_locks_nothing(stage: Stage) -> None:
    question = EncodedStatement.of(stage.statement_of(kind=pb.QUESTION))
    with refused("a lock is of a sum, not of a question"):
        read(stage, stage.lock_of(question))


# ---- a version stated again ----------------------------------------------------------------


def restated(stage: Stage, **changed: object) -> tuple[pb.Lock, HeldLock]:
    """The lock of attempt 1, in which the version of attempt 0 was stated again."""
    lock = stage.lock()
    promised = [stage.promised(site, 1, lock=lock) for site in stage.sites]
    known = stage.restated(lock, stage.bundle(promised, 1), 1)
    for name, value in changed.items():
        setattr(known.message, name, value)
    known = EncodedStatement.of(known.message)
    message = pb.Lock(
        certificate=stage.certified(known), root=lock.root.raw, proof=lock.message.proof
    )
    return message, lock


def test_a_version_stated_again_needs_no_new_proof(stage: Stage) -> None:
    message, lock = restated(stage)
    held = read(stage, message)
    assert held.name.attempt == 1
    assert (held.root.digest, held.applied) == (lock.root.digest, lock.applied)


def test_a_version_stated_again_is_the_one_that_was_proven(stage: Stage) -> None:
    message, _ = restated(stage, model_digest=b"poison".ljust(32))
    with refused("a lock proves another version than it restates"):
        read(stage, message)
    message, _ = restated(stage, root_digest=b"other".ljust(32))
    with refused("a lock shows another sum than it restates"):
        read(stage, message)
    message, _ = restated(stage, parent_digest=b"other".ljust(32))
    with refused("a lock restates the sum of another round"):
        read(stage, message)


def test_a_lock_shows_its_sum_once(stage: Stage) -> None:
    known = stage.statement()
    message = stage.lock_of(known)
    message.root = known.raw
    with refused("a lock shows the same statement twice"):
        read(stage, message)


def test_what_is_voted_for_follows_from_the_lock(stage: Stage) -> None:
    """Nobody chooses a word of it: it is of the statement, the proof and the manifest."""
    lock = stage.lock()
    body = value_of(lock, stage.manifest)
    assert (body.model_digest, body.statement_digest) == (VERSION, lock.root.digest)
    assert body.mean_loss == lock.applied.mean_loss == 0.5
    assert list(body.contributors) == ["a", "b", "c", "d"]
    assert body.manifest_digest == stage.manifest.digest
    assert vote_payload(body, 0)


# ---- what a site signs ---------------------------------------------------------------------


def checked(
    stage: Stage,
    statement: pb.Statement,
    *,
    bundle: Bundle | None = None,
    made: pb.Plan | None = None,
    question: EncodedStatement | None = None,
    left_out: str = "",
    expelled: str = "",
) -> None:
    """As every site holds a statement against what it has derived, witnesses too."""
    bundle = bundle or stage.bundle()
    check_statement(
        EncodedStatement.of(statement),
        stage.ground(),
        bundle.digest,
        bundle.run_digest,
        made or stage.plan(bundle),
        stage.us,
        left_out,
        question,
        frozenset(expelled),
    )


def test_an_honest_statement_is_signed(stage: Stage) -> None:
    checked(stage, stage.statement_of())
    checked(stage, stage.statement_of(sites="abc"))


def other_weights(statement: pb.Statement) -> None:
    statement.plan.participants[0].num_examples *= 1000


@pytest.mark.parametrize(
    "change",
    [
        other_weights,
        lambda s: setattr(s.plan, "full_weight", 10**6),
        lambda s: setattr(s.plan.training, "min_participants", 2),
        lambda s: setattr(s.plan, "faulty_sites", 0),
        lambda s: (s.plan.ClearField("noise_multiplier"), s.plan.training.ClearField("privacy")),
        lambda s: setattr(s.plan, "key_dealer", "d"),
        lambda s: s.plan.participants.__delitem__(3),
        lambda s: setattr(s.plan, "draw", 7),
    ],
    ids=["weight", "unit", "minimum", "f", "privacy", "dealer", "participants", "draw"],
)
def test_a_sum_by_another_plan_than_the_promises_give_is_not_signed(
    change: Callable[[pb.Statement], None],
) -> None:
    """A plan was the coordinator's to fill in, once: weights of 100,000, a run's noise left out."""
    training = plan(min_participants=3)
    training.privacy.CopyFrom(
        pb.PrivacyPlan(
            clip_norm=0.5, noise_multiplier=1.0, noise_floor=1.0, noise_decay=1.0, first_round=1
        )
    )
    stage = Stage("abcd", training=training)
    honest = stage.statement_of()
    checked(stage, honest)
    change(honest)
    with pytest.raises(RemoteProtocolError, match=r"states another plan than follows|expected"):
        checked(stage, honest, made=stage.plan())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", 2),
        ("attempt", 1),
        ("parent_digest", bytes(32)),
        ("bundle_digest", bytes(32)),
        ("run_digest", bytes(32)),
        ("manifest_version", 2),
        ("manifest_digest", bytes(32)),
        ("federation_id", "elsewhere"),
    ],
)
def test_a_statement_of_anything_else_is_not_signed(
    stage: Stage, field: str, value: object
) -> None:
    with refused("b makes a statement of another attempt"):
        checked(stage, stage.statement_of(**{field: value}))  # type: ignore[arg-type]


def test_a_sum_of_too_few_is_not_signed(stage: Stage) -> None:
    for sites in ("ab", "c"):
        with refused(f"states a sum of {len(sites)}; the plan needs 3"):
            checked(stage, stage.statement_of(sites=sites))


def test_a_sum_that_is_one_sites_update_is_not_signed() -> None:
    """Weights were clipped for all; without those who dropped out one stands out."""
    stage = Stage("abcde", training=plan(min_participants=3))
    told = {"a": 40, "b": 20, "c": 20, "d": 2, "e": 2}
    bundle = stage.bundle([stage.promised(s, num_examples=n) for s, n in told.items()])
    checked(stage, stage.statement_of(bundle, sites="abc"), bundle=bundle)
    with refused("one site weighs so much that the sum would tell its update"):
        checked(stage, stage.statement_of(bundle, sites="ade"), bundle=bundle)


def test_nobody_is_called_rejected_but_by_what_sites_have_signed(stage: Stage) -> None:
    """A certificate names them, for everybody and for good."""
    checked(stage, stage.statement_of(sites="abc", rejected=["d"]), left_out="d")
    with refused("b rejects d; by what sites have signed it would be nobody"):
        checked(stage, stage.statement_of(sites="abc", rejected=["d"]))
    with refused("b rejects nobody; by what sites have signed it would be d"):
        checked(stage, stage.statement_of(sites="abc"), left_out="d")


def test_nobody_is_summed_and_kept_out_or_opened_twice(stage: Stage) -> None:
    with refused("b sums updates that it rejects"):
        checked(stage, stage.statement_of(sites="abc", rejected=["a"]))
    with refused("b asks for both secrets of a site"):
        checked(stage, stage.statement_of(sites="abc", dropouts=["a", "d"]))
    with refused("b states a sum of sites that take no part"):
        checked(stage, stage.statement_of(sites="abc", dropouts=["x"]))


def test_the_update_of_a_site_that_was_expelled_meanwhile_is_not_summed(stage: Stage) -> None:
    with refused("with the update of d, expelled since"):
        checked(stage, stage.statement_of(), expelled="d")
    checked(stage, stage.statement_of(sites="abc"), expelled="d")


# ---- contributions: in their owners' words ---------------------------------------------------


def with_contribution(stage: Stage, signed: pb.Signed, place: int = 3) -> pb.Statement:
    statement = stage.statement_of()
    statement.contributions[place].CopyFrom(signed)
    return statement


def test_a_contribution_on_another_scale_is_not_summed(stage: Stage) -> None:
    """Exponents 40 higher, told to one only: its integers would be nothing beside the others'."""
    shifted = tuple(exponent + 40 for exponent in EXPONENTS)
    victim = stage.contribution("d", stage.plan(), shifted)
    with refused("b sums an update that d made for something else"):
        checked(stage, with_contribution(stage, victim))
    everyone = stage.statement_of()
    everyone.scale_exponents[0] += 40
    with refused("b sums an update that a made for something else"):
        checked(stage, everyone)


def test_a_contribution_to_another_plan_is_not_summed(stage: Stage) -> None:
    other = stage.plan(stage.bundle([stage.promised(site) for site in "abd"]))
    with refused("b sums an update that d made for something else"):
        checked(stage, with_contribution(stage, stage.contribution("d", other)))


def test_a_contribution_in_another_sites_name_is_not_summed(stage: Stage) -> None:
    forged = stage.contribution("b", stage.plan())
    forged.site = "d"
    with pytest.raises(CertificateError, match="bad signature of d"):
        checked(stage, with_contribution(stage, forged))


def test_a_contribution_without_tags_is_not_summed(stage: Stage) -> None:
    """Its nonce is what the proof of the sum goes by; only the coordinator has none."""
    told = pb.Contribution.FromString(stage.contribution("d", stage.plan()).body)
    told.nonce = b""
    with refused("b shows tags of d that prove nothing"):
        checked(stage, with_contribution(stage, sign(stage.keys["d"], Kind.CONTRIBUTION, told)))
    told.nonce = b"n" * 16
    with refused("b shows tags of b that prove nothing"):
        lead = sign(stage.keys["b"], Kind.CONTRIBUTION, told)
        checked(stage, with_contribution(stage, lead, place=1))


def test_the_key_is_the_dealers_and_of_this_plan(stage: Stage) -> None:
    told = pb.KeyCommitment(
        plan_digest=digest_of(stage.plan()), public_digest=bytes(32), secret_digest=bytes(32)
    )
    with refused("b states no key"):
        theirs = sign(stage.keys["d"], Kind.KEY_COMMITMENT, told)
        checked(stage, stage.statement_of(commitment=theirs))
    with refused("b states no key"):
        told.plan_digest = bytes(32)
        checked(
            stage,
            stage.statement_of(commitment=sign(stage.keys["c"], Kind.KEY_COMMITMENT, told)),
        )


def test_what_is_signed_has_one_encoding_and_no_unknown_fields(stage: Stage) -> None:
    """Padded, it would be kept and passed on by honest sites, until they can send no more."""
    made = stage.plan()
    honest = stage.contribution("d", made)
    unknown = b"\xa2\x06\x04" + b"pads"
    twice = pb.Contribution(plan_digest=bytes(32)).SerializeToString()
    for body in (honest.body + unknown, twice + honest.body):
        by = sign_bytes(stage.keys["d"], Kind.CONTRIBUTION, body)
        padded = pb.Signed(body=body, site="d", signature=by.signature, certificate=by.certificate)
        with refused("Contribution is "):
            signing.read(stage.us, Kind.CONTRIBUTION, pb.Contribution, padded, stage.manifest)
    padded = pb.Signed.FromString(honest.SerializeToString() + unknown)
    with refused("Signed is larger than its fields"):
        signing.read(stage.us, Kind.CONTRIBUTION, pb.Contribution, padded, stage.manifest)
    padded = pb.Signed.FromString(honest.SerializeToString() + unknown)
    message = pb.Contributed(round=1, contribution=padded)
    with refused("Contributed is larger than its fields"):
        parse(pb.Contributed, message.SerializeToString())


# ---- what a site knows of its own ------------------------------------------------------------


def participant(stage: Stage, site: str, *, secret: bytes = b"s" * 32) -> Participation:
    """A site that has trained, holds the key, and has sent its update."""
    made = stage.plan()
    part = Participation(site, stage.ground(), made, stage.keys[site])
    part.worked(do.LocalTrained(1, 0, EXPONENTS))
    part.worked(do.ContextHeld(1, 0, secret))
    part.scale(scaled(stage, made, dict.fromkeys("abcd", EXPONENTS)))
    nonce = b"" if site == made.coordinator else b"n" * 16
    part.worked(do.UpdateReady(1, 0, hashlib.sha256(site.encode()).digest(), nonce))
    return part


def scale(stage: Stage, made: pb.Plan, told: Mapping[str, tuple[int, ...]]) -> pb.Scale:
    return pb.Scale(
        round=1,
        exponents=[
            sign(
                stage.keys[site],
                Kind.EXPONENTS,
                pb.Exponents(plan_digest=digest_of(made), scale_exponents=exponents),
            )
            for site, exponents in told.items()
        ],
    )


def scaled(stage: Stage, made: pb.Plan, told: Mapping[str, tuple[int, ...]]) -> Scaled:
    return read_scale(scale(stage, made, told), made, stage.ground(), stage.us)


def test_a_site_signs_what_it_has_sent_itself(stage: Stage) -> None:
    for site in "abcd":
        participant(stage, site).check_own(stage.statement_of())
        participant(stage, site).check_own(stage.statement_of(sites="abcd".replace(site, "")))


def test_another_contribution_of_ours_than_we_signed_is_noticed(stage: Stage) -> None:
    """Of an earlier attempt, say, or of a key that was stolen: nobody else can tell."""
    told = pb.Contribution.FromString(stage.contribution("d", stage.plan()).body)
    told.upload_digest = bytes(32)
    statement = with_contribution(stage, sign(stage.keys["d"], Kind.CONTRIBUTION, told))
    checked(stage, statement)
    participant(stage, "a").check_own(statement)
    with refused("b states another contribution than ours"):
        participant(stage, "d").check_own(statement)


def test_a_scale_that_does_not_follow_from_what_all_told_is_noticed(stage: Stage) -> None:
    """Each site takes the largest for itself: no coordinator tells it one."""
    statement = stage.statement_of(exponents=(9, 9))
    victim = participant(stage, "d")
    del statement.contributions[3]
    statement.contributions.append(stage.contribution("d", stage.plan()))
    with refused("b states another scale than follows from what all told"):
        victim.check_own(statement)


def test_exponents_are_passed_on_in_their_owners_words(stage: Stage) -> None:
    made = stage.plan()
    part = Participation("d", stage.ground(), made, stage.keys["d"])
    part.worked(do.LocalTrained(1, 0, EXPONENTS))
    told = dict.fromkeys("abcd", EXPONENTS)
    with refused("b passes on exponents that are not ours"):
        part.scale(scaled(stage, made, {**told, "d": (41, 42)}))
    other = stage.plan(stage.bundle([stage.promised(site) for site in "abd"]))
    with refused("b passes on what a told of another plan"):
        read_scale(scale(stage, other, told), made, stage.ground(), stage.us)
    forged = scale(stage, made, told)
    forged.exponents[0].body = forged.exponents[1].body[:-1] + b"\x50"
    with pytest.raises(CertificateError):
        read_scale(forged, made, stage.ground(), stage.us)
    assert part.scale(scaled(stage, made, {**told, "a": (60, 60)})) == []
    (encrypt,) = [
        effect
        for effect in part.worked(do.ContextHeld(1, 0, b"s" * 32))
        if isinstance(effect, do.HideUpdate)
    ]
    assert encrypt.scale_exponents == EXPONENTS, "a is left out, by d as by everybody"


def test_who_is_left_out_of_the_exponents_says_so_to_its_people(stage: Stage) -> None:
    made = stage.plan()
    part = Participation("d", stage.ground(), made, stage.keys["d"])
    others = dict.fromkeys("abc", EXPONENTS)
    assert part.scale(scaled(stage, made, others)) == [], "it has told nothing yet"
    part.worked(do.LocalTrained(1, 0, EXPONENTS))
    (progress,) = part.scale(scaled(stage, made, others))
    assert isinstance(progress, do.Progress)
    assert progress.message.startswith("b goes on without our update: what we told came late")


def test_a_key_that_the_dealer_did_not_sign_is_noticed_by_who_holds_it(stage: Stage) -> None:
    """A dealer that gives two holders two keys would have them open two versions."""
    participant(stage, "a").check_own(stage.statement_of())
    with refused("c dealt us another key than it signed"):
        participant(stage, "d", secret=b"x" * 32).check_own(stage.statement_of())


def test_public_keys_that_we_did_not_share_with_are_noticed() -> None:
    stage = Stage("abcd", training=plan(min_participants=3, mode=pb.MASKING))
    statement = stage.statement_of()
    checked(stage, statement)
    part = Participation("d", stage.ground(), stage.plan(), stage.keys["d"])
    part.worked(do.ContextHeld(1, 0, statement.roster_digest))
    part.check_own(stage.statement_of(sites="abc"))
    statement = stage.statement_of(sites="abc", roster_digest=bytes(32))
    with refused("b states other public keys than those of our shares"):
        part.check_own(statement)


def test_votes_under_that_version_of_a_manifest_of_other_sites_are_void(
    stage: Stage,
) -> None:
    body = value_of(stage.lock(), stage.manifest)
    other = FederationManifest(stage.manifest.federation_id, 1, manifest_of("abcde").sites, 1)
    vote = pb.Vote(body=body, site="a")
    with pytest.raises(CertificateError, match="another manifest of version 1"):
        verify_vote(vote, None, other, at=None)  # type: ignore[arg-type]  # not reached
