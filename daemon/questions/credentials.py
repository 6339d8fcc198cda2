"""Whose token a call carries, and whether it is for that: the only way to a question's answer."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

import grpc
import structlog

from config.control_socket import ASKS_FOR
from config.kinds import OF_ALL_DOCUMENTS
from daemon.control.context import Context
from daemon.process import metrics
from daemon.process.tasks import logged
from daemon.services.rights import RightsLost
from daemon.state.audit import Action, AuditLog
from daemon.state.people import (
    Collections,
    May,
    PeopleUnknown,
    SignInRefused,
    both,
    lies_in,
    outermost,
    shared,
)
from daemon.state.tokens import Token, Tokens

log = structlog.get_logger()

_SCHEME: Final = "bearer "
_NEW_ONE: Final = "ask whoever administers this site for a token (`fedctl tokens create`)"
_ANOTHER_GROUP: Final = (
    "ask whoever administers this site what your groups may (the file that gateway.people names)"
)
_A_LINE_EVERY_S: Final = 60.0  # of the refusals of one token, for one cause
_MOST_KINDS: Final = 10_000  # of refusals that are told of; people who sign in elsewhere are many

# A path from the root on; no part of an address, and no fraction.
_PATH = re.compile(r"(?<![\w/:.)\]])/[^\s/'\",;:()]+(?:/[^\s/'\",;:()]*)*")

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@dataclass(frozen=True)
class Asker:
    """Who asks, and what they may: a token, a person, or a person for whom a token asks.

    ``name``: as they are told; ``actor``: as the audit log has it, of which no two are alike.
    """

    name: str
    actor: str
    may: May
    expires_s: int

    @property
    def scopes(self) -> tuple[str, ...]:
        """What for."""
        return tuple(self.may)

    @property
    def collections(self) -> Collections:
        """Of what, for one end or another; None: all documents. Figures are no documents."""
        of_documents = [one for end, one in self.may.items() if end not in OF_ALL_DOCUMENTS]
        ends = of_documents or self.may.values()
        return None if None in ends else outermost(name for one in ends for name in one or ())

    @property
    def sees_what_it_asks_of(self) -> bool:
        """Whether passages that an answer is made of are among those that it may search."""
        return "search" in self.may and both(self.may["search"], self.may["ask"]) == self.may["ask"]


class NotAllowed(RightsLost):
    """Who asks may not, or not any more; ``status``: as what the call ends.

    ``asker``: the name and the actor, where it is sure who it is; ``why``: in the audit log.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        cause: str,
        asker: tuple[str, str] = ("", ""),
        why: str = "",
    ) -> None:
        super().__init__(cause)
        self.status, self.asker, self.why = status, asker, why


@dataclass(frozen=True)
class Bearer:
    """Who asks, for what; what they may is looked up each time.

    ``look``: who it is by now, or raises NotAllowed; ``token``: who it was when the call came.
    """

    look: Callable[[], Asker]
    token: Asker
    scope: str

    @property
    def name(self) -> str:
        """Of the token, or of the person."""
        return self.token.name

    @property
    def actor(self) -> str:
        """As the audit log has it."""
        return self.token.actor

    @property
    def share(self) -> str:
        """Whose turn it is: a token's, also where it asks for many people, or a person's."""
        kind, *rest = self.token.actor.split(":")
        return f"token:{rest[0]}" if kind == "token" else self.token.actor

    def rights(self) -> tuple[str, ...] | None:
        """As `daemon.services.rights.Rights`; raises NotAllowed."""
        return _allowed(self.look(), self.scope)

    @property
    def expires_s(self) -> int:
        """When it does, as it was when the call came."""
        return self.token.expires_s

    @property
    def is_token(self) -> bool:
        """Whether it is one of the site's own, that asks for nobody else."""
        return self.token.actor.count(":") == 1

    def may_search(self, document_id: str) -> bool:
        """Whether they may find that document, by now."""
        try:
            collections = _allowed(self.look(), "search")
        except NotAllowed:
            return False
        return collections is None or lies_in(document_id, collections)

    def sees_what_it_asks_of(self) -> bool:
        """As `Asker` has it, by now."""
        try:
            return self.look().sees_what_it_asks_of
        except NotAllowed:
            return False


def _allowed(asker: Asker, scope: str) -> Collections:
    if scope not in asker.may:
        who = asker.name if ":" in asker.name else f"the token {asker.name!r}"
        cause = f"{who} is not for this: it needs the scope {scope!r}"
        raise NotAllowed(DENIED, cause, (asker.name, asker.actor), "scope")
    return asker.may[scope]


