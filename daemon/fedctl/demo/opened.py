"""The demo's sites, kept for who wants to ask one of them: its gateway, a token, what to type."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from daemon.fedctl.demo import sites as demo_sites
from daemon.fedctl.demo.sites import DemoSite, RunningDaemon
from daemon.fedctl.terminal.output import facts, plain_text

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2_grpc import ControlAsyncStub

_SCOPES: Final = ("ask", "search")
_DAYS: Final = 1  # of the token: the sites are gone before
_LOOK_AGAIN_AFTER_S: Final = 0.1


@dataclass(frozen=True)
class OpenSite:
    """A site of the demo that programs can ask, and with what."""

    site: DemoSite
    token: str
    question: str

    def plain(self) -> dict[str, str]:
        """The JSON object."""
        gateway = self.site.gateway
        return {
            "site": self.site.id,
            "gateway": gateway,
            "mcp": f"{gateway}/mcp",
            "token": self.token,
            "socket": str(self.site.socket),
        }

    def commands(self) -> dict[str, str]:
        """By what each does; to be pasted as they are."""
        asked = {"model": "hanse", "messages": [{"role": "user", "content": self.question}]}
        call = {"name": "search", "arguments": {"question": self.question, "top_k": 1}}
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        gateway = self.site.gateway
        server = {
            "type": "http",
            "url": f"{gateway}/mcp",
            "headers": {"Authorization": f"Bearer {self.token}"},
        }
        return {
            "An answer with citations": self._curl("/v1/chat/completions", asked),
            "A tool, as an agent calls it over MCP": self._curl("/mcp", rpc),
            "The settings of an agent's program": json.dumps({"mcpServers": {"hanse": server}}),
            "For one that starts programs": f"HANSE_TOKEN={self.token} "
            f"fedctl mcp --gateway {gateway}",
            "As the site's operator": f"fedctl --socket {shlex.quote(str(self.site.socket))} "
            f"ask {shlex.quote(self.question)}",
        }

    def _curl(self, path: str, body: dict[str, Any]) -> str:
        header = shlex.quote(f"Authorization: Bearer {self.token}")
        sent = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl -s {self.site.gateway}{path} -H {header} --json {sent}"


@asynccontextmanager
async def gateway_of(site: DemoSite) -> AsyncIterator[RunningDaemon]:
    """Its gateway, started; stopped on the way out."""
    async with demo_sites.running([site], "fedgate") as (gate,):
        yield gate


async def opened(site: DemoSite, stub: ControlAsyncStub, question: str) -> OpenSite:
    """A token for the site whose gateway is starting; returns once that listens."""
    from proto.control_pb2 import CreateTokenRequest

    request = CreateTokenRequest(name="demo", scopes=_SCOPES, days=_DAYS)
    made = await stub.CreateToken(request, timeout=30)
    # Nothing tells of a port that another process is about to open: look again.
    while not await _listens(site.gateway_port):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_AGAIN_AFTER_S)
    return OpenSite(site, made.secret, question)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def show_open(console: Console, one: OpenSite, sites: int) -> None:
    """For people: where, with what, and commands on a line each."""
    console.print(
        f"\nThe {sites} sites stay until Ctrl-C. Open the address of one in a "
        "browser and sign in with the token; programs ask there, too:"
    )
    told = facts()
    for name, value in (("address", one.site.gateway), ("token", one.token)):
        told.add_row(name, plain_text(value))
    console.print(told)
    for what, typed in one.commands().items():
        console.print(f"\n{what}:", style="bold")
        console.print(plain_text(typed), soft_wrap=True)
