"""Documents are chosen by what is known of them; what nothing fits says what there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.catalogue.filters import EVERY, Filters, NothingFits
from daemon.library.catalogue.name_words import name_words
from daemon.library.contents import IngestCounts
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 5)
DOCUMENTS = [
    Document("contracts/lift.pdf", "Lift 2019", "It goes up.", "", (), "", "Anna Meyer",
             "2019-05-31", "en", ("wet", "Very old")),
    Document("contracts/lock.pdf", "Lock 2020", "It goes in.", "", (), "", "Ben Meyer",
             "2020-01-01", "de", ("wet",)),
    Document("contracts_old/lamp.pdf", "Lamp", "It is lit.", "", (), "", "", "", "en", ()),
    Document("notes.txt", "Lift", "It says so. It says more than so.", "", (), "", "",
             "2020-06-15"),
]  # fmt: skip


ALL = Filters("contracts/", "contracts", "2019", "anna", "2019-01-01", "", "en", ("wet",))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with Library.open(tmp_path_factory.mktemp("here") / "library.sqlite3") as opened:
        opened.put_documents(DOCUMENTS, splitter=SPLITTER)
        yield opened


def found(library: Library, filters: Filters) -> set[str]:
    labels = library.fitting(filters)
    assert labels is not None
    assert labels == sorted(labels)
    return {one.document_id for one in library.passages_by_rowid(labels).values()}


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (Filters("contracts"), {one.id for one in DOCUMENTS[:3]}),
        (Filters(collection="contracts"), {"contracts/lift.pdf", "contracts/lock.pdf"}),
        (Filters(collection="contracts/"), {"contracts/lift.pdf", "contracts/lock.pdf"}),
        (Filters(title="LIFT"), {"contracts/lift.pdf", "notes.txt"}),
        (Filters(author="meyer"), {"contracts/lift.pdf", "contracts/lock.pdf"}),
        (Filters(author="Meyer, Anna"), {"contracts/lift.pdf"}),
        (Filters(since="2020-01-01"), {"contracts/lock.pdf", "notes.txt"}),
        (Filters(until="2020-01-01"), {"contracts/lift.pdf", "contracts/lock.pdf"}),
        (Filters(since="2019-05-31", until="2019-05-31"), {"contracts/lift.pdf"}),
        (Filters(language="en"), {"contracts/lift.pdf", "contracts_old/lamp.pdf"}),
        (Filters(tags=("wet",)), {"contracts/lift.pdf", "contracts/lock.pdf"}),
        (Filters(tags=("wet", "Very old", "wet")), {"contracts/lift.pdf"}),
        (ALL, {"contracts/lift.pdf"}),
    ],
)  # fmt: skip
def test_documents_are_chosen_by_all_that_is_asked_for(
    library: Library, filters: Filters, names: set[str]
) -> None:
    assert found(library, filters) == names


def test_who_asks_for_nothing_gets_all(library: Library) -> None:
    assert library.fitting(EVERY) is None


@pytest.mark.parametrize(
    ("filters", "cause", "remedy"),
    [
        (Filters(tags=("Wet",)), "no document here has the tag 'Wet'", "Nearest to 'Wet': 'wet'"),
        (Filters(tags=("wte",)), "no document here has the tag 'wte'", "Nearest to 'wte': 'wet'"),
        (Filters(tags=("q",)), "has the tag 'q'", "There are 'wet', 'Very old'"),
        (Filters(author="Maier"), "has the author 'maier'", "Nearest to 'maier': 'meyer'"),
        (Filters(author="anna ben"), "the author 'anna ben'", "Each is here, and no document has"),
        (Filters(language="fr"), "has the language 'fr'", "There are 'en', 'de'"),
        (Filters(since="2021-01-01"), "has a date from 2021-01-01 to 9999-12-31",
         "3 documents say a date, from 2019-05-31 to 2020-06-15"),
        (Filters(since="2026-13-01"), "'2026-13-01' is no day", "Write it as 2024-05-31"),
        (Filters(until="31.12.2020"), "'31.12.2020' is no day", "Write it as 2024-05-31"),
        (Filters(collection="contract"), "in the collection 'contract'", "'contracts'"),
        (Filters("contracts/lif!"), "begins with 'contracts/lif!'", "'contracts'"),
        (Filters(title="..."), "no word is in the title '...'", "Name words that it has"),
        (Filters(author=" * "), "no word is in the author ' * '", "Name words that it has"),
        (Filters(title="lamp", tags=("wet",)), "no document here fits all that is asked for",
         "1 has the title 'lamp'; 2 has the tag 'wet'"),
    ],
)  # fmt: skip
def test_what_nothing_fits_says_what_there_is(
    library: Library, filters: Filters, cause: str, remedy: str
) -> None:
    with pytest.raises(NothingFits) as refused:
        library.fitting(filters)
    first, _, second = str(refused.value).partition("\n")
    assert cause in first
    assert remedy in second


def test_a_document_of_no_collection_is_offered_as_none(library: Library) -> None:
    library.put_documents([Document("bare.pdf", "", "A text.")], splitter=SPLITTER)
    with pytest.raises(NothingFits) as refused:
        library.fitting(Filters(collection="q"))
    assert "'contracts'" in str(refused.value)
    assert "bare" not in str(refused.value)
    with pytest.raises(NothingFits, match=r"'bare\.pdf'"):
        library.fitting(Filters("bare.pdx"))


def test_an_empty_library_says_that_there_is_nothing(tmp_path: Path) -> None:
    with Library.open(tmp_path / "library.sqlite3") as empty:
        for filters in (Filters("a"), Filters(author="a"), Filters(since="2020-01-01")):
            with pytest.raises(NothingFits, match="No document here"):
                empty.fitting(filters)


def test_no_filter_looks_at_all_documents(library: Library) -> None:
    """SQLite says how it would look: by indices, a range of each, and through no whole table."""
    asked: list[str] = []
    library._db.set_trace_callback(asked.append)
    library.fitting(ALL)
    library._db.set_trace_callback(None)
    (statement,) = (one for one in asked if one.startswith("SELECT rowid"))
    plan = [row[3] for row in library._db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    scanned = {step.split()[1] for step in plan if step.startswith("SCAN")}
    assert scanned.isdisjoint({"passage", "document", "d", "facet"}), plan
    assert any("passage_document" in step for step in plan), plan


@settings(max_examples=50, deadline=None)
@given(title=st.text(max_size=1000), tags=st.lists(st.text(min_size=1, max_size=100), max_size=50))
def test_any_words_can_be_asked_for(library: Library, title: str, tags: list[str]) -> None:
    try:
        library.fitting(Filters(title=title, author=title, tags=tuple(tags)))
    except NothingFits as refusal:
        assert "\n" in str(refusal)


# ---- tags and metadata, as they change --------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        opened.put_documents(DOCUMENTS, splitter=SPLITTER)
        yield opened


def test_other_tags_change_the_tags_and_nothing_else(fresh: Library) -> None:
    lift = DOCUMENTS[0]
    before = (fresh.passages(), fresh.content_digest())
    again = fresh.put_documents([replace(lift, tags=("dry",))], splitter=SPLITTER)
    assert again == IngestCounts(changed=1)
    assert found(fresh, Filters(tags=("dry",))) == {lift.id}
    assert found(fresh, Filters(tags=("wet",))) == {"contracts/lock.pdf"}
    assert (fresh.passages(), fresh.content_digest()) == before
    same = fresh.put_documents([replace(lift, tags=("dry", "dry"))], splitter=SPLITTER)
    assert same == IngestCounts(unchanged=1)
    none = fresh.put_documents([replace(lift, tags=())], splitter=SPLITTER)
    assert none == IngestCounts(changed=1)
    assert fresh.documents(lift.id, "", 1)[0].tags == ()


def test_a_document_that_says_no_tags_keeps_those_it_has(fresh: Library) -> None:
    lift = replace(DOCUMENTS[0], tags=None)
    assert fresh.put_documents([lift], splitter=SPLITTER) == IngestCounts(unchanged=1)
    changed = replace(lift, text="It goes down.")
    assert fresh.put_documents([changed], splitter=SPLITTER) == IngestCounts(changed=1)
    assert fresh.documents(lift.id, "", 1)[0].tags == ("Very old", "wet")


def test_what_a_file_says_of_itself_changes_without_its_passages(fresh: Library) -> None:
    before = fresh.passages()
    lift = replace(DOCUMENTS[0], author="Cleo Adler", date="2024-02-29", tags=None)
    assert fresh.put_documents([lift], splitter=SPLITTER) == IngestCounts(changed=1)
    assert found(fresh, Filters(author="cleo", since="2024-02-29")) == {lift.id}
    with pytest.raises(NothingFits):
        fresh.fitting(Filters(author="anna"))
    assert fresh.passages() == before


def test_with_a_document_goes_all_that_was_known_of_it(fresh: Library) -> None:
    fresh.delete_documents([one.id for one in DOCUMENTS])
    for table in ("facet", "document_text"):
        assert fresh._db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)  # noqa: S608


def test_texts_come_back_as_they_were_read(fresh: Library) -> None:
    documents, taken = fresh.whole_documents([one.id for one in DOCUMENTS], 10**6)
    assert taken == 4
    assert documents == [replace(one, tags=tuple(sorted(one.tags or ()))) for one in DOCUMENTS]
    some, taken = fresh.whole_documents(["gone", *(one.id for one in DOCUMENTS)], 12)
    assert ([one.id for one in some], taken) == (["contracts/lift.pdf", "contracts/lock.pdf"], 3)


def test_words_of_names_have_neither_accents_nor_capitals() -> None:
    assert name_words("Désirée MÜLLER-Lüdenscheidt") == {"desiree", "muller", "ludenscheidt"}
