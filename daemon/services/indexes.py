"""Where a site's indexes lie: by the version that embedded, and by what the library holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.personal.store import embedded_by

MISSES = (
    "the index misses nearest passages, so questions look at more of them (breadth; 0: at all) and "
    "take longer: if that is too long, look for passages that are there many times over, or train "
    "on: vectors that an untrained model scatters are hard to search"
)
"""Said of an index that finds too little."""


@dataclass(frozen=True)
class StandIn:
    """A version that has an index here, and answers until the one that is wanted has its own."""

    spec: RetrieverSpec
    model_digest: bytes


def index_at(root: Path, library_path: Path, spec: RetrieverSpec, model_digest: bytes) -> Path:
    """Where the index of a version lies, or is to lie, of all that the library holds now."""
    from daemon.library.dense.folder import index_path

    embedded = embedded_by(spec.personal, spec.personal_folder, model_digest)
    with Library.open(library_path, read_only=True) as library:
        return index_path(root, embedded, library.content_digest())


def indexes_of(root: Path, one: StandIn) -> list[Path]:
    """Those that there are of its version, of whichever passages; the newest first."""
    from daemon.library.dense.folder import indexes_of

    embedded = embedded_by(one.spec.personal, one.spec.personal_folder, one.model_digest)
    return indexes_of(root, embedded)


def remove_others(root: Path, keep: Path) -> None:
    """Remove all indexes but one."""
    from daemon.library.dense.folder import remove_other_indexes

    remove_other_indexes(root, {keep})


def warnings_of(left_out: str, unwritten: str = "", cut_short: str = "") -> list[str]:
    """What to tell people: why a cross-encoder is left out, or answers are not, or half, written.

    Empty: that is not so.
    """
    causes = {
        "questions are ranked without the cross-encoder": left_out,
        "answers are extracted, not written": unwritten,
        "answers end before their end": cut_short,
    }
    # A path in one is not ours, and need not be UTF-8.
    return [
        f"{what}: {cause.encode(errors='replace').decode()}"
        for what, cause in causes.items()
        if cause
    ]
