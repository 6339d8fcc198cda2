"""The socket of questions: who is let in, for what, and that there is nothing else behind it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import pytest

from config.control_socket import RETRY_AFTER
from daemon.control.context import WithinBounds
from daemon.library.passages import SentenceSplitter, passage_ids
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from daemon.process import metrics
from daemon.questions.credentials import without_paths
from daemon.questions.service import QUESTIONS, QuestionsService
from daemon.questions.turns import TooManyError, Turns
from daemon.services.collection import NotIndexedYet
from daemon.state.audit import AuditLog
from daemon.state.tokens import Tokens
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.control_pb2_grpc import ControlStub
from proto.questions_pb2_grpc import QuestionsStub, add_QuestionsServicer_to_server
from tests.daemon.gateway.gates import refusal_of
from tests.support.lines import until

if TYPE_CHECKING:
    from proto.questions_pb2_grpc import QuestionsAsyncStub

DAY = 86_400
ROPE = Document("rope", "Rope", "Hemp rope is tarred.")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
# What each call with a token asks, which scope lets it through ("": any token), and as what it
# is audited.
CALLS: dict[str, tuple[Any, str, str]] = {
    "Ask": (control.AskRequest(question="who?"), "ask", "ask"),
    "StreamAnswer": (control.AskRequest(question="who?"), "ask", "ask"),
    "Search": (control.SearchRequest(question="who?"), "search", "search"),
    "Passage": (questions.PassageRequest(passage_id="rope@0.0"), "search", "passage"),
    "Source": (questions.SourceRequest(document_id="a.pdf"), "search", "show-documents"),
    "PageImage": (
        control.PageImageRequest(id="a.pdf", page=1, dpi=72),
        "search",
        "page-image",
    ),
    "Original": (control.OriginalRequest(id="a.pdf"), "originals", "original"),
    "Propose": (
        questions.ProposeRequest(question="who?", document_id="rope", answers=True),
        "propose",
        "propose",
    ),
    "Upload": (None, "upload", "upload"),  # refused before anything is sent
    "Uploads": (questions.UploadsRequest(), "upload", "upload"),
    "Embed": (questions.EmbedRequest(texts=["who"]), "embed", "embed"),
    "View": (questions.ViewRequest(rounds=20), "view", "view"),
    "Whoami": (questions.WhoamiRequest(), "", ""),
}
EVERY = ["ask", "search", "originals", "propose", "upload", "embed", "metrics", "view"]


class Shelf:
    """Stands where the collection does, and answers nothing yet."""

    served_index = None

    def __init__(self, folder: Path) -> None:
        self.path = folder / "library.sqlite3"
        self.waits: asyncio.Event | None = None  # until it is set nobody is answered
        self.waiting = 0

    async def ask(self, *_asked: object, **_told: object) -> None:
        self.waiting += 1
        try:
            if self.waits is not None:
                await self.waits.wait()
        finally:
            self.waiting -= 1
        raise NotIndexedYet("nothing is indexed yet in /var/lib/hanse/index")

    search = ask

    async def read(self, question: Callable[[Library], Any]) -> Any:
        """Of a library with one passage."""
        with Library.open(self.path) as library:
            library.put_documents([ROPE], splitter=SentenceSplitter(len, 1000))
            return question(library)

    async def embed(self, texts: list[str], _rights: object) -> tuple[Any, bytes]:
        return np.ones((len(texts), 3), np.float32), bytes(32)


@dataclass
class Served:
    """A server with the service of questions, real tokens and a real audit log."""

    tokens: Tokens
    folder: Path
    now: list[float]
    channel: grpc.aio.Channel
    shelf: Shelf

    @property
    def stub(self) -> QuestionsAsyncStub:
        return QuestionsStub(self.channel)

    async def call(self, name: str, *told: str) -> Any:
        """That call, with these values of the header."""
        request, *_ = CALLS[name]
        carried = [("authorization", one) for one in told]
        call = getattr(self.stub, name)(request, metadata=carried, timeout=30)
        return await (call.read() if hasattr(call, "read") else call)

    async def refusal(self, name: str, *told: str) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.call(name, *told)
        return refused.value.code(), refused.value.details() or ""

    def audited(self) -> list[tuple[str, str, str, dict[str, Any]]]:
        lines = (self.folder / "audit" / "audit-000001.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return [(e["actor"], e["action"], e["outcome"], e["objects"]) for e in entries]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    now = [1_800_000_000.0]
    tokens = Tokens(tmp_path / "tokens.sqlite3", lambda: now[0])
    audit = AuditLog(tmp_path / "audit")
    shelf = Shelf(tmp_path)
    driver = SimpleNamespace(identity=SimpleNamespace(site_id="elm"))
    settings = SimpleNamespace(gateway=SimpleNamespace(requests=2, upload_mib=1))
    around: Any = SimpleNamespace(tokens=tokens, audit=audit, driver=driver, settings=settings)
    around.collection = shelf
    around.services = SimpleNamespace(originals=None, pairs=None)
    server = grpc.aio.server(interceptors=[WithinBounds(QUESTIONS.service)])
    add_QuestionsServicer_to_server(QuestionsService(around), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        yield Served(tokens, tmp_path, now, channel, shelf)
    await server.stop(0)
    audit.close()
    tokens.close()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "told",
    [
        (),
        ("Bearer hanse_nothing",),
        ("Bearer ",),
        ("Bearer",),
        ("Basic {}",),
        ("{}",),
        ("Bearer {}x",),
        ("Bearer {}", "Bearer {}"),
        ("Bearer {}, Bearer {}",),
    ],
)
async def test_nobody_asks_without_a_token(
    served: Served, name: str, told: tuple[str, ...]
) -> None:
    secret, _ = await served.tokens.create("all", EVERY, 1)
    before = metrics.counts()["hanse_token_refusals"]
    code, details = await served.refusal(name, *(one.replace("{}", secret) for one in told))
    assert code is UNAUTHENTICATED
    assert secret not in details
    assert metrics.counts()["hanse_token_refusals"] == before + 1
    assert served.audited() == [], "a stranger can't fill the log"


@pytest.mark.parametrize("name", CALLS)
async def test_a_token_is_for_its_scopes_alone(served: Served, name: str) -> None:
    _, needed, action = CALLS[name]
    secret, _ = await served.tokens.create("clerk", sorted({*EVERY} - {needed}), 1)
    if not needed:
        assert (await served.call(name, f"Bearer {secret}")).name == "clerk"
        return
    code, details = await served.refusal(name, f"Bearer {secret}")
    assert code is DENIED
    assert f"needs the scope {needed!r}" in details
    assert served.audited() == [
        ("token:clerk", action, "refused or failed", {"cause": "scope"}),
    ]


@pytest.mark.parametrize("name", CALLS)
async def test_a_revoked_token_is_refused_from_the_next_call_on(served: Served, name: str) -> None:
    secret, _ = await served.tokens.create("chat", ["ask", "search", "embed"], 1)
    await served.call("Embed", f"Bearer {secret}")
    await served.tokens.revoke("chat")
    code, details = await served.refusal(name, f"Bearer {secret}")
    assert (code, "'chat' is revoked" in details) == (UNAUTHENTICATED, True)


@pytest.mark.parametrize("name", CALLS)
async def test_an_expired_token_is_refused(served: Served, name: str) -> None:
    secret, _ = await served.tokens.create("chat", ["ask", "search", "embed"], 1)
    served.now[0] += DAY
    code, details = await served.refusal(name, f"Bearer {secret}")
    assert (code, "'chat' is expired" in details) == (UNAUTHENTICATED, True)


@pytest.mark.parametrize("name", ["Ask", "Search"])
async def test_a_refusal_names_no_place_of_the_site(served: Served, name: str) -> None:
    secret, _ = await served.tokens.create("chat", ["ask", "search"], 1)
    _, details = await served.refusal(name, f"Bearer {secret}")
    assert details == "nothing is indexed yet in index"


async def test_the_log_says_who_asked_and_never_what(served: Served) -> None:
    secret, _ = await served.tokens.create("chat", ["ask", "embed"], 1)
    await served.call("Embed", f"bearer {secret}")
    assert (await served.refusal("Ask", f"Bearer {secret}"))[0] is (
        grpc.StatusCode.FAILED_PRECONDITION
    ), "nothing is indexed yet"
    async with asyncio.timeout(30):  # a refusal is told first
        while len(served.audited()) < 2:
            await asyncio.sleep(0.01)
    assert served.audited() == [
        ("token:chat", "embed", "answered", {"texts": 1}),
        ("token:chat", "ask", "refused or failed", {"citations": 0}),
    ]


async def test_a_passage_is_given_by_its_id_and_the_log_says_so(served: Served) -> None:
    secret, _ = await served.tokens.create("agent", ["search"], 1)
    carried = [("authorization", f"Bearer {secret}")]
    (known,) = passage_ids("rope", [ROPE.text])
    told = await served.stub.Passage(
        questions.PassageRequest(passage_id=known), metadata=carried, timeout=30
    )
    assert (told.passage_id, told.document_id, told.title) == (known, "rope", "Rope")
    assert (told.text, told.kind, told.before, told.after) == (ROPE.text, "text", "", "")
    code, details = await served.refusal("Passage", f"Bearer {secret}")
    assert (code, "no passage of this id here\nIds are" in details) == (INVALID, True)
    async with asyncio.timeout(30):  # a refusal is told first
        while len(served.audited()) < 2:
            await asyncio.sleep(0.01)
    assert served.audited() == [
        ("token:agent", "passage", "answered", {"passages": 1}),
        ("token:agent", "passage", "refused or failed", {"passages": 0}),
    ]


async def test_health_needs_no_token_and_tells_nothing(served: Served) -> None:
    assert await served.stub.Health(questions.HealthRequest()) == questions.HealthReply()


async def test_a_token_that_asks_for_figures_must_be_for_them(served: Served) -> None:
    secret, _ = await served.tokens.create("chat", ["ask"], 1)
    for told, code in ((f"Bearer {secret}", DENIED), ("Bearer x", UNAUTHENTICATED)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.Status(control.StatusRequest(), metadata=[("authorization", told)])
        assert refused.value.code() is code


async def test_what_fedctl_may_ask_is_not_there(served: Served) -> None:
    secret, _ = await served.tokens.create("all", EVERY, 1)
    stub = ControlStub(served.channel)
    calls = control.DESCRIPTOR.services_by_name["Control"].methods
    assert len(calls) > 30
    for one in calls:
        refused = await refusal_of(stub, one, secret)
        assert refused is grpc.StatusCode.UNIMPLEMENTED, one.name
    own = {one.name for one in QUESTIONS.service.methods}
    assert own == {*CALLS, "Health", "Status"}


@pytest.mark.parametrize(
    "texts", [[], [""], ["x"] * 65, ["x" * 8193]], ids=["none", "empty", "many", "long"]
)
async def test_what_is_embedded_has_bounds(served: Served, texts: list[str]) -> None:
    secret, _ = await served.tokens.create("chat", ["embed"], 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.Embed(
            questions.EmbedRequest(texts=texts), metadata=[("authorization", f"Bearer {secret}")]
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "texts" in (refused.value.details() or "")


async def test_two_at_once_are_each_told_their_own_name(served: Served) -> None:
    told = [(await served.tokens.create(name, ["ask"], 1))[0] for name in ("one", "two")]
    found = await asyncio.gather(*(served.call("Whoami", f"Bearer {one}") for one in told))
    assert [one.name for one in found] == ["one", "two"]


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("no model in /srv/models/m 1: put it there", "no model in m 1: put it there"),
        ("'/srv/models/m/' can't be read", "'m' can't be read"),
        ("/srv/a and (/srv/b)", "a and (b)"),
        ("http://127.0.0.1:8000/v1 said 500", "http://127.0.0.1:8000/v1 said 500"),
        ("1/2 of it and and/or, 3 / 4", "1/2 of it and and/or, 3 / 4"),
    ],
)
def test_who_asks_is_told_a_cause_and_no_path(cause: str, told: str) -> None:
    assert without_paths(cause) == told


# ---- those that wait ------------------------------------------------------------------


def that_wait() -> float:
    return metrics.counts()["hanse_questions_waiting"]


def nobody_waits() -> bool:
    return that_wait() == 0


@pytest.mark.parametrize("name", ["Ask", "StreamAnswer", "Search"])
async def test_one_too_many_is_told_when_to_come_again(served: Served, name: str) -> None:
    secret, _ = await served.tokens.create("chat", ["ask", "search"], 1)
    served.shelf.waits = asyncio.Event()
    carried = f"Bearer {secret}"
    four = [asyncio.create_task(served.refusal("Ask", carried)) for _ in range(4)]
    await until(lambda: that_wait() == 4, within=60)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.call(name, carried)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "as many as may: try again in 2 s" in (refused.value.details() or "")
    trailing: Any = refused.value.trailing_metadata() or ()
    assert dict(trailing)[RETRY_AFTER] == "2000"  # two answers of a second: half of those that wait
    served.shelf.waits.set()
    assert {code for code, _ in await asyncio.gather(*four)} == {
        grpc.StatusCode.FAILED_PRECONDITION
    }
    await until(nobody_waits, within=60)  # a refusal is told first
    assert (await served.refusal(name, carried))[0] is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("name", ["Ask", "StreamAnswer"])
async def test_who_hangs_up_waits_no_longer_and_frees_a_place(served: Served, name: str) -> None:
    secret, _ = await served.tokens.create("chat", ["ask"], 1)
    served.shelf.waits = asyncio.Event()
    carried = f"Bearer {secret}"
    four = [asyncio.create_task(served.call(name, carried)) for _ in range(4)]
    await until(lambda: that_wait() == 4 and served.shelf.waiting == 2, within=60)
    for one in four:
        one.cancel()
    await until(lambda: served.shelf.waiting == 0, within=60)
    await until(nobody_waits, within=60)
    assert len(served.audited()) == 2, "nothing was done for the others"
    served.shelf.waits.set()
    assert (await served.refusal(name, carried))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_deadline_that_passes_ends_what_waits(served: Served) -> None:
    secret, _ = await served.tokens.create("chat", ["ask"], 1)
    served.shelf.waits = asyncio.Event()
    carried = [("authorization", f"Bearer {secret}")]
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await served.stub.Ask(CALLS["Ask"][0], metadata=carried, timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: served.shelf.waiting == 0, within=60)


async def test_the_time_to_come_again_follows_what_answers_take() -> None:
    now = [0.0]
    turns = Turns(2, lambda: now[0])

    async def again() -> float:
        async with turns.one("a"), turns.one("b"):
            with pytest.raises(TooManyError) as refused:
                async with turns.one("c"):
                    pytest.fail("a third of two")
        return refused.value.retry_after_s

    assert await again() == 1.0
    for _ in range(30):  # two that overlap: each takes 20 s of what answers
        async with turns.one("a"), turns.one("b"):
            now[0] += 20
    assert 7 < await again() < 20
    for _ in range(60):
        async with turns.one("a"):
            now[0] += 0.01
    assert await again() == 1.0


class Asking:
    """Questions at one `Turns`, each answered when it is told to; ``begun``: in which order."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.turns, self.begun = Turns(100), list[str]()
        self._group, self._ends = group, dict[str, asyncio.Event]()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Questions like "a1", of the token "a"; they wait, or are answered, on return."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = self._group.create_task(self._one(name))
        await asyncio.sleep(0)

    async def _one(self, name: str) -> None:
        async with self.turns.one(name[0]):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._tasks[name]

    async def give_up(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name] for name in names])


async def test_tokens_take_turns_whoever_asks_most() -> None:
    async with asyncio.TaskGroup() as group:
        asking = Asking(group)
        await asking.ask("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
        assert asking.begun == ["a1", "a2"]
        await asking.end("a1", "a2", "a3")
        await asking.ask("d1", "c2")
        await asking.end("b1", "c1", "a4", "b2", "d1", "c2", "a5")
    assert asking.begun == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "d1", "c2", "a5"]


async def test_who_gives_up_in_the_queue_costs_nobody_a_turn() -> None:
    async with asyncio.TaskGroup() as group:
        asking = Asking(group)
        await asking.ask("a1", "a2", "b1", "b2", "c1", "d1", "b3")
        await asking.give_up("b1", "c1")
        await asking.end("a1")
        assert asking.begun == ["a1", "a2", "b2"]
        await asking.give_up("b2")  # while it is answered
        assert asking.begun[3:] == ["d1"]
        await asking.ask("e1")
        # b3's turn comes, and in the same moment they hang up.
        asking._ends["d1"].set()
        await asyncio.sleep(0)
        await asking.give_up("b3")
        assert asking.begun[4:] == ["e1"]
        await asking.end("a2", "e1")
    assert nobody_waits()
