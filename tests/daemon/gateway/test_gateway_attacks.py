"""A stranger, a clerk and a slow one at a real gateway before a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from httpx2 import ASGITransport, AsyncClient
from starlette.requests import Request

from daemon.gateway.application import Gateway, body_of, bring, token_of
from daemon.gateway.fedd import Fedd
from daemon.gateway.refusals import Refusal
from proto import control_pb2 as control
from proto.control_pb2_grpc import ControlStub
from tests.daemon.gateway.gates import Gate, refusal_of
from tests.daemon.gateway.test_gateway import WINCH, asking, client, curl

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]

CHAT = json.dumps({"model": "hanse", "messages": asking(WINCH)})


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes; its length is told, unless a header says otherwise."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def error_of(reply: bytes) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(reply.partition(b"\r\n\r\n")[2])
    return dict(told["error"])


# ---- tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "told",
    [
        [],
        ["Authorization: Bearer hanse_wrong"],
        ["Authorization: Bearer {}x"],
        ["Authorization: {}"],
        ["Authorization: Basic {}"],
        ["Authorization: Bearer {}", "Authorization: Bearer {}"],
        ["Authorization: Bearer {}, Bearer {}"],
        ["X-Api-Key: {}"],
        ["Authorization: Bearer \xff\xfe"],
        ["Authorization: Bearer " + "x" * 5000],
    ],
)
async def test_without_the_right_token_nothing_is_answered(
    gate: Gate, path: str, told: list[str]
) -> None:
    secret = await gate.token("ask", "embed")
    body = CHAT if "chat" in path else json.dumps({"model": "hanse-embedding", "input": "x"})
    reply = await gate.raw(post(path, body.encode(), *(one.replace("{}", secret) for one in told)))
    assert status_of(reply) == 401
    assert error_of(reply)["code"] == "invalid_api_key"
    assert secret.encode() not in reply


async def test_a_token_of_the_past_is_refused_at_once(gate: Gate) -> None:
    secret = await gate.token("ask", name="past")
    headers = ("-H", f"Authorization: Bearer {secret}", "-d", CHAT)
    assert (await curl(gate, "/v1/chat/completions", *headers))[0] == 200
    await gate.revoke("past")
    status, _, body = await curl(gate, "/v1/chat/completions", *headers)
    assert (status, "'past' is revoked" in body.decode()) == (401, True)
    entries = [
        json.loads(line)
        for path in sorted((gate.site.folder / "state" / "audit").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    of_it = [(e["action"], e["outcome"]) for e in entries if e["actor"] == "token:past"]
    assert of_it == [("ask", "answered"), ("ask", "refused or failed")]
    made = [e for e in entries if e["objects"].get("token") == "past"]
    assert [(e["actor"], e["action"], e["outcome"]) for e in made] == [
        (f"uid:{os.getuid()}", "create-token", "begun"),
        (f"uid:{os.getuid()}", "revoke-token", "begun"),
    ]
    assert WINCH not in json.dumps(entries)


async def test_the_socket_of_questions_administers_nothing(gate: Gate) -> None:
    """A clerk who came as far as the socket itself, with a token for all there is."""
    secret = await gate.token("ask", "search", "embed", "metrics")
    socket = gate.site.folder / "questions.sock"
    assert oct(socket.stat().st_mode & 0o777) == "0o660"
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = ControlStub(channel)
        for one in control.DESCRIPTOR.services_by_name["Control"].methods:
            refused = await refusal_of(stub, one, secret)
            assert refused is grpc.StatusCode.UNIMPLEMENTED, one.name


# ---- bytes -------------------------------------------------------------------------


async def test_a_body_that_is_too_large_is_refused_and_its_sender_told(gate: Gate) -> None:
    token = f"Authorization: Bearer {await gate.token('ask')}"
    told = await gate.raw(
        post("/v1/chat/completions", b"", token).replace(b"Length: 0", b"Length: 20000000")
    )
    assert (status_of(told), error_of(told)["code"]) == (413, "too_large")
    told = await gate.raw(post("/v1/chat/completions", b"x" * 3_000_000, token))
    assert (status_of(told), error_of(told)["code"]) == (413, "too_large")


async def test_a_body_in_crumbs_is_refused_and_keeps_nobody(gate: Gate) -> None:
    """Each crumb is an event to the parser: seconds of work in what comes at once."""
    stranger = "Authorization: Bearer nothing"
    crumbs = post("/v1/chat/completions", b"", stranger, "Transfer-Encoding: chunked")
    crumbs += b"1\r\nx\r\n" * 300_000
    sending = [asyncio.create_task(gate.raw(crumbs)) for _ in range(8)]
    words = ("-H", f"Authorization: Bearer {await gate.token('ask')}", "-d", CHAT)
    assert (await curl(gate, "/v1/chat/completions", *words))[0] == 200
    told = await asyncio.gather(*sending, return_exceptions=True)
    refused = [one for one in told if isinstance(one, bytes) and one]
    assert {status_of(one) for one in refused} <= {411}
    whole = post("/v1/chat/completions", b"0\r\n\r\n", stranger, "Transfer-Encoding: chunked")
    told_whole = await gate.raw(whole)
    assert (status_of(told_whole), error_of(told_whole)["code"]) == (411, "no_length")


async def test_a_list_of_senseless_things_is_one_mistake(gate: Gate) -> None:
    """All of them named would be half a gigabyte."""
    token = f"Authorization: Bearer {await gate.token('ask', 'embed')}"
    many = b"[" + b"1," * 500_000 + b"1]"
    before = psutil.Process(gate.process.pid).memory_info().rss
    for path, body in (
        ("/v1/embeddings", b'{"model": "hanse-embedding", "input": ' + many + b"}"),
        (
            "/v1/chat/completions",
            b'{"model": "hanse", "messages": [{"role": "user", "content": ' + many + b"}]}",
        ),
    ):
        told = await gate.raw(post(path, body, token))
        assert status_of(told) in (400, 413)
    assert psutil.Process(gate.process.pid).memory_info().rss - before < 200 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"hanse"',
        b"[" * 100_000,
        b'{"model": "hanse", "messages": []}',
        b'{"model": "hanse", "messages": "' + b"x" * 1000 + b'"}',
        b'{"model": "hanse", "messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"model": "hanse", "messages": [{"role": "user", "content": "x"}], "n": 5}',
        b'{"model": ' + b"9" * 10_000 + b"}",
        b'{"model": "hanse", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "hanse", "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=range(13),
)
async def test_a_body_that_makes_no_sense_is_refused_in_a_line(gate: Gate, body: bytes) -> None:
    token = f"Authorization: Bearer {await gate.token('ask')}"
    told = await gate.raw(post("/v1/chat/completions", body, token))
    assert status_of(told) == 400
    assert len(error_of(told)["message"]) < 350
    assert b"x" * 100 not in told


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Forwarded-For: 127.0.0.1"],
        ["Forwarded: for=127.0.0.1"],
        ["Via: 1.1 proxy"],
        ["Host: rebound.example.org"],
        ["Host: 127.0.0.1.example.org:80"],
        ["Host: "],
    ],
)
async def test_metrics_are_for_this_machine_itself(gate: Gate, headers: list[str]) -> None:
    """Not for who asks through a proxy, nor for a page whose name leads here by now."""
    if not headers[0].startswith("Host"):
        headers = ["Host: 127.0.0.1", *headers]
    asked = "\r\n".join(["GET /metrics HTTP/1.1", *headers, "Connection: close", "", ""])
    assert status_of(await gate.raw(asked.encode())) == 401
    token = await gate.token("metrics")
    asked = asked.replace("Connection", f"Authorization: Bearer {token}\r\nConnection")
    assert status_of(await gate.raw(asked.encode())) == 200


@pytest.mark.parametrize("spoken", [b"HTTP/1.0", b"HTTP/0.9"])
async def test_metrics_are_not_for_a_proxy_that_adds_no_header(gate: Gate, spoken: bytes) -> None:
    """nginx, as it comes: `proxy_pass http://127.0.0.1:8080;` and no more."""
    asked = b"GET /metrics %b\r\nHost: 127.0.0.1:8080\r\nConnection: close\r\n\r\n" % spoken
    assert status_of(await gate.raw(asked)) == 401


@pytest.mark.parametrize(
    ("url", "status"),
    [("", 200), ("http://127.0.0.1:8080", 200), ("https://ask.example.org", 401)],
)
async def test_metrics_want_a_token_where_people_come_from_elsewhere(
    gate: Gate, url: str, status: int
) -> None:
    fedd = Fedd(gate.site.folder / "questions.sock")
    inside = ASGITransport(Gateway(fedd, 1, url).application())
    async with AsyncClient(transport=inside, base_url="http://127.0.0.1:8080") as monitoring:
        assert (await monitoring.get("/metrics")).status_code == status
    await fedd.close()


@pytest.mark.parametrize("header", [b"X-Long: " + b"x" * 40_000, b"X-Many: x\r\n" * 3000 + b"X: x"])
async def test_headers_have_their_bound(gate: Gate, header: bytes) -> None:
    sent = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n"
    assert status_of(await gate.raw(sent)) in (400, 431)


# ---- many, and slow ones -----------------------------------------------------------


async def test_one_question_too_many_is_told_when_to_come_again(gate: Gate) -> None:
    token = await gate.token("ask")
    words = ("-H", f"Authorization: Bearer {token}", "-d", CHAT)
    assert (await curl(gate, "/v1/chat/completions", *words))[0] == 200  # it is known from now on
    gate.site.process.send_signal(signal.SIGSTOP)
    try:
        waiting = {
            asyncio.create_task(curl(gate, "/v1/chat/completions", *words)) for _ in range(3)
        }
        async with asyncio.timeout(60):
            while len(waiting) > 1:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    status, headers, body = one.result()
                    assert status == 429
                    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
                    assert int(headers["retry-after"]) >= 1
    finally:
        gate.site.process.send_signal(signal.SIGCONT)
    (answered,) = waiting
    assert (await answered)[0] == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_token_is_one_asker_however_the_scheme_is_written(scheme: str) -> None:
    headers = [(b"authorization", f"{scheme} hanse_1".encode())]
    assert token_of(Request({"type": "http", "headers": headers})) == "Bearer hanse_1"


@pytest.mark.parametrize(("length", "status"), [("x", 400), ("٣", 400), ("9" * 13, 413)])
async def test_a_length_has_one_answer_wherever_it_is_sent(length: str, status: int) -> None:
    headers = [(b"content-length", length.encode("utf-8"))]
    request, nobody = Request({"type": "http", "headers": headers}), Fedd(Path("nowhere.sock"))
    for reading in (body_of(request), bring(nobody, request, "Bearer x")):
        with pytest.raises(Refusal) as refused:
            await reading
        assert refused.value.status_code == status
    await nobody.close()


async def test_one_token_takes_half_of_the_turns_at_most() -> None:
    fedd = Fedd(Path("nowhere.sock"))
    gateway = Gateway(fedd, 4)
    with gateway._in_turn("one"), gateway._in_turn("one"):
        with pytest.raises(Refusal, match="try again in a moment"), gateway._in_turn("one"):
            pytest.fail("a third turn of four")
        with gateway._in_turn("other"), gateway._in_turn("another"):
            pass
    with gateway._in_turn("one"):
        pass
    await fedd.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_made_up_tokens_take_nobody_s_turn(gate: Gate, stream: bool) -> None:
    """They are refused at once, however many come: the one turn stays for who has a token."""
    said = {"model": "hanse", "messages": asking(WINCH), "stream": stream}
    body = json.dumps(said).encode()

    def strangers(many: int) -> list[asyncio.Task[bytes]]:
        tokens = (f"Authorization: Bearer hanse_{number}" for number in range(many))
        sent = (post("/v1/chat/completions", body, one) for one in tokens)
        return [asyncio.create_task(gate.raw(one)) for one in sent]

    own = f"Authorization: Bearer {await gate.token('ask')}"
    asked, beside = post("/v1/chat/completions", body, own), strangers(30)
    for _ in range(3):
        assert status_of(await gate.raw(asked)) == 200
        beside += strangers(10)
    assert {status_of(one) for one in await asyncio.gather(*beside)} == {401}


async def test_slow_bodies_take_nobody_s_turn(gate: Gate) -> None:
    """The one turn that there is here is taken by a request that is whole."""
    token = await gate.token("ask")
    started = post("/v1/chat/completions", CHAT.encode(), f"Authorization: Bearer {token}")[:-9]
    slow = []
    for _ in range(20):
        _, writer = await asyncio.open_connection(gate.host, gate.port)
        writer.write(started)
        slow.append(writer)
    words = ("-H", f"Authorization: Bearer {token}", "-d", CHAT)
    assert (await curl(gate, "/v1/chat/completions", *words))[0] == 200
    for writer in slow:
        writer.close()


# ---- what stays --------------------------------------------------------------------


def bytes_of(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


async def test_no_token_and_no_question_is_in_any_file(gate: Gate) -> None:
    marked = "who hid the zorblax under the anchor winch?"
    asked = client(gate, await gate.token("ask"))
    await asked.chat.completions.create(model="hanse", messages=asking(marked))
    assert gate.tokens
    for path, content in bytes_of(gate.site.folder):
        assert b"zorblax" not in content, path
        held = [name for name, secret in gate.tokens.items() if secret[6:].encode() in content]
        assert not held, path
