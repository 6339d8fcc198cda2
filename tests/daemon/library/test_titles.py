"""Titles: which words they have, and what these say about a question."""

from __future__ import annotations

import math

import numpy as np
import pytest

from daemon.library.catalogue.name_words import name_words
from daemon.library.titles import _MOST_TITLES, Titles

FILINGS = ("3M_2018_10K", "3M_2019_10K", "AMERICANWATERWORKS_2019_10K", "PEPSICO_2023Q1_10Q")


def titled(*titles: str) -> Titles:
    """A document of one passage under each title, labelled from 1."""
    return Titles((n, f"d{n}", title) for n, title in enumerate(titles, start=1))


def shares(titles: Titles, question: str, count: int) -> list[float]:
    """Of the passages labelled 1 to ``count``."""
    labels = np.arange(1, count + 1, dtype=np.int64)
    found: list[float] = titles.shares_of(labels, titles.shares(titles.asked(question))).tolist()
    return found


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("3M_2018_10K", {"3m", "2018", "10k"}),
        ("PEPSICO_2023Q1_10Q", {"pepsico", "2023q1", "2023", "q1", "10q"}),
        ("AmericanExpress 2022", {"americanexpress", "american", "express", "2022"}),
        ("Ménière's disease", {"meniere", "s", "disease"}),
        ("Ｆｕｌｌ ｗｉｄｔｈ", {"full", "width"}),
        ("Хартия 漢字", {"хартия", "漢字"}),
        ("— … —", set()),
        ("", set()),
    ],
)  # fmt: skip
def test_a_title_has_these_words(title: str, words: set[str]) -> None:
    assert name_words(title) == words


def test_the_title_with_the_rarest_words_has_the_greatest_share() -> None:
    titles = titled(*FILINGS)
    got = shares(titles, "What did 3M spend in FY2019?", 4)
    whole = math.log(2) + math.log(2)  # both words are in two of four titles
    assert got == pytest.approx([math.log(2) / whole, 1.0, math.log(2) / whole, 0.0])


def test_neighbours_of_a_question_are_also_one_word() -> None:
    titles = titled(*FILINGS)
    assert np.argmax(shares(titles, "Dividends of American Water Works?", 4)) == 2
    assert titles.matched(titles.asked("American Water Works' 10-K?"), FILINGS[2]) == [
        "10k",
        "americanwaterworks",
    ]


def test_a_word_of_every_title_counts_nothing() -> None:
    titles = titled("The annual report of 2018", "The annual report of 2019")
    asked = titles.asked("Which is the annual report of 2018?")
    assert list(asked.weights) == ["2018"]
    assert shares(titles, "the annual report", 2) == [0.0, 0.0]


def test_a_lone_common_word_is_a_small_share() -> None:
    titles = titled(*[f"Report {place}" for place in ("north", "south", "east")], "Survey")
    assert max(shares(titles, "What does the report say?", 4)) < 0.25
    assert max(shares(titles, "What of the north?", 4)) == 1.0


@pytest.mark.parametrize("title", ["", "Handbook", "???"])
def test_equal_titles_and_no_titles_say_nothing(title: str) -> None:
    titles = titled(title, title, title)
    assert shares(titles, "What does the handbook say?", 3) == [0.0, 0.0, 0.0]
    assert len(titles.best(titles.shares(titles.asked("handbook")), 10)) == 0


def test_no_passages_have_no_titles() -> None:
    titles = Titles(())
    assert shares(titles, "Which 10-K?", 2) == [0.0, 0.0]
    assert titles.best(titles.shares(titles.asked("Which 10-K?")), 10).tolist() == []


def test_the_best_titles_come_whole_and_the_last_by_its_beginning() -> None:
    passages = [(n, "a", "Alder 2018") for n in (5, 3, 4)] + [(n, "b", "Alder") for n in (1, 2)]
    titles = Titles([*passages, (9, "c", "Birch")])
    got = titles.shares(titles.asked("alder 2018"))
    assert titles.best(got, 10).tolist() == [3, 4, 5, 1, 2]
    assert titles.best(got, 4).tolist() == [3, 4, 5, 1]
    assert titles.best(got, 2).tolist() == [3, 4]


def test_of_many_titles_the_best_are_taken() -> None:
    titles = titled(*[f"Report {number}" for number in range(1000, 1100)])
    got = titles.shares(titles.asked("the report of 1055, 1007 and 1099"))
    assert titles.best(got, 3).tolist() == [8, 56, 100]
    named = Titles((n, f"d{n}", f"Alder {1000 + n}") for n in range(1, 50))
    more = named.shares(named.asked("alder 1003"))
    assert named.best(more, 1).tolist() == [3]


def test_of_very_many_titles_that_match_the_first_best_are_looked_at() -> None:
    titles = titled(
        *[f"Alder ward {n}" for n in range(600)], *[f"Birch ward {n}" for n in range(9)]
    )
    got = titles.shares(titles.asked("alder or birch"))
    best = titles.best(got, 2000)
    assert len(best) == _MOST_TITLES < 600
    assert best[-1] == _MOST_TITLES - 9, "and of equal ones the first"
    assert set(range(601, 610)) <= set(best.tolist()), "the rarer name weighs more"


def test_equal_titles_count_once_however_many_documents_have_them() -> None:
    pages = [(n, f"alder#{n}", "Alder 2018") for n in range(9)]
    asked = Titles([*pages, (10, "birch", "Birch 2018")]).asked("alder or birch, 2018")
    assert asked.weights == {"alder": math.log(2), "birch": math.log(2)}


def test_a_passage_that_came_later_has_no_share() -> None:
    titles = titled("Birch", "Alder")
    got = titles.shares(titles.asked("alder"))
    assert titles.shares_of(np.array([2, 7]), got).tolist() == [1.0, 0.0]
