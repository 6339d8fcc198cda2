"""From files to answers, beside a plain pipeline in the same run.

The plain one is what most would write: pdfplumber for text and tables, pytesseract for pages
without text, passages of so many words, sentence-transformers, hnswlib; one file after
another. pytesseract and sentence-transformers aren't otherwise needed here, so the controls
that use them are left out where they are not installed, as scans are without tesseract.

Files: PDFs made for it (prose of drawn words, and a table on every fourth page), some of
them as pictures. With HANSE_DATA the annual reports of its PDF samples are read, too.

    python -m tests.benchmarks.bench_library
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import hnswlib
import numpy as np
import pdfplumber
import pypdfium2 as pdfium
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Table

from daemon.jobs import learning
from daemon.learning.retriever.encoder import locate
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.box.boxes import Boxes
from daemon.library.files import found
from daemon.library.readers.documents import Block, Document
from daemon.library.readers.pdf import ocr
from daemon.library.readers.pdf.pdf import read_pdf
from daemon.library.readers.reader import Source
from daemon.library.store import Library
from daemon.personal.serving import retriever_for
from tests.benchmarks.bench_index import _row

FILES, PAGES, SCANS, SCANNED_PAGES = 24, 8, 4, 2
RUNS = 3
SEED = 5
PASSAGE_TOKENS = 220
# What these take of the words that are drawn here. With more the encoder would leave off the end
# of each passage, and the plain pipeline be quick by not reading it.
WORDS_OF_A_PASSAGE = 72
DPI = 200  # of the plain pipeline's pictures, as ours are
PLUMBER = "pdfplumber, text and tables, same pages"
PLAIN = "pdfplumber + sentence-transformers + hnswlib, one after another"
TESSERACT = "pytesseract, page after page"
DATA = Path(os.environ.get("HANSE_DATA", Path(__file__).parents[3] / "shared" / "data"))
SAMPLES = DATA / "financebench" / "pdf_samples"

T = TypeVar("T")


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio < 1 means that ours takes less than the control."""
    with tempfile.TemporaryDirectory() as folder:
        texts, native, scans = (Path(folder) / name for name in ("texts", "native", "scans"))
        for one in (texts, native, scans):
            one.mkdir()
        for number in range(FILES):
            _write(texts / f"report{number}.pdf", number, PAGES)
        rows = [*_reading("made", sorted(texts.iterdir()), native)]
        if SAMPLES.is_dir():
            rows += _reading("annual reports", sorted(SAMPLES.glob("*.pdf")), native)
        for number in range(SCANS):
            _write_picture(scans / f"scan{number}.pdf", number)
        rows += _scanned(scans)
        return [*rows, *_searchable(texts, Path(folder))]


