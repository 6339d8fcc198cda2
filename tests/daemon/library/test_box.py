"""The box that a reader works in: what a hostile file may make of its reader, and no more."""

from __future__ import annotations

import os
import platform
import resource
import socket
import tempfile
import textwrap
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from daemon.library.box import told
from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.files import Found
from daemon.library.readers.documents import Document, FileProblem, Item
from daemon.process.confinement import landlock_version
from daemon.process.temporary import TemporaryFolder
from tests.daemon.process.test_temporary import left_by_another

GOOD = '{"id": "a", "title": "Keels", "text": "A keel runs along the bottom."}\n'

# What a reader does once a file has taken it over; the file's ending chooses.
TAKEN_OVER = """
    import ctypes, os, resource, signal, socket, stat, struct, time
    from pathlib import Path
    from daemon.library import files
    from daemon.library.readers.documents import (
        Attached, Block, Document, Pair, Reference, Span,
    )
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
            lambda: socket.socket(socket.AF_UNIX).connect(str(source.path.parent / "fedd.sock")),
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(
                b"x", ("127.0.0.1", int(source.path.read_text()))
            ),
            lambda: called(425, 8, bytes(120)),  # io_uring_setup
            os.setsid,
        ):
            try:
                act()
                yield Block("text", "done")
            except OSError as error:
                yield Block("text", f"refused: {error.strerror}")

    def called(*call):
        if ctypes.CDLL(None, use_errno=True).syscall(*call) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def leave(source):
        os.setpgid(0, 0)
        yield Block("text", "left")

    def half(source):
        yield Block("text", "x")
        for fd in range(3, 64):
            try:
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.write(fd, struct.pack("!i", 100) + b"D")
            except OSError:
                pass
        time.sleep(60)

    def orphan(source):
        if os.fork() == 0:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        yield Block("text", "x")

    def linger(source):
        os._exit = lambda _: time.sleep(600)
        yield Block("text", "x")

    def meddle(source):
        at, fedd = str(source.path), os.getppid()
        notes = ctypes.create_string_buffer(b"user.x")
        limits = ctypes.create_string_buffer(bytes(16))
        mmap = ctypes.CDLL(None, use_errno=True).mmap
        mmap.restype = ctypes.c_ssize_t

        def mapped(flags):
            if mmap(None, 1 << 20, 3, flags, -1, 0) == -1:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        for act in (
            lambda: os.chmod(at, 0o666),
            lambda: os.chown(at, os.getuid(), -1),
            lambda: os.utime(at),
            lambda: os.setxattr(at, "user.x", b"x"),
            lambda: resource.prlimit(fedd, resource.RLIMIT_CPU, (1, 1)),
            lambda: os.sched_setaffinity(fedd, {0}),
            lambda: os.setpriority(os.PRIO_PROCESS, fedd, 19),
            lambda: os.memfd_create("x"),
            lambda: called(29, 0, 4096, 0o1600),  # shmget
            lambda: mapped(0x21),  # MAP_SHARED, MAP_ANONYMOUS
            lambda: mapped(0x122),  # MAP_GROWSDOWN
        ):
            try:
                act()
                yield Block("text", "done")
            except OSError as error:
                yield Block("text", f"refused: {error.strerror}")
        resource.prlimit(0, resource.RLIMIT_CPU)  # its own may be asked for
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        mapped(0x22)

    def claims(source):
        yield Document("a.txt", "", "mine", source="/srv/a.txt")

    def impostor(source):
        yield Document("another.txt", "", "mine now")
        yield Document("b.txt", "", "and again")

    def nest(source):
        yield Block("text", "outside")
        yield Attached("../../in\\0side.nest", source.path.read_bytes())

    def names(source):
        for name in ("..", ".", "", "\u6f22" * 100 + ".names", "a.one", "2-a.one", "a.one"):
            yield Attached(name, source.path.read_bytes())

    def one(source):
        yield Block("text", "one")

    def teach(source):
        yield Document("b.md", "", "mine")
        yield Pair("Where is the key?", ("b.md",))

    def letter(source):
        yield Block("text", "Dear all")
        for ending in (".jsonl", ".JSONL.gz"):
            yield Attached("a" + ending, source.path.read_bytes())

    def wait(source):
        yield Attached("a.hang", b"x")
        yield Attached("b.one", source.path.read_bytes())

    def liar(source):
        text = source.path.read_text()
        yield {
            "text": Document("a", "", "x" * (17 << 20)),
            "id": Document("a" * 10_000, "", "x"),
            "spans": Document("a", "", "x", spans=(Span("text", 0, 1),) * 100_001),
            "page": Document("a", "", "x", spans=(Span("text", 0, 1, page=1 << 40),)),
            "before": Document("a", "", "x", spans=(Span("text", -1, 1),)),
            "author": Document("a", "", "x", author="Eve\\x1b[2J"),
            "date": Document("a", "", "x", date="2023-02-30"),
            "language": Document("a", "", "x", language="x" * 500),
            "tags": Document("a", "", "x", tags=("t",) * 51),
            "tag": Document("a", "", "x", tags=("t" * 101,)),
            "query": Pair("x" * (1 << 20), ("a",)),
            "positives": Pair("x", ("a",) * 5000),
            "answers": Pair("x", ("a",), "test", Reference(("x",) * 21)),
            "answer": Pair("x", ("a",), "test", Reference(("x" * 8193,))),
            "qtype": Pair("x", ("a",), "test", Reference((), "x\\ny")),
        }[text]

    def flood(source):
        yield Block("text", "x" * (17 << 20))

    def spy(source):
        for line in source.path.read_text().splitlines():
            for read in (lambda: Path(line).read_bytes(), lambda: sorted(os.listdir(line))):
                try:
                    yield Block("text", f"{line}: {read()}")
                except OSError as error:
                    yield Block("text", f"{line} refused: {error.strerror}")
        yield Block("text", source.path.read_text())

    def slow(source):
        time.sleep(1)
        yield Block("text", "It took its time.")

    def broken(source):
        raise ImportError("no such library")

    def many(source):
        for n in range(100):
            yield Document(f"{n}", "", "x" * 1000)

    def gap(source):
        yield Document("a", "", "one two", spans=(Span("text", 0, 3), Span("text", 6, 7)))

    def environment(source):
        yield Block("text", "\\n".join(os.environ))

    def threads(source):
        import numpy

        numpy.ones((300, 300)) @ numpy.ones((300, 300))
        yield Block("text", f"{len(os.listdir('/proc/self/task'))}")

    for act in (environment, threads, memory, hang, spin, crash, trip, write, impostor, nest):
        files.READERS["." + act.__name__] = Reader(blocks=act)
    for act in (flood, spy, slow, broken, one, leave, letter, half, orphan, linger, meddle):
        files.READERS["." + act.__name__] = Reader(blocks=act)
    for act in (names, wait, liar, many, gap, claims):
        files.READERS["." + act.__name__] = Reader(records=act)
    files.READERS[".txt"] = Reader(records=impostor)
    files.READERS[".md"] = Reader(records=teach)
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


# Before a reader is begun, as many layers of Landlock as a process may have.
NO_LAYER_LEFT = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    for _ in range(16):
        handled = (ctypes.c_uint64 * 1)(1 << 12)
        rules = libc.syscall(444, ctypes.byref(handled), ctypes.sizeof(handled), 0)
        assert libc.syscall(446, rules, 0) == 0
"""


