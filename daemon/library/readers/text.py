"""Reads .txt and .md in any encoding; what other kinds of text are decoded by."""

from __future__ import annotations

import codecs
import datetime
import re
from collections.abc import Iterator, Mapping

import yaml
from charset_normalizer import from_bytes
from markdown_it import MarkdownIt
from markdown_it.token import Token

from daemon.library.readers import documents
from daemon.library.readers.blocks import Rows, about, bounded, one_line
from daemon.library.readers.documents import Block, Read
from daemon.library.readers.reader import Refused, Source

_BYTES_A_CHARACTER = 4  # at most, in any encoding
_LOOKED_AT = 1 << 18  # bytes that an encoding is guessed from
_MOST_LOST = 0.02  # the part of a text's characters that may be unreadable
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\ufffd]+")
_ALMOST = 0.03  # of charset-normalizer's measure of what is odd, from 0 to 1
# The encodings that are met, the more usual of two that may be meant first.
_COMMON = (
    *("cp1252", "cp1251", "gb18030", "cp932", "cp949", "big5", "cp1250", "cp1254", "cp1253"),
    *("cp1256", "cp1255", "cp1257", "cp874", "cp1258", "euc_jis_2004", "iso2022_jp", "koi8_r"),
    *("iso8859_2", "iso8859_15", "iso8859_5", "iso8859_7", "iso8859_8", "iso8859_6", "koi8_u"),
    *("cp437", "cp850", "cp852", "cp866", "latin_1"),
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16's does, so it comes before
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MAGIC = (
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "an office file or a ZIP archive"),
    (b"\xd0\xcf\x11\xe0", "an old office file"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"\x1f\x8b", "packed with gzip"),
    (b"\x7fELF", "a program"),
)
# What the web's names mean by https://encoding.spec.whatwg.org/#names-and-labels, where Python
# takes them more narrowly.
_MEANT = {
    **dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"), "cp1252"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis"), "cp932"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987"), "cp949"),
    **dict.fromkeys(("iso-8859-9",), "cp1254"),
    **dict.fromkeys(("iso-8859-11", "tis-620"), "cp874"),
}
# Of Python's own encodings, those that a file in the world may say it has.
_OF_THE_WORLD = re.compile(
    r"(?:utf-?8|cp\d+|windows-?\d+|iso-?8859-?\d+|iso-2022-[jk][pr]|koi8-[rut]|gb18030|big5"
    r"(?:-?hkscs)?|euc-?(?:jp|kr)|mac-?\w+|ibm\d+)\Z"
)
_FRONT = re.compile(r"\A---[ \t]*\n(.{0,65536}?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_PIECE = 1 << 16  # characters of Markdown that are parsed at once, at least
_LONGEST_HEADING = 80  # characters, in a text that has no other mark for one
_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")


def decoded_as(raw: bytes, name: str) -> str | None:
    """``raw`` by the encoding that it is said to have; None where that can't be."""
    label = name.strip().lower()
    meant = _MEANT.get(label, label)
    if not _OF_THE_WORLD.match(meant) or raw.startswith(tuple(mark for mark, _ in _MARKS)):
        return None
    try:
        return raw.decode(meant)
    except (UnicodeDecodeError, LookupError):
        return None


def _encoding_of(raw: bytes) -> str:
    """The encoding of a text; Refused for what is no text.

    A byte order mark says it; else it is UTF-8 where it can be, UTF-16 where every other byte
    is zero, and what charset-normalizer finds most like a language.
    """
    for mark, name in _MARKS:
        if raw.startswith(mark):
            return name
    kind = next((kind for magic, kind in _MAGIC if raw.startswith(magic)), "")
    if kind:
        raise Refused(f"{kind}, not text: give it its own ending")
    if b"\0" in raw:
        for at, name in ((1, "utf-16-le"), (0, "utf-16-be")):
            zeros, others = raw[at::2].count(0), raw[1 - at :: 2].count(0)
            if zeros > len(raw) // 5 and not others:
                return name
        raise Refused("binary, not text (it has zero bytes): give it its own ending")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        begin = max(0, error.start - _LOOKED_AT // 2)
        return _guessed(raw[begin : begin + _LOOKED_AT])
    return "utf-8"


def _guessed(raw: bytes) -> str:
    """Of the encodings by which little is odd, the one that is most like a language.

    The least oddity alone would take Japanese in Shift-JIS for Korean, and of those that are
    alike in a short text one that nobody uses.
    """
    matches = list(from_bytes(raw, cp_isolation=list(_COMMON)))
    if not matches:
        raise Refused("binary, or text in no known encoding: save it as UTF-8")
    least = min(match.chaos for match in matches)
    likely = [match for match in matches if match.chaos <= least + _ALMOST]
    likely.sort(key=lambda match: _COMMON.index(match.encoding))
    return max(likely, key=lambda match: match.coherence).encoding


def text_of(raw: bytes) -> str:
    """The text of some bytes in any encoding, its lines ended by line feeds alone."""
    text = raw.decode(_encoding_of(raw), errors="replace")
    if sum(map(len, _NO_TEXT.findall(text))) > _MOST_LOST * len(text):
        raise Refused("binary, or text in no known encoding: save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def bytes_of(source: Source) -> bytes:
    """All of a file of text; Refused where it has more than any text of the limit could."""
    most = _BYTES_A_CHARACTER * documents.MAX_TEXT_BYTES
    with source.open() as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise Refused(f"longer than {most >> 20} MiB: cut it into several files")
    return raw


def _whole(source: Source) -> str:
    text = text_of(bytes_of(source))
    if not text.strip():
        raise Refused("only white space: nothing to ingest")
    return text


def paragraphs(text: str) -> Iterator[Block]:
    """What stands between blank lines, as blocks."""
    yield from (Block("text", part) for part in _BLANK.split(text) if part.strip())


def read_plain(source: Source) -> Iterator[Read]:
    """The paragraphs of a text, and what stands above them as a line of its own."""
    yield from bounded(source, _under_headings(paragraphs(_whole(source))))


def _under_headings(blocks: Iterator[Block]) -> Iterator[Block]:
    """A short line without a full stop is a heading, where a paragraph follows that is none.

    Several such lines below one another are a list, or verse, but for the first of the text.
    """
    before: Block | None = None
    first = True
    for block in blocks:
        if before is not None:
            heads = _may_head(before.text) and (first or not _may_head(block.text))
            yield Block("heading", one_line(before.text)) if heads else before
            first = False
        before = block
    if before is not None:
        yield before


def _may_head(text: str) -> bool:
    line = text.strip()
    return len(line) <= _LONGEST_HEADING and "\n" not in line and line[-1].isalnum()


# ---- Markdown ---------------------------------------------------------------


def read_markdown(source: Source) -> Iterator[Read]:
    """What the front matter says, then headings, tables and everything else as it is written."""
    text = _whole(source)
    front = _FRONT.match(text)
    if front:
        yield from bounded(source, _front(front.group(1)))
        text = text[front.end() :]
    yield from bounded(source, _blocks(text))


def _blocks(text: str) -> Iterator[Block]:
    """The outermost blocks of Markdown (CommonMark, and the tables of GitHub's)."""
    # What is inside of lines is left as it is written, so it needn't be parsed.
    parser = MarkdownIt("commonmark").enable("table").disable(["inline", "reference"])
    for lines in _pieces(text.split("\n")):
        yield from _blocks_of(parser.parse("\n".join(lines)), lines)


def _pieces(lines: list[str]) -> Iterator[list[str]]:
    """A long text bit by bit, as its tokens take a hundred times its room.

    It is cut where no block goes on, but for a long list: behind a blank line, before one
    that is not further in, outside of code.
    """
    begin = length = 0
    fence = ""
    for at, line in enumerate(lines):
        found = _FENCE.match(line)
        if found:
            mark = found.group(1)
            if not fence:
                fence = mark
            elif mark.startswith(fence):
                fence = ""
        ends = length > _PIECE and not fence and not found and not lines[at - 1].strip()
        if ends and line[:1].strip():
            yield lines[begin:at]
            begin, length = at, 0
        length += len(line) + 1
    yield lines[begin:]


def _blocks_of(tokens: list[Token], lines: list[str]) -> Iterator[Block]:
    rows, cells = Rows(), list[str]()
    for at, token in enumerate(tokens):
        if token.type == "tr_open":
            cells = []
        elif token.type in ("th_close", "td_close"):
            cells.append(tokens[at - 1].content)
        elif token.type == "tr_close" and token.level == 2:
            yield from rows.add(cells)
        elif token.type == "table_close" and token.level == 0:
            yield from rows.end()
        elif token.level == 0 and token.map and token.type != "table_open":
            yield from _block(token, tokens[at + 1 : at + 2], lines)


def _block(token: Token, following: list[Token], lines: list[str]) -> Iterator[Block]:
    begin, end = token.map or (0, 0)
    if token.type == "heading_open":
        yield Block("heading", one_line(following[0].content))
    elif token.type == "html_block" and lines[begin].lstrip().startswith("<!--"):
        return  # a comment
    elif token.type != "hr":
        yield Block("text", "\n".join(lines[begin:end]))


def _front(text: str) -> Iterator[Read]:
    """Front matter: what it says of the document, and its tags as words to be found by."""
    try:
        told = _told(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        told = None
    if told is None:  # then it is text like other text
        yield Block("text", text)
        return
    *of_it, tags = told
    yield from about(*of_it)
    if tags:
        yield Block("text", f"tags: {tags}")


def _told(said: object) -> tuple[str, str, str, str, str] | None:
    """Title, author, date, language and tags; ValueError for a number that has no end."""
    if not isinstance(said, Mapping):
        return None
    names = {str(key).lower(): value for key, value in said.items() if isinstance(key, str)}
    return (
        _flat(names.get("title")),
        _flat(names.get("author", names.get("authors"))),
        _flat(names.get("date")),
        _flat(names.get("lang", names.get("language"))),
        _flat(names.get("tags", names.get("keywords"))),
    )


def _flat(value: object) -> str:
    """A plain value, or a list of them, as text; nothing of what is nested further."""
    many = value if isinstance(value, list) else [value]
    plain = (str, int, float, datetime.date)  # a moment is a date, too
    return ", ".join(str(one) for one in many[:100] if isinstance(one, plain))
