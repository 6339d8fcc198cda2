"""Ctrl-C in the first moment: a real process, held up in an import, and signalled there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from daemon.fedctl.terminal.output import Exit

ROOT = Path(__file__).parents[3]
ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fedctl"]
# Python runs it before anything of ours; who is held up says so with a file.
HOLDS_UP = """
import os, sys, time

class HoldsUp:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HOLD_UP"]:
            open(os.environ["HELD_UP"], "w").close()
            time.sleep(60)

sys.meta_path.insert(0, HoldsUp())
"""

pytestmark = pytest.mark.slow


def interrupted(folder: Path, at: str, *words: str, deaf: bool = False) -> tuple[int, str, str]:
    """What comes of Ctrl-C while ``at`` is imported; ``deaf``: started as nohup starts it."""
    (folder / "sitecustomize.py").write_text(HOLDS_UP)
    module, _, function = ENTRY.partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    held_up = folder / "held up"
    begun = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if deaf else []
    process = subprocess.Popen(
        [*begun, sys.executable, "-c", program, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "HOLD_UP": at, "HELD_UP": str(held_up)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        until = time.monotonic() + 60
        while not held_up.exists():
            assert process.poll() is None and time.monotonic() < until, "it imports that"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        if deaf:
            time.sleep(0.3)
            assert process.poll() is None
            process.kill()
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("at", ["typer", "daemon.fedctl.commands.train", "daemon.fedctl.main"])
def test_ctrl_c_while_it_imports_ends_as_ever(tmp_path: Path, at: str) -> None:
    told = "fedctl: interrupted.\n"
    assert interrupted(tmp_path, at, "status") == (Exit.INTERRUPTED, "", told)


def test_a_script_is_told_so_in_json(tmp_path: Path) -> None:
    code, out, _ = interrupted(tmp_path, "typer", "status", "--json")
    assert (code, json.loads(out)) == (Exit.INTERRUPTED, {"error": "interrupted", "remedy": ""})
    (tmp_path / "held up").unlink()
    assert interrupted(tmp_path, "typer", "ask", "--", "--json")[1] == "", "that is the question"


def test_who_was_started_deaf_to_it_stays_so(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "typer", "status", deaf=True)[0] == -signal.SIGKILL
