"""A small site whose questions are answered in this process."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.answering.options import AnsweringOptions
from daemon.jobs import answering
from daemon.jobs import learning as learning_jobs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair
from daemon.state.versions import read_version, write_version
from tests.support.small_models import small_encoder

TEXTS = {
    "rope": ("Rope", "Hemp rope is tarred against rot. It lasts four winters."),
    "sail": ("Sails", "Flax makes a light sail. Cotton makes a white one."),
    "lamp": ("Lamps", "Whale oil burns in every lamp. A wick is cut daily."),
    "pump": ("Pumps", "The pump clears the bilge at dawn. Leather seals it."),
}
WORDS = sorted(
    {word for pair in TEXTS.values() for word in re.findall(r"\w+", " ".join(pair).lower())}
)
DOCUMENTS = [Document(name, title, text) for name, (title, text) in TEXTS.items()]
PAIRS = [
    Pair("Which oil burns in a lamp?", ("lamp",), "test"),
    Pair("When does the pump clear the bilge?", ("pump",), "test"),
]


@dataclass(frozen=True)
class Site:
    """The files of a site with one model version, indexed."""

    spec: RetrieverSpec
    folder: Path
    digest: bytes
    index: Path

    @property
    def library(self) -> Path:
        return self.folder / "library.sqlite3"

    @property
    def sentences(self) -> Path:
        return self.folder / "sentences.sqlite3"

    @property
    def versions(self) -> Path:
        return self.folder / "versions"

    def ingest(self, documents: list[Document], pairs: list[Pair]) -> None:
        learning_jobs.ingest(self.spec, self.library, documents, pairs, 20)

    def indexed(self, digest: bytes) -> Path:
        return learning_jobs.build_index(
            self.spec, self.library, self.versions, digest, self.folder / "index"
        )

    def open(
        self,
        digest: bytes | None = None,
        index: Path | None = None,
        **options: Any,
    ) -> None:
        """As people find it, but for this: four documents and a small encoder answer anything."""
        answering.open_version(
            *(self.spec, self.library, self.versions, digest or self.digest, index or self.index),
            sentences_path=self.sentences,
            options=AnsweringOptions(**({"lost_answers": 0.0} | options)),
        )

    def other_version(self) -> bytes:
        """A second version: the first with a disturbed head."""
        shape = learning_jobs.describe(self.spec).shape_manifest
        vector = read_version(self.versions, self.digest, shape.digest).copy()
        vector += np.random.default_rng(5).normal(scale=0.5, size=vector.shape).astype(np.float32)
        return write_version(self.versions, shape.digest, vector)[0]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    encoder = small_encoder(folder / "encoder", WORDS)
    spec = RetrieverSpec(encoder=str(encoder), max_tokens=64, device="cpu")
    digest = learning_jobs.write_initial_version(spec, folder / "versions")
    learning_jobs.ingest(spec, folder / "library.sqlite3", DOCUMENTS, PAIRS, 20)
    index = learning_jobs.build_index(
        spec, folder / "library.sqlite3", folder / "versions", digest, folder / "index"
    )
    return Site(spec, folder, digest, index)


@pytest.fixture
def site(prepared: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A copy of the prepared site, in a worker with nothing open."""
    monkeypatch.setattr(answering, "_open", None)
    for name in ("library.sqlite3", "versions", "index"):
        source = prepared.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    copied = tmp_path / "index" / prepared.index.name
    return Site(prepared.spec, tmp_path, prepared.digest, copied)


@pytest.fixture
def opened(site: Site) -> Site:
    site.open()
    return site
