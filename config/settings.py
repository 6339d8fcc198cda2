"""What the operator chooses: one TOML file, read and checked once.

`load` returns a frozen tree of `Settings`, or raises one `SettingsError` that
lists everything that is wrong with the file, a line each. What every option
does, and what goes wrong when it is off, stands in ``fedd.example.toml``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

# Linux sun_path holds 108 bytes, the last of them zero (unix(7)).
_LONGEST_SOCKET_PATH = 107
_SITE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_GROUP = re.compile(r"[A-Za-z_][\w.-]{0,31}", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_BIND = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})")
# Special tokens that an encoder puts around a text ([CLS] and [SEP]).
_SPECIAL_TOKENS = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what was found, what belongs there, what to do."""

    key: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        found = f" = {self.found}" if self.found else ""
        return f"{self.key}{found}: expected {self.expected}; {self.remedy}"


class SettingsError(Exception):
    """The settings file cannot be used; ``problems`` holds every reason at once."""

    def __init__(self, path: Path, problems: tuple[Problem, ...]) -> None:
        self.path = path
        self.problems = problems
        super().__init__("\n".join([f"settings refused: {path}", *(f"  {p}" for p in problems)]))


# ---- kinds of values --------------------------------------------------------


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
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise _refuse(
            f"a path of at most {_LONGEST_SOCKET_PATH} bytes, the limit of Unix sockets",
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
            'write for example "sentence-transformers/all-MiniLM-L6-v2"',
        )
    return value


_LEVELS = ("exact", "noisy", "bucket")


