"""Bounds of single fields, from which the rules of messages are made. PURE.

Each function here makes a `Rule`, which raises `RemoteProtocolError` with the field's
path, what was found and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from peers.wire.errors import RemoteProtocolError

# Counters must fit SQLite's signed integers and leave room to count on.
COUNT_MAX: Final = 2**62

Rule = Callable[[str, Any], None]  # (path of the field, its value): raises RemoteProtocolError


@dataclass(frozen=True)
class Part:
    """A field that is itself a message; it is checked by the table in turn."""

    presence: Literal["required", "optional", "absent"] = "required"


def refuse(path: str, found: str, expected: str) -> RemoteProtocolError:
    """The error for a field: its path, what was found, what was expected."""
    return RemoteProtocolError(f"{path} is {found}; expected {expected}")


def number(low: int, high: int = COUNT_MAX) -> Rule:
    """A whole number, both ends allowed."""

    def rule(path: str, value: int) -> None:
        if not low <= value <= high:
            raise refuse(path, str(value), f"{low} .. {high}")

    return rule


def one_of(*allowed: Any) -> Rule:
    """One of these values."""

    def rule(path: str, value: object) -> None:
        if value not in allowed:
            expected = ", ".join(str(choice) for choice in allowed)
            raise refuse(path, shown(value), f"one of {expected}")

    return rule


def real(low: float, high: float, *, above: bool = False, unknown: bool = False) -> Rule:
    """``above``: greater than ``low``; ``unknown``: NaN is allowed and says so."""

    def rule(path: str, value: float) -> None:
        if unknown and math.isnan(value):
            return
        # NaN fails the comparison, as it should.
        if not low <= value <= high or (above and value == low):
            raise refuse(path, str(value), f"{'above ' if above else ''}{low:g} .. {high:g}")

    return rule


def text(low: int, high: int) -> Rule:
    """Printable characters only: texts end up in terminals and logs."""

    def rule(path: str, value: str) -> None:
        if not low <= len(value) <= high:
            raise refuse(path, f"{len(value)} characters long", f"{low} .. {high}")
        if not value.isprintable():
            raise refuse(path, shown(value), "printable characters on one line")

    return rule


def matching(pattern: str) -> Rule:
    """A text that matches as a whole."""
    compiled = re.compile(pattern)

    def rule(path: str, value: str) -> None:
        if not compiled.fullmatch(value):
            raise refuse(path, shown(value), pattern)

    return rule


def octets(low: int, high: int) -> Rule:
    """So many bytes."""
    expected = f"{low} bytes" if low == high else f"{low} .. {high} bytes"

    def rule(path: str, value: bytes) -> None:
        if not low <= len(value) <= high:
            raise refuse(path, f"{len(value)} bytes", expected)

    return rule


def each(rule: Rule, low: int, high: int, *, ordered: bool = False) -> Rule:
    """A list of ``low`` to ``high``; ``ordered``: strictly ascending, so none occurs twice."""

    def list_rule(path: str, values: Sequence[Any]) -> None:
        if not low <= len(values) <= high:
            raise refuse(path, f"{len(values)} long", f"{low} .. {high}")
        for position, value in enumerate(values):
            rule(f"{path}[{position}]", value)
        if ordered:
            ascending(path, values)

    return list_rule


def ascending(path: str, values: Sequence[str]) -> None:
    """Raise RemoteProtocolError unless strictly ascending."""
    if any(not before < after for before, after in pairwise(values)):
        raise refuse(path, "not in ascending order", "sorted, each once")


def free(_path: str, _value: object) -> None:
    """Every value of the wire type has a meaning."""


def shown(value: object) -> str:
    """A peer's value as it may be told: ASCII, cut to 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
