"""What a request is refused with: a status, and an error as OpenAI's clients read it."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_KINDS: Final = {
    400: ("invalid_request_error", "bad_request"),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "insufficient_permissions"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "too_slow"),
    411: ("invalid_request_error", "no_length"),
    413: ("invalid_request_error", "too_large"),
    422: ("invalid_request_error", "not_taken"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "too_large"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "timeout"),
}
_SERVER_ERROR: Final = -32000  # JSON-RPC 2.0, 5.1: of servers' own
_OURS: Final = ("server_error", "internal_error")


class Refusal(HTTPException):
    """A request that is not answered: why, and what to do, for the person at the other end.

    ``unread``: more of the request may follow, which nobody will read.
    """

    def __init__(
        self,
        status: int,
        cause: str,
        *,
        code: str = "",
        retry_after_s: int = 0,
        unread: bool = False,
    ) -> None:
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
        if unread:
            headers["Connection"] = "close"
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, cause, headers)
        self.code = code


def answer_to(error: Exception) -> JSONResponse:
    """A request that is refused, by us or by starlette, in the form that clients read."""
    told = {"error": error_of(error)}
    if not isinstance(error, HTTPException):
        return JSONResponse(told, 500)
    return JSONResponse(told, error.status_code, error.headers)


def error_of(error: Exception) -> dict[str, str | None]:
    """What is wrong, as OpenAI's clients read it."""
    if not isinstance(error, HTTPException):
        return _told("the gateway failed at this; its log says where", *_OURS)
    kind, code = _KINDS.get(error.status_code, _OURS)
    return _told(error.detail, kind, getattr(error, "code", "") or code)


def _told(message: str, kind: str, code: str) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": None, "code": code}


def rpc_answer_to(refusal: Refusal) -> JSONResponse:
    """Likewise in the form of JSON-RPC, for a request of which nothing was read."""
    error = {"code": _SERVER_ERROR, "message": refusal.detail}
    answer = JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, refusal.status_code)
    answer.headers.update(refusal.headers or {})
    return answer


def first_mistake(error: ValidationError, whole: str) -> str:
    """What is wrong with what was sent, without repeating that; ``whole``: what all of it is."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where or whole}: {first['msg']}"[:300]
