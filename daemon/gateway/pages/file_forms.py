"""A form with a file, of the page or of a program: read as it comes, and nothing of it is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from daemon.gateway.pages.forms import FormError

FILE: Final = "file"
"""The field of a form that the file is in."""

FORM_BYTES: Final = 16 << 10
"""Of a form that are no file."""

_FIELD_BYTES: Final = 1000
_MOST_FIELDS: Final = 10
_HEADERS: Final = 8  # of a part
_HEADER_BYTES: Final = 2048
_LONGEST_BOUNDARY: Final = 70  # RFC 2046, 5.1.1


class FileForm:
    """multipart/form-data (RFC 7578) with one file, its fields in front of it."""

    def __init__(self, content_type: str) -> None:
        """FormError for another content type."""
        kind, told = parse_options_header(content_type)
        boundary = told.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _LONGEST_BOUNDARY:
            raise FormError("send the file as a form (multipart/form-data), as `curl -F` does")
        self.fields: dict[str, str] = {}
        self.file_name = ""  # as it came, when the first piece is there
        self._pieces: list[bytes] = []
        self._header, self._disposition = (bytearray(), bytearray()), ""
        self._name, self._value = "", bytearray()  # of the part under way
        self._whole = False
        callbacks: Any = {
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._extend_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._extend_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": self._extend_part,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(
            boundary, callbacks, max_header_count=_HEADERS, max_header_size=_HEADER_BYTES
        )

    async def read(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The file, piece by piece. FormError for a form that ends before its end, or is none."""
        async for some in body:
            try:
                self._parser.write(some)
            except MultipartParseError:
                raise FormError("this is no form that a page or curl has sent") from None
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
        if not self.file_name:
            raise FormError(f"choose a file first: the field {FILE!r} is not there, or is empty")
        if not self._whole:
            raise FormError("the form ends before its end: send it again")

    def _begin_header(self) -> None:
        self._header = (bytearray(), bytearray())

    def _extend_header(self, which: int, some: bytes) -> None:
        self._header[which].extend(some)

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            # UTF-8 (RFC 7578, 5.1.3), which the parser takes one byte a letter.
            self._disposition = value.decode("latin-1")

    def _begin_part(self) -> None:
        _, told = parse_options_header(self._disposition)
        self._disposition = ""
        try:
            name, file_name = (told.get(key, b"").decode() for key in (b"name", b"filename"))
        except UnicodeDecodeError:
            raise FormError("names in a form are in UTF-8") from None
        if self.file_name:
            raise FormError("one file at a time, and no field behind it")
        if name in self.fields or len(self.fields) >= _MOST_FIELDS:
            raise FormError("a field came twice, or there are too many")
        self._name, self._value = name, bytearray()
        if name == FILE:
            self.file_name = file_name.rpartition("/")[2]

    def _extend_part(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            if self.file_name:
                self._pieces.append(data[start:end])
            return
        self._value.extend(data[start:end])
        if len(self._value) > _FIELD_BYTES:
            raise FormError(f"a field of more than {_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name == FILE:
            return
        try:
            self.fields[self._name] = self._value.decode()
        except UnicodeDecodeError:
            raise FormError("fields of a form are in UTF-8") from None

    def _end(self) -> None:
        self._whole = True
