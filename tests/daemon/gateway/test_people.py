"""People of an identity provider and of an Open WebUI, at a real gateway before a real daemon.

OpenAI's own client asks, with a signed token in the place of a key. Afterwards the site's state has
no word of what was asked or answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from config.control_socket import ASKS_FOR
from daemon.gateway.application import Gateway
from daemon.gateway.fedd import Fedd
from daemon.gateway.refusals import Refusal
from proto import control_pb2 as control
from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.daemon.questions.people import Provider, grant, speaker, spoken, write_people
from tests.support.federation import LiveFederation

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

WINCH = "who looks after the anchor winch of elm, dear quixotic zeppelin?"
RARE = (b"quixotic", b"zeppelin")


@dataclass
class Door:
    """A gateway, and who signs people in."""

    gate: Gate
    folder: Path
    clinic: Provider

    def table(self, *groups: str) -> None:
        """Those of the clinic's groups that may ask."""
        may = {one: grant("ask", "search") for one in groups}
        chat = speaker(self.folder, {"user": grant("ask")})
        write_people(self.folder, issuers={"clinic": self.clinic.table(may)}, chat=chat)

    def signed(self, *groups: str, **said: Any) -> str:
        return self.clinic.token("ann", [*groups], time.time(), **said)

    async def asked(self, secret: str, **headers: str) -> str:
        """The answer; or the status and what it says."""
        client = openai.AsyncOpenAI(
            base_url=f"{self.gate.url}/v1",
            api_key=secret,
            max_retries=0,
            default_headers=headers,
        )
        try:
            reply = await client.chat.completions.create(
                model="hanse", messages=[{"role": "user", "content": WINCH}]
            )
        except openai.APIStatusError as error:
            return f"{error.status_code} {error.message}"
        return reply.choices[0].message.content or ""

    def audited(self) -> list[tuple[str, str, str]]:
        folder = self.gate.site.folder / "state" / "audit"
        lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.open()]
        entries = [json.loads(line) for line in lines]
        return [(one["actor"], one["action"], one["outcome"]) for one in entries]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("people")
    door = Door(None, folder, Provider(folder, algorithm="RS256"))  # type: ignore[arg-type]  # below
    door.table("nurses")
    people = str(folder / "people.toml")
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(
            LiveFederation.start(
                tmp_path_factory.mktemp("gate"),
                ["elm"],
                without=["fir", "oak"],
                tables=listening(people=people),
            )
        )
        await live.ingest_all()
        door.gate = await stack.enter_async_context(gateway(live.sites["elm"]))
        yield door


async def test_openai_s_client_asks_with_a_signed_token(door: Door) -> None:
    assert "anchor winch" in await door.asked(door.signed("nurses"))
    assert door.audited()[-1] == ("oidc:clinic:ann", "ask", "answered")
    listed = control.ListTokensRequest()
    reply = await door.gate.site.stub.ListTokens(listed, timeout=30)
    assert [(one.name, list(one.keys)) for one in reply.issuers] == [("clinic", ["one"])]


async def test_a_group_and_a_key_that_change_need_no_restart(door: Door) -> None:
    assert (await door.asked(door.signed("cooks"))).startswith("403 ")
    door.table("nurses", "cooks")
    assert "anchor winch" in await door.asked(door.signed("cooks"))
    door.clinic.add("two")
    door.clinic.drop("one")
    assert "anchor winch" in await door.asked(door.signed("nurses", kid="two"))
    door.clinic.add("one")
    door.table("nurses")


async def test_who_signs_in_twice_has_one_share_of_the_turns(door: Door) -> None:
    fedd = Fedd(door.gate.site.folder / "questions.sock")
    gateway, other = Gateway(fedd, 4), f"Bearer {await door.gate.token('ask')}"
    one, again = (f"Bearer {door.signed('nurses', jti=name)}" for name in ("a", "b"))
    async with gateway._admitted(one), gateway._admitted(again):
        for token in (one, again):
            with pytest.raises(Refusal, match="try again in a moment"):
                async with gateway._admitted(token):
                    pytest.fail("a third turn of four")
        async with gateway._admitted(other):
            pass
    await fedd.close()


async def test_who_is_blocked_asks_no_more(door: Door) -> None:
    who = control.BlockPersonRequest(name="oidc:clinic:ann")
    await door.gate.site.stub.BlockPerson(who, timeout=30)
    assert (await door.asked(door.signed("nurses"))).startswith("401 ")
    who.undo = True
    await door.gate.site.stub.BlockPerson(who, timeout=30)
    assert "anchor winch" in await door.asked(door.signed("nurses"))


async def test_a_token_as_long_as_providers_make_them_comes_through(door: Door) -> None:
    groups = [f"{n:08x}-0000-0000-0000-000000000000" for n in range(130)]
    long = door.signed("nurses", *groups)
    assert 7000 < len(long) < 8192
    assert "anchor winch" in await door.asked(long)
    assert (await door.asked("x" * 8200)).startswith("401 ")


async def test_open_webui_says_for_whom_it_asks(door: Door) -> None:
    chat = await door.gate.token("ask", "search", name="chat")
    header = {ASKS_FOR: spoken("u-1", "user", time.time())}
    assert "anchor winch" in await door.asked(chat, **header)
    assert door.audited()[-1] == ("token:chat:u-1", "ask", "answered")
    assert (await door.asked(chat)).startswith("401 ")
    assert (await door.asked(await door.gate.token("ask"), **header)).startswith("401 ")
    forged = spoken("u-1", "user", time.time(), secret="a secret of somebody else's, and long")
    assert (await door.asked(chat, **{ASKS_FOR: forged})).startswith("401 ")
    async with httpx2.AsyncClient(base_url=door.gate.url) as http:
        twice = [("authorization", f"Bearer {chat}"), *[(ASKS_FOR, header[ASKS_FOR])] * 2]
        assert (await http.get("/v1/models", headers=twice)).status_code == 401
        once = {"authorization": f"Bearer {chat}", ASKS_FOR: "x" * 5000}
        assert (await http.get("/v1/models", headers=once)).status_code == 401
    for log in (door.gate.log, (door.gate.site.folder / "fedd.log").read_text()):
        assert header[ASKS_FOR] not in log
        assert header[ASKS_FOR].split(".")[1] not in log


async def test_of_what_was_asked_and_answered_nothing_is_kept(door: Door) -> None:
    """Only that somebody asked, and when; the sentences of an answer are in the library alone."""
    folder = door.gate.site.folder
    answer = await door.asked(door.signed("nurses"))
    said = [one.strip().encode() for one in answer.replace("]", "[").split("[")]
    sentences = [one for one in said if len(one) > 20]
    assert sentences
    in_library = 0
    for file in (one for one in folder.rglob("*") if one.is_file()):
        held = file.read_bytes()
        assert not any(one in held.lower() for one in RARE), file
        named = file.relative_to(folder).as_posix()
        if named.startswith("state/library") or file.suffix in (".jsonl", ".gz"):
            in_library += any(one in held for one in sentences)
            continue
        assert not any(one in held for one in sentences), file
    assert in_library, "the answer's sentences are the documents' own"
