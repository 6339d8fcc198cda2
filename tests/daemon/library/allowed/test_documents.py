"""A library of some collections is what it would be if the whole one had nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.library.allowed import documents
from daemon.library.allowed.documents import AllowedLibrary
from daemon.library.catalogue.filters import Filters, NothingFits
from daemon.library.readers.documents import Document, Pair
from daemon.library.schema import LibraryError, in_memory
from daemon.library.store import Library
from tests.daemon.library.test_store import splitter

OPEN = [
    Document("open/lamp", "The lamp of Ida Voss", "A lamp hangs in the hall, of brass.", "train"),
    Document("open/rope", "Rope", "The rope of the bell is worn.", "train", author="Ada Lin"),
    Document("open/deep/sail", "Sail", "A sail is mended on day 3.", "train", language="en"),
    Document("open/sail2", "Sail again", "A sail is mended on day 3.", "train"),
]
SECRET = [
    Document("secret/lamp", "The lamp of Ida Vosse", "A lamp lamp lamp burns. " * 9, "train"),
    Document(
        "secret/merger", "Merger with Norn", "Norn buys the yard. Zeppelin.", date="2031-01-02"
    ),
    Document("secret/sail", "Sail", "A sail is mended on day 3.", "train"),
    Document("opening/x", "Near by name", "A lamp of the opening.", "train"),
    Document("open", "Its very name", "A lamp that is no collection's.", "train"),
    Document("OPEN/lamp", "Capitals", "A lamp in capitals.", "train"),
]
PAIRS = [
    Pair("who mends sails?", ("open/sail2",), "valid"),
    Pair("who mends sails and buys?", ("open/sail2", "secret/merger"), "valid"),
    Pair("who buys?", ("secret/merger",), "valid"),
    Pair("who rings?", ("open/rope", "open/is-not-here-yet"), "valid"),
]
ASKED = ["lamp", "who mends the sail on day 3?", "zeppelin norn", "the bell of brass", "burns"]


def put(library: Library, documents: list[Document]) -> None:
    library.put_documents(documents, splitter=splitter(50))
    library.near.mark(60.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "library.sqlite3"


@pytest.fixture
def whole(path: Path) -> Iterator[Library]:
    """Secret documents came first, between and last."""
    with Library.open(path) as library:
        put(library, SECRET[:2])
        put(library, OPEN[:2])
        put(library, SECRET[2:4])
        put(library, OPEN[2:])
        put(library, SECRET[4:])
        library.put_pairs(PAIRS)
        yield library


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Library]:
    """A site that has nothing else."""
    with Library.open(tmp_path / "alone.sqlite3") as library:
        put(library, OPEN)
        library.put_pairs([PAIRS[0], PAIRS[3]])
        yield library


@pytest.fixture
def allowed(path: Path, whole: Library) -> Iterator[AllowedLibrary]:
    library = AllowedLibrary(path, ["open"])
    assert library.update()
    yield library
    library.close()


def all_of(library: Library) -> list[object]:
    """What a question can learn of a library; labels differ, so passages go by their ids."""
    passages = {one.rowid: one for one in library.passages()}
    names = {rowid: one.id for rowid, one in passages.items()}
    said: list[object] = [
        [(one.id, one.title, one.text, one.context) for one in passages.values()],
        [(name, title) for _, name, title in library.titles()],
        library.pairs("valid"),
        [[(names[rowid], share) for rowid, share in library.bm25(one, 50)] for one in ASKED],
        [[*library.words_in(one, list(names)).values()] for one in ASKED],
    ]
    for filters in (
        *(Filters(author="lin"), Filters(title="sail"), Filters(language="en")),
        *(
            Filters(collection="secret"),
            Filters(begins="secret/merger"),
            Filters(since="2030-01-01"),
        ),
        *(
            Filters(title="Norn"),
            Filters(title="Vosse"),
            Filters(author="Nobody"),
            Filters(tags=("x",)),
        ),
    ):
        try:
            said.append([names[one] for one in library.fitting(filters) or ()])
        except NothingFits as why:
            said.append(str(why))
    return said


def test_it_is_as_a_site_is_that_has_nothing_else(allowed: AllowedLibrary, alone: Library) -> None:
    assert all_of(allowed) == all_of(alone)


@pytest.mark.parametrize(
    ("table", "copied"), [("document", documents._DOCUMENT), ("passage", documents._PASSAGE)]
)
def test_all_that_is_kept_of_them_comes_along(table: str, copied: str) -> None:
    kept = in_memory().execute(f"PRAGMA table_info({table})").fetchall()
    assert {name for _, name, *_ in kept} | {"rowid"} == {*copied.split(", ")} | {"rowid"}


def test_the_whole_one_filtered_would_tell_of_the_others(
    whole: Library, allowed: AllowedLibrary
) -> None:
    """What this is for: shares by the words of all, and a wrong name's nearest."""
    among = allowed.rowids()
    assert whole.bm25("lamp", 9, among) != allowed.bm25("lamp", 9)
    with pytest.raises(NothingFits, match="vosse"):
        whole.fitting(Filters(title="Vossa"))
    with pytest.raises(NothingFits, match="voss'"):
        allowed.fitting(Filters(title="Vossa"))


