"""How good answers are before any training: of the demo's sites, and of real institutions.

Each question is asked as a site asks it, of the default encoder as it came. Prints a line of
JSON for each corpus: shares of the questions with intervals of 95 %.

demo     the 100 test questions of its three sites whose answers a reader marked (answers.jsonl).
         ``marked``: the answer has a sentence that was marked; ``enough``: one that answers alone.
         The rest are figures of `daemon.evaluation.answers` against the marked sentences, of
         questions that have one.
MedQuAD  the test questions of three institutes (HANSE_DATA), which say no right answer.
         ``first``: the first sentence of the answer comes from a right document.

    python -m tests.benchmarks.answers.quality [demo] [medquad]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from daemon.answering.answering import Answered
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import figures_of
from daemon.fedctl.demo.sites import BUNDLED
from daemon.jobs import answering, learning
from daemon.jobs.answers import GivenAnswer, score
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair, answer_of
from tests.benchmarks.answers.test_marked import ANSWERS
from tests.benchmarks.answers.test_marked import read as rows_of
from tests.benchmarks.bench_library import DATA, PASSAGE_TOKENS
from tests.daemon.library.unboxed import read

Kind = TypeVar("Kind", Document, Pair)

TOP_K = 8  # as the settings have it
INSTITUTES = ("nhlbi", "niddk", "ninds")
DEMO = ("ostrey", "tarrow", "vellham")


@dataclass(frozen=True)
class Marked:
    """A question and what a reader marked in a right document."""

    query: str
    document: str
    sentences: tuple[str, ...]
    enough: bool


def main() -> None:
    """Measure, and print a row for each corpus that is wanted."""
    parser = argparse.ArgumentParser(prog="quality", description=__doc__)
    parser.add_argument("corpora", nargs="*", help="demo, medquad; both if none is named")
    wanted = parser.parse_args().corpora or ["demo", "medquad"]
    spec = RetrieverSpec(threads=os.cpu_count() or 1, device="cpu")
    if "demo" in wanted:
        print(json.dumps(measured_demo(spec)), flush=True)
    if "medquad" in wanted:
        if not (DATA / "medquad").is_dir():
            sys.exit(f"skipped: no data at {DATA / 'medquad'}: name it with HANSE_DATA")
        print(json.dumps(measured_institutes(spec, DATA / "medquad")), flush=True)


def measured_demo(spec: RetrieverSpec) -> dict[str, Any]:
    """Answers to the demo's marked questions."""
    rows: list[dict[str, float]] = []
    texts: list[dict[str, float]] = []
    for site in DEMO:
        marked = [_marked(row) for row in rows_of(ANSWERS) if row["site"] == site]
        pairs = {p.query: p for p in _items(BUNDLED / site, Pair) if p.split == "test"}
        answers = _asked(spec, _items(BUNDLED / site, Document), [one.query for one in marked])
        for one, answered in zip(marked, answers, strict=True):
            quoted = " ".join(" ".join(c.text.split()) for c in answered.citations)
            holds = any(" ".join(sentence.split()) in quoted for sentence in one.sentences)
            rows.append({"marked": holds, "enough": holds and one.enough})
            if one.sentences:
                cited = tuple((c.number, c.document_id) for c in answered.citations)
                right = pairs[one.query].positives
                texts.append(score(GivenAnswer(answered.text, cited, right, one.sentences)).figures)
    return {
        "benchmark": "answers",
        "corpus": "demo",
        "questions": len(rows),
        **_figures(rows),
        "compared": len(texts),
        **_figures(texts),
    }


def measured_institutes(spec: RetrieverSpec, root: Path) -> dict[str, Any]:
    """Answers to test questions of institutes, whose documents say which are right."""
    rows: list[dict[str, float]] = []
    for site in INSTITUTES:
        pairs = [pair for pair in _items(root / site, Pair) if pair.split == "test"]
        documents = _items(root / site, Document)
        answers = _asked(spec, documents, [pair.query for pair in pairs])
        for pair, answered in zip(pairs, answers, strict=True):
            right = {*map(answer_of, pair.positives)}
            first = answered.citations[:1]
            rows.append({"first": bool(first) and answer_of(first[0].document_id) in right})
    return {
        "benchmark": "answers",
        "corpus": f"MedQuAD: {', '.join(INSTITUTES)}",
        "questions": len(rows),
        **_figures(rows),
    }


def _asked(
    spec: RetrieverSpec, documents: Sequence[Document], questions: Iterable[str]
) -> Iterator[Answered]:
    """What a site with these documents answers."""
    with tempfile.TemporaryDirectory(prefix="hanse-answers-") as folder:
        library, versions = Path(folder) / "library.sqlite3", Path(folder) / "versions"
        learning.ingest(spec, library, documents, [], PASSAGE_TOKENS)
        learning.embed_passages(spec, library)
        digest = learning.write_initial_version(spec, versions)
        index = learning.build_index(spec, library, versions, digest, Path(folder) / "index")
        answering.open_version(spec, library, versions, digest, index)
        for question in questions:
            yield answering.ask(question, TOP_K)


def _items(folder: Path, kind: type[Kind]) -> list[Kind]:
    return [item for item in read(folder) if isinstance(item, kind)]


def _marked(row: dict[str, Any]) -> Marked:
    return Marked(row["query"], row["document"], tuple(row["sentences"]), row["enough"])


def _figures(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    return {name: vars(figure) for name, figure in figures_of(Judged(columns)).items()}


if __name__ == "__main__":
    main()
