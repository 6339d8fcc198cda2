"""The ranking by words: of a large library a bounded part is looked at, and it is the best."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from tests.daemon.library.test_store import splitter

DATA = Path(os.environ.get("HANSE_DATA", Path(__file__).parents[4] / "shared" / "data"))
SITES = ("nhlbi", "niddk")
BOUND = "daemon.library.words._MOST_POSTINGS"


def filled(path: Path) -> Library:
    """200 lamps; the last 80 are of brass, every tenth burns, five hang, in titles or texts."""
    library = Library.open(path)
    documents = []
    for n in range(200):
        words = ["lamp", *["brass"] * (n >= 120), *["burns"] * (n % 10 == 0)]
        words += ["hangs"] * (1 + n % 3) * (n % 40 == 1) + [f"w{n % 7}"] * (n % 5)
        documents.append(Document(f"d{n:03}", "Hangs" if n == 81 else "", " ".join(words)))
    library.put_documents(documents, splitter=splitter(50))
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with filled(tmp_path_factory.mktemp("words") / "library.sqlite3") as library:
        yield library


def test_rare_words_find_and_all_words_score(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Which brass lamp hangs or burns?"
    whole = library.bm25(question, 500)
    assert len(whole) == 200
    monkeypatch.setattr(BOUND, 30)  # 5 hang and 20 burn; brass and lamps are too many
    some = library.bm25(question, 30)
    rare = {n + 1 for n in range(200) if n % 10 == 0 or n % 40 == 1}
    assert [rowid for rowid, _ in some] == [rowid for rowid, _ in whole if rowid in rare][:30]
    scores = dict(whole)
    for rowid, score in some:  # FTS5 gives a word of every passage a millionth
        assert score == pytest.approx(scores[rowid], abs=1e-5)
    assert {rowid for rowid, _ in whole[:23]} <= rare, "what has no rare word is behind"


def test_of_a_word_that_is_everywhere_the_latest_are_looked_at(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BOUND, 30)
    assert {rowid for rowid, _ in library.bm25("lamp", 30)} == set(range(171, 201))
    assert {rowid for rowid, _ in library.bm25("brass lamp", 30)} == set(range(171, 201))
    assert len(library.bm25("lamp", 40)) == 40, "no fewer than were asked for"


def test_a_word_that_is_rare_elsewhere_hides_nothing_that_is_wanted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five lamps hang, and none of those that are wanted; of these 20 burn, and 80 are of brass."""
    question = "Which brass lamp hangs or burns?"
    wanted = [rowid for rowid in range(1, 201) if rowid % 40 != 2]
    whole = library.bm25(question, 500, wanted)
    monkeypatch.setattr(BOUND, 4)
    assert len(library.bm25("hangs", 4)) == 4, "the bound is below what the rarest word finds"
    assert {rowid for rowid, _ in library.bm25("brass hangs", 4, wanted)} == set(range(197, 201))
    monkeypatch.setattr(BOUND, 30)
    some = library.bm25(question, 20, wanted)
    assert [rowid for rowid, _ in some] == [rowid for rowid, _ in whole][:20]
    assert library.bm25("hangs", 20, wanted) == []


def test_words_that_came_meanwhile_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    with filled(path) as writer, Library.open(path, read_only=True) as reader:
        assert reader.bm25("keel", 5) == writer.bm25("keel", 5) == []
        writer.put_documents([Document("keel", "", "An oak keel.")], splitter=splitter())
        assert len(reader.bm25("keel", 5)) == len(writer.bm25("keel", 5)) == 1
        writer.delete_documents(["keel"])
        assert reader.bm25("keel", 5) == writer.bm25("keel", 5) == []


def test_common_words_are_counted_anew_when_many_documents_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in all passages counts next to nothing, also by a number that is older than some."""
    monkeypatch.setattr(BOUND, 50)
    with filled(tmp_path / "library.sqlite3") as library:
        assert len(library.bm25("lamp", 500)) == 200
        for gone in (range(5), range(5, 100)):
            library.delete_documents([f"d{n:03}" for n in gone])
            assert max(score for _, score in library.bm25("brass lamp", 500)) < 1.5
        fresh = Library.open(tmp_path / "library.sqlite3", read_only=True)
        with fresh:
            assert library.bm25("brass lamp", 500) == fresh.bm25("brass lamp", 500)


def mean_reciprocal_rank(library: Library, pairs: list[tuple[str, set[str]]]) -> float:
    name_of = {passage.rowid: passage.document_id for passage in library.passages()}
    found = []
    for query, right in pairs:
        names = list(dict.fromkeys(name_of[rowid] for rowid, _ in library.bm25(query, 50)))
        places = [place for place, name in enumerate(names[:10], start=1) if name in right]
        found.append(1 / places[0] if places else 0.0)
    return float(np.mean(found))


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_on_real_questions_the_bound_costs_next_to_nothing(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound of a fifth of the passages, which is far below what a site of this size has."""
    folder = DATA / "medquad" / site
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: set HANSE_DATA to the folder of real data")
    packed = folder / "documents.jsonl.gz"
    plain = folder / "documents.jsonl"
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    read = [json.loads(line) for line in raw.splitlines()]
    documents = [Document(one["id"], one["title"], one["text"], one["split"]) for one in read]
    asked = (folder / "pairs_test.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [(one["query"], set(one["positives"])) for one in map(json.loads, asked)]
    with Library.open(tmp_path / "library.sqlite3") as library:
        library.put_documents(
            documents, splitter=SentenceSplitter(lambda text: len(text.split()), 500)
        )
        whole = mean_reciprocal_rank(library, pairs)
        monkeypatch.setattr(BOUND, len(documents) // 5)
        assert abs(mean_reciprocal_rank(library, pairs) - whole) <= 0.005
    assert whole > 0.4


def test_common_words_are_counted_before_anybody_asks(tmp_path: Path) -> None:
    with filled(tmp_path / "library.sqlite3") as library:
        asked = "Which brass lamp hangs or burns?"
        expected = library.bm25(asked, 9)
    with Library.open(tmp_path / "library.sqlite3", read_only=True) as library:
        library.count_common_words(60.0)
        assert {"lamp", "brass", "burns", "hangs"} <= library._words._counts.keys()
        assert library.bm25(asked, 9) == expected


@pytest.mark.parametrize("documents", [0, 1])
def test_a_small_library_has_next_to_nothing_to_count(tmp_path: Path, documents: int) -> None:
    with Library.open(tmp_path / "library.sqlite3") as library:
        some = [Document(f"d{n}", "", "The lamp hangs.") for n in range(documents)]
        library.put_documents(some, splitter=splitter(50))
        library.count_common_words(60.0)
        assert not library._words._counts
        assert len(library.bm25("lamp", 9)) == documents
