"""Attacks on the history of commits: cut, doubled, begun elsewhere, and of a time before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.wire.certificates import (
    CertificateError,
    check_follows,
    verify_certificate,
    verify_chain,
)
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb
from tests.peers.wire.votes import (
    GENESIS,
    MANIFEST,
    NOW,
    QUORUM,
    Federation,
    a_body,
    edit,
    of_old,
)


def refused(match: str) -> pytest.RaisesExc[CertificateError]:
    return pytest.raises(CertificateError, match=match)


def a_history(fed: Federation, rounds: int) -> list[pb.Certificate]:
    history, parent = [], GENESIS
    for round_ in range(1, rounds + 1):
        body = a_body(round_, parent)
        history.append(fed.certify(body, attempt=round_ % 2))
        parent = body.model_digest
    return history


def check(fed: Federation, history: list[pb.Certificate], **options: int) -> None:
    verify_chain(history, fed.trust, {3: fed.manifest}.get, GENESIS, **options)


def test_an_unbroken_history_is_believed(fed: Federation) -> None:
    check(fed, a_history(fed, 4))
    check(fed, [])


def test_a_history_may_be_continued_from_the_middle(fed: Federation) -> None:
    history = a_history(fed, 4)
    parent = history[1].body.model_digest
    verify_chain(history[2:], fed.trust, {3: fed.manifest}.get, parent, first_round=3)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_history_with_a_round_cut_out_is_refused(fed: Federation, gone: int) -> None:
    history = a_history(fed, 3)
    del history[gone]
    with refused(f"has round {gone + 2} where {gone + 1} belongs"):
        check(fed, history)


def test_a_history_with_a_round_twice_is_refused(fed: Federation) -> None:
    history = a_history(fed, 2)
    with refused("has round 1 where 2 belongs"):
        check(fed, [history[0], history[0], history[1]])


def test_a_history_that_begins_elsewhere_is_refused(fed: Federation) -> None:
    with refused("round 1 continues version 00000000"):
        check(fed, [fed.certify(a_body(parent=bytes(32)))])


def test_a_round_that_continues_another_model_is_refused(fed: Federation) -> None:
    history = a_history(fed, 1)
    history.append(fed.certify(a_body(2, parent=bytes(32))))
    with refused("round 2 continues version 00000000"):
        check(fed, history)


def test_a_link_without_a_quorum_breaks_the_history(fed: Federation) -> None:
    history = a_history(fed, 3)
    del history[1].votes[0]
    with refused("round 2 has 3 votes, a quorum"):
        check(fed, history)


def test_a_round_under_an_unknown_manifest_is_refused(fed: Federation) -> None:
    with refused("manifest version 3, which is not known"):
        verify_chain(a_history(fed, 1), fed.trust, lambda _: None, GENESIS)


def test_a_history_does_not_go_back_to_an_older_manifest(fed: Federation) -> None:
    """Otherwise sites that were disabled since could commit a round behind the others' backs."""
    newer = replace(fed.manifest, version=4)
    body = a_body(manifest=newer)
    history = [fed.certify(body), fed.certify(a_body(2, body.model_digest))]
    with refused("versions do not go back"):
        verify_chain(history, fed.trust, {3: fed.manifest, 4: newer}.get, GENESIS)


def test_an_expelled_sites_key_certifies_nothing_under_its_old_manifest(
    fed: Federation,
) -> None:
    """Stolen, with f liars, it would be a quorum again: behind the expulsion nothing counts."""
    sites = tuple(replace(s, enabled=s.enabled and s.id != "epsilon") for s in MANIFEST.sites)
    newer = FederationManifest("med", 4, sites)
    head = fed.certify(a_body(manifest=newer), "alpha", "beta", "gamma")
    verify_certificate(head, fed.trust, newer, at=NOW)
    forged = fed.certify(
        a_body(2, head.body.model_digest), "alpha", "beta", "delta", "epsilon", attempt=1
    )
    fed.verify(forged)  # alone it is good: epsilon was in that manifest
    with refused("round 2 ran under manifest 3, the round before under 4"):
        check_follows(forged, head)
    with refused("'epsilon' is not an enabled site of manifest 4"):
        theirs = a_body(2, head.body.model_digest, manifest=newer)
        certificate = fed.certify(theirs, "alpha", "beta", "epsilon")
        verify_certificate(certificate, fed.trust, newer, at=NOW)


def test_a_locked_version_is_voted_on_though_a_contributor_was_expelled(
    fed: Federation,
) -> None:
    """It may be committed somewhere already; refused, it would block the round for good."""
    sites = tuple(replace(s, enabled=s.enabled and s.id != "gamma") for s in MANIFEST.sites)
    newer = FederationManifest("med", 4, sites)
    body = a_body(manifest=newer)
    assert "gamma" in body.contributors
    again = fed.certify(body, "alpha", "beta", "delta")
    verify_certificate(again, fed.trust, newer, at=NOW)
    for change in (edit("contributors", ["alpha", "zeta"]), edit("rejected", ["zeta"])):
        old = of_old(a_body())
        change(old)
        with refused("'zeta' is not an enabled site"):
            fed.verify(fed.certify(old))


# ---- rounds of a time when a majority decided -----------------------------------------------


def test_a_history_begins_with_rounds_that_a_majority_decided(fed: Federation) -> None:
    """They are verified by their own rules, for good; today's rounds follow them."""
    first = fed.certify(of_old(a_body()), "alpha", "beta", "gamma")
    second = fed.certify(a_body(2, first.body.model_digest))
    check(fed, [first, second])
    with refused("round 1 has 2 votes, a majority of the 5 sites is 3"):
        check(fed, [fed.certify(of_old(a_body()), "alpha", "beta")])


def test_no_round_is_decided_by_a_majority_behind_one_of_a_quorum(fed: Federation) -> None:
    first = fed.certify(a_body())
    back = fed.certify(of_old(a_body(2, first.body.model_digest)), "alpha", "beta", "gamma")
    with refused("rules do not go back"):
        check(fed, [first, back])
    with refused("rules do not go back"):
        check_follows(back, first)


def test_a_vote_of_old_is_none_of_today_and_the_other_way_round(fed: Federation) -> None:
    """Another label goes before it, so that no bytes of the one are bytes of the other."""
    body = a_body()
    old = fed.certify(of_old(body), *QUORUM)
    old.body.CopyFrom(body)
    with refused("the signature is not by"):
        fed.verify(old)
    today = fed.certify(body)
    today.body.CopyFrom(of_old(body))
    with refused("the signature is not by"):
        fed.verify(today)


def test_what_is_told_beside_a_vote_of_today_is_not_in_its_certificate(fed: Federation) -> None:
    """Loss and clip norm that each vote named for itself: whoever chose the votes chose them."""
    certificate = fed.certify(a_body())
    told = [(vote.mean_loss, vote.next_clip_norm) for vote in certificate.votes]
    assert set(told) == {(0.0, 0.0)}
    assert (certificate.body.mean_loss, certificate.body.next_clip_norm) == (0.5, 0.25)
