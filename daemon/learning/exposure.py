"""What embeddings expose: the terms of the inversion audit, and the audit as a worker's job.

An operator who may let embeddings leave the site (fed-negatives, PDD-AS2) wants to know
what can be read from them. The audit trains attackers on a part of the site's own
texts, and reports how much of the other part they recover at each level of disclosure
(`inversion`), beside what the level leaves of the negatives' use (`hardness`).

The attackers are thrown away with the worker: no text and no trained value leaves it
but figures, and examples when the operator asks for some. Nothing heavy is imported
before the job runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.learning.spec import RetrieverSpec
from daemon.learning.terms import LearningError
from daemon.workers import report

if TYPE_CHECKING:
    from daemon.learning.inversion import Attacked, Corpus, Dictionary, Found, Kind
    from daemon.learning.models import Retriever
    from daemon.learning.recovered import Recovery
    from daemon.retrieval.library import Library, Passage

Float32 = NDArray[np.float32]
Rows = NDArray[np.int64]

LEAST_PASSAGES = 200
LEAST_SUBJECTS = 20
MOST_LEVELS = 16
MOST_MINUTES = 24 * 60.0
MOST_EXAMPLES = 20
DELTA = 1e-5
_SEED = 0
_SLICE = 256
# To learn from, to choose by and to test on.
_SHARES = (0.65, 0.15, 0.2)
_MOST_PASSAGES = (4000, 400, 400)
_MOST_QUESTIONS = (1000, 400, 400)
_MOST_WORDS, _MOST_NAMES = 12_000, 6_000
_LEAST_QUESTIONS = 20  # fewer to test on say nothing
_EXAMPLE_WORDS = 60


class ExposureError(LearningError):
    """The audit cannot say anything about this site; the message says what it needs."""


@dataclass(frozen=True)
class Level:
    """What is disclosed of an embedding (`crypto.disclosure`).

    ``sigma``: deviation of the noise on a coordinate. ``epsilon``: if the noise was asked
    for by it, at ``DELTA``, for one vector sent once. ``bits``: of the bucket.
    """

    kind: Literal["exact", "noisy", "bucket"]
    sigma: float = 0.0
    epsilon: float = 0.0
    bits: int = 0

    def __str__(self) -> str:
        if self.kind == "noisy":
            by_epsilon = f", epsilon {self.epsilon:g}"
            return f"noisy, sigma {self.sigma:.3g}{by_epsilon if self.epsilon else ''}"
        return f"bucket, {self.bits} bits" if self.kind == "bucket" else "exact"


@dataclass(frozen=True)
class AuditOptions:
    """What the operator asks for: noises and bits besides ``exact``, and time for it all.

    ``noises``: deviations on a coordinate, ``epsilons``: at `DELTA`, what noise is for.
    ``minutes``: for training attackers, all levels together. ``show``: examples a level.
    ``table_noise``: the deviation under which this site sorts its passages into buckets.
    """

    noises: tuple[float, ...] = (0.05, 0.2)
    epsilons: tuple[float, ...] = ()
    bits: tuple[int, ...] = (8, 64)
    minutes: float = 10.0
    show: int = 0
    table_noise: float = 0.05

    @property
    def levels(self) -> list[Level]:
        """Exact first, then by ever less; computes noise, which is a worker's work."""
        from crypto.disclosure import noise_for

        noised = [Level("noisy", sigma) for sigma in set(self.noises)] + [
            Level("noisy", noise_for(epsilon, DELTA), epsilon) for epsilon in set(self.epsilons)
        ]
        return [
            Level("exact"),
            *sorted(noised, key=lambda level: level.sigma),
            *(Level("bucket", bits=bits) for bits in sorted(set(self.bits), reverse=True)),
        ]

    def check(self) -> None:
        """Raise ExposureError for what makes no sense; loads and computes nothing."""
        if not all(math.isfinite(s) and 0.001 <= s <= 100.0 for s in self.noises):
            raise ExposureError("noise has a deviation of 0.001 to 100")
        if not all(math.isfinite(e) and 0.01 <= e <= 1e6 for e in self.epsilons):
            raise ExposureError("an epsilon is 0.01 to 1000000")
        if not all(1 <= bits <= 256 for bits in self.bits):
            raise ExposureError("a bucket has 1 to 256 bits")
        asked = 1 + sum(len(set(some)) for some in (self.noises, self.epsilons, self.bits))
        if asked > MOST_LEVELS:
            raise ExposureError(f"{asked} levels are asked about, {MOST_LEVELS} at most")
        if not 0.0 < self.minutes <= MOST_MINUTES:
            raise ExposureError(f"an audit may take up to {MOST_MINUTES:g} minutes")
        if not 0 <= self.show <= MOST_EXAMPLES:
            raise ExposureError(f"at most {MOST_EXAMPLES} examples are shown")


