"""Mixtures of what all sites learned and what one learned alone, and which of them answers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from config.recipes import AloneAxes
from daemon.jobs import learning, personal
from daemon.learning.options import LearningError, Personalised, TrainingError, TrainingOptions
from daemon.learning.retriever.encoder import Texts
from daemon.learning.retriever.peer_negatives import AskingTerms
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet
from daemon.library.readers.documents import Document, Pair
from daemon.personal import mixture
from daemon.personal.held_out import folds_by_answer, judging, subset
from daemon.personal.mixture import FAR, SHARES, best_share, mix, near_enough
from daemon.personal.serving import load_serving, retriever_for
from daemon.personal.store import PersonalStore, embedded_by
from daemon.state.versions import read_version, write_version
from tests.support.small_models import small_encoder

VECTORS = arrays.arrays(
    np.float32, 5, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)
OPTIONS = TrainingOptions(local_epochs=2, batch_size=4, learning_rate=3e-3, hard_negatives=2)
THINGS = ("anchor", "barrel", "candle", "drum", "easel", "funnel", "goblet", "hammer")


# ---- arithmetic ------------------------------------------------------------------


@pytest.mark.slow
@given(shared=VECTORS, own=VECTORS, share=st.sampled_from(SHARES))
def test_a_mixture_lies_between_its_halves(
    shared: np.ndarray, own: np.ndarray, share: float
) -> None:
    mixed = mix(shared, own, share)
    assert mixed.dtype == np.float32
    assert (mixed >= np.minimum(shared, own)).all()
    assert (mixed <= np.maximum(shared, own)).all()
    assert np.array_equal(mix(shared, own, 0.0), shared)
    assert np.array_equal(mix(shared, own, 1.0), own)


def test_halves_of_different_retrievers_do_not_mix() -> None:
    with pytest.raises(LearningError, match="made for another retriever"):
        mix(np.zeros(3, np.float32), np.zeros(4, np.float32), 0.5)


def test_chance_does_not_move_the_share_and_evidence_does() -> None:
    usual = np.array([0.5, 0.5, 1.0, 1.0])
    by_chance = usual + np.array([0.5, -0.4, 0.0, 0.0])  # mean 0.025, error 0.19
    better = usual + np.array([0.2, 0.3, 0.2, 0.3])  # mean 0.25, error 0.03
    best = better + 0.1
    worse = usual - 0.1
    assert best_share({0.0: worse, 0.5: usual, 1.0: by_chance}) == 0.5
    assert best_share({0.0: better, 0.5: usual, 1.0: by_chance}) == 0.0
    assert best_share({0.0: worse, 0.5: usual, 0.25: better, 0.75: best}) == 0.75
    assert best_share({0.0: usual, 0.5: usual}) == 0.5
    assert best_share({0.0: np.array([0.2]), 0.5: np.array([0.3]), 1.0: np.array([1.0])}) == 0.5


def test_a_sites_own_is_never_worse_than_what_is_shared_as_far_as_it_knows() -> None:
    usual = np.array([0.5, 0.5, 1.0, 1.0])
    slightly = usual + np.array([0.5, -0.4, 0.0, 0.0])  # by chance, perhaps
    assert best_share({0.0: slightly, 0.5: usual}) == 0.0


def test_half_is_mixed_in_where_what_was_learned_alone_is_nearly_as_good() -> None:
    flattered = np.array([1.0, 1.0, 0.5, 1.0])
    assert near_enough(flattered, np.array([1.0, 0.5, 0.5, 1.0]))
    assert near_enough(flattered, np.array([1.0, 1.0, 1.0, 1.0]))
    assert not near_enough(flattered, np.array([1.0, 0.25, 0.25, 1.0]))


@given(
    answers=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    count=st.integers(2, 5),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_pair_judges_once_and_nothing_that_its_answer_taught(
    answers: list[int], count: int, seed: int
) -> None:
    positives = [np.array([answer, 7]) for answer in answers]
    texts = Texts([""] * len(answers))
    folds = folds_by_answer(TrainingSet(texts, texts, positives, positives), count, seed)
    assert len(folds) == count
    assert sorted(np.concatenate(folds).tolist()) == list(range(len(answers)))
    fold_of = {int(row): fold for fold, rows in enumerate(folds) for row in rows}
    for answer in set(answers):
        assert len({fold_of[row] for row, a in enumerate(answers) if a == answer}) == 1
    sizes = [len({answers[row] for row in rows}) for rows in folds]
    assert max(sizes) - min(sizes) <= 1


def test_what_was_made_of_one_passage_judges_together_and_by_all_of_it() -> None:
    """A passage's own title asks for it, and one of its sentences for the rest of it."""
    texts = Texts(["whole", "the rest", "another"], np.eye(3, dtype=np.float32))
    queries = Texts(["title", "sentence"], np.eye(3, dtype=np.float32)[:2])
    positives, right = [np.array([0]), np.array([1])], [np.array([0, 1])] * 2
    pairs = TrainingSet(queries, texts, positives, positives, right=right)
    for seed in range(20):
        sizes = [len(rows) for rows in folds_by_answer(pairs, 2, seed)]
        assert sorted(sizes) == [0, 2]
    judged = judging(pairs, np.array([1]))
    assert [rows.tolist() for rows in judged.positives] == [[0, 1]]


