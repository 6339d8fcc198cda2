"""Jobs of the learning worker: embed, index, train. Plain functions with plain arguments.

The daemon's main process names these functions and never runs them, so nothing
heavy is imported before a job runs. A worker keeps one loaded retriever; every
job loads the model version it works on, so no job depends on the one before.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32
from crypto.quantize import LOSS_BOUND
from daemon.learning import training_data
from daemon.learning.options import (
    DepthReport,
    LearningError,
    RetrieverDescription,
    TrainingError,
    TrainingOptions,
    TrainingProgress,
    TrainingResult,
)
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.documents import Document, Pair
from daemon.library.store import IngestCounts, Library
from daemon.personal.personal import PersonalState, PersonalStore, embedded_by
from daemon.process.workers import report
from daemon.state.versions import read_version, write_version

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.training import TrainingSet


_STUDENT = "student"
_RUN = "seed"  # of the plan: drawn for each run, unless somebody gives it


def describe(spec: RetrieverSpec) -> RetrieverDescription:
    """What this site's retriever is; raises EncoderError when it cannot be had."""
    retriever = retriever_for(spec)
    return RetrieverDescription(
        encoder_digest=retriever.encoder.digest,
        dimension=retriever.encoder.dimension,
        shape_manifest=retriever.shape_manifest,
    )


def write_initial_version(spec: RetrieverSpec, versions: Path) -> bytes:
    """Store the version every site starts from; its digest is the same at all of them."""
    retriever = retriever_for(spec)
    digest, _ = write_version(versions, retriever.shape_manifest.digest, retriever.initial_vector())
    return digest


def ingest(
    spec: RetrieverSpec,
    library_path: Path,
    documents: Sequence[Document],
    pairs: Sequence[Pair],
    passage_tokens: int,
) -> IngestCounts:
    """Put documents, cut into passages within ``passage_tokens``, and pairs into the library."""
    from daemon.library.passages import SentenceSplitter

    splitter = SentenceSplitter(retriever_for(spec).encoder.count_tokens, passage_tokens)
    with Library.open(library_path) as library:
        counts = library.put_documents(documents, splitter=splitter)
        library.put_pairs(pairs)
    return counts


def embed_passages(spec: RetrieverSpec, library_path: Path) -> int:
    """Encode the passages that have no cached features yet; how many texts that were.

    Reports `EmbeddingProgress`. What is done stays done when the job is cut short.
    Does nothing for a retriever that has no use for frozen features.
    """
    retriever = retriever_for(spec)
    if not retriever.uses_features:
        return 0
    with Library.open(library_path) as library:
        return training_data.embed_missing(library, retriever)


def build_index(
    spec: RetrieverSpec, library_path: Path, versions: Path, model_digest: bytes, index_root: Path
) -> Path:
    """Index the library's passages as one model version embeds them; the index's folder.

    A sound index of that version and those passages is left as it is. Raises
    VersionError when the version is missing or damaged.
    """
    from daemon.library import index

    retriever = retriever_for(spec)
    _pin(spec, retriever, versions, model_digest)
    embedded = embedded_by(spec.personal, spec.personal_folder, model_digest)
    with Library.open(library_path) as library:
        content_digest = library.content_digest()
        path = index.index_path(index_root, embedded, content_digest)
        try:
            index.load_index(path, embedded, content_digest)
        except index.IndexDamaged:
            pass  # missing or damaged: built below
        else:
            return path
        load_serving(spec, retriever, versions, model_digest)
        labels, vectors = training_data.embedded(library, retriever)
    built = index.build_index(labels, vectors, threads=spec.threads)
    return built.save(index_root, embedded, content_digest)