class ExposureProgress(NamedTuple):
    """Reported while the audit runs: what it is at, and the share that is done."""

    step: str
    fraction: float


@dataclass(frozen=True)
class Share:
    """A measure of the best attacker: shares from 0 to 1, and which attacker it was."""

    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0
    attacker: str = ""


@dataclass(frozen=True)
class TextsExposure:
    """What was recovered of texts of one kind: distinct words, telling words, exact names."""

    words: Share = Share()
    telling: Share = Share()
    names: Share = Share()


@dataclass(frozen=True)
class Example:
    """A text and what was guessed of it; shown only when asked for."""

    text: str
    right_words: tuple[str, ...]
    wrong_words: tuple[str, ...]
    right_names: tuple[str, ...]
    wrong_names: tuple[str, ...]


@dataclass(frozen=True)
class LevelExposure:
    """One level: what passages and questions lose by it, and what negatives keep.

    ``shuffled``: the same guesses held against other passages. ``overlap``: share of
    the exact nearest negatives that are returned; ``cosine``: mean of what is
    returned; ``returned``: mean number. ``cut_short``: the decoder had no time left.
    """

    level: str
    epsilon: float
    sigma: float
    bits: int
    passages: TextsExposure
    questions: TextsExposure
    shuffled: TextsExposure
    overlap: float
    cosine: float
    returned: float
    cut_short: bool
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Exposure:
    """The whole audit. Counts of texts, subjects and items; shares from 0 to 1."""

    passages_known: int
    passages_unseen: int
    questions_known: int
    questions_unseen: int
    subjects_unseen: int
    dictionary_words: int
    dictionary_names: int
    delta: float
    guessing_passages: TextsExposure
    guessing_questions: TextsExposure
    negatives_asked: int
    negatives_wanted: int
    cosine_at_random: float
    levels: tuple[LevelExposure, ...]
    seconds: float
    advice: str = ""


# ---- the job -------------------------------------------------------------------------------


def audit_embeddings(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: AuditOptions,
) -> Exposure:
    """Audit the embeddings of this site's texts under one model version.

    Reports `ExposureProgress`. Raises ExposureError when there is too little to audit,
    VersionError or EncoderError when the version or the encoder cannot be had.
    """
    report(ExposureProgress("texts", 0.0))  # before torch is loaded: people see that it began
    options.check()
    started = time.monotonic()
    found = embedded_texts(spec, library_path, versions, model_digest)
    texts, vectors, queries, retriever = found
    seed = model_digest  # of the projections: public, as it is between sites
    return audit_vectors(texts, vectors, queries, retriever, seed, options, started)


def embedded_texts(
    spec: RetrieverSpec, library_path: Path, versions: Path, model_digest: bytes
) -> tuple[Divided, Float32, Float32, Retriever]:
    """A site's texts, their embeddings under a version (passages [n, d], queries [q, d])."""
    from daemon.learning.jobs import load_serving
    from daemon.learning.models import open_retriever
    from daemon.retrieval.library import Library

    with Library.open(library_path, read_only=True) as library:
        texts = _divided(library)
        retriever = open_retriever(spec)
        load_serving(spec, retriever, versions, model_digest)
        vectors = _passage_vectors(library, retriever, texts.passages)
        return texts, vectors, _query_vectors(library, retriever, texts.queries), retriever


