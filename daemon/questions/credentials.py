"""Whose token a call carries, and whether it is for that: the only way to a question's answer."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
from typing import Final, NoReturn

import grpc
import structlog

from daemon.control.context import Context
from daemon.process import metrics
from daemon.state.audit import Action, AuditLog
from daemon.state.tokens import Token, Tokens

log = structlog.get_logger()

_SCHEME: Final = "bearer "
_NEW_ONE: Final = "ask whoever administers this site for a token (`fedctl tokens create`)"


class Credentials:
    """Tokens that calls carry, checked where the call is answered.

    What is wrong with a token of ours is audited under its name; of what is no token of ours
    there is only a count: a stranger must not be able to fill the audit log.
    """

    def __init__(self, tokens: Tokens, audit: AuditLog) -> None:
        self._tokens = tokens
        self._audit = audit

    async def of(self, context: Context, scope: str, action: Action | None = None) -> Token:
        """The token of this call, which is for that; otherwise the call ends here.

        ``action``: as what it is audited; None: figures, and who one is, are not.
        """
        token = await self.any(context, action)
        if scope not in token.scopes:
            await self._turn_down(token, action, "scope")
            cause = f"the token {token.name!r} is not for this: it needs the scope {scope!r}"
            await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, cause)
        return token

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
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, cause)
        await self._tokens.used(token)
        return token

    @staticmethod
    def told(context: Context) -> list[str]:
        """What the call says of who it is, as it came."""
        metadata = context.invocation_metadata() or ()
        return [str(value) for key, value in metadata if key == "authorization"]

    async def _unknown(self, context: Context, cause: str) -> NoReturn:
        metrics.count("hanse_token_refusals")
        await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, cause)

    async def _turn_down(self, token: Token, action: Action | None, why: str) -> None:
        metrics.count("hanse_token_refusals")
        log.warning("a token was refused", token=token.name, cause=why)
        if action is not None:
            await self._audit.record_or_owe(actor_of(token), action, "refused or failed", cause=why)


def actor_of(token: Token) -> str:
    """Who asks, as the audit log has it."""
    return f"token:{token.name}"


async def _refuse(context: Context, status: grpc.StatusCode, cause: str) -> NoReturn:
    await context.abort(status, f"{cause}\n{_NEW_ONE}")
