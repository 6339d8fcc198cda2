"""People who sign in elsewhere before the service of questions: rights, refusals, audit log."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from config.control_socket import ASKS_FOR
from daemon.control.context import WithinBounds
from daemon.questions.credentials import Asker, Bearer
from daemon.questions.service import QUESTIONS, QuestionsService
from daemon.services.collection import NotIndexedYet
from daemon.state.audit import AuditLog
from daemon.state.tokens import Tokens
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.questions_pb2_grpc import QuestionsStub, add_QuestionsServicer_to_server
from tests.daemon.questions.people import SECRET, Provider, grant, speaker, spoken, write_people

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
UNUSABLE = grpc.StatusCode.FAILED_PRECONDITION
REQUESTS: dict[str, Any] = {
    "Ask": control.AskRequest(question="who?"),
    "Search": control.SearchRequest(question="who?"),
    "Whoami": questions.WhoamiRequest(),
}


class Shelf:
    """Stands where the collection does: says what the rights are when a question is answered."""

    served_index = None

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...] | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    async def ask(self, *asked: Any, rights: Any = None, **_told: Any) -> None:
        self.waiting.set()
        await self.gate.wait()
        self.seen.append((rights or asked[-1])())
        raise NotIndexedYet("nothing is indexed yet")

    search = ask


@dataclass
class Site:
    """The service of questions, with real tokens, a real file of people and a real audit log."""

    folder: Path
    now: list[float]
    tokens: Tokens
    clinic: Provider
    shelf: Shelf
    channel: grpc.aio.Channel
    groups: dict[str, Any] = field(default_factory=dict)

    def write(self, **options: Any) -> None:
        chat = speaker(self.folder, {"user": grant("ask", "search", collections=["open", "hr"])})
        issuers = {"clinic": self.clinic.table(self.groups, **options)}
        write_people(self.folder, issuers=issuers, chat=chat)

    def signed(self, *groups: str, **said: Any) -> str:
        return self.clinic.token("ann", [*groups], self.now[0], **said)

    async def call(self, method: str, secret: str, *asks_for: str) -> Any:
        """The reply, or the refusal; "answered" where the shelf was reached."""
        told = [("authorization", f"Bearer {secret}"), *((ASKS_FOR, one) for one in asks_for)]
        call = getattr(QuestionsStub(self.channel), method)
        try:
            return await call(REQUESTS[method], metadata=told, timeout=30)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            return "answered" if "nothing is indexed" in details else (error.code(), details)

    async def queued(self, method: str, secret: str, *asks_for: str) -> asyncio.Task[Any]:
        """The call, once it waits for its turn."""
        self.shelf.gate.clear()
        self.shelf.waiting.clear()
        call = asyncio.create_task(self.call(method, secret, *asks_for))
        async with asyncio.timeout(30):
            await self.shelf.waiting.wait()
        return call

    async def ended(self, call: asyncio.Task[Any]) -> Any:
        self.shelf.gate.set()
        return await call

    async def audited(self, count: int) -> list[tuple[str, str, str, dict[str, Any]]]:
        """The log, once it has so many lines: some refusals are told first."""
        async with asyncio.timeout(60):
            while len(self._lines()) < count:
                await asyncio.sleep(0.01)
        return self._lines()

    def _lines(self) -> list[tuple[str, str, str, dict[str, Any]]]:
        file = self.folder / "audit" / "audit-000001.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        entries = [json.loads(line) for line in lines]
        return [(e["actor"], e["action"], e["outcome"], e["objects"]) for e in entries]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    now = [1_800_000_000.0]
    clinic = Provider(tmp_path)
    groups = {
        "nurses": grant("ask", collections=["open"]),
        "board": grant("ask", "search", collections=["hr"]),
    }
    shelf: Any = Shelf()
    made = Site(tmp_path, now, None, clinic, shelf, None, groups)  # type: ignore[arg-type]  # below
    made.write()
    made.tokens = Tokens(tmp_path / "tokens.sqlite3", lambda: now[0], tmp_path / "people.toml")
    audit = AuditLog(tmp_path / "audit")
    driver = SimpleNamespace(identity=SimpleNamespace(site_id="elm"))
    settings = SimpleNamespace(gateway=SimpleNamespace(requests=2, upload_mib=1))
    around: Any = SimpleNamespace(tokens=made.tokens, audit=audit, driver=driver, settings=settings)
    around.collection = shelf
    around.services = SimpleNamespace(originals=None, pairs=None)
    server = grpc.aio.server(interceptors=[WithinBounds(QUESTIONS.service)])
    add_QuestionsServicer_to_server(QuestionsService(around), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as made.channel:
        yield made
    await server.stop(0)
    audit.close()
    made.tokens.close()


# ---- a bearer's own token -------------------------------------------------------------


async def test_a_person_asks_of_what_their_groups_may(site: Site) -> None:
    assert await site.call("Ask", site.signed("nurses", "unknown")) == "answered"
    assert await site.call("Ask", site.signed("nurses", "board")) == "answered"
    assert await site.call("Search", site.signed("nurses", "board")) == "answered"
    assert site.shelf.seen == [("open",), ("hr", "open"), ("hr",)]
    assert {one[0] for one in await site.audited(3)} == {"oidc:clinic:ann"}


async def test_who_one_is_is_told_to_a_person_too(site: Site) -> None:
    reply = await site.call("Whoami", site.signed("nurses"))
    assert (reply.name, list(reply.scopes), list(reply.collections), reply.all_documents) == (
        *("oidc:clinic:ann", ["ask"], ["open"]),
        False,
    )
    assert reply.expires_unix_s == int(site.now[0]) + 300


async def test_a_person_without_the_scope_is_denied_and_audited(site: Site) -> None:
    code, said = await site.call("Search", site.signed("nurses"))
    assert (code, "oidc:clinic:ann is not for this" in said) == (DENIED, True)
    assert "what your groups may" in said, "a token of the site is not what is missing"
    assert await site.audited(1) == [
        ("oidc:clinic:ann", "search", "refused or failed", {"cause": "scope"})
    ]


async def test_a_person_of_no_known_group_is_denied_by_name(site: Site) -> None:
    code, said = await site.call("Ask", site.signed("cooks"))
    assert (code, "in no group that may ask here" in said) == (DENIED, True)
    assert await site.audited(1) == [
        ("oidc:clinic:ann", "ask", "refused or failed", {"cause": "no known group"})
    ]


async def test_strangers_do_not_fill_the_audit_log(site: Site) -> None:
    (site.folder / "evil").mkdir()
    evil = Provider(site.folder / "evil")
    for one in (evil.token("ann", ["nurses"], site.now[0]), "a.b.c", "x.y", "é.é.é"):
        code, _ = await site.call("Ask", one.encode("ascii", "replace").decode())
        assert code == UNAUTHENTICATED
    assert await site.audited(0) == []


async def test_an_expired_token_is_audited_once_a_minute(site: Site) -> None:
    late = site.signed("nurses", exp=site.now[0] - 60, iat=site.now[0] - 90, nbf=None)
    for _ in range(20):
        code, said = await site.call("Ask", late)
        assert (code, "expired: sign in again" in said) == (UNAUTHENTICATED, True)
    assert await site.audited(1) == [
        ("oidc:clinic:ann", "ask", "refused or failed", {"cause": "expired"})
    ]


async def test_a_megabyte_of_token_never_comes_here(site: Site) -> None:
    told = await site.call("Ask", "x" * (1 << 20))
    assert told[0] in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert await site.call("Ask", site.signed("nurses")) == "answered"


# ---- between the queue and the answer -------------------------------------------------


async def test_one_that_expires_in_the_queue_is_refused(site: Site) -> None:
    call = await site.queued("Ask", site.signed("nurses"))
    site.now[0] += 331
    code, said = await site.ended(call)
    assert (code, "expired" in said, site.shelf.seen) == (UNAUTHENTICATED, True, [])
    assert (await site.audited(1))[-1][:3] == ("oidc:clinic:ann", "ask", "refused or failed")


async def test_a_group_that_is_taken_out_meanwhile_counts_no_more(site: Site) -> None:
    call = await site.queued("Ask", site.signed("nurses", "board"))
    del site.groups["board"]
    site.write()
    assert await site.ended(call) == "answered"
    assert site.shelf.seen == [("open",)]
    call = await site.queued("Ask", site.signed("nurses"))
    site.groups = {"board": grant("ask")}
    site.write()
    assert (await site.ended(call))[0] == DENIED


async def test_a_key_that_is_taken_out_meanwhile_signs_no_more(site: Site) -> None:
    call = await site.queued("Ask", site.signed("nurses"))
    site.clinic.add("two")
    site.clinic.drop("one")
    assert (await site.ended(call))[0] == UNAUTHENTICATED
    assert await site.call("Ask", site.signed("nurses", kid="two")) == "answered"


async def test_who_is_blocked_is_refused_at_once_and_after_a_start(site: Site) -> None:
    call = await site.queued("Ask", site.signed("nurses"))
    await site.tokens.block("oidc:clinic:ann")
    code, said = await site.ended(call)
    assert (code, "oidc:clinic:ann is blocked" in said) == (UNAUTHENTICATED, True)
    assert (await site.call("Whoami", site.signed("nurses")))[0] == UNAUTHENTICATED
    assert await site.call("Ask", site.clinic.token("bob", ["nurses"], site.now[0])) == "answered"
    again = Tokens(site.folder / "tokens.sqlite3", lambda: site.now[0])
    assert again.blocked == {"oidc:clinic:ann": int(site.now[0])}
    again.close()
    await site.tokens.unblock("oidc:clinic:ann")
    assert await site.call("Ask", site.signed("nurses")) == "answered"


async def test_while_the_file_is_wrong_nobody_is_let_in_by_it(site: Site) -> None:
    plain, _ = await site.tokens.create("script", ["ask"], 1)
    site.write(longest_hours=99)
    code, said = await site.call("Ask", site.signed("nurses"))
    assert (code, "people.toml" in said) == (UNUSABLE, False), "what it says is the operator's"
    assert await site.call("Ask", plain) == "answered", "tokens of this site need no file"
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    assert (await site.call("Ask", chat))[0] == UNAUTHENTICATED
    assert (await site.call("Ask", chat, spoken("u-1", "user", site.now[0])))[0] == UNUSABLE
    site.write()
    assert await site.call("Ask", site.signed("nurses")) == "answered"


# ---- a program that asks for people ---------------------------------------------------


async def test_what_both_may_is_what_a_person_behind_a_program_may(site: Site) -> None:
    chat, _ = await site.tokens.create("chat", ["ask", "embed"], 1, ["hr/2024", "other"])
    ann = spoken("u-1", "user", site.now[0])
    assert await site.call("Ask", chat, ann) == "answered"
    assert site.shelf.seen == [("hr/2024",)]
    assert (await site.call("Search", chat, ann))[0] == DENIED
    assert list((await site.call("Whoami", chat, ann)).scopes) == ["ask"]
    assert {one[0] for one in await site.audited(2)} == {"token:chat:u-1"}, (
        "which person, by what token"
    )


async def test_a_program_that_does_not_say_for_whom_learns_nothing(site: Site) -> None:
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    code, said = await site.call("Ask", chat)
    assert (code, "did not say for whom" in said) == (UNAUTHENTICATED, True)
    assert await site.audited(1) == [
        ("token:chat", "ask", "refused or failed", {"cause": "no person"})
    ]
    assert (await site.call("Whoami", chat)).name == "chat", "what a list of models is made of"


async def test_a_forged_header_is_refused_in_the_token_s_name(site: Site) -> None:
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    now = site.now[0]
    for one in (
        (spoken("u-1", "user", now, secret=SECRET[::-1]),),
        (spoken("u-1", "user", now)[:-3],),
        (spoken("u-1", "user", now), spoken("u-2", "user", now)),
        (site.signed("nurses"),),
        ("",),
    ):
        assert (await site.call("Ask", chat, *one))[0] == UNAUTHENTICATED, one
        assert (await site.call("Whoami", chat, *one))[0] == UNAUTHENTICATED, one
    assert {one[0] for one in await site.audited(1)} == {"token:chat"}
    assert site.shelf.seen == []


async def test_a_header_that_is_replayed_is_of_no_use(site: Site) -> None:
    """Later; or with another token, also one that asks for people itself."""
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    other, _ = await site.tokens.create("other", ["ask"], 1)
    header = spoken("u-1", "user", site.now[0])
    code, said = await site.call("Ask", other, header)
    assert (code, "'other' speaks for nobody else" in said) == (UNAUTHENTICATED, True)
    table = speaker(site.folder, {"user": grant("ask")})
    (site.folder / "second.secret").touch(mode=0o600)
    (site.folder / "second.secret").write_text(SECRET[::-1])
    write_people(site.folder, chat=table, other={**table, "secret": "second.secret"})
    assert (await site.call("Ask", other, header))[0] == UNAUTHENTICATED
    assert await site.call("Ask", chat, header) == "answered"
    site.now[0] += 331
    assert (await site.call("Ask", chat, header))[0] == UNAUTHENTICATED


async def test_a_header_beside_a_plain_token_is_refused(site: Site) -> None:
    """Were it passed over, a lost table would give everybody all that the token may."""
    plain, _ = await site.tokens.create("plain", ["ask"], 1)
    header = spoken("u-1", "user", site.now[0])
    for secret in (plain, site.signed("nurses"), "hanse_nobodys"):
        assert (await site.call("Ask", secret, header))[0] == UNAUTHENTICATED
    assert site.shelf.seen == []


async def test_a_token_that_comes_to_ask_for_people_does_so_at_once(site: Site) -> None:
    plain, _ = await site.tokens.create("script", ["ask"], 1)
    call = await site.queued("Ask", plain)
    write_people(site.folder, script=speaker(site.folder, {"user": grant("ask")}))
    assert (await site.ended(call))[0] == UNAUTHENTICATED


async def test_a_revoked_token_speaks_for_nobody(site: Site) -> None:
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    header = spoken("u-1", "user", site.now[0])
    call = await site.queued("Ask", chat, header)
    await site.tokens.revoke("chat")
    code, said = await site.ended(call)
    assert (code, "'chat' is revoked" in said) == (UNAUTHENTICATED, True)


async def test_a_person_behind_a_program_can_be_blocked(site: Site) -> None:
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    await site.tokens.block("token:chat:u-1")
    assert (await site.call("Ask", chat, spoken("u-1", "user", site.now[0])))[0] == UNAUTHENTICATED
    assert await site.call("Ask", chat, spoken("u-2", "user", site.now[0])) == "answered"


async def test_no_two_who_ask_have_one_name(site: Site) -> None:
    """A sub of any letters is no token's name, and no other issuer's person."""
    chat, _ = await site.tokens.create("chat", ["ask"], 1)
    now = site.now[0]
    assert await site.call("Ask", site.clinic.token("chat:u-1", ["nurses"], now)) == "answered"
    assert await site.call("Ask", chat, spoken("u-1", "user", now)) == "answered"
    alike = site.clinic.token("token:chat:u-1", ["nurses"], now)
    assert await site.call("Ask", alike) == "answered"
    assert [one[0] for one in await site.audited(3)] == [
        "oidc:clinic:chat:u-1",
        "token:chat:u-1",
        "oidc:clinic:token:chat:u-1",
    ]


async def test_all_people_behind_a_program_share_its_turns(site: Site) -> None:
    """It could name a hundred, and each would come between two questions of somebody else."""

    def share(actor: str) -> str:
        asker = Asker("somebody", actor, {}, 0)
        return Bearer(lambda: asker, asker, "ask").share

    assert share("token:chat:u-1") == share("token:chat:u-2") == share("token:chat")
    assert share("token:chat") != share("token:chat2")
    assert share("oidc:clinic:ann") != share("oidc:clinic:bob")