def children_of(pid: int) -> list[int]:
    """The processes that this one began, for reading."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "daemon.library.box.process" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def session_of(leader: int) -> set[int]:
    """The processes of a session, also those whose parents have ended."""
    found = set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                found.add(pid)
    return found


def boxed(folder: Path, *names: str, limits: Limits | None = None) -> Generator[Item, None, None]:
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
    daemon = socket.socket(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as server, daemon:
        daemon.bind(str(folder / "fedd.sock"))
        daemon.listen()
        path = folder / "a.write"
        path.write_text(str(server.getsockname()[1]))
        (folder / "b.jsonl").write_text(GOOD)
        document, after = boxed(folder, "a.write", "b.jsonl")
    assert isinstance(document, Document)
    said = document.text.split("\n\n")
    assert len(said) == 9
    assert all(line.startswith("refused: ") for line in said), said
    if platform.machine() in ("x86_64", "aarch64"):  # by seccomp, so also where Landlock is old
        assert said[4:] == ["refused: Operation not permitted"] * 5
    assert [entry.name for entry in folder.iterdir()].count("written") == 0
    assert path.stat().st_size > 0
    assert after == Document("a", "Keels", "A keel runs along the bottom.")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter is known")
def test_a_reader_does_not_leave_those_who_are_ended_together(folder: Path) -> None:
    (folder / "a.leave").write_text("x")
    (problem,) = boxed(folder, "a.leave")
    assert isinstance(problem, FileProblem), problem


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its calls have other numbers")
def test_a_reader_meddles_with_no_file_and_no_process(folder: Path) -> None:
    """Not by what Landlock lets everybody do: its path is enough to change a key's rights."""
    (folder / "a.meddle").write_text("x")
    before = resource.prlimit(os.getpid(), resource.RLIMIT_CPU)
    (document,) = boxed(folder, "a.meddle")
    assert isinstance(document, Document), document
    assert document.text.split("\n\n") == ["refused: Operation not permitted"] * 11
    assert resource.prlimit(os.getpid(), resource.RLIMIT_CPU) == before


