"""The inversion audit: attackers learn from a part of a site's texts, and are tested on the rest.

An operator who may let embeddings leave the site (fed-negatives, PDD-AS2) wants to know
what can be read from them. The audit trains attackers on a part of the site's own
texts, and reports how much of the other part they recover at each level of disclosure
(`attackers`), beside what the level leaves of the negatives' use (`negative_utility`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows, UInt8
from crypto.disclosure import Projections, noisy
from daemon.inversion import attackers, negative_utility, text_recovery
from daemon.inversion.attackers import Attacked, BestRecovery, Dictionary, EmbeddedTexts, TextKind
from daemon.inversion.exposure import (
    DELTA,
    AuditOptions,
    ExposedText,
    Exposure,
    ExposureError,
    ExposureProgress,
    Level,
    LevelExposure,
    Share,
    TextsExposure,
    advice,
)
from daemon.inversion.text_recovery import Recovery
from daemon.library.readers.documents import answer_of
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.library.contents import Passage
    from daemon.library.store import Library

LEAST_PASSAGES = 200
LEAST_SUBJECTS = 20
_SEED = 0
_SLICE = 256
# To learn from, to choose by and to test on.
_SHARES = (0.65, 0.15, 0.2)
_MOST_PASSAGES = (4000, 400, 400)
_MOST_QUESTIONS = (1000, 400, 400)
_MOST_WORDS, _MOST_NAMES = 12_000, 6_000
_LEAST_QUESTIONS = 20  # fewer to test on say nothing
_EXAMPLE_WORDS = 60


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
    material = _material(texts, np.concatenate([vectors, queries]), retriever)
    guessed = attackers.guessing(material.train, material.kinds, material.dictionary)
    questions = negative_utility.AuditQuestions.of(queries, vectors, texts.right, seed=_SEED)
    levels = []
    for place, level in enumerate(options.levels):
        before, each = 0.1 + 0.9 * place / len(options.levels), 0.9 / len(options.levels)
        left = options.minutes * 60.0 - (time.monotonic() - started)
        report(ExposureProgress(str(level), before))
        results, cut_short = attackers.attack(
            material.train,
            material.kinds,
            material.dictionary,
            disclosure_of(level, vectors.shape[1], seed),
            seed=_SEED,
            deadline=time.monotonic() + max(0.0, left) / (len(options.levels) - place),
            report=_epochs(str(level), before, each),
        )
        utility = negative_utility.utility_of(questions, level, seed, options.table_noise)
        examples = _examples(material, results["passages"], options.show)
        levels.append(_level_exposure(level, results, utility, cut_short, examples))
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
        negatives_asked=len(questions),
        negatives_wanted=negative_utility.WANTED,
        cosine_at_random=negative_utility.at_random(questions),
        levels=tuple(levels),
        seconds=time.monotonic() - started,
    )
    return replace(done, advice=advice(done))


@dataclass(frozen=True)
class Material:
    """What attackers are trained on, and by kind what they are chosen by and tested on.

    ``shown``: the passages of the test, as the encoder read them.
    """

    train: EmbeddedTexts
    kinds: dict[str, TextKind]
    dictionary: Dictionary
    passages_known: int
    shown: Sequence[str]


def _material(texts: Divided, vectors: Float32, retriever: Retriever) -> Material:
    """``vectors`` [passages + queries, d]: of the passages first."""

    read = [passage.embedding_text for passage in texts.passages]
    of_words = [text_recovery.words(text) for text in [*read, *texts.queries]]
    of_names = [
        *(text_recovery.names(passage.text, passage.title) for passage in texts.passages),
        *(text_recovery.names(query) for query in texts.queries),
    ]
    dictionary = _dictionary(retriever, of_words, of_names)
    rows = {
        "passages": _drawn(texts.passage_part, _MOST_PASSAGES, 0),
        "questions": _drawn(texts.query_part, _MOST_QUESTIONS, len(read)),
    }

    def corpus(some: Rows) -> EmbeddedTexts:
        return attackers.EmbeddedTexts.of(
            vectors[some],
            [of_words[row] for row in some],
            [of_names[row] for row in some],
            dictionary,
        )

    return Material(
        train=corpus(np.concatenate([rows["passages"][0], rows["questions"][0]])),
        kinds={
            kind: attackers.TextKind(corpus(parts[1]), corpus(parts[2]))
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
    chance = np.random.Generator(np.random.SFC64(_SEED))
    if level.kind == "noisy":
        sigma = level.sigma
        return lambda vectors: noisy(vectors, sigma, chance)
    if level.kind == "bucket":
        projections = Projections(seed, dimension, level.bits)
        return lambda vectors: signs(projections.buckets(vectors), level.bits)
    return lambda vectors: vectors


def signs(names: UInt8, bits: int) -> Float32:
    """Names of buckets as rows of length 1: +-1 / sqrt(bits) for each bit."""
    unpacked = np.unpackbits(names, axis=1, count=bits, bitorder="little")
    return (2.0 * unpacked.astype(np.float32) - 1.0) / np.float32(math.sqrt(bits))


def _epochs(step: str, before: float, each: float) -> Callable[[int], None]:
    return lambda epoch: report(ExposureProgress(step, before + each * (1.0 - 0.85**epoch)))


# ---- which texts the attacker knows ----------------------------------------------------------


def divided(library: Library) -> Divided:
    """Passages by subject (the document's title): a subject is known to the attacker or not."""
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


# ---- figures -----------------------------------------------------------------------------------


def _share(result: BestRecovery | Recovery, attacker: str = "") -> Share:
    return Share(result.f1, result.precision, result.recall, getattr(result, "attacker", attacker))


def _texts_exposure(attacked: Attacked | None) -> TextsExposure:
    if attacked is None:
        return TextsExposure()
    return TextsExposure(_share(attacked.words), _share(attacked.telling), _share(attacked.names))


def _level_exposure(
    level: Level,
    results: dict[str, Attacked],
    utility: tuple[float, float, float],
    cut_short: bool,
    examples: tuple[ExposedText, ...],
) -> LevelExposure:
    of_passages = results["passages"]
    overlap, cosine, returned = utility
    return LevelExposure(
        level=str(level),
        epsilon=level.epsilon,
        sigma=level.sigma,
        bits=level.bits,
        passages=_texts_exposure(of_passages),
        questions=_texts_exposure(results.get("questions")),
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


def _examples(material: Material, result: Attacked, count: int) -> tuple[ExposedText, ...]:
    corpus = material.kinds["passages"].test
    made = []
    for text, words, names, (some, called) in zip(
        material.shown[:count],
        corpus.words[:count],
        corpus.names[:count],
        result.guessed[:count],
        strict=True,
    ):
        made.append(
            ExposedText(
                text,
                tuple(sorted(some & words)[:_EXAMPLE_WORDS]),
                tuple(sorted(some - words)[:_EXAMPLE_WORDS]),
                tuple(sorted(called & names)[:_EXAMPLE_WORDS]),
                tuple(sorted(called - names)[:_EXAMPLE_WORDS]),
            )
        )
    return tuple(made)
