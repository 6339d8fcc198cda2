"""The part of control.proto that is about tokens of people's programs."""

from __future__ import annotations

from daemon.control.context import Calls, Context
from daemon.state.tokens import Token
from proto import control_pb2 as control


class TokenCalls(Calls):
    """Tokens are made, listed and revoked by who may administer the site."""

    async def CreateToken(
        self, request: control.CreateTokenRequest, context: Context
    ) -> control.CreateTokenReply:
        """A token, which is told here and never again."""
        asked = {"token": request.name, "scopes": sorted({*request.scopes}), "days": request.days}
        async with self._audited(context, "create-token", **asked):
            secret, token = await self._answered(
                context,
                self._around.tokens.create(request.name, request.scopes, request.days),
            )
        return control.CreateTokenReply(secret=secret, token=_message(token))

    async def ListTokens(
        self, _request: control.ListTokensRequest, _context: Context
    ) -> control.ListTokensReply:
        """What is known of them."""
        return control.ListTokensReply(tokens=map(_message, self._around.tokens.all))

    async def RevokeToken(
        self, request: control.RevokeTokenRequest, context: Context
    ) -> control.RevokeTokenReply:
        """The next call with it is refused."""
        async with self._audited(context, "revoke-token", token=request.name):
            token = await self._answered(context, self._around.tokens.revoke(request.name))
        return control.RevokeTokenReply(token=_message(token))


def _message(token: Token) -> control.AccessToken:
    return control.AccessToken(
        name=token.name,
        scopes=token.scopes,
        created_unix_s=token.created_s,
        expires_unix_s=token.expires_s,
        last_used=token.last_used,
        revoked_unix_s=token.revoked_s,
    )
