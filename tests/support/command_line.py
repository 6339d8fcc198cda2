"""fedctl in this process, against a daemon whose answers are canned: fixtures for tests."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from daemon.fedctl.main import main
from tests.support.canned_daemon import CannedDaemon, canned_daemon


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The single JSON object on stdout; fails when there is anything else."""
        result: dict[str, Any] = json.loads(self.out)
        return result

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Fedctl = Callable[..., Ran]


@pytest.fixture
def fedctl(capsys: pytest.CaptureFixture[str]) -> Fedctl:
    def run(*words: object) -> Ran:
        capsys.readouterr()
        interrupted = signal.getsignal(signal.SIGINT)
        try:
            code = main([str(word) for word in words])
        finally:
            # What `mcp` makes of Ctrl-C for its process would end that of the tests.
            signal.signal(signal.SIGINT, interrupted)
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def path() -> Iterator[Path]:
    # pytest's own folders are too deep for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="hanse-") as folder:
        yield Path(folder) / "fedd.sock"


@pytest.fixture
def daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedDaemon]:
    monkeypatch.setenv("HANSE_SOCKET", str(path))
    with canned_daemon(path) as running:
        yield running
