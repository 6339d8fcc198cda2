"""DATE's personal layer: the identity at first, distilled from tier to tier, and never shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from config.recipes import DepthOptions
from crypto.arrays import Float32
from daemon.jobs import answering, learning
from daemon.learning.options import (
    DepthReport,
    EpochProgress,
    LearningError,
    TrainingOptions,
)
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.heads import HeadRetriever, ResidualHead
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet, fit
from daemon.library.readers.documents import Document, Pair
from daemon.personal import tiered_head
from daemon.personal.depth import TIERS, DepthState
from daemon.personal.serving import open_retriever, retriever_for
from daemon.personal.store import PersonalStore, report_of
from daemon.personal.tiers import TieredHeadRetriever, change_tier, new_tier
from daemon.state.versions import read_version, write_version
from tests.support.small_models import small_encoder

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln", "loom", "mill"]
D = 32
OPTIONS = TrainingOptions(
    local_epochs=4, batch_size=5, learning_rate=3e-3, hard_negatives=0, temperature=0.05
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [*SUBJECTS, "care", "keep"]
    return small_encoder(tmp_path_factory.mktemp("encoder"), words, dimension=D)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


def unit(count: int, seed: int) -> Float32:
    rows = np.random.default_rng(seed).normal(size=(count, D))
    unit: Float32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def pairs_of(count: int = 20) -> TrainingSet:
    """Features that differ, which a random encoder's do not: pair i is a noisy copy."""
    passages = unit(count, 1)
    queries = passages + 0.5 * unit(count, 2)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    rows = np.arange(count)
    return TrainingSet(
        Texts([f"q{i}" for i in rows], queries),
        Texts([f"p{i}" for i in rows], passages),
        [rows[i : i + 1] for i in rows],
        [np.empty(0, dtype=np.int64)] * count,
    )


def trained(encoder: Encoder, tier: str) -> TieredHeadRetriever:
    retriever = TieredHeadRetriever(encoder)
    retriever.begin_tier(tier)
    fit(retriever, pairs_of(), OPTIONS, 1)
    return retriever


# ---- layers -------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_new_layer_is_the_identity_and_can_learn(encoder: Encoder, tier: str) -> None:
    layer = new_tier(tier, D)
    x = torch.from_numpy(unit(5, 3)).requires_grad_(True)
    assert torch.equal(layer(x), x)
    layer(x).sum().backward()
    assert any(value.grad is not None and value.grad.any() for value in layer.parameters())
    retriever = TieredHeadRetriever(encoder)
    retriever.begin_tier(tier)
    np.testing.assert_allclose(retriever.embed_queries([], unit(5, 3)), unit(5, 3), atol=1e-6)


@pytest.mark.parametrize("tier", TIERS)
def test_the_gradient_through_head_and_layer_is_that_of_the_formula(tier: str) -> None:
    torch.manual_seed(0)
    head, layer = ResidualHead(8).double(), new_tier(tier, 16).double()
    for value in [*head.parameters(), *layer.parameters()]:
        torch.nn.init.normal_(value, std=0.3)
    assert torch.autograd.gradcheck(
        head, (torch.randn(2, 8, dtype=torch.float64).requires_grad_(),)
    )
    x = torch.randn(2, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


def test_the_base_and_the_advanced_tier_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0]])
    base = new_tier("base", 2)
    with torch.no_grad():
        base.get_parameter("out.weight").copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    gelu = torch.nn.functional.gelu
    assert torch.allclose(base(x), x + gelu(torch.tensor([[3.0, -2.0]])))
    advanced = new_tier("advanced", 2)
    with torch.no_grad():
        up = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        advanced.get_parameter("up.weight").copy_(up)
        advanced.get_parameter("out.weight").copy_(torch.ones(2, 4))
    added = gelu(torch.tensor([1.0, -2.0, -1.0, 0.0])).sum()
    assert torch.allclose(advanced(x), x + added)


