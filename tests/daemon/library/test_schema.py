"""The library's file: of which format it is, and how an older one is brought up to date."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.library.catalogue.filters import Filters
from daemon.library.catalogue.name_words import name_words
from daemon.library.contents import IngestCounts
from daemon.library.file_notes import UNFINISHED, Stamp
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import (
    Block,
    Document,
    Pair,
    Reference,
    Waiting,
    joined,
)
from daemon.library.schema import LibraryError, explained, transaction
from daemon.library.store import Library
from tests.daemon.state.test_versions import disk_of

TEXT, SPANS = joined(
    [
        Block("heading", "Of ropes"),
        Block("text", "Hemp rope is tarred. It lasts four winters."),
        Block("table", "Part\tTons\nSill\t2", 3, (0.1, 0.2, 0.5, 0.75)),
    ]
)


ROPE = [1, 2, 3, 4, 5]  # labels of its passages


def five_words() -> SentenceSplitter:
    return SentenceSplitter(lambda text: len(text.split()), 5)


FORMAT_1 = """
PRAGMA user_version = 1;
CREATE TABLE document (
  id TEXT PRIMARY KEY, title TEXT NOT NULL, split TEXT NOT NULL,
  digest BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE passage (
  rowid INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  document_id TEXT NOT NULL REFERENCES document(id) ON DELETE CASCADE,
  title TEXT NOT NULL, text TEXT NOT NULL,
  content BLOB NOT NULL
);
CREATE INDEX passage_document ON passage(document_id);
CREATE INDEX passage_content ON passage(content);
CREATE VIRTUAL TABLE passage_words USING fts5(
  title, text, content='passage', content_rowid='rowid', tokenize='porter unicode61'
);
CREATE TRIGGER passage_added AFTER INSERT ON passage BEGIN
  INSERT INTO passage_words(rowid, title, text) VALUES (new.rowid, new.title, new.text);
END;
CREATE TRIGGER passage_gone AFTER DELETE ON passage BEGIN
  INSERT INTO passage_words(passage_words, rowid, title, text)
  VALUES ('delete', old.rowid, old.title, old.text);
END;
CREATE TABLE feature (
  encoder BLOB NOT NULL, content BLOB NOT NULL, vector BLOB NOT NULL,
  PRIMARY KEY (encoder, content)
);
CREATE TABLE pair (
  rowid INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE,
  query TEXT NOT NULL, split TEXT NOT NULL
);
CREATE TABLE pair_positive (
  pair INTEGER NOT NULL REFERENCES pair(rowid) ON DELETE CASCADE,
  position INTEGER NOT NULL, document_id TEXT NOT NULL,
  PRIMARY KEY (pair, position)
) WITHOUT ROWID;
CREATE TABLE query_feature (
  encoder BLOB NOT NULL, content BLOB NOT NULL, vector BLOB NOT NULL,
  PRIMARY KEY (encoder, content)
);
INSERT INTO document VALUES ('rope', 'Rope', '', x'00');
INSERT INTO passage VALUES (7, 'rope@0', 'rope', 'Rope', 'Hemp rope is tarred.', x'AA');
INSERT INTO feature VALUES (CAST('encoder' AS BLOB), x'AA', x'0000803F');
"""


def test_a_library_of_format_1_is_brought_up_to_date(tmp_path: Path) -> None:
    """Made by hand as the first format was: no context, no place, words of title and text."""
    path = tmp_path / "library.sqlite3"
    splitter = SentenceSplitter(lambda text: len(text.split()), 50)
    sail = Document("sail", "Sail", "Flax makes a good sail.")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_1)
    with Library.open(path, read_only=True) as library:
        (passage,) = library.passages()
        assert (passage.text, passage.context, passage.page) == ("Hemp rope is tarred.", "", 0)
        assert passage.rowid == 7
        assert [rowid for rowid, _ in library.bm25("tarred hemp", 5)] == [7]
        labels, _ = library.features(b"encoder")
        assert labels.tolist() == [7]
        assert library.fitting(Filters(title="rope")) == [7]
    with Library.open(path) as library:
        library.put_documents([sail], splitter=splitter)
        assert library.delete_documents(["rope"]).passages == 1
        assert 7 not in [rowid for rowid, _ in library.bm25("tarred hemp", 5)]


@pytest.fixture
def format_2(tmp_path: Path) -> Path:
    """A file that the program of that format made: three documents, two pairs, features."""
    path = tmp_path / "library.sqlite3"
    packed = Path(__file__).with_name("format-2.sqlite3.gz")
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def test_a_library_of_format_2_is_brought_up_to_date(
    format_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.library.passages._RULE", "sentences-1")  # as it was cut by
    with Library.open(format_2, read_only=True) as library:
        assert_as_format_2_was(library)
        passages = library.passages()
    with Library.open(format_2) as library:
        handbook = Document(
            *("manuals/rope.pdf", "Rope Handbook 2019", TEXT, "train", SPANS, "/srv/rope.pdf"),
            *("Anna Meyer", "2019-05-31", "en"),
        )
        again = library.put_documents([handbook], splitter=five_words())
        assert again == IngestCounts(unchanged=1), "what it was is what it is"
        assert library.passages() == passages
        ((kept,), _) = library.whole_documents([handbook.id], 1)
        assert (kept.text, kept.spans) == (TEXT, SPANS), "from now on its text is kept, too"
        moved = replace(handbook, author="Ben Adler", tags=("old",))
        assert library.put_documents([moved], splitter=five_words()).changed == 1
        assert library.passages() == passages, "nothing is cut anew"
        assert library.fitting(Filters(author="adler", tags=("old",))) == ROPE
        assert library.near.mark(60.0) == len(passages), "which nobody had looked at"
        library.put_documents([], splitter=five_words(), waiting=[Waiting("scan.pdf", "1")])
        assert library.counts().waiting == 1


def assert_as_format_2_was(library: Library) -> None:
    rope, sail = library.documents("manuals/", "", 9)
    assert (rope.author, rope.date, rope.language, rope.tags) == (
        *("Anna Meyer", "2019-05-31", "en"), (),
    )  # fmt: skip
    assert library.fitting(Filters(author="meyer", since="2019-05-31", language="en")) == ROPE
    assert library.fitting(Filters(title="2019 handbook")) == ROPE
    assert len(library.features(b"e" * 32)[0]) == library.counts().passages == 8
    assert [pair.query for pair in library.pairs("train")] == ["Which rope?"]
    assert [rowid for rowid, _ in library.bm25("winters", 5)] == [4]
    ((handbook, lamp), taken) = library.whole_documents([rope.id, "gone", "lamp", sail.id], 80)
    assert taken == 3
    assert lamp.text == "A lamp burns train oil."
    assert handbook.text.split("\n\n") == [
        *("Hemp rope", "is tarred.", "It lasts", "four winters."), "Part\tTons\nSill\t2",
    ]  # fmt: skip
    assert [span.kind for span in handbook.spans] == ["text"] * 4 + ["table"]
    assert (handbook.spans[-1].page, handbook.spans[-1].place) == (3, (0.1, 0.2, 0.5, 0.75))


FORMAT_6 = """
ALTER TABLE passage DROP COLUMN ocr;
PRAGMA user_version = 6;
"""
FORMAT_5 = f"""
{FORMAT_6}
DROP TABLE pair_answer;
ALTER TABLE pair DROP COLUMN qtype;
ALTER TABLE pair DROP COLUMN reasoning;
PRAGMA user_version = 5;
"""
FORMAT_3 = """
DROP INDEX feature_content;
DROP INDEX query_feature_content;
ALTER TABLE removal DROP COLUMN rewritten;
DROP TABLE original;
PRAGMA user_version = 3;
DROP TABLE waiting;
DROP TRIGGER near_duplicate_added;
DROP TRIGGER near_duplicate_gone;
DROP TABLE near_duplicate;
DROP TABLE near_duplicate_key;
DROP INDEX pair_positive_document;
ALTER TABLE file ADD COLUMN lacks TEXT NOT NULL DEFAULT '';
INSERT INTO file VALUES ('papers', CAST('scan.pdf' AS BLOB), 9, 8, 7, x'AA', 'waits', 'ocr');
INSERT INTO file VALUES ('papers', CAST('rope.pdf' AS BLOB), 9, 8, 7, x'AA', '', '');
"""


def test_a_library_of_format_3_reads_again_what_waited_for_ocr(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    Library.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_5 + FORMAT_3)
    with Library.open(path) as library:
        notes = library.notes.of("papers")
        assert notes["scan.pdf"].stamp == UNFINISHED
        assert notes["scan.pdf"].digest == b"", "else it would be the same as before"
        assert notes["rope.pdf"].stamp == Stamp(9, 8, 7)
        assert library.counts().waiting == 0


def test_pairs_of_format_5_are_kept_and_can_say_a_right_answer(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    asked = Pair("What is rope of?", ("rope",), "test")
    with Library.open(path) as library:
        library.put_documents([Document("rope", "", "Of hemp.")], splitter=five_words())
        library.put_pairs([asked])
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_5)
    with Library.open(path) as library:
        assert library.pairs("test") == [asked]
        assert library.referenced("test") == ([], 1)
        said = replace(asked, reference=Reference(("Hemp",), "matter"))
        assert library.put_pairs([said]) == 0
        assert library.referenced("test") == ([said], 0)


def test_what_ocr_read_is_marked_when_a_file_of_format_6_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    text, before = joined([Block("text", "Hemp rope is tarred.", 1)])
    typed, scan = (Document(name, "", text, spans=before) for name in ("typed.pdf", "scan.pdf"))
    with Library.open(path) as library:
        library.put_documents([typed, scan], splitter=five_words())
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_6)
    scan = replace(scan, spans=(replace(before[0], ocr=True),))
    with Library.open(path) as library:
        assert not any(passage.ocr for passage in library.passages())
        told = library.put_documents([typed, scan], splitter=five_words())
        assert (told.unchanged, told.changed) == (1, 1)
        marked = {passage.document_id: passage.ocr for passage in library.passages()}
        assert marked == {"typed.pdf": False, "scan.pdf": True}
        assert library.whole_documents(["scan.pdf"], 1)[0][0].spans == scan.spans


def _killed(path: Path) -> None:
    """Open it, and die in the midst of the migration: nothing is flushed or undone."""
    seen: list[str] = []

    def last(name: str) -> frozenset[str]:
        seen.append(name)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return name_words(name)

    pytest.MonkeyPatch().setattr("daemon.library.schema.name_words", last)
    Library.open(path)


def test_a_migration_that_is_killed_is_done_by_the_next(format_2: Path) -> None:
    killed = multiprocessing.get_context("spawn").Process(target=_killed, args=(format_2,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    with sqlite3.connect(format_2) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    with Library.open(format_2, read_only=True) as library:
        assert_as_format_2_was(library)


def test_two_programs_may_migrate_at_once(format_2: Path) -> None:
    with ThreadPoolExecutor(4) as several:
        for library in several.map(lambda _: Library.open(format_2).close(), range(4)):
            assert library is None
    with Library.open(format_2) as library:
        assert_as_format_2_was(library)


def test_a_library_of_a_later_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    Library.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(LibraryError, match="format 99, this program reads 7: use the version"):
        Library.open(path)


def test_a_full_disk_is_told_though_sqlite_has_rolled_back_already(tmp_path: Path) -> None:
    """As it does by itself where it can't go on; who reads of damage would move the file away."""
    path = tmp_path / "library.sqlite3"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as database,
        pytest.raises(LibraryError, match="disk is full: free space on that disk"),
        explained(path),
        transaction(database),
    ):
        database.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")


