"""What simulated sites contribute, as key holders see it: dot products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HONEST = (1.0, 2.0, -1.0)
LIMIT = 32767.0  # of 16-bit integers


def products_of(
    updates: Mapping[str, tuple[float, ...]], sites: Sequence[str]
) -> tuple[float, ...]:
    """Dot products of weighted updates, row by row up to the diagonal, in integer units.

    Weights are those of `tests.simulation.network.World.set_willing` when all of them take part.
    """
    most = 10 + ord(max(sites))
    rows = [
        [value * (10 + ord(site)) / most * LIMIT for value in updates.get(site, HONEST)]
        for site in sites
    ]
    return tuple(
        sum(x * y for x, y in zip(rows[a], rows[b], strict=True))
        for a in range(len(rows))
        for b in range(a + 1)
    )
