"""Model versions on disk: the old one or the new one, whatever the moment of a crash."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from crypto.durable import sweep
from daemon.process import faultpoints
from daemon.state.versions import (
    ShapeManifest,
    VersionError,
    import_version,
    is_sound,
    largest_file,
    read_version,
    shape_of,
    version_digest,
    version_path,
    write_version,
)
from tests.daemon.state.two_versions import SHAPE, vector, write_both


def child(*words: str | Path, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, that a fault may kill."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, faultpoints.VARIABLE: fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def writes_both(folder: Path, fault: str) -> subprocess.CompletedProcess[str]:
    return child("-m", "tests.daemon.state.two_versions", folder, fault=fault)


def test_a_version_is_synced_before_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no name without content; and whoever has said so has the version."""
    synced: list[tuple[bool, int]] = []

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((folder, len(list(tmp_path.glob("[!.]*.safetensors")))))

    monkeypatch.setattr(os, "fsync", fsync)
    write_version(tmp_path, SHAPE.digest, vector(1))
    assert synced == [(False, 0), (True, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "second_is_there"),
    [
        ("version:write", False),
        ("version:rename", False),
        ("version:renamed", True),
        ("version:synced", True),
    ],
)
def test_a_crash_leaves_whole_versions_only(
    tmp_path: Path, point: str, second_is_there: bool
) -> None:
    crashed = writes_both(tmp_path, f"{point}=kill@2")
    assert crashed.returncode == -signal.SIGKILL
    first = version_digest(SHAPE.digest, vector(1))
    second = version_digest(SHAPE.digest, vector(2))
    assert crashed.stdout.split() == [first.hex()], "the second was not reported as written"
    assert is_sound(tmp_path, first, SHAPE.digest)
    assert is_sound(tmp_path, second, SHAPE.digest) == second_is_there
    sweep(tmp_path)
    expected = {first, second} if second_is_there else {first}
    assert {p.name for p in tmp_path.iterdir()} == {f"{d.hex()}.safetensors" for d in expected}
    write_both(tmp_path)  # the next start writes it
    assert is_sound(tmp_path, second, SHAPE.digest)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["enospc", "erofs"])
def test_a_disk_that_fails_leaves_nothing_behind(tmp_path: Path, what: str) -> None:
    failed = writes_both(tmp_path, f"version:rename={what}@2")
    assert failed.returncode == 1
    assert "OSError" in failed.stderr
    digest = version_digest(SHAPE.digest, vector(1))
    assert [p.name for p in tmp_path.iterdir()] == [f"{digest.hex()}.safetensors"]


def test_a_real_full_disk_is_an_oserror_and_leaves_nothing_behind(small_disk: Path) -> None:
    big = ShapeManifest("test", (("w", (1 << 20,)),))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    with pytest.raises(OSError, match=r"cannot write|No space"):
        write_version(small_disk, big.digest, np.ones(big.total, dtype=np.float32))
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]
    ballast.unlink()
    digest, _ = write_version(small_disk, big.digest, np.ones(big.total, dtype=np.float32))
    assert is_sound(small_disk, digest, big.digest)


