"""Stage 2 as `fedctl personalise` sees it: its steps as messages of control.proto."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from daemon.learning.options import TrainingProgress
from daemon.process import streams
from daemon.services.personaliser import Outcome, Personaliser
from proto import control_pb2 as control


@asynccontextmanager
async def watched(
    personaliser: Personaliser, local_epochs: int
) -> AsyncIterator[tuple[AsyncIterator[control.PersonaliseProgress], asyncio.Task[Outcome]]]:
    """Begin, and give it up when the block is left early: steps, and the task that they are of."""

    def begin(listener: Callable[[object], None]) -> Coroutine[Any, Any, Outcome]:
        return personaliser.personalise(listener, local_epochs=local_epochs)

    async with streams.watched(begin, TrainingProgress) as (steps, work):
        yield _as_messages(steps), work


async def _as_messages(
    steps: AsyncIterator[TrainingProgress],
) -> AsyncIterator[control.PersonaliseProgress]:
    async for step in steps:
        yield control.PersonaliseProgress(
            epoch=step.epoch,
            epochs=step.epochs,
            loss=step.loss,
            mrr_before=math.nan,
            mrr_after=math.nan,
            own_share=math.nan,
        )


def last_step(outcome: Outcome) -> control.PersonaliseProgress:
    """What came of it."""
    learned, asked = outcome.learned, outcome.asked
    return control.PersonaliseProgress(
        epoch=learned.epochs,
        epochs=learned.epochs,
        loss=learned.loss,
        done=True,
        model_digest=learned.model_digest,
        pairs=learned.pairs,
        pairs_judged=learned.judged,
        mrr_before=learned.mrr_before,
        mrr_after=learned.mrr_after,
        changed=learned.changed,
        own_share=learned.share,
        judged_in_turn=learned.in_turn,
        untrained=learned.untrained,
        steps=asked.steps,
        steps_unanswered=asked.unanswered,
        peers=[
            control.Exchanged(
                site=site,
                asked=seen.asked,
                answered=seen.answered,
                embeddings=seen.embeddings,
                missed=seen.missed,
                reason=seen.reason,
            )
            for site, seen in sorted(asked.peers.items())
        ],
        seconds=learned.seconds,
    )
