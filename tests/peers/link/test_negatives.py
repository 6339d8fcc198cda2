"""Fed-negatives: what may be asked, what is answered, and what a reply can hold at all."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc
from crypto.arrays import Float32

# isort: split
import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.disclosure import Projections, noisy
from daemon.learning.retriever.peer_negatives import AskingTerms, Disclosed, disclosed, same_above
from daemon.services.negatives import Asking, AskOptions, own_secret
from peers.link.contacts import PeerStatistics
from peers.link.negatives import AnswerPolicy, Declined, Desk, QuotaSpent, nearest, select
from peers.wire.errors import PeerBusy, PeerRefused, PeerUnreachable, RemoteProtocolError
from peers.wire.messages import check, parse
from peers.wire.negative_bounds import (
    MAX_QUERIES,
    VECTOR_BYTES,
    answers_of,
    buckets_of,
    count_of,
    most_queries,
    queries_of,
    reply_of,
)
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import QUICK, KeepsAll, Site, running
from tests.support.strangers import beta_calling, calling, refused

DIGEST = b"\x07" * 32
D = 8


def units(n: int, d: int = D, seed: int = 0) -> Float32:
    values = np.random.default_rng(seed).normal(size=(n, d))
    result: Float32 = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype("<f4")
    return result


def asking(**changes: Any) -> pb.NegativesRequest:
    wanted: dict[str, Any] = {
        "federation_id": "med",
        "sender": "beta",
        "model_digest": DIGEST,
        "level": pb.EXACT,
        "dimension": D,
        "top_n": 3,
        "queries": units(2).tobytes(),
    }
    return pb.NegativesRequest(**(wanted | changes))


def bucketed(**changes: Any) -> pb.NegativesRequest:
    wanted: dict[str, Any] = {"level": pb.BUCKET, "queries": b"", "bits": 10}
    return asking(**(wanted | {"buckets": b"\1\2\3\0"} | changes))


# ---- bounds ------------------------------------------------------------------------


def test_good_requests_and_replies_pass() -> None:
    for request in (asking(), asking(level=pb.NOISY), bucketed()):
        assert count_of(parse(pb.NegativesRequest, request.SerializeToString())) == 2
    np.testing.assert_array_equal(queries_of(asking()), units(2))
    assert buckets_of(bucketed()).tolist() == [[1, 2], [3, 0]]
    check(reply_of([units(3), units(0), units(1)]))
    check(reply_of([units(0)]))


def not_finite(value: float) -> bytes:
    vectors = units(2)
    vectors[1, 3] = value
    return vectors.tobytes()


BAD: list[tuple[pb.NegativesRequest, str]] = [
    (asking(sender="Beta"), "sender is 'Beta'"),
    (asking(federation_id=""), "federation_id is 0 characters"),
    (asking(model_digest=b"x"), "model_digest is 1 bytes; expected 32"),
    (asking(level=0), "level is 0; expected one of 1, 2, 3"),
    (asking(level=4), "level is 4"),
    (asking(dimension=0), "dimension is 0; expected 1 .. 16384"),
    (asking(dimension=16385), "dimension is 16385"),
    (asking(dimension=D + 1), "queries is 64 bytes; expected 1 .. 1024 rows of 36 bytes"),
    (asking(dimension=D * 2), "not of length 1"),
    (asking(top_n=0), "top_n is 0; expected 1 .. 256"),
    (asking(top_n=257), "top_n is 257"),
    (asking(queries=b""), "queries is 0 bytes; expected 1 .. 1024 rows"),
    (asking(queries=units(2).tobytes()[:-1]), "queries is 63 bytes"),
    (asking(queries=units(MAX_QUERIES + 1).tobytes()), "expected 1 .. 1024 rows of 32 bytes"),
    (asking(queries=bytes(VECTOR_BYTES + 1)), "queries is 1048577 bytes; expected 0 .. 1048576"),
    (asking(queries=not_finite(np.nan)), "not of length 1, or not finite"),
    (asking(queries=not_finite(np.inf)), "not of length 1, or not finite"),
    (asking(queries=not_finite(3e38)), "not of length 1, or not finite"),
    (asking(queries=(units(2) * 1.01).astype("<f4").tobytes()), "not of length 1"),
    (asking(queries=bytes(2 * 4 * D)), "not of length 1"),
    (asking(top_n=256, queries=units(1024).tobytes()), "top_n is 256, 1024 times, of 8 values"),
    (asking(bits=3), "bits is 3; expected 0 .. 0"),
    (asking(buckets=b"x"), "buckets is 1 bytes; expected 0 bytes"),
    (bucketed(bits=0), "bits is 0; expected 1 .. 256"),
    (bucketed(bits=257), "bits is 257"),
    (bucketed(bits=17), "buckets is 4 bytes; expected 1 .. 1024 rows of 3 bytes"),
    (bucketed(buckets=b""), "buckets is 0 bytes"),
    (bucketed(buckets=b"\1\4"), "buckets is longer than bits"),
    (bucketed(queries=units(1).tobytes()), "queries is 32 bytes; expected 0 bytes"),
]


@pytest.mark.parametrize(("request_", "told"), BAD)
def test_one_bad_field_refuses_the_request(request_: pb.NegativesRequest, told: str) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        parse(pb.NegativesRequest, request_.SerializeToString())
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (pb.NegativesReply(), "counts is 0 long; expected 1 .. 1024"),
        (pb.NegativesReply(counts=[257]), "counts[0] is 257"),
        (pb.NegativesReply(counts=[0], embeddings=b"text"), "embeddings is 4 bytes; expected 0"),
        (pb.NegativesReply(counts=[2], embeddings=bytes(12)), "expected 2 rows of float32"),
        (pb.NegativesReply(counts=[1], embeddings=b"a secret text..."), "not of length 1"),
        (pb.NegativesReply(counts=[1], embeddings=bytes(4 * 16385)), "expected 1 rows of float32"),
    ],
)
def test_a_reply_that_is_no_embeddings_is_refused(reply: pb.NegativesReply, told: str) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        parse(pb.NegativesReply, reply.SerializeToString())
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (reply_of([units(1)]), "counts is 1 long; expected 2, one a query"),
        (reply_of([units(4), units(1)]), "counts is 4; expected 0 .. top_n = 3"),
        (reply_of([units(1, 2 * D), units(1, 2 * D)]), "128 bytes; expected 2 rows of 8 float32"),
        (reply_of([units(1, D // 2), units(1, D // 2)]), "32 bytes; expected 2 rows of 8 float32"),
    ],
)
def test_a_reply_to_another_request_is_refused(reply: pb.NegativesReply, told: str) -> None:
    check(reply)
    with pytest.raises(RemoteProtocolError) as refusal:
        answers_of(asking(), reply)
    assert told in str(refusal.value)


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(0, 300), max_size=8),
    raw=st.binary(max_size=600),
    whole=st.booleans(),
)
def test_whatever_passes_as_a_reply_is_bounded_unit_vectors(
    counts: list[int], raw: bytes, whole: bool
) -> None:
    """Of any bytes at all: nothing else than directions gets through, so no text and no id."""
    if whole:
        counts = [count % 4 for count in counts] or [1]
        raw = b"".join(units(count, D, seed=count).tobytes() for count in counts)
    reply = pb.NegativesReply(counts=counts, embeddings=raw)
    request = asking(queries=units(max(1, len(counts))).tobytes())
    try:
        found = answers_of(request, parse(pb.NegativesReply, reply.SerializeToString()))
    except RemoteProtocolError:
        assert not whole
        return
    assert [len(rows) for rows in found] == counts
    assert all(len(rows) <= request.top_n and rows.shape[1] == D for rows in found)
    every = np.concatenate(found)
    assert np.isfinite(every).all()
    np.testing.assert_allclose(np.linalg.norm(every, axis=1), 1.0, atol=2e-3)


@given(st.integers(1, 16384), st.integers(1, 256))
def test_as_many_queries_as_have_room_pass_and_one_more_does_not(d: int, top_n: int) -> None:
    most = most_queries(d, top_n)
    row = np.zeros(d, dtype="<f4")
    row[0] = 1.0
    if most:
        check(asking(dimension=d, top_n=top_n, queries=row.tobytes() * most))
        assert most * top_n * d * 4 <= VECTOR_BYTES
    more = asking(dimension=d, top_n=top_n, queries=row.tobytes() * (most + 1))
    with pytest.raises(RemoteProtocolError):
        check(more)


# ---- the desk ----------------------------------------------------------------------

OPEN = AnswerPolicy(
    answer=True,
    levels=frozenset({"exact", "noisy", "bucket"}),
    queries_per_round=10,
    top_n=2,
    bits=10,
)


def desk(policy: AnswerPolicy = OPEN, *, embedded_by: str = "") -> Desk:
    return Desk(policy, D, embedded_by=embedded_by)


def test_an_order_is_cut_to_what_is_allowed() -> None:
    order = desk().admit("beta", asking(top_n=9), DIGEST, 1)
    assert (order.level, order.count, order.top_n) == ("exact", 2, 2)
    assert desk().admit("beta", asking(top_n=1), DIGEST, 1).top_n == 1


def test_by_default_nobody_gets_anything() -> None:
    with pytest.raises(Declined, match=r"negatives\.answer"):
        desk(AnswerPolicy()).admit("beta", bucketed(), DIGEST, 1)


@pytest.mark.parametrize(
    ("place", "request_", "served", "told"),
    [
        (
            desk(embedded_by="mixture"),
            asking(),
            DIGEST,
            r"retriever\.personal = 'mixture'\): ask others, or have its operator choose a layer",
        ),
        (desk(), asking(), b"", "model version none yet, the queries are of 070707"),
        (desk(), asking(), bytes(32), "model version 000000000000, the queries are of 070707"),
        (
            desk(AnswerPolicy(answer=True)),
            asking(),
            DIGEST,
            "nothing at level 'exact', but at bucket",
        ),
        (desk(), bucketed(bits=11), DIGEST, "buckets of 11 bits name single passages"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(
    place: Desk, request_: pb.NegativesRequest, served: bytes, told: str
) -> None:
    with pytest.raises(Declined, match=told):
        place.admit("beta", request_, served, 1)
    assert place.refused["beta"] == 1
    assert place.answered["beta"] == 0


def test_a_quota_is_a_peers_and_a_rounds() -> None:
    place = desk()
    for _ in range(5):
        place.admit("beta", asking(), DIGEST, 1)
    with pytest.raises(QuotaSpent, match=r"answers to 10 of 10 queries in round 1, 2 more"):
        place.admit("beta", asking(), DIGEST, 1)
    place.admit("gamma", asking(), DIGEST, 1)
    place.admit("beta", asking(), DIGEST, 2)
    assert place.answered == {"beta": 12, "gamma": 2}


def test_what_is_refused_costs_no_quota() -> None:
    place = desk()
    for _ in range(20):
        with pytest.raises(Declined):
            place.admit("beta", asking(), bytes(32), 1)
    for _ in range(5):
        place.admit("beta", asking(), DIGEST, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 2))))
def test_no_order_of_asking_gets_more_than_the_quota(asked: list[tuple[str, int, int]]) -> None:
    place = desk()
    given: dict[tuple[str, int], int] = {}
    for peer, count, round_ in sorted(asked, key=lambda one: one[2]):  # rounds go up only
        request = asking(queries=units(count).tobytes())
        try:
            place.admit(peer, request, DIGEST, round_)
        except QuotaSpent:
            assert given.get((peer, round_), 0) + count > OPEN.queries_per_round
        else:
            given[peer, round_] = given.get((peer, round_), 0) + count
    assert all(total <= OPEN.queries_per_round for total in given.values())


# ---- choosing and merging ----------------------------------------------------------


def test_whom_to_ask() -> None:
    latencies = {"c": 3.0, "a": None, "b": 9.0, "d": 1.0}
    chance = Random(3)
    assert select(latencies, "all", 2, chance) == ["a", "b", "c", "d"]
    assert select(latencies, "nearest", 2, chance) == ["d", "c"]
    assert select(latencies, "nearest", 9, chance) == ["d", "c", "b", "a"]
    drawn = {tuple(select(latencies, "random", 2, chance)) for _ in range(100)}
    assert len(drawn) == 6
    assert select({}, "random", 2, chance) == []


def test_the_nearest_of_all_sites_are_kept_each_once() -> None:
    query, pool = units(1)[0], units(20, seed=3)
    kept = nearest(query, [pool[:12], pool[8:], np.zeros((0, D), np.float32)], 5)
    best = pool[np.argsort(-(pool @ query))[:5]]
    np.testing.assert_array_equal(kept, best)
    assert nearest(query, [], 5).shape == (0, D)


@pytest.mark.parametrize(
    ("how", "caught"),
    [
        (AskingTerms("exact"), 1.0),
        (AskingTerms("noisy", 0.05), 0.9),
        (AskingTerms("bucket", 0.05), 0.9),
        (AskingTerms("noisy", 0.2), 0.5),
    ],
)
def test_under_noise_too_an_equal_passage_is_no_negative(how: AskingTerms, caught: float) -> None:
    chance = np.random.default_rng(1)
    ours = units(400, 384, 1)
    theirs = ours if how.level == "exact" else noisy(ours, how.noise, chance)
    cosines, limit = ours @ theirs.T, same_above(how, 384)
    assert (cosines.diagonal() > limit).mean() >= caught
    np.fill_diagonal(cosines, 0.0)
    assert (cosines > limit).mean() < 1e-3, "a passage about something else is one"


def test_the_secret_is_made_once_and_readable_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "negatives.key"
    assert own_secret(path) == own_secret(path) == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(OSError, match="holds 5 bytes"):
        own_secret(path)


# ---- asking ------------------------------------------------------------------------


class Peers:
    """A transport's part that asking needs; each peer does what it is told to do."""

    def __init__(self, **peers: Callable[[pb.NegativesRequest], Any]) -> None:
        self.peers = peers
        self.asked: list[tuple[str, pb.NegativesRequest]] = []

    def statistics(self) -> dict[str, PeerStatistics]:
        return {name: PeerStatistics(connected=True, round_trip_ms=1.0) for name in self.peers}

    async def negatives(
        self, to: str, request: pb.NegativesRequest, within_s: float
    ) -> list[Float32]:
        check(request)
        self.asked.append((to, request))
        found = self.peers[to](request)
        if isinstance(found, Exception):
            raise found
        if found is None:
            await asyncio.sleep(10 * within_s)
        return list(found)


