"""What a site learns from, and how it judges what came of it: real workers, a small encoder."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from crypto.durable import clear
from daemon.jobs import learning
from daemon.jobs.pairs import MadeKind, PairCounts, PairPlan
from daemon.learning.options import (
    EvaluationError,
    IndexingProgress,
    LearningError,
    TrainingOptions,
)
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.dense.engines import Accuracy
from daemon.library.dense.folder import load_index, save_index
from daemon.library.dense.index import UpdatableIndex
from daemon.library.readers.documents import Document, Pair
from daemon.library.schema import LibraryError
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from daemon.personal.serving import open_retriever
from daemon.personal.store import PersonalState, PersonalStore, own_digest
from daemon.process.workers import Worker, import_once
from daemon.services import collection as collection_module
from daemon.services import work_ahead
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.curve import Curve
from daemon.services.pair_maker import PairMaker, WriterSettings
from daemon.services.rights import of_all
from daemon.state.folder import StateFolder
from daemon.state.store import Store
from daemon.state.versions import read_version, write_version
from tests.support.small_models import small_encoder

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
DOCUMENTS = [
    Document(
        f"yard/{subject}",
        f"The {subject}",
        f"Somebody should keep the {subject} dry. Otherwise the {subject} will not serve for long.",
    )
    for subject in SUBJECTS
]
VALID = [Pair(f"keep the {s} dry", (f"yard/{s}",), "valid") for s in SUBJECTS]
PLAN = TrainingOptions(local_epochs=2, batch_size=4, learning_rate=3e-3, hard_negatives=2)
Version = tuple[int, bytes]
LearnFrom = Literal["supplied", "supplied+made", "made"]
Adapt = Literal["head", "lora"]
Personal = Literal["none", "query_encoder", "mixture"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    """One process for all that computes here."""
    import_once(["daemon.learning.retriever.retriever"], threads=1)  # as others in this process
    started = Worker("learning", threads=1, forked=True)
    try:
        yield started
    finally:
        await started.stop()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = {word for d in DOCUMENTS for word in re.findall(r"\w+", d.text.lower())}
    return small_encoder(tmp_path_factory.mktemp("encoder"), sorted(words))


def unheard() -> Listeners:
    """Nobody is told what becomes of a collection."""
    return Listeners(lambda: None, lambda: None, lambda: None)


@dataclass
class Site:
    """One site's state and the parts of its daemon that this is about."""

    worker: Worker
    spec: RetrieverSpec
    state: Path
    collection: Collection
    genesis: bytes
    indexing: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        worker: Worker,
        encoder: Path,
        state: Path,
        learn_from: LearnFrom,
        adapt: Adapt = "head",
        personal: Personal = "none",
    ) -> Site:
        spec = RetrieverSpec(
            encoder=str(encoder),
            max_tokens=48,
            device="cpu",
            adapt=adapt,
            personal=personal,
            personal_folder=str(state / "personal"),
            learn_from=learn_from,
            made_pairs=str(state / "made_pairs.jsonl"),
        )
        collection = Collection(
            spec=spec,
            state=StateFolder(state),
            settings=CollectionSettings(passage_tokens=40, top_k=3, willing=True, min_pairs=4),
            learning=worker,
            answering=worker,
            listeners=unheard(),
        )
        await collection.prepare()
        genesis = await worker.run(learning.write_initial_version, spec, state / "versions")
        indexing = asyncio.create_task(collection.run())
        collection.adopt(genesis)
        return cls(worker, spec, state, collection, genesis, indexing)

    @property
    def made(self) -> Path:
        return Path(self.spec.made_pairs)

    async def ingest(self, documents: list[Document], pairs: list[Pair]) -> None:
        await self.collection.ingest(documents, pairs)
        await self.collection.index(lambda _: None)

    def maker(self, model: str = "") -> PairMaker:
        return PairMaker(
            spec=self.spec,
            state=StateFolder(self.state),
            collection=self.collection,
            writer=WriterSettings(model, "general"),
            learning=self.worker,
            answering=self.worker,
        )

    async def build(self, plan: PairPlan, model: str = "") -> PairCounts:
        steps = [step async for step in self.maker(model).build(plan)]
        assert isinstance(steps[-1], PairCounts)
        return steps[-1]

    async def train(self) -> int:
        """A round's training as a daemon has it done; how many pairs were trained on."""
        update = self.state / "update.npy"
        result = await self.worker.run(
            learning.train,
            self.spec,
            self.collection.library_path,
            self.state / "versions",
            self.genesis,
            PLAN,
            1,
            "yard",
            update,
        )
        assert np.abs(np.load(update, allow_pickle=False)[:-1]).max() > 0
        return result.num_examples


