"""DATE's depth controller: which tier a site's personal layer has, and when that changes.

Numbers in, decisions out (a score reads the texts first); one function a formula, with its
number in pFedRAG (sections 4.1 and 4.2, appendix B.1). Time is counted in rounds that the site
trained in. Where a formula is not defined, its function says what is done.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, pairwise
from typing import TYPE_CHECKING, Any

from config.recipes import DepthOptions
from daemon.learning.options import DepthReport

if TYPE_CHECKING:
    from daemon.library.store import Library

TIERS = ("base", "advanced", "extended")

_SIZE_WEIGHT = 0.8  # w_1 of Eq. 3, as Table 8 has it; so the next two
_WORDS_WEIGHT = 1.5  # w_2
_PERPLEXITY_WEIGHT = 1.2  # w_3
_LENGTH_SHARE = 0.5  # alpha; the paper names no value
_VARIETY_SHARE = 0.5  # beta
_THIRDS = (0.33, 0.67)
_STEADY = 2.0  # what Eq. 10 gives when the second window gains as much as the first
_BAND = 0.1  # of the mean's size (Eq. 14)
_NOTHING = 1e-9  # a change below it is rounding

_WORD = re.compile(r"\w+")
_MOST_WORDS = 300_000  # of the corpus are read: a second, and enough for all four
_MOST_DOCUMENTS = 1e6  # a size of 1
_LONGEST = 1e4  # words a document: a length of 1
_HIGHEST = 1e5  # a perplexity of 1
_STRETCH = 1000  # words over which types are counted: a ratio depends on the length
_BIGRAM, _UNIGRAM, _EVEN = 0.5, 0.4, 0.1  # weights of the interpolation
_HELD_OUT = 5  # every fifth document


# ---- the initial depth assigner ---------------------------------------------------


@dataclass(frozen=True)
class CorpusStatistics:
    """What Eq. 3 asks of a site's documents, each on a scale of about 0 to 1.

    ``size`` D_i, ``length`` L_avg, ``variety`` TTR_norm, ``perplexity`` PPL_i; see
    `measure` for the scales.
    """

    size: float
    length: float
    variety: float
    perplexity: float


def complexity_score(measured: CorpusStatistics) -> float:
    """S_i = w_1 D_i + w_2 (alpha L_avg + beta TTR_norm) + w_3 PPL_i (Eq. 3)."""
    words = _LENGTH_SHARE * measured.length + _VARIETY_SHARE * measured.variety
    return (
        _SIZE_WEIGHT * measured.size
        + _WORDS_WEIGHT * words
        + _PERPLEXITY_WEIGHT * measured.perplexity
    )


def corpus_score(library: Library) -> float:
    """S_i of a site's documents that may be learned from: all that other sites need of them."""
    passages = library.passages(split="train")
    of_document = groupby(passages, key=lambda passage: passage.document_id)
    texts = [" ".join(passage.text for passage in group) for _, group in of_document]
    return complexity_score(measure(texts))


def normalised_score(score: float, low: float, high: float) -> float:
    """S_norm in 0 .. 1: where the score lies among the sites' (min-max, section 4.2).

    0 where all sites score alike: nobody's data asks for more than the base.
    """
    if high - low <= _NOTHING:
        return 0.0
    return min(max((score - low) / (high - low), 0.0), 1.0)


def initial_tier(normalised: float) -> str:
    """Base up to 0.33, advanced up to 0.67, extended above (Eq. 5, its 0 included)."""
    return TIERS[sum(normalised > third for third in _THIRDS)]


# ---- how complex a site's documents are ---------------------------------------------
#
# The four numbers that Eq. 3 adds up. The paper leaves scales open and has no
# perplexity without a language model. Here each number is brought to about 0 .. 1, and
# the perplexity is that of a bigram model of the site's own text, interpolated as by its
# source (Jelinek and Mercer 1980): counted on four fifths of the documents, measured on
# the fifth.


def measure(documents: Sequence[str]) -> CorpusStatistics:
    """The statistics of a site's documents (their whole texts); zeros where there are none."""
    words: list[list[str]] = []
    total = 0
    for document in documents:
        words.append(_WORD.findall(document.lower()))
        total += len(words[-1])
        if total >= _MOST_WORDS:
            break
    if total == 0:
        return CorpusStatistics(0.0, 0.0, 0.0, 0.0)
    return CorpusStatistics(
        size=_logarithmic(len(documents), _MOST_DOCUMENTS),
        length=_logarithmic(total / len(words), _LONGEST),
        variety=type_token_ratio([word for text in words for word in text]),
        perplexity=_logarithmic(perplexity(words), _HIGHEST),
    )


