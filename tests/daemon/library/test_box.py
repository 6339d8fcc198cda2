"""The box that a reader works in: what a hostile file may make of its reader, and no more."""

from __future__ import annotations

import ctypes
import os
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon.library.box import Boxes, Limits
from daemon.library.files import Found
from daemon.library.readers.documents import Document, FileProblem, Item

GOOD = '{"id": "a", "title": "Keels", "text": "A keel runs along the bottom."}\n'

# What a reader does once a file has taken it over; the file's ending chooses.
TAKEN_OVER = """
    import os, signal, socket, time
    from pathlib import Path
    from daemon.library import files
    from daemon.library.readers.documents import Attached, Block, Document, Pair, Span
    from daemon.library.readers.reader import Reader

    def memory(source):
        yield Block("text", "x")
        kept = [bytearray(16 << 20) for _ in range(100)]

    def hang(source):
        yield Block("text", "x")
        while True:
            time.sleep(60)

    def spin(source):
        while True:
            pass
        yield

    def crash(source):
        os.kill(os.getpid(), signal.SIGSEGV)
        yield

    def trip(source):
        yield {}["no such part"]

    def write(source):
        for act in (
            lambda: Path(source.path.parent, "written").write_text("x"),
            lambda: source.path.unlink(),
            lambda: os.truncate(source.path, 0),
            lambda: os.kill(os.getppid(), signal.SIGKILL),
            lambda: socket.create_connection(("127.0.0.1", int(source.path.read_text())), 1),
        ):
            try:
                act()
                yield Block("text", "done")
            except OSError as error:
                yield Block("text", f"refused: {error.strerror}")

    def impostor(source):
        yield Document("another.txt", "", "mine now")
        yield Document("b.txt", "", "and again")

    def nest(source):
        yield Block("text", "outside")
        yield Attached("../../in\\0side.nest", source.path.read_bytes())

    def names(source):
        for name in ("..", ".", "", "\u6f22" * 100 + ".names", "a.jsonl", "2-a.jsonl", "a.jsonl"):
            yield Attached(name, source.path.read_bytes())

    def wait(source):
        yield Attached("a.hang", b"x")
        yield Attached("b.jsonl", source.path.read_bytes())

    def liar(source):
        text = source.path.read_text()
        yield {
            "text": Document("a", "", "x" * (17 << 20)),
            "id": Document("a" * 10_000, "", "x"),
            "spans": Document("a", "", "x", spans=(Span("text", 0, 1),) * 100_001),
            "page": Document("a", "", "x", spans=(Span("text", 0, 1, page=1 << 40),)),
            "before": Document("a", "", "x", spans=(Span("text", -1, 1),)),
            "query": Pair("x" * (1 << 20), ("a",)),
            "positives": Pair("x", ("a",) * 5000),
        }[text]

    def flood(source):
        yield Block("text", "x" * (17 << 20))

    def environment(source):
        yield Block("text", "\\n".join(os.environ))

    for act in (environment, memory, hang, spin, crash, trip, write, impostor, nest, flood):
        files.READERS["." + act.__name__] = Reader(blocks=act)
    for act in (names, wait, liar):
        files.READERS["." + act.__name__] = Reader(records=act)
    files.READERS[".txt"] = Reader(records=impostor)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files, in whose boxes `TAKEN_OVER` is known."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(textwrap.dedent(TAKEN_OVER))
    monkeypatch.setenv("PYTHONPATH", f"{code}:{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def landlock_version() -> int:
    version: int = ctypes.CDLL(None).syscall(444, None, 0, 1)
    return version


def children_of(pid: int) -> list[int]:
    """The processes that this one began, for reading."""
    return [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if "daemon.library.box" in " ".join(child.cmdline())
    ]


def boxed(folder: Path, *names: str, limits: Limits | None = None) -> Iterator[Item]:
    with Boxes(limits) as boxes:
        yield from boxes.read([Found(folder / name, name) for name in names])


def test_files_come_in_their_order_whatever_the_others_do(folder: Path) -> None:
    names = ["a.jsonl", "b.crash", "c.jsonl", "d.trip", "e.jsonl"]
    for name in names:
        (folder / name).write_text(GOOD.replace('"a"', f'"{name[0]}"'))
    items = list(boxed(folder, *names))
    assert [item.id for item in items if isinstance(item, Document)] == ["a", "c", "e"]
    told = [str(item) for item in items if isinstance(item, FileProblem)]
    assert [isinstance(item, FileProblem) for item in items] == [False, True, False, True, False]
    assert "its reader ended" in told[0]
    assert "isn't known (KeyError)" in told[1]


@pytest.mark.slow
def test_a_reader_has_its_memory_and_its_time_and_no_more(folder: Path) -> None:
    for name in ("a.memory", "b.flood", "c.hang", "d.spin"):
        (folder / name).write_text("x")
    (memory, flood) = boxed(folder, "a.memory", "b.flood", limits=Limits(memory_bytes=256 << 20))
    assert "needs more than 256 MiB" in str(memory)
    assert "longer than 16 MiB" in str(flood)
    for endless in boxed(folder, "c.hang", "d.spin", limits=Limits(pause_s=0.5)):
        assert "a page took more than 0 s" in str(endless)


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock knows no signals")
def test_a_reader_writes_calls_and_kills_nobody(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = folder / "a.write"
        path.write_text(str(server.getsockname()[1]))
        (folder / "b.jsonl").write_text(GOOD)
        document, after = boxed(folder, "a.write", "b.jsonl")
    assert isinstance(document, Document)
    said = document.text.split("\n\n")
    assert len(said) == 5
    assert all(line.startswith("refused: ") for line in said), said
    assert [entry.name for entry in folder.iterdir()].count("written") == 0
    assert path.stat().st_size > 0
    assert after == Document("a", "Keels", "A keel runs along the bottom.")


def test_a_file_of_one_name_is_one_document_of_that_name(folder: Path) -> None:
    (folder / "a.txt").write_text("x")
    (told,) = boxed(folder, "a.txt")
    assert told == Document("a.txt", "", "mine now", source=str(folder / "a.txt"))


def test_what_is_attached_is_read_within_bounds(folder: Path) -> None:
    (folder / "a.nest").write_text("x")
    told = list(boxed(folder, "a.nest"))
    inner = "a.nest/inside.nest"
    assert [item.id for item in told if isinstance(item, Document)] == [
        f"{inner}/inside.nest", inner, "a.nest",
    ]  # fmt: skip
    assert [str(x) for x in told if isinstance(x, FileProblem)] == [
        f"{folder}/a.nest/inside.nest/inside.nest/inside.nest: too many files in files: take it "
        "out and ingest it"
    ]
    assert [entry.name for entry in folder.iterdir()] == ["a.nest"]


def test_a_name_of_what_is_attached_stops_nothing(folder: Path) -> None:
    (folder / "a.names").write_text(GOOD)
    told = list(boxed(folder, "a.names"))
    assert [item.id for item in told if isinstance(item, Document)] == ["a"] * 6
    problems = [item.path for item in told if isinstance(item, FileProblem)]
    outside = f"{folder}/a.names/"
    # Three that have no name, and those in the one of 300 bytes.
    assert [path.removeprefix(outside) for path in problems[:3]] == [
        "attached", "1-attached", "2-attached",
    ]  # fmt: skip
    assert all(path.startswith(f"{outside}\u6f22") for path in problems[3:])
    assert [entry.name for entry in folder.iterdir()] == ["a.names"]


@pytest.mark.slow
def test_what_is_attached_has_the_time_of_its_file(folder: Path) -> None:
    (folder / "a.wait").write_text(GOOD)
    told = list(boxed(folder, "a.wait", limits=Limits(file_s=4.0)))
    assert [str(item).partition(": ")[0] for item in told[:2]] == [
        f"{folder}/a.wait/a.hang", f"{folder}/a.wait",
    ]  # fmt: skip
    assert all("4 s all in all" in str(item) for item in told[:2])


def test_what_no_daemon_would_take_is_not_passed_on(folder: Path) -> None:
    names = []
    for what in ("text", "id", "spans", "page", "before", "query", "positives"):
        names.append(f"{what}.liar")
        (folder / names[-1]).write_text(what)
    told = list(boxed(folder, *names))
    assert len(told) == len(names)
    for item in told:
        assert isinstance(item, FileProblem), item
        assert "the file is hostile" in item.cause


def test_files_are_read_though_what_forks_is_killed(folder: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(GOOD)
    with Boxes() as boxes:
        for name in ("a.jsonl", "b.jsonl"):
            told = list(boxes.read([Found(folder / name, name)]))
            assert told == [Document("a", "Keels", "A keel runs along the bottom.")]
            (forks,) = [
                child
                for child in psutil.Process().children()
                if child.pid in children_of(os.getpid())
            ]
            forks.kill()
            forks.wait()


def test_who_stops_listening_leaves_no_reader_behind(folder: Path) -> None:
    (folder / "a.jsonl").write_text(GOOD * 100_000)
    with Boxes() as boxes:
        told = boxes.read([Found(folder / "a.jsonl", "a.jsonl")])
        next(told)
        assert children_of(os.getpid())
        told.close()
    assert not children_of(os.getpid())


def test_who_ends_it_from_another_thread_waits_for_no_page(folder: Path) -> None:
    (folder / "a.hang").write_text("x")
    (folder / "b.jsonl").write_text(GOOD)
    files = [Found(folder / name, name) for name in ("a.hang", "b.jsonl")]
    boxes, told = Boxes(), list[Item]()
    reading = threading.Thread(target=lambda: told.extend(boxes.read(files)))
    reading.start()
    while len(children_of(os.getpid())) < 2:
        reading.join(0.01)
    boxes.end()
    reading.join(30)
    assert not reading.is_alive()
    assert not [item for item in told if isinstance(item, Document)]
    assert not children_of(os.getpid())


def test_a_reader_knows_nothing_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSE_TOKEN", "a secret")
    (folder / "a.environment").write_text("x")
    (document,) = boxed(folder, "a.environment")
    assert isinstance(document, Document)
    assert "PATH" in document.text
    assert "HANSE_TOKEN" not in document.text
