"""What a request would be before it is parsed: of two bytes may come a hundred.

A field of no length costs two bytes on the wire and an object in memory, so a message within its
size may take a hundred times that: what has too many parts is refused as it came.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

MOST_PARTS = 500_000  # of a batch: five documents of as many blocks as one may have, or pairs


class TooManyParts(Exception):
    """A message has more parts than any that is meant, or none that can be counted."""


def count_parts(raw: bytes, kind: Descriptor, left: int = MOST_PARTS) -> int:
    """Fields of a message, and of those in it that hold lists. Raises TooManyParts.

    Where the bytes are no message, what is left is for the parser to refuse.
    """
    try:
        return _count(raw, 0, len(raw), kind, left)
    except IndexError:
        return 0


def _count(raw: bytes, at: int, end: int, kind: Descriptor, left: int) -> int:
    held = 0
    while at < end:
        held += 1
        if held > left:
            raise TooManyParts
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(raw, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type and _holds_lists(field.message_type):
                    inner_end = min(at + size, end)
                    held += _count(raw, at, inner_end, field.message_type, left - held)
                at += size
            case _:
                raise TooManyParts  # groups, which no message of ours has
    return held


@cache
def _holds_lists(kind: Descriptor) -> bool:
    return any(
        (field.is_repeated and not _is_packed(field)) or field.message_type for field in kind.fields
    )


def _is_packed(field: FieldDescriptor) -> bool:
    return field.message_type is None and field.type not in (
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
    )


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