def type_token_ratio(words: Sequence[str]) -> float:
    """Mean share of different words in stretches of 1,000 (the last, shorter one left out).

    A text shorter than that is one stretch.
    """
    starts = range(0, max(1, len(words) - _STRETCH + 1), _STRETCH)
    parts = [words[start : start + _STRETCH] for start in starts]
    return sum(len(set(part)) / len(part) for part in parts) / len(parts)


def perplexity(documents: Sequence[Sequence[str]]) -> float:
    """Of every fifth document, by a bigram model of the others; 1 where nothing is left to ask.

    p(w | v) = 0.5 n(v w) / n(v) + 0.4 n(w) / n + 0.1 / (V + 1), and where v was
    never seen the first weight goes to the second term.
    """
    known = [text for place, text in enumerate(documents) if place % _HELD_OUT]
    test_set = list(islice(documents, 0, None, _HELD_OUT))
    if not known:
        return 1.0
    single = Counter(word for text in known for word in text)
    double = Counter(two for text in known for two in pairwise(text))
    first = Counter(word for text in known for word in text[:-1])
    total = max(single.total(), 1)
    even = 1.0 / (len(single) + 1)
    nats, count = 0.0, 0
    for text in test_set:
        for before, word in pairwise(text):
            chance = _EVEN * even
            if first[before]:
                chance += _BIGRAM * double[before, word] / first[before]
                chance += _UNIGRAM * single[word] / total
            else:
                chance += (_BIGRAM + _UNIGRAM) * single[word] / total
            nats -= math.log(chance)
            count += 1
    return math.exp(nats / count) if count else 1.0


def _logarithmic(value: float, one: float) -> float:
    """0 at 0, 1 at ``one`` and above, in orders of magnitude between."""
    return min(1.0, math.log1p(value) / math.log1p(one))


# ---- the dynamic depth scheduler ---------------------------------------------------


def window_gain(before: float, middle: float, now: float) -> float:
    """(before - now) / |before - middle|: the gain of two windows, in gains of the first.

    Eq. 10 has no bars: there a loss that rose first and fell since would count as
    losing momentum. Where the first window changed nothing, what came after it
    decides: twice the steady gain, its negative, or 0.
    """
    first, both = before - middle, before - now
    if abs(first) <= _NOTHING:
        return 0.0 if abs(both) <= _NOTHING else math.copysign(2 * _STEADY, both)
    return both / abs(first)


def momentum(losses: Sequence[float], window: int) -> float | None:
    """Delta L_t from the losses up to now (Eq. 10); None before round 2 T_w + 1."""
    if len(losses) < 2 * window + 1:
        return None
    return window_gain(losses[-1 - 2 * window], losses[-1 - window], losses[-1])


def overfitting(train: Sequence[float], held_out: Sequence[float], window: int) -> float | None:
    """O_t = max(0, gain of recall in training - gain held out) (Eq. 11); None as `momentum`.

    Recalls up to now; 0 where nothing is held out (``held_out`` is empty).
    """
    # A recall is better when it is greater, a loss when it is smaller: hence the signs.
    ours = momentum([-recall for recall in train], window)
    theirs = momentum([-recall for recall in held_out], window)
    if ours is None:
        return None
    return 0.0 if theirs is None else max(0.0, ours - theirs)


def normalised_momentum(value: float) -> float:
    """Delta L^norm in -1 .. 1: 1 is the steady gain or more (the paper names no scale)."""
    return min(max(value / _STEADY, -1.0), 1.0)


def normalised_overfitting(value: float) -> float:
    """O^norm in 0 .. 1, on the scale of `normalised_momentum`."""
    return min(max(value / _STEADY, 0.0), 1.0)


def adaptation_index(gain: float, penalty: float, momentum_weight: float) -> float:
    """API_t = w_L Delta L^norm - w_O O^norm, with w_O = 1 - w_L (Eq. 4)."""
    return momentum_weight * gain - (1.0 - momentum_weight) * penalty


def mean_index(indices: Sequence[float], window: int) -> float:
    """mu_t, the mean of the last T_w indices, the present one among them (Eq. 12)."""
    return statistics.fmean(indices[-window:])


