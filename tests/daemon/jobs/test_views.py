"""Who may ask of one collection learns nothing of another: not one bit of any reply changes.

Each defence is left out once, and then one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from daemon.answering.answering import OpenVersion, QuestionRefusedError
from daemon.answering.options import AnsweringOptions
from daemon.jobs import answering, views
from daemon.jobs import learning as learning_jobs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.allowed.documents import AllowedLibrary, AmongFound
from daemon.library.catalogue.filters import EVERY, Filters
from daemon.library.catalogue.near_duplicates import NearDuplicates
from daemon.library.readers.documents import Document, Pair
from daemon.library.search import Ranked
from daemon.library.store import Library
from daemon.library.titles import Titles
from tests.support.small_models import small_encoder

OPEN = ("open",)
THINGS = [
    *(
        "pump",
        "lamp",
        "rope",
        "sail",
        "gate",
        "bell",
        "well",
        "kiln",
        "mast",
        "keel",
        "helm",
        "oar",
    ),
    *("plank", "block", "valve", "gauge", "hook", "chain", "crane", "sluice", "weir", "lock"),
]
DOCUMENTS = [
    Document(
        f"open/{one}",
        f"The {one}",
        f"Somebody keeps the {one} dry. On day {day} the {one} is looked at, and tarred.",
        author="Ada Lin",
    )
    for day, one in enumerate(THINGS)
]
# Alike enough to the whole of it, and not to one another.
_SAID = (
    "the wardens of this old yard go round at dusk and count what hangs on each wall by its name "
    "then they write all of that down so nobody has to ask them again"
)
_ROUND = _SAID.split()
DOCUMENTS += [
    Document("open/round-a", "Rounds", " ".join(_ROUND[3:])),
    Document("open/round-b", "Rounds", " ".join(_ROUND[:-3])),
]
PAIRS = [Pair(f"who keeps the {one} dry", (f"open/{one}",), "valid") for one in THINGS]
SECRET = [
    Document(
        f"secret/{one}",
        f"The {one} of Norn",
        f"Norn buys the {one}. " * 3 + f"Somebody keeps the {one} dry.",
        author="Ada Linn",
    )
    for one in THINGS[:12]
]
# The very text of an open document; and that which both rounds are of.
SECRET += [
    replace(DOCUMENTS[0], id="secret/same"),
    Document("secret/round", "Rounds", " ".join(_ROUND)),
    Document("secret/far", "Zeppelin", "A zeppelin is bought in 2031.", date="2031-05-05"),
]
SECRET_PAIRS = [
    Pair(f"what does Norn do with the {one}", (f"secret/{one}",), "valid") for one in THINGS[:12]
]
SECRET_PAIRS += [Pair("keep it dry", ("open/pump", "secret/pump"), "valid")]
SECRET_PAIRS += [Pair(f"the {n}th zeppelin", ("secret/far",), "valid") for n in range(30)]
QUESTIONS = [
    *(f"who keeps the {one} dry?" for one in THINGS[:6]),
    *("what does Norn buy?", "zeppelin 2031", "the pump of Norn", "who goes round at dusk?"),
    *("what is tarred on day 3?", "what is the capital of Mongolia?"),
]
FILTERS = [
    EVERY,
    *(Filters(author="Linne"), Filters(title="Norn"), Filters(since="2030-01-01")),
    *(Filters(begins="secret/"), Filters(collection="secret"), Filters(title="pump")),
]
WORDS = sorted({w for one in DOCUMENTS + SECRET for w in re.findall(r"\w+", one.text.lower())})


@dataclass
class Site:
    """With documents of both, or of one, in a worker that is this process."""

    spec: RetrieverSpec
    folder: Path
    digest: bytes

    @property
    def library(self) -> Path:
        return self.folder / "library.sqlite3"

    def put(self, documents: list[Document], pairs: list[Pair]) -> None:
        learning_jobs.ingest(self.spec, self.library, documents, pairs, 40)

    def open(self) -> None:
        """What was put is indexed and answers."""
        versions = self.folder / "versions"
        index = learning_jobs.build_index(
            self.spec, self.library, versions, self.digest, self.folder / "index"
        )
        answering.open_version(
            *(self.spec, self.library, versions, self.digest, index),
            options=AnsweringOptions(lost_answers=0.05),
        )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_encoder(tmp_path_factory.mktemp("encoder"), WORDS)


@pytest.fixture
def site(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """It has the open collection, and answers."""
    monkeypatch.setattr(answering, "_open", None)
    monkeypatch.setattr(answering, "_views", views.Views())
    spec = RetrieverSpec(encoder=str(encoder), max_tokens=64, device="cpu")
    digest = learning_jobs.write_initial_version(spec, tmp_path / "versions")
    made = Site(spec, tmp_path, digest)
    made.put(DOCUMENTS, PAIRS)
    made.open()
    return made


def told(collections: tuple[str, ...] | None = OPEN) -> list[Any]:
    """All that is told of some questions, to the last bit: answers, figures and refusals."""
    found: list[Any] = [
        answering.ask(question, 5, collections=collections) for question in QUESTIONS
    ]
    for question in QUESTIONS:
        for filters in FILTERS:
            try:
                found.append(answering.search(question, 4, True, filters, collections))
            except QuestionRefusedError as refusal:
                found.append(str(refusal))
    return found


def difference(before: list[Any], now: list[Any]) -> str:
    """The first of them, short; empty: there is none, to the last bit."""
    for one, other in zip(map(repr, before), map(repr, now), strict=True):
        if one != other:
            at = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            return f"{one[max(0, at - 200) : at + 80]}\n---\n{other[max(0, at - 200) : at + 80]}"
    return ""


def names_in(found: list[Any]) -> set[str]:
    return set(re.findall(r"'(\w+)/[\w-]+'", repr(found)))


def test_what_is_added_and_taken_out_elsewhere_changes_no_bit(site: Site) -> None:
    before = told()
    assert names_in(before) == {"open"}
    site.put(SECRET, SECRET_PAIRS)
    assert not difference(before, told()), "stored, and not indexed yet"
    site.open()
    assert not difference(before, told()), "indexed"
    everything = told(None)
    assert names_in(everything) == {"open", "secret"}, "there is something to be found"
    with Library.open(site.library) as library:
        library.delete_documents([one.id for one in SECRET])
    site.open()
    assert not difference(before, told()), "gone again"


def test_what_is_added_to_ones_own_is_found(site: Site) -> None:
    site.put([Document("open/buoy", "The buoy", "Somebody keeps the buoy dry.")], [])
    site.open()
    assert (
        answering.ask("who keeps the buoy dry?", 3, collections=OPEN).passages[0].document_id
        == "open/buoy"
    )


def test_who_may_ask_of_all_is_answered_as_before(site: Site) -> None:
    site.put(SECRET, SECRET_PAIRS)
    site.open()
    before = told(None)
    told()
    assert not difference(before, told(None))


def test_of_nothing_nothing_is_told_and_nothing_breaks(site: Site) -> None:
    site.put(SECRET, SECRET_PAIRS)
    site.open()
    for collections in ((), ("not-here-yet",), ("ope",), ("secre",)):
        answered = answering.ask(QUESTIONS[0], 3, collections=collections)
        assert (answered.citations, answered.passages) == ((), ())
        assert answering.search(QUESTIONS[0], 3, True, EVERY, collections).passages == []


def test_two_collections_are_answered_as_one_library(site: Site) -> None:
    site.put(SECRET, SECRET_PAIRS)
    site.open()
    found = answering.ask("what does Norn do with the pump", 5, collections=("open", "secret"))
    assert {one.document_id.split("/")[0] for one in found.passages} == {"open", "secret"}
    assert answering.search(QUESTIONS[0], 5, True, EVERY, ("open", "secret")).weighed_by > len(
        THINGS
    )


def test_what_is_kept_for_them_has_a_bound(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_MOST_PASSAGES", 450)
    for name in ("a", "b", "c", "b"):
        answering.renew_view((name,))
    assert answering._views.kept == [("c",), ("b",)]
    monkeypatch.setattr(views, "_MOST_PASSAGES", 1)
    before = told()
    assert answering._views.kept == [OPEN], "one there is always"
    assert not difference(before, told())


# ---- without the defence the attack succeeds --------------------------------------


def words_of_all(patch: pytest.MonkeyPatch) -> None:
    """Words weigh what they do in the whole library; what may not be found is filtered."""

    def bm25(self: AllowedLibrary, query: str, k: int, among: Any = None) -> Any:
        with Library.open(self._path, read_only=True) as whole:
            return whole.bm25(query, k, self.rowids() if among is None else among)

    patch.setattr(AllowedLibrary, "bm25", bm25)


def filtered_behind(patch: pytest.MonkeyPatch) -> None:
    """All is ranked, and what may not be found is left out then."""

    class Behind(OpenVersion):
        def _ranked(self, question: str, top_k: int, filters: Filters) -> tuple[list[Ranked], str]:
            found, left_out = super()._ranked(question, top_k, filters)
            mine = [one for one in found if one.passage.document_id.startswith("open/")]
            return mine, left_out

    def of(_self: Any, _names: Any, opened: OpenVersion, *_: Any) -> OpenVersion:
        return Behind(**vars(opened))

    patch.setattr(views.Views, "of", of)


def titles_of_all(patch: pytest.MonkeyPatch) -> None:
    """Titles weigh what they do in the whole library."""

    def over(library: Any, version: OpenVersion, opened: OpenVersion) -> OpenVersion:
        made = honest(library, version, opened)
        return replace(made, titles=Titles(opened.library.titles()))

    honest = views._over
    patch.setattr(views, "_over", over)


def fitted_on_all(patch: pytest.MonkeyPatch) -> None:
    """What is too little for an answer is found on the pairs of all."""

    def with_fitted(_view: Any, version: OpenVersion, _fit: Any) -> OpenVersion:
        of_all = answering.opened_version()
        return replace(
            version,
            abstention=of_all.abstention,
            weights=of_all.weights,
            weighed_on=of_all.weighed_on,
        )

    patch.setattr(views, "_with_fitted", with_fitted)


def refused_by_all(patch: pytest.MonkeyPatch) -> None:
    """Why nothing fits is told by what there is in the whole library."""

    def fitting(self: AllowedLibrary, filters: Filters) -> Any:
        with Library.open(self._path, read_only=True) as whole:
            labels = whole.fitting(filters)
        mine = {*self.rowids()}
        return None if labels is None else [one for one in labels if one in mine]

    patch.setattr(AllowedLibrary, "fitting", fitting)


@pytest.mark.parametrize(
    "leaving_out",
    [words_of_all, filtered_behind, titles_of_all, fitted_on_all, refused_by_all],
    ids=lambda one: one.__name__,
)
def test_without_it_a_reply_tells_of_the_other_collection(
    site: Site, monkeypatch: pytest.MonkeyPatch, leaving_out: Callable[[pytest.MonkeyPatch], None]
) -> None:
    leaving_out(monkeypatch)
    before = told()
    site.put(SECRET, SECRET_PAIRS)
    site.open()
    assert difference(before, told())


@pytest.mark.parametrize("defended", [True, False])
def test_what_another_collection_says_makes_no_two_passages_copies(
    site: Site, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """The secret round came first: in the whole library both open ones are copies of it."""
    with Library.open(site.library) as library:
        library.delete_documents([one.id for one in DOCUMENTS])
        site.put(SECRET, SECRET_PAIRS)
        site.put(DOCUMENTS, PAIRS)
        library.near.mark(60.0)
        if not defended:
            near = NearDuplicates(library._db, nullcontext, nullcontext)
            monkeypatch.setattr(AmongFound, "leaders", lambda _, rowids: near.leaders(rowids))
        site.open()
        before = told()
        assert any("round" in repr(one) for one in before)
        library.delete_documents(["secret/round"])
        library.near.mark(60.0)
        site.open()
        assert (difference(before, told()) == "") == defended
