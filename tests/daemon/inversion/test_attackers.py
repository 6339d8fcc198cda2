"""Attackers on embeddings: scores by hand, and a small site whose texts can be read or not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.disclosure import noisy
from daemon.inversion import attackers as inversion
from daemon.inversion import inversion_audit, negative_utility
from daemon.inversion.attackers import Dictionary, EmbeddedTexts, Measure
from daemon.inversion.exposure import (
    AuditOptions,
    Exposure,
    ExposureError,
    ExposureProgress,
    Level,
    LevelExposure,
    Share,
    TextsExposure,
    advice,
)
from daemon.inversion.text_recovery import mean_recovery, pooled_recovery
from daemon.jobs import inversion as inversion_job
from daemon.jobs import learning
from daemon.jobs.inversion import audit_embeddings
from daemon.learning.options import LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair
from daemon.library.store import Library
from tests.support.small_models import small_encoder

COLOURS = ["Red", "Old", "New", "Tall", "Dark", "Long"]
THINGS = ["Mill", "Gate", "Bell", "Kiln", "Loom", "Sail", "Rope", "Lamp"]
WORDS = [a + b + c for a, b, c in itertools.product("bdfgk", "aeiou", ["lt", "mp", "rn", "st"])]


def small_site(passages_a_subject: int = 6) -> tuple[list[Document], list[Pair]]:
    """Documents that share no words but by chance, and a question to each second one."""
    chance = np.random.default_rng(5)
    documents, pairs = [], []
    for colour, thing in itertools.product(COLOURS, THINGS):
        title = f"{colour} {thing}"
        for number in range(passages_a_subject):
            drawn = chance.choice(WORDS, 6, replace=False)
            name = f"site/{title}-{number}#0".replace(" ", "-")
            documents.append(Document(name, title, " ".join(drawn)))
            if number % 2:
                pairs.append(Pair(f"where is {' '.join(drawn[:3])}", (name,)))
    everywhere = tuple(document.id for document in documents)  # so of no part of the site
    return documents, [*pairs, Pair("where is everything", everywhere)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    words = [*WORDS, *(word.lower() for word in [*COLOURS, *THINGS])]
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), words, dimension=64, layers=1)
    return RetrieverSpec(encoder=str(folder), max_tokens=48, device="cpu")


@pytest.fixture(scope="module")
def site(spec: RetrieverSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    documents, pairs = small_site()
    learning.ingest(spec, folder / "library.sqlite3", documents, pairs, passage_tokens=40)
    learning.embed_passages(spec, folder / "library.sqlite3")
    return folder


def audited(spec: RetrieverSpec, site: Path, options: AuditOptions) -> Exposure:
    digest = learning.write_initial_version(spec, site / "versions")
    return audit_embeddings(spec, site / "library.sqlite3", site / "versions", digest, options)


# ---- a whole audit -----------------------------------------------------------------------


PROGRESS: list[ExposureProgress] = []


@pytest.fixture(scope="module")
def found(spec: RetrieverSpec, site: Path) -> Exposure:
    with pytest.MonkeyPatch.context() as patch:
        for module in (inversion_job, inversion_audit):  # as a worker's goes to the daemon
            patch.setattr(module, "report", PROGRESS.append)
        return audited(spec, site, AuditOptions(noises=(50.0,), bits=(1, 256), minutes=2, show=2))


@pytest.mark.slow
def test_exact_embeddings_are_read_and_noise_leaves_guessing(found: Exposure) -> None:
    exact, noised, wide, narrow = found.levels
    assert [level.level for level in found.levels] == [
        "exact", "noisy, sigma 50", "bucket, 256 bits", "bucket, 1 bits",
    ]  # fmt: skip
    for level, least, most in ((exact, 0.3, 1.0), (wide, 0.1, 1.0), (noised, -0.05, 0.05)):
        gained = level.passages.telling.f1 - found.guessing_passages.telling.f1
        assert least <= gained <= most, level.level
    assert noised.passages.words.f1 == pytest.approx(found.guessing_passages.words.f1, abs=0.1)
    assert exact.passages.names.f1 > found.guessing_passages.names.f1 + 0.3
    assert noised.passages.names.f1 < found.guessing_passages.names.f1 + 0.1
    assert exact.shuffled.telling.f1 < exact.passages.telling.f1 / 3, "right for that text only"
    assert narrow.questions.telling.f1 < exact.questions.telling.f1 / 2
    assert not any(level.cut_short for level in found.levels)


@pytest.mark.slow
def test_progress_goes_forward_level_by_level(found: Exposure) -> None:
    fractions = [said.fraction for said in PROGRESS]
    assert fractions == pytest.approx(sorted(fractions))
    assert 0.0 == fractions[0] < fractions[-1] <= 1.0
    steps = list(dict.fromkeys(said.step for said in PROGRESS))
    assert steps == ["texts", "dictionary", *(level.level for level in found.levels)]


@pytest.mark.slow
def test_the_audit_says_what_it_is_about(found: Exposure) -> None:
    assert found.passages_known + found.passages_unseen <= 6 * 48
    assert found.passages_unseen == 6 * found.subjects_unseen
    assert found.questions_unseen == 3 * found.subjects_unseen
    assert found.dictionary_names == 48
    exact, noised, _, narrow = found.levels
    assert (exact.overlap, exact.returned) == (1.0, 10.0)
    assert exact.cosine > noised.cosine
    assert noised.overlap < 0.2
    assert narrow.returned > 5
    assert [len(level.examples) for level in found.levels] == [2, 2, 2, 2]
    shown = exact.examples[0]
    assert set(shown.right_words) <= inversion_words(shown.text)
    assert not set(shown.wrong_words) & inversion_words(shown.text)
    assert "lower bound" in found.advice


def inversion_words(text: str) -> set[str]:
    return set(text.lower().split())


@pytest.mark.slow
def test_nothing_is_shown_unasked_and_one_epoch_is_all_that_no_time_gives(
    spec: RetrieverSpec, site: Path
) -> None:
    options = AuditOptions(noises=(), bits=(), minutes=1e-6)
    hasty = audited(spec, site, options)
    assert [level.examples for level in hasty.levels] == [()]
    assert hasty.levels[0].cut_short
    again = audited(spec, site, options)
    assert replace(again, seconds=0) == replace(hasty, seconds=0), "it can be repeated"


# ---- refusals ------------------------------------------------------------------------------


def test_a_site_with_too_few_texts_is_told_how_many_it_needs(
    spec: RetrieverSpec, tmp_path: Path
) -> None:
    documents, pairs = small_site(2)
    learning.ingest(spec, tmp_path / "library.sqlite3", documents, pairs, passage_tokens=40)
    with pytest.raises(ExposureError, match=r"96 passages on 48 subjects .* needs 200 passages"):
        audited(spec, tmp_path, AuditOptions())
    one = [replace(document, title="The Yard") for document in small_site()[0]]
    learning.ingest(spec, tmp_path / "library.sqlite3", one, [], passage_tokens=40)
    with pytest.raises(LearningError, match="on 1 subjects"):
        audited(spec, tmp_path, AuditOptions())


def test_what_is_not_embedded_yet_is_waited_for(spec: RetrieverSpec, tmp_path: Path) -> None:
    learning.ingest(spec, tmp_path / "library.sqlite3", small_site()[0], [], passage_tokens=40)
    with pytest.raises(ExposureError, match="288 of 288 passages are not embedded yet"):
        audited(spec, tmp_path, AuditOptions())


def test_too_many_levels_are_refused() -> None:
    with pytest.raises(ExposureError, match="16 at most"):
        AuditOptions(bits=tuple(range(1, 18))).check()


# ---- who knows what ------------------------------------------------------------------------


@pytest.mark.slow
def test_no_subject_is_known_and_unseen_at_once(site: Path) -> None:
    with Library.open(site / "library.sqlite3", read_only=True) as library:
        texts = inversion_audit.divided(library)
    part_of: dict[str, set[int]] = {}
    for passage, part in zip(texts.passages, texts.passage_part.tolist(), strict=True):
        part_of.setdefault(passage.title, set()).add(part)
    assert all(len(parts) == 1 for parts in part_of.values())
    assert set.union(*part_of.values()) == {0, 1, 2}
    for right, part in zip(texts.right, texts.query_part.tolist(), strict=True):
        assert set(texts.passage_part[right].tolist()) == {part}


@pytest.mark.slow
@given(st.lists(st.sampled_from("abcdefghij"), min_size=30, max_size=200))
def test_parts_are_of_whole_subjects_and_about_their_shares(subject_of: list[str]) -> None:
    subjects = sorted(set(subject_of))
    part_of = inversion_audit._parts(subjects, subject_of)
    assert set(part_of) == set(subjects)
    known = sum(part_of[subject] == 0 for subject in subject_of)
    largest = max(subject_of.count(subject) for subject in subjects)
    assert abs(known - 0.65 * len(subject_of)) <= 2 * largest


# ---- by hand -------------------------------------------------------------------------------

DICTIONARY = Dictionary(["a", "b", "c"], ["x y"], np.eye(4, dtype=np.float32))


def corpus(*texts: str, vectors: list[list[float]] | None = None) -> EmbeddedTexts:
    words = [frozenset(text.split()) for text in texts]
    names = [frozenset({"x y"} if "x" in text.split() else ()) for text in texts]
    made = np.array(vectors or np.eye(len(texts), 4), dtype=np.float32)
    return EmbeddedTexts.of(made, words, names, DICTIONARY)


def test_items_are_found_in_the_dictionary() -> None:
    assert [bag.tolist() for bag in corpus("a c", "x b", "z").bags] == [[0, 2], [1, 3], []]


def test_neighbours_lend_what_they_have_by_rank() -> None:
    known = corpus("a", "b", "c", vectors=[[1, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0, 0, 1]])
    seen = np.array([[1, 0, 0, 0]], dtype=np.float32)
    scores = inversion.neighbour_scores(known.vectors, known.bags, seen, 4, 2)
    np.testing.assert_allclose(scores, [[2 / 3, 1 / 3, 0, 0]], rtol=1e-6)


def test_the_threshold_is_the_best_by_f1() -> None:
    words = Measure("words", np.array([True, True, True, False]), mean_recovery)
    scores = np.array([[0.9, 0.5, 0.1, 9.0], [0.2, 0.8, 0.6, 9.0]], dtype=np.float32)
    held = corpus("a b", "b c")
    threshold, f1 = inversion.choose_threshold(scores, words, held)
    assert 0.2 <= threshold < 0.5
    assert f1 == pytest.approx(1.0)
    guessed = inversion.guesses(scores, words.items, threshold, DICTIONARY.items)
    assert guessed == [frozenset("ab"), frozenset("bc")]
    names = Measure("names", ~words.items, pooled_recovery)
    assert inversion.choose_threshold(scores, names, held)[1] == -1.0, "there are none"


def test_attacker_and_threshold_are_chosen_elsewhere_than_they_are_tested() -> None:
    words = Measure("words", np.array([True, True, True, False]), mean_recovery)
    choose, test = corpus("a", "b"), corpus("b", "c")
    right_on_choose = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=np.float32)
    right_on_test = np.array([[0, 1, 0, 0], [0, 0, 1, 0]], dtype=np.float32)
    attackers = {
        "lucky": (np.roll(right_on_choose, 2, axis=1), right_on_test),
        "honest": (right_on_choose, right_on_choose),
    }
    found, moved, guessed = inversion.best_found(attackers, words, choose, test, DICTIONARY.items)
    assert found == inversion.BestRecovery(0.0, 0.0, 0.0, "honest")
    assert guessed == [frozenset("a"), frozenset("b")]
    assert moved.f1 == pytest.approx(0.5), "b's guess, held against the first text"


def test_what_is_common_tells_nothing() -> None:
    texts = ["a"] * 30 + ["b"]
    held = corpus(*texts, vectors=[[1, 0, 0, 0]] * 31)
    telling = inversion.measures(held, DICTIONARY)[1]
    assert telling.items.tolist() == [False, True, True, False]
    assert inversion._truth(corpus("a b"), telling, DICTIONARY.items) == [frozenset("b")]


def test_signs_are_what_a_bucket_tells() -> None:
    names = np.array([[0b101]], dtype=np.uint8)
    np.testing.assert_allclose(inversion_audit.signs(names, 4), [[0.5, -0.5, 0.5, -0.5]])


# ---- what is left of negatives ---------------------------------------------------------------


def unit(rows: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    drawn = np.random.default_rng(seed).normal(size=(rows, 16))
    vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]] = (
        drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    ).astype(np.float32)
    return vectors


def test_negatives_by_level() -> None:
    passages, queries = unit(400, 1), unit(30, 2)
    right = [np.array([row]) for row in range(30)]
    asked = negative_utility.AuditQuestions.of(queries, passages, right, seed=0)
    exact = negative_utility.utility_of(asked, Level("exact"), b"seed", 0.0)
    assert exact[0] == 1.0
    assert exact[2] == 10.0
    cosines = queries @ passages.T
    cosines[np.arange(30), np.arange(30)] = -2.0
    assert exact[1] == pytest.approx(np.sort(cosines, axis=1)[:, -10:].mean(), abs=1e-5)
    little, much = (
        negative_utility.utility_of(asked, Level("noisy", sigma), b"seed", 0.0)
        for sigma in (0.02, 9.0)
    )
    assert 0.7 < little[0] < 1.0
    assert much[0] < 0.15
    assert much[1] == pytest.approx(negative_utility.at_random(asked), abs=0.05)
    bucket = negative_utility.utility_of(asked, Level("bucket", bits=4), b"seed", 0.0)
    assert negative_utility.at_random(asked) + 0.1 < bucket[1] < exact[1]
    drowned = negative_utility.utility_of(asked, Level("bucket", bits=4), b"seed", 9.0)
    assert drowned[1] == pytest.approx(negative_utility.at_random(asked), abs=0.05), (
        "buckets of noise"
    )
    # The table is searched under its noise, too: that of the question alone does less.
    nearest = np.argsort(-cosines, axis=1)[:, :10]
    noised = noisy(queries, 0.1, np.random.default_rng(0)) @ passages.T
    noised[np.arange(30), np.arange(30)] = -2.0
    found = np.argsort(-noised, axis=1)[:, :10]
    alone = np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(nearest, found, strict=True)])
    assert negative_utility.utility_of(asked, Level("noisy", 0.1), b"seed", 0.0)[0] < alone - 0.05


def test_right_answers_are_no_negatives() -> None:
    passages = unit(3, 1)
    asked = negative_utility.AuditQuestions.of(passages[:1], passages, [np.array([0, 2])], seed=0)
    assert asked.allowed(0).tolist() == [1]
    assert negative_utility.utility_of(asked, Level("exact"), b"seed", 0.0)[2] == 1.0
    nothing = negative_utility.AuditQuestions.of(
        passages[:1], passages, [np.array([0, 1, 2])], seed=0
    )
    assert negative_utility.utility_of(nothing, Level("exact"), b"seed", 0.0) == (0.0, 0.0, 0.0)
    nobody = asked.of(passages[:0], passages, [], seed=0)
    assert negative_utility.utility_of(nobody, Level("exact"), b"", 0.0) == (0.0, 0.0, 0.0)


# ---- advice ----------------------------------------------------------------------------------


def exposed(telling: float, names: float) -> TextsExposure:
    return TextsExposure(Share(), Share(telling), Share(names, 0.5, names))


def level(
    name: str, passages: TextsExposure, questions: TextsExposure, **more: int
) -> LevelExposure:
    return LevelExposure(
        name, 0.0, 0.0, more.get("bits", 0), passages, questions, exposed(0, 0), 0.5, 0.4, 10, False
    )


def test_advice_names_the_level_that_hardly_tells_more_than_guessing() -> None:
    much, little, guess = exposed(0.4, 0.3), exposed(0.07, 0.02), exposed(0.05, 0.01)
    bucket = level("bucket, 8 bits", much, little, bits=8)
    whole = Exposure(
        9, 9, 9, 9, 9, 9, 9, 1e-5, guess, guess, 9, 10, 0.1,
        (level("exact", much, much), level("noisy", little, much), bucket), 1.0,
    )  # fmt: skip
    said = advice(whole)
    assert "names 30 % of the names in unseen passages (50 % of what it says is right" in said
    assert "'bucket, 8 bits' (of questions;" in advice(whole)
    assert "'noisy' keeps" in advice(replace(whole, questions_unseen=0))
    assert "Every level" in advice(replace(whole, levels=whole.levels[:2]))
    nothing = replace(whole, levels=(level("exact", guess, guess),))
    assert "hardly more than guessing; ask again" in advice(nothing)
