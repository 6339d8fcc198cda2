"""Two logs at one site: what is said in one holds in it alone, whoever takes it to the other."""

from __future__ import annotations

import pytest

from tests.simulation import lines
from tests.simulation.scenarios.invariants import Violation

MOVED = 15  # a seed in which a site that lies shows the bundle of one line in the other


@pytest.mark.slow
def test_each_of_two_lines_keeps_every_invariant_beside_the_other() -> None:
    for seed in range(24):
        lines.play(lines.drawn(seed))


@pytest.mark.slow
def test_a_bundle_of_the_other_line_would_move_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    lines.play(lines.drawn(MOVED))
    monkeypatch.setattr("peers.rounds.synchronizer.must_be", lambda *_: None)
    with pytest.raises(Violation, match="ran away"):
        lines.play(lines.drawn(MOVED))


@pytest.mark.slow
def test_a_line_that_stands_still_holds_up_no_other() -> None:
    """Three of five sites have no room for one of two models: the other one's rounds go on."""
    assert lines.beside(0) < lines.ROOM_AFTER_S < lines.in_turn(0)
