"""Temporary folders: what a killed process left goes, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from daemon.process import temporary
from daemon.process.temporary import TemporaryFolder, forget_left
from tests.daemon.process.test_workers import ROOT


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_another(place: Path) -> Path:
    """A folder with a letter in it, of a process that has ended without tidying."""
    making = "from daemon.process.temporary import *; print(TemporaryFolder().path)"
    env = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", making], capture_output=True, check=True, text=True, env=env
    )
    left = Path(ended.stdout.strip())
    (left / "letter.txt").write_text("in clear")
    return left


def test_what_nobody_holds_goes_and_what_somebody_holds_stays(place: Path) -> None:
    left = left_by_another(place)
    with TemporaryFolder() as held:
        forget_left()
        assert (left.exists(), held.path.exists()) == (False, True)
    assert [*place.iterdir()] == []


def test_a_persons_own_folders_stay(place: Path) -> None:
    own = [place / name for name in ("hanse", "hanse.git", "hanse-tmp-notes", "hanse-tmp-UPPERCAS")]
    for folder in own:
        folder.mkdir()
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    (place / "hanse-tmp-abcdefgh").symlink_to(elsewhere)
    forget_left()
    assert all(folder.exists() for folder in own)
    assert (elsewhere / "file").exists()


@pytest.mark.parametrize("when", ["mkdtemp", "_held"])
def test_who_tidies_while_a_folder_is_made_takes_no_folder_from_us(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock it is held by nobody."""
    module = tempfile if when == "mkdtemp" else temporary
    real, tidied = getattr(module, when), list[bool]()

    def and_somebody_tidies(*given: object, **named: object) -> object:
        if when == "_held" and not tidied:
            tidied.append(True)
            forget_left()
        made = real(*given, **named)
        if when == "mkdtemp" and not tidied:
            tidied.append(True)
            forget_left()
        return made

    monkeypatch.setattr(module, when, and_somebody_tidies)
    with TemporaryFolder() as folder:
        assert folder.path.exists()
        assert tidied
