"""Which documents are searched: what is asked for, and what is here where nothing fits."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from daemon.library.catalogue.name_words import name_words
from daemon.library.readers.bounds import is_day

_LOOKED_AT = 20_000  # values of a kind, for the nearest
_TOLD = 5
_CLOSE = 0.5  # of difflib's ratio: a letter or two of a short word
_FIRST_DAY, _LAST_DAY = "0001-01-01", "9999-12-31"
_NO_DATES = "No document here says its date"
_FACETS = (
    "SELECT document_id FROM facet WHERE kind = ? AND value IN (SELECT value FROM json_each(?))"
    " GROUP BY document_id HAVING count(*) = ?"
)
_BETWEEN = "SELECT document_id FROM facet WHERE kind = 'date' AND value BETWEEN ? AND ?"
# Up to what is behind every text that begins so: no UTF-8 has such a byte.
_BELOW = (
    "SELECT d.id FROM (SELECT ? AS begins) JOIN document d"
    " ON d.id >= begins AND d.id < begins || CAST(x'ff' AS TEXT)"
)


class NothingFits(Exception):
    """No document is as asked for; the message says why, and what there is."""


@dataclass(frozen=True)
class Filters:
    """What a document has to be, all of it together; what is empty asks for nothing.

    ``begins``: its id, as it is written. ``collection``: as `fedctl ingest` named it.
    ``title``, ``author``: have all of these words, in any order
    (`daemon.library.catalogue.name_words`). ``since``, ``until``: its own day, YYYY-MM-DD,
    inclusive; one without a date is never between. ``tags``: all of these, as written.
    """

    begins: str = ""
    collection: str = ""
    title: str = ""
    author: str = ""
    since: str = ""
    until: str = ""
    language: str = ""
    tags: tuple[str, ...] = ()


EVERY = Filters()


@dataclass(frozen=True)
class _Condition:
    """``said``: as people ask for it; ``query``: ids of the documents that are so.

    ``kind``: of the facets that it is about, or "id" or "collection". ``wanted``: values, all of
    them.
    """

    said: str
    query: str
    values: tuple[str | int, ...]
    kind: str
    wanted: tuple[str, ...] = ()


def _conditions(filters: Filters) -> Iterator[_Condition]:
    if filters.begins:
        said = f"has an id that begins with {filters.begins!r}"
        yield _Condition(said, _BELOW, (filters.begins,), "id", (filters.begins,))
    if filters.collection:
        name = filters.collection.strip("/")
        said = f"is in the collection {name!r}"
        yield _Condition(said, _BELOW, (f"{name}/",), "collection", (name,))
    for kind, asked in (("title", filters.title), ("author", filters.author)):
        if asked:
            if not (words := name_words(asked)):
                raise NothingFits(f"no word is in the {kind} {asked!r}\nName words that it has")
            yield _having(f"has the {kind}", kind, words)
    if wrong := [day for day in (filters.since, filters.until) if day and not is_day(day)]:
        raise NothingFits(f"{wrong[0]!r} is no day\nWrite it as 2024-05-31")
    if filters.since or filters.until:
        since, until = filters.since or _FIRST_DAY, filters.until or _LAST_DAY
        said = f"has a date from {since} to {until}"
        yield _Condition(said, _BETWEEN, (since, until), "date")
    if filters.language:
        yield _having("has the language", "language", (filters.language,))
    if filters.tags:
        yield _having("has the tag", "tag", set(filters.tags))


def _having(said: str, kind: str, wanted: Iterable[str]) -> _Condition:
    all_of = tuple(sorted(wanted))
    values = (kind, json.dumps(all_of), len(all_of))
    return _Condition(f"{said} {' '.join(all_of)!r}", _FACETS, values, kind, all_of)


def fitting(db: sqlite3.Connection, filters: Filters) -> list[int] | None:
    """Labels of the passages of documents that fit, ascending; None: nothing is asked for.

    By indices alone: what does not fit is not looked at. Raises NothingFits, sqlite3.Error.
    """
    conditions = [*_conditions(filters)]
    if not conditions:
        return None
    fit = " INTERSECT ".join(one.query for one in conditions)
    rows = db.execute(
        f"SELECT rowid FROM passage WHERE document_id IN ({fit}) ORDER BY rowid",  # noqa: S608
        [value for one in conditions for value in one.values],
    ).fetchall()
    if not rows:
        raise NothingFits(_why(db, conditions))
    return [rowid for (rowid,) in rows]


def _why(db: sqlite3.Connection, conditions: Sequence[_Condition]) -> str:
    """The first that no document fits, with what there is; or that they don't go together."""
    counts = [_count(db, one) for one in conditions]
    for one, count in zip(conditions, counts, strict=True):
        if not count:
            return f"no document here {one.said}\n{_offer(db, one)}"
    fit = "; ".join(f"{count} {one.said}" for one, count in zip(conditions, counts, strict=True))
    return f"no document here fits all that is asked for\nOf those that fit one thing, {fit}"


def _count(db: sqlite3.Connection, condition: _Condition) -> int:
    query = f"SELECT count(*) FROM ({condition.query})"  # noqa: S608
    ((count,),) = db.execute(query, condition.values)
    return int(count)


def _offer(db: sqlite3.Connection, condition: _Condition) -> str:
    """What is here instead of what nothing has."""
    if condition.kind == "date":
        ((first, last, count),) = db.execute(
            "SELECT min(value), max(value), count(*) FROM facet WHERE kind = 'date'"
        )
        return f"{count} documents say a date, from {first} to {last}" if count else _NO_DATES
    there = _values(db, condition.kind)
    lacking = [one for one in condition.wanted if one not in there]
    if not there:
        return f"No document here has any {condition.kind}"
    if not lacking:
        return "Each is here, and no document has all of them"
    by_form = {value.casefold(): value for value in reversed(there)}
    close = get_close_matches(lacking[0].casefold(), by_form, n=_TOLD, cutoff=_CLOSE)
    if close:
        return f"Nearest to {lacking[0]!r}: {_listed([by_form[one] for one in close])}"
    others = " and others" if len(there) > _TOLD else ""
    return f"There are {_listed(there[:_TOLD])}{others}"


def _values(db: sqlite3.Connection, kind: str) -> list[str]:
    """What there is of a kind, most often first; of ids the folders that they lie in."""
    if kind in ("id", "collection"):
        named = db.execute("SELECT id FROM document ORDER BY id LIMIT ?", (_LOOKED_AT,))
        ids = [name for (name,) in named if kind == "id" or "/" in name]
        return list(dict.fromkeys(above for name in ids for above in _folders(name)))
    rows = db.execute(
        "SELECT value FROM facet WHERE kind = ? GROUP BY value"
        " ORDER BY count(*) DESC, value LIMIT ?",
        (kind, _LOOKED_AT),
    )
    return [value for (value,) in rows]


def _folders(document_id: str) -> Iterator[str]:
    parts = document_id.split("/")
    if len(parts) == 1:
        yield document_id
    for end in range(1, len(parts)):
        yield "/".join(parts[:end])


def _listed(values: Sequence[str]) -> str:
    return ", ".join(map(repr, values))