def good(request: pb.NegativesRequest) -> list[Float32]:
    return [units(request.top_n, request.dimension)] * count_of(request)


def session(line: Peers, **options: Any) -> Asking:
    wanted = AskOptions(**({"deadline_s": 0.2} | options))
    return Asking(line, "med", "alpha", DIGEST, 3, wanted)


def item(count: int, d: int = D, how: AskingTerms | None = None) -> Disclosed:
    return disclosed(units(count, d), how or AskingTerms("exact"), DIGEST)


async def test_a_step_is_asked_in_as_few_requests_as_have_room() -> None:
    line = Peers(beta=good)
    heard = await session(line)(item(3000, 384))
    most = most_queries(384, 3)
    assert [count_of(request) for _, request in line.asked] == [most] * (3000 // most) + [
        3000 % most
    ]
    sent = np.concatenate([queries_of(request) for _, request in line.asked])
    np.testing.assert_array_equal(sent, units(3000, 384))
    assert len(heard.answers[0]) == 3000


async def test_at_bucket_level_no_value_of_a_query_leaves() -> None:
    line = Peers(beta=good)
    await session(line)(item(5, how=AskingTerms("bucket", bits=9)))
    ((_, request),) = line.asked
    assert (request.level, request.queries, request.bits) == (pb.BUCKET, b"", 9)
    names = Projections(DIGEST, D, 9).buckets(units(5))
    np.testing.assert_array_equal(buckets_of(request), names)


