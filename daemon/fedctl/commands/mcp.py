"""fedctl mcp: the gateway's tools for agents that start a program instead of opening an address.

It is the person's own process and has what the person has: a token, and the address of the
gateway. No socket of the daemon is within its reach, and so within no agent's.
"""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from daemon.fedctl.terminal.connection import run
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import CommandError, Exit, Session

if TYPE_CHECKING:
    import httpx2
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult

topic = typer.Typer()

_TOKEN: Final = "HANSE_TOKEN"  # noqa: S105  a name
_GATEWAY: Final = "http://127.0.0.1:8080"
_ANSWER_WITHIN_S: Final = 420.0  # as long as the gateway takes for an exchange
_LONGEST_TOKEN: Final = 8192  # as the gateway takes: what an identity provider signs is long
_GET_ONE: Final = "ask whoever administers the site for a token (`fedctl tokens create`)"
_REMEDY: Final = (
    "Ask whoever administers the site whether it runs (systemctl status fedgate), or name its "
    "address (--gateway)"
)


@topic.command("mcp")
@command
def mcp(
    _session: Session,
    gateway: Annotated[
        str, typer.Option(metavar="URL", help="The address of the site's gateway.")
    ] = _GATEWAY,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the token, which nobody else may read (mode 0600).",
            show_default=f"the environment's {_TOKEN}",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            metavar="FILE",
            help="Certificates that the gateway's is to be verified by.",
            show_default="the system's",
        ),
    ] = None,
) -> None:
    """Give an agent the site's documents to ask, over MCP on standard input and output.

    An agent's program starts it, with a token. Its tools are those that the token is for: ask,
    search, get_passage. It needs no right on this machine, and asks the gateway like anybody else.
    """
    # It has nothing to lose, and a read of standard input can't be broken off.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run(_serve(_checked(gateway), _token(token_file), ca))


def _checked(gateway: str) -> str:
    """The address of its tools; refused where the token would cross a network in the clear."""
    try:
        url = urlsplit(gateway)
        host, _ = url.hostname or "", url.port
    except ValueError:
        host = ""
    if not host or url.scheme not in ("http", "https") or url.query or url.fragment or url.username:
        raise CommandError(
            f"{gateway!r} is no address of a gateway",
            f"Say it as {_GATEWAY} or https://gate.example.org",
            exit_code=Exit.USAGE,
        )
    if url.scheme == "http" and not _is_this_machine(host):
        raise CommandError(
            f"the token would go to {host} in the clear",
            "Use https://: the gateway speaks TLS where it has a certificate (docs/install.md)",
            exit_code=Exit.USAGE,
        )
    return f"{gateway.rstrip('/')}/mcp"


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(file: Path | None) -> str:
    """From the file, else from the environment; never from words that others can list."""
    token = os.environ.get(_TOKEN, "") if file is None else _read(file)
    token = token.strip()
    if not token:
        where = f"the environment has no {_TOKEN}" if file is None else f"{file} is empty"
        raise CommandError(
            f"no token: {where}", f"Put it there, or {_GET_ONE}", exit_code=Exit.USAGE
        )
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{_LONGEST_TOKEN}}}", token):
        where = _TOKEN if file is None else str(file)
        raise CommandError(
            f"what {where} holds is no token: it must be one line without spaces, of at most "
            f"{_LONGEST_TOKEN:,} characters",
            "Copy it again",
            exit_code=Exit.USAGE,
        )
    return token


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & 0o077:
                raise CommandError(
                    f"others may read {file}",
                    f"It must be a file of yours alone: chmod 600 {file}",
                    exit_code=Exit.USAGE,
                )
            return opened.read(_LONGEST_TOKEN + 2).decode(errors="replace")
    except OSError as error:
        raise CommandError(
            f"cannot read {file}: {error.strerror}", "Check --token-file", exit_code=Exit.USAGE
        ) from error


# ---- between the agent and the gateway -----------------------------------------------


async def _serve(url: str, token: str, ca: Path | None) -> None:
    from mcp.server.stdio import stdio_server

    async with _http(url, token, ca) as http:
        # Who has no right is told so now, and not in a conversation.
        server = await _Tools(url, http).server()
        async with stdio_server() as (requests, answers):
            await server.run(requests, answers, server.create_initialization_options())


