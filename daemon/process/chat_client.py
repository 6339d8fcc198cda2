"""Asks a language model's server on this machine, in the common language of chat completions.

What is asked holds passages, which must not leave this machine: any other address is refused.
A reply is a stranger's: it is bounded in bytes and in time, from the first byte asked for to
the last one read, so that a server that drips, or never ends, costs no more than one that is
silent. Where nobody waits for the reply any more the connection is cut, and the server need not
go on.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from daemon.process.workers import GivenUp, given_up, when_given_up

T = TypeVar("T")

MOST_BYTES = 1 << 20  # of a reply
_MOST_STREAMED = 16 << 20  # of one in pieces, of which each has some hundred bytes around a word
_END = "[DONE]"
_NOT_UNDERSTOOD = (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY)
_CERTAIN = 1e-3  # a log-probability is 0 at most; servers round
_OF_ITS_OWN = "a server tells how probable what it writes is, and no other text"
# Fields of OpenAI's interface that every server knows.
_OPENAIS = ("model", "messages", "temperature", "top_p", "max_tokens", "seed", "stream")


class ChatError(Exception):
    """The server can't be asked, or its reply is none; the message says why and what to do."""


class ChatRefused(ChatError):
    """The server doesn't take what it was asked for; ``status``: its answer's."""

    def __init__(self, url: str, status: int, body: dict[str, Any]) -> None:
        extra = ", ".join(name for name in body if name not in _OPENAIS)
        unknown = f" (maybe it does not know {extra})" if extra else ""
        super().__init__(f"the language model at {url} answered {status}: see its own log{unknown}")
        self.status = status


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; ``temperature`` 0: the likeliest one, always.

    ``new_tokens``: of a reply, at most. ``top_p``: the least set of tokens with that much
    probability is drawn from (Holtzman et al. 2020), and of these the likeliest ``top_k`` (Fan et
    al. 2018; 0: all). ``repetition``: what the score of a token that stands there already is
    divided by (Keskar et al. 2019; 1: nothing). ``seed``: the same draws give the same
    reply; None: as the server pleases.
    """

    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Likelihood:
    """How a language model foretells a text, in nats a token: its exponential is the perplexity.

    ``written``: what it wrote itself; ``reference``: what is given to it, the likeliest of several.
    None: that isn't known, and ``lacking`` says why.
    """

    written: float | None = None
    reference: float | None = None
    lacking: str = ""


@dataclass(frozen=True)
class ChatClient:
    """One model of a server (llama.cpp, vLLM, Ollama); ``url``: http://127.0.0.1:8080/v1.

    ``to_its_end``: what it says is kept, so it is read also where nobody waits for it any more.
    """

    url: str
    model: str
    to_its_end: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:  # above 65535
            port = None
        if parts.scheme != "http" or not _is_local(parts.hostname) or port is None:
            raise ChatError(
                f"{self.url!r} is no server on this machine: passages must not leave it; "
                "give http://127.0.0.1:PORT/v1"
            )

    def reply(
        self,
        text: str,
        sampling: Sampling,
        within_s: float,
        told: Callable[[str], None] | None = None,
    ) -> str:
        """What the model says to one message; "" where that is no text.

        ``within_s``: from now until the last byte. ``told`` hears what is said so far, again and
        again, where the server sends pieces. Raises ChatError, GivenUp, and what ``told`` does.
        """
        body = self._body(text, sampling)
        if told is not None:
            body["stream"] = True
        return self._exchanged(body, within_s, lambda reply: self._said(reply, told))

    def measured(self, text: str, sampling: Sampling, within_s: float) -> tuple[str, Likelihood]:
        """As `reply`, and how probable that was to the model, where the server tells.

        One that refuses to is asked once more without. Raises ChatError, GivenUp.
        """
        until = time.monotonic() + within_s
        body = self._body(text, sampling) | {"logprobs": True}
        try:
            data = self._exchanged(body, within_s, lambda reply: reply.read(MOST_BYTES + 1))
        except ChatRefused as refused:
            lacking = f"the language model at {self.url} refuses to tell them ({refused.status})"
            left = max(0.001, until - time.monotonic())
            return self.reply(text, sampling, left), Likelihood(lacking=lacking)
        return _content(data, self.url), _likelihood(data, self.url)

    def _body(self, text: str, sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.new_tokens,
        }
        body.update(_beyond_openai(sampling))
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    def _exchanged(
        self,
        body: dict[str, Any],
        within_s: float,
        read: Callable[[http.client.HTTPResponse], T],
    ) -> T:
        """What is read of the server's reply to that, if it is one."""
        parts = urlsplit(self.url)
        # By its address: a name in /etc/hosts may point anywhere. No proxy is asked.
        host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
        connection = http.client.HTTPConnection(host, parts.port, timeout=within_s)
        late = threading.Event()
        try:
            connection.connect()
            connected = connection.sock  # which it lets go of when a reply is the last
            with (
                _deadline(connected, within_s, late),
                nullcontext() if self.to_its_end else when_given_up(lambda: _cut(connected)),
            ):
                connection.request(
                    "POST",
                    f"{parts.path.rstrip('/')}/chat/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                reply = connection.getresponse()
                self._check_taken(body, reply.status)
                said = read(reply)
        except (OSError, http.client.HTTPException, ChatError) as error:
            if given_up() and not self.to_its_end:
                raise GivenUp("nobody waits for the language model's reply") from error
            if late.is_set() or isinstance(error, TimeoutError):
                raise self._late(within_s) from error
            if isinstance(error, ChatError):
                raise
            raise ChatError(
                f"the language model at {self.url} did not answer "
                f"({error or type(error).__name__}): start it, or give its right port"
            ) from error
        finally:
            connection.close()
        if late.is_set():  # what was read by then ends anywhere
            raise self._late(within_s)
        return said

    def _check_taken(self, body: dict[str, Any], status: int) -> None:
        """The reply itself is told nobody: it may repeat what was asked, and goes into the log."""
        if status in _NOT_UNDERSTOOD:
            raise ChatRefused(self.url, status, body)
        if status != http.HTTPStatus.OK:  # a redirection, too: it is not followed
            raise ChatError(f"the language model at {self.url} answered {status}: see its own log")

    def _said(self, reply: http.client.HTTPResponse, told: Callable[[str], None] | None) -> str:
        if told is not None and reply.headers.get_content_type() == "text/event-stream":
            return self._told(reply, told)
        return _content(reply.read(MOST_BYTES + 1), self.url)

    def _told(self, reply: http.client.HTTPResponse, told: Callable[[str], None]) -> str:
        """A reply in pieces, to its end (WHATWG HTML, server-sent events; lines of data alone)."""
        said, size, finished = "", 0, False
        while line := reply.readline(MOST_BYTES + 1):
            size += len(line)
            if size > _MOST_STREAMED or len(line) > MOST_BYTES or len(said) > MOST_BYTES:
                raise ChatError(_too_long(self.url))
            field, _, data = line.decode(errors="replace").partition(":")
            if field != "data" or not data.strip():
                continue
            if data.strip() == _END:
                return said
            piece, ends = _piece(data, self.url)
            finished = finished or ends
            if piece:
                said += piece
                told(said)
        if not finished:  # some servers forget the last event
            raise ChatError(f"the language model at {self.url} broke off: see its own log")
        return said

    def _late(self, within_s: float) -> ChatError:
        return ChatError(
            f"the language model at {self.url} did not answer within {within_s:g} s: "
            "choose a smaller model, or wait longer"
        )


@contextmanager
def _deadline(connected: socket.socket, seconds: float, late: threading.Event) -> Iterator[None]:
    """Cuts the connection then: a timeout of a socket starts anew with each byte."""

    def cut() -> None:
        late.set()
        _cut(connected)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _beyond_openai(sampling: Sampling) -> dict[str, Any]:
    """What OpenAI's interface lacks, by the names that servers know it by; only where it is on."""
    extra: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.repetition != 1.0:
        # vLLM, SGLang and TGI; llama.cpp
        extra |= dict.fromkeys(("repetition_penalty", "repeat_penalty"), sampling.repetition)
    return extra


def _too_long(url: str) -> str:
    return f"the language model at {url} sent more than {MOST_BYTES >> 20} MiB"


def _cut(connected: socket.socket) -> None:
    """Wake what waits for it; the socket is closed by whose it is."""
    with suppress(OSError):  # closed by the other side: that has woken
        connected.shutdown(socket.SHUT_RDWR)


def _piece(data: str, url: str) -> tuple[str, bool]:
    """What an event adds to the reply, and whether it is the last that does."""
    try:
        event = json.loads(data)
        if event.get("error"):
            raise ChatError(f"the language model at {url} failed at its reply: see its own log")
        if not (choices := event["choices"]):  # how much was written
            return "", False
        text, ends = choices[0]["delta"].get("content"), choices[0].get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ChatError(
            f"the reply from {url} is no chat completion: is it an OpenAI-compatible server?"
        ) from error
    return text if isinstance(text, str) else "", bool(ends)


def _content(data: bytes, url: str) -> str:
    if len(data) > MOST_BYTES:
        raise ChatError(_too_long(url))
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ChatError(
            f"the reply from {url} is no chat completion: is it an OpenAI-compatible server?"
        ) from error
    return text if isinstance(text, str) else ""


def _likelihood(data: bytes, url: str) -> Likelihood:
    """Of a reply that is a completion; a stranger's numbers, and so checked."""
    lacking = f"the language model at {url} tells no log-probabilities"
    try:
        tokens = json.loads(data)["choices"][0]["logprobs"]["content"]
        told = [token["logprob"] for token in tokens]
    except (LookupError, TypeError):  # null, or of another form
        return Likelihood(lacking=lacking)
    good = all(isinstance(one, int | float) and -math.inf < one <= _CERTAIN for one in told)
    if not told or not good:
        return Likelihood(lacking=lacking)
    return Likelihood(written=max(0.0, -math.fsum(told) / len(told)), lacking=_OF_ITS_OWN)


def _is_local(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
