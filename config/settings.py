"""What the operator chooses: one TOML file, read and checked once.

`load` returns a frozen tree of `Settings`, or raises one `SettingsError` that
lists everything that is wrong with the file, a line each. What every option
does, and what goes wrong when it is off, stands in ``fedd.example.toml``.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from config.kinds import (
    Beginnings,
    Bind,
    EncoderName,
    FilePath,
    GroupName,
    Levels,
    PersonalName,
    SiteId,
    SocketPath,
    WriterName,
    available_cores,
)
from config.recipes import (
    DEFAULT_RECIPE,
    PERSONAL,
    RECIPES,
    DepthOptions,
    LearningAxes,
    RecipeName,
    RetrieverAxes,
    TrainingAxes,
)
from config.tables import Section, as_in, planned

_DEPTH = DepthOptions()

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


@planned("encoder")
class RetrieverSettings(Section, RetrieverAxes):  # type: ignore[misc]  # frozen by its config
    """``[retriever]``: the encoder and how it is adapted; equal at all sites."""

    encoder: EncoderName = "sentence-transformers/all-MiniLM-L6-v2"
    personal: PersonalName = RECIPES[DEFAULT_RECIPE].personal
    lora_rank: int = Field(8, ge=1, le=256)
    lora_alpha: int = Field(16, ge=1, le=1024)
    max_tokens: int = Field(256, ge=16, le=512)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class RetrievalSettings(Section):
    """``[retrieval]``: how documents are cut, and what an answer is made of and by whom."""

    passage_tokens: int = Field(220, ge=32, le=510)
    top_k: int = Field(8, ge=1, le=100)
    generator: str = "extractive"  # checked against the table of them at the start


@planned("min_pairs", "TrainingPlan")
class TrainingSettings(Section, TrainingAxes):  # type: ignore[misc]  # frozen by its config
    """``[training]``: what this site agrees to, and the plan that it proposes itself.

    ``willing``, ``max_local_epochs`` and ``min_pairs`` are this site's policy;
    the rest fills a plan when ``fedctl train`` is typed here.
    """

    willing: bool = True
    max_local_epochs: int = as_in("TrainingPlan", "local_epochs", 20)
    min_pairs: int = Field(8, ge=2, le=1_000_000)
    bits: Literal[8, 12, 16] = 16
    mode: Literal["ckks", "masking"] = "ckks"
    min_participants: int = 3
    max_num_examples: int = 100_000


@planned("recipe", "LearningPlan")
class LearningSettings(Section, LearningAxes):  # type: ignore[misc]  # frozen by its config
    """``[learning]``: the recipe, and what is chosen otherwise, in plans proposed here."""

    recipe: RecipeName = DEFAULT_RECIPE
    own_rounds: int = Field(RECIPES[DEFAULT_RECIPE].own_rounds, ge=1, le=1000)
    momentum: float = 0.9
    second_momentum: float = 0.99
    floor: float = 1e-3


class DepthSettings(Section):
    """``[depth]``: the tiers of this site's personal layer.

    As in pFedRAG's Table 8, but for ``kd_learning_rate`` (0.1 there; decision 0018).
    """

    window: int = Field(_DEPTH.window, ge=2, le=1000)
    stable_rounds: int = Field(_DEPTH.stable_rounds, ge=1, le=1000)
    low_rounds: int = Field(_DEPTH.low_rounds, ge=1, le=1000)
    cooling_rounds: int = Field(_DEPTH.cooling_rounds, ge=0, le=1000)
    momentum_weight: float = Field(_DEPTH.momentum_weight, ge=0, le=1)
    kd_temperature: float = Field(_DEPTH.kd_temperature, ge=0.01, le=100)
    kd_epochs: int = Field(_DEPTH.kd_epochs, ge=1, le=10_000)
    kd_learning_rate: float = Field(_DEPTH.kd_learning_rate, gt=0, le=1)
    tell_complexity: bool = False


class PairsSettings(Section):
    """``[pairs]``: what this site learns from, and what writes questions about its documents."""

    learn_from: Literal["supplied", "supplied+made", "made"] = "supplied"
    writer: WriterName | None = None  # None: there is none
    domain: Literal["general", "medical", "financial", "legal", "technical"] = "general"


class EvaluationSettings(Section):
    """``[evaluation]``: how each new version is judged at this site."""

    curve_questions: int = Field(500, ge=0, le=100_000)


class PrivacySettings(Section):
    """``[privacy]``: what this site's updates may tell, over all rounds together."""

    required: bool = False
    epsilon: float | None = Field(None, gt=0, le=1_000_000)  # None: no budget
    delta: float = Field(1e-5, ge=1e-12, le=0.01)
    colluders: int = as_in("PrivacyPlan", "colluders", 1)
    # None: whatever the budget leaves
    least_noise: float | None = as_in("PrivacyPlan", "noise_multiplier", None)
    max_noise: float = as_in("PrivacyPlan", "noise_multiplier", 1000.0)


