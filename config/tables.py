"""One table of a settings file, and how its options take bounds and defaults.

What stands in a plan is bounded on the wire (proto/federation.proto), and what is an axis
of learning has the default of the usual recipe: neither is said here again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field

from config.recipes import DEFAULT_RECIPE, RECIPES
from proto import bounds

_USUAL = RECIPES[DEFAULT_RECIPE]


class Section(BaseModel):
    """One table of the file: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


S = TypeVar("S", bound=Section)


def as_in(message: str, name: str, default: float | None, *, least: float | None = None) -> Any:
    """An option that is bounded like a field of the wire; ``least``: but from there on."""
    limits = {key: limit for one in _bounds(message, name) for key, limit in asdict(one).items()}
    return Field(default, **limits | ({} if least is None else {"ge": least}))


def _bounds(message: str, name: str) -> list[Ge | Gt | Le]:
    """What a person may choose there; nothing for choices, which have names."""
    if not bounds.of(message, name).HasField("most"):
        return []
    low, above, high = bounds.chosen(message, name)
    return [Gt(low) if above else Ge(low), Le(high)]


def planned(behind: str, message: str = "") -> Callable[[type[S]], type[S]]:
    """Give axes the default of the usual recipe, and what stands in a plan its bounds there.

    ``behind``: the option that axes follow, as in the file; so mistakes are told in its order.
    """

    def derived(section: type[S]) -> type[S]:
        options = section.model_fields
        for name, option in options.items():
            if hasattr(_USUAL, name):
                option.default = getattr(_USUAL, name)
            if message and name in bounds.fields_of(message):
                option.metadata += _bounds(message, name)
        own = [name for name in section.__annotations__ if not hasattr(_USUAL, name)]
        before = own[: own.index(behind) + 1]
        ordered = {name: options[name] for name in (*before, *options)}
        options.clear()
        options.update(ordered)
        section.model_rebuild(force=True)
        return section

    return derived
