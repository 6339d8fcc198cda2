"""Model versions: the shared parameters as one flat vector, named by digest.

A **shape manifest** says how the vector falls into named parameter groups; two
sites may add their updates only if their manifests have the same digest. A
**model version** is such a vector on disk: a safetensors file whose name is the
SHA-256 of the shape digest and the raw little-endian float32 values, so that
every site that computed the same bits has the same name for them.

Some rules of aggregation carry **moments** from round to round. They lie in the
version's file and its name covers them: a site that catches up has them with the
version, and sites that disagree about them do not agree on the version.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from crypto.arrays import Float32
from crypto.durable import UNFINISHED, fsync
from daemon.process.faultpoints import passing

_MAX_GROUPS = 4096
_TENSOR = "shared"
_MOMENTS = "moments"
_SHAPE = "shape_digest"
_MOST_MOMENTS = 2  # vectors as long as the shared one
_HEADER_BYTES = 64 * 1024  # more than safetensors writes around one tensor


class VersionError(Exception):
    """A model version could not be read or is not what its name says."""


@dataclass(frozen=True)
class ShapeManifest:
    """Names and shapes of the shared parameter groups, in vector order.

    ``family`` names what the vector means (encoder digest and adaptation): two
    vectors of equal shapes from different encoders must not be added.
    """

    family: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= _MAX_GROUPS:
            raise VersionError(f"a shape manifest has 1 to {_MAX_GROUPS} groups")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each group."""
        return tuple(int(np.prod(shape, dtype=np.int64)) for _, shape in self.groups)

    @property
    def total(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) that two sites compare before they add updates."""
        text = json.dumps(
            {"family": self.family, "groups": [[n, list(s)] for n, s in self.groups]},
            sort_keys=True,
            separators=(",", ":"),
        )
        return hashlib.sha256(b"hanse-shape-v1\0" + text.encode()).digest()

    def split(self, vector: Float32) -> dict[str, Float32]:
        """The flat vector as named arrays (views, not copies)."""
        if vector.shape != (self.total,):
            raise VersionError(f"expected {self.total} values, got shape {vector.shape}")
        parts: dict[str, Float32] = {}
        start = 0
        for (name, shape), size in zip(self.groups, self.sizes, strict=True):
            parts[name] = vector[start : start + size].reshape(shape)
            start += size
        return parts


class Shapes(Protocol):
    """What a site has to know of a model to add its updates and to keep its versions."""

    @property
    def digest(self) -> bytes:
        """As `ShapeManifest.digest`."""

    @property
    def total(self) -> int:
        """As `ShapeManifest.total`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """As `ShapeManifest.sizes`."""


@dataclass(frozen=True)
class UnreadShapes:
    """Of a model that this site doesn't have, as the manifest names it: it trains none of it."""

    digest: bytes
    total: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """One group: how the vector falls into groups is not known here."""
        return (self.total,)


def version_digest(shape_digest: bytes, vector: Float32, moments: Float32 | None = None) -> bytes:
    """The name of a model version: SHA-256 over shape digest and raw values."""
    raw = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    if moments is None:
        return hashlib.sha256(b"hanse-version-v1\0" + shape_digest + raw).digest()
    # The vectors are of one length, so what is hashed can be cut in one way only.
    more = len(moments).to_bytes(4, "little"), np.ascontiguousarray(moments, "<f4").tobytes()
    outer = hashlib.sha256(b"hanse-version-v2\0" + shape_digest + more[0] + raw)
    outer.update(more[1])
    return outer.digest()


def write_version(
    folder: Path, shape_digest: bytes, vector: Float32, moments: Float32 | None = None
) -> tuple[bytes, Path]:
    """Store a version under its digest: temp, fsync, rename, fsync of the folder.

    A name without a dot in front is therefore a whole version, whatever the moment
    of a crash (rename(2) is atomic; POSIX promises the order only with both
    fsyncs). A sound version that is there already is left as it is, a damaged one
    is replaced. ``moments`` [1 or 2, D]: what the rule of aggregation carries on.
    Returns digest and path. Raises VersionError when the values are not finite,
    OSError when the disk can't take it; nothing stays behind then.
    """
    if not (np.isfinite(vector).all() and (moments is None or np.isfinite(moments).all())):
        raise VersionError("a model version must be finite; this one has NaN or infinity")
    if moments is not None and moments.shape not in _moment_shapes(vector.size):
        raise VersionError(f"moments of shape {moments.shape} beside {vector.size} values")
    digest = version_digest(shape_digest, vector, moments)
    path = version_path(folder, digest)
    if is_sound(folder, digest, shape_digest):
        return digest, path
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{UNFINISHED}{digest.hex()}.{secrets.token_hex(4)}"
    try:
        passing("version:write")
        _save(temporary, shape_digest, vector, moments)
        fsync(temporary)
        passing("version:rename")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    passing("version:renamed")
    fsync(folder)
    passing("version:synced")
    return digest, path


