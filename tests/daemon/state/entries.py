"""The entries of an audit log, for tests that want them whole and verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from daemon.state.audit_format import Chain, walk


def entries(paths: Sequence[Path], chain: Chain | None = None) -> Iterator[dict[str, Any]]:
    """Every entry of these segments, verified; ``chain`` follows.

    Raises Break at the first one, recorded or not, and OSError.
    """
    chain = chain if chain is not None else Chain()
    for entry in walk(paths, chain):
        if chain.breaks:
            raise chain.breaks[0]
        yield entry
    if chain.breaks:
        raise chain.breaks[0]
