"""The library's file: of which format it is, and how an older one is brought up to date."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.schema import LibraryError
from daemon.library.store import Library

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
    with Library.open(path) as library:
        library.put_documents([sail], splitter=splitter)
        assert library.delete_documents(["rope"]).passages == 1
        assert 7 not in [rowid for rowid, _ in library.bm25("tarred hemp", 5)]


def test_a_library_of_a_later_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    Library.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(LibraryError, match="format 99, this program reads 2: use the version"):
        Library.open(path)
