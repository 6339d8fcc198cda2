"""A real `fedgate` before a real daemon, and tokens for it.

async with gateway(live.sites["elm"]) as gate:
    token = await gate.token("ask")
    openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=token)
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from proto import control_pb2 as control
from tests.support.authority import free_port
from tests.support.federation import LiveSite

_NAMES = itertools.count(1)


def listening(**options: Any) -> dict[str, dict[str, Any]]:
    """Settings of a site with a gateway, at a port that is free."""
    usual = {"enabled": True, "socket": "questions.sock", "listen": f"127.0.0.1:{free_port()}"}
    return {"gateway": usual | options}


@dataclass
class Gate:
    """A running gateway, and the site behind it."""

    site: LiveSite
    host: str
    port: int
    process: asyncio.subprocess.Process
    tokens: dict[str, str] = field(default_factory=dict)  # secrets, by name

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return (self.site.folder / "fedgate.log").read_text()

    async def token(self, *scopes: str, name: str = "", days: int = 1) -> str:
        """A token of the site's, for these."""
        request = control.CreateTokenRequest(
            name=name or f"test-{next(_NAMES)}", scopes=scopes, days=days
        )
        reply = await self.site.stub.CreateToken(request, timeout=30)
        self.tokens[reply.token.name] = reply.secret
        return reply.secret

    async def revoke(self, name: str) -> None:
        await self.site.stub.RevokeToken(control.RevokeTokenRequest(name=name), timeout=30)

    async def raw(self, sent: bytes, *, within_s: float = 30) -> bytes:
        """What comes back for these bytes, until the other side closes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(sent)
            return await asyncio.wait_for(reader.read(), within_s)
        finally:
            writer.close()


@asynccontextmanager
async def gateway(site: LiveSite) -> AsyncIterator[Gate]:
    """`fedgate` with that site's settings; it is there when the block begins."""
    settings = site.folder / "fedd.toml"
    listen = next(
        line.partition("=")[2].strip().strip('"')
        for line in settings.read_text().splitlines()
        if line.startswith("listen =")
    )
    host, _, port = listen.rpartition(":")
    with (site.folder / "fedgate.log").open("ab") as log:
        process = await started(settings, log)
    gate = Gate(site, host, int(port), process)
    try:
        async with asyncio.timeout(180):  # of two cores others may have most
            while not _open(gate):
                assert process.returncode is None, gate.log
                await asyncio.sleep(0.05)
        yield gate
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)


async def started(settings: Path, log: Any) -> asyncio.subprocess.Process:
    """`fedgate`, as an operator starts it."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "daemon.gateway.main", "--config", str(settings)),
        stdout=log,
        stderr=log,
    )


def _open(gate: Gate) -> bool:
    with socket.socket() as knock:
        knock.settimeout(5)
        return knock.connect_ex((gate.host, gate.port)) == 0


async def refusal_of(stub: Any, method: MethodDescriptor, secret: str) -> grpc.StatusCode:
    """What a method of a service says to a token; nothing is sent on a stream before it is said.

    Whoever still sends when the other side has refused may learn of that alone (INTERNAL).
    """
    said, request = asyncio.Event(), control.StatusRequest()

    async def late() -> AsyncIterator[control.StatusRequest]:
        await said.wait()
        yield request

    sent = late() if method.client_streaming else request
    carried = [("authorization", f"Bearer {secret}")]
    call = getattr(stub, method.name)(sent, metadata=carried, timeout=30)
    code: grpc.StatusCode = await call.code()
    said.set()
    return code
