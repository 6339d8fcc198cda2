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


def test_what_openai_does_not_know_is_sent_only_where_it_is_on() -> None:
    sampling = Sampling(9, 0.4, 0.9, top_k=50, repetition=1.2)
    with serving(lambda _: completion("oil")) as (url, asked):
        ChatClient(url, "m").reply("Which?", sampling, 5)
    [body] = asked
    assert (body["top_k"], body["repetition_penalty"], body["repeat_penalty"]) == (50, 1.2, 1.2)
    with serving(lambda _: (400, b"unknown field")) as (url, _):
        with pytest.raises(ChatError, match=r"does not know top_k, repetition_penalty, rep.*\)$"):
            ChatClient(url, "m").reply("Which?", sampling, 5)
        with pytest.raises(ChatError, match=r"answered 400: see its own log$"):
            ChatClient(url, "m").reply("Which?", GREEDY, 5)


def told(*logprobs: object) -> tuple[int, bytes]:
    said = {"content": [{"token": "x", "logprob": one} for one in logprobs]}
    choice = {"message": {"content": "oil"}, "logprobs": said}
    return 200, json.dumps({"choices": [choice]}).encode()


def test_what_a_server_tells_of_its_own_words_is_their_perplexity() -> None:
    with serving(lambda _: told(-0.5, -1.5, 0)) as (url, asked):
        text, likelihood = ChatClient(url, "m").measured("Which?", GREEDY, 5)
    assert asked[0]["logprobs"] is True
    assert text == "oil"
    assert likelihood.written == pytest.approx(2 / 3)
    assert likelihood.reference is None
    assert "no other text" in likelihood.lacking


@pytest.mark.parametrize(
    "reply",
    [completion("oil"), told(), told("x"), told(None), told(0.5), told(-0.5, float("-inf"))],
)
def test_a_server_that_tells_no_probabilities_is_said_to(reply: tuple[int, bytes]) -> None:
    with serving(lambda _: reply) as (url, _):
        text, likelihood = ChatClient(url, "m").measured("Which?", GREEDY, 5)
    assert (text, likelihood.written) == ("oil", None)
    assert likelihood.lacking.endswith("tells no log-probabilities")


def test_a_server_that_refuses_to_tell_them_answers_all_the_same() -> None:
    def refusing(body: dict[str, object]) -> tuple[int, bytes]:
        return (400, b"no logprobs here") if "logprobs" in body else completion("oil")

    with serving(refusing) as (url, asked):
        text, likelihood = ChatClient(url, "m").measured("Which?", GREEDY, 5)
    assert (text, likelihood.written, len(asked)) == ("oil", None, 2)
    assert likelihood.lacking.endswith("refuses to tell them (400)")


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


# ---- piece by piece -----------------------------------------------------------------

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(text: object, finished: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finished}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def streamed(*said: bytes) -> tuple[str, list[str]]:
    """The whole reply of a server that says this, and what was told before."""
    heard: list[str] = []

    def speak(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(EVENTS + b"".join(said))
        connection.shutdown(socket.SHUT_WR)
        over.wait(30)  # closed while there is something to read it would be reset

    with raw(speak) as url:
        return ChatClient(url, "m").reply("Which?", GREEDY, 30, heard.append), heard


def test_pieces_are_told_as_they_come() -> None:
    comment, usage = b": here\r\n\r\n", b'data: {"choices": [], "usage": {}}\n\n'
    end = b"data: [DONE]\n\n"
    said = streamed(comment, event("Oil"), event(None), event(" burns"), event("", "stop"), usage)
    assert said == ("Oil burns", ["Oil", "Oil burns"])
    assert streamed(event("Oil"), end, event("never"))[0] == "Oil"


def test_a_server_that_sends_no_pieces_is_read_whole() -> None:
    with serving(lambda _: completion("oil")) as (url, asked):
        assert ChatClient(url, "m").reply("Which?", GREEDY, 30, print) == "oil"
    assert asked[0]["stream"] is True


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ([event("Oil")], "broke off"),
        ([event("Oil"), b'data: {"error": {"message": "out of memory"}}\n\n'], "failed at its"),
        ([b"data: {}\n\n"], "no chat completion"),
        ([b"data: []\n\n"], "no chat completion"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "no chat completion"),
        ([b"data: \xff\n\n"], "no chat completion"),
        ([b"data: " + b"x" * (2 << 20)], "more than 1 MiB"),
        ([event("x" * 1000)] * 1200, "more than 1 MiB"),
        ([b": " + b"x" * 60_000 + b"\n\n"] * 300, "more than 1 MiB"),
    ],
    ids=range(9),
)
def test_a_broken_stream_is_an_error_with_its_cause(said: list[bytes], cause: str) -> None:
    with pytest.raises(ChatError, match=cause):
        streamed(*said)


def test_a_stream_that_drips_is_left_at_the_deadline() -> None:
    def drip_events(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(EVENTS)
        while not over.wait(0.02):
            connection.sendall(event("x"))

    with raw(drip_events) as url, pytest.raises(ChatError, match=r"did not answer within 0\.5 s"):
        ChatClient(url, "m").reply("Which?", GREEDY, 0.5, lambda _: None)