@pytest.mark.slow
async def test_who_does_not_answer_in_time_is_passed_over_and_then_left_alone() -> None:
    line = Peers(beta=lambda _: None, gamma=good, delta=lambda _: PeerUnreachable("gone"))
    asked = session(line)
    for _ in range(5):
        heard = await asked(item(2))
        assert len(heard.answers) == 1
    assert asked.peers["beta"].missed == asked.peers["delta"].missed == 3
    assert "3 steps in a row without an answer: no answer within" in asked.peers["beta"].reason
    assert "gone" in asked.peers["delta"].reason
    assert (asked.peers["gamma"].answered, asked.peers["gamma"].embeddings) == (10, 30)
    assert (asked.steps, asked.unanswered) == (5, 0)


@pytest.mark.slow
async def test_one_slow_step_is_forgiven() -> None:
    turns = iter([None, "good"] * 4)
    line = Peers(beta=lambda request: None if next(turns) is None else good(request))
    asked = session(line)
    for _ in range(8):
        await asked(item(1))
    assert (asked.peers["beta"].missed, asked.peers["beta"].reason) == (4, "")
    assert asked.unanswered == 4


async def test_who_declines_is_asked_once_and_another_takes_its_place() -> None:
    line = Peers(beta=lambda _: PeerRefused("off here"), gamma=good)
    asked = session(line, select="random", sites=1)
    asked.chance = Random(0)
    for _ in range(6):
        await asked(item(1))
    names = [name for name, _ in line.asked]
    assert names.count("beta") <= 1
    assert names.count("gamma") >= 5
    assert len({*names}) <= 2


