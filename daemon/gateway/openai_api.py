"""What OpenAI's clients ask and are answered: chat completions and embeddings.

What a chat program sends beside these fields (temperature, max_tokens, tools …) is passed over:
answers are made of documents, as the site's settings say.
"""

from __future__ import annotations

import base64
import re
import secrets
import struct
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from daemon.gateway.conversation import cited_at, pieces, words_in
from daemon.gateway.event_stream import END, event
from daemon.gateway.refusals import Refusal, first_mistake
from proto.control_pb2 import AskReply, Citation
from proto.notes import notes_of
from proto.questions_pb2 import EmbedReply

CHAT: Final = "hanse"
EMBEDDING: Final = "hanse-embedding"
MODELS: Final = {"ask": CHAT, "embed": EMBEDDING}
"""By the scope that a token needs for it."""
# What makes more of a text than text (CommonMark 2.4, and what chat programs add to it).
_MARKDOWN: Final = re.compile(r"[\\`*\[\]<>|~$&]")


class _Part(BaseModel):
    type: Annotated[str, Field(max_length=50)]
    text: str = ""


# The first mistake is told, and no other is looked for: half a million would fill the memory.
_Parts = Annotated[list[_Part], Field(max_length=100, fail_fast=True)]
_Texts = Annotated[list[str], Field(max_length=1000, fail_fast=True)]  # fedd says how many


class _Message(BaseModel):
    role: Annotated[str, Field(max_length=50)]
    content: str | _Parts | None = None

    def said(self) -> str:
        """The text; Refusal where it is a picture or a sound."""
        if not isinstance(self.content, list):
            return self.content or ""
        if any(part.type not in ("text", "input_text") for part in self.content):
            raise Refusal(400, "only text can be asked here: send no images, audio or files")
        return "\n".join(part.text for part in self.content)


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """``POST /v1/chat/completions``."""

    model: Annotated[str, Field(max_length=200)]
    messages: Annotated[list[_Message], Field(min_length=1, max_length=2000, fail_fast=True)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    def said(self) -> list[str]:
        """What the user said, in order; Refusal where that is nothing."""
        said = [one.said() for one in self.messages if one.role == "user"]
        said = [text for text in said if text.strip()]
        if not said:
            raise Refusal(400, "no question: send a message of role user that says something")
        return said


class EmbeddingsRequest(BaseModel):
    """``POST /v1/embeddings``."""

    model: Annotated[str, Field(max_length=200)]
    input: str | _Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """What is to be embedded; fedd says how many and how long they may be."""
        return [self.input] if isinstance(self.input, str) else self.input


R = TypeVar("R", ChatRequest, EmbeddingsRequest)


def parsed(kind: type[R], body: bytes, model: str) -> R:
    """A request, of that model; Refusal for anything else, which does not repeat what was sent."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(400, first_mistake(error, "the body")) from None
    if request.model != model:
        cause = f"no model of that name here: this is answered by {model!r}"
        raise Refusal(404, cause, code="model_not_found")
    return request


def models(scopes: list[str], site: str) -> dict[str, Any]:
    """Those that a token is for."""
    told = [
        {"id": model, "object": "model", "created": 0, "owned_by": site}
        for scope, model in MODELS.items()
        if scope in scopes
    ]
    return {"object": "list", "data": told}


class Completion:
    """An answer, as one object or as the events of a stream."""

    def __init__(self, asked: str, url: str = "") -> None:
        """``url``: where people open what is cited (`gateway.url`); "": nowhere."""
        self._asked, self._url = asked, url
        self._sent = ""
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": CHAT,
            "system_fingerprint": None,
        }

    def whole(self, reply: AskReply) -> dict[str, Any]:
        """All of it."""
        message = {
            "role": "assistant",
            "content": _content(reply),
            "refusal": None,
            "annotations": cited_at(reply, self._url),
        }
        finished = _finished(reply)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished}
        told = {"object": "chat.completion", "choices": [choice], "usage": self._usage(reply)}
        return self._head | _by(reply) | told

    def begin(self) -> bytes:
        """The first event."""
        return self._event({"role": "assistant", "content": ""})

    def piece(self, text: str) -> bytes:
        """The event of what comes next in the answer."""
        self._sent += text
        return self._event({"content": text})

    def rest(self, reply: AskReply, *, usage: bool) -> Iterator[bytes]:
        """What is left of it; the citations are in the last event that has a choice."""
        self._head |= _by(reply)
        if left := _content(reply)[len(self._sent) :]:
            for piece in pieces(left):
                yield self.piece(piece)
        yield self._event({"annotations": cited_at(reply, self._url)}, _finished(reply))
        if usage:
            told = {"object": "chat.completion.chunk", "choices": [], "usage": self._usage(reply)}
            yield event(self._head | told)
        yield event(END)

    def _usage(self, reply: AskReply) -> dict[str, int]:
        prompt, answer = words_in(self._asked), words_in(_content(reply))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    def _event(self, delta: dict[str, Any], finished: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finished}
        return event(self._head | {"object": "chat.completion.chunk", "choices": [choice]})


def _content(reply: AskReply) -> str:
    """The answer, and below it what people are told of how it came about.

    Chat programs show no field of ours, and this as Markdown: each note in italics, and whatever
    a model or a file had said in it is text.
    """
    notes = (_MARKDOWN.sub(r"\\\g<0>", " ".join(note.split())) for note in notes_of(reply))
    return "\n\n".join([reply.answer, *(f"*{note}*" for note in notes)])


def _finished(reply: AskReply) -> str:
    return "length" if reply.cut_short else "stop"


def _by(reply: AskReply) -> dict[str, Any]:
    """Which version answered."""
    return {"system_fingerprint": reply.model_digest.hex()[:12] or None}


def fixed(text: str) -> AskReply:
    """An answer that no document had a part in."""
    return AskReply(answer=text, citations=list[Citation]())


def embeddings(request: EmbeddingsRequest, reply: EmbedReply) -> dict[str, Any]:
    """Vectors as they were asked for; Refusal for a length that this model does not have."""
    if request.dimensions not in (None, reply.dimension):
        cause = f"vectors have {reply.dimension} values here: leave dimensions out"
        raise Refusal(400, cause)
    width = 4 * reply.dimension
    starts = range(0, len(reply.vectors), width)
    rows = [reply.vectors[start : start + width] for start in starts]
    as_text = request.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": n, "embedding": _base64(row) if as_text else _floats(row)}
        for n, row in enumerate(rows)
    ]
    words = sum(map(words_in, request.texts()))
    usage = {"prompt_tokens": words, "total_tokens": words}
    return {"object": "list", "data": data, "model": EMBEDDING, "usage": usage}


def _floats(row: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(row) // 4}f", row))


def _base64(row: bytes) -> str:
    return base64.b64encode(row).decode()
