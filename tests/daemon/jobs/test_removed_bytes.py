"""No byte of what was removed is in any file of a library, however its pages were rearranged.

SQLite leaves copies of rows where it moved them from. To see them takes texts of many sizes,
some of several pages of the file, that come, change and go in many batches.
"""

from __future__ import annotations

import random
import sqlite3
import string
from pathlib import Path

import numpy as np
import pytest

from daemon.jobs import learning
from daemon.library.catalogue.catalogue import _packed
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.schema import LibraryError
from daemon.library.store import Library

ENCODER = b"e" * 32
SPLITTER = SentenceSplitter(lambda text: len(text.split()), 80)
BATCH = 60


class Life:
    """A library in which documents come, change and go, as a seed draws it."""

    def __init__(self, seed: int, path: Path) -> None:
        self.path = path
        self.here: dict[str, Document] = {}
        self.before: list[Document] = []  # what was removed, or was another before
        self._chance = random.Random(seed)
        self._library = Library.open(path)

    def ingest(self, batches: int) -> None:
        for _ in range(batches):
            new = [f"c{self._chance.randrange(20)}/{self._word(16)}.txt" for _ in range(BATCH)]
            changed = self._drawn(BATCH // 4)
            self.before += [self.here[name] for name in changed]
            batch = [self._document(name) for name in [*new, *changed]]
            self._library.put_documents(batch, splitter=SPLITTER)
            self.here |= {one.id: one for one in batch}
            waiting = [rowid for rowid, _ in self._library.missing_features(ENCODER, 500)]
            vectors = np.full((len(waiting), 64), 0.5, np.float32)
            self._library.put_features(ENCODER, waiting, vectors)

    def remove(self, documents: int) -> None:
        names = self._drawn(documents)
        assert self._library.delete_documents(names).documents == len(names)
        self.before += [self.here.pop(name) for name in names]

    def clear(self) -> None:
        self._library.erasure.clear()

    def empty_log(self) -> None:
        """No more than that: what an earlier removal did."""
        self._library._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def found(self) -> set[str]:
        """What is in a file of documents that are gone, or of what others said before."""
        raw = [file.read_bytes() for file in self.path.parent.iterdir()]
        marks = [
            (f"{kind} of {one.id}", mark)
            for one in self.before
            for kind, mark in self._marks(one)
            if kind != "id" or one.id not in self.here
        ]
        return {what for what, mark in marks if any(mark in file for file in raw)}

    def close(self) -> None:
        self._library.close()

    @staticmethod
    def _marks(one: Document) -> list[tuple[str, bytes]]:
        text = one.text.encode()
        passages = [text[at : at + 40] for at in range(0, len(text), 400)]
        return [
            ("id", one.id.encode()),
            ("title", one.title.encode()),
            ("stored text", _packed(one.text)[:24]),
            *(("passage", some) for some in passages if len(some) == 40),
        ]

    def _document(self, name: str) -> Document:
        words = self._chance.choice([5, 5, 5, 20, 20, 60, 150, 400])
        if self._chance.random() < 0.2:  # many passages, and little when compressed
            sentence = " ".join(self._word(6) for _ in range(10))
            text = f"{sentence}. " * (words // 10 + 1)
        else:
            text = ". ".join(
                " ".join(self._word(self._chance.randint(2, 9)) for _ in range(10))
                for _ in range(words // 10 + 1)
            )
        return Document(name, f"Of {self._word(12)}", text, language="en")

    def _word(self, letters: int) -> str:
        return "".join(self._chance.choices(string.ascii_lowercase, k=letters))

    def _drawn(self, documents: int) -> list[str]:
        return self._chance.sample(sorted(self.here), min(documents, len(self.here)))


@pytest.mark.slow
def test_no_page_keeps_a_copy_of_what_was_removed(tmp_path: Path) -> None:
    """Nor of what a document said before it changed, once anything is removed."""
    left = set[str]()
    for seed in range(3):
        life = Life(seed, tmp_path / str(seed) / "library.sqlite3")
        for _ in range(2):
            life.ingest(8)
            for documents in (60, 60, 60, 100):
                life.remove(documents)
            life.empty_log()
            left |= life.found()
            life.clear()
            assert life.found() == set(), seed
        life.close()
    assert left, "SQLite has left no copies, so this test has seen nothing"


def test_what_could_not_be_cleared_is_cleared_by_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a removal is killed in between, or the disk is full: it is remembered."""
    monkeypatch.setattr("daemon.library.schema._BUSY_MS", 50)
    path = tmp_path / "state" / "library.sqlite3"
    rope, sail = Document("rope", "Rope", "Hemp is tarred."), Document("sail", "", "Flax is light.")
    with Library.open(path) as library:
        library.put_documents([rope, sail], splitter=SPLITTER)
        assert not library.erasure.owed()
        library.delete_documents(["rope"])
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LibraryError, match="is out of the library, and bytes of it may"):
                library.erasure.clear()
            other.execute("ROLLBACK")
        other.close()
        assert library.erasure.owed()
        token = library.erasure.last_removal()
    learning.erase_removed(path)
    with Library.open(path, read_only=True) as library:
        assert not library.erasure.owed()
        assert library.erasure.last_removal() == token, "an index that is made since is sound"
        assert library.known(["rope", "sail"]) == {"sail"}


def test_a_library_is_written_anew_beside_its_file(tmp_path: Path) -> None:
    """By way of a file that has texts in it, and no name: not in a temporary folder."""
    path = tmp_path / "it's here" / "library.sqlite3"
    with Library.open(path) as library:
        library.put_documents([Document("rope", "Rope", "Hemp is tarred.")], splitter=SPLITTER)
        library.delete_documents(["rope"])
        asked = list[str]()
        library._db.set_trace_callback(asked.append)
        library.erasure.clear()
        library._db.set_trace_callback(None)
        assert f"PRAGMA temp_store_directory = '{tmp_path}/it''s here'" in asked
        assert library._db.execute("PRAGMA temp_store_directory").fetchone() in (None, ("",))
        library.erasure.clear()  # nothing is to be done
        assert asked.count("VACUUM") == 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["library.sqlite3"]
