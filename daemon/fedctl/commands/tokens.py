"""fedctl tokens: for programs that ask through the gateway, and can do nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import collection_prefix, command, of_field
from daemon.fedctl.terminal.output import Session, as_plain, columns, plain_text, tell
from proto import bounds

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import (
        AccessToken,
        ChangeTokenReply,
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

_Collections = Annotated[
    list[str] | None,
    typer.Option(
        "--collection",
        metavar="NAME",
        help="Only of what lies in this collection; more than once for more.",
    ),
]


@tokens.command("create")
@command
def create(
    session: Session,
    name: _Name,
    scope: Annotated[
        list[str], typer.Option("--scope", help=f"What it is for, once each: {_SCOPES}.")
    ],
    collection: _Collections = None,
    days: Annotated[
        int, of_field("CreateTokenRequest", "days", "--days", help="Until it expires.")
    ] = 90,
) -> None:
    """Make a token, and show it: this once and never again.

    Without --collection it may ask of all documents, also of those that come later. With it, it
    is answered as if the site had no documents but those whose ids begin with NAME/.
    A name may be given again when its token is revoked or has expired.
    """
    reply = run(_create(session, name, scope, days, _collections(collection)))
    tell(
        session,
        {
            "token": reply.secret,
            "name": reply.token.name,
            "scopes": ", ".join(reply.token.scopes),
            "documents": _documents(reply.token),
            "expires": _day(reply.token.expires_unix_s),
        },
        *_nothing_in(reply.empty),
        "Nobody can show it again: put it where its program reads it, and nowhere else.",
        as_json=as_plain(reply),
    )


async def _create(
    session: Session, name: str, scopes: list[str], days: int, collections: list[str]
) -> CreateTokenReply:
    from proto.control_pb2 import CreateTokenRequest

    async with connected(socket_path(session)) as daemon:
        request = CreateTokenRequest(name=name, scopes=scopes, days=days, collections=collections)
        return await daemon.CreateToken(request, timeout=ANSWER_WITHIN_S)


@tokens.command("change")
@command
def change(
    session: Session,
    name: _Name,
    collection: _Collections = None,
    all_documents: Annotated[
        bool, typer.Option("--all-documents", help="All that is here, also what comes later.")
    ] = False,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help=f"What it is for from now on, once each: {_SCOPES}."),
    ] = None,
) -> None:
    """Change what a token may ask of, or is for; what is not named stays as it is.

    It holds at once, also for questions that wait for their turn.
    """
    reply = run(_change(session, name, _collections(collection), all_documents, scope or []))
    plain = {
        "name": reply.token.name,
        "scopes": ", ".join(reply.token.scopes),
        "documents": _documents(reply.token),
    }
    tell(session, plain, *_nothing_in(reply.empty), as_json=as_plain(reply))


async def _change(
    session: Session, name: str, collections: list[str], all_documents: bool, scopes: list[str]
) -> ChangeTokenReply:
    from proto.control_pb2 import ChangeTokenRequest

    async with connected(socket_path(session)) as daemon:
        request = ChangeTokenRequest(
            name=name, collections=collections, all_documents=all_documents, scopes=scopes
        )
        return await daemon.ChangeToken(request, timeout=ANSWER_WITHIN_S)


def _collections(names: list[str] | None) -> list[str]:
    """As `fedctl ingest` takes them."""
    return [collection_prefix(name or "/").rstrip("/") for name in names or ()]


def _documents(token: AccessToken) -> str:
    """What it may ask of, in words: an empty place could mean either."""
    return "all of the site" if token.all_documents else ", ".join(token.collections) or "none"


def _nothing_in(empty: Sequence[str]) -> list[str]:
    """What to say of collections that have no document."""
    if not empty:
        return []
    names = ", ".join(empty)
    return [f"Nothing is in {names} yet: nothing is found there until something is ingested."]


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
    table = columns("name", "scopes", "documents", "made", "until", "last used", "")
    for one in reply.tokens:
        table.add_row(
            *(plain_text(one.name), plain_text(", ".join(one.scopes))),
            *(plain_text(_documents(one)), _day(one.created_unix_s)),
            *(_day(one.expires_unix_s), one.last_used or "never", _refused(one)),
        )
    console.print(table)
    _show_people(console, reply)


def _show_people(console: Console, reply: ListTokensReply) -> None:
    """Who else is let in: without it a list without a token would look like nobody."""
    if reply.people:
        if fault := plain_text(reply.people_fault):
            console.print(f"Nobody who signs in elsewhere is let in: {fault}")
        table = columns("people of", "as", "groups", "keys")
        for one in reply.issuers:
            keys = plain_text(", ".join(one.keys))
            table.add_row(plain_text(one.issuer), f"oidc:{one.name}:…", str(one.groups), keys)
        for one in reply.speakers:
            table.add_row(plain_text(one.issuer), f"token:{one.name}:…", str(one.groups), "secret")
        console.print(table)
    if reply.blocked:
        table = columns("blocked", "since")
        for person in reply.blocked:
            table.add_row(plain_text(person.name), _day(person.since_unix_s))
        console.print(table)


def _refused(token: AccessToken) -> str:
    if token.revoked_unix_s:
        return f"revoked {_day(token.revoked_unix_s)}"
    return "" if time.time() < token.expires_unix_s else "expired"


@tokens.command("block")
@command
def block(
    session: Session,
    person: Annotated[
        str,
        typer.Argument(
            metavar="PERSON", help="As in the audit log: oidc:ISSUER:SUB or token:NAME:SUB."
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let them in again.")] = False,
) -> None:
    """Let a person in no more who signs in elsewhere, whatever their groups.

    It holds at once, also for questions that wait for their turn.
    """
    run(_block(session, person, undo))
    plain = {"let in again" if undo else "blocked": person}
    tell(session, plain, as_json={"person": person, "blocked": not undo})


async def _block(session: Session, person: str, undo: bool) -> None:
    from proto.control_pb2 import BlockPersonRequest

    async with connected(socket_path(session)) as daemon:
        request = BlockPersonRequest(name=person, undo=undo)
        await daemon.BlockPerson(request, timeout=ANSWER_WITHIN_S)


@tokens.command("revoke")
@command
def revoke(session: Session, name: _Name) -> None:
    """Have a token refused from the next call on, and its questions that wait for their turn."""
    reply = run(_revoke(session, name))
    plain = {"revoked": reply.token.name}
    tell(session, plain, as_json=as_plain(reply.token))


async def _revoke(session: Session, name: str) -> RevokeTokenReply:
    from proto.control_pb2 import RevokeTokenRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.RevokeToken(RevokeTokenRequest(name=name), timeout=ANSWER_WITHIN_S)


def _day(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
