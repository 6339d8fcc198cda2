"""Letters: their text, and the files that are attached to them."""

from __future__ import annotations

from email.message import EmailMessage
from pathlib import Path

import pytest

from daemon.library.readers import mail
from daemon.library.readers.documents import About, Attached, Block
from daemon.library.readers.mail import read_eml
from daemon.library.readers.reader import Refused
from tests.daemon.library.readers.known_text import attached, problems, read_bytes, texts

HEADER = "From: ada@harbour.example\nTo: ole@harbour.example\nDate: Tue, 05 Mar 2024 10:00:00 +0100"


def letter(subject: str = "Oil") -> EmailMessage:
    """A letter without a body."""
    made = EmailMessage()
    made["From"] = "Ada Berg <ada@harbour.example>"
    made["To"] = "ole@harbour.example"
    made["Date"] = "Tue, 05 Mar 2024 10:00:00 +0100"
    made["Subject"] = subject
    return made


def test_a_letter_is_its_header_text_and_attachments(tmp_path: Path) -> None:
    made = letter("Öl für den Leuchtturm")
    made.set_content("Lieber Ole,\n\ndas Öl ist da.\n", charset="iso-8859-1", cte="base64")
    made.add_alternative("<p>As a page</p>", subtype="html")
    made.add_attachment(b"%PDF-1.7", "application", "pdf", filename="Lieferschein Öl.pdf")
    inner = letter("Inside")
    inner.set_content("Forwarded.")
    made.add_attachment(inner)
    assert read_bytes(read_eml, tmp_path, made.as_bytes())[:-1] == [
        About("Öl für den Leuchtturm", "Ada Berg <ada@harbour.example>", "2024-03-05"),
        Block(
            "text",
            "From: Ada Berg <ada@harbour.example>\nTo: ole@harbour.example\n"
            "Date: Tue, 05 Mar 2024 10:00:00 +0100",
        ),
        Block("text", "Lieber Ole,"),
        Block("text", "das Öl ist da."),
        Attached("Lieferschein Öl.pdf", b"%PDF-1.7"),
    ]
    forwarded = attached(read_bytes(read_eml, tmp_path, made.as_bytes()))[-1]
    assert forwarded.name == "letter-2.eml"
    assert texts(read_bytes(read_eml, tmp_path, forwarded.content))[-1] == "Forwarded."


def test_a_page_is_read_where_the_plain_form_is_empty(tmp_path: Path) -> None:
    made = letter()
    made.set_content("\n")
    made.add_alternative("<h1>Oil</h1><p>It is <b>here</b>.", subtype="html")
    assert texts(read_bytes(read_eml, tmp_path, made.as_bytes()))[1:] == ["Oil", "It is here."]


@pytest.mark.parametrize("charset", ["koi8-r", "windows-1251", "utf-8", "x-none-such"])
def test_a_letter_is_read_by_the_encoding_it_says(charset: str, tmp_path: Path) -> None:
    text = "Смотритель маяка зажигает лампу за час до заката и записывает время в журнал."
    raw = f"{HEADER}\nContent-Type: text/plain; charset={charset}\n\n".encode()
    raw += text.encode("cp1251" if charset == "x-none-such" else charset)
    assert texts(read_bytes(read_eml, tmp_path, raw))[-1] == text


def test_the_name_of_an_attachment_has_no_path(tmp_path: Path) -> None:
    made = letter()
    made.set_content("Look.")
    made.add_attachment(b"x", "text", "csv", filename="../../etc/pass\\wd.csv")
    made.add_attachment(b"y", "application", "pdf")
    names = [one.name for one in attached(read_bytes(read_eml, tmp_path, made.as_bytes()))]
    assert names == [".._.._etc_pass_wd.csv", "attachment-2"]


def test_pictures_within_a_page_are_not_attached(tmp_path: Path) -> None:
    made = letter()
    made.set_content('<p>Look: <img src="cid:a">', subtype="html")
    made.add_related(b"png", "image", "png", cid="<a>", disposition="inline", filename="logo.png")
    assert attached(read_bytes(read_eml, tmp_path, made.as_bytes())) == []


def test_only_so_many_attachments_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_MOST_ATTACHED", 2)
    made = letter()
    made.set_content("Look.")
    for n in range(3):
        made.add_attachment(bytes([n]), "application", "pdf", filename=f"{n}.pdf")
    items = read_bytes(read_eml, tmp_path, made.as_bytes())
    assert len(attached(items)) == 2
    assert problems(items) == ["only 2 attachments are read: save the others as files"]


def test_an_encrypted_letter_says_so_and_its_header(tmp_path: Path) -> None:
    raw = f"{HEADER}\nContent-Type: multipart/encrypted; boundary=b\n\n--b\n\nx\n--b--\n".encode()
    items = read_bytes(read_eml, tmp_path, raw)
    assert problems(items) == ["its text is encrypted: save it decrypted"]
    assert texts(items) == [HEADER]


def test_a_part_that_is_no_text_leaves_the_others(tmp_path: Path) -> None:
    part = "--b\nContent-Type: text/plain\nContent-Transfer-Encoding: base64\n\n"
    raw = f"{HEADER}\nContent-Type: multipart/mixed; boundary=b\n\n{part}AAECAwD/\n{part}T2ls\n"
    items = read_bytes(read_eml, tmp_path, raw.encode())
    assert texts(items) == [HEADER, "Oil"]
    assert problems(items)[0].startswith("a part of its text: binary")


def test_what_is_no_letter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no letter"):
        read_bytes(read_eml, tmp_path, b"%PDF-1.7\n\nbinary")


@pytest.mark.slow
def test_parts_within_parts_without_end_are_refused_or_read(tmp_path: Path) -> None:
    depth = 1200
    lines = [HEADER]
    for n in range(depth):
        lines += [f"Content-Type: multipart/mixed; boundary=b{n}", "", f"--b{n}"]
    with pytest.raises(Refused, match="nested too deeply"):
        read_bytes(read_eml, tmp_path, "\n".join([*lines, "", "x"]).encode())
