"""Attacks on the proof of a commit: replayed, borrowed, counted twice, mixed and cut."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity.authority import create_authority
from crypto.identity.trust import Trust
from peers.wire.certificates import (
    RULES,
    CertificateError,
    plan_digest,
    verify_certificate,
    verify_vote,
    vote_payload,
)
from peers.wire.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb
from tests.peers.wire.votes import (
    ENABLED,
    MANIFEST,
    NOW,
    Federation,
    a_body,
    edit,
    of_old,
)


def refused(match: str) -> pytest.RaisesExc[CertificateError]:
    return pytest.raises(CertificateError, match=match)


# ---- one vote ---------------------------------------------------------------------


def test_a_vote_of_an_enabled_site_counts(fed: Federation) -> None:
    verify_vote(fed.vote("alpha", a_body()), fed.trust, fed.manifest, at=NOW)


@pytest.mark.parametrize("site", ["zeta", "stranger"])
def test_a_site_that_is_disabled_or_not_listed_has_no_vote(fed: Federation, site: str) -> None:
    """Its certificate is good: the manifest decides who takes part."""
    with refused(f"{site}' is not an enabled site"):
        verify_vote(fed.vote(site, a_body()), fed.trust, fed.manifest, at=NOW)


def test_a_vote_in_the_name_of_another_site_is_refused(fed: Federation) -> None:
    vote = fed.vote("beta", a_body())
    vote.site = "alpha"
    with refused("'beta' signed a vote in the name of 'alpha'"):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW)


def test_a_vote_with_another_sites_certificate_is_refused(fed: Federation) -> None:
    vote = fed.vote("beta", a_body())
    vote.site, vote.certificate = "alpha", fed.identities["alpha"].certificate_der
    with refused("'alpha' is refused: the signature is not by"):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW)


@pytest.mark.parametrize(
    "change",
    [
        edit("round", 2),
        edit("parent_digest", bytes(32)),
        edit("model_digest", bytes(32)),
        edit("plan_digest", bytes(32)),
        edit("contributors", ["alpha", "beta"]),
        edit("rejected", ["delta"]),
        edit("statement_digest", bytes(32)),
        edit("mean_loss", 0.25),  # the next round's noise follows from these two:
        edit("next_clip_norm", 100.0),  # unsigned, they were a coordinator's to choose
    ],
)
def test_a_vote_says_nothing_about_any_other_body(
    fed: Federation, change: Callable[[pb.VoteBody], None]
) -> None:
    vote = fed.vote("alpha", a_body())
    change(vote.body)
    with refused("the signature is not by"):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (edit("federation_id", "law"), "in federation 'law', expected 'med'"),
        (edit("federation_id", "M" * 500), "a vote names a federation"),
        (edit("manifest_version", 4), "under manifest version 4, expected 3"),
        (edit("manifest_version", 0), "begin at 1"),
        (edit("round", 0), "begin at 1"),
        (edit("model_digest", b""), "model_digest has 32 bytes"),
        (edit("parent_digest", bytes(33)), "parent_digest has 32 bytes"),
        (edit("plan_digest", bytes(31)), "plan_digest has 32 bytes"),
        (edit("contributors", []), "1 to 256 contributors"),
        (edit("contributors", ["a"] * 257), "1 to 256 contributors"),
        (edit("contributors", ["beta", "alpha"]), "sorted"),
        (edit("contributors", ["alpha", "alpha"]), "each once"),
        (edit("contributors", ["Alpha"]), "site ids"),
        (edit("rejected", ["gamma"]), "a contributor or rejected"),
        (edit("rejected", ["zeta", "delta"]), "rejected sites are site ids, each once, sorted"),
        (edit("rejected", ["Zeta"]), "rejected sites are site ids"),
        (edit("rules", 1), "by rules 1, which are not known here"),
        (edit("rules", 3), "by rules 3, which are not known here"),
        (edit("rules", 0), "manifest_digest of 32 bytes in a vote by rules 0"),
        (edit("manifest_digest", b""), "manifest_digest of 0 bytes in a vote by rules 2"),
        (edit("statement_digest", bytes(31)), "statement_digest of 31 bytes"),
        (edit("manifest_digest", bytes(32)), "under another manifest of version 3"),
        (edit("mean_loss", math.nan), "a loss and a clip norm that are numbers"),
        (edit("next_clip_norm", math.inf), "a loss and a clip norm that are numbers"),
    ],
)
def test_a_body_out_of_bounds_is_refused(
    fed: Federation, change: Callable[[pb.VoteBody], None], expected: str
) -> None:
    vote = fed.vote("alpha", a_body())
    change(vote.body)
    with refused(expected):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW)
    with refused(expected):
        fed.verify(pb.Certificate(body=vote.body, votes=[vote]))


def test_a_vote_of_another_attempt_is_another_vote(fed: Federation) -> None:
    vote = fed.vote("alpha", a_body(), attempt=0)
    vote.attempt = 1
    with refused("the signature is not by"):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW)


def test_a_vote_with_an_expired_certificate_counts_only_in_history(fed: Federation) -> None:
    vote = fed.vote("alpha", a_body())
    with refused("expired"):
        verify_vote(vote, fed.trust, fed.manifest, at=NOW + timedelta(days=366))
    verify_vote(vote, fed.trust, fed.manifest, at=None)


def test_oversized_parts_of_a_vote_are_refused(fed: Federation) -> None:
    for field, size in (("signature", 81), ("certificate", 4097)):
        vote = fed.vote("alpha", a_body())
        setattr(vote, field, bytes(size))
        with refused("larger than any real one"):
            verify_vote(vote, fed.trust, fed.manifest, at=NOW)


# ---- a quorum -----------------------------------------------------------------------


def test_equal_votes_of_a_quorum_are_a_certificate(fed: Federation) -> None:
    fed.verify(fed.certify(a_body()))
    fed.verify(fed.certify(a_body(), *ENABLED, attempt=7))


def test_a_majority_is_no_quorum(fed: Federation) -> None:
    """Three of five: with one liar in both, other three could vote for another version."""
    with refused("3 votes, a quorum of the 5 sites is 4"):
        fed.verify(fed.certify(a_body(), "alpha", "beta", "gamma"))


@pytest.mark.parametrize("votes", [("alpha", "beta"), ("alpha", "gamma")])
def test_a_coordinator_of_three_gets_no_second_version_by_showing_two(
    fed: Federation, votes: tuple[str, str]
) -> None:
    """A quorum of three sites, of which one may lie, is all of them."""
    three = FederationManifest("med", 3, MANIFEST.sites[:2] + MANIFEST.sites[4:5])
    body = a_body(manifest=three)
    assert three.quorum == 3
    with refused("2 votes, a quorum of the 3 sites is 3"):
        verify_certificate(fed.certify(body, *votes), fed.trust, three, at=NOW)
    whole = fed.certify(body, "alpha", "beta", "gamma")
    verify_certificate(whole, fed.trust, three, at=NOW)


@pytest.mark.parametrize(
    ("enabled", "f", "quorum"), [(3, 1, 3), (4, 1, 3), (5, 1, 4), (7, 2, 5), (3, 0, 2), (5, 0, 3)]
)
def test_two_quorums_share_an_honest_site(enabled: int, f: int, quorum: int) -> None:
    sites = tuple(ManifestSite(f"s{n}", "h:1") for n in range(enabled))
    manifest = FederationManifest("med", 1, sites, f)
    assert manifest.quorum == quorum
    assert 2 * quorum - enabled > f


def test_a_replayed_vote_is_not_counted_twice(fed: Federation) -> None:
    certificate = fed.certify(a_body(), "alpha", "beta", "gamma")
    certificate.votes.append(certificate.votes[1])
    with refused("one twice"):
        fed.verify(certificate)


def test_a_second_signature_of_one_site_is_not_counted(fed: Federation) -> None:
    with refused("one twice"):
        fed.verify(fed.certify(a_body(), "alpha", "beta", "gamma", "beta"))


def test_a_vote_counted_under_another_name_is_noticed(fed: Federation) -> None:
    certificate = fed.certify(a_body(), "alpha", "beta", "delta", "beta")
    certificate.votes[3].site = "gamma"
    with refused("'beta' signed a vote in the name of 'gamma'"):
        fed.verify(certificate)


@pytest.mark.parametrize("site", ["zeta", "stranger"])
def test_a_disabled_site_does_not_make_a_quorum(fed: Federation, site: str) -> None:
    with refused("not an enabled site"):
        fed.verify(fed.certify(a_body(), "alpha", "beta", "delta", site))


def test_one_bad_vote_among_many_refuses_the_certificate(fed: Federation) -> None:
    certificate = fed.certify(a_body(), *ENABLED)
    certificate.votes[4].signature = certificate.votes[3].signature
    with refused("'gamma' is refused"):
        fed.verify(certificate)


def test_votes_for_different_models_do_not_add_up(fed: Federation) -> None:
    certificate = fed.certify(a_body(), "alpha", "beta", "delta")
    certificate.votes.append(fed.vote("gamma", a_body(model=bytes(32))))
    with refused("'gamma' voted for something else"):
        fed.verify(certificate)
    certificate.votes[3].ClearField("body")  # hiding it does not help
    with refused("'gamma' is refused: the signature is not by"):
        fed.verify(certificate)


def test_votes_of_different_attempts_do_not_add_up(fed: Federation) -> None:
    """Between them another version may have been proven, and voted for by a quorum."""
    certificate = fed.certify(a_body(), "beta", "gamma", "delta", attempt=2)
    early = fed.vote("alpha", a_body(), attempt=0)
    certificate.votes.append(early)
    with refused("do not add up"):
        fed.verify(certificate)
    early.attempt = 2
    certificate.votes[3].CopyFrom(early)
    with refused("'alpha' is refused: the signature is not by"):
        fed.verify(certificate)


def test_a_certificate_of_an_older_manifest_is_judged_by_that_manifest(fed: Federation) -> None:
    certificate = fed.certify(a_body())
    grown = replace(fed.manifest, version=4)
    with refused("under manifest version 3, expected 4"):
        verify_certificate(certificate, fed.trust, grown, at=NOW)


def test_an_empty_certificate_proves_nothing(fed: Federation) -> None:
    with refused("a vote names a federation"):
        fed.verify(pb.Certificate())
    with refused("0 votes"):
        fed.verify(pb.Certificate(body=a_body()))
    with refused("at most 256 votes"):
        fed.verify(pb.Certificate(body=a_body(), votes=[pb.Vote()] * 257))


def test_a_certificate_of_another_federation_is_refused(fed: Federation, tmp_path: Path) -> None:
    create_authority(tmp_path, "med")
    stranger = Trust.from_pem((tmp_path / "ca.crt").read_bytes())
    with refused("not issued by this federation's authority"):
        verify_certificate(fed.certify(a_body()), stranger, fed.manifest, at=NOW)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=300), where=st.sampled_from(["signature", "certificate", "site"]))
def test_garbage_in_a_vote_never_raises_anything_but_our_error(
    fed: Federation, garbage: bytes, where: str
) -> None:
    certificate = fed.certify(a_body())
    value = garbage.decode("latin-1") if where == "site" else garbage
    setattr(certificate.votes[1], where, value)
    with pytest.raises(CertificateError):
        fed.verify(certificate)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_no_changed_byte_of_a_certificate_yields_another_commit(
    fed: Federation, position: int, mask: int
) -> None:
    original = fed.certify(a_body())
    raw = bytearray(original.SerializeToString(deterministic=True))
    raw[position % len(raw)] ^= mask
    certificate = pb.Certificate()
    try:
        certificate.ParseFromString(bytes(raw))
        fed.verify(certificate)
    except CertificateError:
        return
    except Exception as error:  # protobuf's own refusal, before our code is reached
        assert type(error).__name__ == "DecodeError"
        return
    # What is not signed may differ (losses of old, the clock), what was decided may not.
    assert (certificate.body, certificate.attempt) == (original.body, original.attempt)


# ---- what is signed -----------------------------------------------------------------


def test_the_signed_bytes_are_the_documented_ones() -> None:
    """Pinned: two releases that encode differently could not verify each other's votes."""
    body = a_body()
    before = (
        b"hanse-vote-v2\0"
        + b"\0\0\0\x03med"
        + struct.pack(">QIQ", 1, 5, 3)  # round, attempt, manifest version
        + (body.parent_digest + body.model_digest + body.plan_digest)
        + (b"\0\0\0\x03" + b"\0\0\0\x05alpha" + b"\0\0\0\x04beta" + b"\0\0\0\x05gamma")
    )
    rejected = b"\0\0\0\x01" + b"\0\0\0\x05delta"
    behind = body.manifest_digest + body.statement_digest + struct.pack(">dd", 0.5, 0.25)
    assert vote_payload(body, 5) == before + behind
    body.rejected.append("delta")
    assert vote_payload(body, 5) == before + rejected + behind


