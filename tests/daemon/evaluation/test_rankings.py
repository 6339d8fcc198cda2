"""Rankings side by side: what is judged is what people get, weighed by a site's own pairs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from crypto.arrays import Float32
from daemon.evaluation.rankings import RANKINGS, Questions, found_by, judged_rankings, weigh
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Pair
from daemon.library.schema import LibraryError
from daemon.library.search import (
    TITLE_WEIGHTS,
    USUAL_WEIGHTS,
    WORDS_WEIGHTS,
    RankingWeights,
    search,
)
from daemon.library.store import Library
from daemon.library.titles import Titles
from tests.daemon.library.test_search import bag_of_words, indexed

YARDS = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gorse", "hazel", "ivy", "juniper")
MATTERS = ("rope", "sails", "lamps", "pumps", "anchors", "paint")
# No passage says whose it is, and each matter is told of by all yards alike.
DOCUMENTS = [
    Document(f"{yard}/{matter}", f"{yard.upper()}_{2000 + n}", f"The {matter} are seen to at dawn.")
    for n, yard in enumerate(YARDS)
    for matter in MATTERS
]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        opened.put_documents(DOCUMENTS, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        yield opened


def asked_by_name(count: int = 24) -> list[Pair]:
    """Each names a yard and a matter; what is embedded of it says the matter alone."""
    pairs = [
        Pair(f"When are {matter} seen to at {yard}?", (f"{yard}/{matter}",), "valid")
        for matter in MATTERS
        for yard in YARDS
    ]
    return pairs[:: len(pairs) // count][:count]


def vectors_of(pairs: list[Pair]) -> Float32:
    return bag_of_words([pair.query.split(" at ")[0] for pair in pairs])


def test_what_is_judged_is_what_people_get(library: Library) -> None:
    index, titles, pairs = indexed(library), Titles(library.titles()), asked_by_name()
    vectors, weights = vectors_of(pairs), RankingWeights(words=0.25, title=0.2)
    found = found_by(library, index, titles, pairs, vectors)
    judged = RANKINGS["fused"](Questions(found, None, weights))
    assert judged is not None
    for pair, vector, labels in zip(pairs, vectors, judged, strict=True):
        met = search(library, index, titles, pair.query, vector, 50, weights)
        assert [ranked.passage.rowid for ranked in met] == labels[:50]


def test_titles_count_where_questions_name_documents(library: Library) -> None:
    index, titles, pairs = indexed(library), Titles(library.titles()), asked_by_name()
    found = found_by(library, index, titles, pairs, vectors_of(pairs))
    chosen = weigh(library, pairs, found.met)
    assert (chosen.title > 0.0, chosen.title in TITLE_WEIGHTS) == (True, True)
    assert chosen.words in WORDS_WEIGHTS
    means = {
        weights: judged_rankings(library, pairs, Questions(found, None, weights))["fused"].mean(
            "mrr@10"
        )
        for weights in (RankingWeights(0.0, chosen.title), RankingWeights(0.0, 0.0))
    }
    assert means[RankingWeights(0.0, chosen.title)] > means[RankingWeights(0.0, 0.0)] + 0.1


def test_titles_that_mislead_are_made_to_count_nothing(library: Library) -> None:
    """Each question names a yard and is answered by another one's document."""
    index, titles = indexed(library), Titles(library.titles())
    pairs = [
        Pair(pair.query.replace(yard, YARDS[(n + 5) % 10]), pair.positives, "valid")
        for pair in asked_by_name()
        for n, yard in enumerate(YARDS)
        if pair.positives[0].startswith(yard)
    ]
    vectors = bag_of_words([DOCUMENTS_BY_ID[pair.positives[0]] for pair in pairs])
    found = found_by(library, index, titles, pairs, vectors)
    assert weigh(library, pairs, found.met).title == 0.0


DOCUMENTS_BY_ID = {one.id: f"{one.title}\n{one.text}" for one in DOCUMENTS}


def test_where_titles_say_nothing_their_weight_is_the_usual(library: Library) -> None:
    index, pairs = indexed(library), asked_by_name()
    found = found_by(library, index, Titles(()), pairs, vectors_of(pairs))
    assert weigh(library, pairs, found.met).title == USUAL_WEIGHTS.title


def test_rankings_are_judged_without_reading_a_text(library: Library) -> None:
    index, titles, pairs = indexed(library), Titles(library.titles()), asked_by_name()
    found = found_by(library, index, titles, pairs, vectors_of(pairs))

    def no_text(action: int, table: str | None, column: str | None, *_: str | None) -> int:
        is_text = (action, table, column) == (sqlite3.SQLITE_READ, "passage", "text")
        return sqlite3.SQLITE_DENY if is_text else sqlite3.SQLITE_OK

    library._db.set_authorizer(no_text)
    with pytest.raises(LibraryError, match=r"passage\.text"):
        library.passages()
    weigh(library, pairs, found.met)
    assert judged_rankings(library, pairs, Questions(found, None, USUAL_WEIGHTS))
