"""Milvus Lite as a server of its own process, where it is installed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.authority import free_port

_STARTS_S = 60.0


@contextmanager
def milvus_lite(folder: Path) -> Iterator[str]:
    """Its address; skips where it is not installed."""
    if find_spec("pymilvus") is None or find_spec("milvus_lite") is None:
        pytest.skip("pymilvus and milvus-lite are not installed: make test-milvus")
    port = free_port()
    with (folder / "log").open("wb") as told:
        words = ["-m", "milvus_lite", "server", "--data-dir", str(folder / "data")]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen([sys.executable, *words], stdout=told, stderr=told)
    try:
        until = time.monotonic() + _STARTS_S
        while not _listens(port):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, "Milvus Lite does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
