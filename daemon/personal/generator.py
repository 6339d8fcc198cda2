"""A site's own half of the generator, and the mixture of it and what is shared.

As the retriever's mixture it is a point between two vectors, chosen on validation questions. The
own half is trained on from the shared version, not from the base model: low-rank factors of two
trainings that begin apart need not mean the same, and a point between them would be neither's.
It is the values that are mixed, before the model is loaded with them, so that an answer takes one
pass of the model as before.

The half lies in a folder of its own as versions do, named by the digest of its values and of
the generator that they are of: base model and adaptation. Which shared version it is mixed with,
and how much of it, says `daemon.learning.generator.in_use`. No message reads it.
"""

from __future__ import annotations

from pathlib import Path

from crypto.arrays import Float32
from daemon.learning.generator.in_use import InUse
from daemon.learning.generator.spec import GeneratorSpec
from daemon.personal.mixture import mix
from daemon.state.versions import VersionError, read_version, version_path, write_version


def vector_in_use(
    in_use: InUse, spec: GeneratorSpec, versions: Path, shape_digest: bytes
) -> Float32:
    """The values [D] of the version or mixture that answers here; not asked of the base model.

    Raises VersionError where they are not there whole, are of another generator, or
    ``spec.personal`` is not what they were made by.
    """
    shared = read_version(versions, bytes.fromhex(in_use.version), shape_digest)
    if not in_use.own:
        return shared
    if spec.personal != "mixture":
        raise VersionError('this site\'s own half is not used: generator.personal is "none"')
    folder = Path(spec.personal_folder)
    return mix(shared, read_version(folder, bytes.fromhex(in_use.own), shape_digest), in_use.share)


def is_usable(in_use: InUse, spec: GeneratorSpec, versions: Path, shape_digest: bytes) -> bool:
    """Whether `vector_in_use` has them."""
    try:
        vector_in_use(in_use, spec, versions, shape_digest)
    except VersionError:
        return False
    return True


def keep_own(spec: GeneratorSpec, shape_digest: bytes, own: Float32) -> bytes:
    """Keep an own half [D], whole or not at all; its digest. Raises VersionError, OSError."""
    folder = Path(spec.personal_folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return write_version(folder, shape_digest, own)[0]


def drop_owns(spec: GeneratorSpec, *but: str) -> None:
    """Drop the halves that are kept, but those of these digests (hex; "": none)."""
    if not spec.personal_folder:
        return
    folder = Path(spec.personal_folder)
    kept = {version_path(folder, bytes.fromhex(digest)) for digest in but if digest}
    for path in folder.glob("*.safetensors"):
        if path not in kept:
            path.unlink(missing_ok=True)
