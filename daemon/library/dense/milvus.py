"""Nearest neighbours in a Milvus server (pymilvus's only home).

The base's file names a collection; the vectors that are searched lie in the server, and beside
the index for exact cosines. The name follows from the passages, so a build that is done again
finds or clears what was there. A collection is filled under a name that no file has and renamed
when it is whole: a crash leaves a leftover that the next build drops. It never changes
afterwards. What no index names is dropped (`Milvus.forget`).

A server that does not answer is no damage: what it would have found is found by comparing with
all (`MilvusCollection.nearest`), which takes longer, until it answers again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from crypto.arrays import Float32, Int64
from daemon.library.dense.options import EngineUnavailable, IndexOptions

if TYPE_CHECKING:
    from pymilvus import MilvusClient

log = structlog.get_logger()

_M = 16
_EF_CONSTRUCTION = 256
_SLICE = 1024  # passages in one message: 1.6 MB at 384 numbers
_MAX_FILE = 1024  # bytes of a file that names a collection, or of a token
_CONNECT_S, _SEARCH_S = 5.0, 2.0
_PAUSE_S = 30.0  # without an answer, until a question waits for the server again
_CAUSE = 200  # characters
_LEAST_DIMENSION = 2  # of a vector, there


class Milvus:
    """The engine `milvus`."""

    file = "index.milvus"

    def __init__(self, options: IndexOptions) -> None:
        self._server = _Server(options)
        # Others' collections, whose names begin otherwise, are neither opened nor dropped.
        owner = hashlib.sha256(options.owner.encode()).hexdigest()[:16]
        self._begins = f"hanse_{owner}_"

    def build(
        self, labels: Int64, vectors: Float32, *, threads: int, told: Callable[[int, int], None]
    ) -> MilvusCollection:
        """Put unit vectors [n, d] into a collection of their own, whole or not at all.

        Raises EngineUnavailable.
        """
        del threads  # the server's business
        count, dimension = vectors.shape
        digest = hashlib.sha256(labels.astype("<i8").tobytes() + vectors.astype("<f4").tobytes())
        name = f"{self._begins}{digest.hexdigest()[:32]}"
        part = f"{name}_part"
        with self._server.asked() as client:
            if client.has_collection(name) and _rows(client, name) == count:
                told(count, count)
                return MilvusCollection(self._server, name, count)
            for leftover in (name, part):
                client.drop_collection(leftover)
            _create(client, part, max(_LEAST_DIMENSION, dimension))
            for start in range(0, count, _SLICE):
                end = min(start + _SLICE, count)
                rows = zip(labels[start:end].tolist(), _padded(vectors[start:end]), strict=True)
                client.insert(part, [{"label": label, "vector": row} for label, row in rows])
                told(end, count)
            client.flush(part)
            if (there := _rows(client, part)) != count:
                raise EngineUnavailable(
                    f"Milvus took {there} of {count} passages: look into its log"
                )
            client.rename_collection(part, name)
        return MilvusCollection(self._server, name, count)

    def load(self, path: Path, count: int, dimension: int) -> MilvusCollection:
        """Open the collection that a file names; ValueError where it is not the one saved.

        Where the server does not answer it is opened unseen.
        """
        name, held = _named(path)
        if not name.startswith(self._begins):
            raise ValueError(f"the collection {name} is another site's")
        if held != count:
            raise ValueError(f"it holds {held} passages and not {count}")
        try:
            with self._server.asked() as client:
                if not client.has_collection(name):
                    raise ValueError(f"Milvus has no collection {name}")
                if (rows := _rows(client, name)) != count:
                    raise ValueError(f"the collection {name} holds {rows} passages and not {count}")
                if (found := _dimension(client, name)) != max(_LEAST_DIMENSION, dimension):
                    raise ValueError(f"the collection {name} has vectors of {found} numbers")
        except EngineUnavailable as error:
            log.warning("an index is opened without its server", cause=str(error))
        return MilvusCollection(self._server, name, count)

    def forget(self, named: Iterable[Path]) -> None:
        """Drop this site's collections that none of these files names. Raises EngineUnavailable."""
        kept = set()
        for path in named:
            with suppress(ValueError):  # what is damaged names nothing
                kept.add(_named(path)[0])
        with self._server.asked() as client:
            for name in client.list_collections():
                if name.startswith(self._begins) and name not in kept:
                    client.drop_collection(name)