@asynccontextmanager
async def _http(url: str, token: str, ca: Path | None) -> AsyncIterator[httpx2.AsyncClient]:
    import httpx2
    from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
    from mcp_types.version import LATEST_HANDSHAKE_VERSION

    secure = url.startswith("https:")
    try:
        verified: Any = ssl.create_default_context(cafile=ca) if ca or secure else False
    except (OSError, ssl.SSLError) as error:
        raise CommandError(
            f"cannot read certificates from {ca}: {error}", "Check --ca", exit_code=Exit.USAGE
        ) from error
    async with httpx2.AsyncClient(
        headers={
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            MCP_PROTOCOL_VERSION_HEADER: LATEST_HANDSHAKE_VERSION,
        },
        timeout=httpx2.Timeout(_ANSWER_WITHIN_S, connect=10.0),
        verify=verified,
        trust_env=secure,  # else a proxy for the web would be handed the token
    ) as http:
        yield http


class _Tools:
    """The gateway's tools, whichever those are, as those of a server of ours.

    Each call is a request of its own: a gateway that was restarted meanwhile goes unnoticed. The
    SDK's client would wait for ever for one that is away.
    """

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self._url = url
        self._http = http

    async def server(self) -> Server[dict[str, Any]]:
        """What speaks to the agent, in any revision of the protocol; CommandError as `_asked`."""
        from mcp.server.lowlevel import Server
        from mcp_types import InitializeResult
        from mcp_types.version import LATEST_HANDSHAKE_VERSION

        us = {"name": "fedctl", "version": version("hanse")}
        greeting = {"protocolVersion": LATEST_HANDSHAKE_VERSION, "capabilities": {}}
        told = await self._asked("initialize", {**greeting, "clientInfo": us})
        gateway = InitializeResult.model_validate(told)
        return Server(
            gateway.server_info.name,
            version=gateway.server_info.version,
            title=gateway.server_info.title,
            instructions=gateway.instructions,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def _list(self, _context: object, _page: object) -> ListToolsResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import INTERNAL_ERROR, ListToolsResult

        try:
            return ListToolsResult.model_validate(await self._asked("tools/list", {}))
        except CommandError as error:
            raise MCPError(code=INTERNAL_ERROR, message=_told(error)) from error

    async def _call(self, _context: object, called: CallToolRequestParams) -> CallToolResult:
        from mcp_types import CallToolResult, TextContent

        try:
            wanted = {"name": called.name, "arguments": called.arguments or {}}
            return CallToolResult.model_validate(await self._asked("tools/call", wanted))
        except CommandError as error:
            return CallToolResult(content=[TextContent(text=_told(error))], is_error=True)

    async def _asked(self, method: str, params: dict[str, Any]) -> Any:
        """The gateway's result; CommandError with what it said instead, or why it said nothing."""
        import httpx2

        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            reply = await self._http.post(self._url, json=request)
        except httpx2.TimeoutException as error:
            cause = f"the gateway at {self._url} did not answer in time"
            raise CommandError(cause, "Try again later", exit_code=Exit.UNREACHABLE) from error
        except (httpx2.HTTPError, OSError) as error:
            cause, remedy = str(error) or type(error).__name__, _REMEDY
            if "CERTIFICATE_VERIFY_FAILED" in cause:
                remedy = "Name the file with the certificate that it is signed by (--ca FILE)"
            cause = f"no gateway answers at {self._url} ({cause})"
            raise CommandError(cause, remedy, exit_code=Exit.UNREACHABLE) from error
        try:
            told = reply.json()
            failed = told.get("error")
            if failed is None:
                return told["result"]
            cause = str(failed["message"])
        except (ValueError, KeyError, TypeError, AttributeError):
            cause = f"{self._url} answers as no gateway of a site does (HTTP {reply.status_code})"
            raise CommandError(cause, "Check --gateway") from None
        raise CommandError(f"the gateway refused: {cause}")


def _told(error: CommandError) -> str:
    return f"{error.cause}. {error.remedy}".rstrip(". ") + "."
