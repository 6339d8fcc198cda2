"""The ranking by words: BM25 over titles and texts, of which a bounded part is looked at.

FTS5 scores every passage that has any word of a question, some 0.8 microseconds each: a
question with common words costs a tenth of a second at 100,000 passages, and nearly all of
it goes to passages that have nothing else of it. So passages are found by the rarest words,
as many as have `_MOST_POSTINGS` passages together, and these are then scored by all of them.
Where a question's words have fewer altogether this is the whole ranking, and otherwise what
is missing has none of the rare words (docs/decisions/0032).
"""

from __future__ import annotations

import heapq
import json
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence

_MAX_QUERY_TERMS = 128
_LEAST_WEIGHT = 1e-6  # FTS5's, of a word that is in half of the passages or more
# Measured on the questions of seven institutions, 15,863 passages together: MRR@10 is that of
# the whole ranking also where 800 are looked at.
_MOST_POSTINGS = 1000
_MOST_COUNTS = 10_000  # words whose passages' number is remembered
_SAMPLED, _COMMON_FROM = 200, 3  # passages, and in how many of them a word may be common
_STALE = 0.05  # of the passages come or gone, and common words are counted anew
# A word of the title counts as so many of the text. Measured on the questions of
# three institutions: MRR@10 of BM25 alone 0.01 to 0.04 above equal weights at each.
_TITLE_WEIGHT = 4.0
_TERM = re.compile(r"\w+")
_SCORES = (
    "SELECT rowid, -bm25(passage_words, ?1, 1.0, 1.0) FROM passage_words"
    # The plus keeps SQLite from matching once for each rowid.
    " WHERE passage_words MATCH ?2 AND (?3 IS NULL OR +rowid IN"
    " (SELECT value FROM json_each(?3)))"
)
_LATEST = " ORDER BY rowid DESC LIMIT ?4"
_COUNT_AMONG = (
    "SELECT count(*) FROM passage_words WHERE passage_words MATCH ?"
    " AND +rowid IN (SELECT value FROM json_each(?))"
)