@dataclass(frozen=True)
class Divided:
    """A site's texts, and in which of the three parts each is; -1: in none.

    ``right``: of each query the rows of its answer's passages.
    """

    passages: Sequence[Passage]
    passage_part: Rows
    queries: Sequence[str]
    query_part: Rows
    right: Sequence[Rows]
    subjects_unseen: int


def audit_vectors(
    texts: Divided,
    vectors: Float32,
    queries: Float32,
    retriever: Retriever,
    seed: bytes,
    options: AuditOptions,
    started: float,
) -> Exposure:
    """The audit of texts that are embedded already: passages [n, d], queries [q, d]."""
    from daemon.learning import hardness, inversion

    material = _material(texts, np.concatenate([vectors, queries]), retriever)
    guessed = inversion.guessing(material.train, material.kinds, material.dictionary)
    asked = hardness.Asked.of(queries, vectors, texts.right, seed=_SEED)
    levels = []
    for place, level in enumerate(options.levels):
        before, each = 0.1 + 0.9 * place / len(options.levels), 0.9 / len(options.levels)
        left = options.minutes * 60.0 - (time.monotonic() - started)
        report(ExposureProgress(str(level), before))
        found, cut_short = inversion.attack(
            material.train,
            material.kinds,
            material.dictionary,
            disclosure_of(level, vectors.shape[1], seed),
            seed=_SEED,
            deadline=time.monotonic() + max(0.0, left) / (len(options.levels) - place),
            report=_epochs(str(level), before, each),
        )
        kept = hardness.kept(asked, level, seed, options.table_noise)
        examples = _examples(material, found["passages"], options.show)
        levels.append(_level_exposure(level, found, kept, cut_short, examples))
    kinds = material.kinds
    done = Exposure(
        passages_known=material.passages_known,
        passages_unseen=len(kinds["passages"].test),
        questions_known=len(material.train) - material.passages_known,
        questions_unseen=len(kinds["questions"].test) if "questions" in kinds else 0,
        subjects_unseen=texts.subjects_unseen,
        dictionary_words=len(material.dictionary.words),
        dictionary_names=len(material.dictionary.names),
        delta=DELTA,
        guessing_passages=_texts_exposure(guessed.get("passages")),
        guessing_questions=_texts_exposure(guessed.get("questions")),
        negatives_asked=len(asked),
        negatives_wanted=hardness.WANTED,
        cosine_at_random=hardness.at_random(asked),
        levels=tuple(levels),
        seconds=time.monotonic() - started,
    )
    return replace(done, advice=advice(done))


@dataclass(frozen=True)
class Material:
    """What attackers are trained on, and by kind what they are chosen by and tested on.

    ``shown``: the passages of the test, as the encoder read them.
    """

    train: Corpus
    kinds: dict[str, Kind]
    dictionary: Dictionary
    passages_known: int
    shown: Sequence[str]


def _material(texts: Divided, vectors: Float32, retriever: Retriever) -> Material:
    """``vectors`` [passages + queries, d]: of the passages first."""
    from daemon.learning import inversion
    from daemon.learning.recovered import names, words

    read = [passage.embedding_text for passage in texts.passages]
    of_words = [words(text) for text in [*read, *texts.queries]]
    of_names = [names(p.text, p.title) for p in texts.passages] + [names(q) for q in texts.queries]
    dictionary = _dictionary(retriever, of_words, of_names)
    rows = {
        "passages": _drawn(texts.passage_part, _MOST_PASSAGES, 0),
        "questions": _drawn(texts.query_part, _MOST_QUESTIONS, len(read)),
    }

    def corpus(some: Rows) -> Corpus:
        return inversion.Corpus.of(
            vectors[some],
            [of_words[row] for row in some],
            [of_names[row] for row in some],
            dictionary,
        )

    return Material(
        train=corpus(np.concatenate([rows["passages"][0], rows["questions"][0]])),
        kinds={
            kind: inversion.Kind(corpus(parts[1]), corpus(parts[2]))
            for kind, parts in rows.items()
            if kind == "passages" or min(len(parts[1]), len(parts[2])) >= _LEAST_QUESTIONS
        },
        dictionary=dictionary,
        passages_known=len(rows["passages"][0]),
        shown=[read[row] for row in rows["passages"][2]],
    )


