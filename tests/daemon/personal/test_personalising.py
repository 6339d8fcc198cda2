"""Stage 2 at one site: what is learned, what is kept, what is left behind when it is cut short."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.fedctl.main import main
from daemon.fedctl.terminal.output import Exit
from daemon.jobs import learning, personal
from daemon.learning.options import EpochProgress, LearningError, Personalised, TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms, Disclosed, PeerAnswers
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair
from daemon.library.store import Library
from daemon.pairs.training_set import training_set
from daemon.personal.held_out import set_apart
from daemon.personal.serving import load_serving, open_retriever
from daemon.personal.store import PersonalState, PersonalStore
from daemon.personal.tuning import PersonalQueryRetriever
from daemon.process.workers import Worker, import_once
from daemon.state.versions import read_version
from tests.support.canned_daemon import CannedDaemon, canned_daemon
from tests.support.small_models import small_encoder

ROOT = Path(__file__).parents[3]
NAMES = [f"{a} {b}" for a in ("red", "blue", "old", "new") for b in ("pump", "lamp", "rope")]
PLAN = TrainingOptions(local_epochs=2, batch_size=4, learning_rate=1e-2, hard_negatives=2)
EXACT = AskingTerms("exact", top_n=3)


class Site:
    """A library, the version every site starts from, and what this one runs."""

    def __init__(self, spec: RetrieverSpec, folder: Path) -> None:
        self.spec = replace(spec, personal_folder=str(folder / "personal"))
        self.library, self.versions = folder / "library.sqlite3", folder / "versions"
        self.digest = learning.write_initial_version(self.spec, self.versions)
        self.ingest("train")

    def ingest(self, split: str, times: int = 1) -> None:
        documents = [Document(f"yard/{n}", n, f"Keep the {n} dry.") for n in NAMES]
        pairs = [
            Pair(f"what of the {n} {split} {k}?", (f"yard/{n}",), split)
            for n in NAMES
            for k in range(times)
        ]
        learning.ingest(self.spec, self.library, documents, pairs, passage_tokens=40)

    @property
    def store(self) -> PersonalStore:
        return PersonalStore(
            Path(self.spec.personal_folder), learning.describe(self.spec).shape_manifest.digest
        )

    def serving(self) -> PersonalQueryRetriever:
        """A retriever as the answering worker has it."""
        retriever = open_retriever(self.spec)
        load_serving(self.spec, retriever, self.versions, self.digest)
        assert isinstance(retriever, PersonalQueryRetriever)
        return retriever


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), ["red", "blue", "pump", "lamp"])
    return RetrieverSpec(
        encoder=str(folder),
        max_tokens=48,
        device="cpu",
        personal="query_encoder",
        personal_folder="unused",
    )


@pytest.fixture
def site(spec: RetrieverSpec, tmp_path: Path) -> Site:
    return Site(spec, tmp_path)


class Abroad:
    """The daemon's side: one other site, which answers with what it is given."""

    def __init__(self, *, fails_at: int = -1, silent: bool = False) -> None:
        self.items: list[Disclosed] = []
        self.steps: list[object] = []
        self._fails_at, self._silent = fails_at, silent

    async def __call__(self, item: Disclosed) -> PeerAnswers:
        self.items.append(item)
        if len(self.items) == self._fails_at:
            raise LearningError("a round of training began")
        if self._silent:
            return PeerAnswers([])
        chance = np.random.default_rng(len(self.items))
        rows = chance.normal(size=(len(item.rows), 2, item.dimension))
        rows /= np.linalg.norm(rows, axis=2, keepdims=True)
        return PeerAnswers([list(rows.astype(np.float32))])


async def fitted(site: Site, abroad: Abroad, how: AskingTerms = EXACT) -> Personalised:
    import_once(["daemon.learning.retriever.retriever", "daemon.personal.tuning"], threads=1)
    worker = Worker("learning", threads=1, forked=True)
    try:
        return await worker.run_asking(
            abroad.steps.append,
            abroad,
            personal.personalise,
            site.spec,
            site.library,
            site.versions,
            site.digest,
            PLAN,
            how,
        )
    finally:
        await worker.stop()


@pytest.mark.slow
async def test_questions_change_and_passages_do_not(site: Site) -> None:
    shared = site.serving()
    asked, told = ["what of the red pump?"], ["Keep the red pump dry."]
    before = shared.embed_queries(asked), shared.embed_passages(told)
    abroad = Abroad()
    done = await fitted(site, abroad)
    assert (done.pairs, done.judged, done.changed) == (12, 0, True)
    assert math.isnan(done.mrr_before)
    assert [item.rows.shape for item in abroad.items] == [(4, 32)] * 6  # 2 epochs of 3 steps
    assert [step.epoch for step in abroad.steps if isinstance(step, EpochProgress)] == [1, 2]
    after = site.serving()
    assert np.abs(after.embed_queries(asked) - before[0]).max() > 1e-3
    np.testing.assert_array_equal(after.embed_passages(told), before[1])
    # What is exchanged is the version still, to the last bit.
    shape = learning.describe(site.spec).shape_manifest
    np.testing.assert_array_equal(
        after.vector(), read_version(site.versions, site.digest, shape.digest)
    )
    # Foreign negatives have been learned from: with others the result is another.
    await fitted(site, Abroad(silent=True))
    assert (site.serving().embed_queries(asked) != after.embed_queries(asked)).any()


