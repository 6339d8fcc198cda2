"""Versions of the federated generator that are asked the same questions: real small models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from daemon.answering.options import AnsweringOptions, FederatedWriter
from daemon.jobs import learning
from daemon.jobs.generator import training as jobs
from daemon.learning.generator.in_use import InUse, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import EvaluationProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.workers import Worker
from daemon.services.answer_evaluation import AnswerJudge, AskedPair, Writer
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.rights import of_all
from daemon.state.folder import StateFolder
from daemon.state.versions import read_version, write_version
from tests.daemon.jobs.test_generator import DOCUMENTS, PAIRS, spec
from tests.support.small_models import small_encoder

__all__ = ["spec"]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WORDS = sorted({word for one in DOCUMENTS for word in re.findall(r"\w+", one.text.lower())})
QUESTIONS = [replace(pair, split="test") for pair in PAIRS]


@dataclass(frozen=True)
class Answering:
    """A site that answers with a federated generator, and two of its versions."""

    collection: Collection
    worker: Worker
    in_use: Path
    one: str
    two: str

    def answers_with(self, version: str) -> None:
        write_in_use(self.in_use, InUse(version=version))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    spec: GeneratorSpec, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Answering]:
    folder = tmp_path_factory.mktemp("site")
    encoder = small_encoder(tmp_path_factory.mktemp("encoder"), WORDS)
    state, versions = StateFolder(folder), folder / "generator" / "versions"
    first = jobs.write_initial_version(spec, versions)
    shape = jobs.describe(spec).shape_manifest.digest
    start = read_version(versions, first, shape)
    noise = np.random.default_rng(0).normal(size=start.size).astype(np.float32)
    one, two = (write_version(versions, shape, start + by * noise)[0] for by in (0.5, 1.0))
    in_use = folder / "generator" / "in_use.json"
    options = AnsweringOptions(
        generator="federated",
        prompt_tokens=900,
        new_tokens=16,
        lost_answers=0.0,
        device="cpu",
        federated=FederatedWriter(spec, versions, in_use),
    )
    worker = Worker("answering", threads=1)
    collection = Collection(
        spec=RetrieverSpec(encoder=str(encoder), max_tokens=48, device="cpu"),
        state=state,
        settings=CollectionSettings(40, 2, True, 4, answering=options),
        learning=worker,
        answering=worker,
        listeners=Listeners(lambda: None, lambda: None, lambda: None),
    )
    indexing = None
    try:
        await collection.prepare()
        genesis = await worker.run(
            learning.write_initial_version, collection._spec, collection.versions
        )
        indexing = asyncio.create_task(collection.run())
        collection.adopt(genesis)
        await collection.until_settled()
        await collection.ingest(DOCUMENTS, QUESTIONS)
        await collection.index(lambda _: None)
        yield Answering(collection, worker, in_use, one.hex(), two.hex())
    finally:
        if indexing is not None:
            indexing.cancel()
        await worker.stop()


async def perplexities(site: Answering, version: str | None) -> dict[str, float]:
    """Of the right answers, one judged alone."""
    writer = Writer("federated", None if version is None else InUse(version))
    judged = await AnswerJudge(site.collection, site.worker).judge("test", writers=[writer])
    return {name: one.mean for name, one in judged.figures.items() if name.startswith("ppl")}


async def test_versions_are_compared_on_the_same_questions(site: Answering) -> None:
    base, one = Writer("base", InUse()), Writer("federated", InUse(site.one), 3)
    steps: list[object] = []
    judge = AnswerJudge(site.collection, site.worker)
    judged = await judge.judge("test", steps.append, [base, one])
    (other,) = judged.compared
    assert (judged.writer, other.writer) == (base, one)
    assert (judged.questions, other.questions) == (len(QUESTIONS), len(QUESTIONS))
    assert steps[-1] == EvaluationProgress("answers", 2 * len(QUESTIONS), 2 * len(QUESTIONS))
    # What it writes is nonsense, and is not given to people: the figures of texts are not its own.
    assert [sum(each.stood_in.values()) for each in (judged, other)] == [len(QUESTIONS)] * 2
    ratio = other.over_first["ppl-reference"]
    assert ratio.mean == pytest.approx(
        other.figures["ppl-reference"].mean / judged.figures["ppl-reference"].mean
    )
    assert ratio.low <= ratio.mean <= ratio.high
    assert ratio.mean != 1.0
    above = other.over_first["token-f1"]
    assert above.mean == pytest.approx(
        other.figures["token-f1"].mean - judged.figures["token-f1"].mean
    )
    # Each is what it is alone, whichever answers people meanwhile.
    site.answers_with(site.two)
    assert (await perplexities(site, ""))["ppl-reference"] == pytest.approx(
        judged.figures["ppl-reference"].mean
    )
    assert (await perplexities(site, site.one))["ppl-reference"] == pytest.approx(
        other.figures["ppl-reference"].mean
    )


async def test_people_are_answered_by_what_was_chosen_meanwhile(site: Answering) -> None:
    """The index is the same; only the generator's version changes between two questions."""
    found = []
    for version in (site.one, site.two, site.one):
        site.answers_with(version)
        found.append((await perplexities(site, None))["ppl-reference"])
    assert found[0] == found[2]
    assert found[1] == (await perplexities(site, site.two))["ppl-reference"]
    assert found[0] != found[1]


async def test_answers_of_two_versions_are_not_mixed(site: Answering) -> None:
    """Another comes to answer people in the midst of it; and it is given up and goes on."""
    site.answers_with(site.one)
    alone = await perplexities(site, site.one)
    judge = AnswerJudge(site.collection, site.worker)
    one, two = Writer("federated", InUse(site.one)), Writer("federated", InUse(site.two))

    def swap(step: object) -> None:
        if step == ("answers", 3, len(QUESTIONS)):
            site.answers_with(site.two)
        if step == ("answers", 5, len(QUESTIONS)):
            judging.cancel()

    judging = asyncio.create_task(judge.judge("test", swap, [one]))
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert (await site.collection.ask(PAIRS[0].query, 0, rights=of_all)).model_digest
    so_far = await judge.so_far()
    assert (so_far.writer, so_far.questions) == (one, 5)
    steps: list[object] = []
    judged = await judge.judge("test", steps.append, [one])
    assert (judged.asked_before, judged.questions) == (5, len(QUESTIONS))
    assert judged.figures["ppl-reference"].mean == pytest.approx(alone["ppl-reference"])
    # What was begun with one version is not gone on with by another.
    judging = asyncio.create_task(judge.judge("test", swap, [one]))
    with pytest.raises(asyncio.CancelledError):
        await judging
    asked = [one for one in steps if isinstance(one, AskedPair)]
    assert len(asked) == len(QUESTIONS)
    assert (await judge.judge("test", writers=[two])).asked_before == 0


async def test_a_version_that_is_gone_fails_and_nothing_stands_in(site: Answering) -> None:
    judge = AnswerJudge(site.collection, site.worker)
    base, gone = Writer("base", InUse()), Writer("federated", InUse("ab" * 32), 7)
    judged = await judge.judge("test", writers=[base, gone])
    (other,) = judged.compared
    assert (judged.questions, judged.failed) == (len(QUESTIONS), {})
    assert (other.questions, other.figures, other.over_first) == (0, {}, {})
    ((cause, failed),) = other.failed.items()
    assert ("version is not used" in cause, len(failed)) == (True, len(QUESTIONS))
    again = await judge.judge("test", writers=[base])
    assert again.asked_before == len(QUESTIONS), "who did not fail is not asked again"
