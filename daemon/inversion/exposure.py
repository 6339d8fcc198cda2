"""What embeddings expose: what an audit is asked, and the figures and advice it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from daemon.learning.options import LearningError

MOST_LEVELS = 16
DELTA = 1e-5


class ExposureError(LearningError):
    """The audit cannot say anything about this site; the message says what it needs."""


@dataclass(frozen=True)
class Level:
    """What is disclosed of an embedding (`crypto.disclosure`).

    ``sigma``: deviation of the noise on a coordinate. ``epsilon``: if the noise was asked
    for by it, at ``DELTA``, for one vector sent once. ``bits``: of the bucket.
    """

    kind: str  # as in proto/federation.proto
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
        """Raise ExposureError for too many levels; loads and computes nothing."""
        levels = 1 + sum(len(set(some)) for some in (self.noises, self.epsilons, self.bits))
        if levels > MOST_LEVELS:
            raise ExposureError(f"{levels} levels are asked about, {MOST_LEVELS} at most")


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
class ExposedText:
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
    examples: tuple[ExposedText, ...] = ()


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
    kinds = [("passages", exact.passages, exposure.guessing_passages)]
    if exposure.questions_unseen:
        kinds.append(("questions", exact.questions, exposure.guessing_questions))
    shares = " and ".join(
        f"{_percent(texts.names.recall)} of the names in unseen {kind} "
        f"({_percent(texts.names.precision)} of what it says is right; guessing: "
        f"{_percent(control.names.recall)}, {_percent(control.names.precision)})"
        for kind, texts, control in kinds
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
