"""Jobs of the learning worker that make pairs: plain functions with plain arguments.

The daemon's main process names them and never runs them, as those in `jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from daemon.learning import jobs
from daemon.learning.spec import RetrieverSpec
from daemon.learning.terms import LearningError
from daemon.retrieval.library import Library, Passage
from daemon.workers import report

if TYPE_CHECKING:
    from daemon.learning.models import Retriever
    from daemon.learning.pairs.made import Made
    from daemon.learning.pairs.writing import Writer

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class PairPlan:
    """How pairs are made; ``domain`` and what follows matter to "llm" alone.

    ``a_passage``: sentences or written queries a passage. ``top_k``: of the round
    trip. ``model``: a folder with a causal model, or ``http://127.0.0.1:PORT/v1#NAME``.
    """

    how: Literal["inverse-cloze", "title", "keywords", "llm"] = "inverse-cloze"
    a_passage: int = 1
    seed: int = 0
    domain: str = "general"
    top_k: int = 10
    model: str = ""


@dataclass(frozen=True)
class PairCounts:
    """What was made of how many passages, and what was lost on the way."""

    passages: int
    made: int
    repeated: int
    lost: int
    seconds: float


@dataclass(frozen=True)
class PairProgress:
    """Reported while pairs are made: passages done, passages in all."""

    done: int
    total: int


def build_pairs(
    spec: RetrieverSpec, library_path: Path, made_path: Path, plan: PairPlan
) -> PairCounts:
    """Make pairs of the documents that may be learned from and keep them at ``made_path``.

    Reports `PairProgress` and `EmbeddingProgress`. Those made before are replaced
    when all is done, and stay when it fails. Raises PairError (unknown domain, a
    model that can't be had or asked), EncoderError, LibraryError.
    """
    from daemon.learning.pairs import cloze, made

    started = time.monotonic()
    with Library.open(library_path) as library:
        passages = library.passages(split="train")  # never what is held out
        repeated = lost = 0
        if plan.how == "inverse-cloze":
            pairs = cloze.inverse_cloze(passages, a_passage=plan.a_passage, seed=plan.seed)
        elif plan.how == "title":
            pairs = cloze.titles(passages)
        elif plan.how == "keywords":
            pairs = cloze.keywords(passages)
        elif plan.how == "llm":
            pairs, repeated, lost = _written(spec, library, passages, plan)
        else:
            raise LearningError(f"how = {plan.how!r}: use inverse-cloze, title, keywords or llm")
    made.write(made_path, pairs)
    return PairCounts(len(passages), len(pairs), repeated, lost, time.monotonic() - started)


def _written(
    spec: RetrieverSpec, library: Library, passages: Sequence[Passage], plan: PairPlan
) -> tuple[list[Made], int, int]:
    from daemon.learning.pairs.round_trip import round_trip
    from daemon.learning.pairs.writing import written

    made = written(
        passages,
        _writer(plan.model, spec.device),
        domain=plan.domain,
        count=plan.a_passage,
        told=lambda done, total: report(PairProgress(done, total)),
    )
    retriever = jobs._retriever(spec)
    rowids = [passage.rowid for passage in passages]
    features = jobs._passage_features(library, retriever, rowids)
    texts = [passage.embedding_text for passage in passages]
    filtered = round_trip(
        made,
        _embedded(library, retriever, [pair.query for pair in made]),
        texts,
        retriever.embed_passages(texts, features),
        k=plan.top_k,
    )
    return filtered.kept, filtered.repeated, filtered.lost


def _embedded(library: Library, retriever: Retriever, queries: Sequence[str]) -> Float32:
    if not queries:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    return retriever.embed_queries(queries, jobs._query_features(library, retriever, queries))


def _writer(model: str, device: str) -> Writer:
    from daemon.learning.pairs.made import PairError
    from daemon.learning.pairs.writers import LocalModel, LocalServer

    if not model:
        raise PairError("how = 'llm' needs a model: a folder, or http://127.0.0.1:PORT/v1#NAME")
    if model.startswith(("http:", "https:")):
        url, _, name = model.partition("#")
        return LocalServer(url, name)
    return LocalModel.load(Path(model), device="cuda" if device == "cuda" else "cpu")
