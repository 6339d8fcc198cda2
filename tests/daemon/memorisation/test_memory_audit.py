"""What a generator remembers, audited: the job on small real models, and as operators have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crypto.privacy import NoiseTerms
from daemon.jobs.generator import memory
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.memory import audit_memory, noised
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import LearningError, TrainingOptions
from daemon.memorisation.audit import (
    AuditOptions,
    AuditProgress,
    Began,
    Memorisation,
    is_beyond_chance,
)
from daemon.memorisation.canaries import canaries
from daemon.state.versions import read_version, write_version
from tests.daemon.jobs.test_generator import DOCUMENTS, PAIRS, Site, spec

__all__ = ["spec"]

PLAN = TrainingOptions(local_epochs=9, batch_size=8, learning_rate=5e-3, seed=1)
OPTIONS = AuditOptions(PLAN, sites=3, seed=18, canaries=4, rounds=2, noises=(1.0,))
QUICK = replace(OPTIONS, training=replace(PLAN, local_epochs=1), rounds=1, canaries=1)
PROGRESS: list[AuditProgress] = []


@pytest.fixture(scope="module")
def trained(
    spec: GeneratorSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Memorisation, dict[str, bytes]]]:
    """A site, what the audit found there, and every file it had before."""
    site = Site(replace(spec, adapt="full"), tmp_path_factory.mktemp("site"))
    site.fill(DOCUMENTS, PAIRS)
    jobs.write_initial_version(site.spec, site.versions)
    before = files_in(site.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "report", PROGRESS.append)  # as a worker's goes to the daemon
        found = audit_memory(site.spec, site.library, site.versions, None, "yard", OPTIONS)
    yield site, found, before


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_many_passes_over_all_weights_are_remembered(
    trained: tuple[Site, Memorisation, dict[str, bytes]],
) -> None:
    found = trained[1]
    base, alone, share, noisy = found.versions
    names = ["base model", "this site alone", "its share of 3 sites"]
    assert [one.version for one in found.versions] == [*names, "its share of 3 sites, noise 1"]
    assert alone.mean > 6.0 > found.by_chance + 4 * found.chance_error
    assert not is_beyond_chance(base, found), "the control: nobody has trained on it"
    assert not is_beyond_chance(noisy, found)
    assert alone.mean >= share.mean
    assert [one.planted for one in found.versions] == [False, True, True, True]
    assert (found.triples, found.canaries, found.most) == (len(PAIRS), 4, 8.0)
    assert found.clip_norm == found.update_norm > 0
    assert [round(one.epsilon, 1) for one in found.versions[:3]] == [0, 0, 0]
    assert 5 < noisy.epsilon < 15
    assert f"this site alone ({alone.mean:.1f} bits)" in found.advice
    assert "lower bound: each canary was seen 18 times" in found.advice


def test_nothing_that_was_planted_is_in_any_file_afterwards(
    trained: tuple[Site, Memorisation, dict[str, bytes]],
) -> None:
    site, _, before = trained
    after = files_in(site.folder)
    assert after == before, "no file changed, and none came"
    for one in canaries(4, 255, np.random.default_rng(OPTIONS.seed)):
        for text in (one.secret, one.question, one.document.text):
            assert not [name for name, held in after.items() if text.encode() in held]


def test_progress_goes_forward_version_by_version(
    trained: tuple[Site, Memorisation, dict[str, bytes]],
) -> None:
    fractions = [said.fraction for said in PROGRESS]
    assert fractions == pytest.approx(sorted(fractions))
    assert 0.0 == fractions[0] < fractions[-1] < 1.0
    steps = [said.step for said in PROGRESS]
    assert steps[:3] == [
        "triples",
        "base model: asking for the secrets",
        "this site alone: round 1 of 2",
    ]
    assert steps[-1] == "its share of 3 sites, noise 1: asking for the secrets"


def test_a_version_is_asked_before_it_is_trained_on(site: Site) -> None:
    first = jobs.write_initial_version(site.spec, site.versions)
    shape = jobs.describe(site.spec).shape_manifest.digest
    start = read_version(site.versions, first, shape)
    moved = np.random.default_rng(0).normal(0, 0.1, start.shape).astype(np.float32)
    digest, _ = write_version(site.versions, shape, start + moved)
    options = replace(QUICK, noises=())
    began = Began(digest, "version in use")
    found = audit_memory(site.spec, site.library, site.versions, began, "yard", options)
    names = ["base model", "version in use", "this site alone", "its share of 3 sites"]
    assert [one.version for one in found.versions] == names
    # As one site's share of one, and without noise, a federation is that site.
    one_site = replace(options, sites=1)
    again = audit_memory(site.spec, site.library, site.versions, began, "yard", one_site)
    assert again.versions[2].mean == again.versions[3].mean == found.versions[2].mean


@pytest.fixture
def site(spec: GeneratorSpec, tmp_path: Path) -> Site:
    made = Site(spec, tmp_path)
    made.fill(DOCUMENTS, PAIRS)
    return made


def test_noise_is_that_of_a_plan_and_an_update_is_clipped_to_its_norm() -> None:
    update = np.zeros(20_000, dtype=np.float32)
    update[0] = 100.0
    mean = noised(update, NoiseTerms(2.0, 0.5, sharers=1), 4)
    assert np.std(mean[1:]) == pytest.approx(0.5 * 2.0 / 4, rel=0.05)
    quiet = noised(update, NoiseTerms(2.0, 0.01, sharers=1), 4)
    assert 0.9 * 2.0 / 4 < quiet[0] < 1.1 * 2.0 / 4


@pytest.mark.parametrize(
    ("pairs", "options", "cause"),
    [
        (PAIRS[:5], OPTIONS, "has 5 questions with passages and answers and the audit needs 8"),
        (PAIRS, replace(OPTIONS, training=replace(PLAN, local_epochs=0)), "use 1 or more"),
        (PAIRS, replace(OPTIONS, training=replace(PLAN, start_from="local")), "use 'global'"),
        (PAIRS, replace(QUICK, clip_norm=1e39), "noise 1 can't be tried: a clip norm of 1e"),
    ],
    ids=["few triples", "no epoch", "a student of its own", "a clip norm beyond the grid"],
)
def test_what_cannot_be_audited_is_refused(
    site: Site, pairs: list, options: AuditOptions, cause: str, tmp_path: Path
) -> None:
    other = Site(site.spec, tmp_path / "other")
    other.folder.mkdir()
    other.fill(DOCUMENTS, pairs)
    with pytest.raises(LearningError, match=cause):
        audit_memory(other.spec, other.library, other.versions, None, "yard", options)
