"""Kinds of arrays, each named once. Shapes stand where they are used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
Rows = Int64
"""Positions in a table of passages, pairs or vectors, counted from 0."""
