"""Images to words: one interface, and two engines that may be there, tesseract and RapidOCR.

Both run on this machine alone. Tesseract is Debian's binary; RapidOCR a package that carries
its weights (the extra ``ocr``). Neither needs to be there.
"""

from __future__ import annotations

import csv
import io
import math
import os
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from daemon.library.readers.documents import INSTALL_OCR
from daemon.library.readers.pdf import engines
from daemon.library.readers.pdf.words import Word

_SECONDS = 100  # for an image; a dense page takes 10, and a reader has two minutes for each
_PAGE_SECONDS = 200  # after which no further image of a page is begun
_LEAST_SURE = 30  # of 100: what tesseract is less sure of is mostly dust
_LEAST_SCORE = 0.5  # of 1: RapidOCR's own measure
_DETECTED_IN = 1800  # pixels of the longer side in which RapidOCR looks for lines
_MOST_LANGUAGES = 4  # of those that are installed: each takes its time
_NOT_LANGUAGES = ("osd", "equ", "snum")
_STEEPEST, _STEP = 5.0, 0.1  # degrees by which a scan may be skewed, and to which it is measured
_SIDEWAYS = 1.5  # times as clear from the side
_LEAST_INK, _MOST_INK = 100, 60_000  # dark pixels of a small copy
_LEVEL = 0.15  # degrees: no need to turn it
_DARK, _SPECK, _AROUND = 200, 9, 17  # of 255; pixels at 300 dpi: a speck, and what is empty around
_NOISY = 0.0002  # of an image are specks, above which they are taken out


class OcrFailed(Exception):
    """An engine could not read an image; the message is the cause and the remedy.

    ``passing``: as in `FileProblem`.
    """

    def __init__(self, cause: str, *, passing: bool = False) -> None:
        super().__init__(cause)
        self.passing = passing


class Engine(Protocol):
    """Reads words in an image; ``dpi``: as fine as it needs a page."""

    dpi: int

    def read(self, image: Image.Image, *, sparse: bool) -> list[Word]:
        """Words with places in pixels; ``sparse``: labels of a figure, not lines of a page.

        Raises `OcrFailed`.
        """


class Paced:
    """An engine that says before each image that it is alive, and gives a page so much time."""

    def __init__(self, engine: Engine, alive: Callable[[], None]) -> None:
        self.dpi = engine.dpi
        self._engine = engine
        self._alive = alive
        self._until = math.inf

    def begin_page(self) -> None:
        """What is read from here on is another page's."""
        self._until = time.monotonic() + _PAGE_SECONDS

    def read(self, image: Image.Image, *, sparse: bool) -> list[Word]:
        """See `Engine`; also where the page's time is over."""
        self._alive()
        if time.monotonic() > self._until:
            raise OcrFailed(
                f"its images are not read in {_PAGE_SECONDS} s: split the page", passing=True
            )
        return self._engine.read(image, sparse=sparse)


@cache
def engine() -> Engine | None:
    """The engine that this machine had when this process first asked; None: there was none."""
    if path := engines.tesseract():
        return Tesseract(path)
    return RapidOcr() if engines.has_rapidocr() else None


class Tesseract:
    """The binary, a process for each image, on one thread and for a limited time."""

    dpi = 300

    def __init__(self, path: str) -> None:
        self._path = path
        self._languages = ""

    def read(self, image: Image.Image, *, sparse: bool) -> list[Word]:
        """See `Engine`. Languages are those that are installed."""
        # 6: one block of lines, which keeps a table's rows together; 11: words wherever they are.
        mode = "11" if sparse else "6"
        self._languages = self._languages or self._installed()
        packed = io.BytesIO()
        image.save(packed, "PNG", compress_level=1)
        options = ["-l", self._languages, "--dpi", "300", "--psm", mode]
        told = self._run(["stdin", "stdout", *options, "tsv"], packed.getvalue())
        return list(filter(None, map(_tesseract_word, _table(told))))

    def _installed(self) -> str:
        lines = self._run(["--list-langs"], b"").splitlines()[1:]
        names = [name for name in lines if name and name not in _NOT_LANGUAGES]
        if not names:
            raise OcrFailed("tesseract has no language: install tesseract-ocr-eng or another one")
        # The one that Debian always brings goes last: what was added is what is read here.
        return "+".join(sorted(names, key=lambda name: (name == "eng", name))[-_MOST_LANGUAGES:])

    def _run(self, arguments: list[str], given: bytes) -> str:
        try:
            done = subprocess.run(
                [self._path, *arguments],
                input=given,
                capture_output=True,
                timeout=_SECONDS,
                env={**os.environ, "OMP_THREAD_LIMIT": "1"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            cause = f"not read in {_SECONDS} s: split the page, or scan it again"
            raise OcrFailed(cause, passing=True) from None
        except OSError as error:
            cause = f"tesseract does not start ({error.strerror}): {INSTALL_OCR}"
            raise OcrFailed(cause, passing=True) from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
            cause = f"tesseract gave up ({lines[-1]}): see that it works by itself"
            raise OcrFailed(cause, passing=done.returncode < 0)  # somebody ended it
        return done.stdout.decode(errors="replace")


def _table(told: str) -> csv.DictReader[str]:
    return csv.DictReader(io.StringIO(told), delimiter="\t", quoting=csv.QUOTE_NONE)


def _tesseract_word(line: dict[str, str]) -> Word | None:
    text = (line["text"] or "").strip()
    if line["level"] != "5" or not text or float(line["conf"]) < _LEAST_SURE:
        return None
    left, top, width, height = (float(line[key]) for key in ("left", "top", "width", "height"))
    return Word(left, top, left + width, top + height, text, height)


class RapidOcr:
    """The package, in this process, on one thread; its weights lie beside its code."""

    dpi = 200  # finer brings nothing, and takes twice as long

    def __init__(self) -> None:
        self._reader: Any = None

    def read(self, image: Image.Image, *, sparse: bool) -> list[Word]:
        """See `Engine`; it finds words wherever they are, so ``sparse`` changes nothing."""
        del sparse
        if self._reader is None:
            self._reader = _rapidocr()
        try:
            told = self._reader(np.asarray(image.convert("RGB")), return_word_box=True)
            # Of an image without text it tells one line that is none.
            lines = told.word_results if told.txts else ()
            return [_rapid_word(*word) for line in lines for word in line if word[0].strip()]
        except Exception as error:  # of ONNX Runtime's own kinds, as where memory is short
            cause = f"rapidocr gave up ({type(error).__name__}): install tesseract-ocr beside it"
            raise OcrFailed(cause) from error


def _rapidocr() -> Any:
    """The reader with the weights that its package carries.

    It is told where they lie: left to itself it would fetch those that it misses. Lines are
    looked for in a smaller picture, and read one at a time: pages of annual reports take 0.85 GiB
    in a box, of the one that a reader has (decision 0036).
    """
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"
    found = {part: next(models.glob(f"*_{part}_*.onnx"), None) for part in ("det", "rec", "cls")}
    if None in found.values():
        raise OcrFailed("rapidocr's package lacks its weights: install the extra `ocr` again")
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.text_score": _LEAST_SCORE,
            "Global.max_side_len": 4000,
            "Det.limit_type": "max",
            "Det.limit_side_len": _DETECTED_IN,
            "Rec.rec_batch_num": 1,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            **{f"{part.title()}.model_path": str(path) for part, path in found.items()},
        }
    )