def _as_levels(value: object) -> tuple[str, ...]:
    """Levels of disclosure, each once."""
    if not isinstance(value, list | tuple) or any(level not in _LEVELS for level in value):
        raise _refuse(
            f"a list of {', '.join(_toml(level) for level in _LEVELS)}",
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


def available_cores() -> int:
    """Processor cores this process may run on (less than the machine has, in a container)."""
    return len(os.sched_getaffinity(0))


FilePath = Annotated[Path, BeforeValidator(_as_path)]
SocketPath = Annotated[Path, BeforeValidator(_as_path), AfterValidator(_as_socket)]
Bind = Annotated[str, AfterValidator(_as_bind)]
SiteId = Annotated[str, AfterValidator(_as_site_id)]
GroupName = Annotated[str, AfterValidator(_as_group)]
EncoderName = Annotated[str, AfterValidator(_as_encoder)]
Levels = Annotated[tuple[str, ...], BeforeValidator(_as_levels)]
Beginnings = Annotated[tuple[str, ...], BeforeValidator(_as_beginnings)]


class Section(BaseModel):
    """One table of the file: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


# ---- the tree ---------------------------------------------------------------


class SiteSettings(Section):
    """``[site]``: who this is and where it keeps what it must not lose."""

    id: SiteId | None = None  # None: as the certificate says
    state_dir: FilePath = Path("/var/lib/hanse")


class IdentitySettings(Section):
    """``[identity]``: certificates and the signed list of sites."""

    directory: FilePath = Path("identity")
    manifest: FilePath = Path("manifest.json")
    adopt_manifests: bool = True

    @property
    def authority(self) -> Path:
        """Certificate of the federation's authority."""
        return self.directory / "ca.crt"

    @property
    def certificate(self) -> Path:
        """Certificate of this site."""
        return self.directory / "site.crt"

    @property
    def key(self) -> Path:
        """Private key of this site, mode 0600."""
        return self.directory / "site.key"


class NetworkSettings(Section):
    """``[network]``: where peers reach the daemon on this machine."""

    bind: Bind = "0.0.0.0:7443"  # all interfaces: peers are elsewhere, mutual TLS stands guard


class LimitsSettings(Section):
    """``[limits]``: what one peer may take of this site, and all of them together."""

    requests_per_s: float = Field(50.0, ge=1, le=100_000)
    burst: int = Field(200, ge=10, le=1_000_000)
    streams: int = Field(32, ge=8, le=10_000)
    pulls_per_minute: float = Field(240.0, ge=1, le=1_000_000)
    push_copies: int = Field(4, ge=2, le=1000)
    connections: int = Field(1000, ge=16, le=1_000_000)


class ControlSettings(Section):
    """``[control]``: where fedctl reaches the daemon."""

    socket: SocketPath = Path("/run/hanse/fedd.sock")
    group: GroupName | None = None  # None: the daemon's


class RetrieverSettings(Section):
    """``[retriever]``: the encoder and how it is adapted; equal at all sites."""

    encoder: EncoderName = "sentence-transformers/all-MiniLM-L6-v2"
    adapt: Literal["head", "lora"] = "head"
    personal: Literal["none", "tiered_head", "query_encoder"] = "none"
    max_tokens: int = Field(256, ge=16, le=512)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class RetrievalSettings(Section):
    """``[retrieval]``: how documents are cut and how many passages a question gets."""

    passage_tokens: int = Field(220, ge=32, le=510)
    top_k: int = Field(8, ge=1, le=100)


class TrainingSettings(Section):
    """``[training]``: what this site agrees to, and the plan that it proposes itself.

    ``willing``, ``max_local_epochs`` and ``min_pairs`` are this site's policy;
    the rest fills a plan when ``fedctl train`` is typed here.
    """

    willing: bool = True
    max_local_epochs: int = Field(20, ge=0, le=100)
    min_pairs: int = Field(8, ge=2, le=1_000_000)
    local_epochs: int = Field(4, ge=0, le=100)
    batch_size: int = Field(32, ge=2, le=4096)
    learning_rate: float = Field(1e-4, gt=0, le=1)
    temperature: float = Field(0.05, ge=0.001, le=10)
    hard_negatives: int = Field(4, ge=0, le=64)
    bits: Literal[8, 12, 16] = 16
    mode: Literal["ckks", "masking"] = "ckks"
    min_participants: int = Field(3, ge=2, le=256)
    max_num_examples: int = Field(100_000, ge=1, le=1_000_000_000)


class PrivacySettings(Section):
    """``[privacy]``: what this site's updates may tell, over all rounds together."""

    required: bool = False
    epsilon: float | None = Field(None, gt=0, le=1_000_000)  # None: no budget
    delta: float = Field(1e-5, ge=1e-12, le=0.01)
    colluders: int = Field(1, ge=0, le=255)
    max_noise: float = Field(1000.0, ge=0.001, le=1000)


class RobustSettings(Section):
    """``[robust]``: which updates may be in the sum, in plans that are proposed here."""

    rule: Literal["none", "norm", "norm_sigma", "krum", "multi_krum", "median", "trimmed_mean"] = (
        "none"
    )
    required: bool = False
    byzantine_sites: int = Field(1, ge=0, le=32)


class NegativesSettings(Section):
    """``[negatives]``: embeddings that sites give one another to tell answers from others.

    ``answer`` to ``collections`` are this site's policy towards others that ask; the
    rest is how it asks itself. ``noise`` and ``bits`` concern both.
    """

    answer: bool = False
    levels: Levels = ("bucket",)
    queries_per_round: int = Field(20_000, ge=1, le=1_000_000_000)
    top_n: int = Field(10, ge=1, le=256)
    collections: Beginnings = ()
    noise: float = Field(0.05, ge=0.001, le=100)
    bits: int = Field(8, ge=1, le=64)
    level: Literal["exact", "noisy", "bucket"] = "bucket"
    select: Literal["all", "random", "nearest"] = "all"
    sites: int = Field(3, ge=1, le=256)
    deadline_s: float = Field(5.0, ge=0.1, le=300)


class RoundsSettings(Section):
    """``[rounds]``: how long a round waits, in seconds, and how much of the past is kept."""

    phase_deadline_s: float = Field(120.0, ge=1, le=86_400)
    train_deadline_s: float = Field(3600.0, ge=1, le=86_400)
    attempt_growth: float = Field(1.5, ge=1, le=10)
    heartbeat_s: float = Field(10.0, ge=0.1, le=3600)
    keep_versions: int = Field(5, ge=2, le=10_000)


class WorkersSettings(Section):
    """``[workers]``: the processes that compute."""

    threads: int = Field(default_factory=available_cores, ge=1, le=1024)
    idle_stop_s: float = Field(600.0, ge=1, le=86_400)


class LogSettings(Section):
    """``[log]``: what is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(Section):
    """All settings of one site. `load` makes it."""

    site: SiteSettings
    identity: IdentitySettings
    network: NetworkSettings
    limits: LimitsSettings
    control: ControlSettings
    retriever: RetrieverSettings
    retrieval: RetrievalSettings
    training: TrainingSettings
    privacy: PrivacySettings
    robust: RobustSettings
    negatives: NegativesSettings
    rounds: RoundsSettings
    workers: WorkersSettings
    log: LogSettings


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


# ---- reading ----------------------------------------------------------------


def load(path: Path) -> Settings:
    """Read and check a settings file.

    Relative paths in it start at its own folder, wherever the daemon was started.
    Files that it names need not exist yet: who opens them says what is missing.
    Raises SettingsError with all problems at once.
    """
    document = _parse(path)
    context = {"folder": path.absolute().parent}
    problems: list[Problem] = [
        _unknown_table(key, value) for key, value in document.items() if key not in SECTIONS
    ]
    sections: dict[str, Section] = {}
    for name, model in SECTIONS.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            problems.append(_not_a_table(name, table))
            continue
        try:
            sections[name] = model.model_validate(table, context=context)
        except ValidationError as error:
            problems += [_explain(name, details) for details in error.errors()]
    problems += _contradictions(sections)
    if problems:
        raise SettingsError(path, tuple(problems))
    return Settings.model_validate(sections)


def _parse(path: Path) -> dict[str, Any]:
    def refused(found: str, expected: str, remedy: str) -> SettingsError:
        return SettingsError(path, (Problem("file", found, expected, remedy),))

    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        remedy = "copy config/fedd.example.toml there and adapt it, or give --config"
        raise refused("missing", "a TOML file", remedy) from error
    except OSError as error:
        remedy = "check its path and who may read it"
        raise refused(error.strerror or str(error), "a readable TOML file", remedy) from error
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8"
        raise refused(f"not UTF-8 at byte {error.start}", "a TOML file", remedy) from error
    except tomllib.TOMLDecodeError as error:
        remedy = "correct the file there (text goes in quotes)"
        raise refused(str(error), "valid TOML", remedy) from error


# ---- explaining -------------------------------------------------------------


def _explain(section: str, details: ErrorDetails) -> Problem:
    key = str(details["loc"][0])
    path = f"{section}.{key}"
    if details["type"] == "extra_forbidden":
        return _unknown_key(section, key, details["input"])
    field = SECTIONS[section].model_fields[key]
    context = details.get("ctx", {})
    found = _toml(details["input"])
    if details["type"] == "setting":
        return Problem(path, found, context["expected"], context["remedy"])
    remedies = {
        "greater_than_equal": f"raise it to {context.get('ge')} or more",
        "greater_than": f"raise it above {context.get('gt')}",
        "less_than_equal": f"lower it to {context.get('le')} or less",
    }
    remedy = remedies.get(details["type"]) or _example(key, field)
    return Problem(path, found, _expected(field), remedy)


def _expected(field: FieldInfo) -> str:
    """What belongs there, in words, from the type and the bounds of the field."""
    choices = get_args(field.annotation)
    if choices and isinstance(choices[0], str | int):
        return "one of " + ", ".join(_toml(choice) for choice in choices)
    kinds: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    kind = kinds.get(field.annotation, "a text in quotes")
    for bound in field.metadata:
        match bound:
            case Ge(ge=low):
                kind += f" from {low}"
            case Gt(gt=low):
                kind += f" above {low}"
            case Le(le=high):
                kind += f" to {high}" if "from" in kind else f", at most {high}"
    return kind


def _example(key: str, field: FieldInfo) -> str:
    if field.default_factory is None and field.default is not None:
        return f"write for example {key} = {_toml(field.default)}"
    return "correct the value or remove the line"


def _unknown_table(key: str, value: object) -> Problem:
    expected = "one of the tables " + " ".join(f"[{name}]" for name in SECTIONS)
    if not isinstance(value, dict):
        return Problem(key, _toml(value), "a key inside a table", _nearest("", key))
    close = difflib.get_close_matches(key, SECTIONS, n=1)
    remedy = f"did you mean [{close[0]}]?" if close else "remove it"
    return Problem(f"[{key}]", "", expected, remedy)


def _not_a_table(name: str, value: object) -> Problem:
    return Problem(name, _toml(value), f"a table [{name}]", f"write [{name}] on a line of its own")


def _unknown_key(section: str, key: str, value: object) -> Problem:
    known = ", ".join(SECTIONS[section].model_fields)
    return Problem(
        f"{section}.{key}", _toml(value), f"a key of [{section}] ({known})", _nearest(section, key)
    )


def _nearest(section: str, key: str) -> str:
    """The option an unknown key was perhaps meant to be; the same table is tried first."""
    here = SECTIONS[section].model_fields if section in SECTIONS else {}
    close = difflib.get_close_matches(key, here, n=1)
    if close:
        return f"did you mean {section}.{close[0]}?"
    owners = {option: name for name, model in SECTIONS.items() for option in model.model_fields}
    close = difflib.get_close_matches(key, owners, n=1)
    if close:
        return f"did you mean {close[0]} in [{owners[close[0]]}]?"
    return "remove it"


def _contradictions(sections: dict[str, Section]) -> Iterator[Problem]:
    """Values that are fine alone but not together, in the tables that could be read."""
    training, rounds = sections.get("training"), sections.get("rounds")
    retriever, retrieval = sections.get("retriever"), sections.get("retrieval")
    if isinstance(training, TrainingSettings) and (
        training.local_epochs > training.max_local_epochs
    ):
        yield Problem(
            "training.local_epochs",
            str(training.local_epochs),
            f"at most training.max_local_epochs = {training.max_local_epochs}",
            "lower it, or this site refuses the plans that it proposes itself",
        )
    privacy = sections.get("privacy")
    if (
        isinstance(training, TrainingSettings)
        and isinstance(privacy, PrivacySettings)
        and privacy.colluders >= training.min_participants
    ):
        yield Problem(
            "privacy.colluders",
            str(privacy.colluders),
            f"less than training.min_participants = {training.min_participants}",
            "lower it: when all contributors collude, nobody is left whose noise is unknown",
        )
    robust = sections.get("robust")
    if isinstance(robust, RobustSettings) and isinstance(training, TrainingSettings):
        yield from _robust_problems(robust, training)
    if isinstance(rounds, RoundsSettings) and rounds.heartbeat_s >= rounds.phase_deadline_s:
        yield Problem(
            "rounds.heartbeat_s",
            str(rounds.heartbeat_s),
            f"less than rounds.phase_deadline_s = {rounds.phase_deadline_s}",
            "lower it, or phases end before a site is seen to be there",
        )
    if isinstance(retriever, RetrieverSettings) and isinstance(retrieval, RetrievalSettings):
        room = retriever.max_tokens - _SPECIAL_TOKENS
        if retrieval.passage_tokens > room:
            yield Problem(
                "retrieval.passage_tokens",
                str(retrieval.passage_tokens),
                f"at most retriever.max_tokens - {_SPECIAL_TOKENS} = {room}",
                "lower it or raise max_tokens, or the end of a passage is never embedded",
            )


def _robust_problems(robust: RobustSettings, training: TrainingSettings) -> Iterator[Problem]:
    """A rule's preconditions on n and f; a plan has n >= min_participants + f sites."""
    rule, f = robust.rule, robust.byzantine_sites
    if rule in ("median", "trimmed_mean"):
        yield Problem(
            "robust.rule",
            _toml(rule),
            "a rule for encrypted updates: norm, krum or multi_krum",
            f"{rule} needs every site's values in the clear; choose another rule",
        )
    elif robust.required and (rule == "none" or training.mode == "masking"):
        yield Problem(
            "robust.required",
            "true",
            'a robust.rule, and training.mode = "ckks"',
            "choose them, or this site refuses the plans that it proposes itself",
        )
    elif rule != "none" and training.mode == "masking":
        yield Problem(
            "robust.rule",
            _toml(rule),
            '"none" with training.mode = "masking"',
            "masked updates can't be compared; choose one of the two",
        )
    elif rule != "none":
        # n >= 2f + 3 for krum; else n >= 3 and n >= 2f + 2, as 2f + 1 key holders answer
        least = f + 3 if "krum" in rule else max(f + 2, 3 - f)
        if training.min_participants < least:
            yield Problem(
                "training.min_participants",
                str(training.min_participants),
                f"at least {least} for robust.rule = {_toml(rule)} and byzantine_sites = {f}",
                f"raise it: {rule} needs {least + f} sites, of which {f} may be rejected",
            )


def _toml(value: object) -> str:
    """A value as it would stand in the file, cut to one short line."""
    if isinstance(value, Path):
        value = str(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
