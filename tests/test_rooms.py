"""The rooms of the house: who may import whom, and where each heavy dependency lives."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
ROOMS = ("proto", "config", "crypto", "peers", "daemon")
# What each room may import of ours, besides itself.
MAY_IMPORT = {
    "proto": set[str](),
    "config": {"proto"},
    "crypto": set[str](),
    "peers": {"proto", "crypto"},
    "daemon": {"proto", "config", "crypto", "peers"},
    "tests": {*ROOMS},
}
# The rooms whose jobs run models.
MODELS = tuple(
    f"daemon/{room}/"
    for room in ("learning", "personal", "jobs", "pairs", "inversion", "answering")
)
# Each heavy dependency has one home, whose files translate its exceptions; none: tests alone.
HOMES = {
    "tenseal": ("crypto/ckks/seal_library.py",),
    "cryptography.x509": (
        "crypto/identity/authority.py",
        "crypto/identity/authorities.py",
        "crypto/identity/x509.py",
        "crypto/identity/site.py",
        "crypto/identity/trust.py",
    ),
    "dp_accounting": ("crypto/privacy.py",),
    "jwt": ("daemon/state/people.py",),
    "hnswlib": ("daemon/library/dense/graph.py",),
    "pymilvus": ("daemon/library/dense/milvus.py",),
    "pypdfium2": ("daemon/library/readers/pdf/",),
    "pdfplumber": ("daemon/library/readers/pdf/ruled.py",),
    "rapidocr": ("daemon/library/readers/pdf/ocr.py",),
    "py3langid": ("daemon/library/catalogue/language.py",),
    "lxml": ("daemon/library/readers/html.py",),
    "pptx": ("daemon/library/readers/pptx.py",),
    "docx": (),
    "openpyxl": ("daemon/library/readers/sheets.py",),
    "torch": MODELS,
    "transformers": MODELS,
    "peft": ("daemon/learning/",),
    "accelerate": ("daemon/learning/engine/engine.py",),
    "tokenizers": MODELS,
    "ir_measures": ("daemon/evaluation/",),
    "sacrebleu": ("daemon/evaluation/",),
    "rouge_score": ("daemon/evaluation/",),
    "jiwer": ("daemon/evaluation/",),
    "nltk": ("daemon/evaluation/",),
    "starlette": ("daemon/gateway/",),
    "uvicorn": ("daemon/gateway/",),
    "prometheus_client": ("daemon/gateway/",),
    "mcp": ("daemon/gateway/mcp_api.py", "daemon/fedctl/commands/mcp.py"),
    "mcp_types": ("daemon/gateway/mcp_api.py", "daemon/fedctl/commands/mcp.py"),
    "httpx2": ("daemon/fedctl/commands/mcp.py",),
    "jinja2": ("daemon/gateway/pages/",),
    "playwright": (),
    "openai": (),
    "grpc": (
        "proto/",
        "peers/link/",
        "daemon/control/context.py",
        "daemon/control/socket.py",
        "daemon/questions/",
        "daemon/gateway/",
        "daemon/fedctl/",
    ),
}
# The main process answers peers; what computes is loaded in workers alone.
ONLY_IN_WORKERS = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "tenseal",
    "hnswlib",
    "ir_measures",
    "py3langid",
    "scipy",
    "dp_accounting",
    "sacrebleu",
    "rouge_score",
    "jiwer",
    "nltk",
)
UNSAFE = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
MOST_LINES_IN = {**dict.fromkeys(ROOMS, 600), "tests": 650}
MOST_FILES_IN_A_FOLDER = 13  # besides what makes it a package
MOST_LINES_IN_A_FUNCTION = 70
LONGEST_NAME_OF_A_TEST = 70
MOST_ARGUMENTS_OF_A_CONSTRUCTOR = 8


def sources(*folders: str) -> list[Path]:
    """Our own source files, generated code left out."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Each node of a file's tree."""
    return tuple(ast.walk(parsed(path)))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Dotted names that a file imports, wherever in it, with their lines."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    package = path.relative_to(ROOT).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def parts_of(name: str) -> list[Path]:
    """A file of peers/, and those of its room that it is made of."""
    found, waiting = dict[Path, None](), [ROOT / name]
    while waiting:
        path = waiting.pop()
        found[path] = None
        for imported, _ in imports(path):
            part = ROOT / (imported.replace(".", "/") + ".py")
            if imported.startswith("peers.") and part.is_file() and part not in found:
                waiting.append(part)
    return list(found)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# ---- directions and homes ---------------------------------------------------


def test_imports_flow_one_way() -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {imported}"
        for room, allowed in MAY_IMPORT.items()
        for path in sources(room)
        for imported, line in imports(path)
        if (top := imported.split(".")[0]) in MAY_IMPORT and top not in {room, *allowed}
    }
    assert not wrong


def test_settings_take_only_their_bounds_from_the_wire() -> None:
    taken = {
        imported
        for path in sources("config")
        for imported, _ in imports(path)
        if within(imported, "proto")
    }
    assert taken == {"proto", "proto.bounds"}


