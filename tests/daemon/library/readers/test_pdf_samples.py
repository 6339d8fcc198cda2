"""Real PDFs: how many words, cells and scanned words of annual reports are read, in the box.

Needs the samples (HANSE_DATA, or a `shared/data` beside the project); skips with the reason
where they are absent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pdfplumber
import pypdfium2 as pdfium
import pytest

from daemon.library.box.boxes import Boxes
from daemon.library.files import Found
from daemon.library.readers.documents import Block, Document
from daemon.library.readers.pdf import engines
from daemon.library.readers.pdf.layout import place_of
from daemon.library.readers.pdf.words import frame_of, words_of
from tests.daemon.library.readers.pdf_measures import (
    Share,
    cells_in_order,
    has_cell,
    in_order,
    without_running_lines,
    words,
)

ROOT = Path(__file__).parents[4]
DATA = Path(os.environ.get("HANSE_DATA", ROOT.parent / "shared" / "data"))
SAMPLES = DATA / "financebench" / "pdf_samples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"no data at {SAMPLES} (set HANSE_DATA)"),
    pytest.mark.skipif(not shutil.which("tesseract"), reason="tesseract is not installed"),
]


@cache
def manifest() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((SAMPLES / "manifest.json").read_text(encoding="utf-8"))
    return told


def blocks_of_pages(file: str) -> dict[int, list[Block]]:
    return blocks_read(file, os.environ["PATH"])


@cache
def blocks_read(file: str, programs: str) -> dict[int, list[Block]]:
    """By the engine that is there: without tesseract in ``programs`` it is the other one."""
    del programs
    pages = defaultdict[int, list[Block]](list)
    with Boxes() as boxes:
        (document,) = boxes.read([Found(SAMPLES / file, file)])  # without a problem
    assert isinstance(document, Document)
    for span in document.spans:
        text = document.text[span.begin : span.end]
        pages[span.page].append(Block(span.kind, text, span.page, span.place))
    return pages


def samples() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for sample in manifest()["samples"]:
        yield sample["file"], sample["pages"]


def found_words(blocks: list[Block]) -> list[str]:
    return words(" ".join(block.text for block in blocks))


def word_shares(kinds: str) -> dict[str, Share]:
    """Words in order of each file's pages of some kinds."""
    shares = {}
    for file, pages in samples():
        told = {page["page"]: page["text"] for page in pages if re.match(kinds, page["kind"])}
        texts = dict(zip(told, without_running_lines(list(told.values())), strict=True))
        blocks = blocks_of_pages(file)
        shares[file] = sum(
            (in_order(words(text), found_words(blocks[n])) for n, text in texts.items()), Share()
        )
    return shares


def test_words_of_native_pages_are_read_in_order() -> None:
    shares = word_shares("native")
    print("\nnative words in order", *(f"{f}: {share}" for f, share in shares.items()), sep="\n ")
    assert all(share.all > 500 for share in shares.values())
    assert min(share.part for share in shares.values()) >= 0.98


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["tesseract", "rapidocr"])
def test_words_of_scanned_pages_are_read(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "rapidocr":
        if not engines.has_rapidocr():
            pytest.skip("the extra `ocr` is not installed")
        monkeypatch.setenv("PATH", "/nowhere")
    shares = {f: share for f, share in word_shares("rasterised").items() if share.all}
    told = [f"{file}: {share}" for file, share in shares.items()]
    print(f"\nscanned words in order, {engine}", *told, sep="\n ")
    assert min(share.part for share in shares.values()) >= 0.90


def test_named_cells_are_in_their_row_and_column() -> None:
    lost, total = [], 0
    for cell in manifest()["table_cells"]:
        if not cell["where"].startswith("table"):
            continue
        total += 1
        row, section = re.fullmatch(r"(.*?)(?: \((.+)\))?", cell["row"]).groups()  # type: ignore[union-attr]
        blocks = blocks_of_pages(cell["file"])[cell["page"]]
        if not has_cell(blocks, row, section or "", cell["column"], cell["value"]):
            lost.append(cell)
    print(f"\nnamed cells: {Share(total - len(lost), total)}", *lost, sep="\n ")
    assert total >= 15
    assert len(lost) <= 0.05 * total


def test_numbers_of_a_line_are_cells_of_one_row() -> None:
    shares = {}
    for file, pages in samples():
        blocks = blocks_of_pages(file)
        told = [p for p in pages if p["kind"] == "native"]
        shares[file] = sum((cells_in_order(p["text"], blocks[p["page"]]) for p in told), Share())
    print("\nnative cells in a row", *(f"{f}: {share}" for f, share in shares.items()), sep="\n ")
    total = sum(shares.values(), Share())
    assert total.all > 500
    assert total.part >= 0.95


def test_labels_of_charts_are_read() -> None:
    labels = [c for c in manifest()["table_cells"] if not c["where"].startswith("table")]
    lost = [
        cell
        for cell in labels
        if cell["value"] not in " ".join(
            block.text for block in blocks_of_pages(cell["file"])[cell["page"]]
        ).split()
    ]  # fmt: skip
    print(f"\nlabels of charts: {Share(len(labels) - len(lost), len(labels))}", *lost, sep="\n ")
    assert len(lost) <= len(labels) // 2


def test_text_comes_ten_times_as_fast_as_from_pdfplumber() -> None:
    """On pages of text alone, as both read them: words with their places, in processor time."""
    ours = theirs = 0.0
    pages = 0
    for file, told in samples():
        native = [page["page"] for page in told if page["kind"] == "native"]
        started = time.process_time()
        with pdfium.PdfDocument(SAMPLES / file) as document:
            for number in native:
                page = document[number - 1]
                frame = frame_of(page)
                assert all(place_of(frame, word[:4]) for word in words_of(page, frame))
        ours += time.process_time() - started
        started = time.process_time()
        with pdfplumber.open(SAMPLES / file) as document:
            for number in native:
                assert document.pages[number - 1].extract_text() is not None
        theirs += time.process_time() - started
        pages += len(native)
    print(
        f"\n{pages / ours:.0f} pages/s, pdfplumber {pages / theirs:.1f}: {theirs / ours:.1f} times"
    )
    assert theirs >= 10 * ours
