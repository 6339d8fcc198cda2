"""What titles say about a question: the names, years and forms that it asks for.

A title is scored by the share of the question's words that it has, rare ones counting
more. Each word weighs ln(titles / titles that have it) (inverse document frequency;
Spärck Jones, Journal of Documentation 28, 1972), so one that is in every title counts
nothing, and where all titles are equal or empty none says anything. Equal titles count once:
a filing weighs the same whether it is one document or each of its pages is. The whole, of
which the share is one, is what the question's words that titles know weigh together, and
at least what a word of one title weighs: a lone common word makes a small share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float32, Int64
from daemon.library.catalogue.name_words import BOUNDARY, name_words, runs

# "American Water Works" is to find AMERICANWATERWORKS: so many neighbours are also one word.
_JOINED = 3
_MOST_WORDS = 128  # of a question; those behind are not looked at
# Titles whose passages are looked at. MRR@10 of seven institutions' questions, of up to 2,215
# titles, is the same to four digits with 64 of them, and with all.
_MOST_TITLES = 500


@dataclass(frozen=True)
class Asked:
    """A question's words as titles know them: what each weighs, and the whole of a share."""

    weights: dict[str, float]
    whole: float


class Titles:
    """The titles of a library's documents, by the labels of their passages."""

    def __init__(self, passages: Iterable[tuple[int, str, str]]) -> None:
        """``passages``: label, document id and title of each, in any order."""
        labels: dict[str, list[int]] = {}
        for label, _, title in passages:
            labels.setdefault(title, []).append(label)
        # Those of a title stand together, ascending.
        every = np.array([label for one in labels.values() for label in sorted(one)], np.int64)
        self._labels, self._sizes = every, np.array([len(one) for one in labels.values()], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        places: dict[str, list[int]] = {}
        for place, title in enumerate(labels):
            for word in name_words(title):
                places.setdefault(word, []).append(place)
        self._places = {word: np.array(one, np.int64) for word, one in places.items()}
        # By ascending label, to find the title of a passage.
        order = np.argsort(every, kind="stable")
        self._by_label = every[order]
        self._title_of = np.repeat(np.arange(len(self._sizes)), self._sizes)[order]

    def asked(self, question: str) -> Asked:
        """Those of the question's words that are in titles and tell some from others."""
        weights: dict[str, float] = {}
        for word in _question_words(question):
            if word in self._places:
                weight = math.log(len(self._sizes) / len(self._places[word]))
                if weight > 0.0:
                    weights[word] = weight
        return Asked(weights, max(sum(weights.values()), math.log(max(1, len(self._sizes)))))

    def shares(self, asked: Asked) -> Float32:
        """The share [t] of each title, in the order that this object numbers them."""
        shares = np.zeros(len(self._sizes), np.float32)
        for word, weight in asked.weights.items():
            shares[self._places[word]] += np.float32(weight / asked.whole)
        return shares

    def shares_of(self, labels: Int64, shares: Float32) -> Float32:
        """The shares [n] of those passages' titles; 0 for a label that came later."""
        if not len(self._by_label):
            return np.zeros(len(labels), np.float32)
        at = np.searchsorted(self._by_label, labels)
        known = self._by_label.take(at, mode="clip") == labels
        found = shares[self._title_of.take(at, mode="clip")]
        return np.where(known, found, np.float32(0.0)).astype(np.float32)

    def best(self, shares: Float32, most: int) -> Int64:
        """Labels of passages under the titles with the greatest shares, ``most`` at most.

        A title is taken whole while there is room; of the last one its first passages. No
        more than `_MOST_TITLES` are looked at.
        """
        matching = np.flatnonzero(shares > 0.0)
        taken = min(most, _MOST_TITLES)  # a title has a passage
        if len(matching) > taken:  # of equal ones at its end, the first
            least = np.partition(shares[matching], -taken)[-taken]
            above = matching[shares[matching] > least]
            equal = matching[shares[matching] == least][: taken - len(above)]
            matching = np.sort(np.concatenate([above, equal]))
        order = matching[np.argsort(-shares[matching], kind="stable")]
        before = np.cumsum(self._sizes[order]) - self._sizes[order]
        chosen, before = order[before < most], before[before < most]
        sizes = self._sizes[chosen]
        rows = np.repeat(self._starts[chosen] - before, sizes) + np.arange(sizes.sum())
        best: Int64 = self._labels[rows[:most]]
        return best

    def matched(self, asked: Asked, title: str) -> list[str]:
        """The words that a title has of those that are asked for, in the question's order."""
        words = name_words(title)
        return [word for word in asked.weights if word in words]


def _question_words(question: str) -> list[str]:
    """A question's words, each once, and neighbours joined to one."""
    words = [word.casefold() for run in runs(question) for word in BOUNDARY.split(run)]
    words = words[:_MOST_WORDS]
    joined = (
        "".join(words[start : start + length])
        for length in range(1, _JOINED + 1)
        for start in range(len(words) - length + 1)
    )
    return list(dict.fromkeys(joined))
