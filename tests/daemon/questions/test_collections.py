"""A token for one collection at a site that has two: real workers, a small encoder, real calls.

clerk   asks of the open collection
admin   has the control socket, and takes away what the clerk may
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import inspect
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from config.control_socket import ASKS_FOR
from daemon.control.context import CONTROL, WithinBounds
from daemon.control.library import Answers
from daemon.control.originals import Originals
from daemon.jobs import learning
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.passages import passage_ids
from daemon.library.readers.documents import Document
from daemon.process.workers import Worker, import_once
from daemon.questions import service
from daemon.questions.credentials import Asker, Credentials
from daemon.questions.service import QUESTIONS, QuestionsService
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.state.audit import AuditLog
from daemon.state.folder import StateFolder
from daemon.state.tokens import Tokens
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.control_pb2_grpc import ControlServicer
from proto.questions_pb2_grpc import QuestionsStub, add_QuestionsServicer_to_server
from tests.daemon.questions.people import Provider, grant, speaker, spoken, write_people
from tests.support.small_models import small_encoder

pytestmark = pytest.mark.slow  # its workers load torch

THINGS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
DOCUMENTS = [Document(f"open/{one}", one, f"Somebody keeps the {one} dry.") for one in THINGS]
SECRET = [
    Document("secret/merger", "The lamp of Norn", "Norn buys the pump and the lamp. Lamp lamp."),
    Document("secret/lamp", "lamp", "Somebody keeps the lamp dry."),
]
WORDS = sorted({w for one in DOCUMENTS + SECRET for w in re.findall(r"\w+", one.text.lower())})
ASKED = ["Who keeps the lamp dry?", "What does Norn buy?", "lamp", "Is there a merger?"]
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def _until_there(path: Path) -> None:
    """A job that takes as long as somebody else wants it to."""
    while not path.exists():
        time.sleep(0.01)


@dataclass
class Site:
    """With both collections, served at a socket."""

    folder: Path
    collection: Collection
    worker: Worker
    tokens: Tokens
    around: Any
    stub: Any
    clinic: Provider

    async def put(self, documents: list[Document]) -> None:
        await self.collection.ingest(documents, [])
        await self.collection.index(lambda _: None)

    async def called(self, method: str, request: Any, secret: str) -> Any:
        """The reply without what it took; or the refusal. Behind a blank: for whom it asks."""
        token, _, person = secret.partition(" ")
        told = [("authorization", f"Bearer {token}")]
        told += [(ASKS_FOR, person)] if person else []
        try:
            call = getattr(self.stub, method)(request, metadata=told, timeout=60)
            if isinstance(call, grpc.aio.UnaryStreamCall):
                parts = [part async for part in call]
                for part in parts:
                    if method == "StreamAnswer" and part.HasField("whole"):
                        part.whole.seconds = 0.0
                return b"".join(part.SerializeToString(deterministic=True) for part in parts)
            reply = await call
        except grpc.aio.AioRpcError as refused:
            return refused.code(), refused.details()
        if hasattr(reply, "seconds"):
            reply.seconds = 0.0
        return reply.SerializeToString(deterministic=True)

    async def told(self, secret: str) -> list[Any]:
        """All that this token is told, to the last bit."""
        asked: list[tuple[str, Any]] = [
            ("Whoami", questions.WhoamiRequest()),
            ("Health", questions.HealthRequest()),
            ("Embed", questions.EmbedRequest(texts=ASKED)),
            ("Status", control.StatusRequest()),
            ("Ask", control.AskRequest(question=" ")),
        ]
        for name, text in {one.id: one.text for one in [DOCUMENTS[0], *SECRET]}.items():
            [passage] = passage_ids(name, [text])
            asked += [
                ("Source", questions.SourceRequest(document_id=name)),
                ("Passage", questions.PassageRequest(passage_id=passage)),
                ("PageImage", control.PageImageRequest(id=name, page=1, dpi=72)),
                ("Original", control.OriginalRequest(id=name)),
            ]
        for one in ASKED:
            asked += [("Ask", control.AskRequest(question=one, top_k=k)) for k in (0, 1, 50)]
            search = control.SearchRequest(question=one, explain=True, top_k=20)
            asked += [("Search", search), ("StreamAnswer", control.AskRequest(question=one))]
            narrower: tuple[dict[str, Any], ...] = (
                *({"begins": "secret/"}, {"collection": "secret"}, {"title": "Norn"}),
                *({"begins": "nothing/"}, {"begins": "open/"}, {"author": "lamp"}),
            )
            for narrowed in narrower:
                more = control.SearchRequest(question=one, explain=True, **narrowed)
                asked.append(("Search", more))
        return [await self.called(method, request, secret) for method, request in asked]

    @asynccontextmanager
    async def held_up(self) -> AsyncIterator[None]:
        """Whoever asks waits until the end of the block."""
        gate = self.folder / "gate"
        busy = asyncio.create_task(self.worker.run(_until_there, gate))
        yield
        gate.touch()
        await busy

    async def queued(self, count: int) -> None:
        """So many wait for their turn."""
        async with asyncio.timeout(60):
            while len(self.worker._turn._waiters or ()) < count:
                await asyncio.sleep(0.01)

    def audited(self) -> list[tuple[str, str, str, dict[str, Any]]]:
        lines = (self.folder / "audit" / "audit-000001.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return [(e["actor"], e["action"], e["outcome"], e["objects"]) for e in entries]


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    import_once(["daemon.learning.retriever.retriever"], threads=1)  # as others in this process
    worker = Worker("answering", threads=1, forked=True)
    small_encoder(tmp_path / "encoder", WORDS)
    spec = RetrieverSpec(encoder=str(tmp_path / "encoder"), max_tokens=48, device="cpu")
    collection = Collection(
        spec=spec,
        state=StateFolder(tmp_path / "state"),
        settings=CollectionSettings(40, 3, True, 4),
        learning=worker,
        answering=worker,
        listeners=Listeners(lambda: None, lambda: None, lambda: None),
    )
    await collection.prepare()
    genesis = await worker.run(learning.write_initial_version, spec, collection.versions)
    indexing = asyncio.create_task(collection.run())
    collection.adopt(genesis)
    clinic, clerks = Provider(tmp_path), grant("ask", "search", "embed", collections=["open"])
    speaks = speaker(tmp_path, {"user": clerks})
    issuers = {"clinic": clinic.table({"clerks": clerks})}
    people = write_people(tmp_path, issuers=issuers, chat=speaks)
    tokens = Tokens(tmp_path / "tokens.sqlite3", people=people)
    audit = AuditLog(tmp_path / "audit")
    driver = SimpleNamespace(identity=SimpleNamespace(site_id="elm"))
    around: Any = SimpleNamespace(tokens=tokens, audit=audit, driver=driver)
    around.settings = SimpleNamespace(gateway=SimpleNamespace(requests=8, upload_mib=1))
    around.collection = collection
    around.services = SimpleNamespace(pairs=None, originals=SimpleNamespace(of=_nothing_kept))
    server = grpc.aio.server(interceptors=[WithinBounds(QUESTIONS.service)])
    add_QuestionsServicer_to_server(QuestionsService(around), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        stub = QuestionsStub(channel)
        made = Site(tmp_path, collection, worker, tokens, around, stub, clinic)
        await made.put(DOCUMENTS)
        yield made
    await server.stop(0)
    indexing.cancel()
    await worker.stop()
    audit.close()
    tokens.close()


async def _nothing_kept(_document_id: str) -> None:
    """No originals are kept here."""


async def clerk_of(site: Site, *collections: str) -> str:
    scopes = ["ask", "search", "embed"]
    secret, _ = await site.tokens.create("clerk", scopes, 1, collections)
    return secret


async def token_of_a_clerk(site: Site) -> str:
    return await clerk_of(site, "open")


async def person_of_a_group(site: Site) -> str:
    return site.clinic.token("ann", ["clerks"], time.time(), exp=int(time.time()) + 3600)


async def person_behind_a_program(site: Site) -> str:
    """Whose token may ask of all."""
    secret, _ = await site.tokens.create("chat", ["ask", "search", "embed"], 1)
    return f"{secret} {spoken('u-1', 'user', time.time(), exp=int(time.time()) + 3000)}"


@pytest.mark.parametrize("who", [token_of_a_clerk, person_of_a_group, person_behind_a_program])
async def test_a_secret_document_comes_and_goes_and_no_reply_changes(
    site: Site, who: Callable[[Site], Awaitable[str]]
) -> None:
    clerk = await who(site)
    before = await site.told(clerk)
    assert sum(isinstance(one, bytes) and b"open/" in one for one in before) > 8
    await site.put(SECRET)
    assert await site.told(clerk) == before
    boss, _ = await site.tokens.create("boss", ["ask", "search", "embed"], 1)
    seen = await site.told(boss)
    assert any(b"secret/merger" in one for one in seen if isinstance(one, bytes))
    await site.collection.remove([one.id for one in SECRET])
    await site.collection.index(lambda _: None)
    assert await site.told(clerk) == before


async def test_what_a_token_may_ask_of_is_told_to_it(site: Site) -> None:
    clerk = await clerk_of(site, "open", "later")
    reply = questions.WhoamiReply.FromString(
        await site.called("Whoami", questions.WhoamiRequest(), clerk)
    )
    assert (list(reply.collections), reply.all_documents) == (["later", "open"], False)


@pytest.mark.parametrize("method", ["Ask", "Search", "Embed"])
async def test_a_question_that_waits_behind_a_revocation_is_refused(
    site: Site, method: str
) -> None:
    clerk = await clerk_of(site, "open")
    request = {
        "Ask": control.AskRequest(question=ASKED[0]),
        "Search": control.SearchRequest(question=ASKED[0]),
        "Embed": questions.EmbedRequest(texts=ASKED),
    }[method]
    async with site.held_up():
        asked = asyncio.create_task(site.called(method, request, clerk))
        await site.queued(1)
        await site.tokens.revoke("clerk")
    code, details = await asked
    assert (code, "'clerk' is revoked" in details) == (UNAUTHENTICATED, True)
    async with asyncio.timeout(30):  # a refusal is told first
        while not site.audited():
            await asyncio.sleep(0.01)
    assert site.audited()[-1][:3] == ("token:clerk", method.lower(), "refused or failed")


async def test_what_a_token_may_when_it_is_answered_counts(site: Site) -> None:
    await site.put(SECRET)
    clerk = await clerk_of(site, "secret")
    async with site.held_up():
        request = control.SearchRequest(question=ASKED[1])
        asked = asyncio.create_task(site.called("Search", request, clerk))
        other = asyncio.create_task(
            site.called("Ask", control.AskRequest(question=ASKED[1]), clerk)
        )
        await site.queued(2)
        await site.tokens.change("clerk", ["search"], ["open"])
    found = control.SearchReply.FromString(await asked)
    assert {one.document_id.split("/")[0] for one in found.passages} == {"open"}
    code, details = await other
    assert (code, "needs the scope 'ask'" in details) == (DENIED, True)


async def test_an_answer_is_nobodys_where_rights_went_meanwhile(site: Site) -> None:
    """The rights are looked at again before it is given, and it is answered anew."""
    told = [("open",), ("secret",), ("secret",), ("secret",)]
    await site.put(SECRET)
    looks = iter(told)
    searched = await site.collection.ask(ASKED[1], 3, rights=lambda: next(looks))
    assert {one.document_id.split("/")[0] for one in searched.passages} == {"secret"}
    assert list(looks) == [], "each attempt looks before and behind"


# ---- documents by their ids -------------------------------------------------------


async def test_what_is_not_there_and_what_is_not_allowed_are_the_same(site: Site) -> None:
    await site.put(SECRET)
    scopes = ["search", "originals", "propose"]
    secret, _ = await site.tokens.create("clerk", scopes, 1, ["open"])
    said = set()
    for name in ("secret/merger", "secret/merge", "secret", "open/merger", "open/lam", "x"):
        for method, request in (
            ("Source", questions.SourceRequest(document_id=name)),
            ("PageImage", control.PageImageRequest(id=name, page=1, dpi=72)),
            ("Original", control.OriginalRequest(id=name)),
            ("Propose", questions.ProposeRequest(question="who?", document_id=name)),
        ):
            code, details = await site.called(method, request, secret)
            said.add((code, details.replace(repr(name), "ID")))
    assert said == {(grpc.StatusCode.NOT_FOUND, "no document ID here")}
    actions = {one[1:3] for one in site.audited() if one[0] == "token:clerk"}
    tried = ("show-documents", "page-image", "original", "propose")
    assert {(one, "refused or failed") for one in tried} <= actions, "who tried stands in the log"


async def test_a_document_of_theirs_is_shown_without_copies_elsewhere(site: Site) -> None:
    await site.put(SECRET)
    await site.collection.read(lambda library: library.near.leaders([1]))
    clerk = await clerk_of(site, "open")
    request = questions.SourceRequest(document_id="open/lamp")
    reply = questions.SourceReply.FromString(await site.called("Source", request, clerk))
    assert [one.text for one in reply.passages] == ["Somebody keeps the lamp dry."]
    boss, _ = await site.tokens.create("boss", ["search"], 1)
    secret = questions.SourceRequest(document_id="secret/merger")
    assert b"The lamp of Norn" in await site.called("Source", secret, boss)


@pytest.mark.parametrize("made_of", [Answers, Originals])
def test_what_answers_is_told_each_time_whose_rights_count(made_of: type) -> None:
    """A new method that forgot them would answer of all documents whoever asks."""
    public = {name: one for name, one in vars(made_of).items() if not name.startswith("_")}
    assert public
    for name, method in public.items():
        rights = inspect.signature(method).parameters.get("rights")
        assert rights is not None and rights.default is rights.empty, name


def test_what_answers_people_has_nothing_of_who_administers(site: Site) -> None:
    answering: Any = service._AnsweringTo
    rights = inspect.signature(answering).parameters["rights"]
    assert rights.default is rights.empty, "none is built without"
    assert answering.__mro__ == (answering, object), "it inherits no call"
    calls = {method.name for method in CONTROL.methods}
    assert calls & {
        *dir(answering),
        *dir(Answers),
        *dir(Originals),
        *dir(service._TokenHolder),
    } == (set())
    caller: Any = None
    parts = vars(answering(site.around, caller, lambda: ())).values()
    assert {type(one) for one in parts} >= {Answers, Originals}
    assert not any(isinstance(one, ControlServicer) for one in parts)
    assert site.around not in parts, "through which all could be reached"


# ---- refusals ---------------------------------------------------------------------


async def test_refusals_of_a_revoked_token_do_not_fill_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk = await clerk_of(site, "open")
    await site.tokens.revoke("clerk")
    for _ in range(50):
        await site.called("Ask", control.AskRequest(question="who?"), clerk)
    await site.called("Search", control.SearchRequest(question="who?"), clerk)
    refused = ("token:clerk", "ask", "refused or failed", {"cause": "revoked"})
    assert [one for one in site.audited() if one[1] == "ask"] == [refused]
    assert [one[1] for one in site.audited()] == ["ask", "search"], "another kind has its own"


async def test_how_many_there_were_is_told_when_the_time_is_up(site: Site) -> None:
    audit = AuditLog(site.folder / "other")
    credentials = Credentials(site.tokens, audit, every_s=0.3)
    asker = Asker("x", "token:x", {"ask": None}, 1)

    def lines() -> list[dict[str, Any]]:
        text = (site.folder / "other" / "audit-000001.jsonl").read_text()
        return [json.loads(line)["objects"] for line in text.splitlines()]

    for _ in range(4):
        await credentials._turn_down(asker, "ask", "scope")
    assert lines() == [{"cause": "scope"}]
    async with asyncio.timeout(30):
        while len(lines()) < 2:
            await asyncio.sleep(0.01)
    assert lines()[1] == {"cause": "scope", "times": 3}
    async with asyncio.timeout(30):
        while credentials._refusals._more:  # a while without any
            await asyncio.sleep(0.01)
    await credentials._turn_down(asker, "ask", "scope")
    assert lines()[2:] == [{"cause": "scope"}]
    audit.close()


async def test_who_hangs_up_on_a_refusal_silences_no_other(site: Site) -> None:
    audit = AuditLog(site.folder / "other")
    credentials = Credentials(site.tokens, audit, every_s=0.3)
    asker = Asker("x", "token:x", {"ask": None}, 1)
    refusing = asyncio.create_task(credentials._turn_down(asker, "ask", "scope"))
    await asyncio.sleep(0)  # the first line is being written
    refusing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refusing
    await credentials._turn_down(asker, "ask", "scope")
    written = site.folder / "other" / "audit-000001.jsonl"
    async with asyncio.timeout(30):
        while not written.exists() or len(written.read_text().splitlines()) < 2:
            await asyncio.sleep(0.01)
    audit.close()
