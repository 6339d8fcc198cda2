"""What the operator may write into the settings file, and how mistakes are explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import BaseMetadata
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from config.answering import DECODINGS, USUAL_DECODING
from config.loading import SettingsError, load
from config.recipes import DEFAULT_RECIPE, PERSONAL, RECIPES
from config.settings import SECTIONS, Settings
from peers.plans.robust import RULE_NAMES, objection
from proto import federation_pb2 as pb
from proto.bounds import bounds_of, names_of

EXAMPLE = Path(__file__).parents[2] / "config" / "fedd.example.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "fedd.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusals(folder: Path, text: str) -> list[str]:
    """The lines, one per mistake, that a settings file of this text is refused with."""
    with pytest.raises(SettingsError) as refused:
        load(write(folder, text))
    first, *lines = str(refused.value).splitlines()
    assert first == f"settings refused: {folder / 'fedd.toml'}"
    assert len(lines) == len(refused.value.problems)
    return [line.strip() for line in lines]


# ---- what is accepted -------------------------------------------------------


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    settings = load(write(tmp_path, ""))
    assert settings.network.bind == "0.0.0.0:7443"
    assert settings.site.id is None
    assert settings.site.state_dir == Path("/var/lib/hanse")
    assert settings.identity.certificate == tmp_path / "identity" / "site.crt"
    assert settings.identity.key == tmp_path / "identity" / "site.key"
    assert settings.identity.authority == tmp_path / "identity" / "ca.crt"
    assert settings.identity.manifest == tmp_path / "manifest.json"
    assert settings.training.learning_rate == 1e-4
    assert settings.workers.threads >= 1


def test_an_option_that_was_called_otherwise_is_read_and_told_of(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write(tmp_path, "[learning]\nown_rounds = 7\nfloor = 0.5\n")
    settings = load(path, notes=notes)
    assert (settings.learning.local_only_rounds, settings.learning.adam_tau) == (7, 0.5)
    assert [note.split(";")[0] for note in notes] == [
        "learning.own_rounds is called learning.local_only_rounds now",
        "learning.floor is called learning.adam_tau now",
    ]
    assert load(path) == settings


def test_a_bad_value_is_told_under_the_name_that_it_stands_under(
    tmp_path: Path,
) -> None:
    assert refusals(tmp_path, "[learning]\nown_rounds = 0\nfloor = -1.0\n") == [
        "learning.own_rounds (called local_only_rounds now) = 0: expected a whole number from 1 "
        "to 1000; raise it to 1 or more",
        "learning.floor (called adam_tau now) = -1.0: expected a number above 0, at most 1; "
        "raise it above 0.0",
    ]


def test_an_option_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    (line,) = refusals(tmp_path, "[learning]\nfloor = 0.5\nadam_tau = 0.5\n")
    assert line.startswith("learning.floor = 0.5: expected nothing; remove it: learning.adam_tau")


def test_relative_paths_start_at_the_file_not_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "north"
    site.mkdir()
    write(site, '[site]\nstate_dir = "../state/north"\n[retriever]\nencoder = "./encoder"')
    monkeypatch.chdir(tmp_path)
    settings = load(Path("north/fedd.toml"))
    assert settings.site.state_dir == tmp_path / "state" / "north"
    assert settings.retriever.encoder == str(site / "encoder")


def test_a_hub_id_is_not_taken_for_a_path(tmp_path: Path) -> None:
    settings = load(write(tmp_path, '[retriever]\nencoder = "organisation/model-v1.5"'))
    assert settings.retriever.encoder == "organisation/model-v1.5"


def test_a_whole_number_will_do_where_seconds_are_wanted(tmp_path: Path) -> None:
    assert load(write(tmp_path, "[rounds]\nphase_deadline_s = 30")).rounds.phase_deadline_s == 30.0


@pytest.mark.parametrize("bind", ["[::]:7443", "[fe80::1%eth0]:7443", "site.example.org:1"])
def test_addresses_to_bind(tmp_path: Path, bind: str) -> None:
    assert load(write(tmp_path, f'[network]\nbind = "{bind}"')).network.bind == bind


def test_lists_of_levels_and_of_collections(tmp_path: Path) -> None:
    text = '[negatives]\nlevels = ["noisy", "bucket", "noisy"]\ncollections = ["faq/"]'
    negatives = load(write(tmp_path, text)).negatives
    assert negatives.levels == ("noisy", "bucket")
    assert negatives.collections == ("faq/",)
    assert refusals(tmp_path, '[negatives]\nlevels = ["all"]\ncollections = ""\nbits = 65') == [
        'negatives.levels = ["all"]: expected a list of "exact", "noisy", "bucket"; write for '
        'example ["bucket"], or [] to answer at no level',
        'negatives.collections = "": expected a list of texts of 1 to 512 characters; write for '
        'example ["public/"], or [] for all',
        "negatives.bits = 65: expected a whole number from 1 to 64; lower it to 64 or less",
    ]


def test_watched_folders_by_collection(tmp_path: Path) -> None:
    text = '[library]\nscan_s = 5\n[library.folders]\ncontracts = "/srv/contracts/"\nb = "/srv/b"'
    library = load(write(tmp_path, text)).library
    assert library.folders == {"contracts": Path("/srv/contracts"), "b": Path("/srv/b")}
    assert (library.vanished, library.scan_s) == ("remove", 5.0)


@pytest.mark.parametrize(
    ("folders", "part"),
    [
        ("3", "a table of names and paths"),
        ('{ "a/b" = "/srv/a" }', 'rename "a/b"'),
        ('{ "" = "/srv/a" }', "names of 1 to 100 printable characters"),
        ('{ a = "srv/a" }', "paths in quotes that begin with /; correct that of a"),
        ("{ a = 3 }", "paths in quotes that begin with /"),
        ('{ a = "/srv/a", b = "/srv/a/b/../c" }', "take out one of a and b"),
        ('{ a = "/srv/a", b = "/srv/a" }', "take out one of a and b"),
        ('{ a = "/var/lib/hanse/index" }', "what the daemon writes is no document"),
        ('{ a = "/var" }', "a folder apart from site.state_dir"),
    ],
)
def test_folders_that_can_not_be_watched(tmp_path: Path, folders: str, part: str) -> None:
    (refusal,) = refusals(tmp_path, f"[library]\nfolders = {folders}")
    assert part in refusal


def test_settings_never_change_after_loading(tmp_path: Path) -> None:
    settings = load(write(tmp_path, ""))
    with pytest.raises(ValidationError):
        settings.retrieval.top_k = 3


# ---- what is refused, and in which words ------------------------------------


def test_all_mistakes_are_told_at_once_each_with_its_remedy(tmp_path: Path) -> None:
    lines = refusals(
        tmp_path,
        """
        [site]
        id = "North"
        [network]
        bind = "0.0.0.0"
        [retrieval]
        top_k = 101
        passage_tokens = "220"
        [training]
        willing = 1
        bits = 10
        learning_rate = 0
        [log]
        level = "loud"
        """,
    )
    assert lines == [
        'site.id = "North": expected 1 to 63 characters a-z, 0-9 and -, the first no -; '
        "write the site id of the certificate or remove the line",
        'network.bind = "0.0.0.0": expected "host:port" with a port from 1 to 65535, '
        'IPv6 as "[::]:7443"; write for example "0.0.0.0:7443"',
        'retrieval.passage_tokens = "220": expected a whole number from 32 to 510; '
        "write for example passage_tokens = 220",
        "retrieval.top_k = 101: expected a whole number from 1 to 100; lower it to 100 or less",
        "training.willing = 1: expected true or false; write for example willing = true",
        "training.learning_rate = 0: expected a number above 0, at most 1; raise it above 0.0",
        "training.bits = 10: expected one of 8, 12, 16; write for example bits = 16",
        'log.level = "loud": expected one of "debug", "info", "warning", "error"; '
        'write for example level = "info"',
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[retrieval]\ntopk = 3", "did you mean retrieval.top_k?"),
        ("[retrieval]\nbind = 'x'", "did you mean bind in [network]?"),
        ("[retreival]\ntop_k = 3", "did you mean [retrieval]?"),
        ("top_k = 3", "did you mean top_k in [retrieval]?"),
        ("[retrieval]\nzzz = 3", "remove it"),
        ("[zzz]", "remove it"),
        ("rounds = 3", "write [rounds] on a line of its own"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, line: str
) -> None:
    (refusal,) = refusals(tmp_path, text)
    assert refusal.endswith(line)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[site]\nstate_dir = "~/hanse"', "write the home folder out"),
        ('[site]\nstate_dir = ""', "write a path"),
        ('[site]\nstate_dir = "a\\u0000b"', "write a path"),
        ("[site]\nstate_dir = 3", "write it in quotes"),
        (f'[control]\nsocket = "/{"s" * 107}"', "at most 107 bytes"),
        ('[control]\ngroup = ""', "the name of a group"),
        ('[network]\nbind = "0.0.0.0:0"', "port from 1 to 65535"),
        ('[network]\nbind = "0.0.0.0:65536"', "port from 1 to 65535"),
        ('[network]\nbind = "::1:7443"', 'IPv6 as "[::]:7443"'),
        ('[network]\nbind = "https://site:7443"', '"host:port"'),
        ('[retriever]\nencoder = "https://hub/x"', "a hub id"),
        ("[training]\ntemperature = nan", "a number from 0.001 to 10"),
        ("[training]\nlearning_rate = inf", "a number above 0, at most 1"),
        ("[training]\nbatch_size = 64.0", "a whole number from 2 to 4096"),
        ("[training]\nmin_pairs = true", "a whole number from 2"),
        ("[privacy]\nepsilon = 0", "a number above 0, at most 1000000; raise it above 0"),
        ('[privacy]\nleast_noise = "1"', "a number from 0.001 to 1000"),
        ("[log]\nlevel = 1979-05-27", "one of"),
    ],
)
def test_values_that_would_fail_later_are_refused_now(tmp_path: Path, text: str, part: str) -> None:
    (refusal,) = refusals(tmp_path, text)
    assert part in refusal


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[training]\nlocal_epochs = 21", "training.local_epochs"),
        ("[training]\nlocal_epochs = 4\nmax_local_epochs = 3", "training.local_epochs"),
        ("[rounds]\nphase_deadline_s = 10", "rounds.heartbeat_s"),
        ("[workers]\nthreads = 2\nprocesses = 3", "workers.processes"),
        ("[retriever]\nmax_tokens = 221", "retrieval.passage_tokens"),
        ("[retrieval]\npassage_tokens = 255", "retrieval.passage_tokens"),
        ('[next_retriever]\nencoder = "a/b"\nmax_tokens = 221', "retrieval.passage_tokens"),
        ('[generator]\npersonal = "mixture"', "generator.base_model"),
        ('[retrieval]\ngenerator = "federated"', "generator.base_model"),
    ],
)
def test_values_that_contradict_one_another_are_refused(
    tmp_path: Path, text: str, key: str
) -> None:
    (refusal,) = refusals(tmp_path, text)
    assert refusal.startswith(f"{key} = ")


def test_a_contradiction_is_told_beside_mistakes_elsewhere(tmp_path: Path) -> None:
    lines = refusals(tmp_path, "[retriever]\nmax_tokens = 64\n[log]\nlevel = 3")
    assert [line.split(" ")[0] for line in lines] == ["log.level", "retrieval.passage_tokens"]


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    (refusal,) = refusals(tmp_path, f'[log]\nlevel = "{"x" * 5000}"')
    assert len(refusal) < 250


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[site\n", "line 1"),
        (b"[site]\nid = north\n", "line 2"),
        (b"[site]\n[site]\n", "line 2"),
        (b'[site]\nid = "\xff"\n', "not UTF-8 at byte 13"),
    ],
)
def test_a_file_that_is_no_toml_says_where(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "fedd.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=re.escape(part)):
        load(path)


def test_a_missing_file_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"copy config/fedd\.example\.toml"):
        load(tmp_path / "nowhere.toml")


def test_a_folder_is_not_a_settings_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Is a directory"):
        load(tmp_path)


@given(content=st.binary(max_size=200))
def test_whatever_the_file_holds_it_loads_or_is_explained(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        load(path)
    except SettingsError as refused:
        assert refused.problems


VALUES = st.one_of(
    st.text(max_size=8), st.integers(), st.floats(), st.booleans(), st.just([]), st.just({})
)
KEYS = [f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields]


@given(key=st.sampled_from(KEYS), value=VALUES)
def test_whatever_a_key_is_set_to_it_loads_or_is_explained(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.toml"
    table, name = key.split(".")
    written = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    if isinstance(value, str):
        written = '"' + "".join(f"\\U{ord(c):08X}" for c in value) + '"'
    path.write_text(f"[{table}]\n{name} = {written or value}\n", encoding="utf-8")
    try:
        load(path)
    except SettingsError as refused:
        assert all(problem.remedy and problem.expected for problem in refused.problems)


# ---- recipes -----------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_in_what_the_file_leaves_open(tmp_path: Path, name: str) -> None:
    settings = load(write(tmp_path, f'[learning]\nrecipe = "{name}"'))
    chosen = {
        section: {key: getattr(getattr(settings, section), key) for key in table}
        for section, table in RECIPES[name].settings.items()
    }
    assert chosen == RECIPES[name].settings


def test_what_the_file_says_stands_against_the_recipe(tmp_path: Path) -> None:
    text = '[learning]\nrecipe = "pfedrag"\ndropout = 0.3\n[training]\nhard_negatives = 9'
    settings = load(write(tmp_path, text))
    assert (settings.learning.dropout, settings.training.hard_negatives) == (0.3, 9)
    assert settings.retriever.personal == "tiered_head"


def test_without_a_recipe_it_is_the_default_one(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")) == load(write(tmp_path, '[learning]\nrecipe = "hanse"'))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[learning]\nrecipe = "fedrag"', "expected one of"),
        ("[learning]\nmomentum = 1.0", "lower it to 0.9999 or less"),
        ('[retriever]\nadapt = "lora"\npersonal = "tiered_head"', "behind which it lies"),
        (
            '[retriever]\nadapt = "lora_server"\n[learning]\nstart_from = "local"',
            "factors, which a student has left",
        ),
        (
            '[retriever]\nadapt = "lora_server"\n[learning]\naggregate = "fedavgm"',
            "momentum goes on moving the one",
        ),
    ],
)
def test_choices_that_do_not_go_together(tmp_path: Path, text: str, line: str) -> None:
    (refusal,) = refusals(tmp_path, text)
    assert line in refusal


@pytest.mark.parametrize(
    ("personal", "can"),
    [("none", True), ("query_encoder", True), ("mixture", False), ("tiered_head", False)],
)
def test_a_site_that_cannot_answer_is_told_when_it_says_that_it_does(
    tmp_path: Path, personal: str, can: bool
) -> None:
    text = f'[negatives]\nanswer = true\n[retriever]\npersonal = "{personal}"'
    if can:
        assert load(write(tmp_path, text)).negatives.answer
        return
    (refusal,) = refusals(tmp_path, text)
    assert f'negatives.answer = true: expected false with retriever.personal = "{personal}"' in (
        refusal
    )
    assert 'personal = "none" (or "query_encoder")' in refusal


def test_with_the_default_recipe_no_site_can_answer(tmp_path: Path) -> None:
    (refusal,) = refusals(tmp_path, "[negatives]\nanswer = true")
    assert 'retriever.personal = "mixture"' in refusal


def test_every_personal_layer_either_can_answer_or_cannot() -> None:
    cannot = {name for name, layer in PERSONAL.items() if layer.owns_passages}
    assert cannot == {"mixture", "tiered_head"}


# ---- who writes questions -----------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8080/v1#llama", "http://localhost:1/v1#a/b:c", "http://[::1]:80/v1#m"],
)
def test_a_writer_on_this_machine(tmp_path: Path, url: str) -> None:
    assert load(write(tmp_path, f'[pairs]\nwriter = "{url}"')).pairs.writer == url


def test_a_writer_in_a_folder_beside_the_settings(tmp_path: Path) -> None:
    writer = load(write(tmp_path, '[pairs]\nwriter = "models/small"')).pairs.writer
    assert writer == str(tmp_path / "models" / "small")


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.0.7:80/v1#m",
        "http://models.example.org:80/v1#m",
        "http://127.0.0.1.example.org:80/v1#m",
        "http://127.0.0.1@example.org:80/v1#m",
        "https://127.0.0.1:443/v1#m",
        "http://127.0.0.1/v1#m",
        "http://127.0.0.1:80/v1",
    ],
)
def test_a_writer_elsewhere_would_be_shown_every_passage(tmp_path: Path, url: str) -> None:
    (line,) = refusals(tmp_path, f'[pairs]\nwriter = "{url}"')
    assert "pairs.writer" in line
    assert "passages must not leave this machine" in line


@pytest.mark.parametrize(
    "uri",
    [
        "http://192.168.0.7:19530",
        "http://milvus.example.org:19530",
        "http://127.0.0.1.example.org:19530",
        "http://127.0.0.1@example.org:19530",
        "https://user:secret@example.org:19530",
        "https://example.org",
        "milvus.db",
    ],
)
def test_vectors_cross_no_network_in_the_clear(tmp_path: Path, uri: str) -> None:
    (line,) = refusals(tmp_path, f'[index]\nengine = "milvus"\nuri = "{uri}"')
    assert "index.uri" in line
    assert "vectors must not cross a network in the clear" in line


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('engine = "milvus"', "index.uri"),
        ('uri = "https://m:1"\ncert_file = "c"\nca_file = "a"', "index.cert_file"),
        ('uri = "https://m:1"\nkey_file = "k"', "index.cert_file"),
        ('uri = "https://m:1"\nkey_file = "k"\ncert_file = "c"', "index.cert_file"),
        ('uri = "http://127.0.0.1:1"\nca_file = "a"', "index.ca_file"),
    ],
)
def test_a_server_of_vectors_is_named_whole(tmp_path: Path, lines: str, told: str) -> None:
    (line,) = refusals(tmp_path, f"[index]\n{lines}")
    assert told in line


# ---- the example ------------------------------------------------------------


def test_the_example_loads_and_equals_the_defaults(tmp_path: Path) -> None:
    from_example = load(write(tmp_path, EXAMPLE.read_text(encoding="utf-8")))
    assert from_example == load(write(tmp_path, ""))


def test_the_example_lists_every_option_with_its_default() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    document = tomllib.loads(text)
    for section, model in SECTIONS.items():
        table = document.pop(section)
        for key, field in model.model_fields.items():
            fixed = field.default is not PydanticUndefined and field.default is not None
            chosen = {**RECIPES[DEFAULT_RECIPE].settings, "retrieval": DECODINGS[USUAL_DECODING]}
            if key in chosen.get(section, ()):
                # Written out, it would hold against whatever recipe or decoding is chosen.
                shown = re.search(rf"^# {key} = (.+)$", text, re.MULTILINE)
                assert shown is not None, f"{section}.{key}"
                assert tomllib.loads(f"x = {shown[1]}")["x"] == field.default, f"{section}.{key}"
            elif fixed:
                default = str(field.default) if isinstance(field.default, Path) else field.default
                if isinstance(default, tuple):
                    default = list(default)
                assert table.pop(key) == default, f"{section}.{key}"
            else:  # the default depends on the machine: shown, commented out
                assert re.search(rf"^# {key} = \S", text, re.MULTILINE), f"{section}.{key}"
        assert not table, f"unknown in [{section}]: {sorted(table)}"
    assert not document


def test_the_example_explains_every_option_and_tells_its_bounds() -> None:
    comments: dict[str, str] = {}
    section, comment = "", ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section, comment = match[1], ""
        elif match := re.match(r"(?:# )?(\w+) = ", line):
            comments[f"{section}.{match[1]}"], comment = comment, ""
        else:
            comment += line
    assert set(comments) == set(KEYS)
    for key, comment in comments.items():
        assert len(comment) > 60, f"{key}: say what goes wrong when it is off"
        section, name = key.split(".")
        for bound in SECTIONS[section].model_fields[name].metadata:
            limit = getattr(bound, "ge", getattr(bound, "gt", getattr(bound, "le", None)))
            if limit is None:
                assert not isinstance(bound, BaseMetadata), f"{key}: how is {bound!r} told?"
            else:
                assert re.search(rf"(?<![\w.]){limit}(?![\w])(?!\.\d)", comment), f"{key}: {limit}"


def test_every_table_is_in_the_tree() -> None:
    assert list(SECTIONS) == list(Settings.model_fields)


# ---- what stands in a plan --------------------------------------------------

PLANNED = {
    f"{section}.{field.name}": field
    for message in (pb.TrainingPlan, pb.LearningPlan)
    for field in message.DESCRIPTOR.fields
    for section in ("retriever", "training", "learning")
    if field.name in SECTIONS[section].model_fields and field.name != "recipe"
}


@pytest.mark.parametrize("key", PLANNED)
def test_an_option_takes_what_its_field_of_a_plan_takes(key: str) -> None:
    section, name = key.split(".")
    option, field = SECTIONS[section].model_fields[name], PLANNED[key]
    said = bounds_of(field)
    choices = names_of(field.enum_type).values() if field.enum_type else map(int, said.choice)
    # Where they are not written in the settings, they are looked up on the wire.
    if known := set(choices):
        assert set(get_args(option.annotation) or known) == known
        for value in known:
            assert getattr(SECTIONS[section](**{name: value}), name) == value
        with pytest.raises(ValidationError):
            SECTIONS[section](**{name: 13 if said.choice else "nobody's"})
    else:
        least = [getattr(one, "ge", getattr(one, "gt", None)) for one in option.metadata]
        most = [getattr(one, "le", None) for one in option.metadata]
        assert max(low for low in least if low is not None) >= said.least
        assert min(high for high in most if high is not None) <= said.most


def test_every_field_of_a_plan_has_an_option_or_a_reason() -> None:
    options = {key.split(".")[1] for key in PLANNED} | {"recipe"}
    fields = [*pb.TrainingPlan.DESCRIPTOR.fields, *pb.LearningPlan.DESCRIPTOR.fields]
    elsewhere = {"seed", "privacy", "learning", "robust", "byzantine_sites"}
    assert {field.name for field in fields} - options == elsewhere


# ---- privacy ------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", "delta = 1e-9\ncolluders = 2\nmax_noise = 10"])
def test_noise_that_is_required_and_may_be_next_to_none_is_refused(
    tmp_path: Path, more: str
) -> None:
    (line,) = refusals(tmp_path, f"[privacy]\nrequired = true\n{more}")
    assert line.startswith(
        "privacy.required = true: expected privacy.epsilon or privacy.least_noise beside it; "
        "write for example epsilon = 8.0"
    )
    assert "one round of it is epsilon = 506184" in line


@pytest.mark.parametrize(
    "measure", ["epsilon = 8", "least_noise = 2", "epsilon = 8\nleast_noise = 2"]
)
@pytest.mark.parametrize("required", ["true", "false"])
def test_how_much_noise_is_required_is_said_by_a_budget_or_a_least_noise(
    tmp_path: Path, required: str, measure: str
) -> None:
    privacy = load(write(tmp_path, f"[privacy]\nrequired = {required}\n{measure}")).privacy
    assert privacy.epsilon in (None, 8.0)
    assert privacy.least_noise in (None, 2.0)


def test_between_least_and_most_noise_there_is_room(tmp_path: Path) -> None:
    text = "[privacy]\nleast_noise = {}\nmax_noise = 2.0"
    (line,) = refusals(tmp_path, text.format(2.5))
    assert line.startswith("privacy.least_noise = 2.5: expected at most privacy.max_noise = 2.0")
    assert load(write(tmp_path, text.format(2.0))).privacy.least_noise == 2.0


# ---- robust rules -------------------------------------------------------------


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_rules_that_need_values_in_the_clear_are_refused(tmp_path: Path, rule: str) -> None:
    lines = refusals(tmp_path, f'[robust]\nrule = "{rule}"')
    assert len(lines) == 1
    assert "robust.rule" in lines[0]
    assert f"{rule} needs every site's values in the clear" in lines[0]


@pytest.mark.parametrize("rule", [one for one in RULE_NAMES.values() if one != "none"])
@pytest.mark.parametrize("f", range(5))
def test_a_rules_precondition_is_checked_when_the_settings_are_read(
    tmp_path: Path, rule: str, f: int
) -> None:
    """Accepted exactly if the smallest federation that the plan allows is large enough."""
    for least in range(2, 12):
        text = f'[training]\nmin_participants = {least}\n[robust]\nrule = "{rule}"\n'
        text += f"byzantine_sites = {f}"
        if objection(rule, f, least + f, least):
            (line,) = refusals(tmp_path, text)
            assert "training.min_participants" in line
            assert "may be rejected" in line
        else:
            assert load(write(tmp_path, text)).robust.byzantine_sites == f


@pytest.mark.parametrize(
    ("rule", "mode"), [("none", "ckks"), ("none", "masking"), ("norm", "masking")]
)
def test_a_rule_that_is_required_must_be_one_that_rounds_can_apply(
    tmp_path: Path, rule: str, mode: str
) -> None:
    text = f'[training]\nmode = "{mode}"\n[robust]\nrule = "{rule}"\nrequired = true'
    (line,) = refusals(tmp_path, text)
    assert "robust.required" in line
    if rule != "none":
        (line,) = refusals(tmp_path, text.replace("required = true", ""))
        assert "can't be compared" in line
