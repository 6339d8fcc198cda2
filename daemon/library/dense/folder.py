"""An index on the disk: a folder of five files and what they must be; whole, or not at all.

===================  =====================================================================
index.hnsw           the base as its engine wrote it (the name is the engine's)
vectors.npy          the base's vectors [n, d], by label
passages.npy         their labels and contents [n]
delta.npy            label, content and vector of each passage beside the base
tombstones.npy       labels of the base that are gone
index.json           `IndexDescription`: the SHA-256 of each of these, and one over all
===================  =====================================================================

A folder never changes. A change of the library makes another one, which shares the base with
the one before as hard links: removing either leaves the other whole, so nobody counts who
still needs a base, and a crash can't leave a reference to nothing. A folder is written beside
its place, synced, and renamed.

No loader reads a file before the digests match: hnswlib trusts its input. Whatever is damaged,
base, delta or tombstones, the whole is built again, for a passage that is missing unnoticed
would be a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Int64
from crypto.durable import clear, fsync
from daemon.library.dense.engines import ENGINES, Accuracy, Neighbours, Unsearched, engine_of
from daemon.library.dense.index import CONTENT_BYTES, Base, Embedded, Stored, UpdatableIndex
from daemon.library.dense.options import EMBEDDED, IndexOptions
from daemon.process.faultpoints import passing

_VECTORS, _PASSAGES = "vectors.npy", "passages.npy"
_DELTA, _TOMBSTONES, _DESCRIPTION = "delta.npy", "tombstones.npy", "index.json"
_MAX_DESCRIPTION = 4096  # bytes
_PASSAGE = [("label", "<i8"), ("content", "u1", (CONTENT_BYTES,))]


class IndexDamaged(Exception):
    """An index is missing, incomplete, altered or of another version: build it again."""


@dataclass(frozen=True)
class IndexDescription:
    """What ``index.json`` says; digests in hexadecimal.

    ``removal`` as in `Erasure.last_removal`, when the base was built; ``breadth``, ``recall``
    and ``usual_recall`` as in `Accuracy`.
    """

    model_digest: str  # of the model version that embedded the passages
    content_digest: str  # of the library's passages
    count: int  # passages
    dimension: int  # of a vector
    engine: str
    removal: str
    breadth: int
    recall: float
    usual_recall: float
    files: dict[str, str]  # name and SHA-256
    sha256: str = ""  # of all the fields above

    @property
    def seal(self) -> str:
        """What ``sha256`` must be."""
        fields = json.dumps(asdict(replace(self, sha256="")), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()


def index_path(root: Path, model_digest: bytes, content_digest: bytes) -> Path:
    """Where the index of that model version and those passages lies."""
    return root / f"{model_digest.hex()}-{content_digest.hex()[:16]}"


# ---- writing ----------------------------------------------------------------


def save_index(
    index: UpdatableIndex,
    root: Path,
    model_digest: bytes,
    content_digest: bytes,
    options: IndexOptions = EMBEDDED,
) -> Path:
    """Write the index under ``root`` atomically; the folder it is in.

    A sound index of the same name and engine is left as it is, another one replaced. A base
    that lies on the disk already is linked to, not written.
    """
    final = index_path(root, model_digest, content_digest)
    with suppress(IndexDamaged):
        there = load_index(final, model_digest, content_digest, options=options)
        if there.base.engine == index.base.engine:
            return final
    root.mkdir(parents=True, exist_ok=True)
    # One process writes below root: a leftover is of a crash.
    temporary = root / f".{final.name}"
    clear(temporary)
    temporary.mkdir()
    passing("index:write")
    files = {**_put_base(index.base, temporary), **_put_changes(index, temporary)}
    accuracy = index.base.accuracy
    described = IndexDescription(
        model_digest=model_digest.hex(),
        content_digest=content_digest.hex(),
        count=index.count,
        dimension=index.dimension,
        engine=index.base.engine,
        removal=index.base.removal,
        files=files,
        **asdict(accuracy),
    )
    described = replace(described, sha256=described.seal)
    (temporary / _DESCRIPTION).write_text(json.dumps(asdict(described), indent=1) + "\n")
    for name in (*files, _DESCRIPTION, "."):
        fsync(temporary / name)
    passing("index:rename")
    clear(final)  # a damaged one; not before, for the base may be linked from there
    temporary.rename(final)
    passing("index:renamed")
    fsync(root)
    return final


def _put_base(base: Base, folder: Path) -> dict[str, str]:
    """The base's files and their digests; as they were when they were read, if they were."""
    if base.stored is not None:
        for name in base.stored.files:
            os.link(base.stored.folder / name, folder / name)
        return dict(base.stored.files)
    graph = ENGINES[base.engine].file
    base.neighbours.save(folder / graph)
    np.save(folder / _VECTORS, base.embedded.vectors, allow_pickle=False)
    np.save(folder / _PASSAGES, _table(base.embedded), allow_pickle=False)
    return {name: _digest(folder / name) for name in (graph, _VECTORS, _PASSAGES)}


def _put_changes(index: UpdatableIndex, folder: Path) -> dict[str, str]:
    delta = _table(index.delta, ("vector", "<f4", (index.dimension,)))
    delta["vector"] = index.delta.vectors
    np.save(folder / _DELTA, delta, allow_pickle=False)
    np.save(folder / _TOMBSTONES, index.gone, allow_pickle=False)
    return {name: _digest(folder / name) for name in (_DELTA, _TOMBSTONES)}


def _table(embedded: Embedded, *more: tuple[str, str, tuple[int]]) -> NDArray[np.void]:
    table = np.zeros(len(embedded), dtype=[*_PASSAGE, *more])
    table["label"], table["content"] = embedded.labels, embedded.contents
    return table


