"""Attackers that read texts out of embeddings, trained on the texts of one site.

The attacker knows the encoder, the level of disclosure and its noise; it holds texts of
the same kind (here: the site's own, of other subjects) and a dictionary of the field:
every word and name of the site, without a word of which text has which, in the place of
the public ones. Three attackers, from the bluntest to the finest:

- *neighbours*: what stands in the nearest texts that the attacker holds;
- *dictionary*: the items whose own embedding, by the same encoder, is nearest;
- *decoder*: a multi-label classifier over the dictionary, trained on disclosures of the
  same level. An item's weights are a map of its own embedding, which serves for items
  that no text of the attacker's has, plus weights of its own.

and one that sees nothing, *guessing* the commonest items, to compare with. All score
each item for each text; what scores above a threshold is the guess. Attacker and
threshold are chosen on texts that are neither trained nor tested on.

It is a lower bound of what can be recovered. Who has more texts, days instead of
minutes, or writes whole sentences and encodes them again, recovers more: Morris et al.,
"Text Embeddings Reveal (Almost) As Much As Text" (EMNLP 2023), recover 92 % of
32-token texts exactly.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from crypto.arrays import Float32, Rows
from daemon.inversion.text_recovery import Recovery, mean_recovery, pooled_recovery

Mask = NDArray[np.bool_]
Disclose = Callable[[Float32], Float32]  # embeddings [n, d] -> what the attacker sees [n, c]

_BATCH = 64
_LEARNING_RATE = 1e-3
_HIDDEN = 512
_PATIENCE = 5  # epochs without a better loss on the texts to choose by
_BETTER = 1e-3
_DROP_OWN = 0.3  # share of the items whose own weights are left out in a step
_NEIGHBOURS = (1, 5, 20)
_MOST_GUESSED = 400  # items of a text
_THRESHOLDS = 80
_TELLING = 0.05  # a word in at most so many of the attacker's texts says what a text is about


@dataclass(frozen=True)
class Dictionary:
    """The items that may be guessed: words, then names, with their embeddings [items, d]."""

    words: Sequence[str]
    names: Sequence[str]
    vectors: Float32

    @property
    def items(self) -> list[str]:
        """Words and names, in the order of ``vectors``."""
        return [*self.words, *self.names]


@dataclass(frozen=True)
class EmbeddedTexts:
    """Texts by their embeddings [n, d], with all the words and names of each.

    ``bags``: of each text the places of its items in the dictionary, which may lack some.
    """

    vectors: Float32
    words: Sequence[frozenset[str]]
    names: Sequence[frozenset[str]]
    bags: Sequence[Rows]

    def __len__(self) -> int:
        return len(self.bags)

    @classmethod
    def of(
        cls,
        vectors: Float32,
        words: Sequence[frozenset[str]],
        names: Sequence[frozenset[str]],
        dictionary: Dictionary,
    ) -> EmbeddedTexts:
        """A corpus whose items are looked up in ``dictionary``."""
        of_word = {word: place for place, word in enumerate(dictionary.words)}
        of_name = {name: place for place, name in enumerate(dictionary.names, len(of_word))}
        bags = [
            np.array(
                sorted(
                    [of_word[word] for word in some if word in of_word]
                    + [of_name[name] for name in called if name in of_name]
                ),
                dtype=np.int64,
            )
            for some, called in zip(words, names, strict=True)
        ]
        return cls(vectors, words, names, bags)


@dataclass(frozen=True)
class BestRecovery:
    """What one measure says of the best attacker: see `recovered.Recovery`."""

    f1: float
    precision: float
    recall: float
    attacker: str


@dataclass(frozen=True)
class Attacked:
    """What was recovered of some texts, and what the same guesses are worth on other texts.

    ``words``: distinct words, ``telling``: those that few texts have, both as means over
    the texts; ``names``: pooled. ``guessed``: of each text the words and the names guessed.
    """

    words: BestRecovery
    telling: BestRecovery
    names: BestRecovery
    shuffled_words: Recovery
    shuffled_telling: Recovery
    shuffled_names: Recovery
    guessed: Sequence[tuple[frozenset[str], frozenset[str]]]


@dataclass(frozen=True)
class Measure:
    """What is counted: the items it is about, and how texts are put together."""

    name: str
    items: Mask
    count: Callable[[Sequence[frozenset[str]], Sequence[frozenset[str]]], Recovery]


def measures(train: EmbeddedTexts, dictionary: Dictionary) -> tuple[Measure, Measure, Measure]:
    """Words, telling words, names."""
    total = len(dictionary.vectors)
    words = np.arange(total) < len(dictionary.words)
    common = _counts(train, total) > _TELLING * len(train)
    return (
        Measure("words", words, mean_recovery),
        Measure("telling", words & ~common, mean_recovery),
        Measure("names", ~words, pooled_recovery),
    )


# ---- attackers -------------------------------------------------------------------------


def neighbour_scores(
    known: Float32, bags: Sequence[Rows], seen: Float32, items: int, k: int
) -> Float32:
    """[n, items]: the share of the ``k`` nearest known texts that have an item, by rank."""
    nearest = np.argsort(-(seen @ known.T), axis=1, kind="stable")[:, :k]
    weights = 1.0 / (1.0 + np.arange(nearest.shape[1]))
    scores = np.zeros((len(seen), items), dtype=np.float32)
    for row, places in enumerate(nearest):
        for weight, place in zip(weights / weights.sum(), places, strict=True):
            scores[row, bags[place]] += weight
    return scores


def dictionary_scores(guess: Float32, items: Float32) -> Float32:
    """[n, items]: the cosine of what an embedding probably was with each item's."""
    length = np.linalg.norm(guess, axis=1, keepdims=True)
    scores: Float32 = (guess / np.maximum(length, 1e-9)) @ items.T
    return scores


