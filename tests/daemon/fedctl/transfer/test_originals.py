"""Files that fedd keeps, as fedctl sends and writes them: whole, and only where asked for."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from daemon.fedctl.transfer import originals
from daemon.fedctl.transfer.originals import LocalFile
from proto import control_pb2 as control
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl

BIG = 9 << 20  # bytes: several requests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small files, one that takes several requests, and one of records."""
    where = tmp_path / "in"
    (where / "deep").mkdir(parents=True)
    (where / "a.txt").write_text("Locks keep the level of a canal.")
    (where / "deep" / "b.txt").write_text("Locks keep the level of a canal.")
    (where / "big.txt").write_bytes(b"A long rope. " + bytes(32 for _ in range(BIG)))
    (where / "c.jsonl").write_text('{"id": "record.txt", "text": "A weir."}\n')
    return where


def sent(daemon: CannedDaemon) -> list[control.IngestRequest]:
    return [one for one in daemon.asked if isinstance(one, control.IngestRequest)]


@pytest.mark.slow
def test_files_are_not_sent_where_none_are_kept(
    fedctl: Fedctl, daemon: CannedDaemon, folder: Path
) -> None:
    assert fedctl("ingest", folder).code == 0
    assert [(len(one.offered), len(one.pieces)) for one in sent(daemon)] == [(0, 0)]


@pytest.mark.slow
def test_files_are_sent_whole_and_in_pieces(
    fedctl: Fedctl, daemon: CannedDaemon, folder: Path
) -> None:
    daemon.originals = {}
    assert fedctl("ingest", folder, "--collection", "x").code == 0
    assert {name: sha256(content).digest() for name, content in daemon.originals.items()} == {
        f"x/{name}": sha256((folder / name).read_bytes()).digest()
        for name in ("a.txt", "deep/b.txt", "big.txt")
    }
    pieces = [piece for one in sent(daemon) for piece in one.pieces]
    assert max(len(piece.content) for piece in pieces) == 1 << 20
    assert max(one.ByteSize() for one in sent(daemon)) < 6 << 20


@pytest.mark.slow
def test_what_fedd_has_already_is_not_sent_again(
    fedctl: Fedctl, daemon: CannedDaemon, folder: Path
) -> None:
    daemon.originals = {"a.txt": (folder / "a.txt").read_bytes()}
    fedctl("ingest", folder)
    of = {piece.document_id for one in sent(daemon) for piece in one.pieces}
    assert of == {"deep/b.txt", "big.txt"}


