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
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from daemon.process.workers import GivenUp, given_up, when_given_up

MOST_BYTES = 1 << 20  # of a reply
_MOST_STREAMED = 16 << 20  # of one in pieces, of which each has some hundred bytes around a word
_END = "[DONE]"


class ChatError(Exception):
    """The server can't be asked, or its reply is none; the message says why and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; ``temperature`` 0: the likeliest one, always.

    ``new_tokens``: of a reply, at most. ``top_p``: the least set of tokens with that much
    probability is drawn from (Holtzman et al. 2020). ``seed``: the same draws give the same
    reply; None: as the server pleases.
    """

    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


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
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.new_tokens,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if told is not None:
            body["stream"] = True
        return self._exchanged(json.dumps(body).encode(), within_s, told)

    def _exchanged(self, body: bytes, within_s: float, told: Callable[[str], None] | None) -> str:
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
                    body,
                    {"Content-Type": "application/json"},
                )
                said = self._said(connection.getresponse(), told)
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

    def _said(self, reply: http.client.HTTPResponse, told: Callable[[str], None] | None) -> str:
        if reply.status != http.HTTPStatus.OK:  # a redirection, too: it is not followed
            # Not what it said: that may repeat what was asked, and goes into the log.
            raise ChatError(
                f"the language model at {self.url} answered {reply.status}: see its own log"
            )
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


def _is_local(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
