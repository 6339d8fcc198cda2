"""What titles bring to search: MRR@10 over their weight, encoder as it comes, words as usual.

FinanceBench's filings, each by its gold pages and ``--pages`` others drawn at random, asked
its 65 development questions; the questions of every other company choose the weight and
the rest judge it. And institutions of MedQuAD, whose own validation questions choose.

    python -m tests.benchmarks.titles --data DATA [--cache FOLDER] [--pages 24]

Embedding takes some minutes the first time; what is embedded is kept in the cache.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crypto.arrays import Float32
from daemon.evaluation.rankings import Questions, Retrieved, found_by, judged_rankings, weigh
from daemon.jobs import learning
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.index import build_index
from daemon.library.readers.documents import Document, Pair
from daemon.library.search import TITLE_WEIGHTS, USUAL_WEIGHTS, RankingWeights
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import retriever_for
from tests.daemon.library.unboxed import read

SITES = ("mplus_topics", "cancergov")
SEED = 7
_METRICS = ("mrr@10", "hit@1", "hit@10")


@dataclass(frozen=True)
class Corpus:
    """Documents, and questions by which the weight is chosen and judged."""

    name: str
    documents: Sequence[Document]
    chosen_on: Sequence[Pair]
    judged_on: Sequence[Pair]


def filings(data: Path, pages: int) -> Corpus:
    """FinanceBench by gold pages and so many others of each filing."""
    root = data / "financebench"
    known = _lines(root / "docs.jsonl")
    inside = {row["doc"] for row in known if row["in_eval_corpus"]}
    asked = list(_lines(root / "eval" / "questions.jsonl"))
    gold = {page for row in asked for page in row["positives"]}
    files = [root / "eval" / "pages.jsonl.gz", *sorted(root.glob("clients/*/pages.jsonl.gz"))]
    by_filing: dict[str, dict[str, str]] = {}
    for row in (row for path in files for row in _lines(path)):
        if row["text"].strip() and row["doc"] in inside:
            by_filing.setdefault(row["doc"], {})[row["id"]] = row["text"]
    chance = np.random.Generator(np.random.Philox(key=SEED))
    documents = []
    for filing, texts in sorted(by_filing.items()):
        others = sorted(texts.keys() - gold)
        drawn = chance.permutation(len(others))[:pages].tolist()
        for page in [*sorted(texts.keys() & gold), *(others[row] for row in drawn)]:
            documents.append(Document(_page(page), filing, texts[page]))
    pairs = [Pair(row["query"], tuple(map(_page, row["positives"])), "test") for row in asked]
    companies = sorted({_company(pair) for pair in pairs})
    halves: dict[bool, list[Pair]] = {True: [], False: []}
    for pair in pairs:
        halves[companies.index(_company(pair)) % 2 == 0].append(pair)
    return Corpus(f"FinanceBench, {len(documents)} pages", documents, halves[True], halves[False])


def institution(data: Path, site: str) -> Corpus:
    """One of MedQuAD's."""
    items = list(read(data / "medquad" / site))
    documents = [item for item in items if isinstance(item, Document)]
    pairs = [item for item in items if isinstance(item, Pair)]
    test = [p for row in _lines(data / "medquad" / site / "pairs_test.jsonl") for p in [_pair(row)]]
    return Corpus(site, documents, [p for p in pairs if p.split == "valid"], test)


def measured(corpus: Corpus, cache: Path, spec: RetrieverSpec) -> list[str]:
    """Lines of a table: the corpus by the weight of titles."""
    path = cache / f"{corpus.name.split(',')[0]}.sqlite3"
    learning.ingest(spec, path, corpus.documents, [], passage_tokens=220)
    encoder = retriever_for(spec).encoder
    learning.embed_passages(spec, path)
    with Library.open(path, read_only=True) as library:
        labels, vectors = library.features(encoder.digest)
        index, titles = build_index(labels, vectors), Titles(library.titles())

        def found(pairs: Sequence[Pair]) -> Retrieved:
            return found_by(library, index, titles, pairs, _embedded(encoder, pairs))

        met = found(corpus.chosen_on)
        chosen = weigh(library, corpus.chosen_on, met.met)
        rows = [
            (corpus.chosen_on, met, "chosen on"),
            (corpus.judged_on, found(corpus.judged_on), "judged on"),
        ]
        return [
            f"| {corpus.name}, {len(labels)} passages: {what} {len(pairs)} | "
            + " | ".join(_figures(library, pairs, one, chosen))
            + " |"
            for pairs, one, what in rows
        ]


def _figures(
    library: Library, pairs: Sequence[Pair], found: Retrieved, chosen: RankingWeights
) -> Iterator[str]:
    def judged(weights: RankingWeights) -> Callable[[str], float]:
        return judged_rankings(library, pairs, Questions(found, None, weights))["fused"].mean

    for title in TITLE_WEIGHTS:
        yield f"{judged(replace(USUAL_WEIGHTS, title=title))('mrr@10'):.3f}"
    without, best = judged(replace(chosen, title=0.0)), judged(chosen)
    yield f"title {chosen.title:g}, words {chosen.words:g}"
    yield ", ".join(f"{name} {without(name):.3f} to {best(name):.3f}" for name in _METRICS)


def _embedded(encoder: Encoder, pairs: Sequence[Pair]) -> Float32:
    return encoder.encode([pair.query for pair in pairs])


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


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description="What titles bring to search.")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hanse" / "titles")
    parser.add_argument("--pages", type=int, default=24, help="of a filing, besides gold ones")
    parser.add_argument("--sites", nargs="*", default=SITES, help="institutions of MedQuAD")
    asked = parser.parse_args()
    asked.cache.mkdir(parents=True, exist_ok=True)
    spec = RetrieverSpec(threads=1, device="cpu")
    heads = [f"title {weight:g}" for weight in TITLE_WEIGHTS]
    print("| questions | " + " | ".join([*heads, "chosen", "from no titles to chosen"]) + " |")
    print("|---" * (len(heads) + 3) + "|")
    for site in asked.sites:
        print("\n".join(measured(institution(asked.data, site), asked.cache, spec)), flush=True)
    print("\n".join(measured(filings(asked.data, asked.pages), asked.cache, spec)), flush=True)


if __name__ == "__main__":
    main()