def test_the_protocol_touches_neither_clock_nor_chance_nor_network() -> None:
    forbidden = (
        *("time", "random", "numpy.random", "secrets", "os"),
        *("asyncio", "socket", "grpc", "threading"),
    )
    made_of = parts_of("peers/rounds/protocol.py")
    assert {
        "peers/attempts/bundle.py",
        "peers/rounds/pacemaker.py",
        "peers/attempts/statement.py",
    } <= set(map(name_of, made_of))
    wrong = {
        f"{name_of(path)}:{line} imports {imported}"
        for path in [*made_of, ROOT / "crypto/quantize.py"]
        for imported, line in imports(path)
        if any(within(imported, module) for module in forbidden)
    }
    wrong |= {
        f"{name_of(path)}:{node.lineno} asks what time it is"
        for path in made_of
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("datetime.now", "datetime.utcnow", "datetime.today")
    }
    assert not wrong


@pytest.mark.parametrize("dependency", HOMES)
def test_a_heavy_dependency_stays_at_home(dependency: str) -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {imported}"
        for path in sources(*ROOMS)
        for imported, line in imports(path)
        if within(imported, dependency) and not name_of(path).startswith(HOMES[dependency])
    }
    assert not wrong


def test_imports_are_statements_that_say_whole_names() -> None:
    """Else these tests would not see them."""
    by_string = ("import_module", "__import__")
    wrong = {
        f"{name_of(path)}:{node.lineno}"
        for path in sources(*ROOMS)
        for node in nodes(path)
        if (isinstance(node, ast.ImportFrom) and node.level)
        or (isinstance(node, ast.Attribute) and node.attr in by_string)
        or (isinstance(node, ast.Name) and node.id in by_string)
    }
    assert not wrong


def test_nothing_is_pickled() -> None:
    wrong = {
        f"{name_of(path)}:{line} imports {imported}"
        for path in sources(*ROOMS)  # a test may ask whether an error survives a process boundary
        for imported, line in imports(path)
        if any(within(imported, module) for module in UNSAFE)
    }
    assert not wrong


