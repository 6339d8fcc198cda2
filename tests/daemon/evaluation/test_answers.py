"""Figures on answers: by hand, against the libraries' own, and on odd texts."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.evaluation import answers as module
from daemon.evaluation.answers import (
    LOWER_IS_BETTER,
    Scores,
    by_label,
    exact_match,
    normalised,
    score_citations,
    score_text,
    token_f1,
    without_marks,
    words_of,
)
from daemon.jobs.answers import GivenAnswer, figures_of_answers, score
from daemon.process.chat_client import Likelihood

SCRIPTS = [
    "The cat sat on the mat today.",
    "Η γάτα κάθεται στο χαλί, σήμερα!",
    "Кошка сидела на коврике сегодня",
    "猫は今日マットの上に座った。",
    "القطة جلست على السجادة اليوم",
    "naïve café",
    "x",
    "猫",
    "42",
]


def figures(answer: str, *references: str) -> dict[str, float]:
    return score_text(answer, references).figures


# ---- what equal, empty and short texts get ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("text", SCRIPTS)
def test_an_answer_that_is_the_right_one_is_perfect_in_any_script(text: str) -> None:
    found = figures(text, text)
    assert (found["cer"], found["wer"]) == (0.0, 0.0)
    of_equal = {"meteor-stem": 1 - 0.5 / len(words_of(text)) ** 3, "cer": 0.0, "wer": 0.0}
    pairs = len(words_of(text)) > 1  # a word alone has no pairs of words
    for name, value in found.items():
        expected = of_equal.get(name, float(pairs) if name.startswith("rouge-2") else 1.0)
        assert value == pytest.approx(expected), name


@pytest.mark.slow
@pytest.mark.parametrize("text", SCRIPTS)
def test_no_answer_is_the_worst_answer(text: str) -> None:
    for nothing in ("", " \n "):
        found = figures(nothing, text)
        assert {found.pop("cer"), found.pop("wer")} == {1.0}
        assert set(found.values()) == {0.0}


def test_signs_alone_are_compared_as_they_are() -> None:
    """Else "?" would be the right answer to what "the" answers: neither has a word."""
    assert (exact_match("?", "?"), exact_match("?", "the"), exact_match("?", "word")) == (1, 0, 0)
    assert (token_f1("?", " ?"), token_f1("!", "?"), token_f1("the", "word")) == (1, 0, 0)
    found = figures("...", "...")
    assert (found["em"], found["cer"], found["wer"], found["rouge-1-f"]) == (1, 0, 0, 0)


# ---- by hand ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_by_hand() -> None:
    """Of four words one is replaced and one left out."""
    found = figures("one two nine", "one two three four")
    assert found["wer"] == pytest.approx(2 / 4)
    assert (found["rouge-1-p"], found["rouge-1-r"]) == pytest.approx((2 / 3, 2 / 4))
    assert found["rouge-1-f"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert (found["rouge-2-p"], found["rouge-2-r"]) == pytest.approx((1 / 2, 1 / 3))
    assert (found["rouge-l-p"], found["rouge-l-r"]) == pytest.approx((2 / 3, 2 / 4))
    assert found["token-f1"] == pytest.approx(2 * 2 / (3 + 4))
    assert found["em"] == 0.0
    assert found["cer"] == pytest.approx(_edits("one two nine", "one two three four") / 18)
    # METEOR: two words match in one chunk; F weighs recall nine times, as nltk has it.
    mean = (2 / 3) * (2 / 4) / (0.9 * 2 / 3 + 0.1 * 2 / 4)
    assert found["meteor-stem"] == pytest.approx(mean * (1 - 0.5 * (1 / 2) ** 3))


@pytest.mark.slow
def test_bleu_by_its_definition() -> None:
    """Precisions 5/6, 3/5, 2/4, 1/3 of a six-word answer, as long as the right one."""
    found = figures("a b c d x f", "a b c d e f")
    assert found["bleu"] == pytest.approx(math.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** 0.25)
    # Two words of the right four: both precisions are 1, and it is too short by exp(1 - 4/2).
    assert figures("a b", "a b c d")["bleu"] == pytest.approx(math.exp(-1))


@pytest.mark.slow
def test_chrf_by_its_definition() -> None:
    """Recall counts twice; of characters a b against a c one of two is right, no pair of them."""
    of_letters = 0.5
    assert figures("ab", "ac")["chrf"] == pytest.approx(of_letters / 2, abs=1e-6)
    found = figures("tac eht", "the cat")
    assert found["chrf++"] < found["chrf"], "no word is right"


def test_an_answer_many_times_too_long_has_more_errors_than_words() -> None:
    assert figures("no it is not so", "yes")["wer"] == 5.0


def test_exact_match_forgives_case_punctuation_and_articles() -> None:
    assert normalised("The Answer, an 'apple'!") == ["answer", "apple"]
    assert [exact_match(one, two) for one, two in (
        ("THE answer.", "an answer"), ("answer two", "answer"),
    )] == [1.0, 0.0]  # fmt: skip
    assert token_f1("x x", "x y") == pytest.approx(2 * 1 / 4), "a word counts as often as it stands"


def test_citations_against_the_right_documents_by_hand() -> None:
    found = score_citations(["a", "b", "b", "c"], ["b", "d"])
    assert (found["cites-p"], found["cites-r"]) == (1 / 3, 1 / 2)
    assert score_citations(["a#1", "a#7"], ["a#0"]) == {"cites-p": 1.0, "cites-r": 1.0}
    assert score_citations([], ["b"]) == {"cites-p": 0.0, "cites-r": 0.0}


# ---- the libraries' own ----------------------------------------------------------------------


def _edits(one: str, other: str) -> int:
    """Levenshtein distance, by its recurrence."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        now = [row]
        for column, wanted in enumerate(other, start=1):
            change = before[column - 1] + (letter != wanted)
            now.append(min(change, before[column] + 1, now[-1] + 1))
        before = now
    return before[-1]


