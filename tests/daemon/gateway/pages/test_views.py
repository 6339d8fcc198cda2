"""What a page makes of fedd's replies: sentences marked in their passages, rows in their tables."""

from __future__ import annotations

import re
from contextlib import nullcontext
from html import escape
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolRequestParams
from starlette.datastructures import QueryParams

from config.people import SCOPES
from daemon.gateway import mcp_api
from daemon.gateway.browser import PAGES, Pages, Person
from daemon.gateway.conversation import cited_at
from daemon.gateway.pages import views
from daemon.gateway.pages.views import Row, Run
from daemon.gateway.site_api import answer_of
from proto import bounds
from proto.control_pb2 import AskReply, Citation
from proto.notes import NOTES, notes_of
from proto.questions_pb2 import SourcePassage, SourceReply
from tests.proto.test_notes import with_every_note

TABLE = "Part\tDays\nBrake\t7\nGear\t\t30"


def marks(reply: AskReply) -> list[views.Mark]:
    cited = [one["url_citation"] for one in cited_at(reply)]
    return [(one["start_index"], one["end_index"]) for one in cited]


def test_marks_of_an_answer_hang_on_their_sentences() -> None:
    citations = [Citation(number=1, text="It turns."), Citation(number=2, text="It stops [9].")]
    reply = AskReply(answer="It turns. [1] It stops [9]. [2]\nSo.", citations=citations)
    assert views.answer_runs(reply, marks(reply)) == [
        Run("It turns."),
        Run("", number=1),
        Run(" It stops [9]."),
        Run("", number=2),
        Run("\nSo."),
    ]


def test_page_and_json_say_how_an_answer_came_about_likewise() -> None:
    reply = AskReply(answer="It turns. [1]", citations=[Citation(number=1)], seconds=1)
    reply.MergeFrom(with_every_note())
    notes = notes_of(reply)
    told = answer_of(reply)
    assert told.notes == notes
    assert {name: getattr(told, name) for name in NOTES} == {
        name: getattr(reply, name) for name in NOTES
    }
    nobody: Any = None  # is asked for the page of an answer that is there
    person = Person("", "elm", "clerk", "2030-01-01", frozenset({"ask"}))
    page = bytes(Pages(nobody, nobody, nobody, nobody)._ask_page(person, "why?", reply).body)
    for note in notes:
        assert f"<bdi>{escape(note)}</bdi>".encode() in page
    assert (told.generator_version, b"generator <code>abababababab</code>" in page) == (
        "ab" * 32,
        True,
    )


def test_a_document_that_is_read_says_which_passages_ocr_has_read() -> None:
    """Also where it was opened without a passage: the link of what somebody has brought."""
    passages = [SourcePassage(text="Scanned.", page=1, ocr=True), SourcePassage(text="Typed.")]
    nobody: Any = None
    person = Person("", "elm", "clerk", "2030-01-01", frozenset({"search"}))
    reply = SourceReply(title="Log", passages=passages)
    pages = Pages(nobody, nobody, nobody, nobody)
    page = bytes(pages._source_page(person, "log.pdf", reply, QueryParams()).body)
    assert page.count(b"read by OCR") == 1
    assert page.index(b"read by OCR") < page.index(b"Scanned.") < page.index(b"Typed.")


@pytest.mark.parametrize("scopes", [["ask"], ["search", "view"], ["upload"], ["embed"], SCOPES])
def test_a_page_leads_to_those_that_a_token_is_for(scopes: list[str]) -> None:
    assert {one.scope for one in PAGES} <= set(SCOPES)
    nobody: Any = None
    person = Person("", "elm", "clerk", "2030-01-01", frozenset(scopes))
    page = str(Pages(nobody, nobody, nobody, nobody)._problem(404, "gone", person).body, "utf-8")
    led = re.findall('<li><a href="([^"]*)">', page)
    assert led == [one.path for one in PAGES if one.scope in scopes]


def test_a_token_may_be_changed_to_what_it_may_be_made_for() -> None:
    assert sorted(bounds.of("ChangeTokenRequest", "scopes").word) == sorted(SCOPES)
    for request in ("CreateTokenRequest", "ChangeTokenRequest"):
        assert bounds.of(request, "scopes").items.most == len(SCOPES)


async def test_an_agent_is_told_how_an_answer_came_about() -> None:
    async def ask(_question: str, _token: str) -> AskReply:
        return with_every_note()

    context: Any = None
    fedd: Any = SimpleNamespace(ask=ask)
    asker = mcp_api.Asker(fedd, "", frozenset({"ask"}), nullcontext)
    called = CallToolRequestParams(name="ask", arguments={"question": "why?"})
    told = (await asker._call(context, called)).structured_content or {}
    assert told["notes"] == notes_of(with_every_note())


def test_a_sentence_is_found_however_its_lines_are_broken() -> None:
    text = "One. It  turns\n slowly (a.b*). Two."
    begin, end = views.place_of("It turns slowly (a.b*).", text) or (0, 0)
    assert text[begin:end] == "It  turns\n slowly (a.b*)."
    assert views.place_of("It turns fast.", text) is None
    assert views.place_of("", text) is None


@given(st.text(), st.integers(0, 30), st.integers(0, 30))
def test_what_is_marked_and_what_is_not_is_the_whole_text(text: str, begin: int, end: int) -> None:
    mark = views.mark_in(text, begin, end)
    shown = views.shown_text(text, "", "text", mark)
    assert "".join(run.text for run in shown.runs) == text
    marked = "".join(run.text for run in shown.runs if run.marked)
    assert marked == (text[begin:end] if mark else "")


def test_a_row_that_is_cited_is_marked_in_its_table() -> None:
    for cited, row in (("Brake\t7", 1), ("Gear\t\t30", 2), ("Part\tDays", 0)):
        shown = views.shown_text(TABLE, "Deck\nA\tB", "table", views.place_of(cited, TABLE))
        assert (shown.above, shown.header) == (["Deck"], [["A", "B"]])
        assert shown.rows == [
            Row(["Part", "Days"], row == 0),
            Row(["Brake", "7"], row == 1),
            Row(["Gear", "", "30"], row == 2),
        ]


def test_without_its_passage_a_citation_is_its_sentence() -> None:
    one = Citation(number=1, document_id="a/b", passage_id="a/b@0", text="It turns.", page=3)
    (alone,) = views.cited(AskReply(citations=[one]), linked=False)
    assert (alone.title, alone.page, alone.link) == ("a/b", 3, "")
    assert alone.text.runs == [Run("It turns.")]
    whole = Citation(document_id="a/b", passage_id="a/b@0", text="So. It turns. It stops.", page=3)
    (inside,) = views.cited(AskReply(citations=[one], passages=[whole]), linked=True)
    assert inside.text.runs == [Run("So. "), Run("It turns.", marked=True), Run(" It stops.")]
    assert inside.link == "/source?document=a%2Fb&passage=a%2Fb%400&from=4&to=13#here"


@pytest.mark.parametrize(
    ("sides", "rectangle"),
    [
        ([0.25, 0.5, 0.75, 0.625], (0.25, 0.5, 0.5, 0.125)),
        ([], None),
        ([0.5, 0.5, 0.25, 0.625], None),
        ([0.25, 0.5, 1.5, 0.625], None),
        ([float("nan")] * 4, None),
        ([0.1] * 3, None),
    ],
)
def test_a_place_is_on_its_page_or_nowhere(
    sides: list[float], rectangle: tuple[float, ...] | None
) -> None:
    assert views.rectangle_of(SourcePassage(rectangle=sides)) == rectangle