@pytest.mark.slow
async def test_what_is_cut_short_leaves_nothing_and_the_next_try_is_the_whole(site: Site) -> None:
    with pytest.raises(LearningError, match="a round of training began"):
        await fitted(site, Abroad(fails_at=4))
    assert site.store.serving(site.digest) is None
    await fitted(site, Abroad())
    first = site.store.serving(site.digest)
    await fitted(site, Abroad())
    again = site.store.serving(site.digest)
    assert first is not None
    assert again is not None
    for name, values in first.arrays.items():
        np.testing.assert_array_equal(values, again.arrays[name])


@pytest.mark.slow
async def test_a_query_leaves_its_worker_as_it_is_disclosed_and_not_otherwise(site: Site) -> None:
    abroad = Abroad(silent=True)
    await fitted(site, abroad, AskingTerms("bucket", bits=9, top_n=3))
    assert {item.rows.dtype for item in abroad.items} == {np.dtype(np.uint8)}
    assert {item.rows.shape for item in abroad.items} == {(4, 2)}


def test_pairs_to_judge_by_are_kept_apart_and_none_is_learned_from(site: Site) -> None:
    retriever = site.serving()
    with Library.open(site.library) as library:
        pairs = training_set(library, retriever, PLAN, site.spec)
        same, nothing = set_apart(library, retriever, pairs, seed=1)
        assert (same, nothing) == (pairs, None)  # 12 pairs: too few to spare any
    site.ingest("train", times=10)
    with Library.open(site.library) as library:
        pairs = training_set(library, retriever, PLAN, site.spec)
        kept, judged = set_apart(library, retriever, pairs, seed=1)
    assert judged is not None
    assert (len(kept.positives), len(judged.positives)) == (90, 30)  # of 12 answers three
    assert not {row[0] for row in kept.positives} & {row[0] for row in judged.positives}
    assert not set(kept.queries.texts) & set(judged.queries.texts)
    assert {*kept.queries.texts, *judged.queries.texts} == {*pairs.queries.texts}
    site.ingest("valid", times=2)
    with Library.open(site.library) as library:
        whole, judged = set_apart(library, retriever, pairs, seed=1)
    assert whole is pairs
    assert judged is not None
    assert all(" valid " in text for text in judged.queries.texts)


def test_what_is_no_query_encoder_is_not_taken_up(site: Site) -> None:
    """A tiered head's file for the same version, from before the setting was changed."""
    site.store.put(
        site.digest, PersonalState({"personal.w": np.ones(3, np.float32)}, {"tier": "x"})
    )
    retriever = site.serving()
    np.testing.assert_array_equal(
        retriever.embed_queries(["pump"]), retriever.embed_passages(["pump"])
    )
    site.store.put(
        site.digest, PersonalState({"w": np.ones(3, np.float32)}, {"kind": "query_encoder"})
    )
    with pytest.raises(LearningError, match="delete"):
        site.serving()


# ---- fedctl -------------------------------------------------------------------------


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hanse-") as folder:
        yield Path(folder) / "fedd.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[CannedDaemon]:
    with canned_daemon(path) as running:
        yield running


def test_people_see_what_was_exchanged_and_what_came_of_it(
    daemon: CannedDaemon, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["personalise", "--local-epochs", "3", "--socket", str(path)]) == 0
    assert daemon.asked[0].local_epochs == 3
    out = capsys.readouterr().out
    assert "20 pairs kept apart: MRR 0.500 with the shared version, 0.625 with this" in out
    assert "answered 120 of 160 queries with 1200 embeddings" in out
    assert "1 of 6 steps had local negatives only" in out
    assert "\x1b[31m" not in out


def test_a_daemon_that_stops_telling_is_no_success(
    daemon: CannedDaemon, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del daemon.personalising[-1]
    assert main(["personalise", "--socket", str(path)]) == Exit.UNREACHABLE
    assert "stopped telling" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_gives_it_up_and_says_so(daemon: CannedDaemon, path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def slowly() -> Iterator[Any]:
        yield daemon_step
        begun.set()
        over.wait(30)

    daemon_step = daemon.personalising[0]
    daemon.personalising = slowly()  # type: ignore[assignment]
    words = [sys.executable, "-m", "daemon.fedctl", "personalise", "--socket", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(10) == Exit.INTERRUPTED
    over.set()
    assert "given up; questions are answered as before" in told
    assert "Traceback" not in told