@contextmanager
def disk_of(size: str, folder: Path) -> Iterator[Path]:
    """A disk of so many bytes at ``folder``; skips where none may be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of("8m", tmp_path / "disk") as folder:
        yield folder


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_version_is_refused_and_can_be_replaced(tmp_path: Path, damage: str) -> None:
    digest, path = write_version(tmp_path, SHAPE.digest, vector(1))
    whole = path.read_bytes()
    damaged = {
        "flip": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "cut": whole[:-4],
        "empty": b"",
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(VersionError, match="version"):
        read_version(tmp_path, digest, SHAPE.digest)
    arrived = tmp_path / "arrived"
    arrived.write_bytes(whole)
    import_version(arrived, tmp_path, digest)
    assert np.array_equal(read_version(tmp_path, digest, SHAPE.digest), vector(1))
    assert not arrived.exists()


def test_a_version_says_of_which_retriever_it_is_and_its_name_proves_it(tmp_path: Path) -> None:
    """So that one of an encoder that is not here can be kept, handed on and told apart."""
    other = ShapeManifest("another", (("w", (48,)),))
    values = np.ones(48, dtype=np.float32)
    digest, path = write_version(tmp_path / "theirs", other.digest, values)
    import_version(path.rename(tmp_path / "arrived"), tmp_path / "ours", digest)
    assert shape_of(tmp_path / "ours", digest) == other.digest
    assert is_sound(tmp_path / "ours", digest)
    assert not is_sound(tmp_path / "ours", digest, SHAPE.digest)
    with pytest.raises(VersionError, match="of another retriever"):
        read_version(tmp_path / "ours", digest, SHAPE.digest)


@pytest.mark.parametrize("said", [None, "", "no digits", SHAPE.digest.hex(), "ab"])
def test_who_says_another_retriever_of_a_version_is_not_believed(
    tmp_path: Path, said: str | None
) -> None:
    values = np.ones(48, dtype=np.float32)
    digest = version_digest(b"\x07" * 32, values)
    metadata = None if said is None else {"shape_digest": said}
    save_file({"shared": values}, tmp_path / "arrived", metadata=metadata)
    with pytest.raises(VersionError, match="damaged or of another"):
        import_version(tmp_path / "arrived", tmp_path / "ours", digest)
    with pytest.raises(VersionError):
        shape_of(tmp_path / "ours", digest)


def test_what_a_peer_sent_under_a_wrong_name_is_not_kept(tmp_path: Path) -> None:
    _, path = write_version(tmp_path / "theirs", SHAPE.digest, vector(1))
    arrived = path.rename(tmp_path / "arrived")
    wanted = version_digest(SHAPE.digest, vector(2))
    with pytest.raises(VersionError, match="damaged or of another"):
        import_version(arrived, tmp_path / "ours", wanted)
    assert not arrived.exists()
    assert not version_path(tmp_path / "ours", wanted).exists()


@pytest.mark.parametrize("shape", [(307, 1), (1, 307)])
def test_the_right_values_in_another_shape_are_not_kept(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """The digest is over the values alone; whoever trains from them needs a vector."""
    arrived = tmp_path / "arrived"
    save_file({"shared": vector(1).reshape(shape)}, arrived)
    wanted = version_digest(SHAPE.digest, vector(1))
    with pytest.raises(VersionError, match="no vector of float32"):
        import_version(arrived, tmp_path / "ours", wanted)
    assert not arrived.exists()
    assert not version_path(tmp_path / "ours", wanted).exists()


def test_what_arrived_whole_waits_for_space(tmp_path: Path) -> None:
    digest, path = write_version(tmp_path / "theirs", SHAPE.digest, vector(1))
    arrived = path.rename(tmp_path / "arrived")
    (tmp_path / "ours").write_text("no folder can be made here")
    with pytest.raises(OSError, match="exists"):
        import_version(arrived, tmp_path / "ours", digest)
    assert arrived.exists()


def test_the_file_of_a_version_stays_below_its_bound(tmp_path: Path) -> None:
    for shapes in (SHAPE, ShapeManifest("one", (("w", (1,)),))):
        values = np.ones(shapes.total, dtype=np.float32)
        _, path = write_version(tmp_path, shapes.digest, values)
        assert path.stat().st_size <= largest_file(shapes.total)


# ---- fault points -------------------------------------------------------------


def test_without_the_variable_a_fault_point_is_nothing() -> None:
    assert faultpoints.passing_with("") is faultpoints._nothing
    program = "from daemon.process import faultpoints as f; assert f.passing is f._nothing"
    assert child("-c", program).returncode == 0


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("persist:befor=kill", "no fault point 'persist:befor'"),
        ("persist:before=explode", "'explode' is none of kill"),
        ("persist", "is not <point>=<what>"),
    ],
)
def test_a_misspelt_fault_is_refused(spec: str, complaint: str) -> None:
    with pytest.raises(faultpoints.FaultSpecError, match=complaint):
        faultpoints.read(spec)


def test_a_fault_happens_when_it_is_asked_for() -> None:
    passing = faultpoints.passing_with("persist:before=enospc@2x2")
    outcomes = []
    for _ in range(5):
        try:
            passing("persist:before")
            outcomes.append("")
        except OSError as error:
            outcomes.append(str(error.strerror))
    assert outcomes == ["", *["No space left on device"] * 2, "", ""]
    with pytest.raises(faultpoints.FaultSpecError, match="does not list"):
        passing("persist:never")
