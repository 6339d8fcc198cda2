"""Jobs of the answering worker: open a model version, answer, evaluate.

The worker keeps one open version. A newer one is opened beside it and takes its
place only when all of it is sound, so a question always meets a whole version.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from config.kinds import RetrievalLevel
from crypto.arrays import Float32
from daemon.answering.abstention import (
    ALWAYS_ANSWERS,
    Abstention,
    by_pairs,
    evidence_among,
    evidence_without_answers,
    without_pairs,
)
from daemon.answering.answering import Answered, OpenVersion
from daemon.answering.embedding import (
    KeptSentences,
    QuestionEmbedder,
    RememberedSentences,
    SentenceEmbedder,
)
from daemon.answering.general_questions import GENERAL_QUESTIONS
from daemon.answering.generator import AS_SET, Asking
from daemon.answering.generators import CHECKS, GENERATORS, written_by
from daemon.answering.options import AS_USUAL, AnsweringOptions
from daemon.evaluation.evaluation import Metrics
from daemon.evaluation.intervals import Interval, differences_of, figures_of
from daemon.evaluation.rankings import (
    FEWEST_TO_WEIGH,
    Labels,
    Questions,
    exact,
    found_by,
    fused,
    held_out,
    judged_rankings,
    weigh,
)
from daemon.jobs.views import Collections, Views
from daemon.learning.options import EncoderError, EvaluationError, EvaluationProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training_data import frozen_queries
from daemon.library.catalogue.filters import EVERY, Filters
from daemon.library.catalogue.language import language_of_question
from daemon.library.dense.engines import Accuracy
from daemon.library.dense.folder import load_index
from daemon.library.levels import Sentences
from daemon.library.readers.documents import Pair
from daemon.library.search import (
    USUAL_WEIGHTS,
    Candidates,
    Ranked,
    RankingWeights,
    groups_of,
)
from daemon.library.sentence_features import SentenceFeatures, SentenceFeaturesError
from daemon.library.store import Library
from daemon.library.titles import Titles
from daemon.personal.serving import load_serving, open_retriever
from daemon.personal.store import embedded_by
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.answering.cross_encoder import CrossEncoder
    from daemon.learning.retriever.retriever import Retriever


log = structlog.get_logger()

# Opening a version is to take about a second.
_WEIGHED_BY = 200  # pairs, at most
_COUNTING_S = 0.5


class NotOpenError(Exception):
    """No model version is open in this worker (it is fresh, or was started anew)."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of the open version on one split.

    ``dense`` is what training changes. ``figures``: of each ranking of
    `daemon.evaluation.rankings` every metric of `daemon.evaluation.evaluation` with its
    interval; ``over_vanilla``: how much it is above that of the encoder before training.
    They stay at the site. ``fell_back``: questions whose "cross-encoder" is as "fused" had them,
    and ``cause``, why so, of the first.
    """

    split: str
    dense: Metrics
    figures: dict[str, dict[str, Interval]]
    over_vanilla: dict[str, dict[str, Interval]]
    model_digest: bytes
    seconds: float
    weights: RankingWeights  # as in `OpenVersion`
    weighed_by: int
    fell_back: int
    cause: str


@dataclass(frozen=True)
class AnswerSoFar:
    """What of an answer is certain while it is written: it will begin so."""

    text: str


@dataclass(frozen=True)
class Searched:
    """Passages for a question, best first, and with which weights (as in `OpenVersion`).

    ``words``: those of the question that each passage has, ``title_words``: that its title
    has; empty where no explanation was wanted.
    """

    passages: list[Ranked]
    words: list[list[str]]
    title_words: list[list[str]]
    model_digest: bytes
    weights: RankingWeights
    weighed_by: int
    left_out: str  # as `OpenVersion.search` says


@dataclass
class _Anew:
    """An evaluation's questions, of which the cross-encoder has ranked the first few.

    ``best``: passages of each by all the rest; ``ranked``: as people get them, copies behind
    the one that stands for them. ``fell_back``: how many it left as they were, and why the
    first: then the next evaluation begins anew. ``as_of``: `Library.changes` at the last look.
    """

    pairs: list[Pair]
    best: Labels
    ranked: Labels = field(default_factory=list)
    fell_back: int = 0
    cause: str = ""
    as_of: int = -1

    def still_asks(self, library: Library, split: str) -> bool:
        """Whether the pairs are those that there are; read where somebody changed anything."""
        as_of = library.changes()
        if as_of != self.as_of and held_out(library, split)[1] != self.pairs:
            return False
        self.as_of = as_of
        return True

    def go_on(self, by: CrossEncoder, library: Library, until: float) -> None:
        """Rank at least one more, if there is one, and go on ``until`` then, by the clock.

        Raises EvaluationError once most are left out: of these no figure would be its own.
        """
        for row in range(len(self.ranked), len(self.pairs)):
            groups = {one[0]: one for one in groups_of(library, self.best[row])}
            passages = library.passages_by_rowid([*groups])
            found = [Ranked(passages[label], 0.0) for label in groups if label in passages]
            anew, cause = by.ranked(self.pairs[row].query, found)
            self.ranked.append([label for one in anew for label in groups[one.passage.rowid]])
            self.fell_back += bool(cause)
            self.cause = self.cause or cause
            if 2 * self.fell_back > len(self.pairs):
                raise EvaluationError(
                    f"most questions are ranked without the cross-encoder: {self.cause} "
                    "(or remove retrieval.cross_encoder)"
                )
            if time.monotonic() > until:
                return


_open: OpenVersion | None = None
_views = Views()  # of the open version
_as_asked: tuple[RetrieverSpec, Path, AnsweringOptions] | None = None  # how that was opened
_anew: dict[str, _Anew] = {}  # of the open version, by split: evaluations under way


@dataclass(frozen=True)
class OpenIndex:
    """What questions are answered from: ``passages`` that are found by meaning, by an engine."""

    passages: int
    engine: str
    accuracy: Accuracy
    lacking: str  # as in `OpenVersion`
    views: list[Collections]  # to be made anew before somebody asks of them (`renew_view`)
    abstention: Abstention = ALWAYS_ANSWERS

    @property
    def recall(self) -> float:
        """As `Accuracy`; 0 where it is empty."""
        return self.accuracy.recall if self.passages else 0.0


NONE_OPEN = OpenIndex(0, "", Accuracy(0, 0.0, 0.0), "", [])


def check(options: AnsweringOptions, device: str) -> None:
    """Load what ``options`` name, so that a start is refused.

    Raises EncoderError, LanguageModelError.
    """
    _loaded(options.cross_encoder, options.cross_encoder_depth, device)
    if (load := CHECKS.get(options.generator)) is not None:
        load(options)


def open_version(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    index_path: Path,
    sentences_path: Path | None = None,
    options: AnsweringOptions = AS_USUAL,
) -> OpenIndex:
    """Make a model version with its index the one that answers, as ``options`` say.

    Says what that index holds, and how much of what it should find it finds.
    What titles and words count in its answers, and what is too little for one, is found on the
    site's pairs for validation, of which `_WEIGHED_BY` are asked. What a frozen encoder makes of
    sentences is kept at ``sentences_path`` (None: nowhere), and there what passages had that are
    gone by now goes.
    A cross-encoder that can't be had is left out: people get answers all the same.
    Raises EncoderError, VersionError, IndexDamaged or LibraryError;
    the version that was open before stays open then. Where only the pairs can't be read the
    new one is open already, with the usual weights.
    """
    global _open, _as_asked
    retriever = _retriever(spec)
    cross_encoder, lacking = _cross_encoder(options, spec.device)
    embedded = embedded_by(spec.personal, spec.personal_folder, model_digest)
    index = load_index(index_path, embedded, options=spec.index)
    library = Library.open(library_path, read_only=True)
    with ExitStack() as undoing:
        undoing.callback(library.close)
        titles = Titles(library.titles())
        library.count_common_words(_COUNTING_S)
        embed_sentences = _sentence_embedder(retriever, library, sentences_path)
        undoing.callback(embed_sentences.close)
        embed_question = QuestionEmbedder(retriever)
        generator = GENERATORS[options.generator](embed_question, embed_sentences, options)
        sentences = _sentences(options.level, library, embed_sentences)
        if retriever.encoder.languages:
            language_of_question("")  # loads what tells languages: the first question need not wait
        # Last, all of it or nothing: the encoder is shared with the version before,
        # its parameters are what changes.
        load_serving(spec, retriever, versions, model_digest)
        undoing.pop_all()
    previous = _open
    _open = OpenVersion(
        *(retriever, index, library, titles, model_digest, embed_question, embed_sentences),
        generator=generator,
        sentences=sentences,
        cross_encoder=cross_encoder,
        lacking=lacking,
    )
    _as_asked = spec, library_path, options
    _anew.clear()
    _views.let_go()
    if previous is not None:
        previous.close()
    _open = _fitted(_open, spec, options.lost_answers)
    held = index.count, index.base.engine, index.base.accuracy
    return OpenIndex(*held, lacking, _views.kept, _open.abstention)


def renew_view(collections: Collections) -> None:
    """Make ready for who may ask of these collections alone; raises NotOpenError, LibraryError."""
    _allowed(collections)


def ask(
    question: str, top_k: int, how: Asking = AS_SET, collections: Collections | None = None
) -> Answered:
    """Answer a question from the open version; raises QuestionRefusedError, NotOpenError.

    ``collections``: of these alone, as if there were no others; LibraryError where their
    documents can't be read. None: of all.
    """
    version = _allowed(collections)
    if how.values is not None and _as_asked is not None:
        version = written_by(how.values, version, _as_asked[2])
    return version.answer(question, top_k, how)


def ask_telling(
    question: str, top_k: int, how: Asking = AS_SET, collections: Collections | None = None
) -> Answered:
    """As `ask`; reports `AnswerSoFar` while a language model writes."""
    version = _allowed(collections)
    return version.answer(question, top_k, how, lambda text: report(AnswerSoFar(text)))


def search(
    question: str,
    top_k: int,
    explain: bool,
    filters: Filters = EVERY,
    collections: Collections | None = None,
) -> Searched:
    """Find passages in the open version; ``collections`` and what it raises as in `ask`."""
    version = _allowed(collections)
    passages, left_out = version.search(question, top_k, filters)
    words: list[list[str]] = [[] for _ in passages]
    title_words = words
    if explain:
        rowids = [one.passage.rowid for one in passages]
        found = version.library.words_in(question, rowids)
        asked = version.titles.asked(question)
        words = [found[rowid] for rowid in rowids]
        title_words = [version.titles.matched(asked, one.passage.title) for one in passages]
    return Searched(
        *(passages, words, title_words, version.model_digest),
        *(version.weights, version.weighed_by, left_out),
    )


def embed(texts: list[str], _collections: Collections | None = None) -> tuple[Float32, bytes]:
    """[n, d] texts as the open version embeds questions, and its digest; raises NotOpenError.

    No document has a part in it, so it is the same for all collections.
    """
    version = opened_version()
    return version.retriever.embed_queries(texts), version.model_digest


def rank_anew(split: str, seconds: float) -> EvaluationProgress:
    """Have the cross-encoder rank what `evaluate` judges, for some seconds; how far that is.

    To be called again until all is done: it takes long, and people ask meanwhile. Nothing is
    to be done without a cross-encoder. Raises what `evaluate` does.
    """
    until = time.monotonic() + seconds
    version = opened_version()
    if version.cross_encoder is None:
        return EvaluationProgress("cross-encoder")
    anew = _anew.get(split)
    if anew is None or not anew.still_asks(version.library, split):
        _, pairs, asked = _questions(version, split)
        anew = _Anew(pairs, fused(asked))
    _go_on(version.cross_encoder, version.library, split, anew, until)
    return EvaluationProgress("cross-encoder", len(anew.ranked), len(anew.pairs))


def evaluate(split: str) -> Evaluation:
    """Score the open version on the library's pairs of a split ("": test, or else valid).

    The encoder before training is judged, too, where frozen features of every passage
    are cached (`daemon.jobs.learning.embed_frozen`). Raises EvaluationError when there
    are no pairs, and when passages are not in the index yet, NotOpenError.
    """
    started = time.monotonic()
    version = opened_version()
    wanted, (split, pairs, asked) = split, _questions(version, split)
    anew = _Anew([], [])
    if version.cross_encoder is not None:
        anew = _anew.get(wanted, anew)
        if anew.pairs != pairs:  # some have come since, or nobody has begun
            anew = _Anew(pairs, fused(asked))
        _go_on(version.cross_encoder, version.library, wanted, anew, math.inf)
        asked = replace(asked, anew=anew.ranked)
        if anew.fell_back:
            del _anew[wanted]
    judged = judged_rankings(version.library, pairs, asked)
    before = judged.get("vanilla")
    return Evaluation(
        split=split,
        dense=judged["dense"].metrics(),
        figures={name: figures_of(one) for name, one in judged.items()},
        over_vanilla={
            name: differences_of(one, before)
            for name, one in judged.items()
            if before is not None and name != "vanilla"
        },
        model_digest=version.model_digest,
        seconds=time.monotonic() - started,
        weights=version.weights,
        weighed_by=version.weighed_by,
        fell_back=anew.fell_back,
        cause=anew.cause,
    )


def _go_on(by: CrossEncoder, library: Library, split: str, anew: _Anew, until: float) -> None:
    """As `_Anew.go_on`; kept for the next call, unless most questions are left out."""
    _anew.pop(split, None)
    anew.go_on(by, library, until)
    _anew[split] = anew


def _questions(version: OpenVersion, split: str) -> tuple[str, list[Pair], Questions]:
    there = version.index.holds(np.array(version.library.rowids(), np.int64))
    # A question about a passage that is not there would count as not found.
    if lacking := int((~there).sum()):
        raise EvaluationError(
            f"{lacking} of {len(there)} passages are not embedded yet: documents are being "
            "ingested. Evaluate when that is done"
        )
    split, pairs = held_out(version.library, split)
    queries = [pair.query for pair in pairs]
    frozen = frozen_queries(version.library, version.retriever.encoder, queries)
    embedded = _query_vectors(version, queries, frozen)
    found = found_by(
        *(version.library, version.index, version.titles, pairs, embedded), version.sentences
    )
    labels, vectors = version.library.features(version.retriever.encoder.digest)
    vanilla = None
    if len(labels) == version.library.counts().passages:
        vanilla = exact(frozen, labels, vectors)
    return split, pairs, Questions(found, vanilla, version.weights)


def forget_removed(library_path: Path, sentences_path: Path) -> None:
    """Drop what is kept of sentences whose passages are gone; no file holds it afterwards.

    In this worker, so that no answer under way keeps something behind it. Raises LibraryError.
    """
    if not sentences_path.exists():
        return
    with (
        Library.open(library_path, read_only=True) as library,
        closing(SentenceFeatures.open(sentences_path)) as kept,
    ):
        kept.retain(set(library.content_labels()))


def _allowed(collections: Collections | None) -> OpenVersion:
    """What answers who may ask of these; None: of all."""
    opened = opened_version()
    if collections is None or _as_asked is None:
        return opened
    spec, path, options = _as_asked

    def begin(version: OpenVersion) -> OpenVersion:
        # Its own, for one remembers the last question: that others asked the same is theirs.
        embed_question = QuestionEmbedder(version.retriever)
        embedders = embed_question, version.embed_sentences
        return replace(
            version,
            embed_question=embed_question,
            generator=GENERATORS[options.generator](*embedders, options),
            sentences=_sentences(options.level, version.library, version.embed_sentences),
            weights=USUAL_WEIGHTS,
            weighed_on=(),
            abstention=ALWAYS_ANSWERS,
        )

    def fit(version: OpenVersion) -> OpenVersion:
        return _fitted(version, spec, options.lost_answers, keep=True)

    return _views.of(collections, opened, path, begin, fit)


def _fitted(
    version: OpenVersion, spec: RetrieverSpec, lost: float, *, keep: bool = False
) -> OpenVersion:
    """With what its rankings weigh, and what is too little for an answer where ``lost`` is not 0.

    By the pairs for validation; where there are too few, as usual and by general questions.
    ``keep``: what the frozen encoder makes of them, in the version's library.
    """
    pairs, weights = _for_validation(version), version.weights
    met = met_by(version, [pair.query for pair in pairs], keep=keep) if pairs else []
    if pairs:
        weights = weigh(version.library, pairs, met)
        asked = tuple(pair.query for pair in pairs)
        version = replace(version, weights=weights, weighed_on=asked)
    if not lost:
        return version
    features = _general_features(spec) if version.retriever.uses_features else None
    general = evidence_among(met_by(version, GENERAL_QUESTIONS, features), weights)
    if not pairs:
        return replace(version, abstention=without_pairs(general))
    unanswered = evidence_without_answers(met, pairs, weights, version.library.document_of())
    fitted = by_pairs(evidence_among(met, weights), unanswered, general, lost)
    return replace(version, abstention=fitted)


def _for_validation(version: OpenVersion) -> list[Pair]:
    """Those that something may be chosen by; none where there are too few."""
    try:
        _, pairs = held_out(version.library, "valid", most=_WEIGHED_BY)
    except EvaluationError:
        return []
    return pairs if len(pairs) >= FEWEST_TO_WEIGH else []


def met_by(
    version: OpenVersion,
    queries: Sequence[str],
    features: Float32 | None = None,
    *,
    keep: bool = False,
) -> list[Candidates]:
    """What these questions meet in the open version; ``features`` [n, d]: where they are known."""
    retriever = version.retriever
    if retriever.uses_features and features is None:
        features = frozen_queries(version.library, retriever.encoder, queries, keep=keep)
    vectors = retriever.embed_queries(queries, features)
    pairs = [Pair(query, (), "valid") for query in queries]
    found = found_by(
        *(version.library, version.index, version.titles, pairs, vectors), version.sentences
    )
    return found.met


@functools.lru_cache(maxsize=1)
def _general_features(spec: RetrieverSpec) -> Float32:
    """[g, d] what the frozen encoder makes of general questions: the same in every version."""
    encoder = _retriever(spec).encoder
    return encoder.encode(GENERAL_QUESTIONS, side=encoder.reading.query)


def _cross_encoder(options: AnsweringOptions, device: str) -> tuple[CrossEncoder | None, str]:
    """The one that is named, and why it can't be had: `check` has refused that at the start."""
    try:
        return _loaded(options.cross_encoder, options.cross_encoder_depth, device), ""
    except EncoderError as error:
        log.warning("passages are not ranked by the cross-encoder", cause=str(error))
        return None, str(error)