def test_what_others_do_changes_nothing(allowed: AllowedLibrary, whole: Library) -> None:
    before = all_of(allowed)
    put(whole, [Document("secret/new", "Lamp", "The lamp burns with a Zeppelin. " * 5)])
    whole.put_pairs([Pair("who flies?", ("secret/new",), "valid")])
    assert not allowed.update()
    assert all_of(allowed) == before
    whole.delete_documents(["secret/new", "secret/lamp", "secret/sail"])
    assert not allowed.update()
    assert all_of(allowed) == before


def test_it_follows_what_is_done_to_its_own(
    allowed: AllowedLibrary, whole: Library, alone: Library
) -> None:
    changed = Document("open/rope", "Rope", "The rope is new.", "train", author="Ida Voss")
    added = Document("open/oar", "Oar", "An oar has a lock.", "train")
    for library in (whole, alone):
        library.delete_documents(["open/lamp"])
        put(library, [changed, added])
    assert allowed.update()
    assert all_of(allowed) == all_of(alone)
    assert not allowed.update()


def test_what_is_known_of_a_document_changes_without_its_passages(
    allowed: AllowedLibrary, whole: Library, alone: Library
) -> None:
    tagged = Document(
        "open/sail2", "Sail again", "A sail is mended on day 3.", "train", tags=("x",)
    )
    for library in (whole, alone):
        put(library, [tagged])
    assert not allowed.update()
    assert all_of(allowed) == all_of(alone)


def test_collections_lie_in_one_another_and_need_not_be_there(path: Path, whole: Library) -> None:
    def ids(*collections: str) -> list[str]:
        library = AllowedLibrary(path, collections)
        with library:
            library.update()
            return sorted({name for _, name, _ in library.titles()})

    assert ids("open/deep") == ["open/deep/sail"]
    assert ids("open/deep", "opening") == ["open/deep/sail", "opening/x"]
    assert ids("nothing") == ids() == []
    assert ids("ope") == ids("%") == ids("open/lamp") == ids("open/") == []


def test_copies_are_of_its_own_and_grouped_by_them(allowed: AllowedLibrary, whole: Library) -> None:
    """Three sails say the same; the first that came is the secret one."""
    found = [one.rowid for one in allowed.passages() if "sail" in one.text]
    leaders = allowed.near.leaders([*found, 10_000])
    assert leaders == {found[0]: found[0], found[1]: found[0]}
    assert whole.near.leaders(found)[found[0]] not in found, "filtered, a secret one would lead"
    copies = allowed.near.copies({found[0]: [found[1]]})
    assert [one.document_id for one in copies[found[0]].first] == ["open/sail2"]
    assert copies[found[0]].count == 1
    assert allowed.near.copies({found[0]: []}) == {}


def test_who_writes_the_file_is_not_kept_waiting(
    allowed: AllowedLibrary, whole: Library, path: Path
) -> None:
    with whole._transaction():
        whole._db.execute("DELETE FROM passage WHERE document_id = 'open/lamp'")
        assert not allowed.update(), "of what is not committed there is nothing to see"
    assert allowed.update()


def test_a_file_that_cannot_be_read_leaves_it_as_it_was(
    allowed: AllowedLibrary, whole: Library
) -> None:
    before = all_of(allowed)
    whole._db.execute("ALTER TABLE passage RENAME COLUMN context TO elsewhere")
    with pytest.raises(LibraryError, match="no such column"):
        allowed.update()
    assert all_of(allowed) == before