def train(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    parent_digest: bytes,
    plan: TrainingOptions,
    round: int,
    site: str,
    update_path: Path,
    *,
    draw: int = 0,
) -> TrainingResult:
    """Train from the parent version on this site's pairs and write the update.

    ``update_path`` gets float32 [D + 1] in .npy: new minus parent, then the mean
    loss over LOSS_BOUND. ``draw`` as in `training_seed`. Nothing personal is in it: the
    site's student and its personal layer go to ``spec.personal_folder``. Reports
    `TrainingProgress`. Raises TrainingError when this site cannot train, VersionError when
    it lacks the parent; nothing is written then.
    """
    from daemon.learning.training import fit, shared_copies, training_seed
    from daemon.pairs.learning import training_pairs

    started = time.monotonic()
    _check_combination(spec, plan)
    retriever = retriever_for(spec)
    # Tiers are the site's own affair, but for the range that the plan tells.
    known = plan.depth.complexity_range
    plan = replace(plan.in_round(round), depth=replace(spec.depth, complexity_range=known))
    parent = load_version(retriever, versions, parent_digest)
    own = _own(spec, retriever, plan)
    before = own.before(round) if own is not None else None
    if own is None and spec.personal_folder:
        PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest).forget_rounds()
    seed = training_seed(plan.seed, round, site, draw)
    mean_loss, depth, kept = 0.0, None, PersonalState({})
    with Library.open(library_path) as library:
        if plan.local_epochs == 0:
            count = max(1, training_pairs(spec, library))  # a weight must be positive
        else:
            _take_up(retriever, before, library, plan)
            pairs = training_data.training_set(library, retriever, plan, spec)
            count = len(pairs.positives)
            held = shared_copies(retriever)
            if plan.start_from == "local" and (student := _student(before, plan)) is not None:
                retriever.load_vector(student)
            retriever.begin(round=round, dropout=plan.dropout, seed=seed)
            mean_loss = fit(
                retriever,
                pairs,
                plan,
                seed,
                lambda epoch, loss: report(TrainingProgress(epoch, plan.local_epochs, loss)),
                held,
            )
            kept, depth = _after(library, retriever, before, pairs, plan, mean_loss, seed)
    trained = retriever.vector()
    tail = np.float32(min(max(mean_loss / LOSS_BOUND, 0.0), 1.0))
    update = np.append(trained - parent, tail)
    _check_update(update, count, kept)
    if own is not None and plan.local_epochs > 0:
        own.keep(round, _with_student(kept, trained, plan))
    _write_update(update_path, update)
    return TrainingResult(mean_loss, count, time.monotonic() - started, depth)


def complexity(library_path: Path) -> float:
    """S_i (pFedRAG, Eq. 3): how complex this site's documents are; all that others need of it."""
    from daemon.personal.tiering import score

    with Library.open(library_path) as library:
        return score(library)


@functools.lru_cache(maxsize=1)
def retriever_for(spec: RetrieverSpec) -> Retriever:
    """The worker's one loaded retriever; raises EncoderError when it cannot be had."""
    from daemon.learning.retriever.retriever import open_retriever

    return open_retriever(spec)


def load_version(retriever: Retriever, versions: Path, digest: bytes) -> Float32:
    """Make the version current, and give its vector; raises VersionError."""
    vector = read_version(versions, digest, retriever.shape_manifest.digest)
    retriever.load_vector(vector)
    return vector


def _check_combination(spec: RetrieverSpec, plan: TrainingOptions) -> None:
    """Raise LearningError for a plan that does not go with what this federation exchanges."""
    if spec.adapt != "lora_server":
        return
    if plan.start_from == "local":
        raise LearningError(
            "start_from = 'local' and adapt = 'lora_server' do not combine: what is exchanged is a "
            "projection on the parent version's factors, which a student has left"
        )
    if plan.server.rule != "fedavg":
        raise LearningError(
            f"aggregate = '{plan.server.rule}' and adapt = 'lora_server' do not combine: a round "
            "trains one of two factors, and momentum goes on moving the one that sites hold fixed"
        )


def _own(spec: RetrieverSpec, retriever: Retriever, plan: TrainingOptions) -> PersonalStore | None:
    """Where this site keeps what is its own; None when nothing is."""
    if plan.start_from == "global" and spec.personal != "tiered_head":
        return None
    if not spec.personal_folder:
        raise LearningError(
            "start_from = 'local' and a personal layer keep something of the site's own between "
            "rounds, and no folder was given for it"
        )
    return PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)


def _student(before: PersonalState | None, plan: TrainingOptions) -> Float32 | None:
    """The student that this run's last round left; None: there is none of this run.

    An update is what was trained less the parent. From a student of an earlier run it would
    take back whatever the federation has learned since.
    """
    if before is None or before.facts.get(_RUN) != plan.seed:
        return None
    return before.arrays.get(_STUDENT)