@functools.lru_cache(maxsize=1)
def _loaded(folder: str, depth: int, device: str) -> CrossEncoder | None:
    from daemon.answering.cross_encoder import CrossEncoder

    return CrossEncoder.load(Path(folder), depth, device) if folder else None


def _sentences(
    level: RetrievalLevel, library: Library, embed_sentences: SentenceEmbedder
) -> Sentences | None:
    if level == "passage":
        return None
    return Sentences(level, library.passages_by_rowid, embed_sentences.of_passages)


def _sentence_embedder(
    retriever: Retriever, library: Library, path: Path | None
) -> SentenceEmbedder:
    """An answer waits longer where the file can't be had, and is given all the same."""
    if not retriever.uses_features:
        return RememberedSentences(retriever)
    if path is None:
        return KeptSentences(retriever, None)
    try:
        kept = SentenceFeatures.open(path)
    except SentenceFeaturesError as error:
        log.warning("sentences are encoded at each question", cause=str(error))
        return KeptSentences(retriever, None)
    with ExitStack() as undoing:
        undoing.callback(kept.close)
        try:
            kept.retain(set(library.content_labels()))
        except SentenceFeaturesError as error:
            log.warning("what is kept of sentences was not tidied", cause=str(error))
        undoing.pop_all()
    return KeptSentences(retriever, kept)


def opened_version() -> OpenVersion:
    """The one that answers; raises NotOpenError."""
    if _open is None:
        raise NotOpenError("no model version is open yet: ingest documents, then ask again")
    return _open


@functools.lru_cache(maxsize=1)
def _retriever(spec: RetrieverSpec) -> Retriever:
    """The open version's own, whose weights no other job of this process changes."""
    from daemon.learning.retriever.packing import pack

    retriever = open_retriever(spec)
    if retriever.uses_features:  # its encoder is the same in every version
        pack(retriever.encoder.model)
    return retriever


def _query_vectors(version: OpenVersion, queries: list[str], frozen: Float32) -> Float32:
    """[n, d] what the open version makes of queries."""
    retriever = version.retriever
    return retriever.embed_queries(queries, frozen if retriever.uses_features else None)
