"""Reading files in this very process: quick, and without the box that a site reads them in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from daemon.library.files import found, read_file
from daemon.library.readers.documents import Attached, FileProblem, Item


def read(path: Path) -> Iterator[Item]:
    """All documents, pairs and problems at ``path``; nothing of what is attached."""
    for one in found(path):
        for item in [one] if isinstance(one, FileProblem) else read_file(one):
            if not isinstance(item, Attached):
                yield item
