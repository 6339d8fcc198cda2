"""A run as it goes, on a terminal or in a log."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from daemon.fedctl.terminal.output import byte_count, duration, facts, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from proto.control_pb2 import TrainingProgress

REASON_CHARACTERS = 60  # of a reason that was told in full before


class TrainingView:
    """A run as it goes: what is committed scrolls by, the round under way stays below.

    Where stderr is no terminal, each phase is one line instead, unless ``phases`` is False.
    """

    def __init__(
        self, console: Console, *, quiet: bool = False, private: bool = False, phases: bool = True
    ) -> None:
        """``private``: the losses of committed rounds are noised."""
        from rich.live import Live

        self._phases = phases
        self._noised = " (noised)" if private else ""
        self._console = console
        self._quiet = quiet
        self._moving = console.is_terminal and not quiet
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._said: tuple[int, int, str] | None = None
        # Of the round under way: the attempts that each reason was told for.
        self._reasons: dict[str, set[tuple[int, int]]] = {}
        self._untold: dict[str, int] = {}  # how often since it was last told
        self._newest = ""
        self._silent: list[str] = []
        self._last: TrainingProgress | None = None

    def __enter__(self) -> TrainingView:
        if self._moving:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tell_repeated()
        if self._moving:
            self._live.stop()

    async def remind(self, after_s: float) -> None:
        """Say where a run stands of which nothing is heard, ever less often, until cancelled."""
        last, silent_s = self._last, 0.0
        while not self._quiet:
            pause_s = silent_s or after_s
            await asyncio.sleep(pause_s)
            if last is None or last is not self._last:
                last, silent_s = self._last, 0.0
                continue
            silent_s += pause_s
            why = last.message or (_unanswered(last.unreachable) if last.unreachable else "")
            at = f"phase {last.phase or 'idle'}" + (f": {why}" if why else "")
            self._say(f"  nothing new for {duration(silent_s)}, {at}")

    def show(self, progress: TrainingProgress) -> None:
        """Take in one step."""
        self._last = progress
        if self._quiet:
            return
        if self._moving:
            self._live.update(_picture(progress))
        self._name_silent(progress)
        if progress.message:
            self._reason(progress.message, (progress.round, progress.attempt))
        here = (progress.round, progress.attempt, progress.phase)
        if here != self._said:
            self._said = here
            if progress.phase == "committed":
                self._tell_repeated()
                self._reasons.clear()
                loss = _loss(progress, ", mean loss ")
                self._say(f"round {progress.round} committed{loss}{self._noised if loss else ''}")
            elif self._phases and not self._moving and progress.phase != "idle":
                by = f", coordinator {progress.coordinator}" if progress.coordinator else ""
                attempt = f"round {progress.round} attempt {progress.attempt}"
                self._say(f"{attempt}: {progress.phase}{by}")

    def _name_silent(self, progress: TrainingProgress) -> None:
        """Say who does not answer when that has changed; the panel shows it all the time."""
        silent = [*progress.unreachable]
        if silent != self._silent and self._phases and not self._moving:
            self._say(f"  {_unanswered(silent)}" if silent else "  every site answers again")
        self._silent = silent

    def _reason(self, reason: str, attempt: tuple[int, int]) -> None:
        """Say a reason once, and how often it came back when that has doubled."""
        attempts = self._reasons.setdefault(reason, set())
        if attempt in attempts:
            return
        attempts.add(attempt)
        times = len(attempts)
        if times == 1:
            self._say(f"  {reason}")
            self._newest = reason
            return
        self._untold[reason] = times
        if times.bit_count() == 1:
            self._tell_repeated()

    def _tell_repeated(self) -> None:
        for reason, times in self._untold.items():
            # Coordinators take turns, and so may their reasons: which one is it?
            which = "" if reason == self._newest else f": {reason[:REASON_CHARACTERS]}…"
            self._say(f"  same reason, {times} times{which}")
        self._untold.clear()

    def _say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(visible(text)))


def _loss(progress: TrainingProgress, before: str) -> str:
    return f"{before}{progress.loss:.4f}" if math.isfinite(progress.loss) else ""


def _unanswered(sites: Sequence[str]) -> str:
    return f"no answer from {', '.join(sites)}: `fedctl peers` says why"


def _picture(progress: TrainingProgress) -> RenderableType:
    """The round under way as a small panel."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar

    grid = facts()
    grid.add_row("attempt", str(progress.attempt))
    grid.add_row("coordinator", progress.coordinator or "–")
    grid.add_row("phase", progress.phase or "idle")
    grid.add_row("", ProgressBar(total=1.0, completed=progress.fraction, width=40))
    grid.add_row("participants", ", ".join(progress.participants) or "–")
    grid.add_row("contributors", ", ".join(progress.contributors) or "–")
    grid.add_row("sent", byte_count(progress.bytes_sent))
    grid.add_row("received", byte_count(progress.bytes_received))
    if progress.phase == "train" and progress.fraction:  # else it is of another round, or of all
        grid.add_row("loss here", _loss(progress, "") + ", mean of the last pass")
    if progress.unreachable:
        grid.add_row("peers", visible(_unanswered(progress.unreachable)))
    title = f"round {progress.round} of {progress.target_round}" if progress.round else "starting"
    return Panel.fit(grid, title=title)
