"""Fed-negatives between real daemons over real TLS: one site asks, one answers, one does not.

Beside them stands ``drift``, an enrolled site whose transport the test itself drives: it
asks what an honest daemon would not.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc
from crypto.arrays import Float32

# isort: split
import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from crypto.disclosure import Projections
from daemon.library.dense.folder import load_index
from daemon.library.store import Library
from peers.link.transport import Transport
from peers.wire.errors import PeerRefused
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.live.tapped_fedd import read_tape
from tests.support.federation import LiveFederation, LiveSite
from tests.support.loopback import running

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

DIMENSION = 32  # of the small encoder
TRAIN_PAIRS = 12
QUOTA = 3 * 2 * TRAIN_PAIRS + 10
TOP_N = 3

OWN: dict[str, dict[str, dict[str, Any]]] = {
    "alder": {
        "retriever": {"personal": "query_encoder"},
        "negatives": {"level": "exact", "top_n": 4},
    },
    "birch": {
        "negatives": {
            "answer": True,
            "levels": ["exact", "noisy", "bucket"],
            "queries_per_round": QUOTA,
            "top_n": TOP_N,
            "bits": 6,
        }
    },
    "cedar": {
        "retriever": {"personal": "query_encoder"},
        "negatives": {"ask": False},
    },
}


@dataclass
class Scene:
    live: LiveFederation
    drift: Transport

    @property
    def alder(self) -> LiveSite:
        return self.live.sites["alder"]

    @property
    def birch(self) -> LiveSite:
        return self.live.sites["birch"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    root = tmp_path_factory.mktemp("negatives")
    async with (
        LiveFederation.start(root, ["alder", "birch", "cedar"], own=OWN, without=["drift"]) as live,
        running(live.federation, "drift") as drift,
    ):
        await live.ingest_all()
        yield Scene(live, drift.transport)


async def personalise(site: LiveSite) -> control.PersonaliseProgress:
    """The last step; every step before it is an epoch's."""
    steps = [
        step async for step in site.stub.Personalise(control.PersonaliseRequest(), timeout=120)
    ]
    assert [step.epoch for step in steps] == [1, 2, 2]
    assert [step.done for step in steps] == [False, False, True]
    return steps[-1]


async def until_answering(site: LiveSite) -> None:
    """It is up, has an index open, and has met two peers (``drift`` may be one more)."""
    async with asyncio.timeout(90):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await site.status()
                if status.index_digest and status.peers_connected >= 2:
                    return
            await asyncio.sleep(0.1)


