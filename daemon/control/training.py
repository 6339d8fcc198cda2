"""The part of control.proto that is about training: runs, noise, halves, what stays."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from config.settings import LearningSettings, TrainingSettings
from daemon.control.context import Calls, Context, refuse
from daemon.control.run_plan import ChoiceRefused, chosen, make_plan, of_generator, put_noughts
from daemon.jobs.generator.personal import PersonalisedGenerator
from daemon.learning.options import EpochProgress, EvaluationProgress, TrainingOptions
from daemon.learning.plan_fields import fill
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.layers import layer_of
from daemon.process.streams import watched
from daemon.rounds.audited import of_model
from daemon.rounds.driver import Driver
from daemon.services.generator import personaliser as generator_personaliser
from daemon.services.personaliser import Fitting, told
from peers.attempts import effects as do
from peers.plans.policy import noise_of_round, too_dear
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import GENERATOR
from peers.wire.messages import check
from proto import bounds
from proto import control_pb2 as control
from proto import federation_pb2 as pb

_LEAST_NOISE = bounds.of("PrivacyPlan", "noise_multiplier").least
_LOOK_EVERY_S = 1.0  # whether a peer has come or gone, while a run is watched
_FITTING_STEPS: tuple[type[EpochProgress | EvaluationProgress], ...] = (
    EpochProgress,
    EvaluationProgress,
)
_UNIT = "this site: all that it contributed, in every round, against zeros in its place"


class TrainingCalls(Calls):
    """Runs, and what they cost."""

    async def Train(self, request: control.TrainRequest, context: Context) -> control.TrainReply:
        """Start a run."""
        driver = await self._driver_of(request.model, context)
        plan = await self._plan(request, driver, context)
        run_id = uuid.uuid4().hex[:12]
        async with self._audited(
            context,
            "train",
            **of_model(driver.protocol.log_id),
            run=run_id,
            rounds=request.rounds,
            recipe=plan.learning.recipe,
        ):
            await self._answered(context, driver.ask(do.RunRequested(run_id, request.rounds, plan)))
        return control.TrainReply(run=driver.protocol.run)

    async def _plan(
        self, request: control.TrainRequest, driver: Driver, context: Context
    ) -> pb.TrainingPlan:
        """The plan asked for; what it leaves open comes from a recipe or this site's settings."""
        settings = self._around.settings
        usual: tuple[TrainingSettings, LearningSettings, str] = (
            settings.training,
            settings.learning,
            settings.retriever.adapt,
        )
        if driver.model == GENERATOR:
            usual = of_generator(settings)
        try:
            training, learning = chosen(*usual, request.recipe, request.choices)
            plan = make_plan(request.plan, training, learning, settings.robust, usual[2])
            if request.plan.HasField("privacy"):
                plan.privacy.CopyFrom(await self._noise(request, driver, context))
            put_noughts(plan, request.noughts)
            check(plan)
        except (ChoiceRefused, RemoteProtocolError) as error:
            await refuse(context, str(error), "Choose other options", senseless=True)
        return plan

    async def _noise(
        self, request: control.TrainRequest, driver: Driver, context: Context
    ) -> pb.PrivacyPlan:
        """The noise asked for, or what spends the epsilon asked for; the rest from settings."""
        wanted, privacy = request.plan.privacy, driver.privacy
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
        plan.first_round = driver.head_round + 1
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
            warning=" ".join(
                filter(None, [one.unbooked.warning for one in self._around.drivers.values()])
            ),
        )

    async def _next_multiplier(self) -> float:
        """Of the next round, if the run under way or the last one went on; 0: without noise."""
        run, head = self._driver.protocol.run, self._driver.protocol.head_round
        if run is None:
            return 0.0
        certificate = await asyncio.to_thread(self._driver.store.certificate, head)
        return noise_of_round(run.plan, head + 1, certificate)[0]

    async def AuditMemory(
        self, request: control.AuditMemoryRequest, context: Context
    ) -> AsyncIterator[control.AuditMemoryProgress]:
        """What a run of the generator would remember, step by step; to hang up ends it."""
        around = self._around
        try:
            training, learning, adapt = of_generator(around.settings)
            training, learning = chosen(training, learning, adapt, "", request.choices)
            wanted = pb.TrainingPlan(local_epochs=request.local_epochs)
            plan = make_plan(wanted, training, learning, around.settings.robust, adapt)
            check(plan)
        except (ChoiceRefused, RemoteProtocolError) as error:
            await refuse(context, str(error), "Choose other options", senseless=True)
        sites = len(self._driver.manifest.enabled_ids)
        options = TrainingOptions.of(plan)
        async with (
            self._audited(context, "audit-memory"),
            aclosing(around.services.memory.steps(request, options, sites)) as steps,
        ):
            while (step := await self._answered(context, anext(steps, None))) is not None:
                yield step

    async def Personalise(
        self, request: control.PersonaliseRequest, context: Context
    ) -> AsyncIterator[control.PersonaliseProgress]:
        """Fit what is this site's own of the model to its pairs."""
        driver = await self._driver_of(request.model, context)
        services = self._around.services

        async def begin(
            listener: Callable[[object], None],
        ) -> tuple[dict[str, Any], control.PersonaliseProgress]:
            if driver.model == GENERATOR:
                made = await services.own_generator.personalise(
                    listener, local_epochs=request.local_epochs
                )
                return generator_personaliser.told(made), _trained(made)
            outcome = await services.personaliser.personalise(
                listener, local_epochs=request.local_epochs
            )
            return told(outcome), _fitted(outcome, services.personaliser.spec)

        asked = of_model(driver.protocol.log_id)
        async with self._audited(context, "personalise", **asked) as recorded:
            last = control.PersonaliseProgress()
            async with watched(begin, *_FITTING_STEPS) as (steps, work):
                async for step in steps:
                    last = _step(step, last)
                    yield last
                outcome, result = await self._answered(context, work)
            recorded |= outcome
            result.model = driver.model
            yield result

    async def StopTraining(
        self, request: control.StopTrainingRequest, context: Context
    ) -> control.TrainReply:
        """End the run under way, everywhere."""
        driver = await self._driver_of(request.model, context)
        async with self._audited(context, "stop-training", **of_model(driver.protocol.log_id)):
            await self._answered(context, driver.ask(do.StopRequested(uuid.uuid4().hex[:12])))
        return control.TrainReply(run=driver.protocol.run)

    async def WatchTraining(
        self, request: control.WatchTrainingRequest, context: Context
    ) -> AsyncIterator[control.TrainingProgress]:
        """The run under way, step by step, until it is over; and who does not answer meanwhile."""
        driver = await self._driver_of(request.model, context)
        run = driver.protocol.run
        if run is None:
            return
        steps = driver.progress.watch(run.target_round > driver.head_round)
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


