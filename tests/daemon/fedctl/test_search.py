"""fedctl search, against a canned daemon."""

from __future__ import annotations

from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


def test_passages_are_shown_best_first(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("search", "Why do locks leak?", "--top-k", 2).out
    assert out.index("1. Locks") < out.index("Locks leak.") < out.index("2. d2 (d2)")
    assert "\x1b" not in out, "a title does not paint the terminal"
    assert "cosine 0" not in out
    (asked,) = daemon.asked
    assert (asked.question, asked.top_k, asked.explain) == ("Why do locks leak?", 2, False)
    assert (asked.begins, asked.title) == ("", "")


def test_only_some_documents_can_be_searched(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    fedctl("search", "why", "--begins", "manuals/", "--title", "lift 2004")
    fedctl("search", "why", "--below", "manuals/")
    asked = [(one.begins, one.title) for one in daemon.asked]
    assert asked == [("manuals/", "lift 2004"), ("manuals/", "")]


def test_an_explanation_has_places_scores_and_words(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("search", "Why do locks leak?", "--explain").out
    assert daemon.asked[0].explain
    for line in (
        "score 0.01777 = 0.01613 meaning + 0.00164 words",
        "meaning: place 2, cosine 0.625, title 0.75 (locks)",
        "words: place 1, BM25 3.50 (locks, leak)",
        "meaning: not in the index yet",
        "words: place 2, BM25 1.50",
        "title adds up to 0.2 to a cosine (chosen on 40 pairs of split valid).",
    ):
        assert line in out.replace("\n", " ")


def test_what_is_not_known_is_null(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    told = fedctl("search", "why", "--explain", "--json").object
    first, new = (one["explanation"] for one in told["passages"])
    assert (first["title_words"], first["cosine"], new["cosine"]) == (["locks"], 0.625, None)
    assert (told["question"], told["title_weight"], told["weighed_by"]) == ("why", 0.2, 40)
    plain = fedctl("search", "why", "--json").object["passages"]
    assert [one["explanation"] for one in plain] == [None, None]