@pytest.mark.parametrize("how", ["touched", "gone", "pipe"])
@pytest.mark.slow
def test_a_file_that_changes_while_it_is_ingested_is_not_sent(
    fedctl: Fedctl,
    daemon: CannedDaemon,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    daemon.originals = {}
    file, before = folder / "a.txt", originals._offered

    def changed(*given: Any) -> Any:
        if how != "touched":
            file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        if how == "touched":
            os.utime(file, ns=(0, 0))
        return before(*given)

    monkeypatch.setattr(originals, "_offered", changed)
    ran = fedctl("ingest", folder, "--json")
    assert ran.code == 3, ran.err
    (problem,) = ran.object["problems"]
    assert problem["path"] == str(file)
    assert ("not kept" in problem["cause"], problem["became"]) == (True, "not kept")
    assert "a.txt" not in daemon.originals


def test_requests_put_together_are_the_files(tmp_path: Path) -> None:
    """Drawn sizes around those of a piece and of a request; what comes is what there is."""
    for seed in range(8):
        draw = Random(seed)
        files: dict[str, LocalFile] = {}
        content: dict[str, bytes] = {}
        for number in range(draw.randrange(1, 6)):
            edge = draw.choice([1, 1 << 20, 4 << 20])
            size = max(1, edge * draw.randrange(1, 3) + draw.randrange(-1, 2))
            content[str(number)] = draw.randbytes(size)
            path = tmp_path / f"{seed}-{number}"
            path.write_bytes(content[str(number)])
            files[str(number)] = LocalFile.at(path)
        problems: list[dict[str, Any]] = []
        requests = list(originals._requests(files.items(), problems))
        came: dict[str, bytes] = {}
        for piece in (piece for one in requests for piece in one.pieces):
            assert 0 < len(piece.content) <= 1 << 20
            came[piece.document_id] = came.get(piece.document_id, b"") + piece.content
        assert (came, problems) == (content, []), seed
        assert all(sum(len(p.content) for p in one.pieces) < 6 << 20 for one in requests)


# ---- out ---------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_file_comes_back_as_it_was(fedctl: Fedctl, daemon: CannedDaemon, out: Path) -> None:
    daemon.originals = {"manuals/lift.PDF": b"%PDF-1.7 of the lift"}
    old = os.umask(0)
    try:
        ran = fedctl("documents", "original", "manuals/lift.PDF", "--out", out / "x.pdf", "--json")
    finally:
        os.umask(old)
    assert (ran.code, ran.object["bytes"]) == (0, 20), ran.err
    assert (out / "x.pdf").read_bytes() == b"%PDF-1.7 of the lift"
    assert (out / "x.pdf").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_stays_unless_forced(
    fedctl: Fedctl, daemon: CannedDaemon, out: Path
) -> None:
    daemon.originals = {"a.txt": b"new"}
    file = out / "a.txt"
    file.write_text("before")
    ran = fedctl("documents", "original", "a.txt", "--out", file)
    assert (ran.code, "is there already" in ran.err, file.read_text()) == (2, True, "before")
    assert daemon.asked == [], "nothing is asked for"
    assert fedctl("documents", "original", "a.txt", "--out", file, "--force").code == 0
    assert file.read_text() == "new"


@pytest.mark.parametrize(
    ("document", "name", "needed"),
    [
        ("a.pdf", "a", ".pdf"),
        ("a.pdf", "a.html", ".pdf"),
        ("site/page.html", "page.html", ".html.txt"),
        ("site/PAGE.HTM", "page.htm", ".htm.txt"),
    ],
)
def test_no_file_goes_under_a_name_that_runs_it(
    fedctl: Fedctl, daemon: CannedDaemon, out: Path, document: str, name: str, needed: str
) -> None:
    daemon.originals = {document: b"<script>"}
    ran = fedctl("documents", "original", document, "--out", out / name)
    assert (ran.code, f"does not end in {needed}" in ran.err) == (2, True), ran.err
    assert list(out.iterdir()) == []
    (out / f"link{needed}").symlink_to(out / "x.sh")  # a link has no better name than its end
    ran = fedctl("documents", "original", document, "--out", out / f"link{needed}")
    assert (ran.code, f"does not end in {needed}" in ran.err) == (2, True), ran.err
    assert not (out / "x.sh").exists()
    assert fedctl("documents", "original", document, "--out", out / f"x{needed}").code == 0


def test_no_file_goes_to_a_terminal_or_device(
    fedctl: Fedctl, daemon: CannedDaemon, out: Path
) -> None:
    daemon.originals = {"a.txt": b"\x1b]0;title\x07"}
    (out / "null.txt").symlink_to("/dev/null")
    for name in (out / "null.txt", Path("/dev/stdout"), Path("-")):
        ran = fedctl("documents", "original", "a.txt", "--out", name, "--force")
        assert (ran.code, ran.out, daemon.asked) == (2, "", []), ran.err


@pytest.mark.parametrize("words", [["original", "a.txt"], ["page", "a.txt", "1"]])
def test_a_file_that_comes_in_part_is_not_written(
    fedctl: Fedctl, daemon: CannedDaemon, out: Path, words: list[str]
) -> None:
    daemon.originals, daemon.cut = {"a.txt": b"a text of some length"}, 1
    file = out / ("a.txt" if words[0] == "original" else "a.png")
    ran = fedctl("documents", *words, "--out", file)
    assert (ran.code, "nothing is written" in ran.err) == (1, True), ran.err
    assert list(out.iterdir()) == []


def test_what_the_daemon_refuses_leaves_nothing_behind(
    fedctl: Fedctl, daemon: CannedDaemon, out: Path
) -> None:
    daemon.refusal = "'a.pdf' has 3 pages, and none is number 4"
    daemon.refused_as = grpc.StatusCode.INVALID_ARGUMENT
    ran = fedctl("documents", "page", "a.pdf", "4", "--out", out / "a.png")
    assert (ran.code, "has 3 pages" in ran.err) == (2, True), ran.err
    assert list(out.iterdir()) == []


def test_a_page_is_drawn_as_fine_as_asked(fedctl: Fedctl, daemon: CannedDaemon, out: Path) -> None:
    ran = fedctl("documents", "page", "a.pdf", "2", "--out", out / "a.jpg")
    assert (ran.code, "does not end in .png" in ran.err) == (2, True)
    assert fedctl("documents", "page", "a.pdf", "2", "--out", out / "a.png").code == 0
    fedctl("documents", "page", "a.pdf", "2", "--out", out / "b.png", "--dpi", 72)
    assert [(one.page, one.dpi) for one in daemon.asked] == [(2, 150), (2, 72)]
    assert fedctl("documents", "page", "a.pdf", "2", "--out", out / "c.png", "--dpi", 601).code == 2
