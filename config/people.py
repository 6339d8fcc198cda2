"""People who sign in elsewhere: the file that `gateway.people` names, read and checked.

It is a file of its own because it is read again whenever it changes: whom an institution lets in
changes more often than how its site learns. What every option does stands in
``people.example.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from config.kinds import LONGEST_COLLECTION, OF_ALL_DOCUMENTS, FilePath
from config.loading import Problem, SettingsError
from config.tables import Section
from proto import bounds

SCOPES: tuple[str, ...] = (*bounds.of("CreateTokenRequest", "scopes").word,)
MOST_BYTES = 256 << 10  # of this file, and of each file of keys
_MOST_COLLECTIONS = 100


def _refuse(expected: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "refused", {"expected": expected, "remedy": remedy})


def _texts(value: object, expected: str, example: str, most: int) -> tuple[str, ...]:
    """A list of texts, each once."""
    good = isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value)
    if not good or len(value) > most:  # type: ignore[arg-type]  # just looked at
        raise _refuse(expected, f"write for example {example}")
    return tuple(dict.fromkeys(value))  # type: ignore[call-overload]  # likewise


def _as_collections(value: object) -> tuple[str, ...]:
    expected = (
        f"a list of at most {_MOST_COLLECTIONS} names of collections, each of 1 to "
        f"{LONGEST_COLLECTION} characters"
    )
    example = '["contracts/2024"]'
    names = [one.strip("/") for one in _texts(value, expected, example, _MOST_COLLECTIONS)]
    if any(not 1 <= len(one) <= LONGEST_COLLECTION for one in names):
        raise _refuse(expected, f"write for example {example}")
    return tuple(names)


def _as_scopes(value: object) -> tuple[str, ...]:
    expected = f"a list of some of {', '.join(SCOPES)}"
    scopes = _texts(value, expected, '["ask", "search"]', len(SCOPES))
    if not scopes or not set(scopes) <= set(SCOPES):
        raise _refuse(expected, 'write for example ["ask", "search"]')
    return scopes


def _as_claim(value: object) -> tuple[str, ...]:
    """The way to a claim; one in text is a claim of that very name, dots and all."""
    way = (value,) if isinstance(value, str) else value
    return _texts(way, "a claim's name, or a list of at most 4", '["realm_access", "roles"]', 4)


def _as_algorithms(value: object) -> tuple[str, ...]:
    expected = f"a list of some of {', '.join(ALGORITHMS)}: signatures by a private key, all else "
    expected += "could be made by whoever reads the public ones"
    algorithms = _texts(value, expected, '["RS256"]', len(ALGORITHMS))
    if not algorithms or not set(algorithms) <= set(ALGORITHMS):
        raise _refuse(expected, 'write for example ["RS256"]')
    return algorithms


ALGORITHMS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", ())),
    "ES256": ("EC", ("P-256",)),
    "ES384": ("EC", ("P-384",)),
    "ES512": ("EC", ("P-521",)),
    "EdDSA": ("OKP", ("Ed25519", "Ed448")),
}
"""Algorithms of signatures that can be named, with the type of their keys and its curves."""

Collections = Annotated[tuple[str, ...], BeforeValidator(_as_collections)]
Scopes = Annotated[tuple[str, ...], BeforeValidator(_as_scopes)]
Claim = Annotated[tuple[str, ...], BeforeValidator(_as_claim)]
Algorithms = Annotated[tuple[str, ...], BeforeValidator(_as_algorithms)]
Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\z")]
TokenName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\z")]
Said = Annotated[str, Field(min_length=1, max_length=500)]


class Grant(Section):
    """What one group may: scopes, and of which documents."""

    scopes: Scopes
    collections: Collections = ()
    all_documents: bool = False


Groups = Annotated[dict[Said, Grant], Field(min_length=1, max_length=1000)]


class Issuer(Section):
    """``[issuers.NAME]``: an identity provider whose signed tokens are taken."""

    issuer: Said
    audience: Said
    keys: FilePath
    algorithms: Algorithms = ("RS256",)
    groups_claim: Claim = ("groups",)
    longest_hours: float = Field(12.0, gt=0, le=24)
    groups: Groups


class Speaker(Section):
    """``[speakers.TOKEN]``: a program that asks with this one token and says for whom."""

    kind: Literal["open-webui"] = "open-webui"
    secret: FilePath
    groups_claim: Claim = ("role",)
    longest_hours: float = Field(1.0, gt=0, le=24)
    groups: Groups


class PeopleSettings(Section):
    """All of the file."""

    issuers: dict[Label, Issuer] = Field(default_factory=dict, max_length=16)
    speakers: dict[TokenName, Speaker] = Field(default_factory=dict, max_length=16)


def load_people(path: Path) -> PeopleSettings:
    """Read and check it; relative paths in it start at its own folder.

    Raises SettingsError with all that is wrong with it.
    """

    def refused(found: str, remedy: str) -> SettingsError:
        return SettingsError(path, (Problem("file", found, "a TOML file", remedy),))

    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        remedy = "check gateway.people and who may read it (config/people.example.toml)"
        raise refused(error.strerror or str(error), remedy) from error
    if len(raw) > MOST_BYTES:
        raise refused(f"more than {MOST_BYTES >> 10} KiB", "name fewer groups")
    try:
        document = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise refused(str(error), "correct the file there (text goes in quotes)") from error
    context = {"folder": path.absolute().parent}
    try:
        people = PeopleSettings.model_validate(document, context=context)
    except ValidationError as error:
        raise SettingsError(path, tuple(_explain(one) for one in error.errors())) from error
    if problems := (*_contradictions(people),):
        raise SettingsError(path, problems)
    return people


def _explain(details: ErrorDetails) -> Problem:
    key, context = _key(details["loc"]), details.get("ctx", {})
    if details["type"] == "setting":
        return Problem(key, "", context["expected"], context["remedy"])
    if details["type"] == "extra_forbidden":
        return Problem(key, "", "no such option", "remove it, or correct its name")
    if details["type"] == "missing":
        return Problem(key, "nothing", "a value", "write it; config/people.example.toml shows how")
    found = f"{details['input']!r}"
    return Problem(key, found[:60], details["msg"], "config/people.example.toml says what may be")


def _key(way: Sequence[Any]) -> str:
    return ".".join(str(one) for one in way if one != "[key]")[:200]


def _contradictions(people: PeopleSettings) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for name, one in people.issuers.items():
        if (other := seen.setdefault(one.issuer, name)) != name:
            yield Problem(
                f"issuers.{name}.issuer",
                f'"{one.issuer}"',
                f"another one than that of issuers.{other}",
                "put what both let in into one of them: a token says its issuer and no more",
            )
    for kind, named in (("issuers", people.issuers), ("speakers", people.speakers)):
        for name, signs in named.items():
            for group, grant in signs.groups.items():
                yield from _grant_problems(f"{kind}.{name}.groups.{group[:60]}", grant)


def _grant_problems(key: str, grant: Grant) -> Iterator[Problem]:
    """Rights to nothing, or to all beside some: neither is what somebody meant."""
    if grant.all_documents == bool(grant.collections):
        yield Problem(key, "", "collections, or all_documents = true", "write one of the two")
    elif not grant.all_documents and (wide := set(OF_ALL_DOCUMENTS) & set(grant.scopes)):
        yield Problem(
            f"{key}.scopes",
            "",
            f"no {min(wide)} beside collections: figures are of all documents",
            "give it to a group with all_documents = true",
        )
