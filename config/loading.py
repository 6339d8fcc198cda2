"""From the file to settings: read and checked once, everything that is wrong with it at once.

`load` returns a frozen tree of `Settings`, or raises one `SettingsError` that lists every
mistake, a line each, with its remedy.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from config.answering import DECODINGS
from config.kinds import RULES, RULES_ON_VALUES, on_this_machine
from config.recipes import DEFAULT_RECIPE, PERSONAL, RECIPES, WITH_LORA_SERVER
from config.settings import (
    SECTIONS,
    ControlSettings,
    GatewaySettings,
    GeneratorSettings,
    IndexSettings,
    LearningSettings,
    LibrarySettings,
    NegativesSettings,
    NextRetrieverSettings,
    PrivacySettings,
    RetrievalSettings,
    RetrieverSettings,
    RobustSettings,
    RoundsSettings,
    Settings,
    SiteSettings,
    TrainingSettings,
    WorkersSettings,
)
from config.tables import Section
from proto import bounds

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


# Options that were called otherwise: by table, the old name and the new one.
RENAMED = {"learning": {"own_rounds": "local_only_rounds", "floor": "adam_tau"}}


def load(path: Path, *, notes: list[str] | None = None, generators: Sequence[str] = ()) -> Settings:
    """Read and check a settings file.

    ``notes`` takes what is right and should be mended all the same: options under a name
    that the next version no longer reads. ``generators``: the names of those that there are;
    none: any name will do.

    Relative paths in it start at its own folder, wherever the daemon was started.
    Files that it names need not exist yet: who opens them says what is missing.
    Raises SettingsError with all problems at once.
    """
    document = _parse(path)
    context = {"folder": path.absolute().parent, "generators": generators}
    problems: list[Problem] = [
        _unknown_table(key, value) for key, value in document.items() if key not in SECTIONS
    ]
    written: dict[str, str] = {}
    for said in _take_new_names(document, written):
        if isinstance(said, Problem):
            problems.append(said)
        elif notes is not None:
            notes.append(said)
    sections: dict[str, Section] = {}
    chosen = {**_recipe_of(document), **_decoding_of(document)}
    for name, model in SECTIONS.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            problems.append(_not_a_table(name, table))
            continue
        try:
            whole = {**chosen.get(name, {}), **table}
            sections[name] = model.model_validate(whole, context=context)
        except ValidationError as error:
            problems += [_explain(name, details, written) for details in error.errors()]
    problems += _contradictions(sections)
    if problems:
        raise SettingsError(path, tuple(problems))
    return Settings.model_validate(sections)


def _take_new_names(document: dict[str, Any], written: dict[str, str]) -> Iterator[str | Problem]:
    """Put options under the names that they have now; what there is to say of each.

    ``written`` takes by their new names the old ones that stand in the file.
    """
    for name, renamed in RENAMED.items():
        table = document.get(name)
        if not isinstance(table, dict):
            continue
        for old, new in renamed.items():
            if old not in table:
                continue
            value = table.pop(old)
            if new in table:
                remedy = f"remove it: {name}.{new} is its new name, and stands there, too"
                yield Problem(f"{name}.{old}", _toml(value), "nothing", remedy)
            else:
                table[new] = value
                written[f"{name}.{new}"] = f"{name}.{old}"
                yield f"{name}.{old} is called {name}.{new} now; the next version reads that alone"


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
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    return recipe.settings if recipe is not None else {}


def _decoding_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Likewise how a language model writes, in a table that no recipe has anything in."""
    retrieval = document.get("retrieval")
    name = retrieval.get("decoding") if isinstance(retrieval, dict) else None
    decoding = DECODINGS.get(name) if isinstance(name, str) else None
    return {"retrieval": decoding} if decoding is not None else {}


# ---- explaining -------------------------------------------------------------


def explained(section: str, error: ValidationError, written: Mapping[str, str]) -> list[str]:
    """What is wrong with values of one table, a line each.

    ``written``: options by the names that they have now, under which a person named them.
    """
    return [str(_explain(section, details, written)) for details in error.errors()]


