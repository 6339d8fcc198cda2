"""How alike two texts are, and keys by which texts that are nearly the same meet.

A text is the set of its shingles: each three words that follow each other (Broder 1997). Two
sets are as alike as their Jaccard coefficient says: what they share of what both have. The
least value of a set under a random hash is the same for two of them as often as that (MinHash);
some such values together are a key, and a text has several keys, so that texts above a
likeness nearly always have one in common and others seldom do (locality-sensitive hashing;
Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4).
"""

from __future__ import annotations

import re
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Shingles = NDArray[np.uint64]

_WORDS = 3  # of a shingle
_BANDS, _ROWS = 8, 5  # keys of a text but one, and values that each is made of
_WORD = re.compile(r"\w+")
# Odd multipliers, the same at all times: keys are kept (docs/decisions/0041).
_DRAWN = np.random.Generator(np.random.PCG64(41)).integers(
    1 << 63, size=(2, _BANDS * _ROWS + _WORDS), dtype=np.uint64
)
_TIMES, _PLUS = (_DRAWN[:, : _BANDS * _ROWS, np.newaxis] << np.uint64(1)) | np.uint64(1)
_IN_SHINGLE = (_DRAWN[0, -_WORDS:] << np.uint64(1)) | np.uint64(1)
_BY_BAND = (_DRAWN[1, :_ROWS] << np.uint64(1)) | np.uint64(1)


def words_of(text: str) -> list[str]:
    """What two texts are compared by: words and numbers, without capitals and punctuation."""
    return _WORD.findall(text.casefold())


def shingles_of(words: list[str]) -> Shingles:
    """[n] hashes of the shingles, ascending, each once; of fewer words than one has, a single one.

    Of no words, none.
    """
    hashes = np.array([crc32(word.encode()) for word in words], np.uint64)
    whole = max(1, len(hashes) - _WORDS + 1) if len(hashes) else 0
    sums = np.zeros(whole, np.uint64)
    for place, times in enumerate(_IN_SHINGLE):
        part = hashes[place : place + whole]
        sums[: len(part)] += _mixed(part + np.uint64(1)) * times
    return np.unique(_mixed(sums))


def likeness(one: Shingles, other: Shingles) -> float:
    """The Jaccard coefficient of two sets, 0 to 1; of two that are empty, 1."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    together = len(one) + len(other) - shared
    return shared / together if together else 1.0


def keys_of(shingles: Shingles, apart: str = "") -> list[int]:
    """A key for each band, and one of all shingles: 32 bits each. None of no shingles.

    The same shingles have the same keys, and hardly any where ``apart`` is another one.
    """
    if not len(shingles):
        return []
    least = _minima(shingles).reshape(_BANDS, _ROWS)
    sums = np.append((least * _BY_BAND).sum(axis=1), shingles.sum())
    sums = _mixed(sums + np.arange(1, _BANDS + 2, dtype=np.uint64))
    keys: list[int] = (_mixed(sums ^ np.uint64(crc32(apart.encode()))) >> np.uint64(32)).tolist()
    return keys


def _minima(shingles: Shingles) -> Shingles:
    """[bands x rows] the least value of the set under each hash; needs a shingle at least."""
    least: Shingles = ((shingles * _TIMES + _PLUS) >> np.uint64(32)).min(axis=1)
    return least


def _mixed(values: Shingles) -> Shingles:
    """Every bit of a value on every bit (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
