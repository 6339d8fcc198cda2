"""Passages that say nearly the same are known as such as long as both are there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.catalogue import near_duplicates
from daemon.library.catalogue.minhash import Shingles, keys_of, likeness, shingles_of, words_of
from daemon.library.catalogue.near_duplicates import TOLD
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 200)
ROPE = " ".join(f"the {n}{n} rope is {n}{n} tarred" for n in "abcdefghijklmnopqrst") + " in 2019."
NEARLY = ROPE.replace("the cc rope", "the cc sail")
LAMP = "A lamp burns train oil."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "library.sqlite3"


@pytest.fixture
def library(path: Path) -> Iterator[Library]:
    with Library.open(path) as opened:
        yield opened


def put(library: Library, **texts: str) -> None:
    library.put_documents([Document(*(name, "", texts[name])) for name in texts], splitter=SPLITTER)
    library.near.mark(60.0)


def copies(library: Library, name: str) -> set[str]:
    """The documents that have one of its passages, nearly."""
    rows = [one.rowid for one in library.passages_of(name)]
    told = library.near.copies(dict.fromkeys(rows, ()))
    return {copy.document_id for one in told.values() for copy in one.first}


def rows_of(library: Library) -> dict[str, int]:
    return {one.document_id: one.rowid for one in library.passages()}


# ---- likeness and keys --------------------------------------------------------------

WORDS = st.lists(st.sampled_from([f"w{n}" for n in range(400)]), min_size=1, max_size=200)


@given(WORDS, WORDS)
def test_likeness_is_that_of_the_sets_of_three_words(one: list[str], other: list[str]) -> None:
    sets = [
        {tuple(words[at : at + 3]) for at in range(max(1, len(words) - 2))}
        for words in (one, other)
    ]
    exact = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert likeness(shingles_of(one), shingles_of(other)) == pytest.approx(exact)


@pytest.mark.parametrize("least", [0.9, 0.95])
def test_texts_that_are_nearly_the_same_have_a_key_in_common(least: float) -> None:
    """1 - (1 - 0.9^5)^8 = 0.999 of those that are just alike enough; hardly any of others."""
    rng = np.random.default_rng(3)
    met = far = 0
    for _ in range(1000):
        pool = rng.integers(1 << 63, size=400, dtype=np.uint64)
        shared = round(200 * least)
        apart = (200 - shared) // 2
        one, other = pool[: shared + apart], np.append(pool[:shared], pool[-apart:])
        assert likeness(np.sort(one), np.sort(other)) == pytest.approx(least, abs=0.01)
        met += not {*keys_of(one)}.isdisjoint(keys_of(other))
        far += not {*keys_of(one[:120])}.isdisjoint(keys_of(np.append(one[:30], pool[-90:])))
    assert met >= 990
    assert far <= 5, "of a seventh in common: 1 - (1 - 0.14^5)^8 = 0.0004"


def test_keys_are_the_same_at_all_times() -> None:
    """They are kept in libraries; other ones would find nothing there."""
    assert keys_of(shingles_of(words_of("Hemp rope is tarred.")))[:3] == KEYS


KEYS = [576143806, 319087204, 3333503802]


# ---- in a library -------------------------------------------------------------------


@pytest.mark.slow
def test_capitals_and_punctuation_make_no_difference_and_numbers_do(library: Library) -> None:
    other = ROPE.replace("2019", "2020")
    put(library, rope=ROPE, nearly=NEARLY, loud=ROPE.upper().replace(".", "!"), year=other)
    assert copies(library, "rope") == {"nearly", "loud"}
    assert copies(library, "year") == set(), "a person may look for that very year"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([ROPE, NEARLY, LAMP, "?!", "..."]), max_size=12))
def test_copies_are_told_of_each_other_in_any_order(texts: list[str]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Library.open(Path(folder, "library.sqlite3")) as library,
    ):
        put(library, **{f"d{n:02}": text for n, text in enumerate(texts)})
        leaders = library.near.leaders(list(rows_of(library).values()))
        rope = {
            leaders[row]
            for name, row in rows_of(library).items()
            if texts[int(name[1:])] in (ROPE, NEARLY)
        }
        assert len(rope) <= 1, "all of them are one group"


def test_at_most_some_are_named_and_all_are_counted(library: Library) -> None:
    put(library, **{f"d{n}": ROPE for n in range(TOLD + 3)})
    row = rows_of(library)["d2"]
    told = library.near.copies({row: [rows_of(library)["d6"]]})[row]
    assert told.count == TOLD + 2
    assert [one.document_id for one in told.first] == ["d6", "d0", "d1", "d3", "d4"]


def test_what_was_not_asked_for_is_not_told(library: Library) -> None:
    put(library, rope=ROPE, nearly=NEARLY, secret=ROPE)
    rows = rows_of(library)
    among = np.array([rows["rope"], rows["nearly"]], np.int64)
    told = library.near.copies({rows["rope"]: ()}, among)[rows["rope"]]
    assert ([one.document_id for one in told.first], told.count) == (["nearly"], 1)
    assert library.near.copies({rows["rope"]: ()}, among[:1]) == {}


@pytest.mark.slow
def test_a_template_of_many_costs_no_more_than_some_comparisons(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that differ in a fifth of their words, and an amount; of one there is a copy."""
    compared: list[object] = []

    def counted(*some: Shingles) -> float:
        compared.append(some)
        return likeness(*some)

    monkeypatch.setattr("daemon.library.catalogue.near_duplicates.likeness", counted)
    letter, letters = ROPE.split(), {}
    for n in range(300):
        words = [f"to{n}x" if at % 40 == 0 else word for at, word in enumerate(letter)]
        letters[f"sum{n}"] = " ".join(words)
        name = "".join("abcdefghij"[int(digit)] for digit in str(n))
        letters[f"name{n}"] = " ".join(
            name if at % 20 == 0 else word for at, word in enumerate(letter)
        )
    put(library, **letters)
    assert len(compared) <= near_duplicates._COMPARED * len(letters)
    put(library, again=letters["name299"], sum=letters["sum299"])
    assert copies(library, "again") == {"name299"}
    assert copies(library, "sum") == {"sum299"}