def test_the_extended_tier_attends_within_one_text_alone() -> None:
    layer = new_tier("extended", D)
    torch.nn.init.normal_(layer.get_parameter("out.weight"))
    x = torch.from_numpy(unit(6, 4))
    together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(together, alone)
    with torch.no_grad():
        before = layer(x)
        layer.get_parameter("attention.out_proj.weight").zero_()
        assert not torch.allclose(layer(x), before), "the attention is in the path"


def test_an_encoder_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LearningError, match="16 divides, this encoder has 40"):
        new_tier("extended", 40)
    with pytest.raises(LearningError, match="unknown"):
        new_tier("deep", 32)


# ---- shared, personal, frozen ---------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_shared_personal_and_frozen_are_what_they_say(encoder: Encoder, tier: str) -> None:
    frozen = {name: value.clone() for name, value in encoder.model.named_parameters()}
    retriever, plain = TieredHeadRetriever(encoder), HeadRetriever(encoder)
    retriever.begin_tier(tier)
    assert retriever.shape_manifest.digest == plain.shape_manifest.digest
    fit(retriever, pairs_of(), OPTIONS, 1)
    personal = retriever.personal_arrays()
    assert any(value.any() for name, value in personal.items() if name.startswith("out."))
    for name, value in encoder.model.named_parameters():
        assert torch.equal(value, frozen[name])

    # The vector is a function of the shared parameters alone: personal ones may be
    # anything, and not a value of it changes.
    vector = retriever.vector()
    marked = {name: np.full_like(value, 1234.5) for name, value in personal.items()}
    retriever.load_personal(tier, marked)
    assert retriever.vector().tobytes() == vector.tobytes()
    assert 1234.5 not in retriever.vector()
    retriever.load_vector(plain.initial_vector())
    assert all(np.array_equal(v, marked[n]) for n, v in retriever.personal_arrays().items())

    shared = {id(value) for value in retriever.shared_parameters()}
    own = {id(value) for value in retriever.personal_parameters()}
    assert not shared & own
    assert {id(value) for value in retriever.parameters()} == shared | own
    assert sum(value.numel() for value in retriever.shared_parameters()) == vector.size


def test_a_personal_layer_goes_out_and_comes_back(encoder: Encoder) -> None:
    retriever = trained(encoder, "advanced")
    x, arrays = unit(7, 5), retriever.personal_arrays()
    embedded = retriever.embed_passages([], x)
    retriever.begin_tier("extended")
    with pytest.raises(LearningError, match="tier base"):
        retriever.load_personal("base", arrays)
    with pytest.raises(LearningError, match="tier advanced"):
        broken = {name: value * np.nan for name, value in arrays.items()}
        retriever.load_personal("advanced", broken)
    assert retriever.tier == "extended", "what is refused changes nothing"
    retriever.load_personal("advanced", arrays)
    assert np.array_equal(retriever.embed_passages([], x), embedded)


# ---- a change of tier ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"), [("base", "advanced"), ("advanced", "extended"), ("extended", "advanced")]
)
def test_the_new_tier_learns_to_say_what_the_old_one_said(
    encoder: Encoder, old: str, new: str
) -> None:
    retriever, pairs = trained(encoder, old), pairs_of()
    vector = retriever.vector()
    distilled = change_tier(retriever, new, pairs, OPTIONS, 1)
    assert distilled.changed
    assert retriever.tier == new
    assert -1e-6 <= distilled.after < 0.3 * distilled.before, "divergence from the teacher"
    assert retriever.vector().tobytes() == vector.tobytes(), "the shared head is frozen (Eq. 8)"


def test_a_layer_that_has_hardly_begun_becomes_another_at_any_rate(encoder: Encoder) -> None:
    """Nothing was learned yet, so nothing can be lost: the identity is near enough."""
    retriever = TieredHeadRetriever(encoder)
    wild = replace(OPTIONS, depth=DepthOptions(kd_learning_rate=1.0, kd_epochs=3))
    assert change_tier(retriever, "advanced", pairs_of(), wild, 1).changed
    np.testing.assert_allclose(retriever.embed_queries([], unit(3, 6)), unit(3, 6), atol=1e-6)


