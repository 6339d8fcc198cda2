"""Jobs of the learning worker: originals into the library's folder, and out of it.

That worker alone writes the library, so nothing else names or removes their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from daemon.library.catalogue.originals import Originals, Staged, folder_of
from daemon.library.schema import explained, open_database, transaction
from daemon.process.faultpoints import passing


def keep(library: Path, staged: Sequence[Staged]) -> int:
    """Make them their documents' originals, all or none, and collect what these had; of how many.

    Raises LibraryError.
    """
    with closing(open_database(library, read_only=False)) as db, explained(library):
        originals, kept = Originals(db, library), 0
        if staged:
            with transaction(db):
                kept = originals.keep(staged)
            passing("originals:kept")
        originals.collect()
    return kept


def collect(library: Path) -> int:
    """Remove the bytes that no document refers to; how many files. Raises LibraryError."""
    if not folder_of(library).is_dir():
        return 0
    with closing(open_database(library, read_only=False)) as db, explained(library):
        return Originals(db, library).collect()