def test_what_goes_leaves_nothing_behind(library: Library, path: Path) -> None:
    put(library, rope=ROPE, lamp=LAMP)
    library.delete_documents(["rope", "lamp"])
    with closing(sqlite3.connect(path)) as file:
        for left in (
            "SELECT count(*) FROM near_duplicate",
            "SELECT count(*) FROM near_duplicate_key",
        ):
            assert file.execute(left).fetchone() == (0,)


def test_of_a_leader_that_goes_the_others_stay_together(library: Library) -> None:
    put(library, rope=ROPE, nearly=NEARLY, again=ROPE)
    library.delete_documents(["rope"])
    assert library.near.mark(60.0) == 2
    assert copies(library, "again") == {"nearly"}
    put(library, again=LAMP)
    assert copies(library, "nearly") == set(), "it says something else now"


@pytest.mark.slow
def test_a_library_of_an_older_program_is_looked_at_bit_by_bit(library: Library) -> None:
    texts = {f"d{n}": ROPE for n in range(near_duplicates._AT_ONCE + 1)}
    library.put_documents([Document(name, "", texts[name]) for name in texts], splitter=SPLITTER)
    assert library.near.leaders([1, 2]) == {1: 1, 2: 2}, "nobody has looked at them"
    assert library.near.mark(0.0) == near_duplicates._AT_ONCE, "time is up, and a part is done"
    assert library.near.mark(0.0) == 1
    assert library.near.mark(0.0) == 0


def _killed(path: Path) -> None:
    """Die in the midst of looking at the second passage: nothing is flushed or undone."""
    seen: list[str] = []

    def last(text: str) -> list[str]:
        seen.append(text)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return words_of(text)

    pytest.MonkeyPatch().setattr("daemon.library.catalogue.near_duplicates.words_of", last)
    with Library.open(path) as library:
        library.near.mark(60.0)


@pytest.mark.slow
def test_what_a_kill_cut_short_is_done_by_the_next(library: Library, path: Path) -> None:
    documents = [Document("rope", "", ROPE), Document("nearly", "", NEARLY)]
    library.put_documents(documents, splitter=SPLITTER)
    killed = multiprocessing.get_context("spawn").Process(target=_killed, args=(path,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert copies(library, "rope") == set()
    assert library.near.mark(60.0) == 2
    assert copies(library, "rope") == {"nearly"}
