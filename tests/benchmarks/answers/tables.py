"""Questions for a cell of a table: is the row quoted that has it?

Of the tables in five companies' filings (the PDF samples of HANSE_DATA): for each row with a
name, "What was COMPANY's ROW in COLUMN?", of the first column with a number. Asked as a site
asks, of the default encoder before training. All is made from the tables, so it says how well a
row is found by its name, and nothing of questions that people would ask.

    python -m tests.benchmarks.answers.tables
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crypto.arrays import Float32
from daemon.answering.embedding import Sentence
from daemon.answering.extractive import ExtractiveGenerator
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import figures_of
from daemon.jobs import learning
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.box.boxes import Boxes
from daemon.library.contents import Passage
from daemon.library.dense.index import build_index
from daemon.library.files import found
from daemon.library.passages import header_of
from daemon.library.readers.documents import Document
from daemon.library.search import search
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from tests.benchmarks.bench_library import PASSAGE_TOKENS, SAMPLES

TOP_K = 5
_LETTERS = 9  # of a row's name, at least: fewer name nothing
_NUMBER, _WORD = re.compile(r"\d"), re.compile(r"\w")


@dataclass(frozen=True)
class Asked:
    """A question, and the row that answers it."""

    question: str
    row: str


def main() -> None:
    """Measure, and print a row."""
    if not SAMPLES.is_dir():
        sys.exit(f"the PDF samples are not at {SAMPLES}: name the data with HANSE_DATA")
    spec = RetrieverSpec(threads=2, device="cpu")
    with tempfile.TemporaryDirectory() as folder, Boxes() as boxes:
        read = [one for one in boxes.read(found(SAMPLES)) if isinstance(one, Document)]
        path = Path(folder) / "library.sqlite3"
        learning.ingest(spec, path, read, [], PASSAGE_TOKENS)
        with Library.open(path, read_only=True) as library:
            print(json.dumps(measured(library, retriever_for(spec))))


def measured(library: Library, retriever: Retriever) -> dict[str, object]:
    """Shares of the questions, with intervals of 95 %."""
    passages = {one.rowid: one for one in library.passages()}
    labels = np.array(sorted(passages), np.int64)
    texts = [passages[label].embedding_text for label in labels.tolist()]
    index = build_index(labels, retriever.embed_passages(texts))
    titles = Titles((one.rowid, one.document_id, one.title) for one in passages.values())

    def embedded(sentences: Sequence[Sentence]) -> Float32:
        return retriever.embed_passages([one.embedding_text for one in sentences])

    def asking(question: str) -> Float32:
        found: Float32 = retriever.embed_queries([question])[0]
        return found

    generator = ExtractiveGenerator(asking, embedded)
    asked = [one for passage in passages.values() for one in questions_of(passage)]
    in_reach, quoted = np.zeros(len(asked)), np.zeros(len(asked))
    for number, one in enumerate(asked):
        hits = search(library, index, titles, one.question, asking(one.question), TOP_K)
        in_reach[number] = any(one.row in hit.passage.text.splitlines() for hit in hits)
        answer = generator.generate(one.question, hits)
        quoted[number] = any(citation.text == one.row for citation in answer.citations)
    figures = figures_of(Judged({"found": in_reach, "quoted": quoted}))
    return {
        "benchmark": "answers from tables",
        "questions": len(asked),
        **{name: vars(figure) for name, figure in figures.items()},
    }


def questions_of(passage: Passage) -> Iterator[Asked]:
    """One for each row with a name and a number, if its table says what its columns are."""
    rows = passage.text.splitlines()
    header = passage.context.rpartition("\n")[2]
    if "\t" not in header:
        header = "".join(header_of(rows)[-1:])
    if passage.kind != "table" or not header:
        return
    company = passage.document_id.partition("_")[0].capitalize()
    for row in rows:
        name, *cells = row.split("\t")
        if row == header or sum(map(str.isalpha, name)) < _LETTERS:
            continue
        for column, cell in zip(header.split("\t")[1:], cells, strict=False):
            if _NUMBER.search(cell) and _WORD.search(column):
                yield Asked(f"What was {company}'s {name.strip()} in {column.strip()}?", row)
                break


if __name__ == "__main__":
    main()
