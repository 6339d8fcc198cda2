"""The wire's generated code is what the .proto files say, and they say what each field is.

`python -m tests.proto.test_wire` (make proto) writes the generated code again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
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


def test_the_committed_code_is_what_the_compiler_writes(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "proto").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(kept)
    stale = [name for name, text in fresh.items() if text != kept[name]]
    assert not stale, "run `make proto` and commit what changes"


def test_packages_carry_a_version(described: list[FileDescriptorProto]) -> None:
    for file in described:
        assert re.fullmatch(r"hanse\.[a-z]+\.v\d+", file.package), file.name
        assert file.package.split(".")[1] == Path(file.name).stem


def commented(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Name and comment of every field and enum value."""
    comments = {
        tuple(location.path): location.leading_comments + location.trailing_comments
        for location in file.source_code_info.location
    }
    for m, message in enumerate(file.message_type):
        assert not message.nested_type, "messages are not nested here"
        for f, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", comments.get((_MESSAGE, m, _FIELD, f), "")
    for e, enum in enumerate(file.enum_type):
        for v, value in enumerate(enum.value):
            if value.number:  # 0 is "unspecified" by convention
                yield f"{enum.name}.{value.name}", comments.get((_ENUM, e, _VALUE, v), "")


@pytest.mark.parametrize("name", ["proto/federation.proto", "proto/control.proto"])
def test_every_field_says_what_it_is(described: list[FileDescriptorProto], name: str) -> None:
    (file,) = [file for file in described if file.name == name]
    silent = [field for field, comment in commented(file) if not comment.strip()]
    assert not silent, f"{len(silent)} fields without a comment"


def test_every_source_is_checked() -> None:
    assert SOURCES == ["proto/control.proto", "proto/federation.proto"]


if __name__ == "__main__":
    generate(ROOT)
