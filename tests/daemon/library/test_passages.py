"""Documents to passages: whole sentences, a kept budget, nothing lost."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.passages import (
    Piece,
    SentenceSplitter,
    passage_ids,
    sentences,
    split_text,
)
from daemon.library.readers.documents import Document


def words(text: str) -> int:
    return len(text.split())


def letters(text: str) -> int:
    """Tokens of a tokeniser that spells: unlike words, they add up to more than the whole."""
    return len(text) + 2


TEXT = (
    "Dr. Brandt weighed 3.5 tons of rope, i.e. two coils. It held! Did it? "
    "J. R. Harms signed the list (see Fig. 2). He left."
)


def test_sentences_end_where_a_reader_would_end_them() -> None:
    assert sentences(TEXT) == [
        "Dr. Brandt weighed 3.5 tons of rope, i.e. two coils.",
        "It held!",
        "Did it?",
        "J. R. Harms signed the list (see Fig. 2).",
        "He left.",
    ]


def test_lines_of_a_list_and_headings_stand_alone() -> None:
    text = "On deck\n\n- a winch\n- two pumps\n\nThe hold is\ndry."
    assert sentences(text) == ["On deck", "- a winch", "- two pumps", "The hold is\ndry."]


def test_what_fits_the_budget_is_one_passage() -> None:
    assert split_text(f"\n{TEXT} ", words(TEXT), words) == [TEXT]
    assert split_text(f"\n{TEXT} ", letters(TEXT), letters) == [TEXT]


def test_what_does_not_fit_is_cut_after_a_sentence_into_like_parts() -> None:
    text = " ".join(f"Plank number {n} is sound." for n in range(9))  # 45 words
    parts = split_text(text, 20, words)
    assert [words(part) for part in parts] == [15, 15, 15]
    assert all(part.endswith("is sound.") for part in parts)


def test_a_sentence_over_the_budget_is_cut_between_words() -> None:
    text = " ".join(f"w{n}" for n in range(100))
    parts = split_text(text, 7, words)
    assert all(words(part) <= 7 for part in parts)
    assert " ".join(parts) == text


def test_a_word_over_the_budget_is_cut_between_characters() -> None:
    parts = split_text("x" * 1000, 30, letters)
    assert all(letters(part) <= 30 for part in parts)
    assert "".join(parts) == "x" * 1000


def test_a_blank_document_has_no_passage() -> None:
    assert split_text(" \n\t ", 10, words) == []


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        SentenceSplitter(words, 0)


def test_another_budget_is_another_way_of_splitting() -> None:
    assert SentenceSplitter(words, 10).name != SentenceSplitter(words, 11).name
    assert SentenceSplitter(words, 60)(Document("d", "", TEXT)) == [Piece(TEXT, 0, len(TEXT))]


def test_ids_survive_edits_elsewhere_and_tell_equals_apart() -> None:
    before = passage_ids("log.txt", ["one", "two", "one"])
    after = passage_ids("log.txt", ["new", "two", "one"])
    assert len(set(before)) == 3
    assert before[1] == after[1]
    assert before[0] == after[2]
    assert re.fullmatch(r"log\.txt@[0-9a-f]{16}\.1", before[2])
    assert before != passage_ids("other.txt", ["one", "two", "one"])


def test_a_long_text_without_a_full_stop_takes_no_time() -> None:
    started = time.process_time()
    parts = split_text("timber " * 30_000, 200, words)
    assert time.process_time() - started < 2.0
    assert sum(words(part) for part in parts) == 30_000


prose = st.lists(
    st.one_of(
        st.text(alphabet="abcdef AB.!?\n,é漢。", max_size=40),
        st.sampled_from(["It is so. ", "Dr. A. B. c. ", "- item\n", "\n\n", "Why?! "]),
    ),
    max_size=30,
).map("".join)


@settings(deadline=None)
@given(st.one_of(prose, st.text(max_size=200)), st.integers(1, 40), st.sampled_from([0, 1]))
def test_nothing_is_lost_and_the_budget_is_kept(text: str, budget: int, way: int) -> None:
    count = (words, letters)[way]
    parts = split_text(text, budget, count)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part == part.strip() and part for part in parts)
    assert all(count(part) <= budget or len(part) == 1 for part in parts)


@settings(deadline=None)
@given(prose)
def test_every_sentence_within_the_budget_stays_whole(text: str) -> None:
    parts = split_text(text, 12, words)
    for sentence in sentences(text):
        if words(sentence) <= 12:
            assert any(sentence in part for part in parts)
