"""What people typed: a form's fields, bounded and read. What it means, fedd judges."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from proto import control_pb2 as control

_FORM: Final = "application/x-www-form-urlencoded"
_MOST_FIELDS: Final = 20


class FormError(Exception):
    """What came is no form of ours; the text says so, and repeats nothing of it."""


@dataclass(frozen=True)
class SearchForm:
    """What is searched for, and among which documents; "": among all."""

    question: str = ""
    collection: str = ""
    title: str = ""
    since: str = ""
    until: str = ""
    language: str = ""

    @property
    def filtered(self) -> bool:
        """Whether not all documents are meant."""
        return any(getattr(self, one.name) for one in fields(self)[1:])

    def request(self) -> control.SearchRequest:
        """As fedd is asked."""
        return control.SearchRequest(**{one.name: getattr(self, one.name) for one in fields(self)})


def read_form(request: Request, body: bytes) -> dict[str, str]:
    """The fields of a form, each once; FormError for what is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _FORM:
        raise FormError(f"this page takes forms ({_FORM}); programs ask under /v1")
    try:
        told = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError:
        raise FormError("this is no form that this page has sent") from None
    found = dict(told)
    if len(found) != len(told):
        raise FormError("this is no form that this page has sent: a field came twice")
    return {name: _plain(value) for name, value in found.items()}


def search_form(told: dict[str, str]) -> SearchForm:
    """Fields of the search page; others are passed over."""
    known = {one.name: told[one.name].strip() for one in fields(SearchForm) if one.name in told}
    return SearchForm(**known)


def _plain(value: str) -> str:
    """As text travels to fedd: browsers end lines with CR LF, and UTF-8 has no half characters."""
    return value.replace("\r\n", "\n").encode(errors="replace").decode()
