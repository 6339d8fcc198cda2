"""Plans by the names that settings give their fields: one loop there, one back.

A field of a plan and the option that fills it have one name; values of enums are called as
`proto.bounds.names_of` calls them. So a new field needs no line here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.message import Message

from proto.bounds import names_of, numbers_of


def fill(plan: Message, options: Mapping[str, Any]) -> None:
    """Set each field of ``plan`` that is among ``options``; parts of it are left alone.

    KeyError for the name of a value that there is not.
    """
    for field in plan.DESCRIPTOR.fields:
        if field.message_type is None and field.name in options:
            value = options[field.name]
            named = field.enum_type is not None
            setattr(plan, field.name, numbers_of(field.enum_type)[value] if named else value)


def options_in(plan: Message, wanted: Collection[str]) -> dict[str, Any]:
    """The fields of ``plan`` that are among ``wanted``, as settings would say them."""
    options = {}
    for field in plan.DESCRIPTOR.fields:
        if field.name in wanted:
            value = getattr(plan, field.name)
            named = field.enum_type is not None
            options[field.name] = names_of(field.enum_type)[value] if named else value
    return options