def test_the_signed_bytes_of_old_are_what_they_were() -> None:
    """Else histories that are years old would not verify any more."""
    body = of_old(a_body())
    expected = (
        b"hanse-vote-v1\0"
        + b"\0\0\0\x03med"
        + struct.pack(">QIQ", 1, 5, 3)
        + (body.parent_digest + body.model_digest + body.plan_digest)
        + (b"\0\0\0\x03" + b"\0\0\0\x05alpha" + b"\0\0\0\x04beta" + b"\0\0\0\x05gamma")
    )
    assert vote_payload(body, 5) == expected
    body.rejected.append("delta")
    assert vote_payload(body, 5) == expected + b"\0\0\0\x01" + b"\0\0\0\x05delta"


digests = st.binary(min_size=32, max_size=32)
ids = st.from_regex(r"[a-z0-9][a-z0-9-]{0,5}", fullmatch=True)
of_today: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    rules=st.just(RULES),
    manifest_digest=digests,
    statement_digest=digests,
    mean_loss=st.floats(0, 2),
    next_clip_norm=st.floats(0, 2),
)
bodies = st.builds(
    lambda contributors, rejected, rules, **fields: pb.VoteBody(
        contributors=sorted(contributors),
        rejected=sorted(rejected - contributors),
        **rules,
        **fields,
    ),
    rules=st.one_of(st.just({}), of_today),
    contributors=st.sets(ids, min_size=1, max_size=4),
    rejected=st.sets(ids, max_size=2),
    federation_id=ids,
    round=st.integers(1, 3),
    manifest_version=st.integers(1, 3),
    parent_digest=digests,
    model_digest=digests,
    plan_digest=digests,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(one=bodies, two=bodies, attempts=st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_two_different_votes_never_sign_the_same_bytes(
    one: pb.VoteBody, two: pb.VoteBody, attempts: tuple[int, int]
) -> None:
    same = one == two and attempts[0] == attempts[1]
    assert (vote_payload(one, attempts[0]) == vote_payload(two, attempts[1])) == same


def test_every_field_of_a_plan_changes_its_digest() -> None:
    """Also one that is added to federation.proto tomorrow and forgotten in the encoding."""
    plans = [pb.TrainingPlan()]
    parts = {"privacy": pb.PrivacyPlan.DESCRIPTOR, "learning": pb.LearningPlan.DESCRIPTOR}
    for field in pb.TrainingPlan.DESCRIPTOR.fields:
        plan = pb.TrainingPlan()
        if field.name in parts:
            getattr(plan, field.name).SetInParent()
        else:
            setattr(plan, field.name, 1)
        plans.append(plan)
    for name, part in parts.items():
        for field in part.fields:
            plan = pb.TrainingPlan()
            setattr(getattr(plan, name), field.name, "x" if field.name == "recipe" else 1)
            plans.append(plan)
    assert len({plan_digest(plan) for plan in plans}) == len(plans)


def test_a_plan_without_noise_has_the_digest_it_had_before_there_was_any() -> None:
    """Certificates of the past must stay what they were."""
    plan = pb.TrainingPlan(adapt=pb.HEAD, local_epochs=3, batch_size=8, learning_rate=0.5, seed=9)
    assert plan_digest(plan).hex()[:16] == "3153fd430628b449"


def test_an_unknown_adaptation_has_a_digest_too() -> None:
    unknown = pb.TrainingPlan.FromString(b"\x08" + 9 * b"\xff" + b"\x01")
    assert len(plan_digest(unknown)) == 32