@pytest.mark.slow
def test_a_distillation_that_diverges_leaves_the_tier_and_says_so(encoder: Encoder) -> None:
    retriever = trained(encoder, "base")
    before = retriever.embed_queries([], unit(3, 6))
    wild = DepthOptions(kd_learning_rate=1e30, window=1, stable_rounds=0, momentum_weight=1.0)
    known = DepthState("base", losses=(4.0, 3.0), recalls=(0.5, 0.5))
    options = replace(OPTIONS, depth=wild)
    state, report = tiered_head.judge(retriever, known, pairs_of(), (0.5, None), 2.0, options, 1)
    assert (report.tier, report.decision, state.tier) == ("base", "none", "base")
    assert "upgrade from base to advanced" in report.reason
    assert "so base stays" in report.reason
    assert retriever.tier == "base"
    assert np.array_equal(retriever.embed_queries([], unit(3, 6)), before)


# ---- through the worker's jobs ----------------------------------------------------------------

DOCUMENTS = [
    Document(f"yard/{subject}#0", f"The {subject}", f"Keep it dry, and the {subject} will serve.")
    for subject in SUBJECTS
]
PAIRS = [
    Pair(f"what care does the {subject} need?", (f"yard/{subject}#0",), split)
    for subject, split in zip(SUBJECTS, ["train"] * 8 + ["valid"] * 2, strict=True)
]


class Site:
    def __init__(self, folder: Path, encoder: Path) -> None:
        self.folder = folder
        self.library, self.versions = folder / "library.sqlite3", folder / "versions"
        self.personal = folder / "personal"
        self.spec = RetrieverSpec(
            encoder=str(encoder),
            max_tokens=48,
            device="cpu",
            personal="tiered_head",
            personal_folder=str(self.personal),
        )
        learning.ingest(self.spec, self.library, DOCUMENTS, PAIRS, passage_tokens=40)
        self.genesis = learning.write_initial_version(self.spec, self.versions)

    def train(self, parent: bytes, round: int, options: TrainingOptions = OPTIONS) -> Float32:
        path = self.folder / "update.npy"
        learning.train(self.spec, self.library, self.versions, parent, options, round, "yard", path)
        update: Float32 = np.load(path, allow_pickle=False)
        return update

    @property
    def depth(self) -> DepthReport:
        shape = learning.describe(self.spec).shape_manifest.digest
        report = report_of(PersonalStore(self.personal, shape).newest())
        assert report is not None
        return report

    def commit(self, parent: bytes, update: Float32) -> bytes:
        shape = learning.describe(self.spec).shape_manifest
        vector = read_version(self.versions, parent, shape.digest) + update[:-1]
        return write_version(self.versions, shape.digest, vector)[0]


@pytest.fixture
def site(tmp_path: Path, folder: Path) -> Site:
    return Site(tmp_path, folder)


def test_the_update_has_the_shared_head_alone_and_the_file_the_rest(site: Site) -> None:
    update = site.train(site.genesis, 1)
    assert (
        update.size
        == HeadRetriever(Encoder.load(site.spec.encoder, max_tokens=48)).vector().size + 1
    )
    kept = load_file(site.personal / "round-1.safetensors")
    assert sorted(kept) == ["personal.out.bias", "personal.out.weight"]
    for value in kept.values():
        assert value.any()
        window = np.lib.stride_tricks.sliding_window_view(update, value.shape[-1])
        rows = value.reshape(-1, value.shape[-1])
        assert not any((window == row).all(axis=1).any() for row in rows)
    assert (site.depth.tier, site.depth.api) == ("base", None)


