"""What a person watches while a run goes on: the phase, the loss, the bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

from daemon.learning.options import EpochProgress
from daemon.rounds.attempt_log import AttemptLog
from peers.attempts import effects as do
from proto import control_pb2 as control
from proto import federation_pb2 as pb

# A watcher that does not read loses the oldest lines, never our memory.
_WAITING_AT_MOST = 1000


class ProgressBoard:
    """The state of the round under way; any number of people may watch it."""

    def __init__(
        self, traffic: Callable[[], tuple[int, int]], attempts: AttemptLog | None = None
    ) -> None:
        """``traffic`` gives bytes sent to and received from peers so far."""
        self._traffic = traffic
        self._state = control.TrainingProgress(phase="idle", loss=math.nan)
        self._watchers: set[asyncio.Queue[control.TrainingProgress]] = set()
        self.attempts = attempts

    @property
    def current_phase(self) -> str:
        """Phase of the round under way at this site; idle when none."""
        return self._state.phase

    @property
    def now(self) -> control.TrainingProgress:
        """The state as it is; a copy."""
        snapshot = control.TrainingProgress()
        snapshot.CopyFrom(self._state)
        return snapshot

    def phase(self, effect: do.Progress, target_round: int, head_round: int) -> None:
        """The protocol went on."""
        if self.attempts is not None:
            self.attempts.note(effect)
        state = self._state
        if (effect.round, effect.attempt) != (state.round, state.attempt):
            state.ClearField("participants")
            state.ClearField("contributors")
        state.round, state.attempt = effect.round, effect.attempt
        state.phase, state.coordinator = effect.phase, effect.coordinator
        state.message, state.fraction = effect.message, 0.0
        state.target_round, state.head_round = target_round, head_round
        state.model_digest = effect.model_digest
        if effect.participants:
            state.participants[:] = effect.participants
        if effect.contributors:
            state.contributors[:] = effect.contributors
        if effect.phase == "committed":
            self._committed(effect.report)
        self._publish()

    def _committed(self, report: pb.RoundReport | None) -> None:
        self._state.fraction = 1.0
        if report is not None and report.contributors:
            self._state.loss = report.mean_loss
        self._state.finished = self._state.head_round >= self._state.target_round

    def training(self, item: object) -> None:
        """The learning worker reports an epoch."""
        if isinstance(item, EpochProgress):
            self._state.loss = item.loss
            self._state.fraction = item.epoch / max(1, item.epochs)
            self._publish()

    def uploaded(self) -> None:
        """This site's hidden update is at the coordinator."""
        self._state.phase, self._state.fraction = "aggregate", 0.0
        self._publish()

    def stopped(self, head_round: int) -> None:
        """No run is under way any more."""
        self._state.phase, self._state.finished = "idle", True
        self._state.head_round = head_round
        self._publish()

    def _publish(self) -> None:
        self._state.bytes_sent, self._state.bytes_received = self._traffic()
        snapshot = self.now
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(snapshot)

    async def watch(self, active: bool) -> AsyncIterator[control.TrainingProgress]:
        """The state now, then each change until the run is over."""
        if active and self._state.phase == "idle":
            self._state.message = ""  # why the run before it ended, or waited
        self._state.finished = not active
        queue: asyncio.Queue[control.TrainingProgress] = asyncio.Queue(_WAITING_AT_MOST)
        self._watchers.add(queue)
        try:
            first = self.now
            yield first
            while not first.finished:
                first = await queue.get()
                yield first
        finally:
            self._watchers.discard(queue)


class LastError:
    """What `fedctl status` shows of what went wrong.

    An error of a round goes when a later one is committed; any other stays, and shows again
    then, until what it is ``about`` has gone well.
    """

    def __init__(self) -> None:
        self._stays = ""
        self._about = ""
        self._of_round = 0, ""

    @property
    def text(self) -> str:
        """The last error; empty when there was none."""
        return self._of_round[1] or self._stays

    def say(self, error: str, round_: int = 0, about: str = "") -> None:
        """Something went wrong; ``round_``: in that round."""
        if round_:
            self._of_round = round_, error
        else:
            self._of_round, self._stays, self._about = (0, ""), error, about

    def went_well(self, about: str) -> None:
        """What went wrong before is put right."""
        if self._about == about:
            self._stays, self._about = "", ""

    def committed(self, round_: int) -> None:
        """What went wrong in earlier rounds is of no interest any more."""
        if round_ > self._of_round[0]:
            self._of_round = 0, ""
