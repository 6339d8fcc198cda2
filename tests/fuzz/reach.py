"""Which inputs are worth keeping: those that reach a line from one nothing else came from."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.table import CORPUS, Target

_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / room) for room in ("crypto", "peers", "daemon"))
_LARGEST = 8192
_MOST_BYTES = 128 * 1024  # of one target

Arc = tuple[str, int, int]  # file, line before, line


def reached(take: Callable[[bytes], object], data: bytes) -> frozenset[Arc]:
    """The steps from line to line that an input leads our code through."""
    arcs: set[Arc] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return None
        last = frame.f_lineno

        def step(inner: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            arcs.add((file, last, inner.f_lineno))
            last = inner.f_lineno
            return step

        return step

    threading.settrace(trace)  # frames are taken in by threads that are still to come
    sys.settrace(trace)
    try:
        take(data)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return frozenset(arcs)


def keep(target: Target, found: Path) -> None:
    """Add to the corpus, smallest first, what was ``found`` and reaches more than it does."""
    kept = target.files()
    arcs = frozenset[Arc]().union(*(reached(target.judge, path.read_bytes()) for path in kept))
    size, before = sum(path.stat().st_size for path in kept), len(kept)
    candidates = sorted(found.glob("*"), key=lambda path: (path.stat().st_size, path.name))
    for path in candidates:
        data = path.read_bytes() if path.is_file() else b""
        if not 0 < len(data) <= _LARGEST or size + len(data) > _MOST_BYTES:
            continue
        more = reached(target.judge, data) - arcs
        if more:
            arcs |= more
            size += len(data)
            before += 1
            (CORPUS / target.name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{target.name}: {before} inputs, {size} bytes, {len(arcs)} steps between lines")
