"""Which version of the generator answers, as documents, pairs and versions come: a real worker."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32
from daemon.jobs.generator import training as jobs
from daemon.learning.generator.in_use import InUse, read_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.process.workers import Worker
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.generator.history import Unjudged
from daemon.state.store import Store
from daemon.state.versions import read_version
from peers.attempts.effects import Durable
from proto import federation_pb2 as pb
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


def trained_once(spec: GeneratorSpec, folder: Path) -> tuple[Site, Float32, Float32]:
    """A site, its generator's first values [D], and what a round changes in them."""
    site = Site(spec, folder)
    site.fill(DOCUMENTS, PAIRS)
    first = jobs.write_initial_version(site.spec, site.versions)
    shape = jobs.describe(site.spec).shape_manifest.digest
    return site, read_version(site.versions, first, shape), site.train(first, PLAN)[1][:-1]


async def test_a_version_is_judged_once_there_is_enough_to_judge_by(
    spec: GeneratorSpec, tmp_path: Path
) -> None:
    site, start, update = trained_once(spec, tmp_path)
    trained = version_of(site, start + update)
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


async def test_each_version_that_is_kept_has_its_place_in_the_history(
    spec: GeneratorSpec, tmp_path: Path
) -> None:
    """Two rounds were committed before there was enough to judge by, and one is pruned."""
    site, start, update = trained_once(spec, tmp_path)
    first, shape = version_of(site, start), jobs.describe(site.spec).shape_manifest.digest
    versions = [version_of(site, start + np.float32(n) * update) for n in (0.25, 0.5, 1)]
    worker = Worker("learning", threads=1)
    store = Store(tmp_path / "generator.db")
    store.load("bank.generator", shape, first)
    for number, digest in enumerate(versions, 1):
        body = pb.VoteBody(round=number, model_digest=digest)
        committed = pb.Commit(certificate=pb.Certificate(body=body))
        store.persist(Durable(number, digest), (committed,))
    (site.versions / f"{versions[0].hex()}.safetensors").unlink()
    judging = None
    try:
        generator = of(site, worker)
        await generator.prepare(site.versions, None)
        assert generator.own is not None
        await generator.prepare(site.versions, generator.own.name, store)
        history = generator.history
        assert history is not None
        judging = asyncio.create_task(generator.run())
        generator.adopt(versions[2])
        await until(lambda: "ingest pairs of split valid" in generator.missing, within=120)
        assert [one.round for one in history.unjudged()] == [0, 1, 2, 3]
        valid = [
            replace(one, query=f"{word}: {one.query}", split="valid")
            for one in PAIRS
            for word in ("say", "tell")
        ]
        site.fill([], valid)
        await generator.situation()
        await until(lambda: len(history.unjudged()) == 1, within=300)
        assert history.unjudged() == [Unjudged(1, versions[0], pruned=True)]
        nats = {one.round: one for one in store.curve("nats")}
        assert sorted(nats) == [0, 2, 3]
        assert nats[0].value > nats[2].value > nats[3].value, "it learns to answer"
        assert {one.questions for one in nats.values()} == {len(valid)}
        assert store.curve("perplexity")[0].value == pytest.approx(math.exp(nats[0].value))
        assert len({one.value for one in store.curve("tokens")}) == 1
        assert history.round_of(versions[2]) == 3
        assert generator.in_use.newest is not None
        assert nats[3].value == generator.in_use.newest.nats, "what it was chosen by"
        # It is kept: nothing is judged again.
        when = [one.unix_ms for one in store.curve()]
        await generator.situation()
        await generator.situation()
        assert [one.unix_ms for one in store.curve()] == when
    finally:
        if judging is not None:
            judging.cancel()
        await worker.stop()
        store.close()


async def test_a_site_without_the_base_model_says_what_it_lacks(tmp_path: Path) -> None:
    worker = Worker("learning", threads=1)
    generator = of(Site(GeneratorSpec(), tmp_path), worker)
    await generator.prepare(tmp_path, None)
    situation = await generator.situation()
    assert not situation.willing
    assert "generator.base_model" in situation.reason
    assert generator.last == situation
