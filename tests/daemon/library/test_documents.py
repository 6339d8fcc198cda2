"""Reading files: what comes in, and what each bad input is answered with."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.library.files import SUFFIXES
from daemon.library.readers import documents, records
from daemon.library.readers.documents import Document, FileProblem, Pair, Reference, Span
from proto import bounds
from tests.daemon.library.unboxed import read

GOOD = '{"id": "a", "title": "Keels", "text": "A keel runs along the bottom."}\n'


def taken(path: Path) -> list[Document | Pair]:
    return [item for item in read(path) if not isinstance(item, FileProblem)]


def complaints(path: Path) -> list[str]:
    """The problems as a person sees them, without the folder they lie in."""
    folder = path if path.is_dir() else path.parent
    told = [str(item) for item in read(path) if isinstance(item, FileProblem)]
    assert all("\n" not in line for line in told)
    return [line.replace(f"{folder}/", "") for line in told]


# ---- what is read -----------------------------------------------------------


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "sails.txt").write_text("Sails are made of flax.\n")
    (tmp_path / "anchor.md").write_text("Preface.\n\n## Of anchors ##\n\nAn anchor holds.\n")
    (tmp_path / "docs.jsonl").write_text(GOOD)
    (tmp_path / "pairs_test.jsonl").write_text('{"query": "What runs below?", "doc_id": "a"}\n')
    (tmp_path / ".hidden.txt").write_text("not for ingest")
    assert list(read(tmp_path)) == [
        Document(
            "anchor.md",
            "Of anchors",
            "Preface.\n\nOf anchors\n\nAn anchor holds.",
            spans=(Span("text", 0, 8), Span("heading", 10, 20), Span("text", 22, 38)),
        ),
        Document("a", "Keels", "A keel runs along the bottom."),
        Pair("What runs below?", ("a",), "test"),
        Document("sub/sails.txt", "sails", "Sails are made of flax."),
    ]


def test_one_file_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "sails.md"
    path.write_text("No heading here.")
    assert list(read(path)) == [Document("sails.md", "sails", "No heading here.")]


def test_gzip_is_read_as_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode()) + gzip.compress(GOOD.encode()))
    assert len(taken(path)) == 2


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\n   \n" + GOOD.strip().encode())
    assert len(taken(path)) == 2
    assert complaints(path) == []


@pytest.mark.parametrize(
    ("name", "record", "split"),
    [
        ("pairs_train.jsonl", {}, "train"),
        ("pairs_valid.jsonl", {}, "valid"),
        ("dev.jsonl", {}, "valid"),
        ("pairs_test_synonyms.jsonl", {}, "test"),
        ("contest.jsonl", {}, "train"),
        ("pairs_test.jsonl", {"split": "train"}, "train"),
    ],
)
def test_a_pair_is_of_the_split_it_says_or_its_file_says(
    tmp_path: Path, name: str, record: dict[str, str], split: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"query": "Why?", "positives": ["a", "b", "a"], **record}))
    assert list(read(path)) == [Pair("Why?", ("a", "b"), split)]


@pytest.mark.parametrize(
    ("record", "reference"),
    [
        ({}, None),
        ({"answer": None, "qtype": None}, None),
        ({"answer": " Tar. "}, Reference(("Tar.",))),
        ({"answers": ["Tar.", "Pitch.", "Tar."]}, Reference(("Tar.", "Pitch."))),
        ({"answer": "Tar.", "answers": ["Pitch."]}, Reference(("Tar.", "Pitch."))),
        ({"answers": []}, Reference()),
        ({"qtype": "a  cause", "reasoning": "Numerical"}, Reference((), "a cause", "Numerical")),
    ],
)
def test_a_pair_may_say_what_the_right_answer_is(
    tmp_path: Path, record: dict[str, object], reference: Reference | None
) -> None:
    path = tmp_path / "pairs_test.jsonl"
    path.write_text(json.dumps({"query": "Why?", "doc_id": "a", **record}))
    assert list(read(path)) == [Pair("Why?", ("a",), "test", reference)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pairs_vaild.jsonl", "'vaild' in its name is not train, valid or test: is it valid?"),
        ("pairs_tarin.jsonl", "Call it pairs_train.jsonl"),
        ("Pairs_tset_synonyms.jsonl", "is it test?"),
        ("pairs_german.jsonl", "call it pairs_train_german.jsonl"),
    ],
)
def test_pairs_of_a_split_that_there_is_not_are_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text('{"query": "Why?", "doc_id": "a"}\n')
    assert taken(path) == []
    (told,) = complaints(path)
    assert said in told
    path.rename(tmp_path / "pairs.jsonl")
    assert list(read(tmp_path / "pairs.jsonl")) == [Pair("Why?", ("a",), "train")]


def test_a_record_may_say_what_is_known_of_its_document(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    said = {"author": " Ada ", "date": "2024-02-29", "language": "en", "tags": ["a b", "c", "c"]}
    spans = [{"kind": "heading", "begin": 0, "end": 5, "page": 2, "place": [0, 0.5, 1, 1]}]
    plain = {"id": "a", "text": "Keel."}
    records = [plain | said | {"spans": spans}, plain | {"tags": [], "author": None}, plain]
    path.write_text("\n".join(map(json.dumps, records)))
    first, second, third = taken(path)
    heading = Span("heading", 0, 5, 2, (0.0, 0.5, 1.0, 1.0))
    assert first == Document(
        *("a", "", "Keel.", "", (heading,), "", "Ada", "2024-02-29", "en", ("a b", "c"))
    )
    assert second == Document("a", "", "Keel.", tags=())
    assert third == Document("a", "", "Keel.", tags=None)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ({"author": "x" * 1001}, "an author has up to 1000 characters, on one line: correct it"),
        ({"author": "Eve\x07"}, "an author has up to 1000 characters, on one line: correct it"),
        ({"author": ["Eve"]}, "'author' must hold text in quotes, not list"),
        ({"date": "2023-02-29"}, "a date is a day, as 2024-05-31: correct it"),
        ({"date": "yesterday"}, "a date is a day, as 2024-05-31: correct it"),
        ({"language": "German"}, "a language has two small letters (ISO 639-1), as en: correct it"),
        ({"tags": "x"}, "'tags' must be a list of up to 50 texts"),
        ({"tags": ["x"] * 51}, "'tags' must be a list of up to 50 texts"),
        ({"tags": [1]}, "'tags' must hold text in quotes, not int"),
        ({"tags": ["x" * 101]}, "a tag has 1 to 100 characters, on one line: correct it"),
        ({"tags": [" x"]}, "a tag has 1 to 100 characters, on one line: correct it"),
        ({"tags": [""]}, "a tag has 1 to 100 characters, on one line: correct it"),
        ({"spans": "x"}, "'spans' must be a list of up to 100,000 blocks"),
        ({"spans": [{"kind": "lie", "begin": 0, "end": 1}]},
         "'spans' has no block at 0.kind: leave 'spans' out"),
        ({"spans": [7]}, "'spans' has no block at 0: leave 'spans' out"),
        ({"spans": [{"kind": "text", "begin": 0, "end": 9}]},
         "'spans' don't lie in 'text' one after another: leave 'spans' out"),
        ({"spans": [{"kind": "text", "begin": 0, "end": 2, "place": [0, 0, 0, 2]}]},
         "'spans' don't lie in 'text' one after another: leave 'spans' out"),
    ],
)  # fmt: skip
def test_what_no_document_may_say_is_refused_by_name(
    tmp_path: Path, said: dict[str, object], cause: str
) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "Keel."} | said))
    assert complaints(path) == [f"docs.jsonl, line 1: {cause}"]


def test_zero_characters_written_as_escapes_become_spaces(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "a", "text": "one\\u0000two"}')
    assert list(read(path)) == [Document("a", "", "one two")]


# ---- bad input: a clear line for each, and everything else is read ------------


def test_every_bad_file_gets_its_line_and_the_good_ones_are_read(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "good.txt").write_text("Tar keeps a seam tight.")
    (tmp_path / "latin.txt").write_bytes("Lübeck".encode("latin-1"))
    (tmp_path / "lines.jsonl").write_text(GOOD + '{"id": "b", "text": }\n' + GOOD)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "wide.txt").write_text("UTF-16", encoding="utf-16")
    (tmp_path / "white.txt").write_text(" \n ")
    assert [item.id for item in taken(tmp_path) if isinstance(item, Document)] == [
        "good.txt",
        "latin.txt",
        "a",
        "a",
        "wide.txt",
    ]
    assert complaints(tmp_path) == [
        "binary.txt: a program, not text: give it its own ending",
        "empty.md: empty file: nothing to ingest",
        "lines.jsonl, line 2: broken JSON (Expecting value, column 21): correct it",
        f"picture.png: not a kind of file that is read ({', '.join(SUFFIXES)}): skipped",
        "white.txt: only white space: nothing to ingest",
    ]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"id": "b", "text": 5}', "'text' must hold text in quotes, not int"),
        ('{"id": 7, "text": "x"}', "'id' must hold text in quotes, not int"),
        ('{"text": "x"}', "no 'id': add it"),
        ('{"id": "b", "text": " "}', "'text' is blank: fill it in or leave the line out"),
        ('{"id": "b"}', "neither 'text' (a document) nor 'query' (a pair): add the key it lacks"),
        ("[1, 2]", "expected a JSON object with 'id' and 'text', or with 'query'"),
        (
            '{"query": "q"}',
            "a pair needs 'positives' (document ids) or 'doc_id': add one",
        ),
        (
            '{"query": "q", "positives": []}',
            "'positives' must be a list of 1 to 1000 document ids",
        ),
        ('{"query": "q", "positives": [3]}', "'positives' must hold text in quotes, not int"),
        (
            '{"id": "b", "text": "x", "split": "exam"}',
            "'split' must be train, valid or test, or left out",
        ),
        (
            '{"id": "b", "text": "\\ud800"}',
            "'text' has half of a surrogate pair (\\ud800–\\udfff)",
        ),
        (
            json.dumps({"id": "b" * 513, "text": "x"}),
            "'id' is longer than 512 characters: shorten it",
        ),
        (
            json.dumps({"query": "q" * 16385, "doc_id": "a"}),
            "'query' is longer than 16 KiB: shorten it",
        ),
        (
            '{"query": "q", "doc_id": "a", "answer": 24.26}',
            "'answers' must hold text in quotes, not float",
        ),
        (
            '{"query": "q", "doc_id": "a", "answers": {"text": ["x"]}}',
            "'answers' must be a list of texts; one alone may be called 'answer'",
        ),
        (
            '{"query": "q", "doc_id": "a", "answer": " "}',
            "'answers' has a blank one: leave it out",
        ),
        (
            json.dumps({"query": "q", "doc_id": "a", "answers": [str(n) for n in range(21)]}),
            "'answers' are up to 20 texts",
        ),
        (
            json.dumps({"query": "q", "doc_id": "a", "answer": "é" * 4097}),
            "'answers' has one longer than 8 KiB: shorten it",
        ),
        (
            json.dumps({"query": "q", "doc_id": "a", "qtype": "x" * 65}),
            "'qtype' has up to 64 characters, on one line",
        ),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, line: str, cause: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(GOOD + line + "\n" + GOOD)
    assert complaints(path) == [f"docs.jsonl, line 2: {cause}"]
    assert len(taken(path)) == 2


def test_json_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text("[" * 200_000 + "\n" + GOOD)
    [complaint] = complaints(path)
    assert complaint.startswith("docs.jsonl, line 1: JSON that can't be read")
    assert len(taken(path)) == 1


def test_a_line_that_is_not_utf8_is_refused_alone(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(GOOD.encode() + b'{"id": "b", "text": "\xff"}\n' + GOOD.encode())
    assert complaints(path) == ["docs.jsonl, line 2: not UTF-8 (at byte 21): save it as UTF-8 text"]
    assert len(taken(path)) == 2


def test_a_thousand_broken_lines_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text("broken\n" * 1000 + GOOD)
    told = complaints(path)
    assert len(told) == 21
    assert told[-1] == "docs.jsonl: 980 more lines refused"
    assert len(taken(path)) == 1


READ_WITHIN = """
import resource, sys
from pathlib import Path
limit = 400 << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from proto import bounds
from tests.daemon.library.unboxed import read
for item in read(Path(sys.argv[1])):
    print(getattr(item, "text", str(item)))
