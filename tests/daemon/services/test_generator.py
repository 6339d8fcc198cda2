"""Which version of the generator answers, as documents, pairs and versions come: a real worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from daemon.jobs.generator import training as jobs
from daemon.learning.generator.in_use import InUse, read_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.process.workers import Worker
from daemon.services.generator.generator import FederatedGenerator
from daemon.state.versions import read_version
from tests.daemon.jobs.test_generator import DOCUMENTS, PAIRS, PLAN, Site, spec, version_of
from tests.support.lines import until

__all__ = ["spec"]


def of(site: Site, worker: Worker) -> FederatedGenerator:
    return FederatedGenerator(
        site.spec,
        library=site.library,
        learning=worker,
        answering=worker,
        willing=True,
        min_triples=4,
        in_use=site.folder / "in_use.json",
    )


async def test_a_version_is_judged_once_there_is_enough_to_judge_by(
    spec: GeneratorSpec, tmp_path: Path
) -> None:
    site = Site(spec, tmp_path)
    site.fill(DOCUMENTS, PAIRS)
    first = jobs.write_initial_version(site.spec, site.versions)
    shape = jobs.describe(site.spec).shape_manifest.digest
    start = read_version(site.versions, first, shape)
    trained = version_of(site, start + site.train(first, PLAN)[1][:-1])
    worker = Worker("learning", threads=1)
    generator = of(site, worker)
    judging = None
    try:
        await generator.prepare(site.versions, None)
        assert generator.own is not None
        await generator.prepare(site.versions, generator.own.name)
        judging = asyncio.create_task(generator.run())
        generator.adopt(trained)
        await until((tmp_path / "in_use.json").exists, within=120)
        assert read_in_use(tmp_path / "in_use.json") == InUse(triples=0)
        valid = [replace(one, query=f"say: {one.query}", split="valid") for one in PAIRS]
        more = [replace(one, query=f"tell: {one.query}", split="valid") for one in PAIRS]
        site.fill([], [*valid, *more])
        situation = await generator.situation()
        assert (situation.willing, situation.num_examples) == (True, len(PAIRS))
        await until(lambda: generator.served_digest == trained, within=120)
        # It is gone at the next start: the base model answers, and nobody is told otherwise.
        (site.versions / f"{trained.hex()}.safetensors").unlink()
        again = of(site, worker)
        await again.prepare(site.versions, generator.own.name)
        assert (again.served_digest, read_in_use(tmp_path / "in_use.json")) == (b"", InUse())
    finally:
        if judging is not None:
            judging.cancel()
        await worker.stop()


async def test_a_site_without_the_base_model_says_what_it_lacks(tmp_path: Path) -> None:
    worker = Worker("learning", threads=1)
    generator = of(Site(GeneratorSpec(), tmp_path), worker)
    await generator.prepare(tmp_path, None)
    situation = await generator.situation()
    assert not situation.willing
    assert "generator.base_model" in situation.reason
    assert generator.last == situation
