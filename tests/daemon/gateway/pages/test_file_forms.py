"""Forms with a file: cut anywhere they are read alike, and what is none is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.pages.file_forms import FileForm
from daemon.gateway.pages.forms import FormError

BOUNDARY = b"bound"
KIND = "multipart/form-data; boundary=bound"


def part(disposition: str, content: bytes) -> bytes:
    head = f"Content-Disposition: form-data; {disposition}\r\n\r\n".encode()
    return b"--" + BOUNDARY + b"\r\n" + head + content + b"\r\n"


END = b"--" + BOUNDARY + b"--\r\n"


def read(pieces: Sequence[bytes], kind: str = KIND) -> tuple[dict[str, str], str, bytes]:
    """Fields, the file's name and its content."""

    async def body() -> AsyncIterator[bytes]:
        for one in pieces:
            yield one

    async def whole() -> tuple[dict[str, str], str, bytes]:
        form = FileForm(kind)
        content = b"".join([piece async for piece in form.read(body())])
        return form.fields, form.file_name, content

    return asyncio.run(whole())


@given(
    content=st.binary(max_size=300).map(lambda one: one.replace(b"--bound", b"")),
    cuts=st.lists(st.integers(0, 600), max_size=8),
)
def test_a_form_is_read_alike_wherever_it_is_cut(content: bytes, cuts: list[int]) -> None:
    whole = (
        part('name="collection"', "Grüße".encode())
        + part('name="replace"', b"yes")
        + part('name="file"; filename="Größe.pdf"', content)
        + END
    )
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[a:b] for a, b in pairwise(places)]
    assert read(pieces) == ({"collection": "Grüße", "replace": "yes"}, "Größe.pdf", content)


@given(st.binary(max_size=400))
def test_whatever_comes_it_is_read_or_refused(body: bytes) -> None:
    for begin in (b"", b"--bound\r\n", part('name="file"; filename="a.txt"', b"x")):
        try:
            read([begin + body])
        except FormError:
            continue


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (part('name="collection"', b"a") + END, "choose a file"),
        (part('name="file"; filename=""', b"") + END, "choose a file"),
        (part('name="file"; filename="a.txt"', b"x"), "ends before its end"),
        (
            part('name="file"; filename="a.txt"', b"x")
            + part('name="file"; filename="b.txt"', b"y")
            + END,
            "one file at a time",
        ),
        (
            part('name="file"; filename="a.txt"', b"x") + part('name="collection"', b"a") + END,
            "no field behind it",
        ),
        (part('name="a"', b"1") + part('name="a"', b"2") + END, "came twice"),
        (part('name="collection"', b"a" * 1001) + END, "more than 1000 bytes"),
        (part('name="collection"', b"\xff") + END, "UTF-8"),
        (part('name="file"; filename="FF.txt"', b"x").replace(b"FF", b"\xff") + END, "UTF-8"),
        (b"".join(part(f'name="{n}"', b"") for n in range(11)) + END, "too many"),
        (b"no form at all", "no form"),
        (b"--bound\r\n" + b"x: y\r\n" * 20 + b"\r\n", "no form"),
        (b"--bound\r\nx: " + b"y" * 5000 + b"\r\n\r\n", "no form"),
    ],
)
def test_what_is_no_form_with_one_file_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(FormError, match=why):
        read([body])


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "multipart/form-data", f"multipart/form-data; boundary={'b' * 71}"],
)
def test_another_kind_of_body_is_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(FormError, match="curl -F"):
        read([], kind)
