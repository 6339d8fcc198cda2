"""Is what the documents do not answer refused, and what they answer not?

At each of seven institutions of MedQuAD, with what the recipe `hanse` made of the encoder in
twelve rounds among them, or with the encoder as it comes: its own test questions, and those of
the others that no institution but their own answers. What is too little is found on its
validation questions, as a site finds it. At the demo's sites, which have none, by general
questions: their test questions, and those that their documents do not answer
(``unanswerable.jsonl``), as they were left.

    python -m tests.benchmarks.answers.abstention --data DATA --cache FOLDER
        [--as-it-comes] [--demo FOLDER]

``--cache``: that of `tests.benchmarks.retrieval`, made where it is not; ``--demo``: what
`fedctl demo --work FOLDER --keep` left.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config.loading import load
from crypto.arrays import Float32, Float64
from daemon.answering.abstention import (
    Abstention,
    by_pairs,
    evidence_among,
    evidence_of,
    evidence_without_answers,
)
from daemon.answering.general_questions import GENERAL_QUESTIONS
from daemon.answering.options import AnsweringOptions
from daemon.evaluation.abstention import auroc
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import figures_of
from daemon.evaluation.rankings import found_by, weigh
from daemon.fedctl.demo.sites import BUNDLED
from daemon.jobs import answering
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.dense.index import DenseIndex, build_index
from daemon.library.readers.documents import Pair
from daemon.library.search import Candidates
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from daemon.personal.store import embedded_by
from daemon.state.folder import StateFolder
from daemon.wiring import retriever_spec
from tests.benchmarks.retrieval.corpora import SITES, institution
from tests.benchmarks.retrieval.embedding import LIBRARY, READ, Embedding, library_of
from tests.benchmarks.retrieval.trained import learned_by, loaded
from tests.learning_bench.recipes.named import Named
from tests.learning_bench.worlds import Question, Test

LOST = AnsweringOptions().lost_answers
_OF_OTHERS = 500  # questions of other institutions, at each
_TOP_K = 8
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """The evidence [n] of questions that a site's documents answer, and [m] of others."""

    site: str
    answered: Float64
    unanswered: Float64
    by: Abstention

    def row(self) -> dict[str, Any]:
        """Figures, with intervals of 95 % where they are means."""
        refused = (self.unanswered < self.by.threshold).astype(np.float64)
        lost = (self.answered < self.by.threshold).astype(np.float64)
        [of_refused] = figures_of(Judged({"refused": refused})).values()
        [of_lost] = figures_of(Judged({"lost": lost})).values()
        return {
            "site": self.site,
            "questions": [len(self.answered), len(self.unanswered)],
            "auroc": round(auroc(self.answered, self.unanswered), 4),
            "refused": [round(one, 3) for one in vars(of_refused).values()],
            "lost": [round(one, 3) for one in vars(of_lost).values()],
            "chosen_on": self.by.questions,
        }


@dataclass(frozen=True)
class Searched:
    """An institution's library by one version: its index, and how questions are embedded."""

    site: str
    library: Path
    index: DenseIndex
    encode: Callable[[Sequence[str]], Float32]