class Credentials:
    """Tokens that calls carry, checked where the call is answered.

    What is wrong with a token of ours is audited under its name; of what is no token of ours
    there is only a count: a stranger must not be able to fill the audit log. Nor must who has a
    token that was revoked: of the same refusals there is one line a minute, with their number.

    Signed tokens of people who sign in elsewhere are verified on the event loop: at most 8 KiB
    and about a millisecond each (docs/decisions/0053), less than the call itself takes.
    """

    def __init__(self, tokens: Tokens, audit: AuditLog, every_s: float = _A_LINE_EVERY_S) -> None:
        """``every_s``: between two lines of refusals that are alike."""
        self._tokens = tokens
        self._refusals = _Refusals(audit, every_s)

    async def of(self, context: Context, scope: str, action: Action | None = None) -> Bearer:
        """The token of this call, which is for that; otherwise the call ends here.

        ``action``: as what it is audited; None: figures, and who one is, are not.
        """
        asker, look = await self._known(context, action)
        try:
            _allowed(asker, scope)
        except NotAllowed as refusal:
            await self._turn_down(asker, action, refusal.why)
            await end(context, refusal)
        return Bearer(look, asker, scope)

    async def any(self, context: Context) -> Asker:
        """Who calls, whatever it is for; a token that asks for people need not say for whom."""
        asker, _ = await self._known(context, None, unsaid=True)
        return asker

    async def _known(
        self, context: Context, action: Action | None, *, unsaid: bool = False
    ) -> tuple[Asker, Callable[[], Asker]]:
        """Who calls, and how that is looked up again."""
        try:
            look, token = self._look(context, unsaid=unsaid)
            asker = look()
        except NotAllowed as refusal:
            if not refusal.why:
                await self._unknown(context, refusal)
            await self._turn_down(Asker(*refusal.asker, {}, 0), action, refusal.why)
            await end(context, refusal)
        if token is not None:
            await self._tokens.used(token)
        return asker, look

    def _look(self, context: Context, *, unsaid: bool) -> tuple[Callable[[], Asker], Token | None]:
        """By what the caller is known, and the token of ours that it is; NotAllowed: by nothing."""
        told, said_for = self.told(context), self._told(context, ASKS_FOR)
        if len(told) != 1 or not told[0].lower().startswith(_SCHEME):
            cause = "no token: say `authorization: Bearer TOKEN`, once"
            raise NotAllowed(UNAUTHENTICATED, cause)
        secret = told[0][len(_SCHEME) :].strip()
        token = self._tokens.find(secret)
        if token is not None:
            return partial(self._by_token, token, said_for, unsaid), token
        if said_for:
            raise _speaks_for_nobody("it", ("", ""))
        if self._tokens.people.are_known and secret.count(".") == 2:
            return partial(self._signed_in, secret), None
        raise NotAllowed(UNAUTHENTICATED, "no such token here")

    def _by_token(self, token: Token, said_for: list[str], unsaid: bool) -> Asker:
        """Whether a token asks for people is of now, too: it may have come to."""
        if not self._tokens.people.speaks(token.name):
            if said_for:
                raise _speaks_for_nobody(f"the token {token.name!r}", (token.name, token.actor))
            return self._itself(token)
        if said_for:
            return self._spoken_for(token, said_for)
        asker = self._itself(token)
        if unsaid:
            return asker
        cause = f"the token {token.name!r} asks for people, and did not say for whom: {ASKS_FOR}"
        raise NotAllowed(UNAUTHENTICATED, cause, (asker.name, asker.actor), "no person")

    def _itself(self, token: Token) -> Asker:
        newest, fault = self._tokens.now(token)
        if fault:
            cause = f"the token {token.name!r} is {fault}"
            raise NotAllowed(UNAUTHENTICATED, cause, (token.name, token.actor), fault)
        may = dict.fromkeys(newest.scopes, newest.collections)
        return Asker(newest.name, newest.actor, may, newest.expires_s)

    def _spoken_for(self, token: Token, said: list[str]) -> Asker:
        """What both the token and the person may."""
        asker = self._itself(token)
        if len(said) != 1:
            cause = f"{ASKS_FOR} has to be there once"
            raise NotAllowed(UNAUTHENTICATED, cause, (asker.name, asker.actor), "no person")
        with self._explained(ASKS_FOR, asker):
            people = self._tokens.people
            person = people.spoken_for(token.name, said[0], self._tokens.now_s)
        self._refuse_blocked(person.name)
        may = shared(asker.may, person.may)
        return Asker(person.name, person.name, may, min(asker.expires_s, person.expires_s))

    def _signed_in(self, secret: str) -> Asker:
        with self._explained("the signed token", None):
            person = self._tokens.people.signed_in(secret, self._tokens.now_s)
        self._refuse_blocked(person.name)
        return Asker(person.name, person.name, person.may, person.expires_s)

    @contextmanager
    def _explained(self, what: str, by: Asker | None) -> Iterator[None]:
        """``by``: the token that carries it, in whose name it is refused where no person is."""
        try:
            yield
        except SignInRefused as refusal:
            if refusal.subject:
                asker, why = (refusal.subject, refusal.subject), refusal.kind
            else:
                asker, why = (by.name, by.actor) if by else ("", ""), "no person" if by else ""
            status = DENIED if refusal.kind == "no known group" else UNAUTHENTICATED
            raise NotAllowed(status, f"{what} is refused: {refusal}", asker, why) from refusal
        except PeopleUnknown as error:
            # Not the cause itself: it names files and groups, and is in the log.
            cause = "who signs in elsewhere can't be told at this site now: its log says why"
            raise NotAllowed(grpc.StatusCode.FAILED_PRECONDITION, cause) from error

    def _refuse_blocked(self, name: str) -> None:
        if self._tokens.is_blocked(name):
            raise NotAllowed(
                UNAUTHENTICATED, f"{name} is blocked at this site", (name, name), "blocked"
            )

    @classmethod
    def told(cls, context: Context) -> list[str]:
        """What the call says of who it is, as it came."""
        return cls._told(context, "authorization")

    @staticmethod
    def _told(context: Context, name: str) -> list[str]:
        metadata = context.invocation_metadata() or ()
        return [str(value) for key, value in metadata if key == name]

    async def _unknown(self, context: Context, refusal: NotAllowed) -> NoReturn:
        metrics.count("hanse_token_refusals")
        await end(context, refusal)

    async def _turn_down(self, asker: Asker, action: Action | None, why: str) -> None:
        metrics.count("hanse_token_refusals")
        await self._refusals.note(asker, action, why)