def test_a_subset_of_pairs_is_one_in_every_column() -> None:
    rows = [np.array([n]) for n in range(4)]
    texts = Texts(list("abcd"), np.eye(4, dtype=np.float32))
    parent = (np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32))
    whole = TrainingSet(texts, texts, rows, rows[::-1], parent, right=rows)
    part = subset(whole, np.array([3, 1]))
    assert part.queries.texts == ["d", "b"]
    assert part.passages is texts
    assert part.right is not None
    assert part.parent is not None
    assert part.queries.features is not None
    for column in (part.positives, part.right, list(part.parent[0]), list(part.queries.features)):
        assert len(column) == 2
    assert [int(right[0]) for right in part.right] == [3, 1]
    assert [int(found[0]) for found in part.negatives] == [0, 2]


# ---- at a site -------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = (*THINGS, "who", "keeps", "the", "keeper", "shed", "in")
    return small_encoder(tmp_path_factory.mktemp("encoder"), words=sorted(words))


@pytest.fixture
def spec(encoder: Path, tmp_path: Path) -> RetrieverSpec:
    return RetrieverSpec(
        encoder=str(encoder),
        max_tokens=32,
        device="cpu",
        personal="mixture",
        personal_folder=str(tmp_path / "personal"),
    )


@pytest.fixture
def library(spec: RetrieverSpec, tmp_path: Path) -> Path:
    return library_of(spec, tmp_path / "library.sqlite3", 40, 24)


def library_of(spec: RetrieverSpec, path: Path, train: int, valid: int) -> Path:
    documents, pairs = [], []
    two, three = itertools.permutations(THINGS, 2), itertools.combinations(THINGS, 3)
    things = [" ".join(some) for some in (*((thing,) for thing in THINGS), *two, *three)]
    for number, thing in enumerate(things[: train + valid]):
        name, split = f"{thing}-{number}", "valid" if number >= train else "train"
        documents.append(Document(name, "", f"the {thing} keeper in shed {thing}", split))
        pairs.append(Pair(f"who keeps the {thing}", (name,), split))
    learning.ingest(spec, path, documents, pairs, 30)
    return path


def personalised(spec: RetrieverSpec, library: Path, versions: Path, digest: bytes) -> object:
    how = AskingTerms("exact", 0.0, 8, 4)
    twice = replace(spec, alone=AloneAxes(2))
    return personal.personalise(twice, library, versions, digest, OPTIONS, how)


