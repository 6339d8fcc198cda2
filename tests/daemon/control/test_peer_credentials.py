"""Who knocks at the control socket is who the kernel says, whatever they say themselves."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from structlog.testing import capture_logs

from daemon.control.peer_credentials import PeerCredentials

_ASK = """
import os, sys, grpc
with grpc.insecure_channel("unix:" + sys.argv[1]) as channel:
    os.setuid(int(sys.argv[2]))  # connects with the first call, so as this user
    print(channel.unary_unary("/Who/AmI")(b"I am uid:0", timeout=10).decode())
"""


@asynccontextmanager
async def doorman(path: Path, failures: int = 0) -> AsyncIterator[PeerCredentials]:
    """Every user is told by their own server who they are; the first ``failures`` don't start."""
    left = [OSError("too many open files")] * failures
    servers: list[grpc.aio.Server] = []

    async def serve(uid: int, inner: Path) -> None:
        if left:
            raise left.pop()

        async def who(_raw: bytes, _context: object) -> bytes:
            return f"uid:{uid}".encode()

        handlers = {"AmI": grpc.unary_unary_rpc_method_handler(who)}
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Who", handlers),))
        server.add_insecure_port(f"unix:{inner}")
        await server.start()
        servers.append(server)

    keeper = PeerCredentials(serve)
    old = os.umask(0o117)  # as the control socket is made
    try:
        await keeper.start(path)
    finally:
        os.umask(old)
    try:
        yield keeper
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers))
        await keeper.stop()


async def asked_by(uid: int, path: Path) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _ASK, str(path), str(uid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_caller_is_who_the_kernel_says(tmp_path: Path) -> None:
    path = tmp_path / "fedd.sock"
    async with doorman(path):
        assert await asked_by(os.getuid(), path) == f"uid:{os.getuid()}"


@pytest.mark.slow
async def test_a_cleared_temporary_folder_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "fedd.sock"
    async with doorman(path) as keeper:
        assert await asked_by(os.getuid(), path) == f"uid:{os.getuid()}"
        assert keeper._folder is not None
        shutil.rmtree(keeper._folder.path)
        with capture_logs() as logs:
            assert await asked_by(os.getuid(), path) == f"uid:{os.getuid()}"
        assert ["made anew" in one["event"] for one in logs if one["log_level"] == "warning"] == [
            True
        ]


async def test_a_user_has_so_many_connections_and_gets_others_for_them(tmp_path: Path) -> None:
    """Those that do nothing cost the daemon descriptors, which peers and its state need, too."""
    path = tmp_path / "fedd.sock"

    async def greeted() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(path)
        return await reader.read(1), writer

    async with doorman(path):
        first = [await greeted() for _ in range(100)]
        assert all(greeting for greeting, _ in first)
        with capture_logs() as said:
            refused = [(await greeted())[0] for _ in range(3)]
        assert refused == [b"", b"", b""]
        warned = [line["uid"] for line in said if line["log_level"] == "warning"]
        assert warned == [os.getuid()], "once a minute"
        first[0][1].close()
        async with asyncio.timeout(30):  # until the daemon has seen it
            while not (await greeted())[0]:
                await asyncio.sleep(0.05)
        for _, writer in first:
            writer.close()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become others")
async def test_users_are_told_apart(tmp_path: Path) -> None:
    path = Path("/tmp") / f"hanse-doorman-{os.getpid()}.sock"
    try:
        async with doorman(path):
            path.chmod(0o666)
            found = [await asked_by(uid, path) for uid in (0, 65534, 1, 65534)]
        assert found == ["uid:0", "uid:65534", "uid:1", "uid:65534"]
    finally:
        path.unlink(missing_ok=True)


async def test_nobody_else_can_go_round_the_door(tmp_path: Path) -> None:
    path = tmp_path / "fedd.sock"
    async with doorman(path) as keeper:
        await asked_by(os.getuid(), path)
        [task] = keeper._doors.values()
        inner = await task
        assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700
    assert not inner.parent.exists()


async def test_who_hangs_up_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "fedd.sock"
    async with doorman(path) as keeper:
        for _ in range(20):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"PRI * HTTP/2.0")
            writer.close()
        async with asyncio.timeout(10):
            while keeper._visits:
                await asyncio.sleep(0.01)


async def test_a_server_that_did_not_start_is_started_at_the_next_visit(tmp_path: Path) -> None:
    path = tmp_path / "fedd.sock"
    async with doorman(path, failures=1):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()
        assert await asked_by(os.getuid(), path) == f"uid:{os.getuid()}"
