"""Writes that fail, are cut short, or meet a name that is taken."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from crypto import durable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    durable.write(tmp_path / "file", b"old")
    with pytest.raises(ValueError, match="half"), durable.whole(tmp_path / "file") as unfinished:
        unfinished.write_bytes(b"half")
        raise ValueError("half")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("lasting", [True, False])
def test_what_must_last_is_synced_before_its_name_and_the_folder_after(
    tmp_path: Path, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    path = tmp_path / "file"
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), path.exists()))
    )
    with durable.whole(path, lasting=lasting) as unfinished:
        unfinished.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert synced == ([(False, False), (True, True)] if lasting else [])


def test_a_fresh_file_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    durable.write(tmp_path / "file", b"old")
    with pytest.raises(FileExistsError):
        durable.write(tmp_path / "file", b"new", fresh=True)
    durable.write(tmp_path / "other", b"new", 0o644, fresh=True)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o644
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file", "other"]


def test_what_a_crash_left_is_swept_in_all_folders_below(tmp_path: Path) -> None:
    (tmp_path / "kept" / ".new-folder").mkdir(parents=True)
    for name in ("whole.npy", ".new-1-0.npy.0f", "kept/.new-2-0.npy.0f", "kept/1-0.npy"):
        (tmp_path / name).write_bytes(b"")
    durable.sweep(tmp_path)
    assert names(tmp_path) == ["kept", "whole.npy"]
    assert names(tmp_path / "kept") == [".new-folder", "1-0.npy"]


def test_what_a_crash_left_on_another_disk_is_swept_too(tmp_path: Path) -> None:
    """A link in the folder leads there; one further down, or to a file, is followed nowhere."""
    state, disk, other = (tmp_path / name for name in ("state", "disk", "other"))
    for folder in (state, disk / "in", other):
        folder.mkdir(parents=True)
        (folder / ".new-file.0f").write_bytes(b"")
    (state / "originals").symlink_to(disk)
    (disk / "further").symlink_to(other)
    (state / ".new-link.0f").symlink_to(other / ".new-file.0f")
    durable.sweep(state)
    assert names(state) == ["originals"]
    assert names(disk / "in") == []
    assert names(other) == [".new-file.0f"]