def _explain(section: str, details: ErrorDetails, written: Mapping[str, str]) -> Problem:
    key = str(details["loc"][0])
    path = f"{section}.{key}"
    if path in written:
        path = f"{written[path]} (called {key} now)"
    if details["type"] == "extra_forbidden":
        return _unknown_key(section, key, details["input"])
    field = SECTIONS[section].model_fields[key]
    context = details.get("ctx", {})
    value = _toml(details["input"])
    if details["type"] == "setting":
        return Problem(path, value, context["expected"], context["remedy"])
    remedies = {
        "greater_than_equal": f"raise it to {context.get('ge')} or more",
        "greater_than": f"raise it above {context.get('gt')}",
        "less_than_equal": f"lower it to {context.get('le')} or less",
    }
    remedy = remedies.get(details["type"]) or _example(key, field)
    return Problem(path, value, _expected(field), remedy)


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
    library, site = sections.get("library"), sections.get("site")
    if isinstance(library, LibrarySettings) and isinstance(site, SiteSettings):
        yield from _folder_problems(library, site)
    index = sections.get("index")
    if isinstance(index, IndexSettings):
        yield from _index_problems(index)
    gateway = sections.get("gateway")
    if isinstance(gateway, GatewaySettings):
        yield from _gateway_problems(gateway, sections.get("control"))
    privacy = sections.get("privacy")
    if isinstance(privacy, PrivacySettings):
        yield from _privacy_problems(privacy, training)
    if isinstance(retriever, RetrieverSettings):
        yield from _adaptation_problems(retriever, sections.get("learning"))
        yield from _answering_problems(retriever, sections.get("negatives"))
    workers = sections.get("workers")
    if isinstance(workers, WorkersSettings) and workers.processes > workers.threads:
        yield Problem(
            "workers.processes",
            str(workers.processes),
            f"at most workers.threads = {workers.threads}",
            "lower it, or raise threads: each process needs one of its own",
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
    if isinstance(retrieval, RetrievalSettings):
        yield from _model_problems(retrieval)
        generator = sections.get("generator")
        if isinstance(generator, GeneratorSettings):
            yield from _base_problems(generator, retrieval)
        for name in ("retriever", "next_retriever"):
            yield from _passage_problems(name, sections.get(name), retrieval)


def _base_problems(generator: GeneratorSettings, retrieval: RetrievalSettings) -> Iterator[Problem]:
    """What the sites train together is wanted, and this site has nothing to build it on."""
    wanted = {
        'retrieval.generator = "federated"': retrieval.generator == "federated",
        f"generator.personal = {_toml(generator.personal)}": generator.personal != "none",
    }
    asking = [setting for setting, asks in wanted.items() if asks]
    if asking and generator.base_model is None:
        yield Problem(
            "generator.base_model",
            "nothing",
            f"a folder with a language model with {' and '.join(asking)}",
            'write for example base_model = "/srv/models/flan-t5-small"',
        )


def _model_problems(retrieval: RetrievalSettings) -> Iterator[Problem]:
    """A generator without the model that it writes with, or with one of another kind."""
    wanted = {
        "transformers": ("a folder with a language model", "/srv/models/writer"),
        "openai": ("a server on this machine", "http://127.0.0.1:8080/v1#MODEL"),
    }
    if retrieval.generator not in wanted:
        return
    expected, example = wanted[retrieval.generator]
    given = retrieval.language_model
    if given is None or given.startswith("http") != example.startswith("http"):
        yield Problem(
            "retrieval.language_model",
            "nothing" if given is None else _toml(given),
            f"{expected} with retrieval.generator = {_toml(retrieval.generator)}",
            f"write for example language_model = {_toml(example)}",
        )


def _passage_problems(
    name: str, retriever: Section | None, retrieval: RetrievalSettings
) -> Iterator[Problem]:
    """Passages that are longer than what an encoder reads of them."""
    if not isinstance(retriever, RetrieverSettings | NextRetrieverSettings):
        return
    room = retriever.max_tokens - _SPECIAL_TOKENS
    if retriever.encoder is not None and retrieval.passage_tokens > room:
        yield Problem(
            "retrieval.passage_tokens",
            str(retrieval.passage_tokens),
            f"at most {name}.max_tokens - {_SPECIAL_TOKENS} = {room}",
            "lower it or raise max_tokens, or the end of a passage is never embedded",
        )


def _folder_problems(library: LibrarySettings, site: SiteSettings) -> Iterator[Problem]:
    """Folders that would have the daemon read what it writes itself."""
    for name, path in library.folders.items():
        if path.is_relative_to(site.state_dir) or site.state_dir.is_relative_to(path):
            yield Problem(
                f"library.folders.{name}",
                _toml(path),
                f"a folder apart from site.state_dir = {_toml(site.state_dir)}",
                "choose another one: what the daemon writes is no document",
            )


def _index_problems(index: IndexSettings) -> Iterator[Problem]:
    """A server that is asked for and not named, and secrets that would go nowhere or unseen."""
    if index.engine != "hnswlib" and index.uri is None:
        yield Problem("index.uri", "nothing", "where the server is", "write its address")
    if (index.cert_file is None) != (index.key_file is None) or (
        index.cert_file and not index.ca_file
    ):
        yield Problem(
            "index.cert_file",
            _toml(index.cert_file) if index.cert_file else "nothing",
            "cert_file, key_file and ca_file, or neither of the first two",
            "name all three: who asks, its key, and whom the server is believed by",
        )
    secure = index.uri is not None and index.uri.startswith("https:")
    if not secure and (index.ca_file or index.cert_file):
        yield Problem(
            "index.ca_file",
            _toml(index.ca_file),
            "nothing",
            'remove it, or write "https://" in uri',
        )


def _gateway_problems(gateway: GatewaySettings, control: Section | None) -> Iterator[Problem]:
    """Tokens and answers in the clear on a network, and a way around tokens."""
    certificate, key = gateway.tls_certificate, gateway.tls_key
    if (certificate is None) != (key is None):
        lacking = "tls_certificate" if certificate is None else "tls_key"
        remedy = "name both files, or neither and listen on this machine alone"
        yield Problem(f"gateway.{lacking}", "nothing", "both or neither of the two", remedy)
    elif certificate is None and not on_this_machine(gateway.listen):
        yield Problem(
            "gateway.listen",
            _toml(gateway.listen),
            'an address of this machine alone, as "127.0.0.1:8080", without tls_certificate',
            "name tls_certificate and tls_key: tokens and answers must not cross a network in the "
            "clear",
        )
    if isinstance(control, ControlSettings) and gateway.socket == control.socket:
        yield Problem(
            "gateway.socket",
            _toml(gateway.socket),
            "another path than control.socket",
            "choose one in a folder of its own: who reaches that one administers the site",
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
    if not isinstance(learning, LearningSettings) or retriever.adapt != "lora_server":
        return
    for axis, (only, why) in WITH_LORA_SERVER.items():
        if (choice := getattr(learning, axis)) != only:
            expected = f'{_toml(only)} with retriever.adapt = "lora_server"'
            yield Problem(f"learning.{axis}", _toml(choice), expected, why)


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
    modes = bounds.numbers_of(bounds.fields_of("TrainingPlan")["mode"].enum_type)
    comparable = bounds.traits_of(modes[training.mode]).comparable
    if rule in RULES_ON_VALUES:
        yield Problem(
            "robust.rule",
            _toml(rule),
            f"a rule for encrypted updates: {', '.join(name for name in RULES if name != 'none')}",
            f"{rule} needs every site's values in the clear; choose another rule",
        )
    elif robust.required and (rule == "none" or not comparable):
        yield Problem(
            "robust.required",
            "true",
            'a robust.rule, and training.mode = "ckks"',
            "choose them, or this site refuses the plans that it proposes itself",
        )
    elif rule != "none" and not comparable:
        yield Problem(
            "robust.rule",
            _toml(rule),
            f'"none" with training.mode = "{training.mode}"',
            f"updates hidden by {training.mode} can't be compared; choose one of the two",
        )
    elif rule != "none":
        least = bounds.sites_needed(rule, f) - f
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
