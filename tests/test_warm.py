"""What is forked from the warm process ends as what is executed does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import warm

pytestmark = pytest.mark.federation


async def test_an_exit_code_and_what_was_said_come_back(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        words = ["--config", str(tmp_path / "missing.toml")]
        refused = await warm.started("daemon.main", words, log=log, env=os.environ)
        assert await refused.wait() == 78
        helped = await warm.started("daemon.main", ["--help"], log=log, env=os.environ)
        assert await helped.wait() == helped.returncode == 0
    assert "copy config/fedd.example.toml" in (tmp_path / "log").read_text()
    assert "usage: fedd" in (tmp_path / "log").read_text()
    with pytest.raises(ProcessLookupError):
        helped.kill()


async def test_who_is_killed_ends_by_the_signal(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = await warm.started("http.server", ["0"], log=log, env=os.environ)
        assert os.getsid(process.pid) == process.pid, "a session of its own"
        process.kill()
        assert await process.wait() == -signal.SIGKILL
