"""Which OCR engine this machine has, told without loading one."""

from __future__ import annotations

import importlib.util
import shutil


def installed() -> bool:
    """Whether there is one now."""
    return tesseract() is not None or has_rapidocr()


def tesseract() -> str | None:
    """The path of Debian's program; None: it is not installed."""
    return shutil.which("tesseract")


def has_rapidocr() -> bool:
    """Whether the packages of the extra ``ocr`` are."""
    return all(map(importlib.util.find_spec, ("rapidocr", "onnxruntime")))
