"""Jobs of the learning worker: embed, index, train. Plain functions with plain arguments.

The daemon's main process names these functions and never runs them, so nothing
heavy is imported before a job runs. A worker keeps one loaded retriever; every
job loads the model version it works on, so no job depends on the one before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from crypto.arrays import Float32, Int64
from daemon.answering.embedding import features_of
from daemon.answering.extractive import sentences_of
from daemon.evaluation.rankings import held_out
from daemon.jobs import originals
from daemon.learning.batches import training_seed
from daemon.learning.options import (
    EmbeddingProgress,
    EpochProgress,
    IndexingProgress,
    LearningError,
    RetrieverDescription,
    TrainingOptions,
    TrainingResult,
)
from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.updates import check_update, update_of, write_update
from daemon.library.contents import IngestCounts, RemovedCounts, Splitter
from daemon.library.file_notes import FilesGone, FilesRead
from daemon.library.readers.documents import Document, Pair, Waiting
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from daemon.pairs.training_set import training_pairs, training_set
from daemon.personal.depth import corpus_score
from daemon.personal.layer import Layer, LocalTraining
from daemon.personal.layers import layer_of
from daemon.personal.serving import load_serving, load_version, retriever_for, store_of
from daemon.personal.store import PersonalState, PersonalStore, embedded_by
from daemon.process.workers import report
from daemon.state.versions import write_version

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever


_PASSAGES_AT_ONCE = 8  # whose sentences are encoded together
_MARKING_S = 2.0  # of near-duplicates behind a change; what is left then is done when all is quiet
_STUDENT = "student"
_RUN = "seed"  # of the plan: drawn for each run, unless somebody gives it


def describe(spec: RetrieverSpec) -> RetrieverDescription:
    """What this site's retriever is; raises EncoderError when it cannot be had."""
    retriever = retriever_for(spec)
    return RetrieverDescription(
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
    replace: bool = False,
    waiting: Sequence[Waiting] = (),
) -> IngestCounts:
    """Put documents, cut into passages within ``passage_tokens``, and pairs into the library."""
    with Library.open(library_path) as library:
        splitter = _splitter(spec, passage_tokens)
        counts = library.put_documents(
            documents, splitter=splitter, replace=replace, waiting=waiting
        )
        library.put_pairs(pairs)
        library.near.mark(_MARKING_S)
    originals.collect(library_path)
    return counts


def put_files(
    spec: RetrieverSpec, library_path: Path, read: FilesRead, passage_tokens: int
) -> tuple[IngestCounts, FilesGone]:
    """Put what was read of a watched folder's files into the library, cut as for `ingest`.

    With what came of it what is to be taken out by `remove`, as `Library.put_files` says.
    """
    with Library.open(library_path) as library:
        counts, left = library.put_files(read, _splitter(spec, passage_tokens))
        library.near.mark(_MARKING_S)
    # Of a file that has lost documents none is kept before they are out, or it would go with them.
    later = {part.name for part in left.shrunk}
    staged = [part.original for part in read.parts if part.original and part.name not in later]
    return replace(counts, originals=originals.keep(library_path, staged)), left


def _splitter(spec: RetrieverSpec, passage_tokens: int) -> Splitter:
    from daemon.library.passages import SentenceSplitter

    encoder = retriever_for(spec).encoder
    budget = min(passage_tokens, encoder.passage_room)  # else its end would never be read
    return SentenceSplitter(encoder.count_tokens, budget)


def remove(library_path: Path, ids: Sequence[str], gone: FilesGone | None = None) -> RemovedCounts:
    """Take documents out of the library, and every trace of their texts out of its files.

    ``gone``: with the notes of these files. Those that have lost documents are kept by then.
    """
    with Library.open(library_path) as library:
        removed = library.delete_documents(ids, gone)
        staged = [part.original for part in gone.shrunk if part.original] if gone else []
        originals.keep(library_path, staged)
        library.near.mark(_MARKING_S)  # before the log is emptied
        if ids:  # also of documents that went before, when they could not be cleared
            library.erasure.clear()
    return removed