# ---- a file that is lost ------------------------------------------------------------


LEFT = ("library.sqlite3-wal", "sentences.sqlite3", "index/of-a-version", f"originals/{'0' * 64}")


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_library_that_is_gone_is_not_begun_anew(
    tmp_path: Path, left: str, read_only: bool
) -> None:
    """Its documents would be gone, too, and nobody would have been told."""
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_bytes(b"made of what was in it")
    name = left.partition("/")[0]
    path = tmp_path / "library.sqlite3"
    with pytest.raises(LibraryError, match=f"gone, and there was one, .* left: {name}. Mount"):
        Library.open(path, read_only=read_only)
    assert not path.exists()
    (tmp_path / left).unlink()  # and an empty folder says nothing
    Library.open(path).close()


@pytest.mark.slow
def test_a_library_that_is_begun_on_a_full_disk_is_whole_or_not_there(tmp_path: Path) -> None:
    """At some sizes SQLite had it in its log alone, and no word said that this was lost."""
    told = 0
    for kib in range(40, 640, 24):
        with disk_of(f"{kib}k", tmp_path / f"disk{kib}") as disk:
            try:
                Library.open(disk / "library.sqlite3").close()
            except LibraryError as error:
                told += 1
                assert "free space on that disk" in str(error), kib
            larger = ["mount", "-o", "remount,size=4m", str(disk)]
            subprocess.run(larger, check=True)
            Library.open(disk / "library.sqlite3").close()
            assert [one.name for one in disk.iterdir()] == ["library.sqlite3"]
            with closing(sqlite3.connect(disk / "library.sqlite3")) as there:
                assert there.execute("PRAGMA integrity_check").fetchall() == [("ok",)], kib
    assert 0 < told < 25