def commonest_scores(train: EmbeddedTexts, texts: int, items: int) -> Float32:
    """[texts, items]: how common an item is among the attacker's texts, for each text alike."""
    counts = _counts(train, items) + np.linspace(1e-3, 0.0, items, dtype=np.float32)
    return np.tile(counts.astype(np.float32), (texts, 1))


class Decoder(nn.Module):
    """What the attacker sees [b, c] -> a logit for each item of the dictionary [b, items]."""

    items: Tensor
    prior: Tensor

    def __init__(self, start: Float32, items: Float32, words: int, prior: Float32) -> None:
        """``start`` [c, d]: the linear map from disclosures to embeddings to begin with."""
        super().__init__()
        width, dimension = start.shape
        self._words = words
        self.straight = nn.Linear(width, dimension)
        self.wide = nn.Linear(width, _HIDDEN)
        self.narrow = nn.Linear(_HIDDEN, dimension)
        self.to_words = nn.Linear(dimension, dimension, bias=False)
        self.to_names = nn.Linear(dimension, dimension, bias=False)
        self.own = nn.Parameter(torch.zeros(items.shape))
        self.register_buffer("items", torch.from_numpy(items))
        self.register_buffer("prior", torch.from_numpy(prior))
        with torch.no_grad():
            self.straight.weight.copy_(torch.from_numpy(start.T.copy()))
            self.straight.bias.zero_()
            self.narrow.weight.mul_(0.1)
            for key in (self.to_words, self.to_names):
                key.weight.copy_(8.0 * torch.eye(dimension))

    def forward(self, seen: Tensor) -> Tensor:
        """Logits that an item is in the text."""
        hidden = functional.dropout(functional.gelu(self.wide(seen)), 0.2, self.training)
        guess = self.straight(seen) + self.narrow(hidden)  # [b, d]
        by_embedding = torch.cat(
            [
                self.to_words(guess) @ self.items[: self._words].T,
                self.to_names(guess) @ self.items[self._words :].T,
            ],
            dim=1,
        )  # [b, items]
        by_own = 8.0 * guess @ self.own.T  # [b, items]
        if self.training:  # so that what unseen items have to rely on is learned as well
            by_own = by_own * (torch.rand(by_own.shape[1]) > _DROP_OWN)
        logits: Tensor = by_embedding + by_own + self.prior
        return logits

    def scores(self, seen: Float32) -> Float32:
        """[n, items] logits, without training."""
        self.eval()
        with torch.inference_mode():
            parts = [
                self(torch.from_numpy(seen[at : at + _BATCH])).numpy()
                for at in range(0, len(seen), _BATCH)
            ]
        return np.concatenate(parts)


