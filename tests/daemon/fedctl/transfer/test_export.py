"""fedctl documents export, against a canned daemon: whole files, and nobody else's to read."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest

from tests.daemon.library.unboxed import read
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out" / "all.jsonl"


@pytest.fixture(autouse=True)
def folder(file: Path) -> None:
    file.parent.mkdir()


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_a_file_is_what_ingest_reads(fedctl: Fedctl, daemon: CannedDaemon, file: Path) -> None:
    old = os.umask(0)
    try:
        ran = fedctl("documents", "export", "--out", file)
    finally:
        os.umask(old)
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert "3 documents and 1 pair exported" in ran.err
    assert mode(file) == 0o600
    first, _, last, pair = read(file)
    assert (vars(first)["id"], vars(last)["id"]) == ("manuals/lift.txt", "rules.md")
    assert (vars(first)["date"], vars(first)["tags"]) == ("2024-05-31", ("wet",))
    assert [(span.end, span.ocr) for span in vars(first)["spans"]] == [(11, True)]
    assert vars(pair)["query"] == "Warum läuft es?"


def test_a_packed_file_is_read_likewise(fedctl: Fedctl, daemon: CannedDaemon, file: Path) -> None:
    packed = file.with_suffix(".jsonl.gz")
    assert fedctl("documents", "export", "--out", packed).code == 0
    assert mode(packed) == 0o600
    assert len(gzip.decompress(packed.read_bytes()).splitlines()) == len([*read(packed)]) == 4


def test_without_a_file_lines_go_to_standard_output(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("documents", "export", "rules.md", "nowhere")
    assert (ran.code, [line["split"] for line in ran.lines[1:]]) == (3, ["valid"])
    assert ran.lines[0]["id"] == "rules.md"
    assert "no document 'nowhere' here" in ran.err
    assert [*daemon.asked[0].ids] == ["rules.md", "nowhere"]


def test_a_script_is_told_what_became_of_it(
    fedctl: Fedctl, daemon: CannedDaemon, file: Path
) -> None:
    ran = fedctl("documents", "export", "--collection", "manuals", "--out", file, "--json")
    assert ran.object == {
        "documents": 2, "pairs": 1, "bytes": file.stat().st_size, "unknown": [],
    }  # fmt: skip
    assert daemon.asked[0].begins == "manuals/"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "FILE"], "is there already"),
        (["x", "--below", "y", "--out", "FILE"], "which documents are to be exported?"),
        (["--collection", "x", "--below", "y", "--out", "FILE"], "which documents"),
        (["--out", "FILE.txt"], "would not be read by fedctl ingest"),
        (["--out", "/dev/null"], "would not be read by fedctl ingest"),
        (["--out", "DEVICE"], "is no file"),
        (["--out", "FILE/all.jsonl"], "is no folder"),
        (["--json"], "the documents are on the same output"),
        (["nowhere", "--out", "FILE", "--force"], "no such document here"),
        (["--below", "nowhere", "--out", "FILE", "--force"], "no such document here"),
    ],
)
def test_what_makes_no_sense_writes_nothing(
    fedctl: Fedctl, daemon: CannedDaemon, file: Path, words: list[str], told: str
) -> None:
    file.write_text("before")
    device = file.with_name("device.jsonl")
    device.symlink_to("/dev/null")
    named = [word.replace("FILE", str(file)).replace("DEVICE", str(device)) for word in words]
    ran = fedctl("documents", "export", *named)
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert file.read_text() == "before"
    assert {one.name for one in file.parent.iterdir()} == {file.name, device.name}
    assert Path("/dev/null").is_char_device()


def test_a_file_that_is_there_is_replaced_by_force(
    fedctl: Fedctl, daemon: CannedDaemon, file: Path
) -> None:
    file.write_text("before")
    assert fedctl("documents", "export", "--out", file, "--force").code == 0
    assert len([*read(file)]) == 4


def test_a_file_that_comes_meanwhile_is_not_replaced(
    fedctl: Fedctl, daemon: CannedDaemon, file: Path
) -> None:
    daemon.exporting = lambda *_: file.write_text("another's")
    ran = fedctl("documents", "export", "--out", file)
    assert (ran.code, "is there already" in ran.err) == (2, True), ran.err
    assert left_in(file.parent) == {"all.jsonl": "another's"}


def left_in(folder: Path) -> dict[str, str]:
    return {one.name: one.read_text() for one in folder.iterdir()}


def test_a_daemon_that_goes_away_leaves_the_old_file(
    fedctl: Fedctl, daemon: CannedDaemon, file: Path
) -> None:
    file.write_text("before")

    def fail(name: str, context: Any) -> None:
        if name == "rules.md":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the disk is gone\nMend it")

    daemon.exporting = fail
    ran = fedctl("documents", "export", "--out", file, "--force")
    assert (ran.code, "the disk is gone" in ran.err) == (1, True)
    assert left_in(file.parent) == {"all.jsonl": "before"}


def run_apart(socket: Path, file: Path, *within: str) -> subprocess.Popen[str]:
    """`within` are the words of a program that starts it; a fork of our own would end in gRPC.

    It writes no bytecode: that which the limit cuts off would be read by whoever comes next.
    """
    words = ["documents", "export", "--socket", str(socket), "--out", str(file), "--force"]
    return subprocess.Popen(
        [*within, sys.executable, "-B", "-m", "daemon.fedctl", *words],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file(path: Path, daemon: CannedDaemon, file: Path) -> None:
    """A file may grow to a kilobyte and no more, which the kernel refuses as it does ENOSPC."""
    file.write_text("before")
    daemon.documents = {f"{number}.txt" for number in range(100)}
    with run_apart(path, file, "prlimit", "--fsize=1024") as exporting:
        _, err = exporting.communicate(timeout=50)
    assert (exporting.returncode, os.strerror(errno.EFBIG) in err) == (1, True), err
    assert "what was there before is there still" in err
    assert left_in(file.parent) == {"all.jsonl": "before"}


@pytest.mark.parametrize("before", ["before", None])
@pytest.mark.slow
def test_who_interrupts_leaves_no_half_of_a_file(
    path: Path, daemon: CannedDaemon, file: Path, before: str | None
) -> None:
    if before:
        file.write_text(before)
    begun = Queue[subprocess.Popen[str]]()

    def interrupt(name: str, _context: Any) -> None:
        if name == "rules.md":
            process = begun.get()
            process.send_signal(signal.SIGINT)
            process.wait(50)

    daemon.exporting = interrupt
    with run_apart(path, file) as exporting:
        begun.put(exporting)
        _, err = exporting.communicate(timeout=50)
    assert (exporting.returncode, "interrupted" in err) == (130, True), err
    assert left_in(file.parent) == ({"all.jsonl": before} if before else {})
