"""What becomes of proposals: validation pairs, by the rules of those that are ingested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from daemon.library.readers.documents import Pair
from daemon.pairs.proposals import Proposal, ProposalRefused
from daemon.process.workers import Worker
from daemon.services.pair_maker import PairMaker
from tests.daemon.services.test_site_learning import DOCUMENTS, Site, encoder, worker

__all__ = ["encoder", "worker"]
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PUMP, LAMP = "yard/pump", "yard/lamp"


@pytest_asyncio.fixture(loop_scope="module")
async def site(worker: Worker, encoder: Path, tmp_path: Path) -> AsyncIterator[Site]:
    started = await Site.start(worker, encoder, tmp_path, "supplied")
    await started.ingest(DOCUMENTS, [])
    yield started
    started.indexing.cancel()


async def proposed(maker: PairMaker, question: str, document: str) -> Proposal:
    """By ada, who says that it answers."""
    assert await maker.propose("ada", question, document, "", answers=True)
    return next(one for one in await maker.proposed() if one.pair.query == question)


async def pairs_of(site: Site, split: str) -> list[tuple[str, tuple[str, ...]]]:
    pairs = await site.collection.read(lambda library: library.pairs(split))
    return [(pair.query, pair.positives) for pair in pairs]


async def test_nothing_is_a_pair_before_it_is_accepted_and_then_once(site: Site) -> None:
    maker = site.maker()
    one = await proposed(maker, "who keeps it dry?", PUMP)
    assert [await pairs_of(site, split) for split in ("train", "valid", "test")] == [[], [], []]
    accepted = await maker.accept([one.id, one.id, "nowhere"])
    assert (accepted.known, accepted.unknown, accepted.refused) == ([one.id], ["nowhere"], [])
    assert await pairs_of(site, "valid") == [("who keeps it dry?", (PUMP,))]
    again = await proposed(maker, "who keeps it dry?", PUMP)
    await maker.accept([again.id])
    assert await pairs_of(site, "valid") == [("who keeps it dry?", (PUMP,))]
    assert await maker.proposed() == []


async def test_nothing_is_both_learned_from_and_judged_on(site: Site) -> None:
    maker = site.maker()
    learned = Pair("Who keeps the  pump?", (LAMP, PUMP), "train")
    other = Pair("who keeps the pump?", (LAMP,), "train")
    await site.ingest([], [learned, other, Pair("who keeps the lamp?", (LAMP,), "test")])
    one = await proposed(maker, "who keeps the PUMP?", PUMP)
    await maker.accept([one.id])
    assert await pairs_of(site, "valid") == [(learned.query, learned.positives)]
    assert await pairs_of(site, "train") == [(other.query, (LAMP,))]
    held_out = await proposed(maker, "Who keeps the lamp?", LAMP)
    accepted = await maker.accept([held_out.id])
    assert (accepted.known, accepted.refused) == ([], [held_out.id])
    assert await pairs_of(site, "test") == [("who keeps the lamp?", (LAMP,))]


async def test_who_only_says_no_proposes_no_pair(site: Site) -> None:
    maker = site.maker()
    await maker.propose("ada", "is it wet?", PUMP, "", answers=False)
    (one,) = await maker.proposed()
    assert (await maker.accept([one.id])).refused == [one.id]
    assert await pairs_of(site, "valid") == []
    await maker.propose("bob", "is it wet?", PUMP, "", answers=True)
    assert (await maker.accept([one.id])).known == [one.id]


async def test_with_a_document_go_its_proposals_however_it_goes(site: Site) -> None:
    maker = site.maker()
    for document in (PUMP, LAMP):
        await maker.propose("ada", "what is it?", document, "", answers=True)
    await maker.remove([PUMP])
    assert [one.document_id for p in await maker.proposed() for one in p.votes] == [LAMP]
    assert not await maker.propose("ada", "and the pump?", PUMP, "", answers=True)
    await site.collection.remove([LAMP])  # as a record that is gone from a watched file
    assert await maker.proposed() == []
    kept = await asyncio.to_thread(lambda: [*site.state.glob("proposals*")])
    assert kept == []


async def test_a_damaged_file_of_proposals_keeps_no_document_here(site: Site) -> None:
    maker = site.maker()
    await maker.propose("ada", "what is it?", PUMP, "", answers=True)
    (kept,) = site.state.glob("proposals*")
    kept.write_bytes(b"torn")
    with pytest.raises(ProposalRefused, match=r"are removed, but not what people said.*delete it"):
        await maker.remove([PUMP])
    assert await site.collection.known([PUMP]) == set()
    kept.unlink()
    await maker.remove([PUMP])
    assert await maker.proposed() == []
