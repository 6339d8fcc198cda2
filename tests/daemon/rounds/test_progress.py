"""What people see of a run while they watch it."""

from __future__ import annotations

from daemon.rounds.progress import ProgressBoard
from peers.attempts import effects as do


async def test_a_run_does_not_begin_with_the_reason_of_the_one_before() -> None:
    board = ProgressBoard(lambda: (0, 0))
    board.phase(do.Progress(4, 0, "waiting", "north", (), (), "east is away"), 5, 3)
    board.stopped(3)
    over = await anext(board.watch(active=False))
    assert (over.message, over.finished) == ("east is away", True)
    begun = await anext(board.watch(active=True))
    assert (begun.message, begun.finished) == ("", False)