def deviation(indices: Sequence[float], window: int) -> float:
    """sigma_t, their standard deviation, of the population (Eq. 13)."""
    return statistics.pstdev(indices[-window:])


def half_band(mean: float, sigma: float) -> float:
    """delta_t = min(sigma_t, 0.1 |mu_t|) (Eq. 14)."""
    return min(sigma, _BAND * abs(mean))


def upper_threshold(mean: float, half: float) -> float:
    """T_up = mu_t + delta_t (Eq. 15)."""
    return mean + half


def lower_threshold(mean: float, half: float) -> float:
    """T_down = mu_t - delta_t (Eq. 16)."""
    return mean - half


def count(index: float, upper: float, lower: float, counters: tuple[int, int]) -> tuple[int, int]:
    """(c_s, c_l) after this round: rounds in a row above the band, and below it (Eq. 17)."""
    above, below = counters
    if index > upper:
        return above + 1, 0
    if index < lower:
        return 0, below + 1
    return 0, 0


def decide(counters: tuple[int, int], tier: str, options: DepthOptions) -> str:
    """Upgrade, downgrade or none (Eq. 6)."""
    above, below = counters
    if above >= options.stable_rounds and tier != TIERS[-1]:
        return "upgrade"
    if below >= options.low_rounds and tier != TIERS[0]:
        return "downgrade"
    return "none"


def after(decision: str, tier: str) -> str:
    """The tier that a decision leads to."""
    return TIERS[TIERS.index(tier) + {"upgrade": 1, "downgrade": -1, "none": 0}[decision]]


@dataclass(frozen=True)
class DepthState:
    """What the scheduler remembers: histories, oldest first, counters, rounds left to cool."""

    tier: str
    losses: tuple[float, ...] = ()
    recalls: tuple[float, ...] = ()
    held_out: tuple[float, ...] = ()
    indices: tuple[float, ...] = ()
    counters: tuple[int, int] = (0, 0)
    cooling: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DepthState:
        """From plain values, as `to_json` gave them and JSON brought them back."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)


def observe(
    state: DepthState,
    loss: float,
    recall: float,
    held_out: float | None,
    options: DepthOptions,
) -> tuple[DepthState, DepthReport]:
    """One round's end (Algorithm 1, lines 5 to 13): the state after it, and what to do.

    ``loss``: of the last local epoch; ``recall`` and ``held_out``: Recall@k on training
    pairs and on pairs held out, None where there are none. While the scheduler
    cools it goes on watching and counting, and changes nothing. After a change the
    counters begin anew: they spoke of the tier before.
    """
    window, memory = options.window, 2 * options.window + 1
    state = replace(
        state,
        losses=(*state.losses, loss)[-memory:],
        recalls=(*state.recalls, recall)[-memory:],
        held_out=() if held_out is None else (*state.held_out, held_out)[-memory:],
    )
    gain = momentum(state.losses, window)
    penalty = overfitting(state.recalls, state.held_out, window)
    cooling = max(0, state.cooling - 1)
    if gain is None or penalty is None:
        seen = f"round {len(state.losses)} of {memory} before the scheduler can judge"
        report = DepthReport(state.tier, "none", None, seen)
        return replace(state, cooling=cooling), report

    index = adaptation_index(
        normalised_momentum(gain), normalised_overfitting(penalty), options.momentum_weight
    )
    indices = (*state.indices, index)[-window:]
    counters, decision = state.counters, "none"
    said = f"API {index:+.3f}"
    if len(indices) >= window:
        mean = mean_index(indices, window)
        half = half_band(mean, deviation(indices, window))
        upper, lower = upper_threshold(mean, half), lower_threshold(mean, half)
        counters = count(index, upper, lower, counters)
        said += (
            f" against a band of {lower:+.3f} to {upper:+.3f}: {counters[0]} rounds above, "
            f"{counters[1]} below"
        )
        decision = decide(counters, state.tier, options)
    if decision != "none" and state.cooling > 0:
        said += f"; {decision} put off, cooling for {state.cooling} rounds more"
        decision = "none"
    tier = after(decision, state.tier)
    if decision != "none":
        counters, cooling = (0, 0), options.cooling_rounds
        said += f"; {decision} from {state.tier} to {tier}"
    advanced = replace(state, tier=tier, indices=indices, counters=counters, cooling=cooling)
    return advanced, DepthReport(tier, decision, index, said)
