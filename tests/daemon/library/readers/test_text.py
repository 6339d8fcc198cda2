"""Texts in any encoding, and Markdown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.readers import documents, text
from daemon.library.readers.documents import About, Block
from daemon.library.readers.reader import Refused
from daemon.library.readers.text import read_markdown, read_plain, text_of
from tests.daemon.library.readers.known_text import problems, read_bytes, texts

GERMAN = "Die Prüfung der Öfen beginnt früh; wer später kommt, läßt sich den Schlüssel geben. " * 3
RUSSIAN = "Смотритель маяка зажигает лампу за час до заката и записывает время в журнал. " * 3
SPANISH = "El señor de la torre enciende la lámpara antes de la puesta del sol y anotó el año."
JAPANESE = (
    "灯台守は日没の一時間前にランプを灯し、その時刻を日誌に書き留めます。霧の夜は離れません。" * 3
)
CHINESE = "灯塔管理员在日落前一小时点亮灯火,并把时间写进日志。有雾的夜里谁也不能离开灯室。" * 3


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (GERMAN, "utf-8"),
        (GERMAN, "utf-8-sig"),
        (GERMAN, "latin-1"),
        (SPANISH, "latin-1"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-16-le"),
        (GERMAN, "utf-32"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "utf-16-be"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (CHINESE, "gb18030"),
    ],
)
def test_a_text_is_read_whatever_its_encoding(content: str, encoding: str, tmp_path: Path) -> None:
    if encoding == "utf-16-be":
        content = f"Log 17: {'no entry. ' * 30}{content}"  # without a mark only its zeros tell
    assert texts(read_bytes(read_plain, tmp_path, content.encode(encoding))) == [content.strip()]


def test_paragraphs_are_what_blank_lines_divide(tmp_path: Path) -> None:
    raw = b"First\r\nline.\r\n\r\n  \r\nSecond.\n\n\n\nThird.\n"
    assert read_bytes(read_plain, tmp_path, raw) == [
        Block("text", "First\nline."),
        Block("text", "Second."),
        Block("text", "Third."),
    ]


def test_a_line_of_its_own_above_a_paragraph_is_a_heading(tmp_path: Path) -> None:
    """An answer must not be "Achalasia" to who asks about it."""
    raw = b"""Achalasia

How it is found

A swallow of barium shows it.

Oars
and rope

Sails

Masts

The end."""
    assert read_bytes(read_plain, tmp_path, raw) == [
        Block("heading", "Achalasia"),
        Block("heading", "How it is found"),
        Block("text", "A swallow of barium shows it."),
        Block("text", "Oars\nand rope"),
        Block("text", "Sails"),
        Block("heading", "Masts"),
        Block("text", "The end."),
    ]


def test_a_text_of_one_line_is_no_heading(tmp_path: Path) -> None:
    assert read_bytes(read_plain, tmp_path, b"Achalasia\n") == [Block("text", "Achalasia")]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"%PDF-1.7 and more", "a PDF, not text: give it its own ending"),
        (b"PK\x03\x04 and more", "an office file or a ZIP archive, not text: give it its own"),
        (b"\x89PNG\r\n", "a picture, not text"),
        (b"some\0bytes of\0a program", "binary, not text (it has zero bytes)"),
        (b"  \n \n", "only white space: nothing to ingest"),
    ],
)
def test_what_is_no_text_is_refused_by_name(raw: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_bytes(read_plain, tmp_path, raw)
    assert str(refused.value).startswith(said)


def test_a_long_text_is_read_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 1 << 20)
    raw = b"\n\n".join([b"x" * (400 << 10)] * 4)
    items = read_bytes(read_plain, tmp_path, raw)
    assert [len(text) >> 10 for text in texts(items)] == [400, 400, 223]
    assert problems(items) == [
        "more than 1 MiB of text, read up to there: cut it into several files"
    ]
    with pytest.raises(Refused, match="longer than 4 MiB"):
        read_bytes(read_plain, tmp_path, b"x" * ((4 << 20) + 1))


@settings(max_examples=50)
@given(st.binary())
def test_any_bytes_are_text_or_refused(raw: bytes) -> None:
    try:
        text_of(raw).encode()
    except Refused as refusal:
        assert ": " in str(refusal)


# ---- Markdown ---------------------------------------------------------------

PAGE = """---
title: The lamp
author: [Ada Berg, Ole Dahl]
date: 2024-03-05
lang: de
tags: [light, oil]
---
# Lighting the *lamp* #

An hour before sunset.

Setext
======

```sh
# no heading
```

- one
- two

| Lamp | Oil |
|------|:---:|
| north \\| old | 2 |

<!-- a comment -->

Last.
"""


def test_markdown_is_headings_tables_and_text(tmp_path: Path) -> None:
    assert read_bytes(read_markdown, tmp_path, PAGE.encode()) == [
        About("The lamp", "Ada Berg, Ole Dahl", "2024-03-05", "de"),
        Block("text", "tags: light, oil"),
        Block("heading", "Lighting the *lamp*"),
        Block("text", "An hour before sunset."),
        Block("heading", "Setext"),
        Block("text", "```sh\n# no heading\n```"),
        Block("text", "- one\n- two"),
        Block("table", "Lamp\tOil\nnorth | old\t2"),
        Block("text", "Last."),
    ]


def test_long_markdown_is_read_as_short_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = PAGE.partition("---\n# ")[2] * 5 + "\n~~~\na\n\nb\n```\n\nc\n~~~\n\nEnd.\n"
    whole = read_bytes(read_markdown, tmp_path, body.encode())
    monkeypatch.setattr(text, "_PIECE", 1)
    assert read_bytes(read_markdown, tmp_path, body.encode()) == whole
    assert texts(whole)[-2:] == ["~~~\na\n\nb\n```\n\nc\n~~~", "End."]


@pytest.mark.parametrize(
    "front", ["a: [b", "just words", "a: &a [x]\nb: &b [*a, *a]\ntitle: [*b, *b]", "d: 2024-99-99"]
)
def test_odd_front_matter_does_no_harm(front: str, tmp_path: Path) -> None:
    items = read_bytes(read_markdown, tmp_path, f"---\n{front}\n---\nText.\n".encode())
    assert texts(items)[-1] == "Text."
    assert all(len(text) < 100 for text in texts(items))


def test_a_number_without_end_in_front_matter_is_text(tmp_path: Path) -> None:
    front = f"title: {'1:' * 3000}1"  # in base 60, to YAML
    items = read_bytes(read_markdown, tmp_path, f"---\n{front}\n---\nText.\n".encode())
    assert texts(items) == [front, "Text."]


def test_a_rule_at_the_beginning_is_no_front_matter(tmp_path: Path) -> None:
    assert texts(read_bytes(read_markdown, tmp_path, b"---\n\nText.\n\nMore.\n")) == [
        "Text.",
        "More.",
    ]