@pytest.mark.slow
def test_a_site_answers_with_its_mixture_and_indexes_by_it(
    spec: RetrieverSpec, library: Path, tmp_path: Path
) -> None:
    versions, indexes = tmp_path / "versions", tmp_path / "index"
    digest = learning.write_initial_version(spec, versions)
    shape = learning.describe(spec).shape_manifest.digest
    shared = read_version(versions, digest, shape)
    before = learning.build_index(spec, library, versions, digest, indexes)

    made = personalised(spec, library, versions, digest)
    assert isinstance(made, Personalised)
    assert (made.epochs, made.judged) == (4, 24)
    assert made.share > 0.0, "the shared version here is the encoder untrained"
    assert made.changed == (made.share > 0.0)
    assert all(0.0 < value <= 1.0 for value in (made.mrr_before, made.mrr_after))

    state = PersonalStore(Path(spec.personal_folder), shape).serving(digest)
    assert state is not None
    retriever = retriever_for(spec)
    load_serving(spec, retriever, versions, digest)
    assert np.array_equal(retriever.vector(), state.arrays["mixture"])
    after = learning.build_index(spec, library, versions, digest, indexes)
    assert after != before, "passages were embedded anew"
    embedded = embedded_by(spec.personal, spec.personal_folder, digest)
    assert after.name.startswith(embedded.hex())
    assert learning.build_index(spec, library, versions, digest, indexes) == after

    # A round trains from what is shared, whatever the site answers with.
    update = tmp_path / "update.npy"
    learning.train(spec, library, versions, digest, OPTIONS, 1, "yard", update)
    plain = replace(spec, personal="none", personal_folder="")
    learning.train(plain, library, versions, digest, OPTIONS, 1, "yard", tmp_path / "plain.npy")
    assert np.array_equal(np.load(update), np.load(tmp_path / "plain.npy"))
    assert np.array_equal(read_version(versions, digest, shape), shared)


@pytest.mark.parametrize(
    ("train", "judged", "learned", "epochs"),
    [
        (16, 0, 16, 0),  # too few to judge by: the shared version stays
        (40, 40, 40, 20),  # four folds in turn, then all
        (104, 21, 83, 4),  # a fifth is spared
    ],
)
@pytest.mark.slow
def test_without_validation_pairs_those_for_training_judge_what_is_shared(
    spec: RetrieverSpec, tmp_path: Path, train: int, judged: int, learned: int, epochs: int
) -> None:
    library = library_of(spec, tmp_path / "library.sqlite3", train, 8)
    versions = tmp_path / "versions"
    start = learning.write_initial_version(spec, versions)
    made = personalised(spec, library, versions, start)
    assert isinstance(made, Personalised)
    assert (made.judged, made.in_turn) == (judged, judged > 0)
    assert (made.pairs, made.epochs) == (learned, epochs)
    if not judged:
        assert (made.share, made.changed) == (0.0, False)
        return
    # The shared version here is the encoder untrained: to learn alone is better.
    assert made.mrr_after > made.mrr_before
    assert (made.share, made.changed) == (0.5, True)


@pytest.mark.parametrize(
    ("pairs", "others"),
    [
        (24, 0),  # in turn, with nothing to learn from
        (120, 0),
        (120, 4),  # the part that is spared is one question, or leaves four to learn from
    ],
)
def test_questions_that_have_one_answer_judge_nothing(
    spec: RetrieverSpec, tmp_path: Path, pairs: int, others: int
) -> None:
    library = tmp_path / "library.sqlite3"
    anchor, *rest = THINGS[: others + 1]
    documents = [
        Document(thing, "", f"the {thing} keeper in shed {thing}", "train")
        for thing in (anchor, *rest)
    ]
    asked = [Pair(f"who keeps the {n} {anchor}", (anchor,), "train") for n in range(pairs)]
    asked += [Pair(f"who keeps the {thing}", (thing,), "train") for thing in rest]
    learning.ingest(spec, library, documents, asked, 30)
    versions = tmp_path / "versions"
    made = personalised(spec, library, versions, learning.write_initial_version(spec, versions))
    assert isinstance(made, Personalised)
    assert (made.judged, made.share, made.changed, made.in_turn) == (0, 0.0, False, False)
    assert made.pairs == pairs + others


