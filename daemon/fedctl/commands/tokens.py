"""fedctl tokens: for programs that ask through the gateway, and can do nothing else."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import Session, as_plain, columns, plain_text, tell
from proto import bounds

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import (
        AccessToken,
        CreateTokenReply,
        ListTokensReply,
        RevokeTokenReply,
    )

topic = typer.Typer()
tokens = typer.Typer(
    help="Tokens for people's programs, which ask through the gateway.", no_args_is_help=True
)
topic.add_typer(tokens, name="tokens")

_SCOPES = ", ".join(bounds.of("CreateTokenRequest", "scopes").word)
_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the program or person; in the audit log.")
]


@tokens.command("create")
@command
def create(
    session: Session,
    name: _Name,
    scope: Annotated[
        list[str], typer.Option("--scope", help=f"What it is for, once each: {_SCOPES}.")
    ],
    days: Annotated[
        int, of_field("CreateTokenRequest", "days", "--days", help="Until it expires.")
    ] = 90,
) -> None:
    """Make a token, and show it: this once and never again.

    A name may be given again when its token is revoked or has expired.
    """
    reply = run(_create(session, name, scope, days))
    tell(
        session,
        {
            "token": reply.secret,
            "name": reply.token.name,
            "scopes": ", ".join(reply.token.scopes),
            "expires": _day(reply.token.expires_unix_s),
        },
        "Nobody can show it again: put it where its program reads it, and nowhere else.",
        as_json=as_plain(reply),
    )


async def _create(session: Session, name: str, scopes: list[str], days: int) -> CreateTokenReply:
    from proto.control_pb2 import CreateTokenRequest

    async with connected(socket_path(session)) as daemon:
        request = CreateTokenRequest(name=name, scopes=scopes, days=days)
        return await daemon.CreateToken(request, timeout=ANSWER_WITHIN_S)


@tokens.command("list")
@command
def list_tokens(session: Session) -> None:
    """Show which tokens there are, what for and until when; never a token itself."""
    reply = run(_list(session))
    session.result(as_plain(reply), lambda console: _show(console, reply))


async def _list(session: Session) -> ListTokensReply:
    from proto.control_pb2 import ListTokensRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.ListTokens(ListTokensRequest(), timeout=ANSWER_WITHIN_S)


def _show(console: Console, reply: ListTokensReply) -> None:
    table = columns("name", "scopes", "made", "until", "last used", "")
    for one in reply.tokens:
        table.add_row(
            *(plain_text(one.name), plain_text(", ".join(one.scopes)), _day(one.created_unix_s)),
            *(_day(one.expires_unix_s), one.last_used or "never", _refused(one)),
        )
    console.print(table)


def _refused(token: AccessToken) -> str:
    if token.revoked_unix_s:
        return f"revoked {_day(token.revoked_unix_s)}"
    return "" if time.time() < token.expires_unix_s else "expired"


@tokens.command("revoke")
@command
def revoke(session: Session, name: _Name) -> None:
    """Have a token refused from the next call on."""
    reply = run(_revoke(session, name))
    plain = {"revoked": reply.token.name}
    tell(session, plain, as_json=as_plain(reply.token))


async def _revoke(session: Session, name: str) -> RevokeTokenReply:
    from proto.control_pb2 import RevokeTokenRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.RevokeToken(RevokeTokenRequest(name=name), timeout=ANSWER_WITHIN_S)


def _day(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