def disclosure_of(level: Level, dimension: int, seed: bytes) -> Callable[[Float32], Float32]:
    """What the attacker sees of embeddings [n, d]: [n, d], or of a bucket its signs [n, bits].

    Noise is drawn from a seed of the audit's own, anew in each call: what is noised
    here leaves nothing but figures, and an audit can be repeated.
    """
    from crypto.disclosure import Projections, noisy

    chance = np.random.Generator(np.random.SFC64(_SEED))
    if level.kind == "noisy":
        sigma = level.sigma
        return lambda vectors: noisy(vectors, sigma, chance)
    if level.kind == "bucket":
        projections = Projections(seed, dimension, level.bits)
        return lambda vectors: signs(projections.buckets(vectors), level.bits)
    return lambda vectors: vectors


def signs(names: NDArray[np.uint8], bits: int) -> Float32:
    """Names of buckets as rows of length 1: +-1 / sqrt(bits) for each bit."""
    unpacked = np.unpackbits(names, axis=1, count=bits, bitorder="little")
    return (2.0 * unpacked.astype(np.float32) - 1.0) / np.float32(math.sqrt(bits))


def _epochs(step: str, before: float, each: float) -> Callable[[int], None]:
    return lambda epoch: report(ExposureProgress(step, before + each * (1.0 - 0.85**epoch)))


# ---- which texts the attacker knows ----------------------------------------------------------


def _divided(library: Library) -> Divided:
    """Passages by subject (the document's title): a subject is known to the attacker or not."""
    from daemon.learning.evaluation import answer_of

    passages = library.passages()
    subject_of = [
        passage.title.casefold().strip() or answer_of(passage.document_id) for passage in passages
    ]
    subjects = sorted(set(subject_of))
    if len(passages) < LEAST_PASSAGES or len(subjects) < LEAST_SUBJECTS:
        raise ExposureError(
            f"{len(passages)} passages on {len(subjects)} subjects are too few to train and test "
            f"an attacker on: an audit needs {LEAST_PASSAGES} passages on {LEAST_SUBJECTS} "
            "subjects (documents of different titles); ingest more"
        )
    part_of = _parts(subjects, subject_of)
    passage_part = np.array([part_of[subject] for subject in subject_of], dtype=np.int64)
    rows_of: dict[str, list[int]] = {}
    for row, passage in enumerate(passages):
        rows_of.setdefault(passage.document_id, []).append(row)
    queries, query_part, right = [], [], []
    for pair in (pair for split in ("train", "valid", "test") for pair in library.pairs(split)):
        rows = np.array(
            sorted({row for document in pair.positives for row in rows_of.get(document, ())}),
            dtype=np.int64,
        )
        parts = set(passage_part[rows].tolist())
        if len(rows) and len(parts) == 1:  # else it is known and unseen at once
            queries.append(pair.query)
            query_part.append(parts.pop())
            right.append(rows)
    unseen = {subject for subject in subjects if part_of[subject] == 2}
    return Divided(
        passages, passage_part, queries, np.array(query_part, dtype=np.int64), right, len(unseen)
    )