def embed_passages(
    spec: RetrieverSpec, library_path: Path, seconds: float = math.inf
) -> EmbeddingProgress:
    """Encode passages that have no cached features yet, for so long: how many of how many.

    Reports `EmbeddingProgress`. What is done stays done when the job is cut short.
    Does nothing for a retriever that has no use for frozen features.
    """
    retriever = retriever_for(spec)
    if not retriever.uses_features:
        return EmbeddingProgress(0, 0)
    with Library.open(library_path) as library:
        return training_data.embed_missing(library, retriever.encoder, seconds)


def embed_frozen(
    spec: RetrieverSpec, library_path: Path, split: str, seconds: float
) -> EmbeddingProgress:
    """Encode passages as the encoder was before training, for so long: how many of how many.

    An evaluation compares a version with it. Where the encoder itself is trained, its
    passages' vectors from before training are needed for nothing else, and no index has
    them.

    Those that have been encoded already don't count. At least some are; reports
    `EmbeddingProgress`, and what is done stays done. Raises EvaluationError when there
    are no pairs of ``split`` to judge by, and then nothing is encoded.
    """
    with Library.open(library_path) as library:
        held_out(library, split)
        return training_data.embed_missing(library, retriever_for(spec).encoder, seconds)


def erase_removed(library_path: Path) -> None:
    """Leave no byte of what was removed, where that was cut short, or nobody waited for it.

    Raises LibraryError.
    """
    with Library.open(library_path) as library:
        if library.erasure.owed():
            library.erasure.clear()


def work_ahead(
    spec: RetrieverSpec, library_path: Path, sentences_path: Path, seconds: float
) -> int:
    """Do for so long what need not be done at once; of how many passages, 0: there is no more.

    Near-duplicates are marked (an older library has none, nor has one whose ingest was cut
    short), then `keep_sentences`. Raises LibraryError.
    """
    with Library.open(library_path) as library:
        done = library.near.mark(seconds)
    return done or keep_sentences(spec, library_path, sentences_path, seconds)


def keep_sentences(
    spec: RetrieverSpec, library_path: Path, sentences_path: Path, seconds: float
) -> int:
    """Encode sentences of passages of which not all are kept, for so long; of how many passages.

    0: there are no more, or no room for more, or the recipe trains the encoder, so that
    there is nothing to keep. What is done stays done. Raises LibraryError.
    """
    until = time.monotonic() + seconds
    retriever = retriever_for(spec)
    if not retriever.uses_features:
        return 0
    done = 0
    with (
        Library.open(library_path, read_only=True) as library,
        closing(SentenceFeatures.open(sentences_path)) as kept,
    ):
        there = kept.whole(retriever.encoder.digest)
        waiting = [
            rowid for content, rowid in library.content_labels().items() if content not in there
        ]
        for start in range(0, len(waiting), _PASSAGES_AT_ONCE):
            if kept.full or time.monotonic() >= until:
                break
            some = library.passages_by_rowid(waiting[start : start + _PASSAGES_AT_ONCE])
            sentences = [of_one for one in some.values() if (of_one := sentences_of(one))]
            if sentences:
                features_of(retriever.encoder, kept, sentences)
            done += len(sentences)
    return done


def build_index(
    spec: RetrieverSpec, library_path: Path, versions: Path, model_digest: bytes, index_root: Path
) -> Path:
    """Index the library's passages as one model version embeds them; the index's folder.

    A sound index of that version and those passages is left as it is; from one of that version
    and other passages, or of another engine, what is still there is taken over. Reports
    `EmbeddingProgress` and `IndexingProgress`. Raises VersionError when the version is missing
    or damaged, EngineUnavailable where the index is to lie at a server that doesn't answer.
    """
    from daemon.library.dense import folder as index_folder
    from daemon.library.dense import index

    retriever = retriever_for(spec)
    layer_of(spec).prepare(spec, retriever, versions, model_digest)
    embedded = embedded_by(spec.personal, spec.personal_folder, model_digest)
    with Library.open(library_path) as library:
        content_digest = library.content_digest()
        path = index_folder.index_path(index_root, embedded, content_digest)
        with suppress(index_folder.IndexDamaged):  # missing or damaged: built below
            there = index_folder.load_index(path, embedded, content_digest, options=spec.index)
            if there.base.engine == spec.index.engine:
                return path
        load_serving(spec, retriever, versions, model_digest)

        def embed(labels: Int64) -> Float32:
            return training_data.embedded(library, retriever, labels.tolist())[1]

        built = index.update_index(
            index_folder.newest_index(index_root, embedded, spec.index),
            index.Wanted(*library.contents(), embed, library.erasure.last_removal().hex()),
            threads=spec.threads,
            told=lambda done, total: report(IndexingProgress(done, total)),
            options=spec.index,
        )
    return index_folder.save_index(built, index_root, embedded, content_digest, spec.index)