class RobustSettings(Section):
    """``[robust]``: which updates may be in the sum, in plans that are proposed here."""

    rule: Literal["none", "norm", "norm_sigma", "krum", "multi_krum", "median", "trimmed_mean"] = (
        "none"
    )
    required: bool = False
    byzantine_sites: int = as_in("TrainingPlan", "byzantine_sites", 1)


class NegativesSettings(Section):
    """``[negatives]``: embeddings that sites give one another to tell answers from others.

    ``answer`` to ``collections`` are this site's policy towards others that ask; the
    rest is how it asks itself. ``noise`` and ``bits`` concern both.
    """

    answer: bool = False
    levels: Levels = ("bucket",)
    queries_per_round: int = Field(20_000, ge=1, le=1_000_000_000)
    top_n: int = as_in("NegativesRequest", "top_n", 10)
    collections: Beginnings = ()
    noise: float = Field(0.05, ge=0.001, le=100)
    bits: int = Field(8, ge=1, le=64)
    ask: bool = True
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
    learning: LearningSettings
    depth: DepthSettings
    pairs: PairsSettings
    evaluation: EvaluationSettings
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
    recipe = _recipe_of(document)
    for name, model in SECTIONS.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            problems.append(_not_a_table(name, table))
            continue
        try:
            whole = {**recipe.get(name, {}), **table}
            sections[name] = model.model_validate(whole, context=context)
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


def _recipe_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the chosen recipe puts into each table; an unknown one is refused with its table."""
    learning = document.get("learning")
    name = learning.get("recipe", DEFAULT_RECIPE) if isinstance(learning, dict) else DEFAULT_RECIPE
    found = RECIPES.get(name) if isinstance(name, str) else None
    return found.settings if found is not None else {}


# ---- explaining -------------------------------------------------------------


def explained(section: str, error: ValidationError) -> list[str]:
    """What is wrong with values of one table, a line each."""
    return [str(_explain(section, details)) for details in error.errors()]


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
    kinds[float | None] = kinds[float]  # None is written by leaving the line out
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
    if isinstance(privacy, PrivacySettings):
        yield from _privacy_problems(privacy, training)
    if isinstance(retriever, RetrieverSettings):
        yield from _adaptation_problems(retriever, sections.get("learning"))
        yield from _answering_problems(retriever, sections.get("negatives"))
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


def _privacy_problems(privacy: PrivacySettings, training: Section | None) -> Iterator[Problem]:
    """Noise that is required, and of which nothing says how much; or that no plan can have."""
    if isinstance(training, TrainingSettings) and privacy.colluders >= training.min_participants:
        yield Problem(
            "privacy.colluders",
            str(privacy.colluders),
            f"less than training.min_participants = {training.min_participants}",
            "lower it: when all contributors collude, nobody is left whose noise is unknown",
        )
    if privacy.required and privacy.epsilon is None and privacy.least_noise is None:
        yield Problem(
            "privacy.required",
            "true",
            "privacy.epsilon or privacy.least_noise beside it",
            "write for example epsilon = 8.0: without either, a plan with a noise multiplier of "
            "0.001 will do, and one round of it is epsilon = 506184",
        )
    if privacy.least_noise is not None and privacy.least_noise > privacy.max_noise:
        yield Problem(
            "privacy.least_noise",
            str(privacy.least_noise),
            f"at most privacy.max_noise = {privacy.max_noise}",
            "lower it, or every plan has too little noise or too much",
        )


def _adaptation_problems(
    retriever: RetrieverSettings, learning: Section | None
) -> Iterator[Problem]:
    """What the adaptations can't do together."""
    beneath = PERSONAL[retriever.personal].adapt
    if beneath not in (None, retriever.adapt):
        yield Problem(
            "retriever.personal",
            _toml(retriever.personal),
            f"retriever.adapt = {_toml(beneath)}, behind which it lies",
            "choose another of the two",
        )
    if not isinstance(learning, LearningSettings):
        return
    if learning.start_from == "local" and retriever.adapt == "lora_server":
        yield Problem(
            "learning.start_from",
            _toml(learning.start_from),
            '"global" with retriever.adapt = "lora_server"',
            "what is exchanged then is a projection on factors that a student has left",
        )
    if learning.aggregate != "fedavg" and retriever.adapt == "lora_server":
        yield Problem(
            "learning.aggregate",
            _toml(learning.aggregate),
            '"fedavg" with retriever.adapt = "lora_server"',
            "rounds train one factor in turn, and momentum goes on moving the other",
        )


def _answering_problems(
    retriever: RetrieverSettings, negatives: Section | None
) -> Iterator[Problem]:
    """A site that said it answers, and whose every answer would be that it cannot."""
    if (
        isinstance(negatives, NegativesSettings)
        and negatives.answer
        and PERSONAL[retriever.personal].owns_passages
    ):
        first, *others = [_toml(name) for name, one in PERSONAL.items() if not one.owns_passages]
        yield Problem(
            "negatives.answer",
            "true",
            f"false with retriever.personal = {_toml(retriever.personal)}, which embeds passages "
            "as no other site does",
            f"set it to false, or write personal = {first} (or {', '.join(others)}) in [retriever]",
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