def test_a_site_without_training_questions_judges_the_shared_version(
    spec: RetrieverSpec, tmp_path: Path
) -> None:
    library = library_of(spec, tmp_path / "library.sqlite3", 1, 24)
    versions = tmp_path / "versions"
    learning.write_initial_version(spec, versions)
    shape = learning.describe(spec).shape_manifest.digest
    retriever = retriever_for(spec)
    start = retriever.initial_vector()
    chance = np.random.Generator(np.random.Philox(key=5))
    harmed = start + chance.normal(0.0, 0.5, start.shape).astype(np.float32)
    digest, _ = write_version(versions, shape, harmed)
    made = personalised(spec, library, versions, digest)
    assert isinstance(made, Personalised)
    assert (made.epochs, made.judged, made.untrained) == (0, 24, True)
    assert made.mrr_after > made.mrr_before
    state = PersonalStore(Path(spec.personal_folder), shape).serving(digest)
    assert state is not None
    assert np.array_equal(state.arrays["mixture"], start)


@pytest.mark.slow
def test_later_versions_are_mixed_with_that_half_until_they_have_their_own(
    spec: RetrieverSpec, library: Path, tmp_path: Path
) -> None:
    """A site does not fall back to what is shared for as long as a run takes."""
    versions, indexes = tmp_path / "versions", tmp_path / "index"
    first = learning.write_initial_version(spec, versions)
    shape = learning.describe(spec).shape_manifest.digest
    store = PersonalStore(Path(spec.personal_folder), shape)
    made = personalised(spec, library, versions, first)
    assert isinstance(made, Personalised)
    assert made.share > 0.0
    half = store.half()
    assert half is not None

    start = read_version(versions, first, shape)
    later = (start + np.float32(0.01)).astype(np.float32)
    second, _ = write_version(versions, shape, later)
    built = learning.build_index(spec, library, versions, second, indexes)
    carried = store.serving(second)
    assert carried is not None
    assert carried.facts["carried"]
    assert carried.facts["share"] == made.share
    assert np.array_equal(carried.arrays["mixture"], mix(later, half.arrays["own"], made.share))
    assert built.name.startswith(embedded_by("mixture", spec.personal_folder, second).hex())

    personalised(spec, library, versions, second)
    found = store.serving(second)
    assert found is not None
    assert "carried" not in found.facts

    # What was judged to be of no use, or was made for another retriever, is not carried.
    store.keep_half(replace(half, facts={"share": 0.0, "untrained": False}))
    third, _ = write_version(versions, shape, (start - np.float32(0.01)).astype(np.float32))
    learning.build_index(spec, library, versions, third, indexes)
    assert store.serving(third) is None
    store.keep_half(replace(half, facts={}))
    fourth, _ = write_version(versions, shape, (start - np.float32(0.02)).astype(np.float32))
    with pytest.raises(LearningError, match="delete the file"):
        learning.build_index(spec, library, versions, fourth, indexes)
    assert PersonalStore(store.folder, bytes(32)).half() is None


