"""Which passages of a library say nearly the same, in its file.

Passages form groups. The first that was looked at is the group's leader; another one is of it
when, of all leaders, it is the most like this one, alike enough, and has the same numbers: "2018"
for "2019" is one word of two hundred, and all that a person may be looking for (leader
clustering, Hartigan 1975; docs/decisions/0041). So all of a group are alike by themselves, and
not by a chain of others, and a passage meets as many leaders as there are texts like it, however
often each is there.

A passage is looked at after it is stored (`mark`): triggers note it, and note again those whose
leader goes (`daemon.library.schema`). What is derived from a passage goes with it, by these, too.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from crypto.arrays import Int64
from daemon.library.catalogue.minhash import keys_of, likeness, shingles_of, words_of

ALIKE = 0.9  # Jaccard coefficient of two passages' shingles, from which they are nearly the same
TOLD = 5  # copies that are named, at most
_COUNTED = 1000  # of a group, at most
_WITH_A_KEY, _COMPARED = 100, 20  # leaders of one key, and of all, that a passage meets
_AT_ONCE = 256  # passages marked in one transaction


@dataclass(frozen=True)
class Copy:
    """Where a passage that says nearly the same stands; ``page``: from 1, or 0 without pages."""

    document_id: str
    passage_id: str
    page: int


@dataclass(frozen=True)
class Copies:
    """Passages that say nearly the same as one: ``count`` of them, the first `TOLD` by name."""

    first: tuple[Copy, ...] = ()
    count: int = 0


class NearDuplicates:
    """On a library's connection; raises what ``reading`` and ``writing`` make of an sqlite3.Error.

    ``writing`` is a transaction.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        reading: Callable[[], AbstractContextManager[None]],
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._db, self._reading, self._writing = db, reading, writing

    # ---- writing ---------------------------------------------------------------

    def mark(self, seconds: float) -> int:
        """Look at passages that nobody has looked at, for so long; at how many. 0: at all.

        At least some are; what is done stays done when it is cut short.
        """
        until = time.monotonic() + seconds
        done = 0
        while True:
            with self._writing():
                waiting = self._rows(
                    "SELECT p.rowid, p.text FROM near_duplicate n JOIN passage p"
                    " ON p.rowid = n.passage WHERE n.leader IS NULL ORDER BY n.passage LIMIT ?",
                    _AT_ONCE,
                )
                for rowid, text in waiting:
                    self._mark(rowid, text)
            done += len(waiting)
            if len(waiting) < _AT_ONCE or time.monotonic() >= until:
                return done

    def _mark(self, rowid: int, text: str) -> None:
        words = words_of(text)
        shingles, numbers = shingles_of(words), numbers_of(words)
        keys = keys_of(shingles, " ".join(numbers))
        best, leader = ALIKE, rowid
        for other, its_text in self._met(keys):
            its_words = words_of(its_text)
            if numbers == numbers_of(its_words):
                alike = likeness(shingles, shingles_of(its_words))
                if alike > best or (alike == best and leader == rowid):
                    best, leader = alike, other
        mine = json.dumps(keys) if leader == rowid else "[]"
        self._db.execute(
            "UPDATE near_duplicate SET leader = ?, keys = ? WHERE passage = ?",
            (leader, mine, rowid),
        )
        self._db.execute(
            "INSERT OR IGNORE INTO near_duplicate_key(key, leader)"
            " SELECT value, ? FROM json_each(?)",
            (rowid, mine),
        )

    def _met(self, keys: Sequence[int]) -> list[tuple[int, str]]:
        """Leaders that have most of these keys, rare ones counting more, with their texts.

        Of a key that many have, as thousands of letters from one template may, some are looked
        at; a text that is the same is met by a key that no other has.
        """
        met = Counter[int]()
        for key in keys:
            query = "SELECT leader FROM near_duplicate_key WHERE key = ? LIMIT ?"
            having = self._rows(query, key, _WITH_A_KEY)
            for (one,) in having:
                met[one] += _WITH_A_KEY // len(having)
        best = sorted(met, key=lambda one: (-met[one], one))[:_COMPARED]
        return self._texts_of(best)

    # ---- reading ---------------------------------------------------------------

    def leaders(self, rowids: Sequence[int]) -> dict[int, int]:
        """The leader of the group of each of these passages that is here.

        Of one that nobody has looked at it is itself.
        """
        with self._reading():
            return dict(
                self._rows(
                    "SELECT passage, coalesce(leader, passage) FROM near_duplicate"
                    " WHERE passage IN (SELECT value FROM json_each(?))",
                    json.dumps([int(rowid) for rowid in rowids]),
                )
            )

    def copies(
        self, of: Mapping[int, Sequence[int]], among: Int64 | None = None
    ) -> dict[int, Copies]:
        """Of each of these passages what says nearly the same; those without are left out.

        The passages that each one maps to are told first, then others in the order they came
        in. With ``among`` (labels, ascending): only these.
        """
        with self._reading():
            others = {
                rowid: there
                for rowid, first in of.items()
                if (there := self._others(rowid, first, among))
            }
        return self._named(others)

    def _named(self, others: Mapping[int, Sequence[int]]) -> dict[int, Copies]:
        """Copies of each, of which the first are told by name."""
        told = {one for there in others.values() for one in there[:TOLD]}
        with self._reading():
            places = self._rows(
                "SELECT rowid, document_id, id, page FROM passage"
                " WHERE rowid IN (SELECT value FROM json_each(?))",
                json.dumps(sorted(told)),
            )
        named = {rowid: Copy(*place) for rowid, *place in places}
        return {
            rowid: Copies(tuple(named[one] for one in there[:TOLD] if one in named), len(there))
            for rowid, there in others.items()
        }

    def documents_like(self, ids: Sequence[str], most: int) -> list[str]:
        """Other documents with a passage that says nearly the same as one of theirs; so many."""
        with self._reading():
            rows = self._rows(
                "SELECT DISTINCT q.document_id FROM near_duplicate m"
                " JOIN passage q ON q.rowid = m.passage WHERE m.leader IN ("
                "SELECT n.leader FROM near_duplicate n JOIN passage p ON p.rowid = n.passage"
                " WHERE p.document_id IN (SELECT value FROM json_each(?1)))"
                " AND q.document_id NOT IN (SELECT value FROM json_each(?1)) LIMIT ?2",
                *(json.dumps(list(ids)), most),
            )
        return sorted(document_id for (document_id,) in rows)

    def _others(self, rowid: int, first: Sequence[int], among: Int64 | None) -> list[int]:
        rows = self._rows(
            "SELECT passage FROM near_duplicate WHERE leader ="
            " (SELECT leader FROM near_duplicate WHERE passage = ?) ORDER BY passage LIMIT ?",
            *(rowid, _COUNTED),
        )
        group = np.array([one for (one,) in rows], np.int64)
        if among is not None:
            group = group[np.isin(group, among)]
        return [one for one in dict.fromkeys([*first, *group.tolist()]) if one != rowid]

    def _texts_of(self, rowids: Sequence[int]) -> list[tuple[int, str]]:
        return self._rows(
            "SELECT rowid, text FROM passage WHERE rowid IN (SELECT value FROM json_each(?))",
            json.dumps([int(one) for one in rowids]),
        )

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._db.execute(query, values).fetchall()


def numbers_of(words: Sequence[str]) -> list[str]:
    """What may make all the difference between two texts that are alike; ascending."""
    return sorted(word for word in words if any(letter.isdigit() for letter in word))