def _parts(subjects: Sequence[str], subject_of: Sequence[str]) -> dict[str, int]:
    """Each subject's part, so that the parts' sizes are near their shares of the passages."""
    sizes = dict.fromkeys(subjects, 0)
    for subject in subject_of:
        sizes[subject] += 1
    chance = np.random.Generator(np.random.SFC64(_SEED))
    filled = np.zeros(len(_SHARES))
    part_of = {}
    for place in chance.permutation(len(subjects)):
        part = int(np.argmin(filled / np.array(_SHARES)))
        part_of[subjects[place]] = part
        filled[part] += sizes[subjects[place]]
    return part_of


def _drawn(part: Rows, most_of: Sequence[int], offset: int) -> list[Rows]:
    """Rows of each part, at most so many, drawn; ``offset``: of the first row."""
    chance = np.random.Generator(np.random.SFC64(_SEED))
    drawn = []
    for number, most in enumerate(most_of):
        rows = chance.permutation(np.flatnonzero(part == number))[:most]
        drawn.append(rows.astype(np.int64) + offset)
    return drawn


def _dictionary(
    retriever: Retriever, words: Iterable[frozenset[str]], names: Iterable[frozenset[str]]
) -> Dictionary:
    """The commonest words and names of the site, with their embeddings."""
    from daemon.learning.inversion import Dictionary

    items = [_commonest(words, _MOST_WORDS), _commonest(names, _MOST_NAMES)]
    together = [*items[0], *items[1]]
    report(ExposureProgress("dictionary", 0.0))
    parts = []
    for start in range(0, len(together), _SLICE):
        parts.append(retriever.embed_passages(together[start : start + _SLICE]))
        report(ExposureProgress("dictionary", 0.1 * (start + len(parts[-1])) / len(together)))
    return Dictionary(items[0], items[1], np.concatenate(parts))


def _commonest(bags: Iterable[frozenset[str]], most: int) -> list[str]:
    counts: dict[str, int] = {}
    for bag in bags:
        for item in bag:
            counts[item] = counts.get(item, 0) + 1
    return sorted(sorted(counts, key=lambda item: (-counts[item], item))[:most])


def _passage_vectors(
    library: Library, retriever: Retriever, passages: Sequence[Passage]
) -> Float32:
    """[n, d] as the version embeds them."""
    if not retriever.uses_features:
        return retriever.embed_passages([passage.embedding_text for passage in passages])
    labels, features = library.features(retriever.encoder.digest)
    if len(labels) != len(passages):
        raise ExposureError(
            f"{len(passages) - len(labels)} of {len(passages)} passages are not embedded yet: "
            "wait until `fedctl ingest` has ended"
        )
    return retriever.embed_passages([], features)


def _query_vectors(library: Library, retriever: Retriever, queries: Sequence[str]) -> Float32:
    """[q, d] as the version embeds them; what has no cached features is encoded."""
    if not queries:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    if not retriever.uses_features:
        return retriever.embed_queries(queries)
    known = library.query_features(retriever.encoder.digest, queries)
    missing = [query for query in dict.fromkeys(queries) if query not in known]
    known |= dict(zip(missing, retriever.encoder.encode(missing), strict=True)) if missing else {}
    return retriever.embed_queries([], np.stack([known[query] for query in queries]))


# ---- figures -----------------------------------------------------------------------------------


def _share(found: Found | Recovery, attacker: str = "") -> Share:
    return Share(found.f1, found.precision, found.recall, getattr(found, "attacker", attacker))


def _texts_exposure(attacked: Attacked | None) -> TextsExposure:
    if attacked is None:
        return TextsExposure()
    return TextsExposure(_share(attacked.words), _share(attacked.telling), _share(attacked.names))


