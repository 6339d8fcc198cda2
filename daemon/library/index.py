"""The dense index: nearest passages by cosine, in a graph on disk (hnswlib's only home).

An index is a folder of three files: ``index.hnsw``, the same vectors as an array
(``vectors.npy``), and ``index.json``, which says what these two must be. hnswlib's loader
trusts its input (with a wrong dimension it reads beyond its memory), so nothing is handed
to it before one SHA-256 over files and description matches. A folder appears complete or
not at all: files are written beside it, synced, then renamed.

The array is there for exact cosines of chosen passages: the graph gives a vector back in
some 20 microseconds, the array, of which only what is read comes into memory, in one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Int64
from crypto.durable import clear, fsync

if TYPE_CHECKING:
    import hnswlib


_M = 16  # links of a passage in each layer of the graph
_EF_CONSTRUCTION = 256  # candidates looked at while linking a passage
_EF_SEARCH = 128  # candidates looked at while searching, at least: more find more, slower
_SEED = 20
_GRAPH, _VECTORS, _DESCRIPTION = "index.hnsw", "vectors.npy", "index.json"
_MAX_DESCRIPTION = 4096  # bytes


class IndexDamaged(Exception):
    """An index is missing, incomplete, altered or of another version: build it again."""


@dataclass(frozen=True)
class IndexDescription:
    """What ``index.json`` says; digests in hexadecimal."""

    model_digest: str  # of the model version that embedded the passages
    content_digest: str  # of the library's passages
    count: int  # passages
    dimension: int  # of a vector
    sha256: str = ""  # of the fields above and both files; see `_seal`


class DenseIndex:
    """Labels (passage rowids) and their unit vectors, searchable by cosine."""

    def __init__(self, graph: hnswlib.Index, labels: Int64, vectors: Float32) -> None:
        """``labels`` [n] ascending, and their unit ``vectors`` [n, d], which the graph has too."""
        self._graph = graph
        self._labels = labels
        self._vectors = vectors
        self.count, self.dimension = vectors.shape

    def search(self, queries: Float32, k: int) -> tuple[Int64, Float32]:
        """The nearest passages of each query: labels [q, n] and cosines [q, n], best first.

        ``queries`` is float32 [q, d]. n is ``k`` or, in a smaller index, all
        there are.
        """
        if queries.ndim != 2 or (self.count and queries.shape[1] != self.dimension):
            raise ValueError(f"expected queries [q, {self.dimension}], got {queries.shape}")
        n = min(k, self.count)
        while n > 0:
            # hnswlib refuses ef < k; and it raises when its graph reaches fewer
            # than n passages, as it may with many equal vectors: ask for fewer.
            self._graph.set_ef(max(_EF_SEARCH, n))
            try:
                labels, distances = self._graph.knn_query(queries, k=n, num_threads=1)
            except RuntimeError:
                n //= 2
                continue
            return labels.astype(np.int64), (1.0 - distances).astype(np.float32)
        return np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32)

    def labels(self) -> Int64:
        """The labels of all passages [count], ascending."""
        return self._labels

    def holds(self, labels: Sequence[int]) -> list[bool]:
        """Which of these labels are in the index."""
        if not self.count:
            return [False] * len(labels)
        places = np.searchsorted(self._labels, labels)
        present: list[bool] = (self._labels.take(places, mode="clip") == labels).tolist()
        return present

    def vectors(self, labels: Int64) -> Float32:
        """The unit vectors [n, d] of those labels, which must be in the index."""
        return np.asarray(self._vectors[np.searchsorted(self._labels, labels)])

    def save(self, root: Path, model_digest: bytes, content_digest: bytes) -> Path:
        """Write the index under ``root`` atomically; the folder it is in.

        A sound index of the same name is left as it is, a damaged one replaced.
        """
        final = index_path(root, model_digest, content_digest)
        try:
            load_index(final, model_digest, content_digest)
        except IndexDamaged:
            clear(final)
        else:
            return final
        root.mkdir(parents=True, exist_ok=True)
        # One process writes below root: a leftover is of a crash.
        temporary = root / f".{final.name}"
        clear(temporary)
        temporary.mkdir()
        graph = temporary / _GRAPH
        self._graph.save_index(str(graph))
        np.save(temporary / _VECTORS, self._vectors, allow_pickle=False)
        description = IndexDescription(
            model_digest.hex(), content_digest.hex(), self.count, self.dimension
        )
        description = replace(description, sha256=_seal(description, temporary))
        (temporary / _DESCRIPTION).write_text(json.dumps(asdict(description), indent=1) + "\n")
        for path in (graph, temporary / _VECTORS, temporary / _DESCRIPTION, temporary):
            fsync(path)
        temporary.rename(final)
        fsync(root)
        return final


def build_index(labels: Int64, vectors: Float32, *, threads: int = 1) -> DenseIndex:
    """Index unit vectors [n, d] under ``labels`` [n] (passage rowids, unique).

    With one thread the graph is the same each time. No vectors make an index
    that finds nothing.
    """
    if vectors.ndim != 2 or labels.shape != (len(vectors),):
        raise ValueError(f"expected labels [n] and vectors [n, d], got {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors to index must be finite; these have NaN or infinity")
    count, dimension = len(vectors), max(1, vectors.shape[1])
    graph = _new_graph(dimension)
    graph.init_index(
        max_elements=max(1, count), M=_M, ef_construction=_EF_CONSTRUCTION, random_seed=_SEED
    )
    if count:
        graph.add_items(vectors, labels, num_threads=threads)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(labels)
    unit = (vectors / np.where(lengths > 0.0, lengths, 1.0))[order].astype("<f4")
    return DenseIndex(graph, labels[order], unit.reshape(count, dimension))


def index_path(root: Path, model_digest: bytes, content_digest: bytes) -> Path:
    """Where the index of that model version and those passages lies."""
    return root / f"{model_digest.hex()}-{content_digest.hex()[:16]}"


def load_index(path: Path, model_digest: bytes, content_digest: bytes | None = None) -> DenseIndex:
    """Open the index in the folder ``path``; raises IndexDamaged unless all of it fits.

    Without ``content_digest`` the passages it was built of are not compared.
    """
    described = _read_description(path)
    if described.model_digest != model_digest.hex():
        raise IndexDamaged(f"index {path} is of another model version: build it again")
    if content_digest is not None and described.content_digest != content_digest.hex():
        raise IndexDamaged(f"index {path} is of other passages: build it again")
    try:
        seal = _seal(described, path)
    except OSError as error:
        raise IndexDamaged(f"index {path} can't be read ({error}): build it again") from error
    if seal != described.sha256:
        raise IndexDamaged(f"index {path} is damaged (its SHA-256 differs): build it again")
    graph = _new_graph(described.dimension)
    try:
        graph.load_index(str(path / _GRAPH), max_elements=max(1, described.count))
    except RuntimeError as error:
        raise IndexDamaged(f"index {path} can't be loaded ({error}): build it again") from error
    if graph.get_current_count() != described.count:
        raise IndexDamaged(f"index {path} holds another number of passages: build it again")
    labels = np.sort(np.array(graph.get_ids_list(), dtype=np.int64))
    # Sealed, so it is what was saved. It may be removed while it is read: it stays mapped.
    vectors = np.load(path / _VECTORS, mmap_mode="r", allow_pickle=False)
    return DenseIndex(graph, labels, vectors)


def remove_other_indexes(root: Path, keep: Collection[Path]) -> None:
    """Delete the indexes under ``root`` except those at ``keep``."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.is_dir() and path not in keep:
            clear(path)


def _new_graph(dimension: int) -> hnswlib.Index:
    # Here, not at the top: the daemon's main process names IndexDamaged and the
    # paths, and must not load native code that reads files.
    import hnswlib

    return hnswlib.Index(space="cosine", dim=dimension)


def _read_description(path: Path) -> IndexDescription:
    try:
        with (path / _DESCRIPTION).open("rb") as file:
            fields = json.loads(file.read(_MAX_DESCRIPTION))
        described = IndexDescription(**fields)
    except OSError as error:
        raise IndexDamaged(f"no index at {path} ({error.strerror}): build it") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise IndexDamaged(f"index {path} has a damaged description: build it again") from error
    texts = (described.model_digest, described.content_digest, described.sha256)
    numbers = (described.count, described.dimension)
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise IndexDamaged(f"index {path} has a damaged description: build it again")
    return described


def _seal(described: IndexDescription, folder: Path) -> str:
    """SHA-256 over what the description says and those of both files."""
    fields = [described.model_digest, described.content_digest]
    numbers = [described.count, described.dimension]
    files = []
    for name in (_GRAPH, _VECTORS):
        with (folder / name).open("rb") as file:
            files.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(json.dumps([*fields, *numbers, *files]).encode()).hexdigest()