def forget_elsewhere(spec: RetrieverSpec, index_root: Path) -> None:
    """As `daemon.library.dense.folder.forget_elsewhere`."""
    from daemon.library.dense import folder as index_folder

    index_folder.forget_elsewhere(index_root, spec.index)


def train(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    parent_digest: bytes,
    options: TrainingOptions,
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
    `EpochProgress`. Raises TrainingError when this site cannot train, VersionError when
    it lacks the parent; nothing is written then.
    """
    from daemon.learning.parameters import copies_of
    from daemon.learning.retriever import parallel

    options.check_adapt(spec.adapt)
    retriever, layer = retriever_for(spec), layer_of(spec)
    # Tiers are the site's own affair, but for the range that the plan tells.
    known = options.depth.complexity_range
    options = replace(options.in_round(round), depth=replace(spec.depth, complexity_range=known))
    parent = load_version(retriever, versions, parent_digest)
    own = _own(spec, retriever, layer, options)
    before = own.before(round) if own is not None else None
    if own is None and spec.personal_folder:
        store_of(spec, retriever).forget_rounds()
    seed = training_seed(options.seed, round, site, draw)
    mean_loss, personal = 0.0, PersonalState({})
    with Library.open(library_path) as library:
        if options.local_epochs == 0:
            count = max(1, training_pairs(spec, library))  # a weight must be positive
        else:
            layer.before_training(retriever, before, library, options)
            pairs = training_set(library, retriever, options, spec)
            count = len(pairs.positives)
            anchor = copies_of(retriever.shared_parameters())
            if options.start_from == "local" and (student := _student(before, options)) is not None:
                retriever.load_vector(student)
            retriever.begin(round=round, dropout=options.dropout, seed=seed)
            mean_loss = parallel.train(
                spec,
                retriever,
                pairs,
                options,
                seed,
                lambda epoch, loss: report(EpochProgress(epoch, options.local_epochs, loss)),
                anchor,
            )
            personal = layer.after_training(
                LocalTraining(library, retriever, before, pairs, options, mean_loss, seed)
            )
    trained = retriever.vector()
    update = update_of(trained, parent, mean_loss)
    check_update(update, count, *personal.arrays.values())
    if own is not None and options.local_epochs > 0:
        own.keep(round, _with_student(personal, trained, options))
    write_update(update_path, update)
    return TrainingResult(mean_loss, count)


def complexity(library_path: Path) -> float:
    """S_i (pFedRAG, Eq. 3): how complex this site's documents are; all that others need of it."""
    with Library.open(library_path) as library:
        return corpus_score(library)


def _own(
    spec: RetrieverSpec, retriever: Retriever, layer: Layer, options: TrainingOptions
) -> PersonalStore | None:
    """Where this site keeps what is its own; None when nothing is."""
    if options.start_from == "global" and not layer.trained_in_rounds:
        return None
    if not spec.personal_folder:
        raise LearningError(
            "start_from = 'local' and a personal layer keep something of the site's own between "
            "rounds, and no folder was given for it"
        )
    return store_of(spec, retriever)


def _student(before: PersonalState | None, options: TrainingOptions) -> Float32 | None:
    """The student that this run's last round left; None: there is none of this run.

    An update is what was trained less the parent. From a student of an earlier run it would
    take back whatever the federation has learned since.
    """
    if before is None or before.facts.get(_RUN) != options.seed:
        return None
    return before.arrays.get(_STUDENT)


def _with_student(
    personal: PersonalState, trained: Float32, options: TrainingOptions
) -> PersonalState:
    """What the round leaves behind: the site's layer, and its student where it has one."""
    if options.start_from == "global":
        return personal
    return PersonalState(
        {**personal.arrays, _STUDENT: trained}, {**personal.facts, _RUN: options.seed}
    )
