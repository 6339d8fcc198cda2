"""The rules of single fields, made of the bounds that the .proto files say. PURE.

A `Rule` raises `RemoteProtocolError` with the field's path, what was found and what was
expected. `rule_of` makes that of a field; the functions behind it also serve rules that
join several fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from google.protobuf.descriptor import EnumValueDescriptor, FieldDescriptor
from google.protobuf.message import Message

from peers.wire.errors import RemoteProtocolError
from proto import bounds
from proto.bounds_pb2 import COUNT, Bounds, Kind

COUNT_MAX: Final = int(bounds.holds_of(Kind.DESCRIPTOR.values_by_number[COUNT]).most)

Rule = Callable[[str, Any], None]  # (path of the field, its value): raises RemoteProtocolError


@dataclass(frozen=True)
class Part:
    """A field that is itself a message; it is checked by the table in turn."""

    presence: Literal["required", "optional"] = "required"


@dataclass(frozen=True)
class Parts:
    """A list of messages, ``length`` of them; the table checks each, and that its field
    ``without`` is left empty. ``by_site``: sorted by site, each site's once. ``content``:
    the rule of their field of this name, by the message that the list is in.
    """

    length: Rule
    without: str = ""
    by_site: bool = False
    content: Callable[[Message], Rule] | None = None


def rule_of(field: FieldDescriptor) -> Rule | Part | Parts:
    """What a field must be, as its bounds say. Raises TypeError where they say too little."""
    said = bounds.bounds_of(field)
    if field.message_type is None:
        rule = _rule_of_one(field, said)
        if not field.is_repeated:
            return rule
        return each(rule, _length_of(field, said), ordered=said.items.ascending)
    if field.is_repeated:
        content = _content_of(field, said.held_by) if said.held_by else None
        return Parts(_length_of(field, said), said.without, said.items.ascending, content)
    # Of a oneof one is there, and which is a matter of all of them.
    free_to_lack = said.optional or field.containing_oneof is not None
    return Part("optional" if free_to_lack else "required")


def _length_of(field: FieldDescriptor, said: Bounds) -> Rule:
    if not said.items.most:
        raise TypeError(f"{field.full_name} does not say how long the list may be")
    return long(said.items.least, said.items.most)


def _content_of(field: FieldDescriptor, held_by: str) -> Callable[[Message], Rule]:
    """What is in a list holds what the value of a field says, or the value of this name."""
    around = field.containing_type
    assert around is not None  # noqa: S101  fields are in messages
    beside = around.fields_by_name.get(held_by)
    if beside is None or beside.enum_type is None:
        enums = around.file.enum_types_by_name.values()
        (named,) = (enum for enum in enums if held_by in enum.values_by_name)
        rule = _octets_held_by(named.values_by_name[held_by])
        return lambda _message: rule
    if beside.index > field.index:
        raise TypeError(f"{field.full_name} is checked before {held_by}: put it behind that")
    rules = {value.number: _octets_held_by(value) for value in beside.enum_type.values}
    return lambda message: rules[getattr(message, held_by)]


def _octets_held_by(value: EnumValueDescriptor) -> Rule:
    """One that does not say how much it holds, as an unspecified one, holds nothing."""
    said = bounds.holds_of(value)
    return octets(int(said.least), int(said.most))


def _rule_of_one(field: FieldDescriptor, said: Bounds) -> Rule:
    """Of the field's one value, or of each in its list."""
    if said.any or field.type == field.TYPE_BOOL:
        return free
    if said.word or said.choice:
        return one_of(*said.word, *map(int, said.choice))
    if field.enum_type is not None:
        return one_of(*bounds.names_of(field.enum_type))
    if said.pattern:
        return matching(f"({said.pattern})?" if said.optional else said.pattern, said.words)
    if not said.HasField("most"):
        raise TypeError(f"{field.full_name} has no bounds: say them as its option")
    low, high = said.above if said.HasField("above") else said.least, said.most
    if field.cpp_type == field.CPPTYPE_DOUBLE:
        return real(low, high, above=said.HasField("above"), unknown=said.unknown)
    if field.type == field.TYPE_STRING:
        return (foreign_text if said.foreign else text)(int(low), int(high))
    if field.type == field.TYPE_BYTES:
        return octets(int(low), int(high))
    return number(int(low), int(high))


def rule_for(message: str, name: str) -> Rule:
    """The rule of a field that is no message; of a list of messages that of its length."""
    rule = rule_of(bounds.fields_of(message)[name])
    assert not isinstance(rule, Part)  # noqa: S101  our own names
    return rule.length if isinstance(rule, Parts) else rule


def most(message: str, name: str) -> int:
    """The greatest number, or the most characters or bytes, that a field may hold."""
    return int(bounds.of(message, name).most)


def refuse(path: str, value: str, expected: str) -> RemoteProtocolError:
    """The error for a field: its path, what was found, what was expected."""
    return RemoteProtocolError(f"{path} is {value}; expected {expected}")


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


def foreign_text(low: int, high: int) -> Rule:
    """Any characters: it names what others have named. Whoever prints it makes them visible."""

    def rule(path: str, value: str) -> None:
        if not low <= len(value) <= high:
            raise refuse(path, f"{len(value)} characters long", f"{low} .. {high}")

    return rule


def matching(pattern: str, words: str = "") -> Rule:
    """A text that matches as a whole; ``words``: what is said of the pattern."""
    compiled = re.compile(pattern)

    def rule(path: str, value: str) -> None:
        if not compiled.fullmatch(value):
            raise refuse(path, shown(value), words or pattern)

    return rule


def octets(low: int, high: int) -> Rule:
    """So many bytes."""
    expected = f"{low} bytes" if low == high else f"{low} .. {high} bytes"

    def rule(path: str, value: bytes) -> None:
        if not low <= len(value) <= high:
            raise refuse(path, f"{len(value)} bytes", expected)

    return rule


def long(low: int, high: int) -> Rule:
    """A list of so many."""

    def rule(path: str, values: Sequence[Any]) -> None:
        if not low <= len(values) <= high:
            raise refuse(path, f"{len(values)} long", f"{low} .. {high}")

    return rule


def each(rule: Rule, length: Rule, *, ordered: bool = False) -> Rule:
    """A list; ``ordered``: strictly ascending, so none occurs twice."""

    def list_rule(path: str, values: Sequence[Any]) -> None:
        length(path, values)
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
