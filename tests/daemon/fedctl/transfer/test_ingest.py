"""fedctl ingest as a person and a script see it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import openpyxl
import pytest
from PIL import Image

from daemon.fedctl.terminal.output import Exit
from daemon.fedctl.transfer import sending
from daemon.library.files import SUFFIXES
from daemon.library.readers import documents
from proto import control_pb2 as control
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl
from tests.support.lines import until


@pytest.mark.slow
def test_ingest_goes_on_after_a_refused_file(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "docs.jsonl").write_text(
        '{"id": "1", "title": "Weirs", "text": "A weir."}\n{"id": broken\n'
    )
    (tmp_path / "gone.txt").symlink_to("nowhere")
    ran = fedctl("ingest", tmp_path, "--json")
    assert ran.code == Exit.PARTLY
    assert ran.object["documents_new"] == 2
    assert [Path(p["path"]).name for p in ran.object["problems"]] == [
        "b.txt",
        "docs.jsonl",
        "gone.txt",
    ]
    assert ran.object["problems"][1]["line"] == 2
    assert ran.err.count("refused: ") == 3
    assert fedctl("ingest", tmp_path / "b.txt").code == Exit.FAILED  # nothing was ingested


def test_what_is_in_but_for_a_sheet_is_not_called_refused(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    book = openpyxl.Workbook()
    book.create_sheet("Wards").append(["North", 12])
    book.create_sheet("Sums").append(["Whole", "=SUM(1, 2)"])
    book.create_sheet("More sums").append(["Whole", "=SUM(1, 2)"])
    book.save(tmp_path / "wards.xlsx")
    long = "The ward's book of that year. " * (documents.MAX_TEXT_BYTES // 30 + 1)
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\x00")
    ran = fedctl("ingest", tmp_path, "--json")
    assert ran.code == Exit.PARTLY
    became = {Path(one["path"]).name: one["became"] for one in ran.object["problems"]}
    assert became == {
        **dict.fromkeys(("wards.xlsx", "long.txt"), "not read whole"),
        "broken.txt": "refused",
    }
    ran = fedctl("ingest", tmp_path)
    assert "1 refused, 2 not read whole; see below" in ran.out, ran.out
    assert "embedded (equal ones once)" in ran.out
    assert (ran.err.count("refused: "), ran.err.count("not read whole: ")) == (1, 3)


def test_pairs_of_a_misspelt_split_are_refused(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    for name in ("pairs_tarin.jsonl", "pairs.jsonl"):
        (tmp_path / name).write_text('{"query": "Why?", "doc_id": "a"}\n')
    ran = fedctl("ingest", tmp_path)
    assert (ran.code, ran.err.count("refused: ")) == (Exit.PARTLY, 1), ran.err
    assert "pairs_tarin.jsonl: 'tarin' in its name is not train, valid or test" in ran.err


@pytest.mark.slow
def test_what_waits_for_ocr_is_told_once_however_many_files(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    for name in ("a.pdf", "b.pdf"):
        page = Image.new("L", (300, 400), 255)
        page.save(tmp_path / name, save_all=True, append_images=[page, page])
    ran = fedctl("ingest", tmp_path, "--collection", "scans", "--json")
    assert ran.code == Exit.FAILED, "nothing of them could be read"
    assert ran.object["problems"] == []
    assert ran.object["waiting"] == [
        {"document": "scans/a.pdf", "pages": "1 to 3"},
        {"document": "scans/b.pdf", "pages": "1 to 3"},
    ]
    (request,) = daemon.asked[:-1]
    assert {Path(one.source).parent for one in request.waiting} == {tmp_path}
    assert ran.err.count("install tesseract-ocr") == 1
    assert "2 documents have pages that wait for OCR" in ran.err
    (tmp_path / "c.txt").write_text("Locks keep the level of a canal.")
    assert fedctl("ingest", tmp_path).code == Exit.PARTLY


def test_a_path_that_is_not_there_is_refused_before_anything_is_sent(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    for missing in (tmp_path / "vanished", tmp_path / "a.txt" / "below"):
        ran = fedctl("ingest", tmp_path, missing, "--json")
        assert ran.code == Exit.USAGE
        assert ran.object["error"] == f"{missing} is not there; nothing was ingested"
    assert not daemon.asked


@pytest.mark.slow
def test_files_of_other_kinds_are_told_by_their_endings(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    assert "other kinds" not in fedctl("ingest", tmp_path).out
    (tmp_path / "b.DOC").touch()
    assert "1 file of another kind passed over (.doc); read are" in fedctl("ingest", tmp_path).out
    for name in ("b.doc", "c.bin", "d", "e.\x1b[31m"):
        (tmp_path / name).touch()
    told = "5 files of other kinds passed over (.doc, .bin, no ending, .\N{REPLACEMENT CHARACTER}"
    assert told in fedctl("ingest", tmp_path).out
    plain = fedctl("ingest", tmp_path, "--json").object
    assert (plain["other_kinds"], plain["other_endings"][:3]) == (5, [".doc", ".bin", ""])
    for number in range(20):
        (tmp_path / f"f.{number}").touch()
    assert ", and others); read are" in fedctl("ingest", tmp_path).out


def test_an_ingest_that_is_broken_off_tells_what_is_stored(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Locks keep the level of a canal.")
    take = sending.Ingested.take

    def last_key(so_far: sending.Ingested, progress: control.IngestProgress) -> None:
        take(so_far, progress)
        if so_far.documents_new:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sending.Ingested, "take", last_key)
    ran = fedctl("ingest", tmp_path)
    assert ran.code == Exit.INTERRUPTED
    assert "interrupted; 2 documents are stored (2 new, 0 changed; perhaps" in ran.err


def test_an_ingest_that_the_daemon_breaks_off_tells_what_is_stored(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    """As on a disk that is full: it is to be seen what has to be done again."""
    lines = (json.dumps({"id": f"{n}", "text": "A lock."}) + "\n" for n in range(10_001))
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    daemon.full_after = 1
    ran = fedctl("ingest", tmp_path, "--json")
    assert ran.code == Exit.FAILED
    assert re.match(r"the disk is full; (\d+) documents are stored \(\1 new", ran.object["error"])
    assert ran.object["remedy"].startswith("free space on it; then ingest the same paths again")
    daemon.full_after = 0
    assert fedctl("ingest", tmp_path, "--json").object["error"] == "the disk is full"


def test_a_folder_with_nothing_to_read_is_told(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / ".hidden.txt").write_text("Locks keep the level of a canal.")
    ran = fedctl("ingest", tmp_path, "--json")
    assert ran.code == Exit.USAGE
    assert ran.object["error"] == f"nothing was read: no files at {tmp_path}"
    assert ", ".join(SUFFIXES) in ran.object["remedy"]


def test_ingest_tells_what_the_daemon_refused(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_text("# Locks\n\nLocks keep the level.")
    daemon.ingest_errors = ["document b: its id is too long"]
    ran = fedctl("ingest", tmp_path)
    assert ran.code == Exit.PARTLY
    assert "refused: document b: its id is too long" in ran.err


@pytest.mark.slow
def test_ingest_tells_of_pairs_that_name_no_document_here(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    pair = json.dumps({"query": "Who mends the lift?", "positives": ["lift"]})
    (tmp_path / "pairs_train.jsonl").write_text(f"{pair}\n" * 3)
    assert "; 3 pairs." in fedctl("ingest", tmp_path).out
    daemon.repeated = 1
    assert "; 3 pairs read, 2 kept (1 repeats another's question and documents)." in (
        fedctl("ingest", tmp_path).out
    )
    daemon.repeated = 0
    daemon.unusable = 2
    ran = fedctl("ingest", tmp_path)
    assert ran.code == Exit.PARTLY
    assert "3 pairs, of which 1 can be used: 2 name documents" in ran.out
    assert "(first: '[lift]'; is it 'lift.txt'?)" in ran.out
    daemon.unusable = 3
    ran = fedctl("ingest", tmp_path, "--json")
    assert (ran.code, ran.object["pairs"], ran.object["pairs_usable"]) == (Exit.PARTLY, 3, 0)
    assert (ran.object["unknown_document"], ran.object["known_document"]) == ("[lift]", "lift.txt")


@pytest.mark.slow
def test_a_collections_name_stands_before_all_ids(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "rules.txt").write_text("Locks keep the level of a canal.")
    (tmp_path / "pairs_train.jsonl").write_text('{"query": "Who?", "doc_id": "rules.txt"}')
    assert fedctl("ingest", tmp_path, "--collection", "canals/2024/").code == Exit.OK
    (batch,) = [one for one in daemon.asked if isinstance(one, control.IngestRequest)]
    assert [document.id for document in batch.documents] == ["canals/2024/rules.txt"]
    assert [*batch.pairs[0].positives] == ["canals/2024/rules.txt"]
    assert batch.documents[0].source == str(tmp_path / "rules.txt")
    assert not batch.replace
    for wrong in ("/", "a\nb", "x" * 101):
        ran = fedctl("ingest", tmp_path, "--collection", wrong)
        assert (ran.code, "no name of a collection" in ran.err) == (Exit.USAGE, True)


@pytest.mark.slow
def test_ingest_tells_how_the_librarys_pairs_are_split(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "pairs_train.jsonl").write_text('{"query": "Who mends it?", "positives": ["x"]}')
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    assert "library now: 0 train, 6 valid, 14 test." in fedctl("ingest", tmp_path).out
    told = fedctl("ingest", tmp_path, "--json").object["pairs_here"]
    assert told == {"train": 0, "valid": 6, "test": 14}
    assert "library now" not in fedctl("ingest", tmp_path / "a.txt").out


@pytest.mark.slow
def test_ingest_sends_batches(fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path) -> None:
    lines = (json.dumps({"id": str(n), "title": "t", "text": "word " * 40_000}) for n in range(50))
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    assert fedctl("ingest", tmp_path, "--json").object["documents_new"] == 50
    sizes = [r.ByteSize() for r in daemon.asked if isinstance(r, control.IngestRequest)]
    assert len(sizes) == 3
    assert max(sizes) < sending.BATCH_BYTES + (1 << 20)


def test_what_was_read_a_while_ago_is_sent(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads for hours loses little where it is interrupted."""
    monkeypatch.setattr(sending, "BATCH_S", 0.0)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("Locks keep the level of a canal.")
    assert fedctl("ingest", tmp_path, "--json").object["documents_new"] == 4
    assert len([r for r in daemon.asked if isinstance(r, control.IngestRequest)]) == 4


