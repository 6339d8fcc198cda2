"""The benchmark's institutions as their data has them: what may be read, learned and asked.

Of MedQuAD a question's answer is the first sentences of the text that answers it, as many as
fit, and its passage the part of that text with them in it. Of FinanceBench the answer is the
annotators', and the passages are cut out of the pages that they name: of each page the window
with most of what question and answer say. Companies are held out whole, with all their filings.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daemon.answering.statements.support import Wording
from daemon.library.passages import SentenceSplitter, sentences
from daemon.library.readers.documents import Document, Pair, Reference

FINANCE = "financebench"
_ANSWER_WORDS = 30
_WINDOW_WORDS = 60  # of a page: beside a prompt and a long question there is no room for more
_PAGES = 300  # of the filings that may be read: as much text as one of MedQuAD's sites has
_ASKED = 20  # questions of FinanceBench at least, of companies that are held out

Answered = tuple[tuple[Document, ...], Pair]
"""A question with its answer, and the passages that it names."""


@dataclass(frozen=True)
class Source:
    """One institution: ``texts`` that may be read, a title above each, and questions by split."""

    name: str
    texts: tuple[str, ...]
    learned: tuple[Answered, ...]
    asked: tuple[Answered, ...]


def source_of(data: Path, name: str, asked: str = "test") -> Source:
    """Of the folder with all data; ``asked``: the split that is held out, of MedQuAD's sites."""
    if name == FINANCE:
        return _financebench(data / FINANCE)
    folder = data / "medquad" / name
    (documents,) = folder.glob("documents.jsonl*")
    read = {row["id"]: row for row in _rows(documents)}
    texts = tuple(f"{row['title']}\n{row['text']}" for row in read.values() if _open(row))
    learned, held_out = (_answered(folder, split, read) for split in ("train", asked))
    return Source(name, texts, learned, held_out)


def _open(row: dict[str, Any]) -> bool:
    return bool(row["split"] == "train")


def _answered(folder: Path, split: str, read: dict[str, dict[str, Any]]) -> tuple[Answered, ...]:
    """The questions of a split that a short answer fits, one a text."""
    found: dict[str, Answered] = {}
    for row in _rows(folder / f"pairs_{split}.jsonl"):
        name, document = row["doc_id"], read[row["doc_id"]]
        if document["split"] == split and (answer := _first_sentences(document["text"])):
            pair = Pair(row["query"].strip(), (name,), reference=Reference((answer,)))
            text = _document(name, document["title"], document["text"])
            found.setdefault(name, ((text,), pair))
    return tuple(found.values())


def _first_sentences(text: str) -> str:
    answer = ""
    for sentence in sentences(text):
        longer = f"{answer} {sentence}".strip()
        if len(longer.split()) > _ANSWER_WORDS:
            break
        answer = longer
    return answer


def _financebench(folder: Path) -> Source:
    """Every fourth company or so is held out: so many that `_ASKED` questions are about them."""
    questions = list(_rows(folder / "eval" / "questions.jsonl"))
    chance = np.random.Generator(np.random.Philox(key=0))
    companies = sorted({row["company"] for row in questions})
    held_out: set[str] = set()
    for at in chance.permutation(len(companies)).tolist():
        if sum(row["company"] in held_out for row in questions) >= _ASKED:
            break
        held_out.add(companies[at])
    named = {row["doc"]: row["company"] for row in _rows(folder / "docs.jsonl")}
    files = [folder / "eval" / "pages.jsonl.gz", *sorted(folder.glob("clients/*/pages.jsonl.gz"))]
    pages = {row["id"]: row for path in files for row in _rows(path)}
    asked_of = {row["doc"] for row in questions if row["company"] in held_out}
    taken = [
        page
        for page in pages.values()
        if named.get(page["doc"]) not in held_out and page["doc"] not in asked_of
    ]
    chosen = sorted(chance.permutation(len(taken))[:_PAGES].tolist())
    texts = [f"{one.title}\n{one.text}" for at in chosen for one in _windows(taken[at])]
    answered = [(row["company"] in held_out, _evidence(row, pages)) for row in questions]
    return Source(
        FINANCE,
        tuple(texts),
        tuple(one for held, one in answered if not held),
        tuple(one for held, one in answered if held),
    )


def _evidence(row: dict[str, Any], pages: dict[str, dict[str, Any]]) -> Answered:
    said = Wording.of(f"{row['query']} {row['answer']}").stems
    best = tuple(
        max(_windows(pages[name]), key=lambda one: len(said & Wording.of(one.text).stems))
        for name in row["positives"]
    )
    names = tuple(one.id for one in best)
    return best, Pair(row["query"].strip(), names, reference=Reference((str(row["answer"]),)))


def _windows(page: dict[str, Any]) -> list[Document]:
    """A page in parts that a prompt has room for, each a document of its own."""
    title = page["doc"].replace("_", " ")
    pieces = SentenceSplitter(lambda text: len(text.split()), _WINDOW_WORDS)(
        _document(page["id"], title, page["text"])
    )
    return [_document(f"{page['id']}/{n}", title, one.text) for n, one in enumerate(pieces)]


def _document(name: str, title: str, text: str) -> Document:
    """To be learned from: in the library of held-out questions, too, this is what is read."""
    return Document(name, title, text, "train")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        yield json.loads(line)