PLAIN = st.text("ab c-", min_size=1, max_size=14).filter(lambda t: bool(t.strip()))


@pytest.mark.slow
@given(PLAIN, st.text("ab c-", max_size=14))
@settings(max_examples=60, deadline=None)
def test_character_errors_are_levenshtein(reference: str, answer: str) -> None:
    one, other = " ".join(answer.split()), " ".join(reference.split())
    assert figures(answer, reference)["cer"] == pytest.approx(_edits(one, other) / len(other))


@pytest.mark.slow
def test_of_plain_english_rouge_is_what_the_library_makes_of_it() -> None:
    """The rule by which it cuts words is ours; for letters a to z both are one."""
    from rouge_score.rouge_scorer import RougeScorer

    own = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    chance = random.Random(1)
    words = ["running", "the", "cats'", "ran", "well-known", "studies_of", "(studied)", "3.5"]
    for _ in range(50):
        answer, right = (" ".join(chance.choices(words, k=chance.randint(1, 9))) for _ in range(2))
        theirs, found = own.score(right, answer), figures(answer, right)
        for kind, name in (("rouge1", "rouge-1"), ("rouge2", "rouge-2"), ("rougeL", "rouge-l")):
            ours = [found[f"{name}-{part}"] for part in "prf"]
            assert ours == pytest.approx(list(theirs[kind])), (answer, right)


@pytest.mark.slow
def test_without_a_rule_of_ours_rouge_knows_no_other_script() -> None:
    """Why there is one."""
    from rouge_score.rouge_scorer import RougeScorer

    greek = "Η γάτα κάθεται"
    assert RougeScorer(["rouge1"]).score(greek, greek)["rouge1"].fmeasure == 0.0
    assert figures(greek, greek)["rouge-1-f"] == 1.0


