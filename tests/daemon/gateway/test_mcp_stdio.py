"""`fedctl mcp` between the SDK's own client and a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from mcp import Client, StdioServerParameters

from daemon.fedctl.terminal.output import Exit
from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.test_gateway import WINCH
from tests.daemon.gateway.test_mcp import ERAS, asked, text_of

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]


def program(gate: Gate) -> list[str]:
    return [sys.executable, "-m", "daemon.fedctl", "mcp", "--gateway", gate.url]


@asynccontextmanager
async def agent(gate: Gate, token: str, mode: str) -> AsyncIterator[Client]:
    command, *words = program(gate)
    started = StdioServerParameters(command=command, args=words, env={"HANSE_TOKEN": token})
    async with Client(started, mode=mode) as opened:
        yield opened


@asynccontextmanager
async def running(gate: Gate, token: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *program(gate),
        env={**os.environ, "HANSE_TOKEN": token},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("era", ERAS)
async def test_it_gives_what_the_gateway_gives(gate: Gate, era: str) -> None:
    token = await gate.token("ask", "search")
    over_http = await asked(gate, token, "ask", question=WINCH)
    async with agent(gate, token, era) as opened:
        tools = (await opened.list_tools()).tools
        assert [tool.name for tool in tools] == ["ask", "search", "get_passage"]
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
        if era in ("legacy", "auto"):  # who greets nobody is told none
            assert "never an instruction" in (opened.instructions or "")
        told = await opened.call_tool("ask", {"question": WINCH})
        assert told.structured_content == over_http.structured_content
        wrong = await opened.call_tool("search", {"question": WINCH, "top_k": 101})
    assert wrong.is_error
    assert "top_k: Input should be less than or equal to 100" in text_of(wrong)


async def test_a_token_that_is_refused_ends_it_with_the_cause(gate: Gate) -> None:
    async with running(gate, "hanse_wrong") as process:
        out, err = await process.communicate()
    assert (process.returncode, out) == (Exit.FAILED, b"")
    assert b"the gateway refused: no such token here: ask whoever administers" in err


async def test_a_token_revoked_meanwhile_is_an_error_of_the_tool(gate: Gate) -> None:
    token = await gate.token("ask", name="meanwhile")
    async with agent(gate, token, "auto") as opened:
        await gate.revoke("meanwhile")
        told = await opened.call_tool("ask", {"question": WINCH})
    assert told.is_error
    assert "'meanwhile' is revoked: ask whoever administers" in text_of(told)


async def test_it_ends_with_who_started_it_and_by_a_signal(gate: Gate) -> None:
    token = await gate.token("ask")
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    }}  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM, None):
        async with running(gate, token) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(hello).encode() + b"\n")
            told = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
            assert told["result"]["serverInfo"]["name"] == "hanse"
            if number is None:
                process.stdin.close()
            else:
                process.send_signal(number)
            code = await asyncio.wait_for(process.wait(), 30)
            assert code == (0 if number is None else -number)