def test_parameters_that_are_not_finite_are_not_kept(
    spec: RetrieverSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last step that overflows shows in no loss."""
    library = library_of(spec, tmp_path / "library.sqlite3", 40, 0)
    versions = tmp_path / "versions"
    digest = learning.write_initial_version(spec, versions)
    broken = retriever_for(spec).initial_vector()
    broken[0] = np.inf
    monkeypatch.setattr(mixture._Alone, "trained", lambda *_: broken)
    with pytest.raises(TrainingError, match="not finite"), np.errstate(invalid="ignore"):
        personalised(spec, library, versions, digest)
    assert not list(Path(spec.personal_folder).glob("*"))


@pytest.mark.slow
def test_what_learned_nothing_for_the_next_question_is_not_mixed_in(
    spec: RetrieverSpec, tmp_path: Path
) -> None:
    """The shared version knows these pairs by heart, and no pair helps with another."""
    library = tmp_path / "library.sqlite3"
    twos = [(one, other) for one in THINGS for other in THINGS if one < other]
    documents = [Document(f"{a}-{b}", "", f"the {a} keeper in shed {b}", "train") for a, b in twos]
    shifted = [*twos[9:], *twos[:9]]  # so that no word of a question says what answers it
    pairs = [
        Pair(f"who keeps the {b} {a}", (f"{c}-{d}",), "train")
        for (a, b), (c, d) in zip(twos, shifted, strict=True)
    ]
    learning.ingest(spec, library, documents, pairs, 30)
    versions = tmp_path / "versions"
    start = learning.write_initial_version(spec, versions)
    plain = replace(spec, personal="none", personal_folder="")
    hard = replace(OPTIONS, local_epochs=40)
    update = tmp_path / "update.npy"
    learning.train(plain, library, versions, start, hard, 1, "yard", update)
    shape = learning.describe(spec).shape_manifest.digest
    vector = read_version(versions, start, shape) + np.load(update)[:-1]
    digest, _ = write_version(versions, shape, vector.astype(np.float32))
    idle = replace(OPTIONS, learning_rate=1e-9)
    how = AskingTerms("exact", 0.0, 8, 4)
    once = replace(spec, alone=AloneAxes(1))
    made = personal.personalise(once, library, versions, digest, idle, how)
    assert made.mrr_before - made.mrr_after > FAR
    assert (made.share, made.changed) == (0.0, False)


def test_where_what_was_learned_does_harm_the_encoder_as_it_came_answers(
    spec: RetrieverSpec, library: Path, tmp_path: Path
) -> None:
    versions = tmp_path / "versions"
    start = learning.write_initial_version(spec, versions)
    shape = learning.describe(spec).shape_manifest.digest
    vector = read_version(versions, start, shape)
    chance = np.random.default_rng(3)
    spoilt = vector + chance.normal(scale=30.0, size=vector.shape).astype(np.float32)
    digest, _ = write_version(versions, shape, spoilt)
    harmful = replace(OPTIONS, learning_rate=1.0)  # what is learned alone is spoilt as well
    how = AskingTerms("exact", 0.0, 8, 4)
    once = replace(spec, alone=AloneAxes(1))
    made = personal.personalise(once, library, versions, digest, harmful, how)
    assert (made.untrained, made.share, made.changed, made.judged) == (True, 0.0, True, 24)
    assert made.mrr_after > made.mrr_before
    state = PersonalStore(Path(spec.personal_folder), shape).serving(digest)
    assert state is not None
    assert np.array_equal(state.arrays["mixture"], vector)
    assert state.facts["untrained"]


def test_the_same_again_is_the_same_and_a_damaged_one_says_what_to_do(
    spec: RetrieverSpec, library: Path, tmp_path: Path
) -> None:
    versions = tmp_path / "versions"
    digest = learning.write_initial_version(spec, versions)
    shape = learning.describe(spec).shape_manifest.digest
    store = PersonalStore(Path(spec.personal_folder), shape)
    kept = []
    for _ in range(2):
        personalised(spec, library, versions, digest)
        state = store.serving(digest)
        assert state is not None
        kept.append(state.arrays["mixture"].tobytes())
    assert kept[0] == kept[1]
    state = store.serving(digest)
    assert state is not None
    store.put(digest, replace(state, arrays={"mixture": np.full(3, math.nan, np.float32)}))
    with pytest.raises(LearningError, match="fedctl personalise"):
        load_serving(spec, retriever_for(spec), versions, digest)
