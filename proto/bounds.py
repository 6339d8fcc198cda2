"""What a field of a message may hold, read from the options of the .proto files.

The only home of these numbers: `peers` and the control service derive from them what they
refuse, `config` what an operator may choose, `fedctl` what it offers.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, EnumValueDescriptor, FieldDescriptor

from proto import bounds_pb2, control_pb2, federation_pb2, questions_pb2
from proto.bounds_pb2 import Bounds, ModeTraits


def bounds_of(field: FieldDescriptor) -> Bounds:
    """The bounds of a field, those of its kind included; empty where none are said."""
    said = field.GetOptions().Extensions[bounds_pb2.bounds]
    whole = Bounds()
    if said.kind:
        whole.CopyFrom(holds_of(bounds_pb2.Kind.DESCRIPTOR.values_by_number[said.kind]))
    whole.MergeFrom(said)
    return whole


def holds_of(value: EnumValueDescriptor) -> Bounds:
    """What the value of an enum stands for: the bounds of a kind, the bytes of an object."""
    return value.GetOptions().Extensions[bounds_pb2.holds]


def traits_of(mode: int) -> ModeTraits:
    """What plans and statements of a secure-sum mode have."""
    value = federation_pb2.Mode.DESCRIPTOR.values_by_number[mode]
    return value.GetOptions().Extensions[bounds_pb2.of_mode]


def sites_needed(rule: str, f: int, *, encrypted: bool = True) -> int:
    """The fewest sites among which a robust rule holds against f of them.

    Of encrypted updates key holders, all but one, say what they decrypted: f of 2f + 1 may lie.
    """
    value = numbers_of(federation_pb2.RobustRule.DESCRIPTOR)[rule]
    of_rule = federation_pb2.RobustRule.DESCRIPTOR.values_by_number[value].GetOptions()
    beyond = of_rule.Extensions[bounds_pb2.beyond_twice_f]
    return max(3, 2 * f + (max(2, beyond) if encrypted else beyond))


def fields_of(message: str) -> Mapping[str, FieldDescriptor]:
    """The fields of a message by name: between sites, of what fedctl asks, or people's programs.

    KeyError for one that there is not. No name is in two of them.
    """
    files = (federation_pb2, control_pb2, questions_pb2)
    of_each = [file.DESCRIPTOR.message_types_by_name for file in files]
    return ChainMap(*of_each)[message].fields_by_name


def of(message: str, name: str) -> Bounds:
    """The bounds of a field, by its message's name."""
    return bounds_of(fields_of(message)[name])


def chosen(message: str, name: str) -> tuple[float, bool, float]:
    """What a person may choose: the least, whether it must be more than that, the most."""
    said = of(message, name)
    low, above = said.least, said.HasField("above")
    if above or said.HasField("least_chosen"):
        low = said.above if above else said.least_chosen
    high = said.most_chosen if said.HasField("most_chosen") else said.most
    return _written(low), above, _written(high)


def _written(value: float) -> float:
    return int(value) if value.is_integer() else value


@cache
def names_of(enum: EnumDescriptor) -> Mapping[Any, str]:  # a value is a kind of int of its own
    """What people call the values of an enum: without what all names begin with, in small letters.

    NEGATIVES_IN_BATCH is ``in_batch``, HEAD is ``head``. A value that says nothing has no name.
    """
    values = [value for value in enum.values if not value.name.endswith("_UNSPECIFIED")]
    words = [value.name.split("_") for value in values]
    columns = enumerate(zip(*words, strict=False))
    common = next((n for n, same in columns if len(set(same)) > 1), 0)
    start = sum(len(word) + 1 for word in words[0][:common])
    return {value.number: value.name[start:].lower() for value in values}


@cache
def numbers_of(enum: EnumDescriptor) -> Mapping[str, Any]:
    """The values of an enum by what people call them."""
    return {name: number for number, name in names_of(enum).items()}