def entries(site: LiveSite, action: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted((site.folder / "state" / "audit").glob("*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in found if entry["action"] == action]


async def scores(site: LiveSite) -> list[float]:
    """Cosines and all that a question's passages were found with."""
    question = control.AskRequest(question=site.corpus.pairs[0].query, top_k=8)
    reply = await site.stub.Ask(question, timeout=60)
    return [passage.score for passage in reply.passages]


def passages(site: LiveSite, digest: bytes) -> tuple[Float32, Float32]:
    """A site's vectors: those that may be learned from, and the others."""
    state = site.folder / "state"
    (path,) = (state / "index").iterdir()
    index = load_index(path, digest)
    with Library.open(state / "library.sqlite3", read_only=True) as library:
        train = np.array(list(library.labels("train")))
    others = np.setdiff1d(index.labels(), train)
    assert len(train)
    assert len(others)
    return index.vectors(train), index.vectors(others)


async def request_of(scene: Scene, **changes: Any) -> pb.NegativesRequest:
    status = await scene.birch.status()
    queries = np.random.default_rng(1).normal(size=(2, DIMENSION))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    wanted: dict[str, Any] = {
        "federation_id": "med",
        "sender": "drift",
        "model_digest": status.model_digest,
        "level": pb.EXACT,
        "dimension": DIMENSION,
        "top_n": 9,
        "queries": queries.astype("<f4").tobytes(),
    }
    return pb.NegativesRequest(**(wanted | changes))


async def test_a_site_fits_its_questions_to_what_others_answer(scene: Scene) -> None:
    before = await scores(scene.alder)
    done = await personalise(scene.alder)

    asked = {peer.site: peer for peer in done.peers}
    assert asked["birch"].asked == asked["birch"].answered == 2 * TRAIN_PAIRS
    assert asked["birch"].embeddings == 2 * TRAIN_PAIRS * TOP_N  # birch's cap, not alder's wish
    assert asked["birch"].reason == ""
    assert asked["cedar"].answered == 0
    assert "negatives.answer" in asked["cedar"].reason
    assert (done.steps, done.steps_unanswered) == (2, 0)
    assert (done.pairs, done.pairs_judged, done.changed) == (TRAIN_PAIRS, 0, True)

    after = await scores(scene.alder)
    assert before != after, "questions are embedded as before"
    assert await scene.alder.terminate() == 0
    await scene.live.launch("alder")
    await until_answering(scene.alder)
    assert await scores(scene.alder) == after, "what was fitted did not outlive the daemon"

    given = entries(scene.birch, "negatives")
    assert [entry["actor"] for entry in given] == ["site:alder"] * 2
    assert {entry["objects"]["level"] for entry in given} == {"exact"}
    assert sum(entry["objects"]["queries"] for entry in given) == 2 * TRAIN_PAIRS
    assert sum(entry["objects"]["embeddings"] for entry in given) == 2 * TRAIN_PAIRS * TOP_N
    left = entries(scene.alder, "negatives")
    to_birch = [entry["objects"] for entry in left if entry["objects"]["to"] == "birch"]
    assert sum(objects["queries"] for objects in to_birch) == 2 * TRAIN_PAIRS


async def test_what_crosses_is_embeddings_and_nothing_else(scene: Scene) -> None:
    """Every byte between the sites, from the tape: no text, and vectors of train passages only."""
    digest = (await scene.birch.status()).model_digest
    allowed, withheld = passages(scene.birch, digest)
    replies = 0
    for _direction, peer, raw in read_tape(scene.alder.folder):
        for text in [*scene.alder.corpus.texts(), *scene.birch.corpus.texts()]:
            assert text.encode() not in raw
        if peer != "birch" or len(raw) < TRAIN_PAIRS * DIMENSION * 4:
            continue
        reply = pb.NegativesReply.FromString(raw)
        if not reply.embeddings or len(reply.counts) != TRAIN_PAIRS:
            continue
        replies += 1
        rows = np.frombuffer(reply.embeddings, "<f4").reshape(-1, DIMENSION)
        assert len(rows) == sum(reply.counts) == TRAIN_PAIRS * TOP_N
        distances = np.abs(rows[:, None] - allowed[None]).max(axis=2).min(axis=1)
        assert (distances == 0.0).all(), "a vector that is no passage's"
        assert not (rows[:, None] == withheld[None]).all(axis=2).any()
    assert replies >= 2


async def test_each_level_is_answered_in_its_own_way(scene: Scene) -> None:
    digest = (await scene.birch.status()).model_digest
    allowed, _ = passages(scene.birch, digest)
    exact = await scene.drift.negatives("birch", await request_of(scene), 10)
    assert [len(rows) for rows in exact] == [TOP_N] * 2  # 9 were asked for
    query = np.frombuffer((await request_of(scene)).queries, "<f4").reshape(2, -1)
    for rows, asked in zip(exact, query, strict=True):
        best = np.sort(allowed @ asked)[::-1][:TOP_N]
        np.testing.assert_allclose(rows @ asked, best, atol=1e-6)

    noisy = await request_of(scene, level=pb.NOISY)
    first, again = [await scene.drift.negatives("birch", noisy, 10) for _ in range(2)]
    for rows, repeated in zip(first, again, strict=True):
        # Asked again the same noised vectors come, so that no mean of answers takes noise off.
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, repeated.tolist()))
        assert not (rows[:, None] == allowed[None]).all(axis=2).any()
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)

    names = Projections(digest, DIMENSION, 6).buckets(query)
    bucket = await request_of(scene, level=pb.BUCKET, queries=b"", bits=6, buckets=names.tobytes())
    for rows in await scene.drift.negatives("birch", bucket, 10):
        assert 1 <= len(rows) <= TOP_N
        assert not (rows[:, None] == allowed[None]).all(axis=2).any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_digest": bytes(32)}, "answers with model version .*, the queries are of 000000"),
        ({"sender": "cedar"}, "names 'cedar' as its sender, the certificate is of 'drift'"),
        ({"federation_id": "other"}, "the message is for federation 'other'"),
        (
            {"dimension": DIMENSION // 2, "queries": np.eye(16, dtype="<f4").tobytes()},
            "dimension is 16; expected 32, the version's",
        ),
        (
            {"level": pb.BUCKET, "queries": b"", "bits": 7, "buckets": b"\x01"},
            "buckets of 7 bits name single passages",
        ),
    ],
)
async def test_what_is_not_right_is_refused(
    scene: Scene, changes: dict[str, Any], told: str
) -> None:
    request = await request_of(scene, **changes)
    with pytest.raises(PeerRefused, match=told):
        await scene.drift.negatives("birch", request, 10)


