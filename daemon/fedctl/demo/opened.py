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
from daemon.fedctl.terminal.options import collection_prefix
from daemon.fedctl.terminal.output import CommandError, facts, plain_text

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
    collection: str = ""  # into which the token brings files; "": it brings none

    def plain(self) -> dict[str, str]:
        """The JSON object."""
        gateway = self.site.gateway
        return {
            "site": self.site.id,
            "gateway": gateway,
            "mcp": f"{gateway}/mcp",
            "token": self.token,
            "collection": self.collection,
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

    collection = await _only_collection(stub)
    request = CreateTokenRequest(name="demo", scopes=_SCOPES, days=_DAYS)
    if collection:  # a token has the same collections for all that it is for
        request.collections.append(collection)
        request.scopes.append("upload")
    made = await stub.CreateToken(request, timeout=30)
    # Nothing tells of a port that another process is about to open: look again.
    while not await _listens(site.gateway_port):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_AGAIN_AFTER_S)
    return OpenSite(site, made.secret, question, collection)


async def _only_collection(stub: ControlAsyncStub) -> str:
    """The collection that all documents of the site lie in, as the bundled ones do; "": in none."""
    from proto.control_pb2 import ListDocumentsRequest

    first = (await stub.ListDocuments(ListDocumentsRequest(limit=1), timeout=30)).documents
    collection, slash, _ = first[0].id.partition("/") if first else ("", "", "")
    try:
        collection_prefix(collection)
    except CommandError:  # of `--data`: what no token can name
        return ""
    if not slash:
        return ""
    # Ids are in the order of their letters: behind all that begin so there is nothing.
    behind = ListDocumentsRequest(after=f"{collection}/\U0010ffff", limit=1)
    return "" if (await stub.ListDocuments(behind, timeout=30)).documents else collection


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
    rows = {"address": one.site.gateway, "token": one.token}
    if one.collection:
        rows["for files"] = f"Upload, into {one.collection} or below it"
    for name, value in rows.items():
        told.add_row(name, plain_text(value))
    console.print(told)
    for what, typed in one.commands().items():
        console.print(f"\n{what}:", style="bold")
        console.print(plain_text(typed), soft_wrap=True)
