"""Answers that a language model writes, over HTTP as they come; and people who go away meanwhile.

A real gateway before a real daemon, and behind that a model's server which writes what a test lets
it: with each question, what stands in `SAID`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlencode

import openai
import psutil
import pytest
import pytest_asyncio

from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.daemon.gateway.test_gateway import WINCH, asking, client, curl
from tests.daemon.process.model_server import BREAK, ModelServer, writing
from tests.support.federation import LiveFederation
from tests.support.lines import until

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

FIRST = "The wardens of elm inspect the anchor winch on day 1. [1]"
SECOND = "A worn anchor winch is tagged EL000 and reported. [2]"
TAKEN_OUT = "*2 statements were taken out: what they cite does not support them.*"
LIE = "The anchor winch is never inspected by anybody in Mongolia [{n}]. "
SAID = ["The wardens of elm inspect the anchor winch on day 1 [{n}]. ", LIE]
SAID += ["A worn anchor winch is tagged EL000 and reported [{n}]. ", "That is all."]


def as_told(prompt: str) -> list[str]:
    """The pieces, with the number that the passage about the winch has in this prompt."""
    number = re.findall(r"<passage (\d+)>(?:(?!</passage).)*inspect the anchor winch", prompt, re.S)
    return [piece.replace("{n}", number[0] if number else "99") for piece in SAID]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Gate, ModelServer]]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(writing(as_told))
        # Longer than a test waits for a hang-up: that shall not be the deadline's.
        written = {"generator": "openai", "answer_within_s": 100.0, "level": "passage"}
        written["language_model"] = f"{server.url}#m"
        live = await stack.enter_async_context(
            LiveFederation.start(
                tmp_path_factory.mktemp("streams"),
                ["elm"],
                without=["fir", "oak"],
                tables={**listening(requests=8), "retrieval": written},
            )
        )
        await live.ingest_all()
        yield await stack.enter_async_context(gateway(live.sites["elm"])), server


@pytest.fixture
def model(site: tuple[Gate, ModelServer]) -> Iterator[ModelServer]:
    """The server, writing as it is let; all held pieces are let go behind the test."""
    _, server = site
    server.asked.clear()
    yield server
    server.script = as_told
    server.let()


async def raw_stream(gate: Gate, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A question whose answer is to be streamed, sent over a connection of its own."""
    body = json.dumps({"model": "hanse", "messages": asking(WINCH), "stream": True})
    return await sent(gate, "/v1/chat/completions", body, f"Authorization: Bearer {token}")