@pytest.mark.slow
def test_half_a_message_is_waited_for_no_longer_than_none(folder: Path) -> None:
    (folder / "a.half").write_text("x")
    (folder / "b.jsonl").write_text(GOOD)
    problem, after = boxed(folder, "a.half", "b.jsonl", limits=Limits(file_s=2.0))
    assert "2 s all in all" in str(problem)
    assert isinstance(after, Document)


@pytest.mark.slow
@pytest.mark.parametrize("stays", ["orphan", "linger"])
def test_a_reader_and_what_it_begins_are_over_when_its_file_is(folder: Path, stays: str) -> None:
    (folder / f"a.{stays}").write_text("x")
    with Boxes() as boxes:
        items = boxes.read([Found(folder / f"a.{stays}", f"a.{stays}")])
        (document,) = items
        assert isinstance(document, Document)
        (forks,) = children_of(os.getpid())[:1]
        deadline = time.monotonic() + 30
        while session_of(forks) != {forks}:
            assert time.monotonic() < deadline, "what it began lives on"
            time.sleep(0.01)


def test_a_record_claims_no_file(folder: Path) -> None:
    (folder / "a.claims").write_text("x")
    (document,) = boxed(folder, "a.claims")
    assert document == Document("a.txt", "", "mine")


def test_of_a_million_mistakes_one_is_told() -> None:
    """Each would take 600 bytes, of whoever listens."""
    many = b'{"id": "a", "title": "", "text": "", "tags": [' + b"1," * 10_000 + b"1]}"
    with pytest.raises(ValidationError) as wrong:
        told._checked()[told.DOCUMENT].validate_json(many)
    assert wrong.value.error_count() == 1
    with pytest.raises(told.Senseless):
        told.heard(told.DOCUMENT, many)


@pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")
@pytest.mark.parametrize("is_watched", [False, True], ids=["ingested", "watched"])
def test_a_reader_reads_its_own_file_and_no_other(folder: Path, is_watched: bool) -> None:
    """Not the site's key, its library, the file beside it, or what the daemon has in memory."""
    site = folder.parent / "site"
    for name in ("identity/signing.key", "state/library.sqlite3"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("a secret")
    (folder / "b.txt").write_text("a secret")
    forbidden = [
        *(site / "identity/signing.key", site / "state", site / "state/library.sqlite3"),
        *(folder, folder / "b.txt", "/etc/passwd", "/etc/shadow", "/root", "/tmp", "/"),
        *(
            f"/proc/{os.getpid()}/environ",
            f"/proc/{os.getpid()}/maps",
            "/proc/self/root/etc/passwd",
        ),
    ]
    (folder / "a.spy").write_text("\n".join(map(str, forbidden)))
    below = folder if is_watched else None
    with Boxes() as boxes:
        (document,) = boxes.read([Found(folder / "a.spy", "a.spy", below)])
    assert isinstance(document, Document), document
    *said, its_own = document.text.split("\n\n")
    assert its_own == (folder / "a.spy").read_text()
    assert len(said) == 2 * len(forbidden)
    assert [line for line in said if " refused: " not in line] == []
    assert "a secret" not in document.text


@pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")
def test_a_machine_that_confines_no_reader_reads_nothing_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.jsonl").write_text(GOOD)
    code = folder.parent / "refusing"
    code.mkdir()
    (code / "sitecustomize.py").write_text(textwrap.dedent(NO_LAYER_LEFT))
    monkeypatch.setenv("PYTHONPATH", f"{code}:{os.environ['PYTHONPATH']}")
    (problem,) = boxed(folder, "a.jsonl")
    assert isinstance(problem, FileProblem)
    assert "this machine lets no reader give up its rights (landlock_restrict_self" in problem.cause
    assert problem.passing


@pytest.mark.slow
def test_what_a_file_may_add_is_bounded_in_all(folder: Path) -> None:
    (folder / "a.many").write_text("x")
    for limits in (Limits(records=30), Limits(text_bytes=32_000)):
        *documents, problem = boxed(folder, "a.many", limits=limits)
        assert isinstance(problem, FileProblem)
        assert "read up to there, cut it into several files" in problem.cause
        assert not problem.passing
        assert 25 <= len(documents) <= 30
    assert len(list(boxed(folder, "a.many"))) == 100


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


@pytest.mark.slow
def test_a_name_of_what_is_attached_stops_nothing(folder: Path) -> None:
    (folder / "a.names").write_text(GOOD)
    told = list(boxed(folder, "a.names"))
    documents = [item.id for item in told if isinstance(item, Document)]
    assert len(documents) == 6
    assert documents[3:] == ["a.names/a.one", "a.names/2-a.one", "a.names/6-a.one"]
    problems = [item.path for item in told if isinstance(item, FileProblem)]
    outside = f"{folder}/a.names/"
    # Three that have no name, and those in the one of 300 bytes.
    assert [path.removeprefix(outside) for path in problems[:3]] == [
        "attached", "1-attached", "2-attached",
    ]  # fmt: skip
    assert all(path.startswith(f"{outside}\u6f22") for path in problems[3:])
    assert [entry.name for entry in folder.iterdir()] == ["a.names"]


def test_a_letter_brings_no_records(folder: Path) -> None:
    """Their ids are their own: they would replace what they like, and teach by pairs."""
    (folder / "a.letter").write_text(GOOD)
    *refused, document = boxed(folder, "a.letter")
    assert isinstance(document, Document)
    assert (document.id, document.text) == ("a.letter", "Dear all")
    assert [str(one) for one in refused] == [
        f"{folder}/a.letter/a{ending}: records, which no letter brings: take it out and ingest it"
        for ending in (".jsonl", ".JSONL.gz")
    ]


def test_a_file_of_one_name_teaches_nothing(folder: Path) -> None:
    (folder / "b.md").write_text("x")
    document, problem = boxed(folder, "b.md")
    assert isinstance(document, Document)
    assert "the file is hostile" in str(problem)


@pytest.mark.slow
def test_what_is_attached_has_the_time_of_its_file(folder: Path) -> None:
    (folder / "a.wait").write_text(GOOD)
    told = list(boxed(folder, "a.wait", limits=Limits(file_s=4.0)))
    assert [str(item).partition(": ")[0] for item in told[:2]] == [
        f"{folder}/a.wait/a.hang", f"{folder}/a.wait",
    ]  # fmt: skip
    assert all("4 s all in all" in str(item) for item in told[:2])


def test_what_was_left_of_attached_files_is_gone_at_the_next_reading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, in_use = left_by_another(tmp_path), TemporaryFolder()
    (folder / "b.md").write_text("x")
    list(boxed(folder, "b.md"))
    assert (left.parent, left.exists(), in_use.path.exists()) == (tmp_path, False, True)
    in_use.cleanup()


@pytest.mark.slow
def test_what_no_daemon_would_take_is_not_passed_on(folder: Path) -> None:
    names = []
    lies = ("text", "id", "spans", "page", "before", "query", "positives")
    for what in (*lies, "answers", "answer", "qtype", "author", "date", "language", "tags", "tag"):
        names.append(f"{what}.liar")
        (folder / names[-1]).write_text(what)
    told = list(boxed(folder, *names))
    assert len(told) == len(names)
    for item in told:
        assert isinstance(item, FileProblem), item
        assert "the file is hostile" in item.cause


def test_text_outside_its_blocks_is_refused(folder: Path) -> None:
    (folder / "a.gap").write_text("x")
    (problem,) = boxed(folder, "a.gap")
    assert "the file is hostile" in str(problem)


@pytest.mark.slow
def test_what_cannot_be_begun_ends_no_other(folder: Path) -> None:
    names = ["a.slow", "b.broken", "c.jsonl"]
    for name in names:
        (folder / name).write_text(GOOD)
    slow, broken, good = boxed(folder, *names)
    assert isinstance(slow, Document)
    assert isinstance(good, Document)
    assert isinstance(broken, FileProblem)
    assert "this machine can't begin to read it (ImportError: no such library)" in broken.cause
    assert broken.passing


@pytest.mark.slow
def test_files_under_way_are_read_though_what_forks_is_killed(folder: Path) -> None:
    for name in ("a.slow", "b.slow"):
        (folder / name).write_text("x")
    boxes, told = Boxes(), list[Item]()
    files = [Found(folder / name, name) for name in ("a.slow", "b.slow")]
    reading = threading.Thread(target=lambda: told.extend(boxes.read(files)))
    reading.start()
    while len(children_of(os.getpid())) < 2:
        reading.join(0.01)
    forks = min(children_of(os.getpid()), key=lambda pid: psutil.Process(pid).create_time())
    psutil.Process(forks).kill()
    reading.join(30)
    boxes.end()
    assert [item.id for item in told if isinstance(item, Document)] == ["a.slow", "b.slow"]


@pytest.mark.slow
def test_a_few_files_are_read_at_once_whatever_the_processors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    names = [f"{n}.slow" for n in range(6)]
    for name in names:
        (folder / name).write_text("x")
    told = boxed(folder, *names)
    next(told)
    assert len(children_of(os.getpid())) <= 1 + 4
    told.close()


@pytest.mark.slow
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


def test_a_reader_counts_on_one_thread(folder: Path) -> None:
    (folder / "a.threads").write_text("x")
    (document,) = boxed(folder, "a.threads")
    assert isinstance(document, Document)
    assert document.text == "1"
