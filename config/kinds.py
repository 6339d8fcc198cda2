"""Kinds of values that a settings file holds: each checked, each refused with its remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from config import control_socket
from config.recipes import DEFAULT_ENCODER, DEFAULT_RECIPE, PERSONAL, RECIPES
from proto import bounds

_SITE_ID = re.compile(bounds.of("Signed", "site").pattern)
_PAGE_URL = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]{2,45}\])(?::\d{1,5})?")
_GROUP = re.compile(r"[A-Za-z_][\w.-]{0,31}", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_WRITER_URL = re.compile(
    r"http://(localhost|127(\.\d{1,3}){3}|\[::1\]):\d{1,5}(/[^#\s]*)?#\S+", re.ASCII
)
_INDEX_ADDRESS = re.compile(
    r"https://[\w.-]{1,253}:\d{1,5}|http://(localhost|127(\.\d{1,3}){3}):\d{1,5}", re.ASCII
)
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]", re.ASCII)
_BIND = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})")


def _refuse(expected: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "refused", {"expected": expected, "remedy": remedy})


def _as_path(value: object, info: ValidationInfo) -> Path:
    """An absolute path; a relative one starts at the folder of the settings file."""
    expected = "a path in quotes, absolute or relative to the settings file"
    if not isinstance(value, str | Path):
        raise _refuse(expected, 'write it in quotes, e.g. "/var/lib/hanse"')
    text = str(value)
    if not text or "\0" in text:
        raise _refuse(expected, "write a path or remove the line to get the default")
    if text.startswith("~"):
        raise _refuse(expected, "write the home folder out: ~ means nothing to a service")
    if info.context is None:
        raise TypeError("settings come from load(), which knows the folder paths start at")
    folder: Path = info.context["folder"]
    return Path(os.path.normpath(folder / text))


def _as_socket(path: Path) -> Path:
    if len(os.fsencode(path)) > control_socket.LONGEST_PATH:
        raise _refuse(
            f"a path of at most {control_socket.LONGEST_PATH} bytes, the limit of Unix sockets",
            "choose a shorter one, e.g. under /run",
        )
    return path


def _as_bind(value: str) -> str:
    match = _BIND.fullmatch(value)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise _refuse(
            '"host:port" with a port from 1 to 65535, IPv6 as "[::]:7443"',
            'write for example "0.0.0.0:7443"',
        )
    return value


def _as_group(value: str) -> str:
    if _GROUP.fullmatch(value) is None:
        raise _refuse("the name of a group", 'write for example "hanse-admin" or remove the line')
    return value


def _as_page_url(value: str) -> str:
    if _PAGE_URL.fullmatch(value) is None:
        raise _refuse(
            '"https://HOST" or "http://HOST", with a port if need be and without a path',
            'write for example "https://ask.example.org" or remove the line',
        )
    return value


def _as_site_id(value: str) -> str:
    if _SITE_ID.fullmatch(value) is None:
        raise _refuse(
            "1 to 63 characters a-z, 0-9 and -, the first no -",
            "write the site id of the certificate or remove the line",
        )
    return value


def _as_encoder(value: str, info: ValidationInfo) -> str:
    """A hub id stays as it is; what starts like a path becomes an absolute one."""
    if value.startswith(("/", "./", "../")):
        return str(_as_path(value, info))
    if _HUB_ID.fullmatch(value) is None:
        raise _refuse(
            "a hub id (organisation/name) or a path that starts with /, ./ or ../",
            f"write for example {json.dumps(DEFAULT_ENCODER)}",
        )
    return value


def _as_writer(value: str, info: ValidationInfo) -> str:
    """A model's folder, or a server on this machine: passages are shown to it."""
    if value.startswith("http"):
        if _WRITER_URL.fullmatch(value) is None:
            raise _refuse(
                'a server on this machine, "http://127.0.0.1:PORT/v1#MODEL", or a folder',
                "passages must not leave this machine: run the model here",
            )
        return value
    return str(_as_path(value, info))


def _as_index_address(value: str) -> str:
    """A server of vectors, which tell much of their texts: in the clear on this machine alone."""
    if _INDEX_ADDRESS.fullmatch(value) is None:
        raise _refuse(
            'a server\'s "https://HOST:PORT", or "http://127.0.0.1:PORT" on this machine',
            "give the server a certificate: vectors must not cross a network in the clear",
        )
    return value


def _as_generator(value: str, info: ValidationInfo) -> str:
    """One of those that `load` was told of; who doesn't answer, as fedctl, knows of none."""
    known: Sequence[str] = (info.context or {}).get("generators", ())
    if known and value not in known:
        raise _refuse(f"one of {', '.join(map(json.dumps, known))}", "choose one of these")
    return value


def _one_of(
    known: Sequence[object], example: str, *, refused: Sequence[object] = ()
) -> BeforeValidator:
    """One of these; ``refused``: those that `config.loading` refuses, and why."""

    def check(value: object) -> object:
        if value not in (*known, *refused):
            raise _refuse(
                f"one of {', '.join(map(json.dumps, known))}", f"write for example {example}"
            )
        return value

    return BeforeValidator(check)


def _names(message: str, field: str) -> Sequence[str]:
    """What the values of a field's enum are called."""
    return (*bounds.names_of(bounds.fields_of(message)[field].enum_type).values(),)


# Which updates may be in the sum. Those that need every value in the clear are known, and
# refused with the reason (`config.loading`).
RULES = _names("TrainingPlan", "robust")
RULES_ON_VALUES = ("median", "trimmed_mean")
_LEVELS = _names("NegativesRequest", "level")
_BITS = [*map(int, bounds.of("TrainingPlan", "bits").choice)]