def linear_start(seen: Float32, vectors: Float32) -> Float32:
    """[c, d]: the ridge regression of embeddings [n, d] on what was disclosed of them [n, c]."""
    width = seen.shape[1]
    gram = seen.T @ seen
    ridge = np.float32(0.01 * np.trace(gram) / width + 1e-6)
    start: Float32 = np.linalg.solve(
        gram + ridge * np.eye(width, dtype=np.float32), seen.T @ vectors
    )
    return start.astype(np.float32)


@dataclass
class Trained:
    """A decoder and whether its training had to end before it stopped getting better."""

    decoder: Decoder
    epochs: int
    cut_short: bool


def train_decoder(
    train: EmbeddedTexts,
    choose: EmbeddedTexts,
    items: Float32,
    words: int,
    disclose: Disclose,
    *,
    seed: int,
    deadline: float,
    report: Callable[[int], None] = lambda _epoch: None,
) -> Trained:
    """Train until the loss on ``choose`` gets no better, or ``deadline`` (time.monotonic).

    Each epoch sees disclosures drawn anew. Binary cross-entropy over the items that the
    attacker's texts have: what others lack says nothing of how they would be disclosed.
    """
    torch.manual_seed(seed)
    order = np.random.Generator(np.random.SFC64(seed))
    counts = _counts(train, len(items))
    share = (counts + 0.3) / (len(train) + 1.0)
    prior = np.log(share / (1.0 - share)).astype(np.float32)
    start = linear_start(disclose(train.vectors), _less_mean(train.vectors))
    model = Decoder(start, items, words, prior)
    weight = torch.from_numpy((counts > 0).astype(np.float32))
    optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=1e-2)
    chosen_by = torch.from_numpy(disclose(choose.vectors))
    best, weights, waited, epoch = math.inf, dict(model.state_dict()), 0, 0
    while waited < _PATIENCE and (epoch == 0 or time.monotonic() < deadline):
        model.train()
        seen = torch.from_numpy(disclose(train.vectors))
        for rows in np.array_split(order.permutation(len(train)), -(-len(train) // _BATCH)):
            loss = _loss(model(seen[rows]), train, rows, weight)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if epoch and time.monotonic() > deadline:
                break  # a large site's epoch takes long; what it has learned counts
        model.eval()
        with torch.inference_mode():
            total = sum(
                float(_loss(model(chosen_by[rows]), choose, rows, weight)) * len(rows)
                for rows in np.array_split(np.arange(len(choose)), -(-len(choose) // _BATCH))
            )
        epoch, waited = epoch + 1, waited + 1
        if total / len(choose) < best - _BETTER:
            best, waited = total / len(choose), 0
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        report(epoch)
    model.load_state_dict(weights)
    return Trained(model, epoch, waited < _PATIENCE)


def _loss(logits: Tensor, corpus: EmbeddedTexts, rows: Rows, weight: Tensor) -> Tensor:
    target = torch.zeros(logits.shape)
    for place, row in enumerate(rows):
        target[place, torch.from_numpy(corpus.bags[row])] = 1.0
    each = functional.binary_cross_entropy_with_logits(logits, target, weight, reduction="none")
    return each.sum(dim=1).mean()


def _counts(corpus: EmbeddedTexts, items: int) -> Float32:
    flat = np.concatenate([*corpus.bags, np.zeros(0, dtype=np.int64)])
    return np.bincount(flat, minlength=items).astype(np.float32)


# ---- from scores to guesses --------------------------------------------------------------


def _top(scores: Float32, allowed: Mask) -> tuple[Rows, Float32]:
    """The places [n, k] of the best-scored allowed items of each text, and their scores."""
    places = np.flatnonzero(allowed)
    some = scores[:, places]
    k = min(_MOST_GUESSED, len(places))
    best = np.argpartition(-some, k - 1, axis=1)[:, :k] if k else np.zeros((len(some), 0), np.int64)
    return places[best], np.take_along_axis(some, best, axis=1)


def guesses(
    scores: Float32, allowed: Mask, threshold: float, items: Sequence[str]
) -> list[frozenset[str]]:
    """Of each text, the items that score above the threshold; at most 400."""
    places, values = _top(scores, allowed)
    return [
        frozenset(items[place] for place in row[value > threshold].tolist())
        for row, value in zip(places, values, strict=True)
    ]


def choose_threshold(
    scores: Float32, measure: Measure, corpus: EmbeddedTexts
) -> tuple[float, float]:
    """The threshold that is best by F1 on those texts, and that F1."""
    places, values = _top(scores, measure.items)
    table = np.zeros(scores.shape, dtype=np.bool_)
    for row, bag in enumerate(corpus.bags):
        table[row, bag] = True
    right = np.take_along_axis(table, places, axis=1)
    true = (table & measure.items).sum(axis=1)
    best, threshold = -1.0, math.inf
    if not values.size or not true.any():
        return threshold, best
    shares = np.linspace(0.0, 1.0, _THRESHOLDS) ** 3  # finer where few are guessed
    for candidate in np.unique(np.quantile(values, 1.0 - shares)):
        guessed = values > candidate
        hit = (guessed & right).sum(axis=1)
        if measure.count is pooled_recovery:
            f1 = 2.0 * hit.sum() / max(1, guessed.sum() + true.sum())
        else:
            each = 2.0 * hit / np.maximum(1, guessed.sum(axis=1) + true)
            f1 = float(each[true > 0].mean())
        if f1 > best:
            best, threshold = float(f1), float(candidate)
    return threshold, best


Scored = tuple[Float32, Float32]  # of the texts to choose by, of the texts to test on


def best_found(
    attackers: dict[str, Scored],
    measure: Measure,
    choose: EmbeddedTexts,
    test: EmbeddedTexts,
    items: Sequence[str],
) -> tuple[BestRecovery, Recovery, list[frozenset[str]]]:
    """The attacker that is best on ``choose``, on ``test``; its guesses shifted; its guesses."""
    ranked = [
        (f1, name, threshold)
        for name, (scores, _) in attackers.items()
        for threshold, f1 in [choose_threshold(scores, measure, choose)]
    ]
    _, name, threshold = max(ranked, key=lambda one: one[0])
    guessed = guesses(attackers[name][1], measure.items, threshold, items)
    true = _truth(test, measure, items)
    score = measure.count(guessed, true)
    half = len(guessed) // 2
    moved = measure.count([*guessed[half:], *guessed[:half]], true)
    return BestRecovery(score.f1, score.precision, score.recall, name), moved, guessed


def _truth(
    corpus: EmbeddedTexts, measure: Measure, items: Sequence[str]
) -> Sequence[frozenset[str]]:
    if measure.name == "names":
        return corpus.names
    if measure.name == "words":
        return corpus.words
    common = {items[place] for place in np.flatnonzero(~measure.items).tolist()}
    return [words - common for words in corpus.words]


def judged(
    attackers: dict[str, Scored],
    counted: Sequence[Measure],
    choose: EmbeddedTexts,
    test: EmbeddedTexts,
    dictionary: Dictionary,
) -> Attacked:
    """What the best of some attackers recover of the texts ``test``."""
    items = dictionary.items
    (words, words_moved, some), (telling, telling_moved, _), (names, names_moved, called) = (
        best_found(attackers, measure, choose, test, items) for measure in counted
    )
    return Attacked(
        words,
        telling,
        names,
        words_moved,
        telling_moved,
        names_moved,
        list(zip(some, called, strict=True)),
    )


@dataclass(frozen=True)
class TextKind:
    """Texts of one kind: to choose by and to test on."""

    choose: EmbeddedTexts
    test: EmbeddedTexts


def guessing(
    train: EmbeddedTexts, kinds: dict[str, TextKind], dictionary: Dictionary
) -> dict[str, Attacked]:
    """What the commonest items of the attacker's texts are worth, without any embedding."""
    counted, total = measures(train, dictionary), len(dictionary.vectors)
    return {
        name: judged(
            {
                "guessing": (
                    commonest_scores(train, len(kind.choose), total),
                    commonest_scores(train, len(kind.test), total),
                )
            },
            counted,
            kind.choose,
            kind.test,
            dictionary,
        )
        for name, kind in kinds.items()
    }


def attack(
    train: EmbeddedTexts,
    kinds: dict[str, TextKind],
    dictionary: Dictionary,
    disclose: Disclose,
    *,
    seed: int,
    deadline: float,
    report: Callable[[int], None] = lambda _epoch: None,
) -> tuple[dict[str, Attacked], bool]:
    """Attack the texts of each kind through ``disclose``; whether training was cut short.

    Each text is disclosed once and all attackers see the same.
    """
    total, words = len(dictionary.vectors), len(dictionary.words)
    centred = _centred(dictionary)
    view = _standardised(disclose, train.vectors)
    trained = train_decoder(
        train,
        _both([kind.choose for kind in kinds.values()]),
        centred,
        words,
        view,
        seed=seed,
        deadline=deadline,
        report=report,
    )
    known = view(train.vectors)
    start = linear_start(known, _less_mean(train.vectors))

    def by_dictionary(seen: Float32) -> Float32:
        return dictionary_scores(seen @ start, centred)

    results = {}
    for name, kind in kinds.items():
        seen = (view(kind.choose.vectors), view(kind.test.vectors))

        scores: dict[str, Callable[[Float32], Float32]] = {
            f"neighbours ({k})": functools.partial(
                neighbour_scores, known, train.bags, items=total, k=k
            )
            for k in _NEIGHBOURS
        }
        scores["dictionary"] = by_dictionary
        scores["decoder"] = trained.decoder.scores
        attackers: dict[str, Scored] = {
            called: (score(seen[0]), score(seen[1])) for called, score in scores.items()
        }
        attackers["decoder and dictionary"] = (
            _mean_of(attackers["decoder"][0], attackers["dictionary"][0]),
            _mean_of(attackers["decoder"][1], attackers["dictionary"][1]),
        )
        counted = measures(train, dictionary)
        results[name] = judged(attackers, counted, kind.choose, kind.test, dictionary)
    return results, trained.cut_short


def _standardised(disclose: Disclose, vectors: Float32) -> Disclose:
    """Disclosures without what all have in common, rows of about length 1.

    Some encoders put all texts into a narrow cone: what tells them apart is small there.
    """
    seen = disclose(vectors)
    middle = seen.mean(axis=0)
    scale = 1.0 / max(float(np.linalg.norm(seen - middle, axis=1).mean()), 1e-9)
    return lambda some: ((disclose(some) - middle) * scale).astype(np.float32)


def _less_mean(vectors: Float32) -> Float32:
    centred: Float32 = vectors - vectors.mean(axis=0)
    return centred / np.float32(max(float(np.linalg.norm(centred, axis=1).mean()), 1e-9))


def _mean_of(one: Float32, other: Float32) -> Float32:
    """Scores of two attackers on one scale."""
    mean: Float32 = one / max(float(one.std()), 1e-9) + other / max(float(other.std()), 1e-9)
    return mean


def _centred(dictionary: Dictionary) -> Float32:
    """Embeddings of items without what all words, or all names, have in common; unit rows."""
    centred = dictionary.vectors.astype(np.float32).copy()
    words = len(dictionary.words)
    for part in (centred[:words], centred[words:]):
        if len(part):
            part -= part.mean(axis=0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)
    return centred


def _both(corpora: Sequence[EmbeddedTexts]) -> EmbeddedTexts:
    return EmbeddedTexts(
        np.concatenate([corpus.vectors for corpus in corpora]),
        [words for corpus in corpora for words in corpus.words],
        [names for corpus in corpora for names in corpus.names],
        [bag for corpus in corpora for bag in corpus.bags],
    )