def test_while_a_file_is_read_the_daemon_hears_that_somebody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STILL_THERE_S", 0.005)  # a reader's process alone takes longer
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    sent: list[control.IngestRequest] = []

    class Daemon:
        async def Ingest(
            self, batches: AsyncIterator[control.IngestRequest]
        ) -> AsyncIterator[control.IngestProgress]:
            async for batch in batches:
                sent.append(batch)
                if batch.documents:
                    yield control.IngestProgress(documents_new=1)

    ingested = asyncio.run(sending.send(cast(Any, Daemon()), [tmp_path], lambda _: None))
    assert ingested.documents_new == 1
    assert sent[0] == control.IngestRequest()
    (stored,) = (batch for batch in sent if batch.documents)
    assert len(stored.documents) == 1
    # Of the others each says how much is read, and no more.
    signs = [batch for batch in sent if batch is not stored]
    assert signs == [control.IngestRequest(bytes_read=sign.bytes_read) for sign in signs]


@pytest.mark.slow
def test_a_batch_of_short_lines_is_within_its_bounds(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine: otherwise what waits goes before a batch is full.
    monkeypatch.setattr(sending, "BATCH_S", 3600.0)
    lines = (json.dumps({"query": f"q{n}", "positives": ["x"]}) for n in range(20_001))
    (tmp_path / "pairs_train.jsonl").write_text("\n".join(lines))
    assert fedctl("ingest", tmp_path, "--json").code == Exit.OK
    sent = [len(r.pairs) for r in daemon.asked if isinstance(r, control.IngestRequest)]
    assert sent == [10_000, 10_000, 1]


def test_a_batch_is_sent_when_the_one_before_it_is_stored(tmp_path: Path) -> None:
    """The next one is read meanwhile. In the midst of sending a refusal would be lost."""
    lines = (json.dumps({"id": str(n), "title": "t", "text": "word " * 40_000}) for n in range(50))
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    read: list[int] = []

    class Daemon:
        async def Ingest(
            self, batches: AsyncIterator[control.IngestRequest]
        ) -> AsyncIterator[control.IngestProgress]:
            await anext(batches)
            second = asyncio.ensure_future(anext(batches))
            await until(lambda: len(read) == 2)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not second.done()
            yield control.IngestProgress()
            await second
            yield control.IngestProgress()
            async for _ in batches:
                yield control.IngestProgress()

    def watch(so_far: sending.Ingested) -> None:
        if so_far.documents_read not in read:
            read.append(so_far.documents_read)

    sent = asyncio.run(sending.send(cast(Any, Daemon()), [tmp_path], watch))
    assert sent.documents_read == 50
    assert len(read) > 2


@pytest.mark.slow
def test_of_what_is_read_the_end_is_known_from_the_beginning(tmp_path: Path) -> None:
    """In bytes as they lie on the disk, also of what is packed or refused."""
    records = b"".join(
        json.dumps({"id": str(n), "title": "t", "text": f"{n} {'word ' * 50_000}"}).encode() + b"\n"
        for n in range(60)
    )
    (tmp_path / "a.jsonl").write_bytes(records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(records, compresslevel=0))
    (tmp_path / "c.bin").write_bytes(bytes(1000))
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl*"))
    so_far, seen = sending.Ingested(), list[int]()

    def watch(step: sending.Ingested) -> None:
        assert step.bytes_total == whole
        seen.append(step.bytes_read)

    async def sent() -> list[control.IngestRequest]:
        answers = asyncio.Queue[control.IngestProgress]()
        named, batches = sending.Naming(), []
        async for batch in sending._requests([tmp_path], so_far, watch, answers, named):
            batches.append(batch)
            answers.put_nowait(control.IngestProgress())
        return batches

    assert len(asyncio.run(sent())) > 6
    assert seen == sorted(seen) and seen[-1] == whole
    assert max(after - before for before, after in pairwise([0, *seen])) < whole / 3


@pytest.mark.slow
def test_tags_are_sent_with_each_document(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("One.")
    (tmp_path / "b.jsonl").write_text('{"id": "b", "text": "Two.", "tags": ["said", "wet"]}')

    def told(*words: str) -> list[list[str] | None]:
        daemon.asked.clear()
        assert fedctl("ingest", tmp_path, *words).code == 0
        documents = [one for request in daemon.asked for one in getattr(request, "documents", ())]
        return [[*one.tags.tags] if one.HasField("tags") else None for one in documents]

    assert told() == [None, ["said", "wet"]]
    assert told("--tag", "wet", "--tag", "very old") == [
        ["wet", "very old"],
        ["said", "wet", "very old"],
    ]
    assert told("--no-tags") == [[], ["said", "wet"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tag", "x" * 101], "a tag has 1 to 100 characters"),
        (["--tag", ""], "a tag has 1 to 100 characters"),
        (["--tag", "a\nb"], "a tag has 1 to 100 characters"),
        (["--tag", "x"] * 51, "a document has up to 50 tags"),
        (["--tag", "x", "--no-tags"], "say the opposite"),
    ],
)
def test_what_can_be_no_tag_is_refused(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, words: list[str], told: str
) -> None:
    ran = fedctl("ingest", tmp_path, *words)
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert daemon.asked == []
