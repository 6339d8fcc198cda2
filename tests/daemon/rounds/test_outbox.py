"""What waits for a peer that is slow or away: bounded, and the newest of what counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from daemon.rounds.outbox import Outbox, Waiting
from peers.attempts.effects import Body
from peers.wire.messages import MIB, TEXT_LENGTH
from proto import federation_pb2 as pb


def prepare(attempt: int) -> pb.Prepare:
    return pb.Prepare(round=1, attempt=attempt)


def vote(attempt: int, size: int = 0) -> pb.Vote:
    return pb.Vote(attempt=attempt, certificate=bytes(size))


def promised(attempt: int) -> pb.Promised:
    body = pb.Promise(round=1, attempt=attempt).SerializeToString()
    return pb.Promised(promise=pb.Signed(body=body, site="alpha"))


def wish(generation: int) -> pb.RunWish:
    body = pb.Run(generation=generation).SerializeToString()
    return pb.RunWish(run=pb.Signed(body=body, site="alpha"))


def taken(waiting: Waiting) -> list[Body]:
    return [waiting.take() for _ in range(len(waiting))]


def queued(*bodies: Body) -> list[Body]:
    waiting = Waiting()
    for body in bodies:
        assert waiting.add(body) == 0
    return taken(waiting)


# ---- what makes what needless -------------------------------------------------


def test_messages_wait_in_order() -> None:
    said: list[Body] = [prepare(0), vote(0), pb.Commit()]
    assert queued(*said) == said


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (prepare(0), prepare(1)),
        (wish(1), wish(2)),
        (pb.Behind(head_round=1), pb.Behind(head_round=2)),
        (pb.Ahead(round=1), pb.Ahead(round=2)),
    ],
)
def test_of_what_only_moves_on_the_newest_waits(older: Body, newer: Body) -> None:
    """And in its own place, not in the older one's: order among the rest stays as it was said."""
    assert queued(older, vote(0), newer) == [vote(0), newer]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (promised(0), promised(1)),
        (vote(0), vote(1)),
        (pb.Commit(), pb.Commit(report=pb.RoundReport(round=1))),
        (pb.State(attempt=0), pb.State(attempt=1)),
        (pb.Stated(attempt=0), pb.Stated(attempt=1)),
        (pb.Proven(attempt=0), pb.Proven(attempt=1)),
        (pb.AttemptFailed(attempt=0), pb.AttemptFailed(attempt=1)),
    ],
)
def test_steps_of_an_attempt_all_wait(one: Body, other: Body) -> None:
    assert queued(one, other) == [one, other]


def test_the_same_message_waits_once() -> None:
    assert queued(vote(0), vote(1), vote(0)) == [vote(1), vote(0)]


# ---- bounds --------------------------------------------------------------------


def test_the_oldest_are_lost_when_too_many_wait() -> None:
    waiting = Waiting(messages_at_most=3)
    assert [waiting.add(vote(attempt)) for attempt in range(5)] == [0, 0, 0, 1, 1]
    assert taken(waiting) == [vote(2), vote(3), vote(4)]


def test_the_oldest_are_lost_when_too_many_bytes_wait() -> None:
    waiting = Waiting(bytes_at_most=10_000)
    lost = [waiting.add(vote(attempt, 4_000)) for attempt in range(5)]
    assert lost == [0, 0, 1, 1, 1]
    assert waiting.bytes < 10_000
    assert taken(waiting) == [vote(3, 4_000), vote(4, 4_000)]
    assert waiting.bytes == 0


def test_one_that_is_too_large_is_tried_all_the_same() -> None:
    waiting = Waiting(bytes_at_most=10_000)
    waiting.add(vote(0))
    assert waiting.add(vote(1, 20_000)) == 1
    assert taken(waiting) == [vote(1, 20_000)]


# ---- peers -----------------------------------------------------------------------