def test_another_attempt_learns_the_same_and_the_next_round_goes_on(site: Site) -> None:
    first = site.train(site.genesis, 1)
    kept = load_file(site.personal / "round-1.safetensors")
    assert site.train(site.genesis, 1).tobytes() == first.tobytes()
    again = load_file(site.personal / "round-1.safetensors")
    assert all(np.array_equal(again[name], value) for name, value in kept.items())
    site.train(site.commit(site.genesis, first), 2)
    later = load_file(site.personal / "round-2.safetensors")
    assert not any(np.array_equal(later[name], value) for name, value in kept.items())


def test_training_that_is_cut_short_leaves_nothing_and_begins_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.train(site.genesis, 1)
    parent = site.commit(site.genesis, first)
    (site.folder / "update.npy").unlink()

    def cut(progress: EpochProgress) -> None:
        if progress.epoch == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(learning, "report", cut)
        site.train(parent, 2)
    assert [path.name for path in site.personal.iterdir()] == ["round-1.safetensors"]
    assert not (site.folder / "update.npy").exists()
    after = site.train(parent, 2).tobytes()  # the worker still has what it had half trained
    retriever_for.cache_clear()
    assert site.train(parent, 2).tobytes() == after


def test_the_first_tier_follows_the_sites_score(site: Site) -> None:
    own = learning.complexity(site.library)
    assert 0 < own < 3.5
    for low, high, tier in (
        (own, own + 1, "base"),
        (own - 1, own + 1, "advanced"),
        (0, own, "extended"),
    ):
        options = replace(OPTIONS, local_epochs=1, depth=DepthOptions(complexity_range=(low, high)))
        site.train(site.genesis, 1, options)
        assert site.depth.tier == tier


def test_the_scheduler_changes_the_tier_between_rounds(site: Site) -> None:
    hasty = DepthOptions(
        window=1, stable_rounds=0, cooling_rounds=0, kd_epochs=2, momentum_weight=1.0
    )
    site.spec = replace(site.spec, depth=hasty)
    options = replace(OPTIONS, local_epochs=1)
    tiers = []
    for round_ in (1, 2, 3, 4, 5):
        site.train(site.genesis, round_, options)
        tiers.append(site.depth.tier)
    assert tiers == ["base", "base", "advanced", "extended", "extended"]
    assert site.depth.reason.startswith("API ")
    assert "attention.in_proj_weight" in str(
        sorted(load_file(site.personal / "round-5.safetensors"))
    )


def test_a_version_answers_with_the_layer_it_was_indexed_with(site: Site) -> None:
    version = site.commit(site.genesis, site.train(site.genesis, 1))
    index = learning.build_index(
        site.spec, site.library, site.versions, version, site.folder / "index"
    )

    def asked() -> bytes:
        answering.open_version(site.spec, site.library, site.versions, version, index)
        retriever = answering.opened_version().retriever
        return retriever.embed_queries(["what care does the bell need?"]).tobytes()

    first = asked()
    site.train(version, 2, replace(OPTIONS, local_epochs=20))
    assert asked() == first, "the next round's training does not show before its version"
    newer = site.commit(version, site.train(version, 3))
    learning.build_index(site.spec, site.library, site.versions, newer, site.folder / "index")
    assert asked() == first
    store = PersonalStore(site.personal, learning.describe(site.spec).shape_manifest.digest)
    ours, theirs = store.serving(version), store.serving(newer)
    assert ours is not None
    assert theirs is not None
    assert ours.facts["depth"]["losses"] == theirs.facts["depth"]["losses"][:1]


def test_a_personal_layer_needs_a_head_and_a_place(site: Site) -> None:
    with pytest.raises(LearningError, match="needs adapt = 'head'"):
        open_retriever(replace(site.spec, adapt="lora"))
    site.spec = replace(site.spec, personal_folder="")
    with pytest.raises(LearningError, match="no folder was given"):
        site.train(site.genesis, 1)
