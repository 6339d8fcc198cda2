"""Pairs without a language model: inverse cloze, titles, keywords."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from daemon.library.contents import Passage, embedding_text
from daemon.pairs.made import Made, merged, usable

# Of the sentences that ask, one in ten stays in what it asks for, so that matching
# words are learned, too (Lee, Chang and Toutanova, ACL 2019, section 4.1).
KEPT = 0.1
_LEAST_WORDS = 4  # a shorter sentence ("See below.") asks for nothing
_KEYWORDS = 5
_WORD = re.compile(r"[^\W\d_]{3,}")


def inverse_cloze(
    passages: Sequence[Passage], *, a_passage: int = 1, seed: int = 0, kept: float = KEPT
) -> list[Made]:
    """Sentences that ask for the rest of their passage (Lee et al., ACL 2019).

    Up to ``a_passage`` different sentences of each passage with two or more; the
    passage's title stays with the rest. Reproducible from ``seed``.
    """
    chance = np.random.Generator(np.random.Philox(key=seed))
    made: list[Made] = []
    for passage in passages:
        parts = passage.sentences
        asking = [n for n, part in enumerate(parts) if len(part.split()) >= _LEAST_WORDS]
        if len(parts) < 2:
            continue
        for number in chance.permutation(asking)[:a_passage].tolist() if asking else []:
            rest = " ".join(part for n, part in enumerate(parts) if n != number)
            whole = chance.random() < kept
            text = passage.text if whole else rest
            query = " ".join(parts[number].split())
            if usable(query):
                context = embedding_text(passage.title, text, passage.context)
                made.append(Made(query, (context,), (passage.document_id,), "inverse-cloze"))
    return merged(made)


def titles(passages: Sequence[Passage]) -> list[Made]:
    """Titles that ask for the passages below them, which are told without their title."""
    made = [
        Made(passage.title, (text,), (passage.document_id,), "title")
        for passage in passages
        if passage.title and usable(passage.title) and (text := _untitled(passage))
    ]
    return merged(made)


def keywords(passages: Sequence[Passage], *, words: int = _KEYWORDS) -> list[Made]:
    """The words that mark each passage most among the site's (tf-idf), in its order."""
    lists = [[match.group().lower() for match in _WORD.finditer(p.text)] for p in passages]
    spread = Counter(word for one in lists for word in set(one))
    made: list[Made] = []
    for passage, one in zip(passages, lists, strict=True):
        counts = Counter(one)
        weight = {w: n * math.log((1 + len(lists)) / (1 + spread[w])) for w, n in counts.items()}
        best = set(sorted(weight, key=lambda word: (-weight[word], word))[:words])
        query = " ".join(word for word in dict.fromkeys(one) if word in best)
        if usable(query):
            text = passage.embedding_text
            made.append(Made(query, (text,), (passage.document_id,), "keywords"))
    return merged(made)


def _untitled(passage: Passage) -> str:
    text = passage.text
    return text[len(passage.title) :].strip() if text.startswith(passage.title) else text.strip()
