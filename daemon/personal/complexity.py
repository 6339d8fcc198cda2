"""How complex a site's documents are: the four numbers that Eq. 3 of pFedRAG adds up.

The paper leaves scales open and has no perplexity without a language model. Here
each number is brought to about 0 .. 1, and the perplexity is that of a bigram model
of the site's own text, interpolated as by its source (Jelinek and Mercer 1980):
counted on four fifths of the documents, measured on the fifth.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise

from daemon.personal.depth import CorpusStatistics

_WORD = re.compile(r"\w+")
_MOST_WORDS = 300_000  # of the corpus are read: a second, and enough for all four
_MOST_DOCUMENTS = 1e6  # a size of 1
_LONGEST = 1e4  # words a document: a length of 1
_HIGHEST = 1e5  # a perplexity of 1
_STRETCH = 1000  # words over which types are counted: a ratio depends on the length
_BIGRAM, _UNIGRAM, _EVEN = 0.5, 0.4, 0.1  # weights of the interpolation
_HELD_OUT = 5  # every fifth document


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
    asked = list(islice(documents, 0, None, _HELD_OUT))
    if not known:
        return 1.0
    single = Counter(word for text in known for word in text)
    double = Counter(two for text in known for two in pairwise(text))
    first = Counter(word for text in known for word in text[:-1])
    total = max(single.total(), 1)
    even = 1.0 / (len(single) + 1)
    nats, count = 0.0, 0
    for text in asked:
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
