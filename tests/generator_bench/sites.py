"""Institutions as sites that train a generator: libraries of triples, and held-out questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daemon.jobs.pairs import triples_of
from daemon.learning.generator.triples import Triple
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from tests.generator_bench.sources import Answered, source_of

_PASSAGE_WORDS = 400  # longer than any passage here: none is cut in two


@dataclass(frozen=True)
class Size:
    """Of each site: triples to learn from, and held-out questions; fewer where there are fewer."""

    train: int = 24
    test: int = 10


@dataclass(frozen=True)
class Site:
    """What a site trains on, the held-out questions, and all its training documents' texts."""

    name: str
    library: Path
    tests: tuple[Triple, ...]
    texts: tuple[str, ...]


def sites_of(
    data: Path, names: Sequence[str], size: Size, seed: int, folder: Path, asked: str = "test"
) -> list[Site]:
    """``seed`` draws what is learned from; what is asked, of a split, is the same whatever it is.

    Sites are those of MedQuAD, and ``financebench``.
    """
    sites = []
    for name in names:
        source = source_of(data, name, asked)
        library = _library(folder / f"{name}.sqlite", _drawn(source.learned, size.train, seed))
        held_out = _library(folder / f"{name}.asked.sqlite", _drawn(source.asked, size.test, 0))
        with Library.open(held_out) as opened:
            tests = tuple(triples_of(RetrieverSpec(), opened))
        sites.append(Site(name, library, tests, source.texts))
    return sites


def pooled(sites: Sequence[Site], folder: Path) -> Path:
    """One library of all that the sites learn from."""
    path = folder / "pooled.sqlite"
    with Library.open(path) as into:
        for site in sites:
            with Library.open(site.library, read_only=True) as library:
                into.put_pairs([pair for _, pair in library.pairs_naming("", None, 0, 1 << 20)])
                documents = [
                    Document(one.document_id, one.title, one.text, "train")
                    for one in library.passages(split="train")
                ]
            into.put_documents(documents, splitter=_splitter())
    return path


def _drawn(answered: Sequence[Answered], count: int, seed: int) -> list[Answered]:
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(answered))
    return [answered[at] for at in order[:count].tolist()]


def _library(path: Path, answered: Sequence[Answered]) -> Path:
    documents = {one.id: one for some, _ in answered for one in some}
    with Library.open(path) as library:
        library.put_documents(list(documents.values()), splitter=_splitter())
        library.put_pairs([pair for _, pair in answered])
    return path


def _splitter() -> SentenceSplitter:
    return SentenceSplitter(lambda text: len(text.split()), _PASSAGE_WORDS)
