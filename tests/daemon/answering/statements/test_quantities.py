"""Numbers are the same however they are written, and calculations come out or don't."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.answering.statements.quantities import Date, figures_of


def is_in(said: str, source: str, beside: str = "") -> bool:
    """Whether all figures of one text are in another."""
    mine, its = figures_of(said), figures_of(source, stated=False)
    words = frozenset(beside.casefold().split())
    return (
        all(one.is_in(its.quantities, words) for one in mine.quantities)
        and all(one.is_in(its.dates) for one in mine.dates)
        and mine.codes <= its.codes
    )


@pytest.mark.parametrize(
    ("said", "source"),
    [
        ("1,234.50", "1234.5"),
        ("4 winters", "four winters"),
        ("twelve", "12"),
        ("5 million", "5,000,000"),
        ("$5", "5 dollars"),
        ("12%", "12 percent"),
        ("5 mcg", "5 μg"),
        ("12,5 kg", "12.5 kg"),
        ("2021", "FY2021"),
        ("31 May 2024", "2024-05-31"),
        ("May 31, 2024", "on 31 May 2024"),
        ("31.05.2024", "May 31st, 2024"),
        ("May 2024", "2024-05-31"),
        ("31 May", "31 May 2024"),
        ("in 2024", "2024-05-31"),
        ("B12", "vitamin B12"),
        ("10–20", "10 to 20"),
    ],
)
def test_the_same_is_known_by_another_writing(said: str, source: str) -> None:
    assert is_in(said, source)


@pytest.mark.parametrize(
    ("said", "source"),
    [
        ("5", "15"),
        ("5", "5.5"),
        ("1.5", "1,5 and 15"[4:]),
        ("-5", "5"),
        ("5 mg", "5 g"),
        ("5 days", "5 weeks"),
        ("5%", "5 patients"),
        ("5 billion", "5 million"),
        ("12", "B12"),
        ("B12", "B 12"),
        ("31 May 2024", "30 May 2024"),
        ("31 May 2024", "May 2024"),
        ("31 May 2024", "31 May 2023 and 2024"),
        ("42", "forty"),
    ],
)
def test_something_else_is_not(said: str, source: str) -> None:
    assert not is_in(said, source)


def test_a_header_says_the_unit_and_the_scale() -> None:
    assert is_in("$5 million", "Revenue\t5", beside="in $ million")
    assert not is_in("$5 million", "Revenue\t5", beside="in euro million")
    assert not is_in("$5 billion", "Revenue\t5", beside="in $ million")


def test_a_day_that_two_countries_read_otherwise_is_either() -> None:
    assert figures_of("05/06/2024", stated=False).dates == {Date(2024, 6, 5), Date(2024, 5, 6)}


@pytest.mark.parametrize(
    "text",
    [
        "30 - 25 = 5",
        "(30 − 25 = 5)",
        "In 2023 30 + 25 = 55",
        "12.5 + 7.5 = 20.00",
        "10 / 3 = 3.33",
        "10 / 4 = 2.5",
        "25 / 50 = 50%",
        "(30 - 25) / 25 = 20%",
        "(30 - 25) / 25 × 100 = 20.0 %",
        "5% + 3% = 8%",
        "$1,250 - $1,000 = $250",
        "25 - 30 = -5",
    ],
)
def test_what_comes_out_comes_out(text: str) -> None:
    (made,) = figures_of(text).calculations
    assert made.right


@pytest.mark.parametrize(
    "text",
    [
        "30 - 25 = 6",
        "25 - 30 = 5",
        "10 / 3 = 3.34",
        "(30 - 25) / 25 = 25%",
        "10 × 3 = 30",
        "1 / 0 = 5",
        "1 + 1 1 = 3",
        "2 + () = 2 + 2 = 5",
        "+".join(["1"] * 41) + " = 41",
    ],
)
def test_what_does_not_come_out_or_is_no_sum_or_ratio_is_not_right(text: str) -> None:
    assert not any(made.right for made in figures_of(text).calculations)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_each_of_the_four_comes_out_for_all_numbers(one: int, other: int) -> None:
    change = Fraction(one - other, other)
    texts = [
        f"{one:,} + {other} = {one + other}",
        f"{one} - {other:,} = {one - other}",
        f"{one} / {other} = {one / other:.4f}",
        f"({one} - {other}) / {other} = {float(change * 100):.1f}%",
        f"({one} - {other}) / {other} × 100 = {float(change * 100):.1f}%",
    ]
    assert [figures_of(text).calculations[0].right for text in texts] == [True] * 5


@given(st.text(alphabet="0123456789.,-+*/()=%$ mgMay", max_size=60))
def test_no_text_breaks_the_reading(text: str) -> None:
    for stated in (True, False):
        figures_of(text, stated=stated)