def _step(
    step: EpochProgress | EvaluationProgress, last: control.PersonaliseProgress
) -> control.PersonaliseProgress:
    """What it is at: a pass, or behind the ``last`` one an answer to judge by."""
    now = control.PersonaliseProgress(mrr_before=math.nan, mrr_after=math.nan, own_share=math.nan)
    if isinstance(step, EpochProgress):
        now.epoch, now.epochs, now.loss = step.epoch, step.epochs, step.loss
        return now
    now.epoch, now.epochs, now.loss = last.epoch, last.epochs, last.loss
    now.answers_written, now.answers_to_write = step.done, step.total
    return now


def _trained(made: PersonalisedGenerator) -> control.PersonaliseProgress:
    """What came of it."""
    used = made.in_use
    version = f"version {used.version[:12]}" if used.version else "the base model"
    own = f", {used.share:.0%} of it what this site learned behind it" if used.own else ""
    result = control.PersonaliseProgress(
        epoch=made.epochs,
        epochs=made.epochs,
        loss=made.loss,
        done=True,
        model_digest=bytes.fromhex(used.judged),
        pairs=made.triples,
        pairs_judged=used.triples,
        mrr_before=math.nan,
        mrr_after=math.nan,
        changed=made.answers,
        own_share=made.share,
        answers_with=f"{version}{own}",
        seconds=made.seconds,
    )
    if used.base is not None and used.newest is not None and used.best is not None:
        result.base_perplexity = used.base.perplexity
        result.shared_perplexity = used.newest.perplexity
        result.answers_written = used.best.written
    if made.mixture is not None:
        result.own_perplexity = made.mixture.perplexity
    return result


def _fitted(outcome: Fitting, spec: RetrieverSpec) -> control.PersonaliseProgress:
    """What came of it."""
    learned, asking = outcome.learned, outcome.asked
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
        answers_with=layer_of(spec).answers_with(learned),
        steps=asking.steps,
        steps_unanswered=asking.unanswered,
        peers=[
            control.Exchanged(
                site=site,
                asked=seen.asked,
                answered=seen.answered,
                embeddings=seen.embeddings,
                missed=seen.missed,
                reason=seen.reason,
            )
            for site, seen in sorted(asking.peers.items())
        ],
        seconds=learned.seconds,
    )
