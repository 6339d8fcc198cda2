"""What OCR engines often misread in figures, put right where the rest of an image says so.

A number whose comma was read as a full stop is another number. Nothing is changed without the
evidence of the same image, so that a page of law keeps its § and one of rates its decimals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from daemon.library.readers.pdf.words import Word

_DUST = re.compile(r"[.,:;'‘’`´|_~°\"“”\\/■□●]{1,2}")
_HAN = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff]")
_STRANGE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff]{1,2}")  # lines and blots, in other writings
_FEW = 0.05  # of an image's letters: it is not Chinese or Japanese
_GROUPED = re.compile(r"\(?[$€£]?\(?\d{1,3}(?:,\d{3})+\)?")
_POINTED = re.compile(r"\(?[$€£]?\(?\d{1,3}(?:[.,]\d{3})+\)?")
_SLASHED = re.compile(r"(?<=\d)/(?=\d{3}\))")
_OPENED, _CLOSED = (
    re.compile(r"\$?\(\$?\d{1,3}"),
    re.compile(r"\d{3}\)"),
)  # two halves of one number
_MANY = 4  # grouped numbers in an image, to call it a rule
_MOST_ODD = 0.25  # of the numbers in groups of three: more with a full stop are meant
_DOLLAR_ALONE = re.compile(r"[S§s]?\$[§S]?\$?\.?|[§S][§S$]?\.?")
_DOLLAR_BEFORE = re.compile(r"(\(?)[S§s]\$?(?=\(?\d)")
_BEFORE_NUMBER = re.compile(r"[.'‘,:](?=\d{1,3},\d{3}\b)")
_AFTER_NUMBER = re.compile(r"(?<=[\d)])[.'’:;]+$")
_NUMBER = re.compile(r"[($]*\d[\d.,]*\)?[.,]?")


def put_right(rows: Sequence[Sequence[Word]]) -> list[list[Word]]:
    """Rows of words, dust left out and numbers as the others of the image are written."""
    everything = "".join(word.text for row in rows for word in row)
    han = sum(_HAN.fullmatch(letter) is not None for letter in everything)
    strange = _STRANGE if han < _FEW * len(everything) else _DUST
    clean = [
        [
            word
            for word in row
            if not _DUST.fullmatch(word.text) and not strange.fullmatch(word.text)
        ]
        for row in rows
    ]
    clean = [row for row in clean if row]
    texts = [word.text for row in clean for word in row]
    grouped = sum(_GROUPED.fullmatch(text) is not None for text in texts)
    pointed = sum(
        "." in text and _POINTED.fullmatch(text.rstrip(".")) is not None for text in texts
    )
    commas = grouped >= _MANY and pointed < _MOST_ODD * (grouped + pointed)
    dollars = any(text.lstrip("(").startswith("$") for text in texts)
    return [_row(row, commas=commas, dollars=dollars) for row in clean]


def _row(row: Sequence[Word], *, commas: bool, dollars: bool) -> list[Word]:
    """Words of one line; the sign before a number is a dollar's where the image has some."""
    made: list[Word] = []
    for word, right in zip(row, [*row[1:], None], strict=True):
        text = word.text
        number_follows = right is not None and _NUMBER.fullmatch(right.text) is not None
        if dollars and number_follows and _DOLLAR_ALONE.fullmatch(text):
            text = "$"
        elif dollars:
            text = _DOLLAR_BEFORE.sub(r"\1$", text)
        last = made[-1] if made else None
        if commas and last and _OPENED.fullmatch(last.text) and _CLOSED.fullmatch(text):
            made[-1] = last._replace(text=f"{last.text},{text}", x1=word.x1)
            continue
        if commas:
            text = _SLASHED.sub(",", text)
            text = _BEFORE_NUMBER.sub("", text)
            if _POINTED.fullmatch(short := _AFTER_NUMBER.sub("", text)):
                text = short.replace(".", ",")
        made.append(word._replace(text=text))
    return made