@pytest.mark.slow
def test_bleu_of_a_language_without_spaces_is_of_its_characters() -> None:
    found = figures("猫は今日座った", "猫は昨日座った")
    assert 0.2 < found["bleu"] < 1.0, "as one word each they would have nothing in common"
    assert found["rouge-1-f"] == pytest.approx(6 / 7)


# ---- whatever is compared --------------------------------------------------------------------


TEXT = st.text(max_size=30).filter(lambda t: "\0" not in t)
RIGHT = TEXT.filter(lambda t: bool(t.strip()))


@pytest.mark.slow
@given(TEXT, st.lists(RIGHT, min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_figures_have_bounds_and_the_best_right_answer_counts(
    answer: str, references: list[str], chance: random.Random
) -> None:
    found = figures(answer, *references)
    alone = [figures(answer, one) for one in references]
    for name, value in found.items():
        assert value >= 0.0
        assert value <= 1.0 or name in LOWER_IS_BETTER
        if name in LOWER_IS_BETTER:
            assert value == min(one[name] for one in alone)
        elif not name.startswith("rouge"):
            assert value == pytest.approx(max(one[name] for one in alone)), name
    for kind in ("rouge-1", "rouge-2", "rouge-l"):
        best = max(alone, key=lambda one: one[f"{kind}-f"])
        assert found[f"{kind}-f"] == pytest.approx(best[f"{kind}-f"])
        parts = [found[f"{kind}-{part}"] for part in "prf"]
        assert any(parts == pytest.approx([one[f"{kind}-{p}"] for p in "prf"]) for one in alone)
    chance.shuffle(references)
    again = figures(answer, *references)
    assert {name: again[name] for name in found if name[-2:] not in ("-p", "-r")} == pytest.approx(
        {name: value for name, value in found.items() if name[-2:] not in ("-p", "-r")}
    )


# ---- what was answered -----------------------------------------------------------------------


def test_marks_of_citations_are_no_words_of_an_answer() -> None:
    said = "Tar the rope [1]. Keep it dry [2][3], see [7] and [1, 2]."
    assert without_marks(said, [1, 2, 3]) == "Tar the rope. Keep it dry, see [7] and."
    assert without_marks("Law [2019] holds", [1]) == "Law [2019] holds"


def test_an_answer_that_cites_nothing_is_none() -> None:
    """What a generator says where nothing was found is not to be compared with what is right."""
    none = score(GivenAnswer("Tar the rope.", (), ("rope",), ("Tar the rope.",))).figures
    assert (none["answered"], none["em"], none["cites-r"], none["wer"]) == (0, 0, 0, 1)
    said = GivenAnswer("Tar the rope. [1]", ((1, "rope"),), ("rope",), ("Tar the rope.",))
    given_ = score(said).figures
    assert (given_["answered"], given_["em"], given_["cites-p"], given_["wer"]) == (1, 1, 1, 0)


def test_figures_of_labels_are_of_their_questions_alone() -> None:
    kinds = ["cause"] * 6 + ["cure"] * 5 + ["rare"] * 2 + [""]
    scored = [Scores({"em": float(kind == "cure")}) for kind in kinds]
    whole, labelled = figures_of_answers(scored, {"qtype": kinds, "reasoning": [""] * len(kinds)})
    assert whole["em"].mean == pytest.approx(5 / 14)
    assert 0.0 < whole["em"].low < whole["em"].mean < whole["em"].high < 1.0
    assert [(one.value, one.questions, one.figures["em"].mean) for one in labelled] == [
        ("cause", 6, 0.0), ("cure", 5, 1.0),
    ]  # fmt: skip
    many = {"qtype": [str(number % 40) for number in range(400)]}
    assert len(list(by_label(many, fewest=5, most=20))) == 20


def test_a_perplexity_is_of_the_questions_that_have_one() -> None:
    """The geometric mean of 2 and 8, by their logarithms."""
    scored = [Scores({"em": 1.0}, nats={"ppl-written": math.log(one)}) for one in (2, 8)]
    scored.append(Scores({"em": 0.0}))
    means, _ = figures_of_answers(scored, {})
    assert means["ppl-written"].mean == pytest.approx(4)
    assert (means["ppl-written"].questions, means["em"].questions) == (2, 3)
    assert "ppl-reference" not in means
    given = GivenAnswer("oil [1]", ((1, "a"),), ("a",), ("oil",), Likelihood(0.5, None, "not told"))
    scores = score(given)
    assert (scores.nats, scores.missing["ppl-reference"]) == ({"ppl-written": 0.5}, "not told")
    extracted = score(GivenAnswer("oil [1]", ((1, "a"),), ("a",), ("oil",)))
    assert extracted.missing["ppl-written"] == "no language model wrote an answer"


# ---- what is not there -----------------------------------------------------------------------


def write_wordnet(folder: Path) -> None:
    """The smallest WordNet that nltk opens: one noun synset, car and auto."""
    corpus = folder / "corpora" / "wordnet"
    corpus.mkdir(parents=True)
    for part in ("adj", "adv", "noun", "verb"):
        for name in (f"index.{part}", f"data.{part}", f"{part}.exc"):
            (corpus / name).write_text("")
    for name in ("cntlist.rev", "index.sense", "frames.vrb", "sents.vrb", "sentidx.vrb"):
        (corpus / name).write_text("")
    (corpus / "lexnames").write_text(
        "00\tadj.all\t3\n01\tadj.pert\t3\n02\tadv.all\t4\n03\tnoun.Tops\t1\n"
    )
    (corpus / "data.noun").write_text("00000000 03 n 02 car 0 auto 0 000 | a thing with wheels  \n")
    (corpus / "index.noun").write_text("auto n 1 0 1 0 00000000  \ncar n 1 0 1 0 00000000  \n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The multilingual functions")
def test_meteor_knows_synonyms_only_where_wordnet_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk  # takes a second: not when tests are collected
    from nltk.corpus.reader.wordnet import WordNetCorpusReader
    from nltk.corpus.util import LazyCorpusLoader

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    fresh = LazyCorpusLoader("wordnet", WordNetCorpusReader, None)
    monkeypatch.setattr(nltk.corpus, "wordnet", fresh)
    answer, references = "my autos is red", ["my auto is red"]
    without = score_text("my auto is red", ["my car is red"])
    assert "meteor" not in without.figures
    assert "NLTK_DATA" in without.missing["meteor"]
    # By their stems all four words match in one chunk: F = 1, penalty 0.5 * (1 / 4)^3.
    expected = 1 - 0.5 * (1 / 4) ** 3
    assert score_text(answer, references).figures["meteor-stem"] == pytest.approx(expected)
    # Three of four and no synonym: P = R = F = 3/4, two chunks: penalty 0.5 * (2 / 3)^3.
    three = 3 / 4 * (1 - 0.5 * (2 / 3) ** 3)
    assert without.figures["meteor-stem"] == pytest.approx(three)
    write_wordnet(tmp_path)
    with_it = score_text("my auto is red", ["my car is red"])
    assert with_it.missing == {}
    assert with_it.figures["meteor"] == pytest.approx(expected)
    assert with_it.figures["meteor-stem"] == pytest.approx(three), "it stays what it is"


def test_a_library_that_is_not_installed_leaves_out_its_figures_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    scores = score_text("a b", ["a b"])
    assert {name for name in scores.missing if name != "meteor"} == {"wer", "cer"}
    assert "hanse[eval]" in scores.missing["wer"]
    assert "bleu" in scores.figures


def test_every_figure_is_said_above_the_code_and_no_other() -> None:
    found = figures("a b", "a b")
    told: dict[str, Any] = dict.fromkeys(found)
    for name in (*told, "meteor", *score_citations([], ["a"]), "answered"):
        stem = name if not name.startswith("rouge") else name.rpartition("-")[0]
        assert stem in (module.__doc__ or ""), name
    assert np.isfinite(list(found.values())).all()
