"""What passages are found by: levels, headings and titles, on real questions.

    python -m tests.benchmarks.retrieval --data DATA [--cache FOLDER] [--only nhlbi finance]
    python -m tests.benchmarks.retrieval --data DATA --trained

Seven institutions of MedQuAD, each in its own documents, and FinanceBench's whole
development corpus, encoder as it comes. Weights are chosen as a site chooses them, on
validation questions (of FinanceBench: those of every other company), and others judge.
Writes docs/results/retrieval.jsonl, a line a corpus, and from it retrieval.md.

What is embedded is kept in the cache, so that it can be interrupted and taken up again;
all of it takes about an hour of two cores. What PDD-AS2 makes of the institutions'
encoder is measured apart (--trained), and beside what is there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from config.kinds import RetrievalLevel
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import Interval, figures_of
from daemon.evaluation.rankings import Questions, Retrieved, found_by, judged_rankings, weigh
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Pair
from daemon.library.search import RankingWeights
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from tests.benchmarks.retrieval.corpora import SITES, Corpus, filings, institution
from tests.benchmarks.retrieval.embedding import READ, Embedding, library_of
from tests.benchmarks.retrieval.gold_sentences import Gold, gold_of, measured_by_sentences
from tests.benchmarks.retrieval.page import page
from tests.benchmarks.retrieval.trained import measured_trained

RESULTS = Path(__file__).parents[3] / "docs" / "results"
FINANCE = "finance"
LEVELS: tuple[RetrievalLevel, ...] = ("passage", "sentence", "both")
_METRICS = ("mrr@10", "hit@1", "hit@10")


def measured(
    corpus: Corpus, spec: RetrieverSpec, cache: Path, gold: Sequence[Gold]
) -> dict[str, Any]:
    """Figures of a corpus: by what is read and compared, and what of it is chosen."""
    path = library_of(corpus, spec, cache)
    encoder = retriever_for(spec).encoder
    rows = []
    best: dict[tuple[str, RetrievalLevel], Judged] = {}
    by_sentence: dict[str, Any] = {}
    with Library.open(path, read_only=True) as library:
        titles = Titles(library.titles())
        for read in READ:
            embedding = Embedding(encoder, library, read, cache)
            for level in LEVELS:
                asked = _Asked(library, titles, embedding, level)
                chosen = asked.found(corpus.chosen_on)
                weights = weigh(library, corpus.chosen_on, chosen.met)
                on = asked.judged(corpus.chosen_on, chosen, weights).mean("mrr@10")
                judged = asked.found(corpus.judged_on)
                untitled = replace(weights, title=0.0)
                row = {
                    "read": read.name,
                    "level": level,
                    "title": weights.title,
                    "words": weights.words,
                    "chosen_on": on,
                    **_figures(asked.judged(corpus.judged_on, judged, weights)),
                    "untitled": asked.judged(corpus.judged_on, judged, untitled).mean("mrr@10"),
                    "meaning": _meaning(asked, corpus, judged),
                }
                rows.append(row)
                best[read.name, level] = asked.judged(corpus.judged_on, judged, weights)
                print(json.dumps(row), flush=True)
            if gold:
                by_sentence[read.name] = measured_by_sentences(
                    *(gold, library, embedding.passages),
                    embedding.sentences(embedding.passages.values()),
                    *(embedding.encode, embedding.index),
                )
    return {
        "corpus": corpus.name,
        "passages": len(embedding.passages),
        "questions": [len(corpus.chosen_on), len(corpus.judged_on)],
        "rows": rows,
        "kinds": _by_kind(corpus, best),
        "gold": by_sentence,
    }


@dataclass(frozen=True)
class _Asked:
    library: Library
    titles: Titles
    embedding: Embedding
    level: RetrievalLevel

    def found(self, pairs: Sequence[Pair]) -> Retrieved:
        vectors = self.embedding.encode([pair.query for pair in pairs])
        return found_by(
            *(self.library, self.embedding.index, self.titles, pairs, vectors),
            self.embedding.at(self.level),
        )

    def judged(self, pairs: Sequence[Pair], found: Retrieved, weights: RankingWeights) -> Judged:
        return judged_rankings(self.library, pairs, Questions(found, None, weights))["fused"]


def _meaning(asked: _Asked, corpus: Corpus, found: Retrieved) -> float:
    """MRR@10 by meaning alone: no words, no titles."""
    return asked.judged(corpus.judged_on, found, RankingWeights(0.0, 0.0)).mean("mrr@10")


def _by_kind(
    corpus: Corpus, best: dict[tuple[str, RetrievalLevel], Judged]
) -> dict[str, dict[str, Any]]:
    """MRR@10 by kinds of questions, read with headings."""
    names = sorted({kind for kinds in corpus.kinds for kind in kinds})
    table = {}
    for name in names:
        rows = [row for row, kinds in enumerate(corpus.kinds) if name in kinds]
        means: dict[str, float] = {
            level: float(best["with headings", level].scores["mrr@10"][rows].mean())
            for level in LEVELS
        }
        table[name] = {"questions": len(rows), **means}
    return table


def _figures(judged: Judged) -> dict[str, list[float]]:
    def triple(one: Interval) -> list[float]:
        return [round(value, 4) for value in (one.mean, one.low, one.high)]

    figures = figures_of(judged)
    return {name: triple(figures[name]) for name in _METRICS}


def corpora(data: Path, only: Iterable[str]) -> Iterator[tuple[str, Corpus]]:
    """Those of that name, or all."""
    wanted = set(only) or {*SITES, FINANCE}
    for site in SITES:
        if site in wanted:
            yield site, institution(data, site)
    if FINANCE in wanted:
        yield FINANCE, filings(data)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="What passages are found by.")
    parser.add_argument("--data", type=Path, default=os.environ.get("HANSE_DATA"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hanse-retrieval")
    parser.add_argument("--only", nargs="*", default=(), help=f"of {', '.join(SITES)}, {FINANCE}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", action="store_true", help="only what PDD-AS2 has trained")
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    asked = parser.parse_args()
    kept = RESULTS / "retrieval.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    newest = {line["name"]: line for line in map(json.loads, lines)}
    if not asked.page:
        if asked.data is None:
            parser.error("name the data: --data or HANSE_DATA")
        spec = RetrieverSpec(threads=asked.threads, device="cpu")
        for name, line in _lines(asked, spec):
            newest[name] = {**newest.get(name, {}), "name": name, **line}
            kept.write_text("".join(json.dumps(line) + "\n" for line in newest.values()))
    (RESULTS / "retrieval.md").write_text(page(list(newest.values())), encoding="utf-8")


def _lines(asked: argparse.Namespace, spec: RetrieverSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured of each corpus, by its name."""
    if asked.trained:
        yield from measured_trained(asked.data, spec, asked.cache, asked.only)
        return
    for name, corpus in corpora(asked.data, asked.only):
        yield name, measured(corpus, spec, asked.cache / name, gold_of(name, corpus))


if __name__ == "__main__":
    main()