def _with_student(kept: PersonalState, trained: Float32, plan: TrainingOptions) -> PersonalState:
    """What the round leaves behind: the site's layer, and its student where it has one."""
    if plan.start_from == "global":
        return kept
    return PersonalState({**kept.arrays, _STUDENT: trained}, {**kept.facts, _RUN: plan.seed})


def _take_up(
    retriever: Retriever, before: PersonalState | None, library: Library, plan: TrainingOptions
) -> None:
    """The personal layer as the last round left it, or a first one by the site's score."""
    from daemon.personal.tiers import TieredHeadRetriever

    if isinstance(retriever, TieredHeadRetriever):
        from daemon.personal import tiering

        if not tiering.take_up(retriever, before):
            tiering.assign(retriever, library, plan)


def _after(
    library: Library,
    retriever: Retriever,
    before: PersonalState | None,
    pairs: TrainingSet,
    plan: TrainingOptions,
    loss: float,
    seed: int,
) -> tuple[PersonalState, DepthReport | None]:
    """What is kept of the site's own, and what its depth scheduler says of the round."""
    from daemon.personal.tiers import TieredHeadRetriever

    if not isinstance(retriever, TieredHeadRetriever):
        return PersonalState({}), None
    from daemon.personal import tiering

    recalls = (
        _recall(library, retriever, "train", seed) or 0.0,
        _recall(library, retriever, "valid", seed),
    )
    known = tiering.depth_state(before, retriever.tier)
    state, said = tiering.judge(retriever, known, pairs, recalls, loss, plan, seed)
    return PersonalState(*tiering.kept(retriever, state, said)), said


def _recall(library: Library, retriever: Retriever, split: str, seed: int) -> float | None:
    """Recall@5 on the pairs of a split, among the passages of training and validation."""
    from daemon.learning.retriever.retriever import Texts
    from daemon.personal.tiering import recall_at, rows_by_document

    passages = [*library.passages(split="train"), *library.passages(split="valid")]
    rows_of = rows_by_document(passages)
    queries, positives = training_data.usable_pairs(library, split, rows_of)
    asked = Texts(queries, training_data.query_features(library, retriever, queries))
    told = Texts(
        [passage.embedding_text for passage in passages],
        training_data.passage_features(library, retriever, [passage.rowid for passage in passages]),
    )
    return recall_at(retriever, asked, told, positives, seed)


def _check_update(update: Float32, num_examples: int, kept: PersonalState) -> None:
    """What others would have to refuse, this site refuses itself; what it keeps, too."""
    if not all(np.isfinite(values).all() for values in (update, *kept.arrays.values())):
        raise TrainingError(
            "training left values that are not finite: lower the learning rate; no update was made"
        )
    if num_examples <= 0:
        raise TrainingError("an update of no example weighs nothing: no update was made")


def _pin(spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes) -> None:
    """Decide what of this site's own a version answers with, until it has its own."""
    if spec.personal == "mixture":
        from daemon.jobs import personal

        personal.carry(spec, retriever, versions, model_digest)
    if spec.personal == "tiered_head":
        store = PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)
        store.pin(model_digest)


def load_serving(
    spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes
) -> None:
    """Make a version current as it answers: with the personal layer it was indexed with.

    Raises VersionError when the version is missing or damaged, LearningError when the
    site's personal parameters are; the retriever stays as it was then.
    """
    vector = read_version(versions, model_digest, retriever.shape_manifest.digest)
    if spec.personal in ("query_encoder", "mixture"):
        from daemon.jobs import personal

        personal.load_serving(spec, retriever, vector, model_digest)
        return
    if spec.personal != "none":
        from daemon.personal.tiering import take_up
        from daemon.personal.tiers import TieredHeadRetriever

        if isinstance(retriever, TieredHeadRetriever):
            store = PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)
            take_up(retriever, store.serving(model_digest))
    retriever.load_vector(vector)


def _write_update(path: Path, update: Float32) -> None:
    """Whole or not at all: the crypto worker must never read half an update."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.save(file, update.astype(np.float32), allow_pickle=False)
    temporary.replace(path)
