"""PDD-AS2's trained rows: what seven institutions learn together, judged by marked sentences.

They train the recipe's head on their own pairs, as in `tests.learning_bench`, in the very
libraries that are searched; then each fits a query encoder of its own. The encoder below
the head is frozen: what is trained embeds the features that are kept already. Marked
questions are the tests', and neither learned from nor chosen by.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crypto.arrays import Float32
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.dense.index import build_index
from daemon.library.store import Library
from daemon.personal.serving import retriever_for
from daemon.personal.tuning import PersonalQueryRetriever
from tests.benchmarks.retrieval.corpora import SITES, Corpus, institution
from tests.benchmarks.retrieval.embedding import LIBRARY, READ, Embedding, library_of
from tests.benchmarks.retrieval.gold_sentences import Gold, gold_of, measured_by_sentences
from tests.learning_bench.corpora import Dense, Ranker
from tests.learning_bench.recipes.learning import Part
from tests.learning_bench.recipes.named import Named
from tests.learning_bench.recipes.recipes import Outcome, Recipe
from tests.learning_bench.worlds import Question, Test, World

RECIPE = Named("pdd-as2")
STAGES = ("stage 1", "both stages")


@dataclass(frozen=True, eq=False)
class _Searched(World):
    """The institutions with the libraries that they are searched in."""

    def library(self, site: str) -> Path:
        """See `World`."""
        return self.folder.parent / site / LIBRARY


def measured_trained(
    data: Path, spec: RetrieverSpec, cache: Path, only: Iterable[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ranks of each institution's marked questions: by stage, by what is read."""
    corpora = {site: institution(data, site) for site in SITES}
    gold = {site: gold_of(site, corpus) for site, corpus in corpora.items()}
    asked = [
        Question(site, one.query, frozenset(document for document, _ in one.marks))
        for site in SITES
        for one in gold[site]
    ]
    outcome = learned_by(RECIPE, Test(tuple(asked)), corpora, spec, cache)
    wanted = set(only) or {*SITES}
    for site in (site for site in SITES if site in wanted):
        _told(f"asking {site}")
        rankers = (outcome.anywhere, outcome.ranker(site))
        by_stage = dict(zip(STAGES, rankers, strict=True))
        yield site, {"trained": _judged(by_stage, spec, cache / site, gold[site])}


def learned_by(
    recipe: Recipe, test: Test, corpora: Mapping[str, Corpus], spec: RetrieverSpec, cache: Path
) -> Outcome:
    """What these institutions search with after the recipe's rounds among them.

    ``cache``: with a folder for each institution's library; ``test``: what they are asked.
    """
    content = hashlib.sha256()
    for site, corpus in corpora.items():
        content.update(_made_ready(corpus, spec, cache / site))
    world = _Searched(
        "marked", content.hexdigest()[:16], cache / "trained", tuple(corpora), {"marked": test}
    )
    with tempfile.TemporaryDirectory(prefix="hanse-retrieval-") as scratch:
        return recipe.learn(world, Part(world.sites), spec, Path(scratch), _told)


def _made_ready(corpus: Corpus, spec: RetrieverSpec, cache: Path) -> bytes:
    """Put into the library what is learned from, and say what is there."""
    pairs = [*corpus.learned_from, *corpus.chosen_on]
    encoder = retriever_for(spec).encoder
    with Library.open(library_of(corpus, spec, cache)) as library:
        library.put_pairs(pairs)
        labels, vectors = Embedding(encoder, library, READ[0], cache).vectors
        library.put_features(encoder.digest, labels.tolist(), vectors)
        return library.content_digest() + repr(pairs).encode()


def _judged(
    rankers: Mapping[str, Ranker], spec: RetrieverSpec, cache: Path, gold: Sequence[Gold]
) -> dict[str, dict[str, Any]]:
    """The ranks of one institution's questions by each of these, and by what is read."""
    judged: dict[str, dict[str, Any]] = {name: {} for name in rankers}
    encoder = retriever_for(spec).encoder
    with Library.open(cache / LIBRARY, read_only=True) as library:
        for read in READ:
            embedding = Embedding(encoder, library, read, cache)
            for name, ranker in rankers.items():
                judged[name][read.name] = _ranks(loaded(ranker), embedding, library, gold)
    return judged


def _ranks(
    retriever: Retriever, embedding: Embedding, library: Library, gold: Sequence[Gold]
) -> dict[str, Any]:
    """With the head over what the encoder says of questions, passages and sentences."""

    def asked(queries: Sequence[str]) -> Float32:
        return retriever.embed_queries(queries, embedding.encode(queries))

    def told(features: Float32) -> Float32:
        return retriever.embed_passages((), features)

    labels, features = embedding.vectors
    sentences = embedding.sentences(embedding.passages.values())
    return measured_by_sentences(
        *(gold, library, embedding.passages),
        {label: told(of_passage) for label, of_passage in sentences.items()},
        *(asked, build_index(labels, told(features))),
    )


def loaded(ranker: Ranker) -> Retriever:
    """The retriever as it asks: with the shared version, and the site's own query encoder."""
    assert isinstance(ranker, Dense)
    ranker.retriever.load_vector(ranker.vector)
    if ranker.own is not None:
        assert isinstance(ranker.retriever, PersonalQueryRetriever)
        ranker.retriever.load_personal(ranker.own.arrays)
    return ranker.retriever


def _told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