async def test_a_site_that_says_nothing_gives_nothing(scene: Scene) -> None:
    with pytest.raises(PeerRefused, match="gives no negatives: its operator"):
        await scene.drift.negatives("cedar", await request_of(scene), 10)
    assert not entries(scene.live.sites["cedar"], "negatives")


async def test_a_site_that_asks_nobody_sends_nothing_and_is_fitted_all_the_same(
    scene: Scene,
) -> None:
    cedar = scene.live.sites["cedar"]
    done = await personalise(cedar)
    assert (list(done.peers), done.changed) == ([], True)
    assert done.steps_unanswered == done.steps == 2
    assert not entries(cedar, "negatives")  # in which every request is, before it leaves


async def test_a_quota_holds_whatever_is_asked_and_counts_one_peer_alone(scene: Scene) -> None:
    request = await request_of(scene)
    given = len(entries(scene.birch, "negatives"))
    with pytest.raises(PeerRefused, match=r"queries_per_round") as refusal:
        for _ in range(QUOTA):
            await scene.drift.negatives("birch", request, 10)
    assert f"of {QUOTA} queries in round 0" in str(refusal.value)
    everything = [e for e in entries(scene.birch, "negatives") if e["actor"] == "site:drift"]
    assert sum(entry["objects"]["queries"] for entry in everything) <= QUOTA
    assert len(everything) > given - 10
    # alder has its own: drift's greed costs it nothing, and it meets its own end.
    for _ in range(2):
        done = await personalise(scene.alder)
        assert {p.site: p.answered for p in done.peers}["birch"] == 2 * TRAIN_PAIRS
    done = await personalise(scene.alder)
    spent = {p.site: p for p in done.peers}["birch"]
    assert spent.answered == 0
    assert "queries_per_round" in spent.reason
    assert done.steps_unanswered == done.steps == 2  # and it was trained all the same
    assert done.changed
    peers = await scene.birch.stub.Peers(control.PeersRequest(), timeout=60)
    counted = {peer.site: peer for peer in peers.peers}
    assert counted["alder"].negatives_answered == 6 * TRAIN_PAIRS
    assert counted["alder"].negatives_declined >= 1


async def test_after_a_run_it_happens_by_itself_and_for_the_new_version(scene: Scene) -> None:
    await scene.live.train("birch", rounds=1)
    digest = (await scene.alder.status()).model_digest
    made = scene.alder.folder / "state" / "personal" / f"version-{digest.hex()}.safetensors"
    async with asyncio.timeout(60):
        while not made.exists():
            await asyncio.sleep(0.1)
    # With a new round the quota begins anew.
    request = await request_of(scene)
    assert request.model_digest == digest
    async with asyncio.timeout(30):
        while (await scene.birch.status()).index_digest != digest:
            await asyncio.sleep(0.1)
    assert await scene.drift.negatives("birch", request, 10)


async def test_who_hangs_up_gives_it_up_and_nothing_has_changed(scene: Scene) -> None:
    async with asyncio.timeout(120):  # by itself, after a run that an earlier test began
        while (await scene.alder.stub.Learning(control.LearningRequest())).being_fitted:
            await asyncio.sleep(0.05)
    before, folder = await scores(scene.alder), scene.alder.folder / "state" / "personal"
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    scene.birch.process.send_signal(signal.SIGSTOP)  # each epoch waits for it, in vain
    try:
        call = scene.alder.stub.Personalise(
            control.PersonaliseRequest(local_epochs=100), timeout=60
        )
        async for step in call:
            assert not step.done
            break
        call.cancel()
    finally:
        scene.birch.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        while entries(scene.alder, "personalise")[-1]["outcome"] != "refused or failed":
            await asyncio.sleep(0.05)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    assert await scores(scene.alder) == before
    await personalise(scene.alder)  # at once: nothing of the other one is still under way


async def test_a_site_without_such_an_encoder_says_what_to_set(scene: Scene) -> None:
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"retriever\.personal = 'mixture' or 'query_encoder'"
    ):
        await personalise(scene.birch)
