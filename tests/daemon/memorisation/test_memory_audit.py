"""What a generator remembers, audited: the job on small real models, and as operators have it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.fedctl.main import main
from daemon.jobs.generator import memory
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.memory import audit_memory, mechanism_of, noised
from daemon.learning.generator.in_use import InUse
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import LearningError, TrainingOptions
from daemon.library.readers.documents import Pair
from daemon.memorisation.audit import (
    AuditOptions,
    AuditProgress,
    Began,
    CanaryExposure,
    Memorisation,
    advice,
    is_beyond_chance,
)
from daemon.memorisation.canaries import canaries
from daemon.services.generator.memory_audit import options_of
from daemon.state.versions import read_version, write_version
from proto import control_pb2 as control
from tests.daemon.jobs.test_generator import DOCUMENTS, PAIRS, Site, spec
from tests.support.canned_daemon import canned_daemon

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
    began = Began(InUse(digest.hex()), "version in use")
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
    mean = noised(update, mechanism_of(2.0, 0.5), 4)
    assert np.std(mean[1:]) == pytest.approx(0.5 * 2.0 / 4, rel=0.05)
    quiet = noised(update, mechanism_of(2.0, 0.01), 4)
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
    site: Site,
    pairs: list[Pair],
    options: AuditOptions,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Site(site.spec, tmp_path / "other")
    other.folder.mkdir()
    other.fill(DOCUMENTS, pairs)
    told: list[object] = []
    monkeypatch.setattr(memory, "report", told.append)
    with pytest.raises(LearningError, match=cause):
        audit_memory(other.spec, other.library, other.versions, None, "yard", options)
    assert told == [AuditProgress("triples", 0.0)], "before anything is trained"


# ---- on the screen ---------------------------------------------------------------------------


def fedctl(socket: Path, *words: str) -> int:
    return main(["--socket", str(socket), "audit", "memory", *words])


def test_the_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        asked = ("--epochs", "3", "--noise", "0.5", "--noise", "2", "--clip", "1.5", "--sites", "5")
        assert fedctl(tmp_path / "s", *asked, "--set", "learning_rate=0.01") == 0
        assert fedctl(tmp_path / "s") == 0
    chosen, usual = daemon.asked
    assert (chosen.local_epochs, chosen.sites, chosen.clip_norm) == (3, 5, 1.5)
    assert (list(chosen.noises), list(chosen.choices)) == ([0.5, 2.0], ["learning_rate=0.01"])
    assert usual == control.AuditMemoryRequest(canaries=8, rounds=4)
    out = capsys.readouterr().out
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert rows["base model"][-5:] == ["1.50", "2.00", "0", "of", "8"]
    assert rows["its share, noise 1"][-7:] == ["1", "10.7", "1.25", "1.75", "0", "of", "8"]
    assert "8 canaries among 60 triples" in " ".join(out.split())
    assert "By chance 1.42 bits, give or take 0.50; at most 8.00." in " ".join(out.split())
    assert out.rstrip().endswith("It is a lower bound.")


def test_the_object_for_machines_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        assert fedctl(tmp_path / "s", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert [one["written"] for one in found["versions"]] == [0, 3, 0, 0]
        daemon.refusal = "there is no base model here"
        assert fedctl(tmp_path / "s") == 1
        assert capsys.readouterr().err == "fedctl: there is no base model here.\n"
        assert fedctl(tmp_path / "s", "--noise", "81") == 2
        assert fedctl(tmp_path / "s", "--rounds", "0") == 2


def test_figures_travel_under_their_names() -> None:
    fields = set(control.MemoryAudit.DESCRIPTOR.fields_by_name)
    assert fields == {*Memorisation.__dataclass_fields__, "model_digest"}
    fields = set(control.CanaryExposure.DESCRIPTOR.fields_by_name)
    assert fields == set(CanaryExposure.__dataclass_fields__)


def test_what_is_left_open_is_as_usual_and_secrets_are_drawn_anew() -> None:
    usual, again = (options_of(control.AuditMemoryRequest(), PLAN, 3) for _ in range(2))
    assert usual.seed != again.seed
    assert usual == AuditOptions(PLAN, sites=3, seed=usual.seed)
    request = control.AuditMemoryRequest(sites=7, noises=[2.0, 2.0], clip_norm=0.5, rounds=1)
    asked = options_of(request, PLAN, 3)
    assert (asked.sites, asked.noises, asked.clip_norm, asked.rounds) == (7, (2.0,), 0.5, 1)


def test_advice_says_what_is_beyond_chance_and_what_is_written() -> None:
    def audit(*means: tuple[float, int]) -> Memorisation:
        versions = tuple(
            CanaryExposure(f"v{n}", mean, mean, written, planted=n > 0)
            for n, (mean, written) in enumerate(means)
        )
        return Memorisation(
            *(8, 255, 60, 4, 3, 3, "lora", 1e-2, 1.0, 1.0, 1e-5, 1.42, 0.5, 8.0), versions, 1.0
        )

    quiet = advice(audit((9.0, 0), (2.0, 0)))
    assert quiet.startswith("No version exposes its canaries beyond what chance gives")
    assert "so little training teaches nothing: look again with more rounds" in quiet
    both = advice(audit((1.0, 0), (7.5, 2), (1.0, 0)))
    assert both.startswith("Beyond chance canaries are exposed by v1 (7.5 bits); within")
    assert "2 of 8 are written word for word" in both
    assert "(v1)" in both
    assert advice(audit((1.0, 0), (1.0, 1))).startswith("Every version")
    assert "seen 12 times" in quiet
