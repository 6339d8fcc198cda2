"""Which way imports go inside a room, and that none goes in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from tests.test_rooms import ROOMS, ROOT, name_of, nodes, sources

# Each folder may import those behind it, itself, and nothing before it.
ORDER = {
    "crypto": ("crypto/masking", "crypto/ckks", "crypto", "crypto/identity", "crypto/durable.py"),
    "peers": ("peers/link", "peers/rounds", "peers/attempts", "peers/plans", "peers/wire"),
    "daemon": tuple(
        f"daemon/{room}"
        for room in (
            "gateway",
            "main.py",
            "wiring.py",
            "questions",
            "control",
            "rounds",
            "services",
            "jobs",
            "answering",
            "personal",
            "inversion",
            "memorisation",
            "pairs",
            "evaluation",
            "learning/generator",
            "learning/retriever",
            "learning",
            "library",
            "state",
            "process",
        )
    ),
    "daemon/fedctl": tuple(
        f"daemon/fedctl/{room}" for room in ("main.py", "demo", "commands", "transfer", "terminal")
    ),
}
# What fedctl imports besides its own rooms: what is read, checked and, where the daemon is
# stopped, written without it; and what a status is made of.
FEDCTL = (
    "config",
    "proto",
    "crypto/identity",
    "crypto/durable.py",
    "peers/wire",
    "daemon/library/box",
    "daemon/library/files.py",
    "daemon/library/readers",
    "daemon/state/audit_format.py",
    "daemon/state/folder.py",
    "daemon/state/forget_round.py",
    "daemon/process/metrics.py",
)

# What the gateway imports besides its own room: it has nothing of the site's.
GATEWAY = ("config", "proto", "daemon/process/metrics.py")


def file_of(module: str) -> str | None:
    """A file of ours by its dotted name; None for anything else."""
    stem = module.replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py"):
        if (ROOT / name).is_file():
            return name
    return None


def imported_by(path: Path) -> Iterator[tuple[str, int]]:
    """Files of ours that a file imports, wherever in it, with the line."""
    for node in nodes(path):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, name_of(path)
            modules = [
                inner if file_of(inner := f"{node.module}.{name}") else node.module
                for name in modules
            ]
        yield from ((file, node.lineno) for module in modules if (file := file_of(module)))


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


def circle_in(edges: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def product_edges() -> dict[str, set[str]]:
    return {
        name_of(path): {file for file, _ in imported_by(path) if "_pb2" not in file}
        for path in sources(*ROOMS)
    }


def test_no_files_import_one_another_in_a_circle() -> None:
    assert not circle_in(product_edges())


def test_no_folders_import_one_another_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for file, others in product_edges().items():
        edges.setdefault(folder_of(file), set()).update(
            folder_of(other) for other in others if folder_of(other) != folder_of(file)
        )
    assert not circle_in(edges)


def place(file: str, order: tuple[str, ...]) -> int | None:
    """Where a file stands in its room's order, by the longest prefix."""
    fits = [at for at in order if file == at or file.startswith(f"{at}/")]
    return order.index(max(fits, key=len)) if fits else None


@pytest.mark.parametrize("room", ORDER)
def test_inside_a_room_imports_flow_one_way(room: str) -> None:
    order = ORDER[room]
    wrong = {
        f"{name_of(path)}:{line} imports {file}"
        for path in sources(room)
        if (mine := place(name_of(path), order)) is not None
        for file, line in imported_by(path)
        if (other := place(file, order)) is not None and other < mine
    }
    assert not wrong


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {
        folder_of(name_of(path))
        for room in ORDER
        for path in sources(room)
        if path.name != "__init__.py"
    }
    without = {
        folder
        for folder in folders
        if place(f"{folder}/x.py", tuple(chain(*ORDER.values()))) is None
    }
    assert without <= {"daemon", "daemon/fedctl"}, without


def test_fedctl_imports_what_needs_no_daemon() -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {file}"
        for path in sources("daemon/fedctl")
        for file, line in imported_by(path)
        if not file.startswith((*FEDCTL, "daemon/fedctl/", "daemon/__init__.py"))
    }
    assert not wrong


def test_the_gateway_imports_nothing_that_reaches_documents_or_keys() -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {file}"
        for path in sources("daemon/gateway")
        for file, line in imported_by(path)
        if not file.startswith((*GATEWAY, "daemon/gateway/", "daemon/__init__.py"))
    }
    assert not wrong


def test_nothing_imports_fedctl() -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {file}"
        for path in sources(*ROOMS)
        if not name_of(path).startswith("daemon/fedctl/")
        for file, line in imported_by(path)
        if file.startswith("daemon/fedctl/")
    }
    assert not wrong