def _reading(name: str, paths: Sequence[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """Processor time of a page, all of `read_pdf`; median of RUNS.

    Of the pages that have a text, and without OCR: the plain one does not look at charts either.
    """
    native = {_native_of(path, folder): len(_native(path)) for path in paths}
    pages = sum(native.values())

    def ours() -> None:
        for path, count in native.items():
            source = Source(path, path.name, path.stat().st_size)
            read = {one.page for one in read_pdf(source) if isinstance(one, Block)}
            if len(read) < count:
                raise RuntimeError(f"{path}: {count} pages have a text, {len(read)} were read")

    def plain() -> None:
        for path, count in native.items():
            _plumbed(path, range(1, count + 1))

    with mock.patch.object(ocr, "engine", lambda: None):
        taken = [(_timed(ours)[1], _timed(plain)[1]) for _ in range(RUNS)]
    mine, control = (median(one) * 1000 / pages for one in zip(*taken, strict=True))
    yield _row(f"reading a page of text, {name}, {pages} pages", mine, "ms", PLUMBER, control)


def _native_of(path: Path, folder: Path) -> Path:
    """A file of those pages alone that have a text."""
    with pdfium.PdfDocument(path) as whole, pdfium.PdfDocument.new() as native:
        native.import_pages(whole, [number - 1 for number in _native(path)])
        native.save(folder / path.name)
    return folder / path.name


def _scanned(folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds until all scans are read: ours several at once."""
    pages = SCANS * SCANNED_PAGES

    def ours() -> int:
        with Boxes() as boxes:
            items = list(boxes.read(found(folder)))
        return sum(len(item.text) for item in items if isinstance(item, Document))

    letters, seconds = _timed(ours, time.perf_counter)
    if not letters:
        return  # no engine for OCR is installed
    try:
        import pytesseract  # type: ignore[import-not-found]
    except ImportError:
        yield _row(f"reading a scanned page, {pages} pages", seconds / pages, "s")
        return

    def plain() -> None:
        for path in sorted(folder.iterdir()):
            with pdfplumber.open(path) as document:
                for page in document.pages:
                    pytesseract.image_to_string(page.to_image(resolution=DPI).original)

    _, control = _timed(plain, time.perf_counter)
    yield _row(
        *(f"reading a scanned page, {pages} pages", seconds / pages, "s"),
        *(TESSERACT, control / pages),
    )


def _searchable(texts: Path, root: Path) -> Iterator[dict[str, Any]]:
    """Seconds from files to an index of them, a share of the files at a time, in turn with PLAIN.

    Encoding is the same work for both, and most of it: what remains is told by itself.
    """
    spec = RetrieverSpec(threads=os.cpu_count() or 1, device="cpu")
    retriever_for(spec).encoder.encode(["warm"])
    files = sorted(texts.iterdir())
    some = len(files) // RUNS
    ours, plain, passages, with_sentences = [], [], 0, []
    for run in range(RUNS):
        folder, shared = root / f"run{run}", root / f"texts{run}"
        folder.mkdir()
        shared.mkdir()
        for path in files[run * some : (run + 1) * some]:
            path.rename(shared / path.name)
        taken = _made_searchable(spec, shared, folder)
        ours.append(taken)
        with Library.open(folder / "library.sqlite3", read_only=True) as library:
            passages += library.counts().passages
        with suppress(ImportError):
            plain.append(_plain_pipeline(shared))
        with_sentences.append(taken.all + _sentences(spec, folder))

    def row(name: str, of: Callable[[Taken], float]) -> dict[str, Any]:
        control = median(map(of, plain)) / some if plain else None
        of_ours = median(map(of, ours)) / some
        return _row(name, of_ours, "s a file", PLAIN if plain else None, control)

    made = f"{len(files)} PDFs of {PAGES} pages, {passages} passages"
    yield row(f"from a file to searchable, {made}", lambda taken: taken.all)
    yield row("of that, all but encoding", lambda taken: taken.all - taken.encoding)
    name = f"the same with its sentences, {passages} passages"
    yield _row(name, median(with_sentences) / some, "s a file")


@dataclass(frozen=True)
class Taken:
    """Seconds of a pipeline, and of encoding passages in it."""

    all: float
    encoding: float


def _made_searchable(spec: RetrieverSpec, texts: Path, folder: Path) -> Taken:
    path, versions = folder / "library.sqlite3", folder / "versions"
    digest = learning.write_initial_version(spec, versions)
    started = time.perf_counter()
    with Boxes() as boxes:
        documents = [one for one in boxes.read(found(texts)) if isinstance(one, Document)]
    learning.ingest(spec, path, documents, [], PASSAGE_TOKENS)
    _, encoding = _timed(lambda: learning.embed_passages(spec, path), time.perf_counter)
    learning.build_index(spec, path, versions, digest, folder / "index")
    return Taken(time.perf_counter() - started, encoding)


def _sentences(spec: RetrieverSpec, folder: Path) -> float:
    """Seconds that keeping all sentences takes."""
    paths = folder / "library.sqlite3", folder / "sentences.sqlite3"
    started = time.perf_counter()
    while learning.keep_sentences(spec, *paths, 60.0):
        pass
    return time.perf_counter() - started


def _plain_pipeline(texts: Path) -> Taken:
    """The plain way; raises ImportError where it isn't installed."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(locate(RetrieverSpec().encoder)), device="cpu")
    model.encode(["warm"])
    started = time.perf_counter()
    passages = []
    for path in sorted(texts.iterdir()):
        words = " ".join(_plumbed(path, _native(path))).split()
        passages += [
            " ".join(words[at : at + WORDS_OF_A_PASSAGE])
            for at in range(0, len(words), WORDS_OF_A_PASSAGE)
        ]
    vectors, encoding = _timed(
        lambda: model.encode(passages, batch_size=32, normalize_embeddings=True),
        time.perf_counter,
    )
    index = hnswlib.Index(space="cosine", dim=vectors.shape[1])
    index.init_index(len(vectors), M=16, ef_construction=256)
    index.add_items(vectors, np.arange(len(vectors)))
    return Taken(time.perf_counter() - started, encoding)


def _plumbed(path: Path, numbers: Sequence[int]) -> list[str]:
    """Text and tables of those pages, by pdfplumber."""
    read = []
    with pdfplumber.open(path) as document:
        for number in numbers:
            page = document.pages[number - 1]
            rows = [row for table in page.extract_tables() for row in table]
            read.append(page.extract_text() + " ".join(str(cell) for row in rows for cell in row))
    return read


def _native(path: Path) -> list[int]:
    """The pages that have a text, from 1."""
    with pdfium.PdfDocument(path) as document:
        return [
            number + 1
            for number in range(len(document))
            if document[number].get_textpage().count_chars() > 200
        ]


def _write(path: Path, seed: int, pages: int) -> None:
    chance = np.random.default_rng(SEED + seed)
    vocabulary = ["".join(chance.choice(list("aeioulnrst"), 6)) for _ in range(800)]
    style = getSampleStyleSheet()
    parts: list[Any] = []
    for page in range(pages):
        parts.append(Paragraph(f"Part {page + 1} of report {seed}", style["Heading2"]))
        for _ in range(6):
            words = chance.choice(vocabulary, 70).tolist()
            text = ". ".join(" ".join(words[at : at + 14]).capitalize() for at in range(0, 70, 14))
            parts.append(Paragraph(f"{text}.", style["BodyText"]))
        if page % 4 == 3:
            numbers = chance.integers(1000, 9999, (6, 4)).astype(str).tolist()
            parts.append(Table([["item", "first", "second", "third"], *numbers]))
        parts.append(PageBreak())
    SimpleDocTemplate(str(path), pagesize=A4).build(parts)


def _write_picture(path: Path, seed: int) -> None:
    """The same as a picture of each page: a scan."""
    text = path.with_suffix(".text.pdf")
    _write(text, seed, SCANNED_PAGES)
    with pdfium.PdfDocument(text) as document:
        pictures = [page.render(scale=DPI / 72).to_pil().convert("L") for page in document]
    pictures = pictures[:SCANNED_PAGES]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], resolution=DPI)
    text.unlink()


def _timed(job: Callable[[], T], clock: Callable[[], float] = time.process_time) -> tuple[T, float]:
    started = clock()
    result = job()
    return result, clock() - started


if __name__ == "__main__":
    for row in figures():
        print(json.dumps(row))