def remove_other_indexes(root: Path, keep: Collection[Path]) -> None:
    """Delete the indexes under ``root`` except those at ``keep``."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.is_dir() and path not in keep:
            clear(path)


def forget_elsewhere(root: Path, options: IndexOptions) -> None:
    """Leave nothing at a server that no index under ``root`` names. Raises EngineUnavailable.

    Also where another engine has taken its place, for as long as its address is known.
    """
    if options.uri:
        for name, engine in ENGINES.items():
            files = [*root.glob(f"*/{engine.file}")]
            engine(replace(options, engine=name)).forget(files)


# ---- reading ----------------------------------------------------------------


def load_index(
    path: Path,
    model_digest: bytes,
    content_digest: bytes | None = None,
    *,
    options: IndexOptions = EMBEDDED,
) -> UpdatableIndex:
    """Open the index in the folder ``path``; raises IndexDamaged unless all of it fits.

    Without ``content_digest`` the passages it was built of are not compared. One that another
    engine has built than ``options`` say is opened, and compares with all.
    """
    described = _read_description(path)
    if described.model_digest != model_digest.hex():
        raise IndexDamaged(f"index {path} is of another model version: build it again")
    if content_digest is not None and described.content_digest != content_digest.hex():
        raise IndexDamaged(f"index {path} is of other passages: build it again")
    _compare_digests(path, described)
    # Sealed, so it is what was saved. It may be removed while it is read: it stays mapped.
    vectors = np.load(path / _VECTORS, mmap_mode="r", allow_pickle=False)
    passages = np.load(path / _PASSAGES, allow_pickle=False)
    delta = np.load(path / _DELTA, allow_pickle=False)
    gone: Int64 = np.load(path / _TOMBSTONES, allow_pickle=False)
    try:
        neighbours = _neighbours(path, described, len(passages), options)
    except ValueError as error:
        raise IndexDamaged(f"index {path} can't be loaded ({error}): build it again") from error
    base = Base(
        described.engine,
        neighbours,
        Embedded(passages["label"], passages["content"], vectors),
        Accuracy(described.breadth, described.recall, described.usual_recall),
        described.removal,
        Stored(path, {name: described.files[name] for name in _base_files(described.engine)}),
    )
    beside = Embedded(
        np.ascontiguousarray(delta["label"]),
        np.ascontiguousarray(delta["content"]),
        np.ascontiguousarray(delta["vector"]),
    )
    index = UpdatableIndex(base, beside, gone)
    if index.count != described.count:
        raise IndexDamaged(f"index {path} holds another number of passages: build it again")
    return index


def _neighbours(
    path: Path, described: IndexDescription, count: int, options: IndexOptions
) -> Neighbours:
    if described.engine != options.engine:
        return Unsearched()
    engine = engine_of(options)
    return engine.load(path / engine.file, count, described.dimension)


def newest_index(
    root: Path, model_digest: bytes, options: IndexOptions = EMBEDDED
) -> UpdatableIndex | None:
    """The newest sound index of that model version, of whichever passages; None: there is none."""
    for path in indexes_of(root, model_digest):
        try:
            return load_index(path, model_digest, options=options)
        except IndexDamaged:
            continue  # it is no worse than none: all is built
    return None


def indexes_of(root: Path, model_digest: bytes) -> list[Path]:
    """The folders of that model version's indexes, the newest first."""
    found = [*root.glob(f"{model_digest.hex()}-*/{_DESCRIPTION}")]
    return [one.parent for one in sorted(found, key=_written, reverse=True)]


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _base_files(engine: str) -> tuple[str, ...]:
    return (ENGINES[engine].file, _VECTORS, _PASSAGES)


def _compare_digests(path: Path, described: IndexDescription) -> None:
    damaged = ["index.json"] if described.seal != described.sha256 else []
    for name, digest in described.files.items():
        try:
            if _digest(path / name) != digest:
                damaged.append(name)
        except OSError as error:
            raise IndexDamaged(f"index {path} can't be read ({error}): build it again") from error
    if damaged:
        raise IndexDamaged(
            f"index {path} is damaged (the SHA-256 differs of {', '.join(damaged)}): build it again"
        )


def _read_description(path: Path) -> IndexDescription:
    try:
        with (path / _DESCRIPTION).open("rb") as file:
            fields = json.loads(file.read(_MAX_DESCRIPTION))
        described = IndexDescription(**fields)
    except OSError as error:
        raise IndexDamaged(f"no index at {path} ({error.strerror}): build it") from error
    except (ValueError, TypeError, RecursionError) as error:
        # Or that of another fedd, whose description has other fields.
        raise IndexDamaged(f"index {path} has a damaged description: build it again") from error
    if not all(_possible(described)):
        raise IndexDamaged(f"index {path} has a damaged description: build it again")
    return described


def _possible(described: IndexDescription) -> Iterator[bool]:
    """Whether each field is of its kind; the seal says that they are what was written."""
    texts = (described.model_digest, described.content_digest, described.sha256, described.removal)
    yield all(isinstance(text, str) for text in texts)
    for number in (described.count, described.dimension, described.breadth):
        yield type(number) is int and number >= 0
    for share in (described.recall, described.usual_recall):
        yield isinstance(share, float) and 0.0 <= share <= 1.0
    yield isinstance(described.engine, str) and described.engine in ENGINES
    if described.engine in ENGINES:
        names = {*_base_files(described.engine), _DELTA, _TOMBSTONES}
        yield isinstance(described.files, dict) and described.files.keys() == names


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