def _save(path: Path, shape_digest: bytes, vector: Float32, moments: Float32 | None) -> None:
    tensors = {_TENSOR: np.ascontiguousarray(vector, dtype="<f4")}
    if moments is not None:
        tensors[_MOMENTS] = np.ascontiguousarray(moments, dtype="<f4")
    try:
        save_file(tensors, path, metadata={_SHAPE: shape_digest.hex()})
    except SafetensorError as error:  # a full disk, too, is one of these
        raise OSError(f"cannot write model version {path.name}: {error}") from error


def is_sound(folder: Path, digest: bytes, shape_digest: bytes = b"") -> bool:
    """Whether that version, of that retriever or of any, lies in the folder, every byte of it."""
    try:
        _read(version_path(folder, digest), digest, shape_digest)
    except VersionError:
        return False
    return True


def read_version(folder: Path, digest: bytes, shape_digest: bytes) -> Float32:
    """The vector of a version, verified against its name.

    Raises VersionError when it is missing, damaged, or of another shape.
    """
    return _read(version_path(folder, digest), digest, shape_digest)[0]


def shape_of(folder: Path, digest: bytes) -> bytes:
    """The shape digest of a version in the folder, which its name proves.

    Raises VersionError when the version is missing or damaged.
    """
    return _read(version_path(folder, digest), digest)[2]


def read_whole_version(
    folder: Path, digest: bytes, shape_digest: bytes
) -> tuple[Float32, Float32 | None]:
    """As `read_version`, and the moments [1 or 2, D] that the version carries; None: none."""
    return _read(version_path(folder, digest), digest, shape_digest)[:2]


def import_version(file: Path, folder: Path, digest: bytes) -> None:
    """Take in a version that a peer sent: verified first, then written as ours are.

    It may be of a retriever that this site does not have: its name covers which.

    Raises VersionError, and ``file`` is gone, when it is not that version; OSError,
    and it stays for another try, when the disk can't take it.
    """
    try:
        vector, moments, shape_digest = _read(file, digest)
    except VersionError:
        file.unlink(missing_ok=True)
        raise
    write_version(folder, shape_digest, vector, moments)
    file.unlink(missing_ok=True)


def _read(
    path: Path, digest: bytes, shape_digest: bytes = b""
) -> tuple[Float32, Float32 | None, bytes]:
    """Vector, moments and shape digest; of ``shape_digest``, or of what the file itself says."""
    moments: Float32 | None = None
    try:
        with safe_open(path, framework="numpy") as file:
            form = file.get_slice(_TENSOR)
            # Before it is loaded: numpy lacks types that safetensors has. And the digest is
            # over the values alone, so a peer could send the right ones as a column.
            if form.get_dtype() != "F32" or len(form.get_shape()) != 1:
                raise VersionError(f"model version {path} is no vector of float32")
            if _MOMENTS in file.keys():  # noqa: SIM118  the file itself is no container
                carried = file.get_slice(_MOMENTS)
                shapes = _moment_shapes(form.get_shape()[0])
                if carried.get_dtype() != "F32" or tuple(carried.get_shape()) not in shapes:
                    raise VersionError(f"the moments in model version {path} do not fit it")
                moments = file.get_tensor(_MOMENTS)
            vector: Float32 = file.get_tensor(_TENSOR)
            said = (file.metadata() or {}).get(_SHAPE, "")
    except (OSError, SafetensorError) as error:
        raise VersionError(f"cannot read model version {path}: {error}") from error
    shape_digest = shape_digest or _digest_in(said)
    if len(shape_digest) != 32 or version_digest(shape_digest, vector, moments) != digest:
        raise VersionError(f"model version {path} is damaged or of another retriever")
    return vector, moments, shape_digest


def _digest_in(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _moment_shapes(values: int) -> set[tuple[int, int]]:
    return {(rows, values) for rows in range(1, _MOST_MOMENTS + 1)}


def version_path(folder: Path, digest: bytes) -> Path:
    """Where a version of that digest lies."""
    return folder / f"{digest.hex()}.safetensors"


def largest_file(values: int) -> int:
    """Bytes that the file of a version of so many values takes at most."""
    return 4 * values * (1 + _MOST_MOMENTS) + _HEADER_BYTES
