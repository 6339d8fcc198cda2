"""Buckets of every number of bits from one sorted table of names.

Projections of one seed are drawn one after the other from one stream, so the first b
bits of a name are the name that b projections give (`crypto.disclosure.Projections`).
In the order of names, first bit first, the buckets of any b are runs. So who asks
for another b each time has nothing projected or sorted anew: b costs a look along
the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Rows, UInt8
from crypto.disclosure import Buckets
from crypto.quantize import CryptoError


class PrefixTable:
    """A corpus' rows by bucket, for each number of bits up to that of their names."""

    def __init__(self, names: UInt8) -> None:
        """``names`` [n, width]: the bucket of every row, by `Projections.buckets`."""
        if names.ndim != 2 or not len(names):
            raise CryptoError(f"a table of buckets needs rows, got {names.shape}")
        flags = np.unpackbits(names, axis=1, bitorder="little")  # [n, 8 width], first bit first
        order = np.lexsort(np.packbits(flags, axis=1).T[::-1])  # stable
        self._rows: Rows = order.astype(np.int64)
        self._names = names[order]
        differs = flags[order][1:] != flags[order][:-1]
        # Where a row's name first differs from that before it; 8 width where it does not.
        apart = np.where(differs.any(axis=1), differs.argmax(axis=1), flags.shape[1])
        self._apart: NDArray[np.int64] = np.concatenate([[-1], apart])

    def of(self, bits: int) -> Buckets:
        """Its buckets of ``bits`` bits. Raises CryptoError for more than the names have."""
        if not 1 <= bits <= 8 * self._names.shape[1]:
            raise CryptoError(f"{bits} bits of names that have {8 * self._names.shape[1]}")
        starts = np.flatnonzero(self._apart < bits)
        kept = np.packbits(np.arange(8 * (-(-bits // 8))) < bits, bitorder="little")
        return Buckets(self._names[starts, : len(kept)] & kept, self._rows, starts)
