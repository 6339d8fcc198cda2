"""A site's own half of the generator: trained, mixed, chosen, kept and dropped, on small models."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.answering import transformers_model
from daemon.answering.options import AnsweringOptions, FederatedWriter
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.judging import Candidate, Judgement, best_of, choose
from daemon.jobs.generator.personal import PersonalisedGenerator, personalise
from daemon.learning.generator.in_use import InUse, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.language_model import LanguageModelError
from daemon.learning.options import (
    EpochProgress,
    EvaluationProgress,
    TrainingError,
    TrainingOptions,
)
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.personal.generator import is_usable, keep_own, vector_in_use
from daemon.personal.mixture import SHARES, mix
from daemon.process.workers import Worker
from daemon.state.versions import VersionError, read_version
from tests.daemon.jobs.test_generator import DOCUMENTS, PAIRS, PLAN, Site, spec, version_of

__all__ = ["spec"]

OWN = TrainingOptions(local_epochs=6, batch_size=4, learning_rate=1e-2)


class OwnSite(Site):
    """A site that keeps a half of its own, with questions to judge by."""

    @property
    def path(self) -> Path:
        return self.folder / "generator" / "in_use.json"

    @property
    def personal(self) -> Path:
        return Path(self.spec.personal_folder)

    @property
    def shape(self) -> bytes:
        return jobs.describe(self.spec).shape_manifest.digest

    def personalise(self, digest: bytes, plan: TrainingOptions = OWN) -> PersonalisedGenerator:
        return personalise(self.spec, self.library, self.versions, digest, plan, self.path)

    def choose(self, digest: bytes, **more: Any) -> InUse:
        return choose(self.spec, self.library, self.versions, digest, self.path, **more)

    def halves(self) -> list[str]:
        return sorted(path.stem for path in self.personal.glob("*"))

    def writer(self) -> FederatedWriter:
        return FederatedWriter(self.spec, self.versions, self.path)


def asked_as(how: str, split: str, answer: str = "") -> list[Pair]:
    """The pairs of every site, asked otherwise; ``answer``: another than theirs."""
    pairs = [replace(one, query=f"{how}: {one.query}", split=split) for one in PAIRS]
    return [replace(one, reference=Reference((answer,))) if answer else one for one in pairs]


@pytest.fixture
def site(spec: GeneratorSpec, tmp_path: Path) -> OwnSite:
    own = replace(
        spec,
        answer_tokens=16,  # each is written many times here
        personal="mixture",
        personal_folder=str(tmp_path / "generator" / "personal"),
    )
    made = OwnSite(own, tmp_path)
    made.fill(DOCUMENTS, PAIRS)
    made.fill([], [*asked_as("say", "valid"), *asked_as("tell me", "valid")])
    return made


@pytest.fixture
def shared(site: OwnSite) -> bytes:
    """A version that one round has made, better than the base model here."""
    first = jobs.write_initial_version(site.spec, site.versions)
    start = read_version(site.versions, first, site.shape)
    plan = replace(PLAN, local_epochs=1)
    return version_of(site, start + site.train(first, plan)[1][:-1])


def test_a_site_trains_on_alone_and_the_best_mixture_answers(site: OwnSite, shared: bytes) -> None:
    judged = site.choose(shared)
    assert (judged.version, judged.own) == (shared.hex(), "")
    made = site.personalise(shared)
    found = made.in_use
    assert made.share in SHARES[1:]
    assert made.triples == len(PAIRS)
    assert (found.version, found.share, found.personalised) == (
        shared.hex(),
        made.share,
        shared.hex(),
    )
    assert made.mixture == found.best
    assert found.base is not None
    assert found.best is not None
    assert found.newest is not None
    assert found.best.nats < found.newest.nats < found.base.nats
    assert found.best.written == 12
    # It is what is on the disk, and what is between the shared version and the own half.
    assert read_in_use(site.path) == found
    assert site.halves() == [found.own]
    assert stat.S_IMODE(site.personal.stat().st_mode) == 0o700
    own = read_version(site.personal, bytes.fromhex(found.own), site.shape)
    values = mix(read_version(site.versions, shared, site.shape), own, found.share)
    assert vector_in_use(found, site.spec, site.versions, site.shape).tobytes() == values.tobytes()
    # Again: the same half, and nothing else is kept.
    assert site.personalise(shared).in_use == found
    assert site.halves() == [found.own]


def test_an_own_half_that_does_worse_here_is_not_used(
    site: OwnSite, shared: bytes, tmp_path: Path
) -> None:
    start = read_version(site.versions, shared, site.shape)
    good = version_of(site, start + site.train(shared, replace(PLAN, local_epochs=8))[1][:-1])
    # What it learns from says something else than what it judges by.
    misled = replace(site, folder=tmp_path / "misled")
    misled.folder.mkdir()
    misled.fill(DOCUMENTS, asked_as("what", "train", "zzz qqq xxx"))
    misled.fill([], [*asked_as("say", "valid"), *asked_as("tell me", "valid")])
    made = personalise(site.spec, misled.library, site.versions, good, OWN, site.path)
    assert (made.share, made.mixture) == (0.0, None)
    assert made.in_use.best == made.in_use.newest
    assert (made.in_use.version, made.in_use.own) == (good.hex(), "")
    assert made.in_use.personalised == good.hex()
    assert site.halves() == []


def test_neither_half_nor_share_know_the_test_questions(site: OwnSite, shared: bytes) -> None:
    found = site.personalise(shared).in_use
    kept = Document("yard/loom", "The loom", "The loom needs wax.", split="test")
    site.fill([kept], asked_as("examine", "test", "nothing of the kind"))
    assert site.personalise(shared).in_use == found


def test_nothing_of_the_own_half_is_in_an_update_or_a_version(site: OwnSite, shared: bytes) -> None:
    update = site.train(shared, round=2)[1].tobytes()
    versions = sorted(site.versions.iterdir())
    found = site.personalise(shared).in_use
    assert found.own
    assert site.train(shared, round=2)[1].tobytes() == update
    assert sorted(site.versions.iterdir()) == versions


@pytest.mark.parametrize("valid", [0, 9], ids=["none", "nine"])
def test_too_few_to_judge_by_is_said_before_anything_is_trained(
    spec: GeneratorSpec, tmp_path: Path, valid: int
) -> None:
    site = OwnSite(replace(spec, personal="mixture", personal_folder=str(tmp_path / "p")), tmp_path)
    site.fill(DOCUMENTS, PAIRS)
    site.fill([], [*asked_as("say", "valid"), *asked_as("tell me", "valid")][:valid])
    first = jobs.write_initial_version(site.spec, site.versions)
    with pytest.raises(TrainingError, match=rf"takes 10 .* and {valid} are here"):
        site.personalise(first)
    assert not site.path.exists()


def test_with_nothing_to_train_on_all_stays_as_it_was(
    site: OwnSite, shared: bytes, tmp_path: Path
) -> None:
    before = site.choose(shared)
    other = OwnSite(site.spec, tmp_path / "other")
    other.folder.mkdir()
    other.fill(DOCUMENTS, [*asked_as("say", "valid"), *asked_as("tell me", "valid")])
    with pytest.raises(TrainingError, match="triples can be trained on"):
        personalise(site.spec, other.library, site.versions, shared, OWN, site.path)
    with pytest.raises(TrainingError, match="lower the learning rate"):
        site.personalise(shared, replace(OWN, learning_rate=float("inf")))
    assert read_in_use(site.path) == before
    assert site.halves() == []


async def test_epochs_and_then_answers_are_told(site: OwnSite, shared: bytes) -> None:
    worker = Worker("learning", threads=1)
    told: list[Any] = []
    try:
        at = (site.spec, site.library, site.versions, shared, OWN, site.path)
        await worker.run_reporting(told.append, personalise, *at)
    finally:
        await worker.stop()
    epochs = [one for one in told if isinstance(one, EpochProgress)]
    answers = [one for one in told if isinstance(one, EvaluationProgress)]
    assert [one.epoch for one in epochs] == list(range(1, OWN.local_epochs + 1))
    assert {(one.step, one.total) for one in answers} == {("answers", 12)}
    assert told.index(epochs[-1]) < told.index(answers[0])


# ---- what is kept, and of what -----------------------------------------------------------


def test_what_comes_later_answers_once_it_does_better(site: OwnSite, shared: bytes) -> None:
    mixture = site.personalise(shared).in_use
    start = read_version(site.versions, shared, site.shape)
    noise = np.random.default_rng(0).normal(size=start.size)
    worse = version_of(site, (start + noise).astype(np.float32))
    # The version that it was made of is not the newest any more: it answers all the same.
    kept = site.choose(worse)
    assert (kept.version, kept.own, kept.share) == (shared.hex(), mixture.own, mixture.share)
    assert (kept.judged, kept.personalised) == (worse.hex(), shared.hex())
    better = version_of(site, start + site.train(shared, replace(PLAN, local_epochs=40))[1][:-1])
    overtaken = site.choose(better)
    assert (overtaken.version, overtaken.own, overtaken.share) == (better.hex(), "", 0.0)
    # The worker that answers may be reading it: it goes with the next judgement.
    assert site.halves() == [mixture.own]
    site.choose(better)
    assert site.halves() == []


def test_a_half_is_of_no_use_where_anything_of_it_is_another_s(
    site: OwnSite, shared: bytes, tmp_path: Path
) -> None:
    found = site.personalise(shared).in_use

    def usable(in_use: InUse = found, **changed: Any) -> bool:
        return is_usable(in_use, replace(site.spec, **changed), site.versions, site.shape)

    assert usable()
    assert not usable(personal="none")
    assert not usable(personal_folder=str(tmp_path / "empty"))
    assert not usable(replace(found, version=found.own))
    other = jobs.describe(replace(site.spec, lora_rank=4)).shape_manifest.digest
    assert not is_usable(found, site.spec, site.versions, other)
    half = site.personal / f"{found.own}.safetensors"
    damaged = bytearray(half.read_bytes())
    damaged[-1] ^= 1
    half.write_bytes(damaged)
    assert not usable()
    # And what answers then is judged without it.
    again = site.choose(shared)
    assert (again.version, again.own) == (shared.hex(), "")


def test_the_next_question_is_answered_by_the_mixture(site: OwnSite, shared: bytes) -> None:
    options = AnsweringOptions(federated=site.writer())

    def surprise() -> float:
        asked = transformers_model.federated(options)
        return asked.surprise("what does the saw need?", "oil")

    site.choose(shared)
    without = surprise()
    made = site.personalise(shared).in_use
    mixed = surprise()
    assert mixed != without
    own = read_version(site.personal, bytes.fromhex(made.own), site.shape)
    # Another half of the same version, with the same share.
    other = keep_own(site.spec, site.shape, own + np.float32(0.01))
    write_in_use(site.path, replace(made, own=other.hex()))
    assert surprise() not in (mixed, without)
    (site.personal / f"{other.hex()}.safetensors").unlink()
    write_in_use(site.path, replace(made, own=other.hex(), share=0.5 if made.share != 0.5 else 1.0))
    with pytest.raises(LanguageModelError, match="the generator's version is not used"):
        surprise()
    write_in_use(site.path, made)
    assert surprise() == mixed
    with pytest.raises(VersionError, match=r'generator\.personal is "none"'):
        vector_in_use(made, replace(site.spec, personal="none"), site.versions, site.shape)


@pytest.mark.parametrize(
    "changed",
    [
        *({"own": wrong} for wrong in ("zz", "ab", 5, None)),
        *({"share": wrong} for wrong in (0.0, -1.0, 1.5, "x", None, float("nan"))),
        {"version": ""},
    ],
)
def test_a_note_of_no_such_mixture_means_the_base_model(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = tmp_path / "in_use.json"
    write_in_use(path, InUse("ab" * 32, own="cd" * 32, share=0.5))
    assert read_in_use(path).own == "cd" * 32
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert read_in_use(path) == InUse()


# ---- answers that take long --------------------------------------------------------------


def test_an_answer_that_takes_too_long_ends_the_writing(site: OwnSite, shared: bytes) -> None:
    found = site.choose(shared, answer_within_s=0.0)
    assert found.newest is not None
    assert found.base is not None
    assert found.newest.written == found.base.written == 0
    assert np.isnan(found.newest.rouge_l)
    assert found.version == shared.hex(), "perplexity alone says it"


def test_answers_are_compared_as_far_as_both_were_written() -> None:
    slow = Judgement(1.0, (0.4,), (1.0,))
    quick = Judgement(2.0, (0.4, 0.9, 0.9), (1.0, 1.0, 1.0))
    assert slow.is_better_than(quick)
    assert not Judgement(1.0, (0.3,), (1.0,)).is_better_than(quick)
    assert not quick.is_better_than(slow)
    assert (quick.told.written, slow.told.written) == (3, 1)


def test_nothing_drifts_below_the_base_model_step_by_step() -> None:
    """Each loses less than 0.01 of ROUGE-L to the one before, and all foretell better."""
    base, one, two, three = (
        Candidate(Judgement(nats, (rouge,), (0.0,)), version=str(nats))
        for nats, rouge in ((4.0, 0.300), (3.0, 0.291), (2.0, 0.282), (1.0, 0.273))
    )
    assert two.judgement.is_better_than(one.judgement)
    assert best_of(base, [one, two, three]) is one
    better = Candidate(Judgement(0.5, (0.295,), (0.0,)))
    assert best_of(base, [one, two, better]) is better
