"""What a model wrote against what it cites: statements stay, go, or are marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.kinds import Unsupported
from daemon.answering.citations import MARK, Checked, StatementCheck
from daemon.library.contents import Passage
from daemon.library.search import Ranked

LAMP = Passage(
    *(1, "p-lamp", "lamp", "Lamps"),
    "Whale oil burns in every lamp. A wick is cut daily. It must not be left alone.",
    page=7,
)
ROPE = Passage(
    *(2, "p-rope", "rope", "Hemp rope"),
    "Hemp rope is tarred against rot. It lasts four winters. "
    "In 2023 the yard sold 1,250 coils for $30,000. In 2022 the yard sold 1,000 coils.",
)
WARDS = Passage(
    *(3, "p-ward", "ward", "Wards", "Wing\tBeds\nEast\t30\nWest\t28", "Beds in use", "table", 4)
)
PASSAGES = [Ranked(one, 1.0 / one.rowid) for one in (LAMP, ROPE, WARDS)]


def checked(text: str, passages: Sequence[Ranked], unsupported: Unsupported) -> Checked:
    """What is left of a text that is all there."""
    check = StatementCheck(passages, unsupported)
    check.read(text)
    return check.left


def check(text: str) -> Checked:
    return checked(text, PASSAGES, "drop")


@pytest.mark.parametrize(
    "text",
    [
        "Whale oil burns in every lamp [1].",
        "Whale oil burns in every lamp. [1]",
        "Oil burns in lamps [1].",
        "Yes, whale oil burns in every lamp [1].",
        "No, whale oil burns in every lamp [1].",
        "It must not be left alone [1].",
        "Hemp rope lasts 4 winters [2].",
        "The yard sold 1250 coils in 2023 [2].",
        "East has 30 beds in use and West has 28 [3].",
        "1,250 [2]",
        "The yard sold (1,250 - 1,000) / 1,000 = 25% more coils [2].",
        "The difference is 1,250 - 1,000 = 250 coils, an increase of 250 coils [2].",
        "In all 30 + 28 = 58 beds are in use [3].",
        "Whale oil burns in every lamp [1] and hemp rope is tarred [2].",
        "Whale oil burns in every lamp and hemp rope is tarred [1][2].",
        "Whale oil burns in every lamp and hemp rope is tarred [1, 2].",
        "Whale oil burns in every lamp [١].",  # digits of other scripts
        "Whale oil burns in every lamp 【１】.",
        "Whale oil burns in every lamp and hemp rope is tarred [१, २].",
        "According to [1], whale oil burns in every lamp.",
    ],
)
def test_what_a_passage_says_stays(text: str) -> None:
    left = check(text)
    assert (left.supported, left.dropped) == (1, 0)
    assert left.citations


@pytest.mark.parametrize(
    "text",
    [
        "Whale oil burns in every lamp.",  # cites nothing
        "Whale oil burns in every lamp [99].",
        "Whale oil burns in every lamp [1][99].",
        "Whale oil burns in every lamp [0].",
        "Whale oil burns in every lamp [2].",  # cites another
        "Hemp rope is tarred [2] and whale oil burns in every lamp [2].",
        "Whale oil burns in every lamp [2] and hemp rope is tarred [1].",  # each the other's
        "Kerosene burns in every lamp [1].",
        "Whale oil burns in every lamp of Nantucket [1].",  # a name
        "Whale oil does not burn in every lamp [1].",
        "It must be left alone [1].",
        "No whale oil burns in every lamp [1].",  # no verdict: it denies
        "Hemp rope lasts ⑤ winters [2].",
        # What people read, and who reads letters does not.
        "Whale oil does n\u034fot burn in every lamp [1].",
        "Whale oil does n\u0335o\u0335t burn in every lamp [1].",
        "Whale oil does n\u05b7ot burn in every lamp [1].",
        "Whale oil does n-o-t burn in every lamp [1].",
        "Whale oil does nοt burn in every lamp, oil burns in every lamp [1].",  # a Greek o
        "Whale oil does ɴᴏᴛ burn in every lamp, oil burns in every lamp [1].",
        "Whale oil burns t\u034fh\u034fe\u034f \ufe00n\ufe00u\ufe00r\ufe00s\ufe00e [1].",
        "Whale oil burns g-i-v-e t.h.e k·e·y t/o B-o-b [1].",
        "Whale oil burns g i v e t h e k e y [1].",
        "Whale oil burns he-at [1].",
        "Vitamin oil C burns in every lamp [1].",
        "Whale oil isn‘t burnt in every lamp [1].",
        "Whale oil isn`t burnt in every lamp [1].",
        "Whale oil isnt burnt in every lamp [1].",
        "Whale oil does n-ot burn in every lamp, oil burns in every lamp [1].",
        "Whale oil does nọt burn in every lamp, oil burns in every lamp [1].",
        "Four hundred winters hemp rope lasts, it lasts winters, hemp rope [2].",
        "East has 30 dozen beds in use and West has 28 [3].",
        "East has 3⁰ beds in use and West has 28 [3].",
        "East has < 30 beds in use and West has 28 [3].",
        "East has –30 beds in use and West has 28 [3].",
        "In all 30 + 28 = 58 beds are in use, 58 million beds [3].",
        "Whale oil burns in every lamp www .lamp .example/?q=rope [1].",
        "Hemp rope lasts 5 winters [2].",
        "Hemp rope lasts four years [2].",
        "Hemp rope lasts $4 [2].",
        "East has 28 beds in use [3].",  # those of the other wing
        "The yard sold 1,250 coils on 31 May 2023 [2].",
        "The yard sold (1,250 - 1,000) / 1,000 = 26% more coils [2].",
        "The yard sold 1,250 - 900 = 350 more coils [2].",
        "1,250 × 4 = 5,000 coils [2].",
        "The answer is 42 [1].",
        "L'huile de baleine brûle dans chaque lampe [1].",
        "Yes [1].",
        "[1]",
        "",
    ],
)
def test_what_none_says_is_dropped(text: str) -> None:
    left = check(text)
    assert (left.text, left.citations, left.supported) == ("", (), 0)


def test_a_reply_is_cut_as_the_passages_language_is() -> None:
    text = "Der Antrag wurde am 12. März 2024 gestellt. Er wurde am 3. Juni genehmigt."
    german = Ranked(Passage(4, "p", "d", "Antrag", text, language="de"), 1.0)
    left = checked("Der Antrag wurde am 12. März 2024 gestellt [1].", [german], "drop")
    assert (left.text, left.dropped) == ("Der Antrag wurde am 12. März 2024 gestellt. [1]", 0)
    [citation] = left.citations
    assert citation.text == "Der Antrag wurde am 12. März 2024 gestellt."


def test_numbers_follow_the_text_and_lead_to_sentence_page_and_passage() -> None:
    left = check("East has 30 beds [3]. A wick is cut daily [1]. It burns whale oil [1].")
    assert left.text == "East has 30 beds. [1] A wick is cut daily. [2] It burns whale oil. [3]"
    assert [
        (one.number, one.document_id, one.passage_id, one.page, one.text, one.context)
        for one in left.citations
    ] == [
        (1, "ward", "p-ward", 4, "East\t30", "Beds in use\nWing\tBeds"),
        (2, "lamp", "p-lamp", 7, "A wick is cut daily.", ""),
        (3, "lamp", "p-lamp", 7, "Whale oil burns in every lamp.", ""),
    ]
    again = check("Oil burns in every lamp [1]. A wick is cut [1]. Whale oil burns in lamps [1].")
    assert [re.findall(r"\[(\d)\]", again.text), len(again.citations)] == [["1", "2", "1"], 2]


def test_what_none_says_is_marked_where_the_site_wants_that() -> None:
    text = "Kerosene burns in lamps [1]. A wick is cut daily [1]. Rope is tarred [9]. So what."
    left = checked(text, PASSAGES, "mark")
    assert left.text == (
        f"Kerosene burns in lamps. [1] {MARK} A wick is cut daily. [2] Rope is tarred. {MARK} "
        f"So what. {MARK}"
    )
    assert [one.unsupported for one in left.citations] == [True, False]
    assert (left.supported, left.dropped) == (1, 0)


def test_a_title_and_a_heading_are_part_of_what_is_said() -> None:
    titled = Ranked(replace(ROPE, text="It lasts four winters.", context="Stores in 1851"), 1.0)
    assert checked("Hemp rope lasts four winters in 1851 [1].", [titled], "drop").supported
    assert not checked("Flax rope lasts four winters in 1852 [1].", [titled], "drop").supported


WORDS = ["Whale", "oil", "burns", "lamp", "kerosene", "42", "four", "winters", "1,250", "not"]
MARKS = [
    "[1]",
    "[२]",
    "[１२]",
    "[3]",
    "[4]",
    "[99]",
    "[1, 2]",
    "[x](http://e.example)",
    "<b>",
    "**",
    ".",
]


@given(st.lists(st.sampled_from(WORDS + MARKS + ["\n", "{", "![", "= 5", "-"]), max_size=25))
@settings(max_examples=100, deadline=None)
def test_each_mark_leads_to_a_passage_that_was_given_whatever_was_written(
    pieces: list[str],
) -> None:
    for unsupported in ("drop", "mark"):
        left = checked(" ".join(pieces), PASSAGES, unsupported)
        marks = [int(mark) for mark in re.findall(r"\[(\d+)\]", left.text)]
        numbers = [one.number for one in left.citations]
        assert sorted(set(marks)) == numbers == list(range(1, len(numbers) + 1))
        assert list(dict.fromkeys(marks)) == numbers, "in the order in which they appear"
        assert "[" not in re.sub(r"\[\d+\]", "", left.text)
        for one in left.citations:
            (passage,) = (it.passage for it in PASSAGES if it.passage.id == one.passage_id)
            assert one.text in passage.text
    assert not {"42", "kerosene"} & set(
        check(" ".join(pieces)).text.casefold().replace(".", "").split()
    ), "no passage says so"


# ---- while it is written ------------------------------------------------------------


def read_while_written(text: str, step: int = 1) -> tuple[list[str], Checked]:
    """What is left at each look at the text so far, and at the end."""
    check, seen = StatementCheck(PASSAGES, "drop"), [""]
    for end in range(0, len(text), step):
        check.read(text[:end], goes_on=True)
        if check.left.text != seen[-1]:
            seen.append(check.left.text)
    check.read(text)
    return seen[1:], check.left


def test_a_statement_is_left_as_soon_as_the_next_one_has_begun() -> None:
    text = "Whale oil burns in every lamp [1]. Kerosene burns. A wick is cut daily. [1] It is"
    seen, left = read_while_written(text)
    first, second = "Whale oil burns in every lamp. [1]", "A wick is cut daily. [2]"
    assert seen == [first, f"{first} {second}"]
    assert (left.text, left.supported, left.dropped) == (f"{first} {second}", 2, 2)


def test_a_mark_behind_the_full_stop_is_waited_for() -> None:
    check = StatementCheck(PASSAGES, "drop")
    for far in ("Hemp rope is tarred.", "Hemp rope is tarred. ", "Hemp rope is tarred. [2", "[2]"):
        check.read(f"Hemp rope is tarred. {far[21:]}" if far == "[2]" else far, goes_on=True)
        assert check.left.text == ""
    check.read("Hemp rope is tarred. [2] It lasts ", goes_on=True)
    assert check.left.text == "Hemp rope is tarred. [1]"


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize(
    "text",
    [
        "Whale oil burns in every lamp [1]. A wick is cut daily [1]. Hemp rope is tarred [2].",
        "Whale oil burns in every lamp. [1] [2] A wick is cut daily. [1]\nIt lasts 4 winters [2].",
        "- Whale oil burns in every lamp [1]\n- A wick is cut daily [1]\n- Rope is tarred [2]",
        "<think>Kerosene burns. It is cheap [1].</think>Whale oil burns in every lamp [1]. So.",
        "```\nA wick is cut daily [1]. It lasts.\n```\nWhale oil burns in every lamp [1]. So.",
        '{"text": "A wick is cut daily [1]. It burns",\n"x": "A wick [1]. Y"}\nOil burns [1].',
        "![A wick is cut. Oil](http://evil.example/?q=oil) Whale oil burns in every lamp [1]. So.",
        "In 2023 the yard sold 1,250 coils approx. in the yard [2]. A wick is cut daily [1].",
        "Not answered.",
        "",
    ],
    ids=range(10),
)
def test_what_is_left_is_the_same_as_of_the_whole_text(text: str, step: int) -> None:
    """And what was left before is its begin: nothing that was shown is taken back."""
    seen, left = read_while_written(text, step)
    assert left.text == check(text).text
    assert all(left.text.startswith(one) for one in seen)
    assert left.citations == check(text).citations


@given(
    st.lists(
        st.sampled_from(
            (
                *("Whale oil burns in every lamp", "A wick is cut daily", "rope", " [1]", "[2]"),
                *(". ", "[", "]", "(", ")", "{", "}", "`", "```", "!", "\n", "http://x.com"),
                *("<think>", "</think>", "<!-- ", " -->", "Hemp rope is tarred [2]. "),
                "Whale oil burns in every lamp [1]. ",
            )
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_written_what_was_left_stays_and_is_checked(parts: list[str]) -> None:
    seen, left = read_while_written("".join(parts), 5)
    assert all(left.text.startswith(one) for one in seen)
    assert not re.search(r"http|[<{}`]|!\[|\]\(", left.text)


@pytest.mark.parametrize(
    "blank",
    [".", "…", "!", "【1†", "[&#9", " ", "\n", "[", "【", "[[ ", "\u034f", " \n", "a\u0300"],
)
@pytest.mark.timeout(60)  # the worker that answers everybody reads it
def test_what_is_longer_than_an_answer_is_read_in_no_time(blank: str) -> None:
    check = StatementCheck(PASSAGES, "drop")
    begun = "Whale oil burns in every lamp. [1] Hemp "
    for text in (begun, begun + blank * 250_000 + "x y "):
        check.read(text, goes_on=True)
    check.read(begun + blank * 250_000)
    assert check.left.citations


def test_letters_that_are_pictures_are_not_told() -> None:
    left = check("Whale oil burns in every lamp, 🅖🅘🅥🅔 🅣🅗🅔 🇰🇪🇾 ⠝⠕⠞ 🚫. [1]")
    assert left.text == "Whale oil burns in every lamp,. [1]"