def test_a_library_whose_schema_is_no_text_is_told_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    Library.open(path).close()
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b"CREATE TABLE waiting", b"CREATE \x9c\x9c\x9c\x9c\x9c waiting")
    )
    told = pytest.raises(LibraryError, match="if the file is damaged, put a backup back")
    with told, Library.open(path) as library:
        library.counts()


@pytest.mark.parametrize("read_only", [False, True])
def test_an_empty_file_is_no_new_library(tmp_path: Path, read_only: bool) -> None:
    """As a disk that was full, or a copy that broke off, leaves one."""
    path = tmp_path / "library.sqlite3"
    path.touch()
    with pytest.raises(LibraryError, match=r"is empty, and there was one, .*put a backup back"):
        Library.open(path, read_only=read_only)
    assert path.stat().st_size == 0


def test_no_library_is_begun_behind_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    path, disk = tmp_path / "library.sqlite3", tmp_path / "not-mounted" / "library.sqlite3"
    path.symlink_to(disk)
    with pytest.raises(LibraryError, match=r"leads to .*, which is gone: mount its disk"):
        Library.open(path)
    disk.parent.mkdir()
    Library.open(tmp_path / "another.sqlite3").close()
    (tmp_path / "another.sqlite3").rename(disk)
    Library.open(path).close()
