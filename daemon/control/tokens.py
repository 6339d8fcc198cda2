"""The part of control.proto that is about tokens of people's programs."""

from __future__ import annotations

from typing import Any

from daemon.control.context import Calls, Context
from daemon.state.people import SignsForPeople
from daemon.state.tokens import Token
from proto import control_pb2 as control


class TokenCalls(Calls):
    """Tokens are made, listed, changed and revoked by who may administer the site."""

    async def CreateToken(
        self, request: control.CreateTokenRequest, context: Context
    ) -> control.CreateTokenReply:
        """A token, which is told here and never again."""
        collections = [*request.collections] or None
        asked = {"token": request.name, "scopes": sorted({*request.scopes}), "days": request.days}
        async with self._audited(context, "create-token", **asked, **_asked_of(collections)):
            secret, token = await self._answered(
                context,
                self._around.tokens.create(request.name, request.scopes, request.days, collections),
            )
            empty = await self._answered(context, self._empty(token))
        return control.CreateTokenReply(secret=secret, token=_message(token), empty=empty)

    async def _empty(self, token: Token) -> list[str]:
        """Those of its collections that have no document yet."""
        collection = self._around.collection
        found = []
        for name in token.collections or ():
            if not await collection.documents(f"{name}/", "", 1):
                found.append(name)
        return found

    async def ListTokens(
        self, _request: control.ListTokensRequest, _context: Context
    ) -> control.ListTokensReply:
        """What is known of them, and of people who sign in elsewhere."""
        tokens = self._around.tokens
        fault = tokens.people.fault()
        return control.ListTokensReply(
            tokens=map(_message, tokens.all),
            people=tokens.people.are_known,
            people_fault=fault,
            issuers=map(_provider, tokens.people.issuers()),
            speakers=map(_provider, tokens.people.speakers()),
            blocked=[
                control.BlockedPerson(name=name, since_unix_s=since_s)
                for name, since_s in tokens.blocked.items()
            ],
        )

    async def ChangeToken(
        self, request: control.ChangeTokenRequest, context: Context
    ) -> control.ChangeTokenReply:
        """What it may ask of, or is for, from now on."""
        collections = None if request.all_documents else [*request.collections]
        asked: dict[str, Any] = {"token": request.name}
        if request.scopes:
            asked["scopes"] = sorted({*request.scopes})
        if collections is None or collections:
            asked |= _asked_of(collections)
        async with self._audited(context, "change-token", **asked):
            token = await self._answered(
                context,
                self._around.tokens.change(
                    request.name,
                    request.scopes,
                    request.collections,
                    all_documents=request.all_documents,
                ),
            )
            empty = await self._answered(context, self._empty(token))
        return control.ChangeTokenReply(token=_message(token), empty=empty)

    async def RevokeToken(
        self, request: control.RevokeTokenRequest, context: Context
    ) -> control.RevokeTokenReply:
        """The next call with it is refused, and what waits for its turn."""
        async with self._audited(context, "revoke-token", token=request.name):
            token = await self._answered(context, self._around.tokens.revoke(request.name))
        return control.RevokeTokenReply(token=_message(token))

    async def BlockPerson(
        self, request: control.BlockPersonRequest, context: Context
    ) -> control.BlockPersonReply:
        """No signed token lets that person in from now on, nor what waits; or one does again."""
        tokens = self._around.tokens
        if request.undo:
            async with self._audited(context, "unblock-person", person=request.name):
                await self._answered(context, tokens.unblock(request.name))
        else:
            async with self._audited(context, "block-person", person=request.name):
                await self._answered(context, tokens.block(request.name))
        return control.BlockPersonReply()


def _provider(one: SignsForPeople) -> control.IdentityProvider:
    return control.IdentityProvider(
        name=one.name, issuer=one.issuer, groups=one.groups, keys=one.keys
    )


def _message(token: Token) -> control.AccessToken:
    return control.AccessToken(
        name=token.name,
        scopes=token.scopes,
        created_unix_s=token.created_s,
        expires_unix_s=token.expires_s,
        last_used=token.last_used,
        revoked_unix_s=token.revoked_s,
        collections=token.collections or (),
        all_documents=token.collections is None,
    )


def _asked_of(collections: list[str] | None) -> dict[str, Any]:
    """As the audit log has it: nobody has to know what an empty list would mean."""
    return {"all_documents": True} if collections is None else {"collections": collections}
