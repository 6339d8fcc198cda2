"""The library: what goes in comes out, changes leave nothing behind, damage is explained."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from daemon.library.contents import (
    IngestCounts,
    LibraryCounts,
    RemovedCounts,
    StoredDocument,
    embedding_text,
)
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Block, Document, Pair, joined
from daemon.library.schema import LibraryError
from daemon.library.store import Library

ENCODER, OTHER = b"e" * 32, b"o" * 32

ROPE = Document("rope", "Rope", "Hemp rope is tarred. It lasts four winters.", "train")
SAIL = Document("sail", "Sails", "Flax makes a light sail. Hemp makes a heavy one.")
LAMP = Document("lamp", "", "A lamp burns train oil.", "test")


def splitter(budget: int = 5) -> SentenceSplitter:
    return SentenceSplitter(lambda text: len(text.split()), budget)


def vectors(count: int, start: float = 0.0) -> NDArray[np.float32]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4) + np.float32(start)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "library.sqlite3"


@pytest.fixture
def library(path: Path) -> Iterator[Library]:
    with Library.open(path) as opened:
        opened.put_documents([ROPE, SAIL, LAMP], splitter=splitter())
        yield opened


def texts(library: Library) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for passage in library.passages():
        found.setdefault(passage.document_id, []).append(passage.text)
    return found


def rows(path: Path, table: str) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608


# ---- documents and passages ---------------------------------------------------


def test_documents_come_back_as_passages(library: Library) -> None:
    assert texts(library) == {
        "rope": ["Hemp rope is tarred.", "It lasts four winters."],
        "sail": ["Flax makes a light sail.", "Hemp makes a heavy one."],
        "lamp": ["A lamp burns train oil."],
    }
    first = library.passages()[0]
    assert library.passages_by_rowid([first.rowid]) == {first.rowid: first}
    assert first.embedding_text == "Rope\nHemp rope is tarred."
    assert library.counts() == LibraryCounts(documents=3, passages=5)


def test_the_same_again_is_free(library: Library, path: Path) -> None:
    before = (library.passages(), library.content_digest())
    assert library.put_documents([ROPE, SAIL], splitter=splitter()) == IngestCounts(unchanged=2)
    assert (library.passages(), library.content_digest()) == before


def test_a_changed_document_replaces_its_passages_and_only_those(library: Library) -> None:
    before = {passage.rowid: passage for passage in library.passages()}
    changed = Document("rope", "Rope", "Hemp rope is tarred. It lasts six winters.", "train")
    counts = library.put_documents([changed, SAIL], splitter=splitter())
    assert counts == IngestCounts(changed=1, unchanged=1)
    assert texts(library)["rope"] == ["Hemp rope is tarred.", "It lasts six winters."]
    after = {passage.rowid: passage for passage in library.passages()}
    old = {rowid for rowid, passage in before.items() if passage.document_id == "rope"}
    # A label in an older index must never come to name another passage.
    assert not old & after.keys()
    assert {p.id for p in before.values()} & {p.id for p in after.values() if "rope" in p.id}
    assert library.bm25("four", 5) == []
    assert len(library.bm25("six", 5)) == 1


def test_labels_are_not_used_again_after_everything_was_deleted(library: Library) -> None:
    highest = max(passage.rowid for passage in library.passages())
    assert library.delete_documents(["rope", "sail", "lamp", "nobody"]).documents == 3
    library.put_documents([ROPE], splitter=splitter())
    assert min(passage.rowid for passage in library.passages()) > highest


def test_a_pair_goes_with_the_last_document_that_answers_it(library: Library, path: Path) -> None:
    library.put_pairs(
        [
            Pair("Which rope?", ("rope",)),
            Pair("Which rope?", ("lamp",)),
            Pair("Which sail?", ("sail", "rope")),
            Pair("Which mast?", ("still to come",)),
        ]
    )
    library.put_query_features(ENCODER, ["Which rope?", "Which sail?"], vectors(2))
    assert library.delete_documents(["rope", "nobody"]) == RemovedCounts(1, 2, 1)
    assert [pair.query for pair in library.pairs("train")] == ["Which rope?", "Which sail?"]
    assert rows(path, "query_feature") == 2, "one of them is asked of another document still"
    assert library.delete_documents(["lamp"]) == RemovedCounts(1, 1, 1)
    assert rows(path, "query_feature") == 1
    assert rows(path, "pair") == 2
    assert library.delete_documents(["lamp"]) == RemovedCounts()


def test_nothing_of_a_removed_document_is_in_any_file(library: Library, path: Path) -> None:
    """Not in a page that is free, not among the words, and not in the log of writes."""
    secret = Document("secret", "Zyzzogeton", "The quaxolith was moved behind the green door.")
    words = [b"zyzzogeton", b"quaxolith", b"behind the green"]

    def found() -> set[bytes]:
        files = [file.read_bytes().lower() for file in path.parent.iterdir()]
        return {word for word in words for raw in files if word in raw}

    library.put_documents([secret], splitter=splitter())
    library.put_pairs([Pair("Where is the quaxolith?", ("secret",))])
    assert found() == set(words)
    library.delete_documents(["secret"])
    library.erasure.clear()
    assert found() == set()
    assert library.bm25("hemp", 5) != []


def test_the_log_is_not_emptied_under_a_reader(
    library: Library, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.library.schema._BUSY_MS", 50)
    with Library.open(path) as writer, Library.open(path, read_only=True) as reader:
        pages = reader._db.execute("SELECT id FROM passage")
        pages.fetchone()  # of what was there then
        writer.delete_documents(["rope"])
        with pytest.raises(LibraryError, match="leaves the log when nobody does any more"):
            writer.erasure.clear()
        assert writer.erasure.owed(), "it is in a file still, and who asks is told"
        pages.close()
        asked = list[str]()
        writer._db.set_trace_callback(asked.append)
        writer.erasure.clear()
        assert "VACUUM" not in asked, "the file is written anew already"
        assert not reader.erasure.owed()


def test_documents_are_listed_by_id_page_by_page(library: Library) -> None:
    library.put_documents([Document("a_b/one", "One", "Text."), Document("a%b/two", "", "Text.")],
                          splitter=splitter())  # fmt: skip
    first = library.documents("", "", 3)
    assert [one.id for one in first] == ["a%b/two", "a_b/one", "lamp"]
    assert library.documents("", "lamp", 3) == [
        StoredDocument("rope", "Rope", "train", 2),
        StoredDocument("sail", "Sails", "", 2),
    ]
    assert [one.id for one in library.documents("a_b/", "", 9)] == ["a_b/one"], "as it is written"
    assert library.documents("x", "", 9) == []
    assert [p.text for p in library.passages_of("rope")] == texts(library)["rope"]


def test_a_passage_is_told_with_those_beside_it_in_its_document(library: Library) -> None:
    library.put_documents([replace(ROPE, text=ROPE.text + " Then it rots.")], splitter=splitter())
    first, second, third = (one.id for one in library.passages_of("rope"))
    for wanted, beside in ((first, ("", second)), (second, (first, third)), (third, (second, ""))):
        passage, *neighbours = library.passage(wanted)
        assert passage is not None
        assert (passage.id, tuple(neighbours)) == (wanted, beside)
    assert library.passage("rope") == (None, "", "")


def test_another_budget_splits_anew(library: Library) -> None:
    assert library.put_documents([ROPE], splitter=splitter(50)) == IngestCounts(changed=1)
    assert texts(library)["rope"] == [ROPE.text]


def test_of_two_documents_with_one_id_the_last_stands(library: Library) -> None:
    twice = [Document("x", "", "First."), Document("x", "", "Second.")]
    assert library.put_documents(twice, splitter=splitter()) == IngestCounts(new=1, changed=1)
    assert texts(library)["x"] == ["Second."]


def test_an_error_halfway_leaves_everything_as_it_was(library: Library) -> None:
    def documents() -> Iterator[Document]:
        yield Document("rope", "Rope", "Wire rope rusts.")
        raise RuntimeError("the stream broke")

    before = library.passages()
    with pytest.raises(RuntimeError, match="the stream broke"):
        library.put_documents(documents(), splitter=splitter())
    assert library.passages() == before


def test_passages_of_a_split_and_documents_without_one_count_as_train(library: Library) -> None:
    assert {p.document_id for p in library.passages(split="train")} == {"rope", "sail"}
    assert {p.document_id for p in library.passages(split="test")} == {"lamp"}


def test_passages_that_are_gone_are_left_out(library: Library) -> None:
    first, second = [passage.rowid for passage in library.passages()][:2]
    assert list(library.passages_by_rowid([first, 999, second])) == [first, second]


def test_the_content_digest_follows_the_passages(library: Library) -> None:
    before = library.content_digest()
    library.put_pairs([Pair("Which oil?", ("lamp",))])
    assert library.content_digest() == before
    library.put_documents([Document("new", "", "Oakum.")], splitter=splitter())
    assert library.content_digest() != before


@pytest.mark.parametrize(
    ("title", "text", "embedded"),
    [
        ("", "A text.", "A text."),
        ("Rope", "Hemp.", "Rope\nHemp."),
        ("Rope", "Rope is hemp.", "Rope is hemp."),
    ],
)
def test_the_title_is_embedded_where_the_text_lacks_it(
    title: str, text: str, embedded: str
) -> None:
    assert embedding_text(title, text) == embedded


# ---- features -----------------------------------------------------------------


def test_features_are_asked_for_once_and_come_back(library: Library) -> None:
    missing = library.missing_features(ENCODER, 100)
    assert missing[0][1] == "Rope\nHemp rope is tarred."
    assert len(library.missing_features(ENCODER, 2)) == 2
    labels = [rowid for rowid, _ in missing]
    library.put_features(ENCODER, labels, vectors(5))
    assert library.missing_features(ENCODER, 100) == []
    assert len(library.missing_features(OTHER, 100)) == 5
    found, features = library.features(ENCODER)
    assert found.tolist() == labels
    assert (features == vectors(5)).all()
    assert features.dtype == np.float32


def test_equal_texts_are_encoded_once(library: Library) -> None:
    library.put_documents([Document("copy", LAMP.title, LAMP.text)], splitter=splitter())
    missing = library.missing_features(ENCODER, 100)
    assert len(missing) == 5
    library.put_features(ENCODER, [rowid for rowid, _ in missing], vectors(5))
    labels, features = library.features(ENCODER)
    assert len(labels) == 6
    assert (features[4] == features[5]).all()


def test_text_that_stays_in_a_changed_document_keeps_its_feature(
    library: Library, path: Path
) -> None:
    missing = library.missing_features(ENCODER, 100)
    library.put_features(ENCODER, [rowid for rowid, _ in missing], vectors(5))
    changed = Document("rope", "Rope", "Hemp rope is tarred. It lasts six winters.", "train")
    library.put_documents([changed], splitter=splitter())
    assert [text for _, text in library.missing_features(ENCODER, 9)] == [
        "Rope\nIt lasts six winters."
    ]
    assert rows(path, "feature") == 4


def test_deletion_leaves_no_feature_behind_but_those_of_equal_texts(
    library: Library, path: Path
) -> None:
    library.put_documents([Document("copy", LAMP.title, LAMP.text)], splitter=splitter())
    missing = library.missing_features(ENCODER, 100)
    library.put_features(ENCODER, [rowid for rowid, _ in missing], vectors(5))
    library.delete_documents(["rope", "sail", "lamp"])
    assert rows(path, "feature") == 1
    library.delete_documents(["copy"])
    assert rows(path, "feature") == rows(path, "passage") == rows(path, "document") == 0
    assert library.features(ENCODER)[1].shape == (0, 0)


def test_features_of_passages_that_went_meanwhile_are_passed_over(
    library: Library, path: Path
) -> None:
    labels = [rowid for rowid, _ in library.missing_features(ENCODER, 100)]
    library.delete_documents(["rope"])
    library.put_features(ENCODER, labels, vectors(5))
    assert rows(path, "feature") == 3


def test_features_of_another_count_are_refused(library: Library) -> None:
    with pytest.raises(LibraryError, match=r"expected 2 rows of features, got shape \(3, 4\)"):
        library.put_features(ENCODER, [1, 2], vectors(3))


def test_query_features_come_back_by_query(library: Library) -> None:
    library.put_query_features(ENCODER, ["why?", "how?"], vectors(2))
    found = library.query_features(ENCODER, ["how?", "when?", "why?"])
    assert set(found) == {"how?", "why?"}
    assert found["how?"].tolist() == [4, 5, 6, 7]
    assert library.query_features(OTHER, ["how?"]) == {}


# ---- pairs ----------------------------------------------------------------------


def test_pairs_count_once_and_only_with_a_document_that_is_here(library: Library) -> None:
    given_pairs = [
        Pair("How long does rope last?", ("rope", "absent"), "train"),
        Pair("Which oil?", ("lamp",), "test"),
        Pair("Whose?", ("absent",), "test"),
    ]
    assert library.put_pairs(given_pairs) == 3
    assert library.put_pairs(given_pairs) == 0
    assert library.pairs("train") == [Pair("How long does rope last?", ("rope",), "train")]
    assert library.pairs("test") == [Pair("Which oil?", ("lamp",), "test")]
    assert library.counts() == LibraryCounts(3, 5, pairs_train=1, pairs_valid=0, pairs_test=1)
    library.put_documents([Document("absent", "", "Here now.")], splitter=splitter())
    assert len(library.pairs("test")) == 2


def test_a_wrong_id_is_seen_and_what_it_may_mean(library: Library) -> None:
    files = [Document(name, "", "Text.") for name in ("a/lift.txt", "door.md", "100%/x_y.txt")]
    library.put_documents(files, splitter=splitter())
    assert library.known(["rope", "lift", "door.md", "rope"]) == {"rope", "door.md"}
    assert library.known([]) == set()
    assert library.similar("lift") == library.similar("lift.txt") == "a/lift.txt"
    assert library.similar("manuals/door") == library.similar("door") == "door.md"
    assert library.similar("xyy") == library.similar("%") == library.similar("") == ""
    assert library.similar("x_y") == "100%/x_y.txt"


def test_a_pair_is_never_both_learned_from_and_tested_on(library: Library) -> None:
    library.put_pairs([Pair("Which oil?", ("lamp",), "train")])
    assert library.put_pairs([Pair("Which oil?", ("lamp",), "test")]) == 0
    assert library.pairs("train") == []
    assert len(library.pairs("test")) == 1


# ---- words ------------------------------------------------------------------------


def test_words_are_found_in_title_and_text_whatever_their_ending(library: Library) -> None:
    first = library.passages()[0]
    assert library.bm25("tarring", 5)[0][0] == first.rowid
    ranked = library.bm25("Which rope is tarred?", 5)
    assert ranked[0][0] == first.rowid
    assert [score for _, score in ranked] == sorted((s for _, s in ranked), reverse=True)
    assert len(library.bm25("hemp", 1)) == 1


def test_the_words_that_a_passage_has_are_told_as_they_were_asked(library: Library) -> None:
    [lamp] = [one.rowid for one in library.passages() if one.document_id == "lamp"]
    first = min(one.rowid for one in library.passages() if one.document_id == "rope")
    found = library.words_in('Burning ropes, "train" OR oils?', [lamp, first])
    assert found == {lamp: ["burning", "train", "oils"], first: ["ropes"]}, "titles count, too"
    assert library.words_in("rope", []) == {}
    assert library.words_in("?!", [lamp]) == {lamp: []}
    assert (lamp, "lamp", "") in library.titles()
    assert (first, "rope", "Rope") in library.titles()


@pytest.mark.parametrize(
    "query",
    ["", "   ", "?!", '"', "__", "\0", "\ud800", "hemp\0", "*", "()", "👩‍🚒"],
)
def test_a_query_without_a_known_word_finds_nothing_or_hemp(library: Library, query: str) -> None:
    assert len(library.bm25(query, 5)) == (2 if "hemp" in query else 0)


@pytest.mark.parametrize(
    "query",
    [
        'hemp" OR title:"',
        "NEAR(hemp)",
        "title:hemp",
        "hemp*",
        "-hemp",
        "^hemp",
        '"hemp',
        "hemp); DROP TABLE passage; --",
        "AND hemp NOT",
        "hemp " * 5000,
        "hemp " + " ".join(f"w{n}" for n in range(5000)),
    ],
)
def test_a_query_is_words_and_never_a_language(library: Library, query: str) -> None:
    assert len(library.bm25(query, 5)) == 2
    assert library.counts().passages == 5


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with Library.open(tmp_path_factory.mktemp("standing") / "library.sqlite3") as library:
        library.put_documents([ROPE, SAIL, LAMP], splitter=splitter())
        yield library


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(), st.text(alphabet="\"*^-+:(){}[]'\\ ANDORTNEAhemp_\0")))
@example("\ud800\udfff")
@example("ｈｅｍｐ ①②")
def test_any_text_is_a_valid_query(standing: Library, query: str) -> None:
    assert len(standing.bm25(query, 10)) <= 5


# ---- the file ---------------------------------------------------------------------


def test_what_is_not_a_library_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    path.write_bytes(b"not a database, but long enough to be taken for one. " * 40)
    with pytest.raises(LibraryError, match=r"not a database: .*go on without it"):
        Library.open(path)
    assert path.read_bytes().startswith(b"not a database")


@pytest.mark.slow
def test_a_damaged_library_is_explained(library: Library, path: Path) -> None:
    library.put_documents(
        [Document(f"d{n}", "", f"Word{n} " * 200) for n in range(200)], splitter=splitter(500)
    )
    library.close()
    raw = bytearray(path.read_bytes())
    raw[4096 * 8 :] = b"\xff" * (len(raw) - 4096 * 8)
    path.write_bytes(raw)
    with pytest.raises(LibraryError, match="go on without it"), Library.open(path) as damaged:
        damaged.passages()
        damaged.bm25("word1", 5)


def test_a_file_of_the_same_name_from_elsewhere_replaces_nothing_unasked(
    library: Library,
) -> None:
    first = Document("rules.txt", "", "No fires.", source="/a/rules.txt", author="Harms")
    other = Document("rules.txt", "", "No dogs.", source="/b/rules.txt", date="2024-05-01")
    assert library.put_documents([first], splitter=splitter()).new == 1
    counts = library.put_documents([other, SAIL], splitter=splitter())
    assert (counts.changed, counts.unchanged, len(counts.refused)) == (0, 1, 1)
    assert "rules.txt is here from /a/rules.txt" in counts.refused[0]
    (kept,) = library.documents("rules.txt", "", 1)
    assert (kept.source, kept.author, kept.date) == ("/a/rules.txt", "Harms", "")
    moved = replace(first, source="/b/rules.txt")
    counts = library.put_documents([moved], splitter=splitter())
    assert (counts.unchanged, counts.refused, counts.elsewhere) == (1, (), ("rules.txt",))
    for said in ({"author": "Eve"}, {"date": "2024-05-02"}, {"tags": ("void",)}):
        for lie in (replace(moved, **said), replace(moved, source="", **said)):
            counts = library.put_documents([lie], splitter=splitter())
            assert (counts.changed, len(counts.refused)) == (0, 1), lie
    (kept,) = library.documents("rules.txt", "", 1)
    assert (kept.source, kept.author, kept.date, kept.tags) == ("/a/rules.txt", "Harms", "", ())
    mended = replace(first, text="No fires at all.")
    assert library.put_documents([mended], splitter=splitter()).changed == 1
    assert library.put_documents([other], splitter=splitter(), replace=True).changed == 1
    (kept,) = library.documents("rules.txt", "", 1)
    assert (kept.source, kept.author, kept.date) == ("/b/rules.txt", "", "2024-05-01")


def test_a_record_replaces_no_file_of_its_name_unasked(library: Library) -> None:
    file = Document("rules.txt", "", "No fires.", source="/a/rules.txt")
    record = Document("rules.txt", "", "Fires as you please.")
    library.put_documents([file], splitter=splitter())
    counts = library.put_documents([record], splitter=splitter())
    assert counts.elsewhere == ("rules.txt",)
    assert "rules.txt is here from /a/rules.txt, and a record says otherwise" in counts.refused[0]
    assert [one.text for one in library.passages_of("rules.txt")] == ["No fires."]
    assert library.put_documents([record], splitter=splitter(), replace=True).changed == 1
    # What was here before sources were noted has none either: its file may say more.
    assert library.put_documents([file], splitter=splitter()).changed == 1


def test_a_passage_keeps_its_place_and_is_found_by_what_stands_above(library: Library) -> None:
    text, spans = joined(
        [
            Block("heading", "Galley", 3),
            Block("table", "Stove\tWood\nLamp\tOil", 3, (0.1, 0.25, 0.5, 1.0)),
        ]
    )
    library.put_documents([Document("ship", "", text, spans=spans)], splitter=splitter())
    (passage,) = library.passages_of("ship")
    assert (passage.kind, passage.page, passage.place) == ("table", 3, (0.1, 0.25, 0.5, 1.0))
    assert passage.embedding_text == "Galley\nStove\tWood\nLamp\tOil"
    assert [rowid for rowid, _ in library.bm25("galley", 1)] == [passage.rowid]
    moved = Document("ship", "", text, spans=(spans[0], replace(spans[1], page=4)))
    assert library.put_documents([moved], splitter=splitter()).changed == 1


def test_a_missing_library_is_made_for_writing_and_missed_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "library.sqlite3"
    with pytest.raises(LibraryError, match="ingest documents first"):
        Library.open(path, read_only=True)
    assert not path.exists()
    Library.open(path).close()
    assert [one.name for one in tmp_path.iterdir()] == ["library.sqlite3"]


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(LibraryError, match="may read and write the file and its folder"):
        Library.open(tmp_path / "state" / "library.sqlite3")


def test_a_reader_cannot_write(library: Library, path: Path) -> None:
    with (
        Library.open(path, read_only=True) as reader,
        pytest.raises(LibraryError, match="readonly"),
    ):
        reader.put_pairs([Pair("q", ("rope",))])


def _write_until(path: Path, documents: int) -> None:
    with Library.open(path) as library:
        for n in range(documents):
            whole = [Document(f"twin{k}", "", f"Twins of state {n}.") for k in range(2)]
            library.put_documents(whole, splitter=splitter())


@pytest.mark.slow
def test_one_process_reads_while_another_writes(library: Library, path: Path) -> None:
    """A reader never waits, never fails, and never sees half of a transaction."""
    writer = multiprocessing.get_context("spawn").Process(target=_write_until, args=(path, 60))
    writer.start()
    states = set()
    with Library.open(path, read_only=True) as reader:
        while writer.is_alive():
            twins = [p.text for p in reader.passages() if p.document_id.startswith("twin")]
            assert len(twins) in (0, 2)
            assert len(set(twins)) <= 1
            states.update(twins)
    writer.join(timeout=30)
    assert writer.exitcode == 0
    assert len(states) > 1


def test_each_removal_changes_the_token_and_what_an_index_is_named_by(library: Library) -> None:
    labels, contents = library.contents()
    assert labels.tolist() == library.rowids()
    assert dict(zip(labels.tolist(), map(bytes, contents), strict=True)).items() >= (
        library.labels("train").items()
    )
    seen = [(library.erasure.last_removal(), library.content_digest())]
    assert seen[0][0] == b""
    for names in (["rope"], ["nothing"], ["rope"]):
        library.delete_documents(names)
        seen.append((library.erasure.last_removal(), library.content_digest()))
        library.put_documents([Document("empty", "", "")], splitter=splitter())
    assert len(seen[1][0]) == 16
    assert seen[1] == seen[2] == seen[3], "nothing was removed"
    library.delete_documents(["empty"])  # a document without a passage may have had some before
    assert library.erasure.last_removal() != seen[1][0]
    assert library.content_digest() != seen[1][1]


def test_features_of_chosen_passages_alone(library: Library) -> None:
    labels = library.rowids()
    vectors = np.arange(3 * len(labels), dtype=np.float32).reshape(len(labels), 3)
    library.put_features(ENCODER, labels, vectors)
    found, features = library.features(ENCODER, [labels[-1], 10_000])
    assert (found.tolist(), features.tolist()) == ([labels[-1]], [vectors[-1].tolist()])
    assert library.features(ENCODER, [])[0].tolist() == []


_BATCH = 50


def _remove_all(path: Path, done: Connection) -> None:
    with Library.open(path) as library:
        for first in range(0, 500, _BATCH):
            library.delete_documents([f"d{n:03}" for n in range(first, first + _BATCH)])
            library.erasure.clear()
            done.send(first)


@pytest.mark.slow
@pytest.mark.parametrize("batches", range(10))
def test_a_removal_that_is_killed_is_taken_up_again(tmp_path: Path, batches: int) -> None:
    """Of each batch all is there or nothing; and at the end nothing is in any file."""
    path, chance = tmp_path / "state" / "library.sqlite3", random.Random(batches)
    documents = [Document(f"d{n:03}", "Qux", f"The quaxolith {n} is gilded.") for n in range(500)]
    with Library.open(path) as library:
        library.put_documents([*documents, ROPE], splitter=splitter())
        library.put_pairs([Pair(f"Which quaxolith is {n}?", (f"d{n:03}",)) for n in range(500)])
    told, tell = multiprocessing.Pipe(duplex=False)
    remover = multiprocessing.get_context("spawn").Process(target=_remove_all, args=(path, tell))
    remover.start()
    for _ in range(batches):
        told.recv()
    time.sleep(chance.uniform(0, 0.02))
    remover.kill()
    remover.join(timeout=30)

    with Library.open(path) as library:
        left = {one.id for one in library.documents("d", "", 1000)}
        for first in range(0, 500, _BATCH):
            batch = {f"d{n:03}" for n in range(first, first + _BATCH)}
            assert left >= batch or not left & batch
        assert len(left) <= 500 - batches * _BATCH
        counts = library.counts()
        assert counts.documents == len(left) + 1
        assert counts.pairs_train == rows(path, "pair") == len(left)
        assert len(library.bm25("quaxolith", 1000)) == len(left)
        library.delete_documents(left)
        library.erasure.clear()
    assert not any(b"quaxolith" in file.read_bytes().lower() for file in path.parent.iterdir())


def test_two_writers_take_turns(library: Library, path: Path) -> None:
    def write(name: str) -> None:
        with Library.open(path) as other:
            for n in range(20):
                other.put_documents([Document(f"{name}{n}", "", "Text.")], splitter=splitter())

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.counts().documents == 43