def main() -> None:
    """Measure, and print a row a site."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--as-it-comes", action="store_true", help="the encoder, not trained")
    parser.add_argument("--demo", type=Path)
    said = parser.parse_args()
    searched = as_it_comes if said.as_it_comes else trained
    for one in searched(said.data, said.cache):
        print(json.dumps(institution_by(one, said.data).row()), flush=True)
    if said.demo is not None:
        for kind, outcome in demo(said.demo.absolute()):
            print(json.dumps({"kind": kind, **outcome.row()}), flush=True)


def as_it_comes(data: Path, cache: Path) -> Iterator[Searched]:
    """Each institution with the encoder before any training."""
    spec = RetrieverSpec(threads=2, device="cpu")
    encoder = retriever_for(spec).encoder
    for site in SITES:
        path = library_of(institution(data, site), spec, cache / site)
        with Library.open(path, read_only=True) as library:
            embedding = Embedding(encoder, library, READ[0], cache / site)
            yield Searched(site, path, embedding.index, embedding.encode)


def trained(data: Path, cache: Path) -> Iterator[Searched]:
    """Each institution with what it answers with after rounds among all, its own part included."""
    spec = RetrieverSpec(threads=2, device="cpu")
    corpora = {site: institution(data, site) for site in SITES}
    asked = Question("cancergov", "", frozenset())  # by whom it is asked makes it learn its own
    outcome = learned_by(Named("hanse"), Test((asked,)), corpora, spec, cache)
    for site in SITES:
        retriever = loaded(outcome.ranker(site))
        with Library.open(cache / site / LIBRARY, read_only=True) as library:
            labels, features = library.features(retriever.encoder.digest)

        def encode(queries: Sequence[str], retriever: Retriever = retriever) -> Float32:
            return retriever.embed_queries(queries, retriever.encoder.encode(queries))

        index = build_index(labels, retriever.embed_passages((), features))
        yield Searched(site, cache / site / LIBRARY, index, encode)


def institution_by(searched: Searched, data: Path) -> Outcome:
    """What it refuses of its own questions and of the others'."""
    corpus = institution(data, searched.site)
    with Library.open(searched.library, read_only=True) as library:
        titles = Titles(library.titles())

        def met(pairs: Sequence[Pair]) -> list[Candidates]:
            vectors = searched.encode([pair.query for pair in pairs])
            return found_by(library, searched.index, titles, pairs, vectors).met

        chosen = met(corpus.chosen_on)
        weights = weigh(library, corpus.chosen_on, chosen)
        without = evidence_without_answers(chosen, corpus.chosen_on, weights, library.document_of())
        return Outcome(
            searched.site,
            evidence_among(met(corpus.judged_on), weights),
            evidence_among(met(_of_others(data, searched.site)), weights),
            by_pairs(
                evidence_among(chosen, weights),
                without,
                evidence_among(met(_asking(GENERAL_QUESTIONS)), weights),
                LOST,
            ),
        )


def demo(folder: Path) -> Iterator[tuple[str, Outcome]]:
    """The demo's sites as they were left, by kinds of what they do not answer."""
    rows = [json.loads(line) for line in (HERE / "unanswerable.jsonl").read_text().splitlines()]
    for site in sorted({row["site"] for row in rows}):
        _open(folder / site, site)
        version = answering.opened_version()

        def found(queries: Sequence[str]) -> Float64:
            opened = answering.opened_version()
            return np.array([evidence_of(opened.search(one, _TOP_K)[0]) for one in queries])

        test = (BUNDLED / site / "pairs_test.jsonl").read_text().splitlines()
        answered = found([json.loads(line)["query"] for line in test])
        for kind in ("own_subject", "other_subject"):
            asked = [row["query"] for row in rows if (row["site"], row["kind"]) == (site, kind)]
            yield kind, Outcome(site, answered, found(asked), version.abstention)


def _open(site_folder: Path, site: str) -> None:
    os.chdir(site_folder)  # its settings name what lies beside them
    spec = retriever_spec(load(site_folder / "fedd.toml"), site)
    state = StateFolder(site_folder / "state")
    [index] = state.index.iterdir()
    versions = [bytes.fromhex(path.stem) for path in state.versions.iterdir()]
    [digest] = [
        one
        for one in versions
        if index.name.startswith(embedded_by(spec.personal, spec.personal_folder, one).hex())
    ]
    answering.open_version(spec, state.library, state.versions, digest, index, state.sentences)


def _asking(queries: Sequence[str]) -> list[Pair]:
    return [Pair(query, (), "test") for query in queries]


def _of_others(data: Path, site: str) -> list[Pair]:
    """Questions of other institutions, without those that another one answers, too."""
    asked = []
    for other in SITES:
        if other != site:
            lines = (data / "medquad" / other / "pairs_test.jsonl").read_text().splitlines()
            asked += [json.loads(line) for line in lines]
    queries = [row["query"] for row in asked if not row.get("other_site_positives")]
    chance = np.random.Generator(np.random.Philox(key=0))
    return _asking([queries[row] for row in chance.permutation(len(queries))[:_OF_OTHERS]])


if __name__ == "__main__":
    main()
