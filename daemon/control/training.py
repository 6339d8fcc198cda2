"""The part of control.proto that is about training: runs, and their noise."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator

from daemon.control.context import Calls, Context, refuse
from daemon.control.run_plan import ChoiceRefused, chosen, make_plan, put_noughts
from daemon.learning.plan_fields import fill
from peers.attempts import effects as do
from peers.plans.policy import noise_of_round, too_dear
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check
from proto import bounds
from proto import control_pb2 as control
from proto import federation_pb2 as pb

_LEAST_NOISE = bounds.of("PrivacyPlan", "noise_multiplier").least
_LOOK_EVERY_S = 1.0  # whether a peer has come or gone, while a run is watched
_UNIT = "this site: all that it contributed, in every round, against zeros in its place"


class TrainingCalls(Calls):
    """Runs, and what they cost."""

    async def Train(self, request: control.TrainRequest, context: Context) -> control.TrainReply:
        """Start a run."""
        plan = await self._plan(request, context)
        run_id = uuid.uuid4().hex[:12]
        async with self._audited(
            context, "train", run=run_id, rounds=request.rounds, recipe=plan.learning.recipe
        ):
            await self._answered(
                context, self._driver.ask(do.RunRequested(run_id, request.rounds, plan))
            )
        return control.TrainReply(run=self._driver.protocol.run)

    async def _plan(self, request: control.TrainRequest, context: Context) -> pb.TrainingPlan:
        """The plan asked for; what it leaves open comes from a recipe or this site's settings."""
        around = self._around
        try:
            training, learning = chosen(
                around.settings.training,
                around.settings.learning,
                around.settings.retriever.adapt,
                request.recipe,
                request.choices,
            )
            plan = make_plan(
                request.plan,
                training,
                learning,
                around.settings.robust,
                around.settings.retriever.adapt,
            )
            if request.plan.HasField("privacy"):
                plan.privacy.CopyFrom(await self._noise(request, context))
            put_noughts(plan, request.noughts)
            check(plan)
        except (ChoiceRefused, RemoteProtocolError) as error:
            await refuse(context, str(error), "Choose other options", senseless=True)
        return plan

    async def _noise(self, request: control.TrainRequest, context: Context) -> pb.PrivacyPlan:
        """The noise asked for, or what spends the epsilon asked for; the rest from settings."""
        wanted, privacy = request.plan.privacy, self._driver.privacy
        multiplier = wanted.noise_multiplier or 1.0
        if request.epsilon:
            multiplier = await privacy.calibrated(request.rounds, request.epsilon)
            if math.isinf(multiplier):
                cause = f"no noise keeps {request.rounds} rounds within epsilon {request.epsilon:g}"
                await refuse(context, cause, "Ask for fewer rounds or a larger epsilon")
            multiplier = max(multiplier, _LEAST_NOISE)
        least = await privacy.least()
        if multiplier < least:
            await refuse(context, too_dear(multiplier, least), "See fedctl privacy")
        plan = pb.PrivacyPlan()
        fill(plan, self._around.settings.privacy.model_dump())
        plan.MergeFrom(wanted)  # what it leaves open is 0, and stays as settings have it
        plan.noise_multiplier = multiplier
        plan.noise_floor = min(wanted.noise_floor or multiplier, multiplier)
        plan.noise_decay = wanted.noise_decay or 1.0
        plan.first_round = self._driver.protocol.head_round + 1
        return plan

    async def Privacy(
        self, request: control.PrivacyRequest, context: Context
    ) -> control.PrivacyReply:
        """What this site's updates have told so far, and what further rounds would add."""
        rounds = request.rounds or 1
        multiplier = request.noise_multiplier or await self._next_multiplier()
        account = await self._answered(context, self._driver.privacy.account(multiplier, rounds))
        budget = math.nan if account.budget is None else account.budget
        return control.PrivacyReply(
            unit=_UNIT,
            delta=account.delta,
            epsilon_spent=account.spent,
            epsilon_budget=budget,
            epsilon_left=max(0.0, budget - account.spent) if account.budget else math.nan,
            updates_noised=len(account.booked.multipliers),
            updates_bare=account.booked.bare,
            further_rounds=rounds,
            further_multiplier=multiplier,
            further_cost=account.cost,
            further_fits=account.fits,
            least_multiplier=account.least,
            last_multiplier=account.booked.multipliers[-1] if account.booked.multipliers else 0.0,
            warning=self._driver.unbooked.warning,
        )

    async def _next_multiplier(self) -> float:
        """Of the next round, if the run under way or the last one went on; 0: without noise."""
        run, head = self._driver.protocol.run, self._driver.protocol.head_round
        if run is None:
            return 0.0
        certificate = await asyncio.to_thread(self._driver.store.certificate, head)
        return noise_of_round(run.plan, head + 1, certificate)[0]

    async def StopTraining(
        self, _request: control.StopTrainingRequest, context: Context
    ) -> control.TrainReply:
        """End the run under way, everywhere."""
        async with self._audited(context, "stop-training"):
            await self._answered(context, self._driver.ask(do.StopRequested(uuid.uuid4().hex[:12])))
        return control.TrainReply(run=self._driver.protocol.run)

    async def WatchTraining(
        self, _request: control.WatchTrainingRequest, _context: Context
    ) -> AsyncIterator[control.TrainingProgress]:
        """The run under way, step by step, until it is over; and who does not answer meanwhile."""
        run = self._driver.protocol.run
        if run is None:
            return
        steps = self._driver.progress.watch(run.target_round > self._driver.protocol.head_round)
        step, coming = control.TrainingProgress(), None
        try:
            while not step.finished:
                coming = coming or asyncio.ensure_future(anext(steps))
                if (await asyncio.wait([coming], timeout=_LOOK_EVERY_S))[0]:
                    step = control.TrainingProgress()
                    step.CopyFrom(coming.result())  # which others who watch have, too
                    coming = None
                elif self._unreachable() == step.unreachable:
                    continue
                step.unreachable[:] = self._unreachable()
                yield step
        finally:
            if coming is not None:
                coming.cancel()

    def _unreachable(self) -> list[str]:
        peers = self._driver.transport.statistics()
        return sorted(site for site, seen in peers.items() if not seen.connected)
