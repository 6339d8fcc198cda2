"""The wire's generated code is what the .proto files say, and they say what each field is.

`python -m tests.proto.test_wire` (make proto) writes the generated code again, and adds new fields
to `wire.txt`: what two sites of different age must agree on. What each field may hold it writes to
`bounds.txt`: there is one place that says it, so a slip there is to be seen in a change.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from crypto import disclosure, privacy
from crypto.ckks import parameters
from crypto.identity import names
from proto import bounds
from proto import federation_pb2 as pb
from proto.bounds import bounds_of, holds_of, names_of, traits_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
BOUNDS = "proto/bounds.proto"
WIRE = Path(__file__).with_name("wire.txt")
HOLDS = Path(__file__).with_name("bounds.txt")
# FileDescriptorProto.message_type and .enum_type, DescriptorProto.field and .nested_type,
# EnumDescriptorProto.value: source locations are paths of these numbers and positions.
_MESSAGE, _ENUM, _FIELD, _NESTED, _VALUE = 4, 5, 2, 3, 2


def compile_protos(*options: str) -> None:
    """Run protoc, with the type stub plug-ins of the running environment."""
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={path}" for path in sorted(scripts.glob("protoc-gen-mypy*"))]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *options, *SOURCES],
        cwd=ROOT,
        check=True,
        timeout=60,
    )


def generate(folder: Path) -> None:
    """Write all generated code below ``folder``."""
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    compile_protos(*(f"--{kind}_out={folder}" for kind in kinds))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """The .proto files as protoc understands them, with their comments."""
    path = tmp_path_factory.mktemp("wire") / "descriptors"
    compile_protos(f"--descriptor_set_out={path}", "--include_source_info")
    return list(FileDescriptorSet.FromString(path.read_bytes()).file)


@pytest.mark.slow
def test_the_committed_code_is_what_the_compiler_writes(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "proto").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(kept)
    stale = [name for name, text in fresh.items() if text != kept[name]]
    assert not stale, "run `make proto` and commit what changes"


def test_packages_carry_a_version(described: list[FileDescriptorProto]) -> None:
    for file in described:
        if file.name == BOUNDS:  # says what fields may hold, and is in no message
            assert not file.service and file.package == "hanse"
            continue
        assert re.fullmatch(r"hanse\.[a-z]+\.v\d+", file.package), file.name
        assert file.package.split(".")[1] == Path(file.name).stem


def commented(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Name and comment of every field and enum value."""
    comments = {
        tuple(location.path): location.leading_comments + location.trailing_comments
        for location in file.source_code_info.location
    }
    for m, message in enumerate(file.message_type):
        maps = [nested.options.map_entry for nested in message.nested_type]
        assert all(maps), "messages are not nested here"
        for f, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", comments.get((_MESSAGE, m, _FIELD, f), "")
    for e, enum in enumerate(file.enum_type):
        for v, value in enumerate(enum.value):
            if value.number:  # 0 is "unspecified" by convention
                yield f"{enum.name}.{value.name}", comments.get((_ENUM, e, _VALUE, v), "")


@pytest.mark.parametrize("name", SOURCES)
def test_every_field_says_what_it_is(described: list[FileDescriptorProto], name: str) -> None:
    (file,) = [file for file in described if file.name == name]
    silent = [field for field, comment in commented(file) if not comment.strip()]
    assert not silent, f"{len(silent)} fields without a comment"


# ---- what the wire is made of ---------------------------------------------------


def wire() -> list[str]:
    """Each field, value and call by which two sites understand each other, a line each."""
    lines = []
    for name, message in sorted(pb.DESCRIPTOR.message_types_by_name.items()):
        for field in message.fields:
            part = field.message_type or field.enum_type
            oneof = field.containing_oneof
            words = (field.number, field.type, part.full_name if part else "")
            more = ("repeated" if field.is_repeated else "", oneof.name if oneof else "")
            lines.append(" ".join(str(word) for word in (f"{name}.{field.name}", *words, *more)))
    for name, enum in sorted(pb.DESCRIPTOR.enum_types_by_name.items()):
        lines += [f"{name}.{value.name} {value.number}" for value in enum.values]
    for name, service in pb.DESCRIPTOR.services_by_name.items():
        for call in service.methods:
            kinds = (call.input_type.full_name, call.output_type.full_name)
            lines.append(f"{name}.{call.name} {' '.join(kinds)}")
    return [" ".join(line.split()) for line in lines]


