"""What a language model writes for a site: it breaks off, goes on, and trains in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from daemon.jobs.pairs import MadeKind, PairPlan, PairProgress
from daemon.learning.options import LearningError
from daemon.library.readers.documents import Pair
from daemon.services import pair_maker as pairs_module
from tests.daemon.pairs.test_pair_writers import about, completion, serving
from tests.daemon.services.test_site_learning import (
    DOCUMENTS,
    Site,
    encoder,
    site,
    there,
    worker,
)

__all__ = ["encoder", "site", "worker"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def one_reply_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pairs_module, "_SLICE_S", 0.0)
    yield


@pytest.mark.usefixtures("one_reply_at_a_time")
async def test_writing_that_broke_off_goes_on_where_it_was(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    left = 3

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        nonlocal left
        left -= 1
        return completion(f"1. {about(body)}") if left >= 0 else (500, b"out of memory")

    plan = PairPlan(how="llm", top_k=8)
    with serving(write) as (url, asked):
        with pytest.raises(LearningError, match="answered 500: see its own log"):
            await site.build(plan, f"{url}#m")
        assert not there(site.made)

        left = 100  # somebody looks on for two replies, then presses Ctrl-C
        seen = 0
        async with aclosing(site.maker(f"{url}#m").build(plan)) as steps:
            async for step in steps:
                seen += isinstance(step, PairProgress)
                if seen == 2:
                    break
        counts = await site.build(plan, f"{url}#m")
        prompts = [about(body) for body in asked]
    assert counts.made == 8
    assert len(prompts) == 8 + 1, "the one that failed was asked again, no other"
    assert not there(site.made.with_name("written_queries.jsonl"))


@pytest.mark.usefixtures("one_reply_at_a_time")
async def test_answers_that_broke_off_go_on_and_are_checked(site: Site) -> None:
    """The model answers with its passage, but for one, of which it tells a lie."""
    await site.ingest(DOCUMENTS, [])
    left = 11

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        nonlocal left
        left -= 1
        if left < 0:
            return 500, b"out of memory"
        if "Answer:" not in str(body):
            return completion(f"1. {about(body)}")
        return completion("Pirates keep it." if "pump" in about(body) else about(body))

    plan = PairPlan(how="llm", top_k=8, answers=True)
    with serving(write) as (url, asked):
        with pytest.raises(LearningError, match="answered 500: see its own log"):
            await site.build(plan, f"{url}#m")
        assert (await site.maker().overview()).kinds == {"llm": MadeKind(8, 8, 0)}
        left = 100
        counts = await site.build(plan, f"{url}#m")
        assert len(asked) == 16 + 1, "the one that failed was asked again, no other"
    assert (counts.made, counts.answered, counts.unsupported) == (8, 7, 1)
    found = await site.maker().overview()
    assert found.kinds == {"llm": MadeKind(8, 8, 7)}
    assert not there(site.made.with_name("written_queries.jsonl"))
    with pytest.raises(LearningError, match="only written questions are answered"):
        await site.build(PairPlan(how="title", answers=True))


@pytest.mark.usefixtures("one_reply_at_a_time")
async def test_a_round_that_begins_trains_between_two_replies(site: Site) -> None:
    await site.ingest(DOCUMENTS, [Pair("what of the pump?", ("yard/pump",))])
    await site.build(PairPlan(how="title"))
    training: asyncio.Task[int] | None = None
    written_when_trained: list[int] = []
    with serving(lambda body: completion(f"1. {about(body)}")) as (url, asked):
        async for _ in site.maker(f"{url}#m").build(PairPlan(how="llm", top_k=8)):
            if training is None:
                training = asyncio.create_task(site.train())
                training.add_done_callback(lambda _: written_when_trained.append(len(asked)))
        assert training is not None
        assert await training == 9
        assert len(asked) == 8
    assert 0 < written_when_trained[0] < 8


async def test_one_build_at_a_time_and_none_without_a_writer(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    with pytest.raises(LearningError, match=r"set pairs\.writer"):
        await site.build(PairPlan(how="llm"))
    maker = site.maker()
    async with aclosing(maker.build(PairPlan(how="title"))) as first:
        await maker._one_at_a_time.acquire()
        with pytest.raises(LearningError, match="being made or dropped already"):
            await anext(first)
        with pytest.raises(LearningError, match="wait until that has ended"):
            await maker.drop()