class MilvusCollection:
    """A collection that never changes."""

    def __init__(self, server: _Server, name: str, count: int) -> None:
        self._server, self._name, self._count = server, name, count
        self._hidden = frozenset[int]()
        self._not_before = 0.0

    def nearest(self, queries: Float32, k: int, breadth: int) -> tuple[Int64, Float32] | None:
        """Labels [q, k] and cosines [q, k], best first; None where fewer than ``k`` come.

        None, too, while the server does not answer: who asks compares with all.
        """
        if time.monotonic() < self._not_before:
            return None
        try:
            with self._server.asked() as client:
                client.load_collection(self._name)  # nothing where it is loaded
                found = client.search(
                    self._name,
                    list(_padded(queries)),
                    limit=k,
                    filter=f"label not in {sorted(self._hidden)}" if self._hidden else "",
                    search_params={"metric_type": "COSINE", "params": {"ef": max(breadth, k)}},
                    consistency_level="Strong",
                    timeout=_SEARCH_S,
                )
        except EngineUnavailable as error:
            log.warning("questions are compared with all passages", cause=str(error))
            self._not_before = time.monotonic() + _PAUSE_S
            return None
        if any(len(hits) < k for hits in found):
            return None
        labels = np.array([[hit["label"] for hit in hits] for hits in found], np.int64)
        cosines = np.array([[hit["distance"] for hit in hits] for hits in found], np.float32)
        return labels.reshape(-1, k), cosines.reshape(-1, k)

    def hide(self, labels: Int64) -> None:
        """Never find these again; the collection stays as it is."""
        self._hidden |= set(labels.tolist())

    def save(self, path: Path) -> None:
        """Write which collection it is."""
        path.write_text(json.dumps({"collection": self._name, "count": self._count}))


class _Server:
    """A connection that is made when it is needed, and anew after a failure."""

    def __init__(self, options: IndexOptions) -> None:
        self._options = options
        self._client: MilvusClient | None = None

    @contextmanager
    def asked(self) -> Iterator[MilvusClient]:
        """Whatever goes wrong with it is EngineUnavailable."""
        try:
            from pymilvus import MilvusClient, MilvusException
        except ImportError as error:
            raise EngineUnavailable(
                f"the client of Milvus can't be imported ({error}): pip install 'hanse[milvus]'"
            ) from error
        uri = self._options.uri
        try:
            if self._client is None:
                self._client = MilvusClient(uri, timeout=_CONNECT_S, **_secrets(self._options))
            yield self._client
        except (MilvusException, OSError) as error:
            self._client = None
            cause = " ".join(str(getattr(error, "message", error)).split())[:_CAUSE]
            raise EngineUnavailable(
                f"Milvus at {uri} does not do what it is asked ({cause}): see that it runs, and "
                "that [index] has its address, token and certificates"
            ) from error


def _secrets(options: IndexOptions) -> dict[str, Any]:
    """What pymilvus calls them. Raises OSError for a file that can't be read."""
    found: dict[str, Any] = {"secure": options.uri.startswith("https:")}
    if options.token_file:
        with Path(options.token_file).open(encoding="utf-8") as file:
            found["token"] = file.read(_MAX_FILE).strip()
    if options.cert_file:
        found |= {
            "ca_pem_path": options.ca_file,
            "client_pem_path": options.cert_file,
            "client_key_path": options.key_file,
        }
    elif options.ca_file:
        found["server_pem_path"] = options.ca_file
    return found


def _named(path: Path) -> tuple[str, int]:
    """The collection that a file names, and how many passages; ValueError where none."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_MAX_FILE))
        return str(said["collection"]), int(said["count"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no file of a Milvus collection: {error}") from error


def _create(client: MilvusClient, name: str, dimension: int) -> None:
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("label", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
    index = MilvusClient.prepare_index_params()
    settings = {"M": _M, "efConstruction": _EF_CONSTRUCTION}
    index.add_index("vector", index_type="HNSW", metric_type="COSINE", params=settings)
    client.create_collection(name, schema=schema, index_params=index)


def _padded(vectors: Float32) -> Float32:
    """[n, d] as they are, or with a nought behind the only number: no cosine changes."""
    missing = max(0, _LEAST_DIMENSION - vectors.shape[1])
    return np.pad(np.asarray(vectors, "<f4"), ((0, 0), (0, missing)))


def _rows(client: MilvusClient, name: str) -> int:
    return int(client.get_collection_stats(name)["row_count"])


def _dimension(client: MilvusClient, name: str) -> int:
    fields = client.describe_collection(name)["fields"]
    return int(next(one["params"]["dim"] for one in fields if one["name"] == "vector"))