def test_the_wire_is_what_it_was() -> None:
    """A number that changes its meaning is read wrongly by every site that is not updated."""
    recorded = WIRE.read_text(encoding="utf-8").splitlines()
    assert not set(recorded) - set(wire()), "take a new number, and reserve the old one"
    assert not set(wire()) - set(recorded), "run `make proto` and commit what changes"


# ---- bounds ---------------------------------------------------------------------


def test_every_field_says_what_it_may_hold() -> None:
    silent = [
        field.full_name
        for message in pb.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.message_type is None or field.is_repeated
        if field.type != field.TYPE_BOOL and not (field.enum_type and not field.is_repeated)
        if not bounds_of(field).ByteSize()
    ]
    assert not silent


def bounded() -> list[str]:
    """What each field between sites may hold, and what goes with each mode, a line each."""
    lines = [
        f"{name}.{field.name} {text_format.MessageToString(bounds_of(field), as_one_line=True)}"
        for name, message in sorted(pb.DESCRIPTOR.message_types_by_name.items())
        for field in message.fields
    ]
    for name, enum in sorted(pb.DESCRIPTOR.enum_types_by_name.items()):
        for value in enum.values:
            said = traits_of(value.number) if name == "Mode" else holds_of(value)
            text = text_format.MessageToString(said, as_one_line=True)
            lines.append(f"{name}.{value.name} {text}")
    return [line.rstrip() for line in lines]


def test_every_field_may_hold_what_was_recorded() -> None:
    """Looser, every site lets more pass; stricter, the words of sites of before are refused."""
    recorded = HOLDS.read_text(encoding="utf-8").splitlines()
    assert bounded() == recorded, "if that is meant: run `make proto` and commit what changes"


_UNITS = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30}
_TOLD = re.compile(r"(?:\.\.|<=) (-?[\d.]*\d(?:e-?\d+)?)(?: (MiB|GiB))?|(\d+) bytes(?! a )")


def test_comments_tell_no_other_bounds_than_the_options(
    described: list[FileDescriptorProto],
) -> None:
    (file,) = [file for file in described if file.name == "proto/federation.proto"]
    seen = 0
    for name, comment in commented(file):
        owner, what = name.split(".")
        if owner in pb.DESCRIPTOR.enum_types_by_name:
            said = holds_of(pb.DESCRIPTOR.enum_types_by_name[owner].values_by_name[what])
        else:
            said = bounds.of(owner, what)
        for number, unit, octets in _TOLD.findall(comment):
            seen += 1
            assert float(octets or number) * _UNITS[unit] == said.most, name
    assert seen > 10


def test_each_value_of_an_enum_has_one_name() -> None:
    enums = pb.DESCRIPTOR.enum_types_by_name
    assert names_of(enums["StartFrom"]) == {0: "global", 1: "local"}
    assert names_of(enums["Negatives"]) == {0: "static", 1: "bm25", 2: "in_batch"}
    assert names_of(enums["Adapt"]) == {1: "head", 2: "lora", 3: "full", 4: "lora_server"}
    assert names_of(enums["RobustRule"])[2] == "norm_sigma"
    for enum in enums.values():
        told = names_of(enum).values()
        assert len(set(told)) == len(told) and all(told)


def test_crypto_which_knows_no_wire_has_the_bounds_of_the_wire() -> None:
    assert bounds.of("Signed", "site").pattern == names.ID.pattern
    assert bounds.of("TrainingPlan", "bits").choice == [*parameters.BITS]
    assert bounds.of("PrivacyPlan", "noise_multiplier").most == privacy.LARGEST_MULTIPLIER
    assert bounds.of("NegativesRequest", "bits").most == disclosure.MAX_BITS
    assert bounds.of("NegativesRequest", "dimension").most == disclosure.MAX_DIMENSION


def test_every_source_is_checked() -> None:
    ours = [f"proto/{name}.proto" for name in ("control", "federation", "questions")]
    assert [BOUNDS, *ours] == SOURCES


def record() -> None:
    """Add to `wire.txt`, write `bounds.txt`; run in a process of its own, after `generate`."""
    recorded = WIRE.read_text(encoding="utf-8").splitlines()
    new = [line for line in wire() if line not in recorded]
    WIRE.write_text("".join(f"{line}\n" for line in [*recorded, *new]), encoding="utf-8")
    HOLDS.write_text("".join(f"{line}\n" for line in bounded()), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    else:
        generate(ROOT)
        subprocess.run(
            [sys.executable, "-m", "tests.proto.test_wire", "record"], cwd=ROOT, check=True
        )
