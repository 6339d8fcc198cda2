"""Real questions about real documents: institutions of MedQuAD, and FinanceBench's filings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.library.readers.documents import Document, Pair
from tests.daemon.library.unboxed import read

SITES = ("cancergov", "gard", "ghr", "mplus_topics", "nhlbi", "niddk", "ninds")


@dataclass(frozen=True)
class Corpus:
    """Documents, and questions by which weights are chosen and judged.

    ``kinds``: of each question that judges, what it is of; empty where nothing is said.
    ``learned_from``: pairs to train on, where there are any.
    """

    name: str
    documents: Sequence[Document]
    chosen_on: Sequence[Pair]
    judged_on: Sequence[Pair]
    kinds: Sequence[Sequence[str]] = ()
    learned_from: Sequence[Pair] = ()


def filings(data: Path) -> Corpus:
    """FinanceBench's development corpus, a document a page, titled by its filing."""
    root = data / "financebench"
    known = _lines(root / "docs.jsonl")
    inside = {row["doc"] for row in known if row["in_eval_corpus"]}
    asked = list(_lines(root / "eval" / "questions.jsonl"))
    files = [root / "eval" / "pages.jsonl.gz", *sorted(root.glob("clients/*/pages.jsonl.gz"))]
    documents = [
        Document(_page(row["id"]), row["doc"], row["text"])
        for file in files
        for row in _lines(file)
        if row["text"].strip() and row["doc"] in inside
    ]
    pairs = [Pair(row["query"], tuple(map(_page, row["positives"])), "test") for row in asked]
    companies = sorted({_company(pair) for pair in pairs})
    first = [companies.index(_company(pair)) % 2 == 0 for pair in pairs]
    return Corpus(
        f"FinanceBench, {len(documents)} pages",
        documents,
        [pair for pair, here in zip(pairs, first, strict=True) if here],
        [pair for pair, here in zip(pairs, first, strict=True) if not here],
        [
            [kind for kind in (row["question_type"], row["reasoning"]) if kind]
            for row, here in zip(asked, first, strict=True)
            if not here
        ],
    )


def institution(data: Path, site: str) -> Corpus:
    """One of MedQuAD's."""
    items = list(read(data / "medquad" / site))
    documents = [item for item in items if isinstance(item, Document)]
    pairs = [item for item in items if isinstance(item, Pair)]
    test = [p for row in _lines(data / "medquad" / site / "pairs_test.jsonl") for p in [_pair(row)]]
    learned, chosen = ([p for p in pairs if p.split == split] for split in ("train", "valid"))
    return Corpus(site, documents, chosen, test, learned_from=learned)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        yield json.loads(line)


def _pair(row: dict[str, Any]) -> Pair:
    return Pair(row["query"], tuple(row["positives"]), "test")


def _page(name: str) -> str:
    """``DOC#12`` as ``DOC/page12``: a page is an answer, not a part of one."""
    return name.replace("#", "/page")


def _company(pair: Pair) -> str:
    return pair.positives[0].partition("_")[0].casefold()
