"""Sites of MedQuAD as the generator sees them: libraries of triples to learn, and held-out ones.

A question's answer is the first sentences of the text that MedQuAD answers it with, as many as
fit, and its passage the part of that text with them in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daemon.jobs.pairs import triples_of
from daemon.learning.generator.triples import Triple
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.passages import SentenceSplitter, sentences
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.library.store import Library

_ANSWER_WORDS = 30
_PASSAGE_WORDS = 400  # a passage of MedQuAD has 120 to 200: none is cut in two


@dataclass(frozen=True)
class Size:
    """Of each site: triples to learn from, and held-out questions."""

    train: int = 60
    test: int = 15


@dataclass(frozen=True)
class Site:
    """What a site trains on, the held-out questions, and all its training documents' texts."""

    name: str
    library: Path
    tests: tuple[Triple, ...]
    texts: tuple[str, ...]


def sites_of(data: Path, names: Sequence[str], size: Size, seed: int, folder: Path) -> list[Site]:
    """``seed`` draws what is learned from; what is asked is the same whatever it is."""
    return [_site(data / "medquad" / name, size, seed, folder) for name in names]


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


def _site(source: Path, size: Size, seed: int, folder: Path) -> Site:
    (documents,) = source.glob("documents.jsonl*")
    read = {row["id"]: row for row in _rows(documents)}
    learned = _chosen(source, "train", read, size.train, seed)
    asked = _chosen(source, "test", read, size.test, 0)
    library = _library(folder / f"{source.name}.sqlite", learned)
    with Library.open(_library(folder / f"{source.name}.asked.sqlite", asked)) as held_out:
        tests = tuple(triples_of(RetrieverSpec(), held_out))
    texts = tuple(row["text"] for row in read.values() if row["split"] == "train")
    return Site(source.name, library, tests, texts)


Answered = tuple[Document, Pair]


def _chosen(
    source: Path, split: str, documents: dict[str, dict[str, Any]], count: int, seed: int
) -> list[Answered]:
    """So many questions of a split that a short answer fits, with the text it begins."""
    rows = list(_rows(source / f"pairs_{split}.jsonl"))
    found: dict[str, Answered] = {}
    for at in np.random.Generator(np.random.Philox(key=seed)).permutation(len(rows)).tolist():
        row = rows[at]
        document = documents[row["doc_id"]]
        if document["split"] == split and (answer := _answer(document["text"])):
            # For the library of held-out questions, too, this is what is read.
            text = Document(row["doc_id"], document["title"], document["text"], "train")
            pair = Pair(row["query"].strip(), (row["doc_id"],), reference=Reference((answer,)))
            found.setdefault(row["doc_id"], (text, pair))
        if len(found) == count:
            break
    return list(found.values())


def _answer(text: str) -> str:
    answer = ""
    for sentence in sentences(text):
        longer = f"{answer} {sentence}".strip()
        if len(longer.split()) > _ANSWER_WORDS:
            break
        answer = longer
    return answer


def _library(path: Path, answered: Sequence[Answered]) -> Path:
    with Library.open(path) as library:
        library.put_documents([document for document, _ in answered], splitter=_splitter())
        library.put_pairs([pair for _, pair in answered])
    return path


def _splitter() -> SentenceSplitter:
    return SentenceSplitter(lambda text: len(text.split()), _PASSAGE_WORDS)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        yield json.loads(line)