async def sent(
    gate: Gate, path: str, body: str, *headers: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request, over a connection of its own."""
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*head, "", body]).encode())
    return reader, writer


async def asked_without_a_stream(gate: Gate, token: str, way: str) -> asyncio.StreamWriter:
    """A question as a program, an agent or a browser asks it."""
    bearer, form = f"Authorization: Bearer {token}", "application/x-www-form-urlencoded"
    if way == "chat":
        body = json.dumps({"model": "hanse", "messages": asking(WINCH)})
        _, writer = await sent(gate, "/v1/chat/completions", body, bearer)
    elif way == "agent":
        called = {"name": "ask", "arguments": {"question": WINCH}}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": called})
        takes = "Accept: application/json, text/event-stream"
        kind = ["Content-Type: application/json", "MCP-Protocol-Version: 2025-11-25"]
        _, writer = await sent(gate, "/mcp", body, bearer, takes, *kind)
    else:
        cookie = [f"Cookie: hanse={token}", "Sec-Fetch-Site: same-origin"]
        body = urlencode({"question": WINCH})
        _, writer = await sent(gate, "/ask", body, *cookie, f"Content-Type: {form}")
    return writer


async def test_each_statement_comes_when_it_was_checked(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    gate, _ = site
    model.hold()
    asked = client(gate, await gate.token("ask"))
    events = await asked.chat.completions.create(model="hanse", messages=asking(WINCH), stream=True)
    said: list[str] = []

    async def read() -> list[Any]:
        heard = []
        async for one in events:
            heard.append(one)
            said.append(one.choices[0].delta.content or "")
        return heard

    reading = asyncio.create_task(read())
    model.let(2)  # the first, and what shows that it has ended
    await until(lambda: FIRST in "".join(said), within=60)
    assert SECOND not in "".join(said)
    assert not reading.done()
    model.let()
    heard = await reading
    assert "".join(said) == f"{FIRST} {SECOND}\n\n{TAKEN_OUT}"
    last = heard[-1].choices[0]
    assert last.finish_reason == "stop"
    assert [one["url_citation"]["start_index"] for one in last.delta.annotations] == [54, 108]
    whole = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
    assert whole.choices[0].message.content == f"{FIRST} {SECOND}\n\n{TAKEN_OUT}"


async def test_while_the_model_thinks_the_connection_is_kept(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    gate, _ = site
    model.hold()
    reader, writer = await raw_stream(gate, await gate.token("ask"))
    told = await asyncio.wait_for(reader.readuntil(b": still at it\n\n"), 60)
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"Mongolia" not in told
    model.let()
    rest = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 60)
    assert SECOND.encode() in rest
    assert b"Mongolia" not in rest
    writer.close()


async def test_who_hangs_up_frees_the_model_and_who_waits_behind(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    """The first is left in the midst of an answer, the second is never asked."""
    gate, _ = site
    model.hold()
    token, other = await gate.token("ask"), await gate.token("ask")
    begun, hung_up = model.begun, model.hung_up
    _, first = await raw_stream(gate, token)
    await asyncio.to_thread(begun.acquire)
    _, second = await raw_stream(gate, token)
    third = asyncio.create_task(
        client(gate, other).chat.completions.create(model="hanse", messages=asking(WINCH))
    )
    await waiting(gate, 3)
    second.close()
    await waiting(gate, 2)
    first.close()
    await asyncio.to_thread(hung_up.acquire)
    await asyncio.to_thread(begun.acquire)  # that of the third
    model.let()
    assert (await third).choices[0].message.content == f"{FIRST} {SECOND}\n\n{TAKEN_OUT}"
    assert len(model.asked) == 2


async def waiting(gate: Gate, questions: int) -> None:
    """Until so many are answered or wait, as fedd tells who monitors it."""
    async with asyncio.timeout(60):
        while True:
            _, _, told = await curl(gate, "/metrics")
            if f"\nhanse_questions_waiting {questions}.0\n" in told.decode():
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["chat", "agent", "browser"])
async def test_who_hangs_up_without_a_stream_frees_it_too(
    site: tuple[Gate, ModelServer], model: ModelServer, way: str
) -> None:
    gate, _ = site
    model.hold()
    token = await gate.token("ask")
    going = await asked_without_a_stream(gate, token, way)
    await asyncio.to_thread(model.begun.acquire)
    going.close()
    assert await asyncio.to_thread(model.hung_up.acquire, timeout=60)
    model.let()
    asked = client(gate, token)
    reply = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
    assert FIRST in (reply.choices[0].message.content or "")


async def test_a_model_that_breaks_off_ends_the_answer_there(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    gate, _ = site
    model.script = lambda prompt: [*as_told(prompt)[:2], BREAK]
    asked = client(gate, await gate.token("ask"))
    events = [
        one.choices[0]
        async for one in await asked.chat.completions.create(
            model="hanse", messages=asking(WINCH), stream=True
        )
    ]
    answer, note = "".join(one.delta.content or "" for one in events).split("\n\n")
    assert answer == FIRST
    assert note.startswith("*The answer ends before its end, for the language model did: ")
    assert events[-1].finish_reason == "length"


async def test_what_fails_in_the_midst_is_told_in_openai_s_form(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    """The answering worker is killed behind the first statement; a fresh one writes another."""
    gate, _ = site
    model.hold()
    asked = client(gate, await gate.token("ask"))
    events = await asked.chat.completions.create(model="hanse", messages=asking(WINCH), stream=True)
    model.let(2)
    said = ""
    with pytest.raises(openai.APIError, match="started anew behind its begin: ask again"):
        async for one in events:
            said += one.choices[0].delta.content or ""
            if FIRST in said and model.script is as_told:
                model.script = lambda _: ["Not answered."]
                answering_worker(gate, model).kill()
                model.let()
    assert said == FIRST
    model.script = as_told
    reply = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
    assert FIRST in (reply.choices[0].message.content or ""), "the site goes on"


def answering_worker(gate: Gate, model: ModelServer) -> psutil.Process:
    """Who has asked the model last."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ports = [one.laddr.port for one in process.net_connections("tcp") if one.laddr]
            if model.peers[-1] in ports and process.pid != psutil.Process().pid:
                return process
    raise AssertionError(f"nobody asks the model:\n{gate.log}")


async def test_what_is_refused_at_once_has_its_status(
    site: tuple[Gate, ModelServer], model: ModelServer
) -> None:
    gate, _ = site
    said: dict[str, Any] = {"model": "hanse", "stream": True}
    with pytest.raises(openai.AuthenticationError):
        await client(gate, "wrong").chat.completions.create(messages=asking(WINCH), **said)
    embeds = client(gate, await gate.token("embed"))
    with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'ask'"):
        await embeds.chat.completions.create(messages=asking(WINCH), **said)
    asks = client(gate, await gate.token("ask"))
    with pytest.raises(openai.BadRequestError, match="longer than 16 KiB"):
        await asks.chat.completions.create(messages=asking("x" * 20_000), **said)
    assert not model.asked
