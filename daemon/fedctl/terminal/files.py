"""Files that a person names: identities, certificates, manifests."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.fedctl.terminal.output import CommandError, Exit

# A certificate or a request is a few KiB, a manifest at most 1 MiB.
_MAX_READ = 1 << 20


@contextmanager
def refusing(file: Path | None = None, *, exit_code: Exit = Exit.FAILED) -> Iterator[None]:
    """What identity and manifest refuse, as the error of a command.

    ``file``: whose content is judged, to be named; ``exit_code``: USAGE where it is words of the
    command line.
    """
    from crypto.identity.keys import IdentityError
    from peers.wire.manifest import ManifestError

    try:
        yield
    except (IdentityError, ManifestError) as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            exit_code = Exit.USAGE
        cause = f"{file}: {error}" if file is not None else str(error)
        raise CommandError(cause, exit_code=exit_code) from error


def read_file(path: Path) -> bytes:
    """A small file as it is; raises CommandError when it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_READ + 1)
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {error.strerror}", "Check the path", exit_code=Exit.USAGE
        ) from error
    if len(content) > _MAX_READ:
        raise CommandError(f"{path} is larger than 1 MiB", "Check the path", exit_code=Exit.USAGE)
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of it."""
    from crypto.identity import keys

    with refusing():
        keys.replace(path, content, 0o644)


def fingerprint(certificate_pem: bytes) -> str:
    """SHA-256 of the first certificate in colon-separated hex, to compare over the telephone."""
    first, end, _ = certificate_pem.decode("ascii").partition(ssl.PEM_FOOTER)
    der = ssl.PEM_cert_to_DER_cert(first + end)
    return hashlib.sha256(der).digest().hex(":").upper()
