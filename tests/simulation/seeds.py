"""Which seeds are played in `make test-quick`, and which in `make test` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seeds(quick: Iterable[int], slow: Iterable[int]) -> list[Any]:
    """For `pytest.mark.parametrize`: those of ``slow`` carry the mark of what takes long."""
    return [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)]