async def test_a_busy_peer_is_asked_again_when_it_says() -> None:
    turns = iter([PeerBusy("too much", 0.01), None])
    line = Peers(beta=lambda request: next(turns) or good(request))
    assert len((await session(line)(item(1))).answers) == 1
    line = Peers(beta=lambda _: PeerBusy("too much", 60.0))
    assert (await session(line)(item(1))).answers == []


async def test_a_site_whose_operator_lets_nothing_leave_asks_nobody() -> None:
    line = Peers(beta=good)
    asked = session(line, ask=False)
    assert [(await asked(item(2))).answers for _ in range(3)] == [[], [], []]
    assert (line.asked, asked.peers) == ([], {})
    assert asked.unanswered == asked.steps == 3


async def test_with_nobody_to_ask_the_training_goes_on_and_it_is_counted() -> None:
    asked = session(Peers())
    assert [(await asked(item(2))).answers for _ in range(3)] == [[], [], []]
    assert asked.unanswered == asked.steps == 3


# ---- at the door, over real TLS ----------------------------------------------------


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta", "gamma")


class Answers(KeepsAll):
    """An inbox that answers, as a desk with this policy allows."""

    place = desk()

    async def negatives(self, sender: str, request: pb.NegativesRequest) -> pb.NegativesReply:
        order = self.place.admit(sender, request, DIGEST, 1)
        return reply_of([units(order.top_n)] * order.count)


