"""The SQLite file of a library: its tables, how it is opened and asked for words, its errors."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from crypto.durable import whole
from daemon.library.catalogue.name_words import name_words
from daemon.library.catalogue.originals import folder_of
from daemon.state.folder import StateFolder

_SCHEMA_VERSION = 7
_BUSY_MS = 30_000
_MAPPED = 64 << 10  # bytes: twice what SQLite maps to share its log
_WORDS = """
CREATE VIRTUAL TABLE passage_words USING fts5(
  title, context, text, content='passage', content_rowid='rowid', tokenize='porter unicode61'
);
-- The full-text index holds no text of its own; SQLite asks for these triggers
-- to keep it in step (FTS5, "External Content Tables").
CREATE TRIGGER passage_added AFTER INSERT ON passage BEGIN
  INSERT INTO passage_words(rowid, title, context, text)
  VALUES (new.rowid, new.title, new.context, new.text);
END;
CREATE TRIGGER passage_gone AFTER DELETE ON passage BEGIN
  INSERT INTO passage_words(passage_words, rowid, title, context, text)
  VALUES ('delete', old.rowid, old.title, old.context, old.text);
END;
"""
# Drawn anew whenever documents are removed; one row, or none. What was derived from the
# library before may hold something of them.
_REMOVAL = "CREATE TABLE removal (token BLOB NOT NULL);\n"
# Whether the file was written anew since (1), and its log emptied (2): `daemon.library.erasure`.
# Not in formats before 5.
_REWRITTEN = "ALTER TABLE removal ADD COLUMN rewritten INTEGER NOT NULL DEFAULT 0;\n"
# Features go by their texts alone when documents do; not in formats before 5 either.
_FEATURES_OF = """
CREATE INDEX feature_content ON feature(content);
CREATE INDEX query_feature_content ON query_feature(content);
"""
_FILES = """
CREATE TABLE file (                    -- of watched folders, as it was when it was read
  collection TEXT NOT NULL,
  path BLOB NOT NULL,                  -- below the folder, as the file system has it
  size INTEGER NOT NULL,               -- -1: not read to its end
  mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
  digest BLOB NOT NULL,                -- SHA-256 of its content
  refused TEXT NOT NULL,               -- why it, or some of it, was not read; '': it was
  PRIMARY KEY (collection, path)
) WITHOUT ROWID;
CREATE TABLE file_document (
  collection TEXT NOT NULL, path BLOB NOT NULL, document_id TEXT NOT NULL,
  current INTEGER NOT NULL,            -- 0: of a reading before the one under way
  PRIMARY KEY (collection, path, document_id),
  FOREIGN KEY (collection, path) REFERENCES file(collection, path) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX file_document_id ON file_document(document_id);
"""
_PAIRS_OF = "CREATE INDEX pair_positive_document ON pair_positive(document_id);\n"
# What of a pair is right is known of some; not in formats before 6.
_REFERENCES = """
ALTER TABLE pair ADD COLUMN qtype TEXT NOT NULL DEFAULT '';
ALTER TABLE pair ADD COLUMN reasoning TEXT NOT NULL DEFAULT '';
CREATE TABLE pair_answer (             -- to compare answers with; each is right
  pair INTEGER NOT NULL REFERENCES pair(rowid) ON DELETE CASCADE,
  position INTEGER NOT NULL, answer TEXT NOT NULL,
  PRIMARY KEY (pair, position)
) WITHOUT ROWID;
"""
# Whether OCR read some of a passage. Of those that were here before it is not known: they are told
# as the others are, until their file is read again. Not in formats before 7.
_OCR = "ALTER TABLE passage ADD COLUMN ocr INTEGER NOT NULL DEFAULT 0;\n"
_WAITING = """
CREATE TABLE waiting (                 -- documents with pages that only OCR can read
  document_id TEXT PRIMARY KEY,        -- which need not be here: a scan may have no other page
  pages TEXT NOT NULL, source TEXT NOT NULL,
  cause TEXT NOT NULL,                 -- why OCR could not read them, once it was tried; else ''
  collection TEXT, path BLOB,          -- the watched file that it is; NULL: none
  FOREIGN KEY (collection, path) REFERENCES file(collection, path) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX waiting_file ON waiting(collection, path);
"""
_ORIGINALS = """
CREATE TABLE original (                -- of documents each of which is a file, where that is kept
  document_id TEXT PRIMARY KEY REFERENCES document(id) ON DELETE CASCADE,
  digest BLOB NOT NULL,                -- SHA-256 of its bytes, by which they lie in a folder
  size INTEGER NOT NULL                -- bytes
) WITHOUT ROWID;
CREATE INDEX original_digest ON original(digest);
"""
_CATALOGUE = """
CREATE TABLE facet (                   -- what documents are found by, beside their passages
  kind TEXT NOT NULL,                  -- title, author (a word of it), date, language, tag
  value TEXT NOT NULL,
  document_id TEXT NOT NULL REFERENCES document(id) ON DELETE CASCADE,
  PRIMARY KEY (kind, value, document_id)
) WITHOUT ROWID;
CREATE INDEX facet_document ON facet(document_id, kind);
CREATE TABLE document_text (           -- as it was read; none of a document of format 2
  document_id TEXT PRIMARY KEY REFERENCES document(id) ON DELETE CASCADE,
  text BLOB NOT NULL,                  -- UTF-8, compressed (zlib)
  spans BLOB NOT NULL                  -- its blocks: JSON, compressed; empty: all of it is text
);
"""
# `daemon.library.catalogue.near_duplicates`, which looks at what these triggers note.
_NEAR_DUPLICATES = """
CREATE TABLE near_duplicate (
  passage INTEGER PRIMARY KEY,
  leader INTEGER,                      -- of its group, maybe itself; NULL: not looked at yet
  keys TEXT NOT NULL DEFAULT '[]'      -- of a leader, by which others meet it: JSON
);
CREATE INDEX near_duplicate_leader ON near_duplicate(leader);
CREATE TABLE near_duplicate_key (
  key INTEGER NOT NULL, leader INTEGER NOT NULL, PRIMARY KEY (key, leader)
) WITHOUT ROWID;
CREATE TRIGGER near_duplicate_added AFTER INSERT ON passage BEGIN
  INSERT INTO near_duplicate(passage) VALUES (new.rowid);
END;
CREATE TRIGGER near_duplicate_gone AFTER DELETE ON passage BEGIN
  DELETE FROM near_duplicate_key WHERE (key, leader) IN (
    SELECT k.value, n.passage FROM near_duplicate n, json_each(n.keys) k
    WHERE n.passage = old.rowid
  );
  DELETE FROM near_duplicate WHERE passage = old.rowid;
  UPDATE near_duplicate SET leader = NULL WHERE leader = old.rowid;
END;
"""
_SCHEMA = f"""
CREATE TABLE document (
  id TEXT PRIMARY KEY, title TEXT NOT NULL, split TEXT NOT NULL,
  digest BLOB NOT NULL,                -- of all that is known of it and the way of splitting
  source TEXT NOT NULL DEFAULT '',     -- the file that it was; '': one of many in a file
  author TEXT NOT NULL DEFAULT '', date TEXT NOT NULL DEFAULT '',
  language TEXT NOT NULL DEFAULT ''    -- told by the file, or found in its text
) WITHOUT ROWID;
CREATE TABLE passage (
  rowid INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  document_id TEXT NOT NULL REFERENCES document(id) ON DELETE CASCADE,
  title TEXT NOT NULL, text TEXT NOT NULL,
  content BLOB NOT NULL,               -- SHA-256 of the text that is embedded
  context TEXT NOT NULL DEFAULT '',    -- what stands above it: a heading, a table's header
  kind TEXT NOT NULL DEFAULT 'text',   -- text, table, figure
  page INTEGER NOT NULL DEFAULT 0,     -- from 1; 0: no pages
  place TEXT,                          -- on the page: left, top, right, bottom, 0 to 1, as JSON
  begins INTEGER, ends INTEGER         -- characters of the text that was read; NULL: not known
);
CREATE INDEX passage_document ON passage(document_id);
CREATE INDEX passage_content ON passage(content);
{_WORDS}{_FILES}{_CATALOGUE}{_WAITING}{_ORIGINALS}{_NEAR_DUPLICATES}CREATE TABLE feature (
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
{_PAIRS_OF}CREATE TABLE query_feature (
  encoder BLOB NOT NULL, content BLOB NOT NULL, vector BLOB NOT NULL,
  PRIMARY KEY (encoder, content)
);
{_FEATURES_OF}{_REMOVAL}{_REWRITTEN}{_REFERENCES}{_OCR}"""


# From format 1, which knew of no context, no place and no watched folder.
_PLACES = """
DROP TRIGGER passage_added;
DROP TRIGGER passage_gone;
DROP TABLE passage_words;
ALTER TABLE document ADD COLUMN source TEXT NOT NULL DEFAULT '';
ALTER TABLE document ADD COLUMN author TEXT NOT NULL DEFAULT '';
ALTER TABLE document ADD COLUMN date TEXT NOT NULL DEFAULT '';
ALTER TABLE document ADD COLUMN language TEXT NOT NULL DEFAULT '';
ALTER TABLE passage ADD COLUMN context TEXT NOT NULL DEFAULT '';
ALTER TABLE passage ADD COLUMN kind TEXT NOT NULL DEFAULT 'text';
ALTER TABLE passage ADD COLUMN page INTEGER NOT NULL DEFAULT 0;
ALTER TABLE passage ADD COLUMN place TEXT;
ALTER TABLE passage ADD COLUMN begins INTEGER;
ALTER TABLE passage ADD COLUMN ends INTEGER;
"""
_REBUILD = "INSERT INTO passage_words(passage_words) VALUES ('rebuild');"
# From format 2, which had no catalogue. `words_of` is `name_words`, as JSON.
_ENTER = """
INSERT INTO facet
  SELECT 'title', word.value, d.id FROM document d, json_each(words_of(d.title)) word;
INSERT INTO facet
  SELECT 'author', word.value, d.id FROM document d, json_each(words_of(d.author)) word;
INSERT INTO facet SELECT 'date', date, id FROM document WHERE date != '';
INSERT INTO facet SELECT 'language', language, id FROM document WHERE language != '';
"""
_LACKS = "ALTER TABLE file ADD COLUMN lacks TEXT NOT NULL DEFAULT '';"
# From format 3, which said of a watched file that it waits, and not which pages: it is read again.
_READ_AGAIN = """
UPDATE file SET size = -1, mtime_ns = 0, inode = 0, digest = x'' WHERE lacks != '';
ALTER TABLE file DROP COLUMN lacks;
"""
_NOTE_ALL = "INSERT INTO near_duplicate(passage) SELECT rowid FROM passage;"
_STEPS = {
    1: f"{_PLACES} {_REMOVAL} {_WORDS} {_FILES} {_REBUILD}",
    2: f"{_LACKS} {_CATALOGUE} {_ENTER}",
    3: f"{_READ_AGAIN} {_WAITING} {_PAIRS_OF} {_ORIGINALS} {_NEAR_DUPLICATES} {_NOTE_ALL}",
    4: f"{_REWRITTEN} {_FEATURES_OF}",
    5: _REFERENCES,
    6: _OCR,
}


class LibraryError(Exception):
    """The library file can't be opened, read or written; the message says what to do."""


def open_database(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open the file at ``path``; unless ``read_only``, make it where there never was one.

    Raises LibraryError: missing (read only), lost, damaged, of another format, or an
    SQLite without FTS5.
    """
    with explained(path):
        if not (path.exists() and path.stat().st_size):
            if cause := _lost(path):
                raise LibraryError(cause)
            if read_only:
                raise LibraryError(f"no library at {path}: ingest documents first")
            _make(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
        try:
            _prepare(connection, path, read_only=read_only)
        except BaseException:
            connection.close()
            raise
    return connection


def in_memory() -> sqlite3.Connection:
    """An empty library that no file has, for a copy of a part of one; near duplicates unmarked.

    It may hold what is removed elsewhere: that is overwritten here, too.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None, timeout=_BUSY_MS / 1000)
    connection.executescript(
        f"{_SCHEMA} DROP TRIGGER near_duplicate_added; PRAGMA secure_delete = ON;"
    )
    return connection


def _lost(path: Path) -> str:
    """Why none is to be made where none is: there was one. Empty: there was not.

    None of ours is ever empty, and what is made of one is made behind it.
    """
    backup = "put a backup back (docs/install.md, A backup)"
    if path.is_symlink() and not path.exists():
        leads = f"library {path} leads to {path.readlink()}, which is gone"
        return f"{leads}: mount its disk, or {backup}"
    state = StateFolder(path.parent)
    made = (state.index, state.sentences, folder_of(path))
    beside = (path, path.with_name(f"{path.name}-wal"), *made)
    left = [one.name for one in beside if one.is_file() or (one.is_dir() and any(one.iterdir()))]
    if not left:
        return ""
    return (
        f"library {path} is {'empty' if path.exists() else 'gone'}, and there was one, of which "
        f"this is left: {', '.join(left)}. Mount its disk, or {backup}, and no part of another "
        "state beside it. To go on without its documents, move what is left away and ingest them "
        "again"
    )


def _make(path: Path) -> None:
    """The schema is on the disk, whole, before the file has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        suppress(FileExistsError),  # somebody was first
        whole(path, fresh=True) as unfinished,
        closing(sqlite3.connect(unfinished, isolation_level=None)) as connection,
    ):
        # Its log comes last: what is in the log alone when the disk is full would be lost with it,
        # for SQLite doesn't tell of a log that it could not empty when it is closed.
        connection.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
        )
        connection.execute("PRAGMA journal_mode = WAL")


def _prepare(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    """Pragmas, an older schema; LibraryError for one that this program doesn't know."""
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA foreign_keys = ON")
    version = _version(connection)
    if version in _STEPS:
        _migrate(path, version)
        version = _version(connection)
    if version != _SCHEMA_VERSION:
        raise LibraryError(
            f"{path} has library format {version}, this program reads {_SCHEMA_VERSION}: "
            "use the version of Hanse that wrote it, or go on without it (docs/install.md, "
            "A backup)"
        )
    if read_only:
        connection.execute("PRAGMA query_only = ON")
    else:
        # What is removed is overwritten: a person may have asked for that, for a reason. Copies
        # that SQLite has left of it elsewhere go by `daemon.library.erasure`.
        connection.execute("PRAGMA secure_delete = ON")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(path: Path, version: int) -> None:
    """Bring a file of that format up to date, all of it or nothing; others may do so, too."""
    steps = " ".join(step for since, step in _STEPS.items() if since >= version)
    with closing(sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)) as writing:
        writing.create_function("words_of", 1, _words_of, deterministic=True)
        try:
            writing.executescript(
                f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
            )
        except sqlite3.OperationalError:
            if writing.in_transaction:
                writing.execute("ROLLBACK")
            if _version(writing) != _SCHEMA_VERSION:  # else somebody was first
                raise


def _words_of(name: str) -> str:
    return json.dumps(sorted(name_words(name)))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; the write lock is taken at once, so nothing can deadlock."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled back already, on a full disk
            connection.execute("ROLLBACK")
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Translate SQLite's errors at the door: cause and remedy."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise LibraryError(_explanation(path, error)) from error


def _is_full(path: Path, error: Exception) -> bool:
    """SQLite calls it an I/O error where it has no room for what it maps."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    with suppress(OSError):
        return "disk I/O" in str(error) and shutil.disk_usage(path.parent).free < _MAPPED
    return False


def _explanation(path: Path, error: Exception) -> str:
    text = str(error)
    if "fts5" in text:
        remedy = "this Python's SQLite lacks FTS5; use a Python whose SQLite has it"
    elif "locked" in text:
        remedy = "another process holds it; wait for it to finish or end it"
    elif "full" in text or _is_full(path, error):
        remedy = "free space on that disk and try again"
    elif "readonly" in text or "unable to open" in text or isinstance(error, OSError):
        remedy = "check that the daemon's user may read and write the file and its folder"
    elif isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError):  # of its own schema
        remedy = (
            "if the file is damaged, put a backup back, or go on without it (docs/install.md, "
            "A backup)"
        )
    else:
        remedy = "see the cause"
    return f"library {path}: {text}: {remedy}"
