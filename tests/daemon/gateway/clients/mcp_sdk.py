"""MCP's own SDK, of any major version: an answer over HTTP and over standard input and output.

As openai_sdk.py; the words behind the question are the program that speaks over the latter.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import mcp
from mcp.client import streamable_http
from mcp.client.stdio import StdioServerParameters, stdio_client

NEW = hasattr(mcp, "Client")  # from version 2 on


@asynccontextmanager
async def over_http(url: str, token: str, mode: str) -> AsyncIterator[Any]:
    headers = {"Authorization": f"Bearer {token}"}
    if NEW:
        import httpx2

        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            mcp.Client(
                streamable_http.streamable_http_client(url, http_client=http), mode=mode
            ) as c,
        ):
            yield c
        return
    old: Any = streamable_http
    async with (
        old.streamablehttp_client(url, headers=headers) as (read, write, _),
        mcp.ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield session


@asynccontextmanager
async def over_stdio(program: list[str], token: str, mode: str) -> AsyncIterator[Any]:
    command = StdioServerParameters(
        command=program[0], args=program[1:], env={"HANSE_TOKEN": token}
    )
    if NEW:
        async with mcp.Client(command, mode=mode) as client:
            yield client
        return
    async with stdio_client(command) as (read, write), mcp.ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def asked(client: Any, question: str) -> dict[str, Any]:
    """The answer; and what was found is read once more by its id."""
    tools = [tool.name for tool in (await client.list_tools()).tools]
    assert tools == ["ask", "search", "get_passage"], tools
    answer = await client.call_tool("ask", {"question": question})
    told: dict[str, Any] = json.loads(answer.content[0].text)
    structured = getattr(answer, "structured_content", None) or answer.structuredContent
    assert structured == told
    passage = {"passage_id": told["citations"][0]["passage_id"]}
    read = json.loads((await client.call_tool("get_passage", passage)).content[0].text)
    assert told["citations"][0]["sentence"] in read["text"]
    wrong = await client.call_tool("search", {"question": question, "top_k": 1000})
    assert getattr(wrong, "is_error", None) or wrong.isError
    return told


async def main(gateway: str, token: str, question: str, *stdio: str) -> None:
    told = []
    for mode in ("legacy", "auto", "2026-07-28") if NEW else ("handshake",):
        async with over_http(f"{gateway}/mcp", token, mode) as client:
            told.append(await asked(client, question))
        async with over_stdio([*stdio, gateway], token, mode) as client:
            told.append(await asked(client, question))
    assert all(one == told[0] for one in told)
    marks = [mark for one in told[0]["citations"] for mark in one["marks"]]
    print(
        json.dumps(
            {
                "version": version("mcp"),
                "answer": told[0]["answer"],
                "cited": [{"start_index": one["start"], "end_index": one["end"]} for one in marks],
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
