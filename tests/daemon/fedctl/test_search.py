"""fedctl search, against a canned daemon."""

from __future__ import annotations

from rich.console import Console

from daemon.fedctl.commands.library import show_answer
from daemon.fedctl.terminal.output import in_line
from proto.control_pb2 import AskReply, Citation
from proto.notes import notes_of
from tests.proto.test_notes import with_every_note
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


def test_passages_are_shown_best_first(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("search", "Why do locks leak?", "--top-k", 2).out
    assert out.index("1. Locks") < out.index("Locks leak.") < out.index("2. d2 (d2)")
    assert "\x1b" not in out, "a title does not paint the terminal"
    assert "cosine" not in out
    (asked,) = daemon.asked
    assert (asked.question, asked.top_k, asked.explain) == ("Why do locks leak?", 2, False)
    assert (asked.begins, asked.title) == ("", "")


def test_an_empty_library_says_what_to_do(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.empty = True
    for words in (("search", "why"), ("search", "why", "--explain"), ("ask", "why")):
        assert fedctl(*words).out == "Nothing is ingested here yet: fedctl ingest FOLDER\n"
    assert fedctl("search", "why", "--json").object["passages"] == []


def test_where_a_passage_stands_once_more_is_told(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    """Where people meet it: among what was found, in an answer, and in its document."""
    line = "also, or nearly so, in: old/d1, page 7; and 2 more"
    for words in (("search", "why"), ("ask", "why"), ("documents", "show", "rules.md")):
        assert fedctl(*words).out.count(line) == 1, "one of two passages has copies"
    assert "(d1#0, page 3, read by OCR): " in fedctl("ask", "why").out
    first, second = fedctl("search", "why", "--json").object["passages"]
    assert (first["copies"]["count"], second["copies"]) == (3, None)
    assert first["copies"]["first"][0]["document_id"] == "old/d1"


def test_how_an_answer_came_about_is_told_below_it(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.noted = with_every_note()
    daemon.noted.instead = "no\x1b[2J room\nat all"
    notes = notes_of(daemon.noted)
    assert fedctl("ask", "why", "--json").object["notes"] == notes
    out = fedctl("ask", "why").out
    assert "\x1b" not in out, "what a model's server says does not paint the terminal"
    for note in notes:
        assert f"\n{in_line(note)}\n" in out
    assert "written by generator abababababab" in out


def test_what_the_columns_of_a_row_are_is_told_once() -> None:
    cited = Citation(
        number=1,
        title="Wards",
        passage_id="p",
        kind="table",
        context="Staffing\nWard\tBeds\tNight staff\tPhone",
        text="Larch\t31\t5",
    )
    extracted = AskReply(answer="Larch: Beds 31; Night staff 5 [1]", citations=[cited])
    written = AskReply(answer="Larch has 31 beds. [1]", citations=[cited])
    assert "[1] Wards (p): Larch | 31 | 5\n" in _shown(extracted)
    line = "[1] Wards (p): Ward | Beds | Night staff | Phone: Larch | 31 | 5\n"
    assert line in _shown(written), "else nobody knows what 5 is"


def _shown(reply: AskReply) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        show_answer(console, reply)
    return captured.get()


def test_only_some_documents_can_be_searched(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    fedctl("search", "why", "--below", "manuals/", "--title", "lift 2004")
    fedctl("search", "why", "--below", "manuals/")
    asked = [(one.begins, one.title) for one in daemon.asked]
    assert asked == [("manuals/", "lift 2004"), ("manuals/", "")]


def test_documents_are_searched_by_all_that_is_known_of_them(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    words = "--collection manuals --author Lock --since 2024-01-01 --until 2024-12-31"
    fedctl("search", "why", *words.split(), "--language", "EN", "--tag", "wet", "--tag", "very old")
    (asked,) = daemon.asked
    assert (asked.collection, asked.author, asked.language) == ("manuals", "Lock", "en")
    assert (asked.since, asked.until) == ("2024-01-01", "2024-12-31")
    assert [*asked.tags] == ["wet", "very old"]


def test_an_explanation_has_places_scores_and_words(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("search", "Why do locks leak?", "--explain").out
    assert daemon.asked[0].explain
    for line in (
        "score 0.8650 = 0.6250 cosine + 0.1500 title + 0.0900 words",
        "meaning: place 2 by its best sentence",
        "title: 0.75 of the question (locks)",
        "words: place 1, share 0.90 (1: each word once) (locks, leak)",
        "meaning: not in the index yet; its place by words stands for it",
        "words: place 2, share 0.40 (1: each word once)",
        "cross-encoder: -1.5000; place 3 before",
        "To a cosine, words of which a passage has each once add some 0.1",
        "(chosen on 40 pairs of split valid).",
    ):
        assert line in out.replace("\n", " ")


def test_an_explanation_is_data_or_null(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    told = fedctl("search", "why", "--explain", "--json").object
    first, new = (one["explanation"] for one in told["passages"])
    assert (first["title_words"], first["cosine"], first["level"]) == (["locks"], 0.625, "sentence")
    assert (first["indexed"], new["indexed"]) == (True, False)
    assert (first["cross_score"], first["place_before"]) == (-1.5, 3)
    assert new["place_before"] == 0, "it was not ranked anew"
    assert (told["question"], told["title_weight"], told["weighed_by"]) == ("why", 0.2, 40)
    plain = fedctl("search", "why", "--json").object["passages"]
    assert [one["explanation"] for one in plain] == [None, None]