@pytest_asyncio.fixture(loop_scope="module")
async def site(
    request: pytest.FixtureRequest, worker: Worker, encoder: Path, tmp_path: Path
) -> AsyncIterator[Site]:
    chosen: LearnFrom = getattr(request, "param", "supplied+made")
    made = await Site.start(worker, encoder, tmp_path / "state", chosen)
    try:
        yield made
    finally:
        made.indexing.cancel()


def there(path: Path) -> bool:
    return path.exists()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


# ---- the index that questions are answered from ---------------------------------------------


@pytest.mark.slow
async def test_who_ingests_is_told_how_far_the_index_is(site: Site) -> None:
    told: list[object] = []
    await site.collection.until_served(site.genesis)
    assert site.collection.opened.recall == 0.0, "an index of nothing finds nothing"
    await site.collection.ingest(DOCUMENTS, [])
    await site.collection.index(told.append)
    assert IndexingProgress(8, 8) in told
    assert (site.collection.opened.recall, site.collection.opened.passages) == (1.0, 8)
    assert site.collection._watching == []


async def test_an_index_that_misses_much_is_warned_of_with_what_to_do(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    path = site.collection.served_index
    assert path is not None
    index = load_index(path, site.genesis)
    poor = replace(index.base, accuracy=Accuracy(512, 0.97, 0.8), stored=None)
    clear(path)
    with Library.open(site.collection.library_path, read_only=True) as library:
        content = library.content_digest()
    changed = UpdatableIndex(poor, index.delta, index.gone)
    assert save_index(changed, path.parent, site.genesis, content) == path
    site.collection.served_index = None  # as after a start
    with capture_logs() as logs:
        await site.collection.index(lambda _: None)
    assert site.collection.opened.recall == 0.97
    (warning,) = [one for one in logs if one["log_level"] == "warning"]
    assert (warning["usual_recall"], warning["breadth"]) == (0.8, 512)
    assert "look for passages that are there many times over" in warning["event"]


# ---- learning from what was made -----------------------------------------------------------


@pytest.mark.slow
async def test_a_site_without_a_question_makes_its_own_and_trains(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    situation = await site.collection.situation()
    assert not situation.willing
    assert "make some (fedctl pairs)" in situation.reason

    counts = await site.build(PairPlan(how="inverse-cloze"))
    assert (counts.made, counts.passages) == (8, 8)
    situation = await site.collection.situation()
    assert (situation.willing, situation.num_examples) == (True, 8)
    assert await site.train() == 8

    await site.build(PairPlan(how="title"))  # another kind, beside the first
    assert await site.train() == (await site.collection.situation()).num_examples == 16
    found = await site.maker().overview("title", 2)
    assert found.kinds == {"inverse-cloze": MadeKind(8, 8, 0), "title": MadeKind(8, 8, 0)}
    assert [example.query for example in found.examples] == ["The pump", "The gate"]

    await site.maker().drop("inverse-cloze")
    assert (await site.collection.situation()).num_examples == 8
    await site.maker().drop()
    assert not (await site.collection.situation()).willing


async def test_what_is_put_aside_is_learned_from_no_longer(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    await site.build(PairPlan(how="title"))
    await site.ingest([replace(DOCUMENTS[0], split="test"), DOCUMENTS[1]], [])
    assert (await site.collection.situation()).num_examples == 7
    assert await site.train() == 7
    assert (await site.maker().overview()).kinds == {"title": MadeKind(8, 7, 0)}
    assert (await site.build(PairPlan(how="title"))).made == 7


@pytest.mark.parametrize(
    ("site", "trained"),
    [("supplied", 4), ("supplied+made", 11), ("made", 8)],
    indirect=["site"],
)
async def test_the_operator_chooses_what_is_learned_from(site: Site, trained: int) -> None:
    """Four questions were supplied, one of them in the words of a title, which gives way."""
    asked = [f"who keeps the {subject}?" for subject in SUBJECTS[1:4]]
    supplied = [Pair("the  PUMP", ("yard/pump",)), *(
        Pair(query, (f"yard/{subject}",))
        for query, subject in zip(asked, SUBJECTS[1:], strict=False)
    )]  # fmt: skip
    await site.ingest(DOCUMENTS, supplied)
    await site.build(PairPlan(how="title"))
    assert (await site.collection.situation()).num_examples == trained
    assert await site.train() == trained


async def test_damaged_pairs_are_refused_and_can_be_dropped(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    await site.build(PairPlan(how="title"))
    cut_short(site.made)
    with pytest.raises(LearningError, match="fedctl pairs drop --all"):
        await site.train()
    with pytest.raises(LearningError, match="fedctl pairs drop --all"):
        await site.build(PairPlan(how="keywords"))
    await site.maker().drop()
    assert (await site.build(PairPlan(how="keywords"))).made == 8


# ---- the curve -----------------------------------------------------------------------------------


async def test_a_site_that_renews_an_old_version_goes_on_to_the_newer_one(site: Site) -> None:
    """What is a site's own is made for one version, and the next may be committed meanwhile."""
    await site.ingest(DOCUMENTS, [])
    described = await site.worker.run(learning.describe, site.spec)
    shape = described.shape_manifest.digest
    start = read_version(site.state / "versions", site.genesis, shape)
    newer, _ = write_version(site.state / "versions", shape, start + np.float32(0.01))
    await site.collection.until_served(site.genesis)
    site.collection.adopt(newer)
    await site.collection.renew()
    await site.collection.until_served(newer)
    assert site.collection.served_digest == newer


def curve_of(site: Site, store: Store, questions: int, head: Callable[[], Version]) -> Curve:
    curve = Curve(
        spec=site.spec,
        state=StateFolder(site.state),
        store=store,
        learning=site.worker,
        questions=questions,
        head=head,
    )
    site.collection._listeners = Listeners(lambda: None, curve.answers, curve.changed)
    return curve


@pytest.mark.slow
async def test_each_committed_version_is_judged_on_the_validation_pairs(site: Site) -> None:
    store = Store(site.state / "state.sqlite3")
    head = (0, site.genesis)
    curve = curve_of(site, store, 5, lambda: head)
    judging = asyncio.create_task(curve.run())

    async def until(round_: int) -> dict[str, float]:
        async with asyncio.timeout(60):
            while not (found := [p for p in store.curve() if p.round == round_]):
                await asyncio.sleep(0.02)
        assert {point.questions for point in found} == {5}
        return {point.metric: point.value for point in found}

    try:
        await site.ingest(DOCUMENTS, [])
        async with asyncio.timeout(60):
            while "no pairs of split valid" not in curve.missing:
                await asyncio.sleep(0.02)
        await site.ingest([], VALID)
        before = await until(0)
        shape = await site.worker.run(learning.describe, site.spec)
        manifest = shape.shape_manifest
        vector = read_version(site.state / "versions", site.genesis, manifest.digest).copy()
        vector += np.random.default_rng(5).normal(size=vector.shape).astype(np.float32)
        digest, _ = write_version(site.state / "versions", manifest.digest, vector)
        head = (1, digest)
        curve.committed(*head)  # before it is indexed
        after = await until(1)
        assert set(after) == set(before) > {"mrr@10", "map", "em", "f1@5", "avg_rank"}
        assert after["avg_rank"] != before["avg_rank"]
        assert curve.missing == ""
        curve.committed(2, b"\x01" * 32)  # a version that is gone
        site.collection.adopt(digest)
        await site.collection.index(lambda _: None)
        assert not judging.done()
        # What the curve says is what an evaluation says, when asked the same.
        asked = await site.collection.evaluate("valid")
        assert asked.split == "valid"
        with Library.open(site.collection.library_path, read_only=True) as library:
            assert len(library.pairs("valid")) == asked.dense.questions == 8
    finally:
        judging.cancel()
        store.close()


async def put_something_of_its_own(site: Site) -> None:
    """As a personaliser leaves it, and far from what is shared."""
    described = await site.worker.run(learning.describe, site.spec)
    shape = described.shape_manifest
    vector = read_version(site.state / "versions", site.genesis, shape.digest).copy()
    chance = np.random.default_rng(5)
    arrays = {"mixture": vector}
    if site.spec.personal == "query_encoder":
        arrays = {f"query.{n:04d}": v for n, v in enumerate(shape.split(vector).values())}
    for name, value in arrays.items():
        arrays[name] = value + chance.normal(scale=5.0, size=value.shape).astype(np.float32)
    state = PersonalState(arrays, {"kind": site.spec.personal})
    PersonalStore(Path(site.spec.personal_folder), shape.digest).put(site.genesis, state)


@pytest.mark.slow
@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize(
    ("personal", "adapt"), [("mixture", "head"), ("query_encoder", "head"), ("mixture", "lora")]
)
async def test_what_is_shared_and_what_is_the_sites_own_are_judged_apart(
    worker: Worker,
    encoder: Path,
    tmp_path: Path,
    personal: Personal,
    adapt: Adapt,
    own_first: bool,
) -> None:
    """Whether a version is judged before or after something of the site's own was made for it."""
    site = await Site.start(worker, encoder, tmp_path, "supplied", adapt, personal)
    store = Store(site.state / "state.sqlite3")
    head = (3, site.genesis)

    async def until(kind: str) -> dict[str, float]:
        async with asyncio.timeout(60):
            while not (found := [p for p in store.curve() if p.kind == kind]):
                await asyncio.sleep(0.02)
        assert {(point.round, point.questions) for point in found} == {(3, 8)}
        return {point.metric: point.value for point in found}

    await site.ingest(DOCUMENTS, VALID)
    before = (await site.collection.evaluate("valid")).dense
    curve = curve_of(site, store, 500, lambda: head)
    judging = asyncio.create_task(curve.run())
    try:
        if own_first:
            await put_something_of_its_own(site)
        curve.committed(*head)
        shared = await until("shared")
        if not own_first:
            assert {point.kind for point in store.curve()} == {"shared"}
            await put_something_of_its_own(site)
        await site.collection.renew()
        own = await until(personal)
        assert await until("shared") == shared
        after = (await site.collection.evaluate("valid")).dense
        assert (shared["mrr@10"], own["mrr@10"]) == (before.mrr_at_10, after.mrr_at_10)
        assert shared["avg_rank"] != own["avg_rank"]
        assert {p.own_digest for p in store.curve() if p.kind == personal} == {
            own_digest(site.spec.personal_folder, site.genesis)
        }
    finally:
        judging.cancel()
        site.indexing.cancel()
        store.close()


# ---- the encoder before training -----------------------------------------------------------------


@pytest.mark.slow
async def test_an_evaluation_tells_how_far_it_is_and_lets_training_in_between(
    worker: Worker, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection_module, "_SLICE_S", 0.0)
    site = await Site.start(worker, encoder, tmp_path, "supplied", "lora")
    many = [Document(f"yard/{n}", "", f"The {SUBJECTS[n % 8]} of shed {n}") for n in range(150)]
    steps: list[object] = []
    training: asyncio.Task[int] | None = None
    trained_at: list[object] = []

    def listener(item: object) -> None:
        if item not in steps:
            steps.append(item)

    def impatient(item: object) -> None:
        nonlocal training
        listener(item)
        if item == ("encoder", 0, 0):  # a round begins as soon as passages are embedded
            training = asyncio.create_task(site.worker.run(os.getpid))
            training.add_done_callback(lambda _: trained_at.append(steps[-1]))
        if item == ("encoder", 128, 158):
            evaluating.cancel()

    try:
        await site.ingest([*DOCUMENTS, *many], [])
        with pytest.raises(EvaluationError, match="no pairs of split valid"):
            await site.collection.evaluate("valid", listener)
        assert steps == [("index", 0, 0), ("encoder", 0, 0)], "nothing is embedded in vain"
        steps.clear()

        await site.ingest([], VALID)
        evaluating = asyncio.create_task(site.collection.evaluate("valid", impatient))
        with pytest.raises(asyncio.CancelledError):
            await evaluating
        assert steps == [
            ("index", 0, 0), ("encoder", 0, 0), ("encoder", 64, 158), ("encoder", 128, 158),
        ]  # fmt: skip
        assert trained_at == [("encoder", 64, 158)]

        steps.clear()
        judged = await site.collection.evaluate("valid", listener)
        assert steps == [
            ("index", 0, 0), ("encoder", 0, 0), ("encoder", 30, 30), ("questions", 0, 0),
        ]  # fmt: skip
        assert "vanilla" in judged.figures
    finally:
        site.indexing.cancel()


# ---- sentences ----------------------------------------------------------------------------


def kept_of(site: Site) -> set[str]:
    """Documents of whose passages sentences are kept."""
    state = StateFolder(site.state)
    with (
        Library.open(state.library, read_only=True) as library,
        closing(SentenceFeatures.open(state.sentences)) as kept,
    ):
        there = kept.whole(open_retriever(site.spec).encoder.digest)
        known = {one.content: one.document_id for one in library.passages()}
    return {known.get(content, "gone") for content in there}


@pytest.mark.slow
async def test_sentences_are_read_when_nothing_else_is_to_do(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_ahead, "_READING_S", 0.1)
    await site.ingest(DOCUMENTS, [])
    assert kept_of(site) == set(), "a minute has to pass first"
    monkeypatch.setattr(collection_module, "_QUIET_S", 0.0)
    site.collection.adopt(site.genesis)
    async with asyncio.timeout(60):
        while len(kept_of(site)) < len(DOCUMENTS):
            await asyncio.sleep(0.02)
    changed = replace(DOCUMENTS[0], text="Keep the pump wet.")
    await site.ingest([changed], [])  # it is not kept from being indexed
    assert "gone" not in kept_of(site)


def full_disk(*_: object) -> int:
    raise LibraryError("the disk is full")


@pytest.mark.slow
async def test_what_is_done_ahead_is_tried_again_after_a_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.ingest(DOCUMENTS, [])
    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(learning, "work_ahead", full_disk)
        monkeypatch.setattr(collection_module, "_QUIET_S", 0.0)
        monkeypatch.setattr(work_ahead, "_AFTER_FAILURE_S", 0.05)
        site.collection.adopt(site.genesis)
        async with asyncio.timeout(60):
            while not any("done ahead" in line["event"] for line in lines):
                await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        while len(kept_of(site)) < len(DOCUMENTS):
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_file_that_cannot_be_erased_from_keeps_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.ingest(DOCUMENTS, [])
    monkeypatch.setattr(learning, "erase_removed", full_disk)
    monkeypatch.setattr(collection_module, "_QUIET_S", 0.0)
    with capture_logs() as lines:
        site.collection.adopt(site.genesis)
        async with asyncio.timeout(60):
            while len(kept_of(site)) < len(DOCUMENTS):
                await asyncio.sleep(0.02)
    assert ["text of removed" in line["event"] for line in lines].count(True) == 1, "not each time"


@pytest.mark.slow
async def test_a_removal_takes_sentences_along(site: Site) -> None:
    await site.ingest(DOCUMENTS, [])
    for document in DOCUMENTS:
        await site.collection.ask(document.title, 3, rights=of_all)
    assert {"yard/pump", "yard/lamp"} <= kept_of(site)
    await site.collection.remove(["yard/pump"])
    assert kept_of(site).isdisjoint({"yard/pump", "gone"})
    assert "yard/lamp" in kept_of(site)
