"""This site's own half of the generator, as people ask for it and daemons start: a real worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.jobs.generator import training as jobs
from daemon.learning.generator.in_use import InUse, read_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import LearningError, TrainingError
from daemon.process.workers import Worker
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.generator.personaliser import GeneratorPersonaliser
from daemon.state.audit import AuditLog
from tests.daemon.jobs.test_generator import Site, spec
from tests.daemon.jobs.test_own_generator import OWN, OwnSite, site

__all__ = ["site", "spec"]


def of(site: Site, worker: Worker, **changed: object) -> FederatedGenerator:
    return FederatedGenerator(
        replace(site.spec, **changed),  # type: ignore[arg-type]  # fields by their names
        library=site.library,
        learning=worker,
        answering=worker,
        willing=True,
        min_triples=4,
        in_use=site.folder / "generator" / "in_use.json",
    )


def personaliser(generator: FederatedGenerator, worker: Worker) -> GeneratorPersonaliser:
    """Of a site whose rounds are all over."""
    audit = AuditLog(generator.in_use_file.parent / "audit")
    return GeneratorPersonaliser(generator, OWN, learning=worker, protocols={}, audit=audit)


async def test_a_half_outlives_a_restart_and_ends_with_its_setting(site: OwnSite) -> None:
    worker = Worker("learning", threads=1)
    try:
        generator = of(site, worker)
        first = await worker.run(jobs.write_initial_version, site.spec, site.versions)
        await generator.prepare(site.versions, None)
        generator.adopt(first)
        made = await personaliser(generator, worker).personalise(lambda _: None, local_epochs=3)
        assert (made.epochs, made.in_use.version) == (3, first.hex())
        assert generator.in_use == made.in_use == read_in_use(site.path)
        assert generator.served_digest == first
        # What a crash has left beside it goes with the next start, and the half stays.
        (site.personal / f"{'ab' * 32}.safetensors").write_bytes(b"of another one")
        again = of(site, worker)
        await again.prepare(site.versions, None)
        assert again.in_use == made.in_use
        assert site.halves() == [made.in_use.own]
        # Other factors are another generator: none of it is of use there.
        other = of(site, worker, lora_rank=4)
        await other.prepare(site.versions, None)
        assert (other.in_use, read_in_use(site.path), site.halves()) == (InUse(), InUse(), [])
        generator = of(site, worker)
        await generator.prepare(site.versions, None)
        generator.adopt(first)
        await personaliser(generator, worker).personalise(lambda _: None)
        assert generator.in_use.own
        without = of(site, worker, personal="none")
        await without.prepare(site.versions, None)
        assert (without.in_use, site.halves()) == (InUse(), [])
    finally:
        await worker.stop()


async def test_who_lacks_something_is_told_what(spec: GeneratorSpec, tmp_path: Path) -> None:
    worker = Worker("learning", threads=1)
    few = Site(replace(spec, personal="mixture", personal_folder=str(tmp_path / "own")), tmp_path)
    few.fill([], [])
    (tmp_path / "generator").mkdir()
    try:
        first = await worker.run(jobs.write_initial_version, few.spec, few.versions)
        for changed, cause in (
            ({"base_model": ""}, r"has no base model .*generator\.base_model"),
            ({"personal": "none"}, r'set generator\.personal = "mixture"'),
        ):
            generator = of(few, worker, **changed)
            await generator.prepare(few.versions, None)
            generator.adopt(first)
            with pytest.raises(LearningError, match=cause):
                await personaliser(generator, worker).personalise(lambda _: None)
        generator = of(few, worker)
        await generator.prepare(few.versions, None)
        with pytest.raises(LearningError, match="no version of the generator yet"):
            await personaliser(generator, worker).personalise(lambda _: None)
        generator.adopt(first)
        with pytest.raises(TrainingError, match=r"takes 10 .* and 0 are here"):
            await personaliser(generator, worker).personalise(lambda _: None)
    finally:
        await worker.stop()