class Peers:
    """Peers that take messages once their gate is open."""

    def __init__(self) -> None:
        self.gates = {"beta": asyncio.Event(), "gamma": asyncio.Event()}
        self.heard: dict[str, list[Body]] = {"beta": [], "gamma": []}
        self.away: set[str] = set()

    async def send(self, to: str, body: Body) -> bool:
        await self.gates[to].wait()
        if to not in self.away:
            self.heard[to].append(body)
        return to not in self.away


@asynccontextmanager
async def an_outbox(peers: Peers) -> AsyncIterator[Outbox]:
    async with asyncio.TaskGroup() as group:
        tasks = asyncio.all_tasks()
        yield Outbox(peers.send, group)
        for task in asyncio.all_tasks() - tasks:
            task.cancel()


async def test_a_peer_that_is_away_holds_up_nobody_else() -> None:
    peers = Peers()
    peers.gates["gamma"].set()
    async with an_outbox(peers) as outbox:
        outbox.put("beta", vote(0))
        outbox.put("gamma", vote(0))
        await asyncio.sleep(0.01)
    assert peers.heard == {"beta": [], "gamma": [vote(0)]}


async def test_a_peer_that_was_away_hears_what_still_counts_in_order() -> None:
    peers = Peers()
    with capture_logs() as logged:
        async with an_outbox(peers) as outbox:
            for attempt in range(3000):
                outbox.put("beta", prepare(attempt))
                failed = pb.AttemptFailed(round=1, attempt=attempt, reason="x" * TEXT_LENGTH)
                outbox.put("beta", failed)
                await asyncio.sleep(0)
            waiting = outbox._waiting["beta"]
            assert len(waiting) <= 1000
            assert waiting.bytes < 8 * MIB
            peers.gates["beta"].set()
            await asyncio.sleep(0.1)
    # One was being sent all the while; of the rest the newest were kept.
    heard = peers.heard["beta"][1:]
    assert [body for body in heard if isinstance(body, pb.Prepare)] == [prepare(2999)]
    failures = [body.attempt for body in heard if isinstance(body, pb.AttemptFailed)]
    assert failures == list(range(3000 - len(failures), 3000))
    assert len(heard) == 1000
    # Said once when it begins and once when it is over, not two thousand times.
    assert [line["log_level"] for line in logged] == ["warning", "info"]
    assert logged[1]["dropped"] == 2001
    assert all(before < after for before, after in pairwise(failures))


async def test_who_did_not_get_a_run_is_told_the_newest_one_when_it_answers() -> None:
    peers = Peers()
    for gate in peers.gates.values():
        gate.set()
    missed, newest = wish(1), wish(2)
    async with an_outbox(peers) as outbox:
        peers.away = {"beta"}
        for peer in ("beta", "gamma"):
            outbox.put(peer, missed)
        await asyncio.sleep(0.01)
        outbox.say_again(newest, ["gamma"])  # beta does not answer yet
        await asyncio.sleep(0.01)
        assert peers.heard == {"beta": [], "gamma": [missed]}
        peers.away.clear()
        for _ in range(2):
            outbox.say_again(newest, ["beta", "gamma"])
            await asyncio.sleep(0.01)
    assert peers.heard == {"beta": [newest], "gamma": [missed]}


async def test_a_question_that_a_peer_did_not_hear_is_asked_again_until_it_does() -> None:
    """At a start peers can't be reached yet, and a site says nothing before they have answered."""
    peers = Peers()
    for gate in peers.gates.values():
        gate.set()
    peers.away = {"beta"}
    question = pb.Recall(round=4)
    async with an_outbox(peers) as outbox:
        for peer in ("beta", "gamma"):
            outbox.put(peer, question)
        await asyncio.sleep(0.01)
        for _ in range(2):
            outbox.say_again(pb.RunWish(), ["beta", "gamma"])
            await asyncio.sleep(0.01)
        peers.away.clear()
        for _ in range(2):
            outbox.say_again(pb.RunWish(), ["beta", "gamma"])
            await asyncio.sleep(0.01)
    assert peers.heard == {"beta": [question], "gamma": [question]}
