"""What a pair says of right answers: kept with it, given to who judges alone, gone with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.library.store import Library

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 50)
ROPE = Pair("What is rope of?", ("rope", "gone"), "test", Reference(("Hemp", "Jute"), "matter"))
SAIL = Pair("What is a sail of?", ("sail",), "test")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "state" / "library.sqlite3") as opened:
        documents = [Document(name, "", f"Of the {name}.") for name in ("rope", "sail")]
        opened.put_documents(documents, splitter=SPLITTER)
        opened.put_pairs([ROPE, SAIL])
        yield opened


def known(library: Library) -> list[Reference | None]:
    return [pair.reference for _, pair in library.pairs_naming("", None, 0, 9)]


def test_only_who_judges_answers_is_given_the_right_ones(library: Library) -> None:
    here = replace(ROPE, positives=("rope",))
    assert library.referenced("test") == ([here], 1)
    assert library.referenced("train") == ([], 0)
    assert library.pairs("test") == [replace(here, reference=None), SAIL]


def test_a_pair_that_comes_again_says_a_new_answer_or_nothing_of_it(library: Library) -> None:
    silent = replace(ROPE, reference=None, split="valid")
    assert library.put_pairs([silent]) == 0
    assert known(library) == [ROPE.reference, None], "it moved, and that is all"
    other = Reference(("Flax",), "", "recall")
    library.put_pairs([replace(ROPE, reference=other), replace(SAIL, reference=other)])
    assert known(library) == [other, other]
    library.put_pairs([replace(ROPE, reference=Reference())])
    assert known(library) == [None, other], "an empty list takes it back"


def test_no_file_has_a_right_answer_whose_pair_is_gone(library: Library, tmp_path: Path) -> None:
    """As of documents: not in a page that is free, not in the log of writes."""
    secret = Reference(tuple(f"Answer {n} is {'hemp ' * 300}" for n in range(9)), "of the kept")
    library.put_pairs([replace(ROPE, reference=secret)])
    marks = (b"Answer 7 is hemp", b"of the kept")
    files = tmp_path / "state"

    def found() -> set[bytes]:
        raw = [file.read_bytes() for file in files.iterdir()]
        return {mark for mark in marks if any(mark in one for one in raw)}

    assert found() == set(marks), "this search finds what is there"
    library.delete_documents(["rope"])
    library.erasure.clear()
    assert found() == set()
    assert known(library) == [None]
    assert library._db.execute("SELECT count(*) FROM pair_answer").fetchone() == (0,)
