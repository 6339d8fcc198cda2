"""A server on this machine is asked; nothing it sends is believed, or waited for."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from daemon.process.chat_client import ChatClient, ChatError, Sampling
from tests.daemon.pairs.test_pair_writers import completion, serving

GREEDY = Sampling(64)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def raw(speak: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server that answers any request with whatever ``speak`` sends; its address."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                try:
                    speak(connection, over)
                except OSError:
                    return  # who asked has gone, as it should

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            over.set()
            thread.join()


def test_what_is_drawn_and_how_is_asked_for() -> None:
    with serving(lambda _: completion("oil")) as (url, asked):
        sampling = Sampling(new_tokens=9, temperature=0.5, top_p=0.8, seed=7)
        assert ChatClient(url, "m").reply("Which?", sampling, 5) == "oil"
        ChatClient(url, "m").reply("Which?", GREEDY, 5)
    first, second = asked
    assert first == {
        "path": "/v1/chat/completions",
        "model": "m",
        "messages": [{"role": "user", "content": "Which?"}],
        "temperature": 0.5,
        "top_p": 0.8,
        "max_tokens": 9,
        "seed": 7,
    }
    assert "seed" not in second


@pytest.mark.parametrize("url", ["http://10.0.0.1:80/v1", "http://127.0.0.1:99999/v1", "x"])
def test_another_machine_is_not_asked(url: str) -> None:
    with pytest.raises(ChatError, match="passages must not leave it"):
        ChatClient(url, "m")


def drip(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


def drip_closing(connection: socket.socket, over: threading.Event) -> None:
    """Until the connection is closed, as HTTP/1.0 has it: the client has let go of the socket."""
    connection.sendall(HEAD + b"Connection: close\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


def drip_heads(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD)
    while not over.wait(0.02):
        connection.sendall(b"x")


def silent(_: socket.socket, over: threading.Event) -> None:
    over.wait(30)


@pytest.mark.parametrize("speak", [drip, drip_closing, drip_heads, silent])
def test_a_server_that_never_ends_is_left_at_the_deadline(
    speak: Callable[[socket.socket, threading.Event], None],
) -> None:
    with raw(speak) as url:
        started = time.monotonic()
        with pytest.raises(ChatError, match=r"did not answer within 0\.5 s"):
            ChatClient(url, "m").reply("Which?", GREEDY, 0.5)
        assert time.monotonic() - started < 10


def test_an_endless_reply_is_read_up_to_a_bound() -> None:
    def endless(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(HEAD + b"Connection: close\r\n\r\n")
        while not over.is_set():
            connection.sendall(b" " * 65536)

    with raw(endless) as url, pytest.raises(ChatError, match="more than 1 MiB"):
        ChatClient(url, "m").reply("Which?", GREEDY, 30)


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200", b"\x00\xff" * 100, HEAD + b"Content-Length: 9\r\n\r\n{"]
)
def test_a_broken_reply_is_an_error_with_its_cause(said: bytes) -> None:
    with (
        raw(lambda connection, _: connection.sendall(said)) as url,
        pytest.raises(ChatError, match=r"did not answer|no chat completion"),
    ):
        ChatClient(url, "m").reply("Which?", GREEDY, 5)


@pytest.mark.parametrize(
    "message", [{"content": None, "tool_calls": [{"type": "function"}]}, {"content": ["a"]}]
)
def test_a_call_of_a_tool_is_no_text(message: dict[str, object]) -> None:
    data = json.dumps({"choices": [{"message": message}]}).encode()
    with serving(lambda _: (200, data)) as (url, _):
        assert ChatClient(url, "m").reply("Which?", GREEDY, 5) == ""