def _as_levels(value: object) -> tuple[str, ...]:
    """Levels of disclosure, each once."""
    if not isinstance(value, list | tuple) or any(level not in _LEVELS for level in value):
        raise _refuse(
            f"a list of {', '.join(map(json.dumps, _LEVELS))}",
            'write for example ["bucket"], or [] to answer at no level',
        )
    return tuple(dict.fromkeys(value))


def _as_beginnings(value: object) -> tuple[str, ...]:
    """What ids begin with; "" would be all of them, and is not how to say so."""
    good = isinstance(value, list | tuple) and all(
        isinstance(text, str) and 1 <= len(text) <= 512 for text in value
    )
    if not good:
        raise _refuse(
            "a list of texts of 1 to 512 characters", 'write for example ["public/"], or [] for all'
        )
    return tuple(value)  # type: ignore[arg-type]  # just looked at


_LAYER_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")


def _as_layer_names(value: object) -> tuple[str, ...]:
    """How the names of a model's layers end."""
    good = isinstance(value, list | tuple) and all(
        isinstance(text, str) and _LAYER_NAME.fullmatch(text) for text in value
    )
    if not good:
        raise _refuse("a list of layers' names", 'write for example ["q", "v"], or []')
    return tuple(value)  # type: ignore[arg-type]  # just looked at


LONGEST_COLLECTION = 100  # characters


def _as_folders(value: object) -> dict[str, Path]:
    """Folders by the collections that their files become; none of them in another one."""
    example = 'write for example contracts = "/srv/contracts" below [library.folders]'
    if not isinstance(value, dict):
        raise _refuse("a table of names and paths", example)
    folders: dict[str, Path] = {}
    for name, text in value.items():
        if not 1 <= len(name) <= LONGEST_COLLECTION or not name.isprintable() or "/" in name:
            raise _refuse(
                f"names of 1 to {LONGEST_COLLECTION} printable characters without /",
                f"rename {json.dumps(name[:LONGEST_COLLECTION])}",
            )
        # Relative to what? A service is started anywhere, and this may be read by fedctl.
        if not isinstance(text, str) or not text.startswith("/") or "\0" in text:
            raise _refuse("paths in quotes that begin with /", f"correct that of {name}: {example}")
        folders[name] = Path(os.path.normpath(text))
    for name, path in folders.items():
        for other, inner in folders.items():
            if name != other and inner.is_relative_to(path):
                raise _refuse(
                    "folders of which none is in another one",
                    f"take out one of {name} and {other}: files would be read twice",
                )
    return folders


def on_this_machine(bind: str) -> bool:
    """Whether only this machine can reach what listens there."""
    return _LOOPBACK.fullmatch(bind.rpartition(":")[0]) is not None


def available_cores() -> int:
    """Processor cores this process may run on (less than the machine has, in a container)."""
    return len(os.sched_getaffinity(0))


FilePath = Annotated[Path, BeforeValidator(_as_path)]
SocketPath = Annotated[Path, BeforeValidator(_as_path), AfterValidator(_as_socket)]
Folders = Annotated[dict[str, Path], BeforeValidator(_as_folders)]
Bind = Annotated[str, AfterValidator(_as_bind)]
SiteId = Annotated[str, AfterValidator(_as_site_id)]
PageUrl = Annotated[str, AfterValidator(_as_page_url)]
GroupName = Annotated[str, AfterValidator(_as_group)]
EncoderName = Annotated[str, AfterValidator(_as_encoder)]
_PERSONAL_EXAMPLE = f"personal = {json.dumps(RECIPES[DEFAULT_RECIPE].personal)}"
PersonalName = Annotated[str, _one_of(PERSONAL, _PERSONAL_EXAMPLE)]
RuleName = Annotated[str, _one_of(RULES, 'rule = "norm"', refused=RULES_ON_VALUES)]
ModeName = Annotated[str, _one_of(_names("TrainingPlan", "mode"), 'mode = "ckks"')]
Bits = Annotated[int, _one_of(_BITS, "bits = 16")]
OF_ALL_DOCUMENTS: Final = ("metrics", "view")
"""Scopes of tokens that tell of the site as a whole: not for who may ask of some collections."""
RetrievalLevel = Literal["passage", "sentence", "both"]
PromptKind = Literal["general", "domain", "metric", "novel", "medical"]
"""Kinds of questions; each is a file of `daemon.answering.prompts`."""
PromptChoice = Literal["general", "domain", "metric", "novel", "medical", "auto"]
"""One of these for all questions, or by a rule for each (`daemon.answering.prompts.kinds`)."""
DecodingName = Literal["fede4rag", "pfedrag"]
"""Of `config.answering.DECODINGS`."""
Unsupported = Literal["drop", "mark"]
GeneratorName = Annotated[str, AfterValidator(_as_generator)]
WriterName = Annotated[str, AfterValidator(_as_writer)]
IndexAddress = Annotated[str, AfterValidator(_as_index_address)]
LONGEST_PROMPT = 200  # characters
Prompt = Annotated[str, Field(max_length=LONGEST_PROMPT)]
Pooling = Literal["mean", "cls", "max", "lasttoken"]
"""How the vectors of a text's tokens become one; `daemon.learning.retriever.reading` has them."""
LevelName = Annotated[str, _one_of(_LEVELS, 'level = "bucket"')]
Levels = Annotated[tuple[str, ...], BeforeValidator(_as_levels)]
Beginnings = Annotated[tuple[str, ...], BeforeValidator(_as_beginnings)]
LayerNames = Annotated[tuple[str, ...], BeforeValidator(_as_layer_names)]
