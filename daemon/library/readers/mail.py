"""Reads .eml: a letter's text, and what is attached to it (RFC 5322, RFC 2045 to 2049)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.errors import HeaderParseError, MessageError
from email.header import Header, decode_header
from email.message import Message
from email.utils import parsedate

from daemon.library.readers.blocks import about, bounded, one_line
from daemon.library.readers.documents import Attached, Block, FileProblem, Read
from daemon.library.readers.html import blocks_of
from daemon.library.readers.reader import Refused, Source
from daemon.library.readers.text import bytes_of, decoded_as, paragraphs, text_of

_MOST_ATTACHED = 100
_LONGEST_NAME = 200
_SHOWN = ("From", "To", "Cc", "Date")
_EXPECTED = (*_SHOWN, "Subject", "Message-ID", "MIME-Version", "Received", "Return-Path")
_NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f/\\]")
_ENCRYPTED = ("multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime")


def read_eml(source: Source) -> Iterator[Read]:
    """Its subject, sender and date, its text, and then its attachments as files."""
    try:
        # Of the two policies this is the one whose headers are read as they are written, so that
        # none of them can fail to be understood.
        letter = message_from_bytes(bytes_of(source), policy=policy.compat32)
        if not any(name in letter for name in _EXPECTED):
            raise Refused("no letter (it has no From, To or Date): give it its own ending")
        yield from bounded(source, _read(source, letter))
    except RecursionError:
        raise Refused("parts nested too deeply: save the letter anew") from None
    except MessageError as error:
        raise Refused(f"damaged ({error}): save the letter anew") from error


def _read(source: Source, letter: Message) -> Iterator[Read]:
    day = parsedate(_header(letter, "Date"))
    date = f"{day[0]:04}-{day[1]:02}-{day[2]:02}" if day else ""
    language = _header(letter, "Content-Language")
    yield from about(_header(letter, "Subject"), _header(letter, "From"), date, language)
    lines = [f"{name}: {text}" for name in _SHOWN if (text := _header(letter, name))]
    yield Block("text", "\n".join(lines))
    attached: list[Message] = []
    for part in _parts(letter):
        kind = part.get_content_type()
        if kind in _ENCRYPTED:
            yield FileProblem(str(source.path), "its text is encrypted: save it decrypted")
        elif _is_attached(part):
            attached.append(part)
        elif kind.startswith("text/"):
            try:
                yield from _page(part) if kind == "text/html" else paragraphs(_text(part))
            except Refused as refusal:
                yield FileProblem(str(source.path), f"a part of its text: {refusal}")
    for number, part in enumerate(attached[:_MOST_ATTACHED], 1):
        yield Attached(_name(part, number), _content(part))
    if len(attached) > _MOST_ATTACHED:
        cause = f"only {_MOST_ATTACHED} attachments are read: save the others as files"
        yield FileProblem(str(source.path), cause)


def _parts(part: Message) -> Iterator[Message]:
    """What is in a letter or a part of it; of several forms of the same, the one that is read."""
    kind = part.get_content_type()
    if kind in _ENCRYPTED or kind == "message/rfc822" or not part.is_multipart():
        yield part
    elif kind == "multipart/alternative":
        forms = [[*_parts(one)] for one in _inner(part)]
        yield from next((form for form in forms if _has_plain(form)), forms[-1] if forms else ())
    else:
        for one in _inner(part):
            yield from _parts(one)


def _inner(part: Message) -> list[Message]:
    """The parts of a part that has some, or the letter in it."""
    inner = part.get_payload() if part.is_multipart() else []
    return [one for one in inner if isinstance(one, Message)]


def _has_plain(parts: list[Message]) -> bool:
    return any(
        part.get_content_type() == "text/plain"
        and not _is_attached(part)
        and _payload(part).strip()
        for part in parts
    )


def _is_attached(part: Message) -> bool:
    """Whether it is a file of its own; pictures that a page shows inside of itself are not."""
    disposition = part.get_content_disposition()
    kind = part.get_content_type()
    if disposition == "attachment" or kind == "message/rfc822":
        return True
    if kind.startswith("text/"):
        return disposition == "inline" and bool(part.get_filename()) and kind != "text/plain"
    return bool(part.get_filename()) and not (kind.startswith("image/") and "Content-ID" in part)


def _payload(part: Message) -> bytes:
    raw = part.get_payload(decode=True)
    return raw if isinstance(raw, bytes) else b""


def _charset(part: Message) -> str:
    charset = part.get_param("charset", "")
    return charset if isinstance(charset, str) else charset[2]


def _text(part: Message) -> str:
    raw = _payload(part)
    text = decoded_as(raw, _charset(part))
    return text_of(raw) if text is None else text.replace("\r\n", "\n").replace("\r", "\n")


def _page(part: Message) -> Iterator[Block]:
    raw = _payload(part)
    if raw.strip():  # what a page says of itself is said of the letter by its header
        items = blocks_of(raw, _charset(part))
        yield from (item for item in items if isinstance(item, Block))


def _content(part: Message) -> bytes:
    """The file that is attached; a letter in a letter as it would be saved."""
    if part.get_content_type() == "message/rfc822" and (inner := _inner(part)):
        return inner[0].as_bytes()
    return _payload(part)


def _name(part: Message, number: int) -> str:
    """Its file's name without a path; a letter's ends in .eml."""
    given = _NO_NAME.sub("_", _decoded(part.get_filename() or "")).strip()
    if part.get_content_type() != "message/rfc822":
        return given[-_LONGEST_NAME:] or f"attachment-{number}"
    stem = given.removesuffix(".eml") or f"letter-{number}"
    return f"{stem[-_LONGEST_NAME:]}.eml"


def _header(letter: Message, name: str) -> str:
    value = letter.get(name, "")
    return one_line(_decoded(value))


def _decoded(value: str | Header) -> str:
    """A header's text: words in other encodings decoded (RFC 2047), raw bytes guessed."""
    try:
        words = decode_header(value)
    except (HeaderParseError, ValueError):  # an encoded word that is none: left as it is written
        return str(value)
    texts = []
    for word, charset in words:
        raw = word.encode("utf-8", "surrogateescape") if isinstance(word, str) else word
        text = decoded_as(raw, charset or "utf-8")
        texts.append(text_of(raw) if text is None else text)
    return "".join(texts)
