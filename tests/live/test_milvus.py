"""A daemon whose vectors lie at a server, over and back, without it, and after a removal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto import control_pb2 as control
from tests.daemon.library.dense.milvus_lite import milvus_lite
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [pytest.mark.federation, pytest.mark.timeout(300)]


async def until_searched_by(site: LiveSite, engine: str) -> None:
    async with asyncio.timeout(90):
        while (await site.status()).index_engine != engine:
            await asyncio.sleep(0.1)


async def found(site: LiveSite) -> list[str]:
    request = control.SearchRequest(question="who looks after the anchor winch?", top_k=5)
    reply = await site.stub.Search(request, timeout=60)
    return [one.passage_id for one in reply.passages]


def collections(uri: str) -> list[str]:
    from pymilvus import MilvusClient

    return [*MilvusClient(uri).list_collections()]


async def restarted(live: LiveFederation, engine: str, uri: str) -> LiveSite:
    site = live.sites["elm"]
    site.process.terminate()
    await site.process.wait()
    live.settings["index"] = {"engine": engine, "uri": uri}
    site = await live.launch("elm")
    await live.until_connected(90)
    return site


async def test_a_site_moves_to_a_server_and_back(tmp_path: Path) -> None:
    (tmp_path / "milvus").mkdir()
    with milvus_lite(tmp_path / "milvus") as uri:
        async with LiveFederation.start(tmp_path, ["elm"], without=["fir", "oak"]) as live:
            await live.ingest_all()
            site = live.sites["elm"]
            await until_searched_by(site, "hnswlib")
            before = await found(site)

            site = await restarted(live, "milvus", uri)
            await until_searched_by(site, "milvus")
            assert (await found(site), len(collections(uri))) == (before, 1)

            listed = await site.stub.ListDocuments(control.ListDocumentsRequest(limit=1))
            request = control.RemoveDocumentsRequest(ids=[listed.documents[0].id])
            (name,) = collections(uri)
            assert [step async for step in site.stub.RemoveDocuments(request)][-1].done
            async with asyncio.timeout(60):
                while name in (there := collections(uri)) or len(there) != 1:
                    await asyncio.sleep(0.1)

            after = await found(site)
            site = await restarted(live, "hnswlib", uri)
            await until_searched_by(site, "hnswlib")
            assert (await found(site), (await site.status()).last_error) == (after, "")
            async with asyncio.timeout(60):
                while collections(uri):
                    await asyncio.sleep(0.1)