class WordsRanking:
    """BM25 on a library's connection; raises sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._counts: dict[str, int] = {}
        self._passages = 0
        self._counted_at = 0  # passages, when the common words were counted first
        self._state: tuple[int, int] | None = None  # of the library when these were counted

    def best(
        self, query: str, k: int, among: Sequence[int] | None = None
    ) -> list[tuple[int, float]]:
        """The ``k`` best passages: (rowid, share), best first; ``among``: of these rowids.

        A share is BM25 over what the question's words weigh together (their inverse document
        frequencies, of those that any passage has), and at least what a word of one passage
        weighs: about 1 for a passage of usual length that has each of them once. So shares
        of different questions compare, and a lone common word makes a small one.

        Among some rowids words are rare or not by these: one that is rare elsewhere would find
        nothing that is wanted, and keep the others from finding any.
        """
        counts = self._count(terms(query))
        most = max(_MOST_POSTINGS, k)
        if among is None:
            allowed, here = None, counts
        else:
            allowed = json.dumps(list(among))
            here = self._count_among(counts, allowed)
        if not here or k < 1:
            return []
        rare, common = _parted(here, most)
        # Backwards they are read more slowly: only where there are more than are wanted.
        latest = most if sum(here[term] for term in rare) > most else None
        scores = self._scores(_any(rare), allowed, latest)
        # FTS5 gives a word that half of the passages have next to no weight, but would read
        # all that there is of it.
        if telling := [term for term in common if 2 * counts[term] < self._passages]:
            scores |= self._scores(f"({_any(rare)}) AND ({_any(telling)})", allowed, latest)
        whole = max(sum(self._weight(count) for count in counts.values()), self._weight(1))
        best = heapq.nsmallest(k, [(-score, rowid) for rowid, score in scores.items()])
        return [(rowid, -score / whole) for score, rowid in best]

    def found_in(self, query: str, rowids: Sequence[int]) -> dict[int, list[str]]:
        """The query's words that are in each of these passages, in the query's order."""
        found: dict[int, list[str]] = {rowid: [] for rowid in rowids}
        for term in terms(query):
            rows = self._db.execute(
                "SELECT rowid FROM passage_words WHERE passage_words MATCH ?"
                " AND rowid IN (SELECT value FROM json_each(?))",
                (_any([term]), json.dumps(list(rowids))),
            )
            for (rowid,) in rows:
                found[rowid].append(term)
        return found

    def count_common(self, seconds: float) -> None:
        """Count words that several of a few passages have, most frequent first, for so long.

        The first question that has one would wait for it, up to a millisecond each.
        """
        until = time.monotonic() + seconds
        ((first, last),) = self._db.execute("SELECT min(rowid), max(rowid) FROM passage")
        step = max(1, ((last or 0) - (first or 0)) // _SAMPLED)
        sampled = json.dumps(list(range(first or 0, (last or 0) + 1, step)))
        texts = self._db.execute(
            "SELECT text FROM passage WHERE rowid IN (SELECT value FROM json_each(?))", (sampled,)
        )
        passages = Counter(term for (text,) in texts for term in {*_TERM.findall(text.lower())})
        for term, count in passages.most_common(_MOST_COUNTS // 2):
            if count < _COMMON_FROM or time.monotonic() > until:
                return
            self._count([term])

    def _weight(self, count: int) -> float:
        """Of a word that is in so many passages, as FTS5 has it."""
        without = max(0, self._passages - count)  # the count may be older than some that went
        return max(math.log((without + 0.5) / (count + 0.5)), _LEAST_WEIGHT)

    def _scores(self, expression: str, allowed: str | None, latest: int | None) -> dict[int, float]:
        """BM25 of passages by rowid; only of the ``latest`` that came last, where that is given."""
        values = (_TITLE_WEIGHT, expression, allowed)
        if latest is None:
            return dict(self._db.execute(_SCORES, values))
        return dict(self._db.execute(_SCORES + _LATEST, (*values, latest)))

    def _count_among(self, asked: Iterable[str], allowed: str) -> dict[str, int]:
        """In how many of these passages each word is; without those that are in none."""
        found: dict[str, int] = {}
        for term in asked:
            ((found[term],),) = self._db.execute(_COUNT_AMONG, (_any([term]), allowed))
        return {term: count for term, count in found.items() if count}

    def _count(self, asked: Sequence[str]) -> dict[str, int]:
        """In how many passages each of these words is; those that are in none are left out."""
        ((version,),) = self._db.execute("PRAGMA data_version")  # another connection's writes
        state = (version, self._db.total_changes)
        if state != self._state or len(self._counts) > _MOST_COUNTS:
            ((self._passages,),) = self._db.execute("SELECT count(*) FROM passage")
            self._state = state
            if abs(self._passages - self._counted_at) > _STALE * self._counted_at:
                self._counts, self._counted_at = {}, self._passages
            # To count a common word takes longest, and of these a few more or less say nothing.
            common = {one: n for one, n in self._counts.items() if n > _MOST_POSTINGS}
            self._counts = common if len(common) < _MOST_COUNTS else {}
        for term in asked:
            if term not in self._counts:
                ((self._counts[term],),) = self._db.execute(
                    "SELECT count(*) FROM passage_words WHERE passage_words MATCH ?",
                    (_any([term]),),
                )
        return {term: self._counts[term] for term in asked if self._counts[term]}


def terms(text: str) -> list[str]:
    """The words of a text that are looked for, each once, in their order."""
    found = dict.fromkeys(match.group().lower() for match in _TERM.finditer(text))
    return list(found)[:_MAX_QUERY_TERMS]


def _any(some: Sequence[str]) -> str:
    """An FTS5 expression that finds any of these words.

    Each becomes a quoted string, in which FTS5 knows no operators: a question can't be
    read as a query language.
    """
    return " OR ".join(f'"{term}"' for term in some)


def _parted(counts: dict[str, int], most: int) -> tuple[list[str], list[str]]:
    """The rarest words, at least one, that are in ``most`` passages together; the others."""
    ordered = sorted(counts, key=counts.__getitem__)
    postings = taken = 0
    for term in ordered:
        postings += counts[term]
        if taken and postings > most:
            break
        taken += 1
    return ordered[:taken], ordered[taken:]
