"""What a site remembers of files that people bring, and what it refuses of them for a while."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from daemon.learning.retriever.spec import RetrieverSpec
from daemon.questions import uploads
from daemon.questions.credentials import Asker, Bearer
from daemon.questions.uploads import Uploads
from daemon.services.originals import KeptOriginals
from daemon.services.pair_maker import PairMaker, WriterSettings
from daemon.state.folder import StateFolder
from proto import questions_pb2 as questions
from tests.daemon.questions import test_collections
from tests.daemon.questions.test_collections import Site

site = test_collections.site  # the fixture
_PIECE = 1 << 18


# ---- what is remembered ------------------------------------------------------------


def bearer(name: str) -> Bearer:
    asker = Asker(name, f"token:{name}", {"upload": None}, 0)
    return Bearer(lambda: asker, asker, "upload")


def nobody_has_brought() -> Uploads:
    settings = SimpleNamespace(gateway=SimpleNamespace(upload_mib=1))
    around: Any = SimpleNamespace(collection=None, settings=settings)
    return Uploads(around)


def remember(one: Uploads, who: str, name: str) -> None:
    one._remember(uploads._Brought(bearer(who), f"inbox/{name}", False, 0))


def told(one: Uploads, who: str) -> list[str]:
    return [upload.document_id.removeprefix("inbox/") for upload in one.told(bearer(who)).uploads]


def test_each_is_told_of_their_own_the_newest_first() -> None:
    one = nobody_has_brought()
    for who, name in (("ines", "a"), ("tom", "b"), ("ines", "c")):
        remember(one, who, name)
    assert (told(one, "ines"), told(one, "tom"), told(one, "eve")) == (["c", "a"], ["b"], [])


def test_who_brings_many_pushes_out_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_TOLD", 3)
    one = nobody_has_brought()
    remember(one, "tom", "b")
    for number in range(5):
        remember(one, "ines", str(number))
    assert (told(one, "ines"), told(one, "tom")) == (["4", "3", "2"], ["b"])


def test_whoever_brought_last_longest_ago_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "_TOLD_TO", 2)
    one = nobody_has_brought()
    for who in ("ines", "tom", "ines", "eve"):
        remember(one, who, who)
    assert [told(one, who) for who in ("ines", "tom", "eve")] == [["ines", "ines"], [], ["eve"]]
    assert len(one._told) == 2, "nothing is kept of others"


# ---- what is refused while pairs are made ------------------------------------------


@pytest_asyncio.fixture
async def pairs(site: Site) -> PairMaker:
    """What makes pairs at the site, which takes files now."""
    spec = RetrieverSpec(
        encoder=str(site.folder / "encoder"), made_pairs=str(site.folder / "made.sqlite3")
    )
    made = PairMaker(
        spec=spec,
        state=StateFolder(site.folder / "state"),
        collection=site.collection,
        writer=WriterSettings("", ""),
        learning=site.worker,
        answering=site.worker,
    )
    site.around.services.pairs = made
    site.around.services.folders = SimpleNamespace(states=[])
    site.around.services.originals = KeptOriginals(site.collection, site.worker, False)
    site.around.refresh = site.collection.recount
    return made


def letter(*names: str) -> str:
    """With attachments, each a document of its own."""
    attached = "".join(
        f"--b\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; "
        f'filename="{name}"\r\n\r\nThe {name} of the bosun.\r\n'
        for name in names
    )
    head = 'From: a@b.example\r\nSubject: Stores\r\nContent-Type: multipart/mixed; boundary="b"'
    return f"{head}\r\n\r\n--b\r\n\r\nStores of the bosun.\r\n{attached}--b--\r\n"


async def brought(
    site: Site, token: str, text: str, name: str = "stores.eml", *, replace: bool = True
) -> questions.Upload:
    """What became of it by the time that it is told."""

    async def parts() -> AsyncIterator[questions.UploadPart]:
        file = questions.UploadedFile(collection="open", name=name, replace=replace)
        yield questions.UploadPart(file=file)
        content = text.encode()
        for begin in range(0, len(content), _PIECE):
            piece = content[begin : begin + _PIECE]
            yield questions.UploadPart(content=piece, last=begin + _PIECE >= len(content))

    call = site.stub.Upload(parts(), metadata=[("authorization", f"Bearer {token}")], timeout=60)
    replies = [reply async for reply in call]
    upload: questions.Upload = replies[-1].upload
    return upload


async def told_to(site: Site, token: str) -> list[questions.Upload]:
    told = [("authorization", f"Bearer {token}")]
    return [*(await site.stub.Uploads(questions.UploadsRequest(), metadata=told)).uploads]


async def here(site: Site) -> list[str]:
    found = await site.collection.documents("open/stores.eml", "", 10)
    return [one.id for one in found]


@pytest.mark.slow
async def test_nothing_is_taken_out_while_pairs_are_made_of_it(
    site: Site, pairs: PairMaker
) -> None:
    token, _ = await site.tokens.create("bosun", ["upload"], 1, ["open"])
    assert (await brought(site, token, letter("whistle.txt", "lantern.txt"))).state != "refused"
    whole = await here(site)
    assert len(whole) == 3
    async with pairs._one_at_a_time:
        refused = await brought(site, token, letter("lantern.txt"))
        assert (refused.state, "pairs are being made: bring it again" in refused.cause) == (
            "refused",
            True,
        )
        assert await here(site) == whole, "all of the one before"
        more = await brought(site, token, letter("whistle.txt", "lantern.txt", "oar.txt"))
        assert more.state != "refused", "nothing goes for it"
    assert (await brought(site, token, letter("lantern.txt"))).state != "refused"
    assert len(await here(site)) == 2


@pytest.mark.slow
async def test_what_is_stored_is_told_so_where_pairs_are_made_by_then(
    site: Site, pairs: PairMaker
) -> None:
    """The ingest has waited for the worker, and meanwhile somebody began to make pairs."""
    token, _ = await site.tokens.create("bosun", ["upload"], 1, ["open"])
    await brought(site, token, letter("whistle.txt", "lantern.txt"))
    await site.collection.until_settled()
    async with asyncio.timeout(120), AsyncExitStack() as until:
        async with site.held_up():
            coming = asyncio.create_task(brought(site, token, letter("lantern.txt", "oar.txt")))
            await site.queued(1)
            await until.enter_async_context(pairs._one_at_a_time)
        one = await coming
        assert one.state in ("stored", "searchable")
        assert "it is stored, but what came with the one before is not removed" in one.cause
        assert "pairs are being made" in one.cause
        await site.collection.until_settled()
        counts = await site.collection.counts()
        assert site.collection.opened.passages == counts.passages, "questions find it"
        assert len(await here(site)) == 4
    again = await brought(site, token, letter("lantern.txt", "oar.txt"))
    assert (again.state in ("stored", "searchable"), again.cause) == (True, "")
    assert len(await here(site)) == 3


# ---- what others may not learn, and may do no more ----------------------------------


@pytest.mark.slow
async def test_who_guesses_what_a_document_says_is_not_told_that_they_are_right(
    site: Site, pairs: PairMaker
) -> None:
    ines, _ = await site.tokens.create("ines", ["upload"], 1, ["open"])
    eve, _ = await site.tokens.create("eve", ["upload"], 1, ["open"])
    reader, _ = await site.tokens.create("reader", ["upload", "search"], 1, ["open"])
    said = "The bosun earns 84200 crowns."
    await brought(site, ines, said, "pay.txt")
    for guess in (said, "The bosun earns 84100 crowns."):
        one = await brought(site, eve, guess, "pay.txt", replace=False)
        assert (one.state, "there is another document" in one.cause) == ("refused", True)
    await brought(site, eve, "The bosun earns nothing.", "pay.txt")
    await brought(site, ines, said, "pay.txt")  # and hers again
    one = await brought(site, eve, said, "pay.txt", replace=False)
    assert one.state == "refused", "nor who brought another one of that name before"
    for token in (ines, reader):  # whose it is, and who may read it
        assert (await brought(site, token, said, "pay.txt", replace=False)).state == "unchanged"


@pytest.mark.slow
async def test_a_token_that_was_revoked_takes_nobody_s_turn(
    site: Site, pairs: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_LOOK_EVERY_S", 0.01)
    ines, _ = await site.tokens.create("ines", ["upload"], 1, ["open"])
    async with asyncio.timeout(120):
        text = "The bosun keeps the whistle dry.\n" * 30_000
        coming = asyncio.create_task(brought(site, ines, text, "long.txt"))
        while [one.state for one in await told_to(site, ines)] in ([], ["waiting"]):
            await asyncio.sleep(0.01)
        await site.tokens.revoke("ines")
        one = await coming
    assert (one.state, "revoked" in one.cause) == ("refused", True)
    assert await site.collection.documents("open/long.txt", "", 1) == []


@pytest.mark.slow
async def test_what_fedd_fails_on_is_told_as_refused(
    site: Site, pairs: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(uploads, "_sorted_out", fail)
    ines, _ = await site.tokens.create("ines", ["upload"], 1, ["open"])
    one = await brought(site, ines, "The whistle.", "a.txt")
    assert (one.state, one.cause) == ("refused", "fedd failed on it: its log says why")


@pytest.mark.slow
async def test_a_token_that_was_revoked_brings_nothing_to_its_end(
    site: Site, pairs: PairMaker
) -> None:
    """Who sends a byte now and then would hold a place for ten minutes."""
    ines, _ = await site.tokens.create("ines", ["upload"], 1, ["open"])
    said = [("authorization", f"Bearer {ines}")]
    call: Any = site.stub.Upload(metadata=said, timeout=60)
    file = questions.UploadedFile(collection="open", name="slow.txt")
    await call.write(questions.UploadPart(file=file))
    await call.read()
    await call.write(questions.UploadPart(content=b"The whistle"))
    await site.tokens.revoke("ines")
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # where it is over by then
        await call.write(questions.UploadPart(content=b" is dry."))
    assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "revoked" in await call.details()


@pytest.mark.slow
async def test_what_a_token_brought_is_not_told_to_the_next_one_of_its_name(
    site: Site, pairs: PairMaker
) -> None:
    first, _ = await site.tokens.create("scanner", ["upload"], 1, ["open"])
    await brought(site, first, "The whistle.", "a.txt")
    assert len(await told_to(site, first)) == 1
    await site.tokens.change("scanner", collections=["law"])
    assert await told_to(site, first) == [], "nor where it may bring no files any more"
    await site.tokens.revoke("scanner")
    second, _ = await site.tokens.create("scanner", ["upload"], 2, ["open"])
    assert await told_to(site, second) == []


async def under_way(site: Site, token: str, count: int) -> None:
    """So many of theirs have come."""
    told = [("authorization", f"Bearer {token}")]
    while True:
        reply = await site.stub.Uploads(questions.UploadsRequest(), metadata=told)
        if len(reply.uploads) == count:
            return
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_tokens_take_turns_whoever_brings_most(site: Site, pairs: PairMaker) -> None:
    """ines has brought three, of which one is being stored, and then tom brings one."""
    ines, _ = await site.tokens.create("ines", ["upload"], 1, ["open"])
    tom, _ = await site.tokens.create("tom", ["upload"], 1, ["open"])
    come = ((ines, 1, "a"), (ines, 2, "b"), (ines, 3, "c"), (tom, 1, "d"))
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        async with site.held_up():
            for token, count, name in come:
                group.create_task(brought(site, token, f"The {name}.", f"{name}.txt"))
                await under_way(site, token, count)
        stored: list[str] = []
        while len(stored) < 4:
            await asyncio.sleep(0.01)
            passages = await site.collection.read(lambda library: library.passages())
            stored = [one.document_id for one in passages if one.document_id.endswith(".txt")]
    assert stored == [f"open/{name}.txt" for name in "abdc"]
