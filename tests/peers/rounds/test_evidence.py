"""Who has signed two things that exclude each other is shown to have; nobody else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts.statement import EncodedStatement, value_of
from peers.rounds import evidence
from peers.wire.certificates import CertificateError, sign_vote
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.support.signed_rounds import Stage

KINDS = (pb.TWO_PROMISES, pb.TWO_STATEMENTS, pb.TWO_APPLIED, pb.TWO_VOTES)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage("abcd", faulty_sites=1)


def signed(
    stage: Stage, kind: pb.EvidenceKind.ValueType, site: str, *, otherwise: bool = False
) -> pb.Signed:
    """What a site signs once, and what it may not sign beside it."""
    known = stage.statement()
    if kind == pb.TWO_PROMISES:
        return stage.promised(site, num_examples=7 if otherwise else 100).promise
    if kind == pb.TWO_STATEMENTS:
        other = EncodedStatement.of(stage.statement_of(rejected=["x"]))
        return stage.signed_statement(site, other if otherwise else known)
    if kind == pb.TWO_APPLIED:
        return stage.applied(site, known, b"x" * 32) if otherwise else stage.applied(site, known)
    return wrapped(voted(stage, site, otherwise=otherwise))


def voted(stage: Stage, site: str, *, attempt: int = 0, otherwise: bool = False) -> pb.Vote:
    lock = stage.lock(version=b"x" * 32) if otherwise else stage.lock()
    return sign_vote(stage.keys[site].sign, value_of(lock, stage.manifest), attempt)


def wrapped(vote: pb.Vote) -> pb.Signed:
    return pb.Signed(
        body=vote.SerializeToString(deterministic=True),
        site=vote.site,
        signature=vote.signature,
        certificate=vote.certificate,
    )


def shown(kind: pb.EvidenceKind.ValueType, first: pb.Signed, second: pb.Signed) -> pb.Evidence:
    return pb.Evidence(kind=kind, first=first, second=second)


def check(stage: Stage, found: pb.Evidence) -> str:
    return evidence.check_evidence(found, stage.us, stage.manifest)


@pytest.mark.parametrize("kind", [pb.TWO_PROMISES, pb.TWO_STATEMENTS, pb.TWO_VOTES])
def test_what_a_site_signs_in_another_federation_accuses_nobody(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    """With a key that counts here, too: as where it keeps a log of each of two models."""
    here = replace(stage.manifest, federation_id="elsewhere")
    found = shown(kind, signed(stage, kind, "d"), signed(stage, kind, "d", otherwise=True))
    assert check(stage, found) == "d"
    with pytest.raises(RemoteProtocolError, match="said elsewhere"):
        evidence.check_evidence(found, stage.us, here)


@pytest.mark.parametrize("kind", KINDS)
def test_two_signatures_that_contradict_each_other_convince_others(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    heard = evidence.SignedWords()
    assert heard.note(kind, signed(stage, kind, "d")) is None
    found = heard.note(kind, signed(stage, kind, "d", otherwise=True))
    assert found is not None
    assert found.kind == kind
    assert check(stage, found) == "d"
    assert kind in evidence.WORDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_that_repeats_itself_is_not_accused(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    heard = evidence.SignedWords()
    for site in "abcd":
        for _ in range(3):
            assert heard.note(kind, signed(stage, kind, site)) is None
    again = signed(stage, kind, "d")
    with pytest.raises(RemoteProtocolError, match="does not contradict itself"):
        check(stage, shown(kind, again, again))


@pytest.mark.parametrize("kind", KINDS)
def test_two_sites_that_differ_are_not_accused(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    heard = evidence.SignedWords()
    assert heard.note(kind, signed(stage, kind, "c")) is None
    assert heard.note(kind, signed(stage, kind, "d", otherwise=True)) is None
    theirs = signed(stage, kind, "c", otherwise=True)
    with pytest.raises(RemoteProtocolError, match="and another site are accused together"):
        check(stage, shown(kind, signed(stage, kind, "d"), theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_accused_by_what_it_did_not_sign(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    """The accuser signs the second one itself, and names its victim."""
    forged = signed(stage, kind, "c", otherwise=True)
    forged.site = "d"
    if kind == pb.TWO_VOTES:
        vote = pb.Vote.FromString(forged.body)
        vote.site = "d"
        forged.body = vote.SerializeToString(deterministic=True)
    with pytest.raises(CertificateError, match="bad signature of d"):
        check(stage, shown(kind, signed(stage, kind, "d"), forged))


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_of_another_kind_accuse_nobody(
    stage: Stage, kind: pb.EvidenceKind.ValueType
) -> None:
    first, second = (signed(stage, kind, "d", otherwise=otherwise) for otherwise in (False, True))
    for other in set(KINDS) - {kind}:
        with pytest.raises((CertificateError, RemoteProtocolError)):
            check(stage, shown(other, first, second))


def test_what_belongs_to_different_attempts_does_not_contradict(stage: Stage) -> None:
    heard = evidence.SignedWords()
    later = stage.promised("d", 1, num_examples=7)
    for promised in (stage.promised("d"), later):
        assert heard.note(pb.TWO_PROMISES, promised.promise) is None
    with pytest.raises(RemoteProtocolError, match="does not contradict itself"):
        check(stage, shown(pb.TWO_PROMISES, stage.promised("d").promise, later.promise))
    votes = voted(stage, "d"), voted(stage, "d", attempt=1, otherwise=True)
    assert [heard.vote(vote) for vote in votes] == [None, None]
    with pytest.raises(RemoteProtocolError, match="does not contradict itself"):
        check(stage, shown(pb.TWO_VOTES, *map(wrapped, votes)))


def test_a_question_and_the_sum_behind_it_do_not_contradict(stage: Stage) -> None:
    heard = evidence.SignedWords()
    question = EncodedStatement.of(stage.statement_of(kind=pb.QUESTION))
    for known in (question, stage.statement()):
        assert heard.note(pb.TWO_STATEMENTS, stage.signed_statement("d", known)) is None


def test_a_sum_and_a_version_stated_again_in_one_attempt_contradict(stage: Stage) -> None:
    """A site signs one of the two: which, follows from the bundle."""
    lock = stage.lock()
    promised = [stage.promised(site, 1, lock=lock) for site in stage.sites]
    again = stage.restated(lock, stage.bundle(promised, 1), 1)
    heard = evidence.SignedWords()
    assert heard.note(pb.TWO_STATEMENTS, stage.signed_statement("d", again)) is None
    found = heard.note(pb.TWO_STATEMENTS, stage.signed_statement("d", stage.statement(attempt=1)))
    assert found is not None
    assert check(stage, found) == "d"


def test_the_same_vote_with_another_signature_is_the_same_vote(stage: Stage) -> None:
    """ECDSA draws anew each time it signs; the words are what counts."""
    heard, vote = evidence.SignedWords(), voted(stage, "d")
    again = pb.Vote()
    again.CopyFrom(vote)
    again.signature = b"another"
    assert heard.vote(vote) is None
    assert heard.vote(again) is None
    with pytest.raises(RemoteProtocolError, match="does not contradict itself"):
        check(stage, shown(pb.TWO_VOTES, wrapped(vote), wrapped(vote)))


def test_votes_are_shown_as_the_messages_that_were_signed(stage: Stage) -> None:
    first, second = voted(stage, "d"), voted(stage, "d", otherwise=True)
    lie = wrapped(second)
    lie.body = b"\xff" * 8
    with pytest.raises(RemoteProtocolError, match="no Vote of protocol"):
        check(stage, shown(pb.TWO_VOTES, wrapped(first), lie))
    theirs = wrapped(voted(stage, "c", otherwise=True))
    theirs.site = "d"
    with pytest.raises(RemoteProtocolError, match="accused of another site's vote"):
        check(stage, shown(pb.TWO_VOTES, wrapped(first), theirs))


def test_a_flood_of_signatures_pushes_out_its_own_and_nothing_heard_before(
    stage: Stage,
) -> None:
    """What is remembered has an end; the first words of a site stay."""
    heard = evidence.SignedWords()

    def applied(number: int, version: bytes = bytes(32)) -> pb.Signed:
        body = pb.Applied(root_digest=number.to_bytes(32, "big"), model_digest=version)
        return sign(stage.keys["c"], Kind.APPLIED, body)

    heard.note(pb.TWO_PROMISES, stage.promised("d").promise)
    for number in range(5000):
        heard.note(pb.TWO_APPLIED, applied(number))
    assert heard.note(pb.TWO_APPLIED, applied(0, b"x" * 32)) is None, "pushed out"
    assert heard.note(pb.TWO_APPLIED, applied(4999, b"x" * 32)) is not None
    assert heard.note(pb.TWO_PROMISES, stage.promised("d", num_examples=7).promise) is not None


def test_what_a_site_said_last_is_told_to_it_when_it_asks(stage: Stage) -> None:
    heard = evidence.SignedWords()
    for attempt in (0, 2, 1):
        heard.note(pb.TWO_PROMISES, stage.promised("d", attempt).promise)
        heard.vote(voted(stage, "d", attempt=attempt))
        known = stage.statement(attempt=attempt)
        heard.note(pb.TWO_STATEMENTS, stage.signed_statement("d", known))
    question = EncodedStatement.of(stage.statement_of(attempt=3, kind=pb.QUESTION))
    heard.note(pb.TWO_STATEMENTS, stage.signed_statement("d", question))
    heard.note(pb.TWO_PROMISES, stage.promised("c", 9).promise)
    promise, stated, vote = (
        heard.latest_promise("d"),
        heard.latest_statement("d"),
        heard.latest_vote("d"),
    )
    assert promise is not None
    assert pb.Promise.FromString(promise.body).attempt == 2
    assert stated is not None
    assert pb.Statement.FromString(stated.body).attempt == 2
    assert vote is not None
    assert vote.attempt == 2
    heard.forget()
    assert heard.latest_promise("d") is None
    assert heard.latest_vote("d") is None