def _level_exposure(
    level: Level,
    found: dict[str, Attacked],
    kept: tuple[float, float, float],
    cut_short: bool,
    examples: tuple[Example, ...],
) -> LevelExposure:
    of_passages = found["passages"]
    overlap, cosine, returned = kept
    return LevelExposure(
        level=str(level),
        epsilon=level.epsilon,
        sigma=level.sigma,
        bits=level.bits,
        passages=_texts_exposure(of_passages),
        questions=_texts_exposure(found.get("questions")),
        shuffled=TextsExposure(
            _share(of_passages.shuffled_words, of_passages.words.attacker),
            _share(of_passages.shuffled_telling, of_passages.telling.attacker),
            _share(of_passages.shuffled_names, of_passages.names.attacker),
        ),
        overlap=overlap,
        cosine=cosine,
        returned=returned,
        cut_short=cut_short,
        examples=examples,
    )


def _examples(material: Material, found: Attacked, count: int) -> tuple[Example, ...]:
    corpus = material.kinds["passages"].test
    made = []
    for text, words, names, (some, called) in zip(
        material.shown[:count],
        corpus.words[:count],
        corpus.names[:count],
        found.guessed[:count],
        strict=True,
    ):
        made.append(
            Example(
                text,
                tuple(sorted(some & words)[:_EXAMPLE_WORDS]),
                tuple(sorted(some - words)[:_EXAMPLE_WORDS]),
                tuple(sorted(called & names)[:_EXAMPLE_WORDS]),
                tuple(sorted(called - names)[:_EXAMPLE_WORDS]),
            )
        )
    return tuple(made)


def near_guessing(level: LevelExposure, exposure: Exposure) -> bool:
    """Whether a level tells hardly more than guessing does.

    By F1 of telling words at most a tenth of what exact embeddings tell beyond guessing,
    and by F1 of names at most 0.01. Of passages and of questions; of a bucket of
    questions only, if there are any: a passage never leaves as a bucket's name.
    """
    kinds = [("passages", exposure.guessing_passages), ("questions", exposure.guessing_questions)]
    if not exposure.questions_unseen:
        kinds = kinds[:1]
    elif level.bits:
        kinds = kinds[1:]
    for kind, control in kinds:
        of_level: TextsExposure = getattr(level, kind)
        of_exact: TextsExposure = getattr(exposure.levels[0], kind)
        gained = of_level.telling.f1 - control.telling.f1
        if gained > 0.1 * max(0.0, of_exact.telling.f1 - control.telling.f1):
            return False
        if of_level.names.f1 - control.names.f1 > 0.01:
            return False
    return True


def advice(exposure: Exposure) -> str:
    """What the figures say, in sentences that help to decide."""
    exact = exposure.levels[0]
    told = [("passages", exact.passages, exposure.guessing_passages)]
    if exposure.questions_unseen:
        told.append(("questions", exact.questions, exposure.guessing_questions))
    shares = " and ".join(
        f"{_percent(texts.names.recall)} of the names in unseen {kind} "
        f"({_percent(texts.names.precision)} of what it says is right; guessing: "
        f"{_percent(control.names.recall)}, {_percent(control.names.precision)})"
        for kind, texts, control in told
    )
    said = [f"From exact embeddings this attacker names {shares}, exactly."]
    near = [level for level in exposure.levels if near_guessing(level, exposure)]
    if near and near[0] is exact:
        said.append("That is hardly more than guessing; ask again with more texts or more minutes.")
    elif near:
        best = max(near, key=lambda level: (level.cosine, level.overlap))
        only = " (of questions; the passages that answer leave under noise)" if best.bits else ""
        said.append(
            f"Of the levels that tell hardly more than guessing, '{best.level}'{only} keeps most "
            f"of the negatives' use: {100 * best.overlap:.0f} % of the exact nearest, cosine "
            f"{best.cosine:.2f} (exact {exact.cosine:.2f}, at random "
            f"{exposure.cosine_at_random:.2f})."
        )
    else:
        said.append(
            "Every level asked about tells more than guessing does: answer at them only peers "
            "that may know what these texts are about."
        )
    said.append(
        "It is a lower bound: more texts, more time or a better method recover more, and what is "
        "sent again under fresh noise is better known each time."
    )
    return " ".join(said)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