"""


def read_in_little_memory(path: Path) -> list[str]:
    """What a process that may use 400 MiB in all makes of the file."""
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHIN, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(f"{path.parent}/", "").splitlines()


@pytest.mark.slow
def test_a_line_of_one_gigabyte_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode())
        file.truncate(1 << 30)  # a hole: zero bytes that take no space on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + GOOD.encode())
    assert read_in_little_memory(path) == [
        "A keel runs along the bottom.",
        "docs.jsonl, line 2: longer than 48 MiB: cut it into several records",
        "A keel runs along the bottom.",
    ]


@pytest.mark.slow
def test_a_gzip_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RATIO_FROM", 64 << 20)  # 1 GiB would take seconds
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode() + bytes(128 << 20), compresslevel=1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert complaints(path) == [
        "docs.jsonl.gz: expands more than 200 times; pack it again from its source "
        "(read up to line 2)"
    ]
    assert len(taken(path)) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.slow
def test_a_long_line_inside_gzip_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b"x" * (49 << 20) + b"\n" + GOOD.encode(), compresslevel=1))
    assert complaints(path) == [
        "docs.jsonl.gz, line 1: longer than 48 MiB: cut it into several records"
    ]
    assert len(taken(path)) == 1


def test_a_line_of_exactly_the_limit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", len(GOOD) - 1)
    path = tmp_path / "docs.jsonl"
    path.write_text(GOOD + GOOD + GOOD.strip())
    assert len(taken(path)) == 3
    path.write_text(" " + GOOD + GOOD + " " + GOOD.strip())
    assert [item.line for item in read(path) if isinstance(item, FileProblem)] == [1, 3]


def test_of_a_text_file_without_end_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 1 << 20)
    path = tmp_path / "long.txt"
    path.write_text("word " * (1 << 19))
    assert complaints(path) == [
        "long.txt: more than 1 MiB of text, read up to there: cut it into several files"
    ]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (GOOD.encode(), "not a gzip file: pack it again or drop the .gz (read up to line 0)"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-9], "cut short: copy or pack it again"),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 99, "damaged: copy or pack it again"),
    ],
)
def test_damaged_gzip_is_explained(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(content)
    [complaint] = complaints(path)
    assert complaint.startswith(f"docs.jsonl.gz: {cause}")


def test_a_vanished_folder_is_explained(tmp_path: Path) -> None:
    told = [str(item) for item in read(tmp_path / "gone")]
    assert told == [f"{tmp_path}/gone: not there (any more): check the path"]


def test_what_vanishes_while_it_is_read_costs_only_itself(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "d.txt"):
        (tmp_path / name).write_text("Oak planks.")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.txt").write_text("Oak planks.")
    stream = read(tmp_path)
    assert isinstance(next(stream), Document)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "c" / "x.txt").unlink()
    (tmp_path / "c").rmdir()
    assert [str(item).replace(f"{tmp_path}/", "") for item in stream if not taken_item(item)] == [
        "b.txt: not there (any more): check the path",
        "c: not there (any more): check the path",
    ]


def taken_item(item: object) -> bool:
    return not isinstance(item, FileProblem)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anyone may enter (pytest's own are private), as an ordinary user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    is_root = os.geteuid() == 0  # root may read everything
    try:
        (folder / "secret.txt").write_text("x")
        (folder / "secret.txt").chmod(0)
        if is_root:
            os.seteuid(65534)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_a_file_without_permission_is_explained(open_folder: Path) -> None:
    assert complaints(open_folder) == [
        "secret.txt: permission denied: run fedctl as someone who may read it"
    ]


def test_links_that_go_round_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("Hemp rope.")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    assert [item.id for item in taken(tmp_path) if isinstance(item, Document)] == [
        "a/x.txt",
        "b/x.txt",
    ]
    assert complaints(tmp_path) == [
        "a/up: a link to a folder above it: not read again",
        "b/up: a link to a folder above it: not read again",
        "self.txt: Too many levels of symbolic links",
    ]


def test_links_that_fork_at_each_step_end(tmp_path: Path) -> None:
    # The kernel follows forty, and counts again those before one that it has to look up again.
    for step in range(20):
        (tmp_path / f"{step:02}").mkdir()
        for name in "ab":
            (tmp_path / f"{step:02}" / name).symlink_to(f"../{step + 1:02}")
    (tmp_path / "20").mkdir()
    (tmp_path / "20" / "x.txt").write_text("Hemp rope.")
    ids = [item.id for item in taken(tmp_path) if isinstance(item, Document)]
    assert len(ids) == 10
    assert ids[0] == "/".join(["00", *"a" * 20, "x.txt"])
    assert {line.partition(": ")[2] for line in complaints(tmp_path)} == {
        "a folder that many links lead to: not read again"
    }


def test_folders_without_an_end_are_told(tmp_path: Path) -> None:
    inner = tmp_path / "/".join(["a"] * 300)
    inner.mkdir(parents=True)
    (inner / "x.txt").write_text("Hemp rope.")
    (tmp_path / "b.txt").write_text("Flax.")
    assert [item.id for item in taken(tmp_path) if isinstance(item, Document)] == ["b.txt"]
    assert [line.partition(": ")[2] for line in complaints(tmp_path)] == [
        "folders nested too deeply: name it by itself"
    ]


@pytest.mark.slow
def test_a_line_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_PASSED_OVER", 32 << 20)
    (tmp_path / "a.jsonl").touch()
    os.truncate(tmp_path / "a.jsonl", 1 << 40)
    assert complaints(tmp_path) == [
        "a.jsonl: a line longer than 32 MiB: no file of lines (read up to line 1)"
    ]


def test_more_blocks_than_a_message_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bounds.of("Document", "spans").items.most == documents.MAX_SPANS
    monkeypatch.setattr(documents, "MAX_SPANS", 3)
    for count in (2, 3):
        text = "# Ropes\n" + "\nHemp.\n" * count
        (tmp_path / f"{count}.md").write_text(text)
    assert len(taken(tmp_path)) == 1
    assert complaints(tmp_path) == [
        "3.md: more than 3 paragraphs and tables: cut it into several files"
    ]


def test_a_pipe_or_socket_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(tmp_path / "s.txt"))
        assert complaints(tmp_path) == [
            "pipe.txt: not a regular file: give a file or a folder",
            "s.txt: not a regular file: give a file or a folder",
        ]


def test_a_file_name_cannot_paint_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\nb.txt").write_bytes(b"")
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("x")
    assert complaints(tmp_path) == [
        "a?[31m?b.txt: empty file: nothing to ingest",
        "?.txt: the file's name is not UTF-8: rename it",
    ]


@given(st.binary(max_size=300))
def test_whatever_a_line_holds_it_is_a_record_or_a_problem(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("lines") / "docs.jsonl"
    path.write_bytes(content + b"\n" + GOOD.encode())
    assert taken(path)[-1] == Document("a", "Keels", "A keel runs along the bottom.")