@pytest.mark.parametrize("module", ["daemon.main", "daemon.fedctl", "daemon.gateway.main"])
def test_the_main_process_loads_nothing_that_computes(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = sorted(set(ONLY_IN_WORKERS) & set(done.stdout.split()))
    assert not loaded, f"importing {module} loads them: import them where the worker's job runs"


# ---- names that nobody says -------------------------------------------------

# What only tests and benchmarks use, and why it is part of the product all the same.
WITHOUT_A_USE = {
    "daemon/control/context.py: WithinBounds.intercept_service": "grpc calls it",
    "daemon/gateway/connections.py: TimedProtocol.on_response_complete": "uvicorn calls it",
    "daemon/gateway/connections.py: Server.startup": "uvicorn calls it",
    "daemon/gateway/main.py: _Libraries.formatException": "logging calls it",
}


def said(parts: Iterable[ast.AST]) -> Counter[str]:
    """How often each name is used in a piece of code."""
    names = Counter[str]()
    for part in parts:
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            names[part.id] += 1
        elif isinstance(part, ast.Attribute):
            names[part.attr] += 1
        elif isinstance(part, ast.keyword) and part.arg:
            names[part.arg] += 1
    return names


def assigned(node: ast.stmt) -> list[str]:
    """The names that a statement of a file or a class gives to something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def unused(paths: list[Path]) -> set[str]:
    """Names of files and methods of classes that no other code of these files uses.

    A name of a file is used where the file says it, another one imports it, or one that
    imports the file says it behind a dot; a method, where anything behind a dot is called
    so. Decorated functions are commands, used by who types them.
    """
    uses = {path: said(nodes(path)) for path in paths}
    lent = defaultdict[str, set[str]](set)
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    lent[start.rstrip(".")].add(alias.name)
                    lent[f"{start}{alias.name}"] |= uses[path].keys()
    anywhere = sum(uses.values(), Counter[str]())
    found = set()
    for path in paths:
        module = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in parsed(path).body:
            if not getattr(node, "decorator_list", []) or isinstance(node, ast.ClassDef):
                own = said(ast.walk(node))
                found |= {
                    f"{name_of(path)}: {name}"
                    for name in assigned(node)
                    if uses[path][name] <= own[name] and name not in lent[module]
                    if not name.startswith("__")
                }
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{name_of(path)}: {node.name}.{method.name}"
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                    if anywhere[method.name] <= said(ast.walk(method))[method.name]
                    if not method.name.startswith("__")
                }
    return found


def test_the_product_has_no_name_that_only_tests_use() -> None:
    assert unused(sources("config", "crypto", "peers", "daemon", "proto")) == set(WITHOUT_A_USE)


def test_a_name_that_nothing_uses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {
        "peers/lonely.py": "USED = 1\nLONELY = USED\n",
        "peers/caller.py": "from peers import lonely\n\nprint(lonely.USED)\n",
        "peers/thing.py": "class Thing:\n    def told(self): ...\n    def alone(self): ...\n",
        "peers/teller.py": "from peers.thing import Thing\n\nThing().told()\n",
        "peers/again.py": "def again() -> None:\n    again()\n",
    }
    monkeypatch.setattr("tests.test_rooms.ROOT", tmp_path)
    (tmp_path / "peers").mkdir()
    for name, text in planted.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert unused(sources("peers")) == {
        "peers/lonely.py: LONELY",
        "peers/thing.py: Thing.alone",
        "peers/again.py: again",
    }


# ---- no way in without TLS --------------------------------------------------


UNIX_SOCKETS = ("daemon/control/socket.py", "daemon/fedctl/", "daemon/gateway/fedd.py")


def test_no_connection_without_tls_but_on_the_daemon_s_own_sockets() -> None:
    wrong = {
        f"{name_of(path)}:{node.lineno} {name}"
        for path in sources(*ROOMS)
        for node in nodes(path)
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := ast.unparse(node).split(".")[-1]) in ("insecure_channel", "add_insecure_port")
        and not name_of(path).startswith(UNIX_SOCKETS)
    }
    assert not wrong


def test_the_daemon_s_own_sockets_are_unix_sockets() -> None:
    opening = [
        path
        for path in sources("daemon")
        if any(
            isinstance(node, ast.Attribute)
            and node.attr in ("insecure_channel", "add_insecure_port")
            for node in nodes(path)
        )
    ]
    assert len(opening) >= 3, "one side listens, two connect"
    for path in opening:
        schemes = {
            text.split(":")[0]
            for node in nodes(path)
            if isinstance(node, ast.Constant) and isinstance(text := node.value, str)
            if text.startswith(("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:"))
        }
        assert schemes == {"unix"}, name_of(path)


# ---- names and lock ---------------------------------------------------------


def locked() -> dict[str, str]:
    """Distribution name -> exact version, as in requirements.lock."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = [line.split("==") for line in lines]
    assert all(len(pin) == 2 for pin in pins), "every line of the lock is name==version"
    return {canonicalize_name(name): version for name, version in pins}


def test_no_dependency_claims_the_name_of_a_room() -> None:
    claims = packages_distributions()
    ours = {*ROOMS, "tests"}
    wrong = {
        f"{owner} brings a top-level {room}"
        for room in ours
        for owner in claims.get(room, [])
        if canonicalize_name(owner) != "hanse"
    }
    assert not wrong


def test_what_is_installed_is_what_is_locked() -> None:
    wrong = []
    for name, version in locked().items():
        try:
            installed = distribution(name).version.split("+")[0]
        except PackageNotFoundError:
            installed = "missing"
        if installed != version:
            wrong.append(f"{name}: locked {version}, installed {installed}")
    assert not wrong, "run `make install`"


def test_the_lock_satisfies_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["dev"],
        *extras["offline-model"],
        *extras["eval"],
    ]
    pins = locked()
    wrong = [
        text
        for text in asked
        if (requirement := Requirement(text)).name
        and not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert not wrong, "run `make lock`"


def test_the_lock_names_no_index() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--" not in text


# ---- sizes ------------------------------------------------------------------


def test_a_file_can_be_read_in_one_sitting() -> None:
    long = {
        f"{name_of(path)}: {lines} lines"
        for room in (*ROOMS, "tests")
        for path in sources(room)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES_IN[room]
    }
    assert not long


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    files = Counter(
        name_of(path.parent) for path in sources(*ROOMS, "tests") if path.name != "__init__.py"
    )
    assert not {folder: n for folder, n in files.items() if n > MOST_FILES_IN_A_FOLDER}


def test_a_function_fits_a_screen() -> None:
    long = {
        f"{name_of(path)}: {node.name} has {lines} lines"
        for path in sources(*ROOMS, "tests")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES_IN_A_FUNCTION
    }
    assert not long


def _arguments(made: ast.ClassDef) -> int:
    """How much whoever makes an object must know; a frozen dataclass is a record of fields."""
    for one in made.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return len([*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]) - 1
    marks = [ast.unparse(mark) for mark in made.decorator_list]
    if not any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
        return 0
    return sum(isinstance(one, ast.AnnAssign) and one.value is None for one in made.body)


def test_a_constructor_takes_few_arguments() -> None:
    many = {
        f"{name_of(path)}:{node.lineno} {node.name} takes {count}"
        for path in sources(*ROOMS)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        if (count := _arguments(node)) > MOST_ARGUMENTS_OF_A_CONSTRUCTOR
    }
    assert not many


def test_the_name_of_a_test_can_be_taken_in_at_a_glance() -> None:
    tests = {
        node.name
        for path in sources("tests")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    assert len(tests) > 1000
    assert [name for name in tests if len(name) > LONGEST_NAME_OF_A_TEST] == []
