"""fedctl documents, against a canned daemon."""

from __future__ import annotations

import pytest

from daemon.fedctl.commands import documents
from proto import control_pb2 as control
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


def test_documents_are_listed_by_id(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    lines = fedctl("documents", "list").out.splitlines()
    listed = [line.split()[0] for line in lines if ".txt" in line or ".md" in line]
    assert listed == sorted(daemon.documents)
    below = fedctl("documents", "list", "--below", "manuals/", "--json").object
    assert [one["id"] for one in below["documents"]] == ["manuals/lift.txt", "manuals/lock.txt"]
    assert fedctl("documents", "list", "--collection", "manuals", "--json").object == below


def test_what_is_known_of_documents_is_shown(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    listed = fedctl("documents", "list", "--below", "rules").out
    assert "Ada Lock" in listed
    assert "2024-05-31" in listed
    assert "old, wet" in listed
    shown = fedctl("documents", "show", "rules.md").out
    for line in ("author: Ada Lock", "date: 2024-05-31", "language: en", "tags: old, wet"):
        assert line in shown
    (plain,) = fedctl("documents", "list", "--below", "rules", "--json").object["documents"]
    assert (plain["tags"], plain["language"]) == (["old", "wet"], "en")


def test_ids_are_whole_however_little_room_there_is(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    listed = fedctl("documents", "list").out
    assert "manuals/lift.txt" in listed
    assert "author: Ada Lock" in fedctl("documents", "list", "--below", "manuals/lock").out


@pytest.mark.parametrize("width", ["80", "200"])
def test_what_is_known_stands_below_an_id_that_leaves_no_room(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    long = f"{'minutes of the lock keepers/' * 6}rules.md"
    assert len(long) > 150
    daemon.documents = {long, "rules.md"}
    lines = fedctl("documents", "list").out.splitlines()
    below = lines[lines.index(long) + 1]
    assert f"title: Of {long}" in below and below.endswith("split: train; passages: 2")
    assert "author: Ada Lock" in lines[lines.index("rules.md") + 1]
    daemon.waiting = [control.WaitingDocument(id=long, pages="4, 6 to 9")]
    assert "4, 6 to 9" in (listed := fedctl("documents", "list", "--waiting").out)
    assert (f"{long}\n  pages: " in listed) == (width == "80"), "two columns have room in 200"


def test_an_id_of_two_lines_is_one_row(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.documents = {"a\nforged.txt", "b.txt"}
    shown = "a\N{REPLACEMENT CHARACTER}forged.txt"
    for words in (["list"], ["show", "a\nforged.txt"], ["remove", "a\nforged.txt", "c.txt"]):
        ran = fedctl("documents", *words)
        lines = (ran.out + ran.err).splitlines()
        assert not any(line.startswith("forged") for line in lines), lines
    assert shown in fedctl("documents", "list").out
    assert shown in fedctl("documents", "show", "a\nforged.txt").out
    daemon.waiting = [control.WaitingDocument(id="a\nforged.txt", pages="1")]
    assert shown in fedctl("documents", "list", "--waiting").out


def test_a_large_library_is_listed_page_by_page(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_A_PAGE", 2)
    daemon.documents = {f"{number}.txt" for number in range(5)}
    listed = fedctl("documents", "list", "--json").object["documents"]
    assert [one["id"] for one in listed] == sorted(daemon.documents)
    assert [request.after for request in daemon.asked] == ["", "1.txt", "3.txt"]


def test_a_document_is_shown_passage_by_passage(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("documents", "show", "rules.md").out
    assert "rules.md: 2 passages, split train" in out
    assert (
        out.index("page 3, read by OCR: Of locks")
        < out.index("Locks leak.")
        < out.index("page 4\n")
    )
    assert "Part | Tons\nSill | 2" in out
    assert daemon.asked[0].id == "rules.md"


def test_watched_folders_are_shown_with_what_was_not_read(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    assert "no folder is watched" in fedctl("documents", "folders").out
    lamp = control.FileNotRead(path="lamp.docx", cause="damaged [or not]: save it anew")
    daemon.folders = [
        control.WatchedFolder(
            name="contracts", path="/srv/contracts", files=40, waiting=1, refused=3, links=5,
            not_read=[lamp], looked_unix_ms=1_700_000_000_000,
        ),
        control.WatchedFolder(name="letters", path="/srv/letters", trouble="not there"),
    ]  # fmt: skip
    lines = fedctl("documents", "folders").out.splitlines()
    contracts = next(line for line in lines if "/srv/contracts" in line)
    assert contracts.split()[:6] == ["contracts", "/srv/contracts", "40", "1", "3", "5"]
    assert contracts.strip().endswith("2023-11-14 22:13:20 UTC")
    assert "contracts/lamp.docx: damaged [or not]: save it anew" in lines, lines
    assert "and 2 more in contracts" in lines
    assert "letters: not there" in lines
    plain = fedctl("documents", "folders", "--json").object
    assert plain["folders"][0]["not_read"] == [{"path": lamp.path, "cause": lamp.cause}]
    assert plain["vanished"] == "remove"


def test_what_waits_for_ocr_is_listed_with_what_becomes_of_it(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no document has pages that wait" in fedctl("documents", "list", "--waiting").out
    monkeypatch.setattr(documents, "_A_PAGE", 2)
    daemon.waiting = [
        control.WaitingDocument(id="a/scan.pdf", pages="4, 6 to 9", read_again=True),
        control.WaitingDocument(id="b.pdf", pages="1"),
        control.WaitingDocument(id="c.pdf", pages="2", cause="tesseract [failed]"),
    ]
    out = " ".join(fedctl("documents", "list", "--waiting").out.split())
    assert "a/scan.pdf 4, 6 to 9 is read again by itself" in out
    assert "b.pdf 1 ingest it again" in out
    assert "Install tesseract-ocr, with its package for each language." in out
    told = fedctl("documents", "list", "--waiting", "--json").object["documents"]
    assert [one["id"] for one in told] == ["a/scan.pdf", "b.pdf", "c.pdf"]
    assert told[2]["cause"] == "tesseract [failed]"


def test_what_is_removed_is_counted(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("documents", "remove", "rules.md", "--yes")
    out = ran.out
    alike = "the same, or nearly so, still stands in: manuals/lift.txt, manuals/lock.txt\n"
    assert alike in ran.err
    assert "1 document removed, 2 passages, 1 pair that" in out
    assert "What a model version has learned of them stays in it." in out
    assert daemon.documents == {"manuals/lift.txt", "manuals/lock.txt"}


def test_all_below_a_folder_are_removed_at_once(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    removed = fedctl("documents", "remove", "--below", "manuals/", "--yes", "--json").object
    assert (removed["documents"], removed["done"]) == (2, True)
    assert daemon.documents == {"rules.md"}


def test_a_collection_is_removed_at_once(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.documents.add("manuals-old/lift.txt")
    ran = fedctl("documents", "remove", "--collection", "manuals")
    assert (ran.code, "2 documents would be taken out, with" in ran.err) == (2, True), ran.err
    assert fedctl("documents", "remove", "--collection", "manuals", "--yes").code == 0
    assert daemon.documents == {"rules.md", "manuals-old/lift.txt"}


def test_many_are_removed_request_by_request(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_A_REQUEST", 2)
    removed = fedctl("documents", "remove", *sorted(daemon.documents), "--yes", "--json").object
    assert removed["documents"] == 3
    assert [len(request.ids) for request in daemon.asked] == [2, 1]


def test_ids_that_no_document_has_are_told(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("documents", "remove", "rules.md", "nowhere", "--yes")
    assert (ran.code, "no document 'nowhere' here" in ran.err) == (3, True)
    ran = fedctl("documents", "remove", "nowhere", "--yes")
    assert (ran.code, "no such document here: nowhere" in ran.err) == (2, True)


def test_ids_that_no_document_has_are_told_before_it_is_asked(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    daemon.waiting = [control.WaitingDocument(id="scan.pdf", pages="1")]
    ran = fedctl("documents", "remove", "rules.md", "rules", "scan.pdf", "\x1b", "rules.md")
    assert "2 documents (rules, \N{REPLACEMENT CHARACTER}: not here) would be taken" in ran.err
    ran = fedctl("documents", "remove", "rules", "nowhere")
    assert (ran.code, "no such document here: rules, nowhere" in ran.err) == (2, True)
    many = [f"{number}.txt" for number in range(30)]
    assert "up to 30 documents would be taken out" in fedctl("documents", "remove", *many).err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which documents are to be removed?"),
        (["rules.md", "--below", "manuals/"], "which documents are to be removed?"),
        (["--collection", "manuals", "--below", "manuals/"], "which documents are to be removed?"),
        (["--collection", "/"], "'/' is no name of a collection"),
        (["--collection", "../x"], "'../x' is no name of a collection"),
        (["--collection", "a/./b"], "'a/./b' is no name of a collection"),
        (["--collection", "attic"], "no document's id begins with 'attic/'"),
        (["--below", "attic/"], "no document's id begins with 'attic/'"),
        (["rules.md"], "1 document would be taken out, with"),
        (["rules.md"], "this is not done unasked"),
    ],
)
def test_nothing_is_removed_by_mistake(
    fedctl: Fedctl, daemon: CannedDaemon, words: list[str], told: str
) -> None:
    before = set(daemon.documents)
    ran = fedctl("documents", "remove", *words)
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert daemon.documents == before
