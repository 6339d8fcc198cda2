"""Whose token a call carries, and whether it is for that: the only way to a question's answer."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
from dataclasses import dataclass
from typing import Final, NoReturn

import grpc
import structlog

from daemon.control.context import Context
from daemon.process import metrics
from daemon.process.tasks import logged
from daemon.services.rights import RightsLost
from daemon.state.audit import Action, AuditLog
from daemon.state.tokens import Token, Tokens

log = structlog.get_logger()

_SCHEME: Final = "bearer "
_NEW_ONE: Final = "ask whoever administers this site for a token (`fedctl tokens create`)"
_A_LINE_EVERY_S: Final = 60.0  # of the refusals of one token, for one cause


class NotAllowed(RightsLost):
    """Who asks may not, or not any more; ``status``: as what the call ends."""

    def __init__(self, status: grpc.StatusCode, cause: str) -> None:
        super().__init__(cause)
        self.status = status


@dataclass(frozen=True)
class Bearer:
    """Who asks, for what; what they may is looked up each time."""

    tokens: Tokens
    token: Token
    scope: str

    @property
    def name(self) -> str:
        """Of the token."""
        return self.token.name

    def rights(self) -> tuple[str, ...] | None:
        """As `daemon.services.rights.Rights`; raises NotAllowed."""
        token, fault = self.tokens.now(self.token)
        if fault:
            cause = f"the token {token.name!r} is {fault}"
            raise NotAllowed(grpc.StatusCode.UNAUTHENTICATED, cause)
        if self.scope not in token.scopes:
            cause = f"the token {token.name!r} is not for this: it needs the scope {self.scope!r}"
            raise NotAllowed(grpc.StatusCode.PERMISSION_DENIED, cause)
        return token.collections


class Credentials:
    """Tokens that calls carry, checked where the call is answered.

    What is wrong with a token of ours is audited under its name; of what is no token of ours
    there is only a count: a stranger must not be able to fill the audit log. Nor must who has a
    token that was revoked: of the same refusals there is one line a minute, with their number.
    """

    def __init__(self, tokens: Tokens, audit: AuditLog, every_s: float = _A_LINE_EVERY_S) -> None:
        """``every_s``: between two lines of refusals that are alike."""
        self._tokens = tokens
        self._refusals = _Refusals(audit, every_s)

    async def of(self, context: Context, scope: str, action: Action | None = None) -> Bearer:
        """The token of this call, which is for that; otherwise the call ends here.

        ``action``: as what it is audited; None: figures, and who one is, are not.
        """
        token = await self.any(context, action)
        if scope not in token.scopes:
            await self._turn_down(token, action, "scope")
            cause = f"the token {token.name!r} is not for this: it needs the scope {scope!r}"
            await end(context, NotAllowed(grpc.StatusCode.PERMISSION_DENIED, cause))
        return Bearer(self._tokens, token, scope)

    async def any(self, context: Context, action: Action | None = None) -> Token:
        """The token of this call, whatever it is for."""
        told = self.told(context)
        if len(told) != 1 or not told[0].lower().startswith(_SCHEME):
            cause = "no token: say `authorization: Bearer TOKEN`, once"
            await self._unknown(context, cause)
        token, fault = self._tokens.find(told[0][len(_SCHEME) :].strip())
        if token is None:
            await self._unknown(context, "no such token here")
        if fault:
            await self._turn_down(token, action, fault)
            cause = f"the token {token.name!r} is {fault}"
            await end(context, NotAllowed(grpc.StatusCode.UNAUTHENTICATED, cause))
        await self._tokens.used(token)
        return token

    @staticmethod
    def told(context: Context) -> list[str]:
        """What the call says of who it is, as it came."""
        metadata = context.invocation_metadata() or ()
        return [str(value) for key, value in metadata if key == "authorization"]

    async def _unknown(self, context: Context, cause: str) -> NoReturn:
        metrics.count("hanse_token_refusals")
        await end(context, NotAllowed(grpc.StatusCode.UNAUTHENTICATED, cause))

    async def _turn_down(self, token: Token, action: Action | None, why: str) -> None:
        metrics.count("hanse_token_refusals")
        await self._refusals.note(token, action, why)


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

    async def note(self, token: Token, action: Action | None, why: str) -> None:
        """One more."""
        kind = (token.name, action, why)
        if kind in self._more:
            self._more[kind] += 1
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
        name, action, why = kind
        log.warning("a token was refused", token=name, cause=why, times=count)
        if action is not None:
            told = {"cause": why} if count == 1 else {"cause": why, "times": count}
            await self._audit.record_or_owe(_actor(name), action, "refused or failed", **told)


def actor_of(asker: Token | Bearer) -> str:
    """Who asks, as the audit log has it."""
    return _actor(asker.name)


def _actor(name: str) -> str:
    return f"token:{name}"


async def end(context: Context, refusal: NotAllowed) -> NoReturn:
    """End the call so."""
    await context.abort(refusal.status, f"{refusal}\n{_NEW_ONE}")
