"""Slow, broken and hostile HTTP clients of a gateway behind TLS, and an honest one among them.

    target = Target("127.0.0.1", 8443, Path("gateway.crt"), token)
    async with misbehaving(target, 60) as seen:
        answers = await honest(replace(target, token=mine), 10)
    print(seen.statuses)

The former are a process of their own, which ends when its standard input does; their token is in
HANSE_TOKEN:

    python -m tests.benchmarks.answers.bad_clients 127.0.0.1:8443 gateway.crt --many 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

QUESTION = "who looks after the anchor winch?"
_DRIP_S = 0.5  # between two bytes of who is slow
_AGAIN_S = 1.0  # until who is refused, or hung up on, comes again
_PAUSE_S = 0.1  # between two questions of who is greedy
_TRIES = 3  # of a program whose line breaks: OpenAI's client has as many
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(frozen=True)
class Target:
    """A gateway, what its certificate is verified by, and a token of its site."""

    host: str
    port: int
    certificate: Path
    token: str

    @cached_property
    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)


class Line:
    """A connection, ended with the block."""

    def __init__(self, target: Target, *, secured: bool = True, deaf: bool = False) -> None:
        """``deaf``: of what comes back as little as can be is taken."""
        self._target, self._secured, self._deaf = target, secured, deaf

    async def __aenter__(self) -> Line:
        caller = socket.socket()
        caller.setblocking(False)
        if self._deaf:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(
                caller, (self._target.host, self._target.port)
            )
            self.reader, self.writer = await asyncio.open_connection(
                sock=caller,
                ssl=self._target.tls if self._secured else None,
                server_hostname=self._target.host if self._secured else None,
                limit=1 if self._deaf else 1 << 20,
            )
        except BaseException:
            caller.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(self, *sent: bytes) -> None:
        self.writer.write(b"".join(sent))
        await self.writer.drain()

    async def drip(self) -> None:
        """A byte now and then, until they hang up."""
        while not self.reader.at_eof():
            await self.send(b"x")
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRIP_S):
                    await self.reader.read(4096)

    async def rest(self) -> bytes:
        """All that comes until they hang up."""
        whole = bytearray()
        with suppress(OSError):
            while piece := await self.reader.read(1 << 16):
                whole += piece
        return bytes(whole)

    async def reply(self) -> bytes:
        """One answer to a request; raises asyncio.IncompleteReadError, OSError."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():  # a stream, in pieces that are not empty
            return head + await self.reader.readuntil(b"\r\n0\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        return head + await self.reader.readexactly(int(length[1]) if length else 0)


def request(token: str, question: str = QUESTION, **more: object) -> bytes:
    """A question, whole."""
    asked = {"model": "hanse", "messages": [{"role": "user", "content": question}], **more}
    body = json.dumps(asked).encode()
    return head(token, "/v1/chat/completions", f"Content-Length: {len(body)}") + body


def head(token: str, path: str, *headers: str) -> bytes:
    """All of a POST but its body."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


# ---- those who misbehave: each one attempt, until it is hung up on ------------------


@dataclass
class Seen:
    """What they were told: statuses by who was told, and how often each began."""

    statuses: Counter[str] = field(default_factory=Counter)  # "flood 401"
    attempts: Counter[str] = field(default_factory=Counter)

    @property
    def told(self) -> set[str]:
        """Who was told anything."""
        return {one.partition(" ")[0] for one in self.statuses}

    def read(self, who: str, told: bytes) -> None:
        """Count the answers in what came."""
        for status in _STATUS.findall(told):
            self.statuses[f"{who} {status.decode()}"] += 1


async def half_handshake(target: Target, _chance: random.Random) -> bytes:
    async with Line(target, secured=False) as line:
        await line.send(b"\x16\x03\x01\x02\x00\x01\x00\x01")
        return await line.rest()


async def mute(target: Target, _chance: random.Random) -> bytes:
    async with Line(target) as line:
        return await line.rest()


async def slow_headers(target: Target, _chance: random.Random) -> bytes:
    async with Line(target) as line:
        await line.send(b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: ")
        await line.drip()
    return b""


async def slow_body(target: Target, _chance: random.Random) -> bytes:
    async with Line(target) as line:
        await line.send(head(target.token, "/v1/chat/completions", "Content-Length: 999"))
        await line.drip()
    return b""


async def deaf(target: Target, _chance: random.Random) -> bytes:
    """Asks for streams, one behind the other, and takes none."""
    async with Line(target, deaf=True) as line:
        line.writer.write(request(target.token, stream=True) * 20)
        # Nothing tells of the end to who reads nothing; the gateway has given it up by then.
        await asyncio.sleep(60)
    return b""


async def resetting(target: Target, chance: random.Random) -> bytes:
    """Asks, and breaks the line before there is an answer."""
    async with Line(target) as line:
        await line.send(request(target.token, stream=chance.random() < 0.5))
        await asyncio.sleep(chance.random() * 0.05)
        if (to := line.writer.get_extra_info("socket")) is not None:  # not hung up on yet
            at_once = struct.pack("ii", 1, 0)
            to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    return b""


async def garbage(target: Target, chance: random.Random) -> bytes:
    async with Line(target) as line:
        await line.send(chance.randbytes(4000))
        return await line.rest()


async def garbage_for_tls(target: Target, chance: random.Random) -> bytes:
    async with Line(target, secured=False) as line:
        await line.send(chance.randbytes(4000))
        return await line.rest()


async def pipelining(target: Target, _chance: random.Random) -> bytes:
    async with Line(target) as line:
        last = head(target.token, "/v1/search", "Content-Length: 2", "Connection: close") + b"{}"
        await line.send(request("hanse_nothing") * 60, last)
        return await line.rest()


async def oversized(target: Target, chance: random.Random) -> bytes:
    async with Line(target) as line:
        size = chance.choice((3 << 20, 1 << 40))
        headers = (f"Content-Length: {size}", "Connection: close")
        line.writer.write(head(target.token, "/v1/chat/completions", *headers))
        line.writer.write(b"x" * (3 << 20))
        return await line.rest()


async def crumbs(target: Target, _chance: random.Random) -> bytes:
    async with Line(target) as line:
        headers = ("Transfer-Encoding: chunked", "Connection: close")
        line.writer.write(head(target.token, "/v1/chat/completions", *headers))
        line.writer.write(b"1\r\nx\r\n" * 50_000)
        return await line.rest()


async def flood(target: Target, chance: random.Random) -> bytes:
    """With tokens that are made up, again and again."""
    told = bytearray()
    async with Line(target) as line:
        for _ in range(10):
            await line.send(request(f"hanse_{chance.getrandbits(128):032x}"))
            told += await line.reply()
    return bytes(told)


async def greedy(target: Target, _chance: random.Random) -> bytes:
    """With a token, again and again, whatever they are told."""
    told = bytearray()
    async with Line(target) as line:
        for _ in range(10):
            await line.send(request(target.token))
            told += await line.reply()
            await asyncio.sleep(_PAUSE_S)
    return bytes(told)


KINDS: dict[str, Callable[[Target, random.Random], Awaitable[bytes]]] = {
    one.__name__: one
    for one in (
        *(half_handshake, mute, slow_headers, slow_body, deaf, resetting, garbage),
        *(garbage_for_tls, pipelining, oversized, crumbs, flood, greedy),
    )
}


async def _again_and_again(
    target: Target, kind: str, chance: random.Random, seen: Seen, begun: asyncio.Semaphore
) -> None:
    first = True
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            seen.attempts[kind] += 1
            attempt = asyncio.ensure_future(KINDS[kind](target, chance))
            if first:
                await asyncio.sleep(0)
                begun.release()
                first = False
            try:
                seen.read(kind, await attempt)
            finally:
                attempt.cancel()
        await asyncio.sleep(_AGAIN_S)


@asynccontextmanager
async def _all_kinds(target: Target, many: int, seed: int = 7) -> AsyncIterator[Seen]:
    """So many at once, each of which comes again when it is hung up on.

    All have begun, and half of them again.
    """
    seen, begun = Seen(), asyncio.Semaphore(0)
    kinds = list(KINDS)
    tasks = [
        asyncio.create_task(
            _again_and_again(target, kinds[n % len(kinds)], random.Random(seed + n), seen, begun)
        )
        for n in range(many)
    ]
    try:
        for _ in tasks:
            await begun.acquire()
        while seen.attempts.total() < many + many // 2:
            await asyncio.sleep(0.05)
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()  # a mistake of ours


@asynccontextmanager
async def misbehaving(target: Target, many: int) -> AsyncIterator[Seen]:
    """So many at once, of all kinds, each of which comes again when it is hung up on.

    What they saw is known behind the block.
    """
    seen = Seen()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.answers.bad_clients"),
        *(f"{target.host}:{target.port}", str(target.certificate), "--many", str(many)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "HANSE_TOKEN": target.token},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield seen
        process.stdin.close()
        told = json.loads(await process.stdout.readline())
        seen.attempts.update(told["attempts"])
        seen.statuses.update(told["statuses"])
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---- the honest one -----------------------------------------------------------------


@dataclass
class Answers:
    """What an honest client got: seconds of each answer, and what it had to put up with."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0  # 429
    broken: int = 0  # lines; it tried again
    unanswered: list[str] = field(default_factory=list)  # given up, with the last cause


async def honest(target: Target, questions: int, pause_s: float = 0.0) -> Answers:
    """One question after the other, each on a connection of its own, as people's programs do.

    A line that breaks is tried again, twice; a 429 is waited for as it says.
    """
    answers = Answers()
    for _ in range(questions):
        started = time.monotonic()
        cause = await _answered(target, answers)
        if cause:
            answers.unanswered.append(cause)
        else:
            answers.seconds.append(time.monotonic() - started)
        await asyncio.sleep(pause_s)
    return answers


async def _answered(target: Target, answers: Answers) -> str:
    """Why a question was not answered, in the end; empty: it was."""
    tries, cause = 0, ""
    while tries < _TRIES:
        try:
            async with Line(target) as line:
                await line.send(request(target.token))
                told = await line.reply()
        except (OSError, asyncio.IncompleteReadError) as error:
            tries, cause = tries + 1, type(error).__name__
            answers.broken += 1
            await asyncio.sleep(0.5 * tries)
            continue
        status = int(told.split(b" ", 2)[1])
        if status == 200:
            return ""
        if status != 429:
            return f"{status}: {told[-300:]!r}"
        answers.refused += 1
        again = re.search(rb"retry-after: (\d+)", told.lower())
        if again is None:
            return "429 without Retry-After"
        await asyncio.sleep(int(again[1]))
    return cause


async def _until_told(target: Target, many: int) -> None:
    async with _all_kinds(target, many) as seen:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps({"attempts": seen.attempts, "statuses": seen.statuses}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("certificate", type=Path)
    parser.add_argument("--many", type=int, default=1000)
    chosen = parser.parse_args()
    where, _, port = chosen.address.rpartition(":")
    chosen_target = Target(where, int(port), chosen.certificate, os.environ["HANSE_TOKEN"])
    asyncio.run(_until_told(chosen_target, chosen.many))
