"""Mutations that keep a form while they spoil what it says.

Blind mutation is stopped by the first checksum, length or signature. These
take an input apart, change something inside, and put it together again with its
lengths right; the targets then sign and digest it anew. What can't be taken
apart is returned as it is, and is left to blind mutation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Mutate = Callable[[bytes, Random], bytes]

EDGES = (
    0,
    1,
    2,
    3,
    63,
    64,
    65,
    255,
    2**31 - 1,
    2**31,
    2**32 - 2,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, 1000.0, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "a", "alpha", "beta", "gamma", "delta", "-", "é", "\0", "\n", "a" * 63, "a" * 64)
_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    2**64,
    10**400,
    "",
    "x",
    [],
    {},
    [[]],
    "\ud800",
)


def mutate_bytes(raw: bytes, chance: Random) -> bytes:
    """One of: flip, overwrite, insert, delete, repeat, cut."""
    if not raw:
        return chance.randbytes(chance.choice((0, 1, 4, 32)))
    data = bytearray(raw)
    at = chance.randrange(len(data))
    length = min(chance.choice((1, 1, 2, 4, 8, 32)), len(data) - at)
    match chance.randrange(6):
        case 0:
            data[at] ^= 1 << chance.randrange(8)
        case 1:
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            data[at:at] = chance.randbytes(length)
        case 3:
            del data[at : at + length]
        case 4:
            data[at:at] = data[at : at + length]
        case 5:
            del data[at:]
    return bytes(data)


# ---- protobuf ------------------------------------------------------------------


def mutate_message(message: Message, chance: Random) -> None:
    """One field, somewhere in the tree, gets another value, goes, or comes."""
    node = chance.choice(list(_nodes(message)))
    fields: Any = node.DESCRIPTOR.fields
    if not fields:
        return
    chosen = chance.choice(fields)
    if chance.random() < 0.15:
        node.ClearField(chosen.name)
    elif chosen.is_repeated:
        _mutate_list(getattr(node, chosen.name), chosen, chance)
    elif chosen.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(node, chosen.name).SetInParent()
    else:
        setattr(node, chosen.name, _value(chosen, getattr(node, chosen.name), chance))


def _nodes(message: Message) -> Iterator[Message]:
    yield message
    for chosen, value in message.ListFields():
        if chosen.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for child in value if chosen.is_repeated else (value,):
                yield from _nodes(child)


def _mutate_list(values: Any, chosen: FieldDescriptor, chance: Random) -> None:
    at = chance.randrange(len(values)) if values else 0
    is_message = chosen.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    match chance.randrange(4):
        case 0 if values:
            del values[at]
        case 1 if values:
            values.extend(list(values)[: chance.choice((1, 300))])
        case 2 if values and not is_message:
            values[at] = _value(chosen, values[at], chance)
        case 3 if len(values) > 1:
            kept = list(values)
            chance.shuffle(kept)
            del values[:]
            values.extend(kept)
        case _ if is_message:
            values.add()
        case _:
            values.append(_value(chosen, None, chance))


def _value(chosen: FieldDescriptor, old: Any, chance: Random) -> Any:
    kind = FieldDescriptor
    match chosen.cpp_type:
        case kind.CPPTYPE_STRING if chosen.type == kind.TYPE_BYTES:
            return mutate_bytes(old or b"", chance)
        case kind.CPPTYPE_STRING:
            return chance.choice((*_TEXTS, (old or "") + "a", (old or "")[:-1]))
        case kind.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case kind.CPPTYPE_DOUBLE | kind.CPPTYPE_FLOAT:
            return chance.choice(_REALS)
        case kind.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 99, -1))
    signed = chosen.cpp_type in (kind.CPPTYPE_INT32, kind.CPPTYPE_INT64)
    bits = 32 if chosen.cpp_type in (kind.CPPTYPE_INT32, kind.CPPTYPE_UINT32) else 64
    number = chance.choice((*EDGES, (old or 0) + 1, (old or 0) - 1, chance.getrandbits(bits)))
    number %= 2**bits
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


# ---- DER (X.690) -----------------------------------------------------------------


@dataclass
class Tlv:
    """A tag and its content: bytes, or what is inside it."""

    tag: int
    content: bytes = b""
    inside: list[Tlv] = field(default_factory=list)
    prefix: bytes = b""  # of a BIT STRING that wraps DER: its count of unused bits

    @classmethod
    def parse_all(cls, raw: bytes, depth: int = 0) -> list[Tlv]:
        """Raises ValueError when it is not DER."""
        found, position = [], 0
        while position < len(raw):
            tag, content, position = _one(raw, position)
            found.append(cls(tag, content))
            if tag & 0x20:
                found[-1].inside = cls.parse_all(content, depth + 1)
            elif tag == 0x04 and depth < 12:  # extensions wrap DER in OCTET STRINGs
                try:
                    found[-1].inside = cls.parse_all(content, depth + 1)
                except ValueError:
                    found[-1].inside = []
        return found

    def encoded(self) -> bytes:
        body = b"".join(item.encoded() for item in self.inside) if self.inside else self.content
        if len(body) < 128:
            return bytes((self.tag, len(body))) + body
        size = (len(body).bit_length() + 7) // 8
        return bytes((self.tag, 0x80 | size)) + len(body).to_bytes(size, "big") + body

    def all(self) -> Iterator[Tlv]:
        yield self
        for item in self.inside:
            yield from item.all()


def _one(raw: bytes, position: int) -> tuple[int, bytes, int]:
    head = raw[position : position + 2]
    if len(head) < 2 or head[0] & 0x1F == 0x1F:
        raise ValueError("no short tag and length")
    tag, length = head
    position += 2
    if length >= 0x80:
        size = length & 0x7F
        if not 0 < size <= 4:
            raise ValueError("no definite length")
        length = int.from_bytes(raw[position : position + size], "big")
        position += size
    if position + length > len(raw):
        raise ValueError("longer than what holds it")
    return tag, raw[position : position + length], position + length


def mutate_der(raw: bytes, chance: Random) -> bytes:
    """One element changed, removed, doubled or moved; all lengths fit again."""
    try:
        roots = Tlv.parse_all(raw)
    except ValueError:
        return raw
    nodes = [node for root in roots for node in root.all()]
    if not nodes:
        return raw
    node = chance.choice(nodes)
    match chance.randrange(5):
        case 0 if node.inside:
            del node.inside[chance.randrange(len(node.inside))]
        case 1 if node.inside:
            node.inside.insert(0, chance.choice(node.inside))
        case 2 if node.inside:
            chance.shuffle(node.inside)
        case 3:
            node.tag = chance.choice(
                (0x01, 0x02, 0x04, 0x05, 0x0C, 0x13, 0x17, 0x30, 0x82, 0xA0, 0xA3)
            )
        case _ if not node.inside:
            node.content = mutate_bytes(node.content, chance)
    return b"".join(root.encoded() for root in roots)


# ---- JSON ------------------------------------------------------------------------


def mutate_json(value: Any, chance: Random) -> Any:
    """A copy in which one value, somewhere, is another, is gone, or has company."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        if chance.random() < 0.1:
            return rest
        if chance.random() < 0.1:
            return {**rest, chance.choice(_TEXTS): value[key]}
        return {**value, key: mutate_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + [value[at]] * chance.choice((1, 300))
            case 2:
                return [*value[:at], *reversed(value[at:])]
        return [*value[:at], mutate_json(value[at], chance), *value[at + 1 :]]
    if isinstance(value, str) and chance.random() < 0.6:
        return mutate_bytes(value.encode("utf-8", "replace"), chance).decode("latin-1")
    return chance.choice((*_ODD, *EDGES))


def read_json(raw: bytes) -> Any:
    """None where it is no JSON at all."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