def answering(site: Site) -> None:
    inbox = Answers()
    inbox.place = desk()
    site.transport._servicer.inboxes = {"med": inbox}


async def reached(site: Site, peer: str) -> None:
    """It may have begun before its peer did, and wait before it calls again."""
    async with asyncio.timeout(30):
        while True:
            try:
                await site.transport.hello(peer)
            except PeerUnreachable:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_peer_gets_answers_and_no_more_than_its_quota(federation: Federation) -> None:
    async with running(federation, "alpha") as alpha, running(federation, "beta") as beta:
        answering(alpha)
        found = await beta.transport.negatives("alpha", asking(), 5)
        assert [rows.tolist() for rows in found] == [units(2).tolist()] * 2
        for _ in range(4):
            await beta.transport.negatives("alpha", asking(), 5)
        with pytest.raises(PeerRefused, match="queries_per_round"):
            await beta.transport.negatives("alpha", asking(), 5)
        await reached(alpha, "beta")
        with pytest.raises(PeerRefused, match="gives no negatives"):
            await alpha.transport.negatives("beta", asking(sender="alpha"), 5)


@pytest.mark.slow
async def test_attacks_on_the_call_are_refused_with_their_reason(federation: Federation) -> None:
    code = grpc.StatusCode
    async with running(federation, "alpha") as alpha, beta_calling(federation) as beta:
        answering(alpha)
        with refused(code.PERMISSION_DENIED, "names 'gamma' as its sender", "is of 'beta'"):
            await beta.call("Negatives", asking(sender="gamma"))
        with refused(code.PERMISSION_DENIED, "for federation 'other'"):
            await beta.call("Negatives", asking(federation_id="other"))
        with refused(code.INVALID_ARGUMENT, "not finite"):
            await beta.call("Negatives", asking(queries=not_finite(np.nan)))
        with refused(code.INVALID_ARGUMENT, "dimension is 16; expected 8, the version's"):
            await beta.call("Negatives", asking(dimension=16, queries=units(1, 16).tobytes()))
        with refused(code.INVALID_ARGUMENT, "that are no NegativesRequest"):
            await beta.call("Negatives", b"\xff" * 40)
        with refused(code.INVALID_ARGUMENT, "queries is 1048577 bytes"):
            await beta.call("Negatives", asking(queries=bytes(VECTOR_BYTES + 1)))
        with refused(code.RESOURCE_EXHAUSTED):
            await beta.call("Negatives", bytes(3 << 20))
        with refused(code.ABORTED, "the queries are of 000000000000"):
            await beta.call("Negatives", asking(model_digest=bytes(32)))
        assert answers_of(
            asking(), pb.NegativesReply.FromString(await beta.call("Negatives", asking()))
        )