def _rapid_word(text: str, _score: float, box: Any) -> Word:
    xs, ys = [float(x) for x, _ in box], [float(y) for _, y in box]
    return Word(min(xs), min(ys), max(xs), max(ys), text.strip(), max(ys) - min(ys))


# ---- what an image needs before it is read


def cleaned(grey: Image.Image) -> Image.Image:
    """A grey image level, and without the specks of a scan."""
    angle = skew_of(grey)
    if abs(angle) > _LEVEL:
        grey = grey.rotate(angle, Image.Resampling.BICUBIC, fillcolor=255)
    return _without_specks(grey)


def _without_specks(grey: Image.Image) -> Image.Image:
    """An image without dark spots that stand alone, where it has many of them.

    A full stop, an accent or the dot of an i is small as well, but never far from a letter.
    """
    pixels = np.asarray(grey)
    dark = pixels < _DARK
    near = _sums(dark, _SPECK)
    alone = (near > 0) & (near == _sums(dark, _AROUND))  # in the middle of what is empty else
    specks = _sums(alone, _SPECK) > 0
    if (specks & dark).mean() < _NOISY:
        return grey
    clean = pixels.copy()
    clean[specks] = 255
    return Image.fromarray(clean)


def _sums(mask: np.ndarray, side: int) -> np.ndarray:
    """How many pixels are set in the square around each; its side is 2^k + 1."""
    # Numbers as small as they may be: half of the time goes into moving them.
    padded = np.pad(mask, side // 2).astype(np.uint8 if side**2 < 256 else np.uint16)
    return _sums_down(_sums_down(padded, side).T, side).T


def _sums_down(pixels: np.ndarray, side: int) -> np.ndarray:
    """Sums of as many rows as a square has: two of half as many added, again and again."""
    sums, rows = pixels, 1
    while 2 * rows < side:
        sums, rows = sums[:-rows] + sums[rows:], 2 * rows
    found: np.ndarray = sums[: len(pixels) - side + 1] + pixels[side - 1 :]
    return found


def is_sideways(grey: Image.Image) -> bool:
    """Whether lines of text run down a page: they are then told more clearly from its side."""
    aside = grey.transpose(Image.Transpose.TRANSPOSE)
    return _leveled(aside)[1] > _SIDEWAYS * _leveled(grey)[1]


def skew_of(grey: Image.Image) -> float:
    """Degrees by which lines fall to the right; 0 where there are none to be seen."""
    return _leveled(grey)[0]


def _leveled(grey: Image.Image) -> tuple[float, float]:
    """The angle at which lines and gaps differ most, and how much they do.

    The usual profile of projections (Postl 1986), on a small copy.
    """
    small = grey.copy()
    small.thumbnail((1000, 1000))
    ys, xs = np.nonzero(np.asarray(small) < 128)
    # Few points are no lines, and most of a dark picture would take long and tell nothing.
    if not _LEAST_INK < len(ys) < _MOST_INK:
        return 0.0, 0.0

    def sharpness(angle: float) -> float:
        rows = np.round(ys - xs * math.tan(math.radians(angle))).astype(np.int64)
        profile = np.bincount(rows - rows.min()).astype(np.float64)
        return float(np.square(np.diff(profile)).sum())

    coarse = max(np.arange(-_STEEPEST, _STEEPEST + 0.01, 0.5), key=sharpness)
    fine = max(np.arange(coarse - 0.5, coarse + 0.51, _STEP), key=sharpness)
    return float(fine), sharpness(fine)
