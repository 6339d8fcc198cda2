"""An ingest and a removal are killed at fifty drawn moments each, and end as undisturbed ones.

What is killed is what the learning worker does: batches into the library, their passages
embedded, the index made. It begins again as `fedctl ingest` would, from the first document.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from daemon.jobs import learning
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.dense import folder as index_folder
from daemon.library.readers.documents import Block, Document, joined
from daemon.library.store import Library
from daemon.personal.serving import retriever_for
from tests.support.small_models import small_encoder

pytestmark = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(3000)]

KILLS = 50
DOCUMENTS, REMOVED, BATCH = 1000, 500, 50
THINGS = ("anchor", "bell", "capstan", "davit", "ensign", "fender", "gaff", "hatch", "keel", "lamp")


def document(number: int) -> Document:
    """One of three passages: below a heading, and of a table, on two pages."""
    thing = THINGS[number % len(THINGS)]
    text, spans = joined(
        [
            Block("heading", f"The {thing} {number}", 1),
            Block("text", f"It lies in store {number}. Who takes the {thing} signs for it.", 1),
            Block("table", f"part\tcount\n{thing}\t{number}", 2, (0.125, 0.25, 0.5, 0.75)),
        ]
    )
    return Document(f"yard/{number:04}", f"Of the {thing}", text, spans=spans)


@dataclass
class Site:
    """A site's files, and the work on them."""

    spec: RetrieverSpec
    folder: Path
    model: bytes = b""

    @property
    def library(self) -> Path:
        return self.folder / "library.sqlite3"

    def ingest(self) -> None:
        for first in range(0, DOCUMENTS, BATCH):
            batch = [document(number) for number in range(first, first + BATCH)]
            learning.ingest(self.spec, self.library, batch, [], passage_tokens=40)
        self.finish()

    def remove(self) -> None:
        for first in range(0, REMOVED, BATCH):
            ids = [document(number).id for number in range(first, first + BATCH)]
            learning.remove(self.library, ids)
        self.finish()

    def finish(self) -> None:
        learning.embed_passages(self.spec, self.library)
        versions = self.folder / "versions"
        learning.build_index(self.spec, self.library, versions, self.model, self.folder / "index")

    def contents(self) -> dict[str, object]:
        """Documents, texts and places by passage id, each with its vector; and how many."""
        digest = retriever_for(self.spec).encoder.digest
        with Library.open(self.library, read_only=True) as library:
            labels, vectors = library.features(digest)
            vector_of = dict(zip(labels.tolist(), vectors, strict=True))
            passages = library.passages()
            counts = library.counts()
        return {
            "counts": (counts.documents, counts.passages),
            **{
                one.id: (one.text, one.context, one.kind, one.page, one.place,
                         vector_of[one.rowid].round(5).tolist())
                for one in passages
            },
        }  # fmt: skip

    def recall(self) -> float:
        """Of the ten nearest by brute force, the share that the index finds."""
        digest = retriever_for(self.spec).encoder.digest
        with Library.open(self.library, read_only=True) as library:
            labels, vectors = library.features(digest)
            path = index_folder.index_path(
                self.folder / "index", self.model, library.content_digest()
            )
        opened = index_folder.load_index(path, self.model)
        asked = vectors[:: max(1, len(vectors) // 50)]
        found, _ = opened.search(asked, 10)
        cosines = asked @ vectors.T
        least = np.sort(cosines, axis=1)[:, -10] - 1e-6  # equal vectors are as good
        place = {label: row for row, label in enumerate(labels.tolist())}
        right = [
            cosines[row, place[label]] >= least[row]
            for row, some in enumerate(found.tolist())
            for label in some
        ]
        return float(np.mean(right))


def killed(work: Callable[[], None], after: float) -> bool:
    """Whether it was, or was over before that."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*THINGS, "store", "signs", "part"])
    spec = RetrieverSpec(encoder=str(folder), max_tokens=64, device="cpu", threads=1)
    retriever_for(spec)
    return spec


def new_site(spec: RetrieverSpec, folder: Path) -> Site:
    site = Site(spec, folder)
    site.model = learning.write_initial_version(spec, folder / "versions")
    return site


@pytest.mark.parametrize("removal", [False, True], ids=["ingest", "removal"])
def test_what_is_killed_ends_as_what_is_not(
    spec: RetrieverSpec, tmp_path: Path, removal: bool
) -> None:
    calm = new_site(spec, tmp_path / "calm")
    calm.ingest()
    started = time.monotonic()
    if removal:
        calm.remove()
    else:
        calm = new_site(spec, tmp_path / "again")
        started = time.monotonic()
        calm.ingest()
    seconds = time.monotonic() - started
    wanted = calm.contents()
    chance, dead, tries = random.Random(16), 0, 0
    while dead < KILLS:
        tries += 1
        assert tries <= 4 * KILLS, f"{dead} killed in the midst"
        site = new_site(spec, tmp_path / f"site{tries}")
        if removal:
            site.ingest()
        work = site.remove if removal else site.ingest
        after = chance.uniform(0, seconds)
        if killed(work, after):
            dead += 1
        else:  # the machine is quicker by now
            seconds = after
        work()
        assert site.contents() == wanted, f"kill {tries}"
        assert site.recall() >= 0.95, f"kill {tries}"
        if removal:
            assert not holding(b"store 499", site.folder), f"kill {tries}"
        shutil.rmtree(site.folder)
    print(f"{dead} killed in the midst, {tries - dead} times it was over before")


def holding(words: bytes, folder: Path) -> list[str]:
    """Files in which these words stand."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if words in path.read_bytes()]
