"""People who hang up: whatever they have asked for, nothing is done for them any longer.

A real gateway before the socket of questions, whose look-up of tokens a test holds: each call to
fedd begins with one.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daemon.gateway import fedd as calls
from daemon.gateway.application import Gateway
from daemon.gateway.fedd import Fedd
from daemon.state.tokens import Token
from tests.daemon.gateway.test_connections import serving
from tests.daemon.questions.test_questions import EVERY, Served, served
from tests.support.lines import until

__all__ = ["served"]

_ASKED = {"model": "hanse", "messages": [{"role": "user", "content": "who?"}]}
_CALLED = {"name": "ask", "arguments": {"question": "who?"}}
_FORM = "application/x-www-form-urlencoded"
_DISPOSED = b'content-disposition: form-data; name="file"; filename="a.txt"'
_FILE = b"--x\r\n" + _DISPOSED + b"\r\n\r\nRope.\r\n--x--\r\n"
# What is sent where there is more to say than an address: kind and bytes, by route.
BODIES: dict[tuple[str, str], tuple[str, bytes]] = {
    ("POST", "/v1/chat/completions"): ("application/json", json.dumps(_ASKED).encode()),
    ("POST", "/v1/embeddings"): ("", b'{"model": "hanse-embedding", "input": "rope"}'),
    ("POST", "/v1/search"): ("", b'{"question": "who?"}'),
    ("POST", "/v1/feedback"): ("", b'{"question": "who?", "document_id": "a", "answers": true}'),
    ("POST", "/v1/documents"): ("multipart/form-data; boundary=x", _FILE),
    ("POST", "/mcp"): (
        "application/json",
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": _CALLED}).encode(),
    ),
    ("POST", "/sign-in"): (_FORM, b"token={token}"),
    ("POST", "/ask"): (_FORM, b"question=who%3F"),
    ("POST", "/ask/stream"): (_FORM, b"question=who%3F"),
    ("POST", "/search"): (_FORM, b"question=who%3F"),
    ("POST", "/propose"): (_FORM, b"question=who%3F&document=rope&answers=yes"),
    ("POST", "/upload"): ("multipart/form-data; boundary=x", _FILE),
}
QUERIES = {"/source": "?document=a.pdf", "/source/page": "?document=a.pdf&page=1"}
QUERIES["/source/original"] = "?document=a.pdf"
# What fedd has no part in, or is asked without a token.
ALONE = {"/health", "/sign-out"}


def _routes() -> list[tuple[str, str]]:
    """All of the gateway's that ask fedd something with a token."""
    application: Any = Gateway(Fedd(Path("nowhere.sock")), 2).application()
    return [
        (method, route.path)
        for route in application._inner.routes
        if route.endpoint.__name__ not in ("static", "home_instead") and route.path not in ALONE
        for method in route.methods - {"HEAD"}
    ]


@dataclass
class Door:
    """A gateway whose requests are counted while they are worked at."""

    gateway: Gateway
    port: int = 0
    under_way: int = 0
    held: int = 0  # calls that fedd has begun and does not go on with
    looks: int = 0  # at tokens, for the request under way
    hold_at: int = 0  # so manieth of them is held
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def asked(self, method: str, path: str, token: str) -> asyncio.StreamWriter:
        """A request, over a connection of its own."""
        kind, body = BODIES.get((method, path), ("", b""))
        body = body.replace(b"{token}", token.encode())
        head = [
            f"{method} {path}{QUERIES.get(path, '')} HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            f"cookie: hanse={token}",
            f"authorization: Bearer {token}",
            "sec-fetch-site: same-origin",
            "accept: application/json, text/event-stream",
            "mcp-protocol-version: 2025-11-25",
        ]
        head += [f"content-type: {kind or 'application/json'}", f"content-length: {len(body)}"]
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        return writer


@pytest.fixture
async def door(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    fedd = Fedd(served.folder / "socket")
    door = Door(Gateway(fedd, 2))
    inner = door.gateway.application()

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        door.under_way += 1
        try:
            await inner(scope, receive, send)
        finally:
            door.under_way -= 1
            door.over.set()

    async def used(_token: Token) -> None:
        door.looks += 1
        if door.looks == door.hold_at:
            door.held += 1
            try:
                await asyncio.Event().wait()
            finally:
                door.held -= 1

    monkeypatch.setattr(served.tokens, "used", used)
    for name in ("_ANSWER", "_DRAW", "_EMBED", "_TELL"):  # no deadline ends it instead
        monkeypatch.setattr(calls, f"{name}_WITHIN_S", 3600.0)
    async with serving(application=counted) as door.port:
        yield door
    await fedd.close()


@pytest.mark.parametrize(("method", "path"), _routes())
async def test_who_hangs_up_ends_the_call_to_fedd_and_the_turn(
    served: Served, door: Door, method: str, path: str
) -> None:
    """At each of the calls that a route makes, one after the other."""
    token, _ = await served.tokens.create("hasty", EVERY, 1)
    for door.hold_at in range(1, 10):
        door.looks = 0
        door.over.clear()
        going = await door.asked(method, path, token)
        await until(lambda: bool(door.held) or door.over.is_set(), within=60)
        if not door.held:
            going.close()
            break
        going.close()
        await until(lambda: not door.held and not door.under_way, within=60)
        assert door.gateway._under_way.total() == 0
    assert door.hold_at > 1, "fedd was asked"
