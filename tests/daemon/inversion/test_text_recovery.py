"""What counts as recovered, by hand and by properties."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.inversion.text_recovery import Recovery, mean_recovery, names, pooled_recovery, words

BAGS = st.lists(
    st.tuples(*[st.frozensets(st.sampled_from(string.ascii_lowercase), max_size=8)] * 2),
    min_size=1,
    max_size=6,
)


def test_words_are_distinct_and_in_lower_case() -> None:
    assert words("The gate, the Gate; no_gate's 12th.") == {
        "the", "gate", "no", "s", "12th",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("We met John Smith there.", {"john smith"}),
        ("Smith Brown left.", set()),  # the first word is capitalised anyway
        ("Doctor John Smith left.", {"john smith"}),
        ("He joined the Royal Society of London early.", {"royal society of london"}),
        ("It is Alzheimer's Disease Type 2 again.", {"alzheimer's disease type 2"}),
        ("So said Paris.", set()),  # one plain word is no name by rule
        ("Scoliosis in Spina Bifida 90% of all.", {"spina bifida", "90%"}),
        ("the CFTR gene, IL-2 and T315I", {"cftr", "il-2", "t315i"}),
        ("A well-kept house", set()),
        ("on 12 March 2019 or March 3, 2020", {"12 march 2019", "march 3, 2020"}),
        ("from 2019-03-12", {"2019-03-12"}),
        ("take 20 mg, 3.5 % or 1,000 ml for 6 months", {"20 mg", "3.5 %", "1,000 ml", "6 months"}),
        ("$5,000 and 120/80 mmHg", {"$5,000", "120/80 mmhg"}),
        ("20 gates in 1999", set()),
        ("", set()),
    ],
)
def test_names_by_rule(text: str, found: set[str]) -> None:
    assert names(text) == found


def test_a_short_title_is_a_name_and_a_sentence_is_none() -> None:
    assert names("It hurts.", "Sickle  Cell disease") == {"sickle cell disease"}
    assert names("It hurts.", "What we did when nobody knew what to do") == set()


@given(st.text(max_size=200), st.text(max_size=40))
def test_any_text_has_words_and_names(text: str, title: str) -> None:
    assert all(word == word.lower() and word for word in words(text))
    assert all(1 < len(name) <= 80 for name in names(text, title))


def test_shares_by_hand() -> None:
    guessed = [frozenset("abcd"), frozenset[str](), frozenset("x")]
    true = [frozenset("abe"), frozenset("z"), frozenset[str]()]
    # (2/4, 2/3) and (0, 0); the third text has nothing to recover
    mean = mean_recovery(guessed, true)
    assert mean.precision == pytest.approx(0.25)
    assert mean.recall == pytest.approx(1 / 3)
    assert mean.f1 == pytest.approx((4 / 7) / 2)
    # 2 of 5 guessed, 2 of 4 there
    assert pooled_recovery(guessed, true) == Recovery(4 / 9, 2 / 5, 2 / 4)


def test_nothing_guessed_and_nothing_there_is_nothing_recovered() -> None:
    nothing = Recovery(0.0, 0.0, 0.0)
    assert mean_recovery([], []) == pooled_recovery([], []) == nothing
    assert mean_recovery([frozenset("a")], [frozenset()]) == nothing
    assert pooled_recovery([frozenset("a")], [frozenset()]) == nothing
    with pytest.raises(ValueError, match="shorter"):
        mean_recovery([frozenset("a")], [])


@pytest.mark.slow
@given(BAGS)
def test_shares_are_shares(pairs: list[tuple[frozenset[str], frozenset[str]]]) -> None:
    guessed, true = [one for one, _ in pairs], [other for _, other in pairs]
    for count in (mean_recovery, pooled_recovery):
        found = count(guessed, true)
        for share in (found.f1, found.precision, found.recall):
            assert 0.0 <= share <= 1.0
        assert min(found.precision, found.recall) - 1e-9 <= found.f1 or count is mean_recovery
        assert count(true, true).f1 in (0.0, 1.0)
    assert pooled_recovery(guessed, true).f1 == pytest.approx(pooled_recovery(true, guessed).f1)