class _Refusals:
    """Refusals of known tokens, in both logs: the first at once, more as a number a minute.

    There are as many kinds as tokens, actions and causes together, so what is remembered of them
    is bounded.
    """

    def __init__(self, audit: AuditLog, every_s: float) -> None:
        self._audit = audit
        self._every_s = every_s
        self._more: dict[tuple[str, Action | None, str], int] = {}  # since the last line of a kind
        self._waiting = set[asyncio.Task[None]]()

    async def note(self, asker: Asker, action: Action | None, why: str) -> None:
        """One more."""
        kind = (asker.actor, action, why)
        if kind in self._more:
            self._more[kind] += 1
            return
        if len(self._more) >= _MOST_KINDS:
            return
        self._more[kind] = 0
        # Tasks: whoever asks may hang up, and the line is written and of more is told all the same.
        first = asyncio.create_task(self._write(kind, 1))
        telling = asyncio.create_task(logged(self._tell_more(kind, first)), name="refusals")
        self._waiting.add(telling)  # the loop keeps no task by itself
        telling.add_done_callback(self._waiting.discard)
        await asyncio.shield(first)

    async def _tell_more(
        self, kind: tuple[str, Action | None, str], first: asyncio.Task[None]
    ) -> None:
        """Behind the first a line whenever the time is up, until there was none of that kind."""
        try:
            await first
            while True:
                await asyncio.sleep(self._every_s)
                count, self._more[kind] = self._more[kind], 0
                if not count:
                    return
                await self._write(kind, count)
        finally:
            del self._more[kind]

    async def _write(self, kind: tuple[str, Action | None, str], count: int) -> None:
        actor, action, why = kind
        name = actor.removeprefix("token:")
        log.warning("a token was refused", token=name, cause=why, times=count)
        if action is not None:
            told = {"cause": why} if count == 1 else {"cause": why, "times": count}
            await self._audit.record_or_owe(actor, action, "refused or failed", **told)


def _speaks_for_nobody(who: str, asker: tuple[str, str]) -> NotAllowed:
    """Taken for the token's own question it would be answered with all that this may."""
    remedy = f"leave {ASKS_FOR} out, or have the token named in gateway.people"
    cause = f"{who} speaks for nobody else: {remedy}"
    return NotAllowed(UNAUTHENTICATED, cause, asker, "person" if asker[0] else "")


async def end(context: Context, refusal: NotAllowed) -> NoReturn:
    """End the call so."""
    of_a_person = refusal.status == DENIED and ":" in refusal.asker[0]
    remedy = _ANOTHER_GROUP if of_a_person else _NEW_ONE
    await context.abort(refusal.status, f"{refusal}\n{remedy}")


def without_paths(cause: str) -> str:
    """A cause with the last name alone of each path in it: the rest is for who has the log."""
    return _PATH.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], cause)