async def test_whoever_is_not_enabled_or_has_not_greeted_gets_nothing(
    federation: Federation,
) -> None:
    code = grpc.StatusCode
    async with running(federation, "alpha") as alpha:
        answering(alpha)
        async with calling(federation, federation.identity("gamma")) as gamma:
            with refused(code.FAILED_PRECONDITION, "has not said Hello"):
                await gamma.call("Negatives", asking(sender="gamma"))
    manifest = federation.manifest(version=2, disabled={"beta"})
    async with running(federation, "alpha", manifest=manifest) as alpha:
        answering(alpha)
        async with calling(federation, federation.identity("beta")) as beta:
            with refused(code.PERMISSION_DENIED, "is disabled in manifest version 2"):
                await beta.call("Negatives", asking())


async def test_an_answer_that_is_no_answer_is_blamed_on_the_peer(federation: Federation) -> None:
    class Lies(KeepsAll):
        async def negatives(
            self,
            sender: str,  # noqa: ARG002
            request: pb.NegativesRequest,  # noqa: ARG002
        ) -> pb.NegativesReply:
            return reply_of([units(1)])  # to two queries

    async with running(federation, "alpha", options=QUICK) as alpha:
        alpha.transport._servicer.inboxes = {"med": Lies()}
        async with running(federation, "beta") as beta:
            with pytest.raises(RemoteProtocolError, match=r"'alpha' misb.*1 long; expected 2"):
                await beta.transport.negatives("alpha", asking(), 5)
