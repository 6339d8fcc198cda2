"""The part of control.proto that is about learning: what is personal, made pairs, evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import asdict, fields
from typing import Any

from config.recipes import RECIPES, GeneratorAxes
from daemon.control.context import Calls, Context, ServiceContext, refuse
from daemon.control.library_messages import abstention_judged, answer_judged, answers_judged
from daemon.control.run_plan import of_generator
from daemon.evaluation.intervals import Interval
from daemon.jobs.answering import Evaluation
from daemon.jobs.pairs import PairCounts, PairPlan, PairProgress
from daemon.learning.generator.in_use import InUse
from daemon.learning.options import EvaluationError, EvaluationProgress, LearningError
from daemon.library.store import Library
from daemon.pairs.made import How
from daemon.pairs.proposals import Proposal
from daemon.personal.layer import NOTHING_YET, Serving
from daemon.personal.layers import LAYERS
from daemon.personal.store import embedded_by
from daemon.process.streams import watched
from daemon.rounds.driver import Driver
from daemon.services.answer_evaluation import AskedPair, Writer
from daemon.services.generator.history import Unjudged
from daemon.services.pair_maker import PairMaker, same_asked
from daemon.state.store import CurvePoint
from daemon.state.versions import is_sound
from peers.wire.manifest import GENERATOR
from proto import control_pb2 as control

_HOW: dict[str, How] = {
    "cloze": "inverse-cloze",
    "titles": "title",
    "keywords": "keywords",
    "written": "llm",
}
_KINDS = {how: kind for kind, how in _HOW.items()}
FEDERATED, BASE = "federated", "base"
_PASSAGE_SHOWN = 4000  # characters
_WRITTEN_A_PASSAGE = 2  # of different intent, as pFedRAG (appendix C) has them written


class LearningCalls(Calls):
    """How this site learns, the pairs it makes, how well it finds."""

    @property
    def _pairs(self) -> PairMaker:
        return self._around.services.pairs

    # ---- how this site learns ------------------------------------------------------

    async def Learning(
        self, request: control.LearningRequest, context: Context
    ) -> control.LearningReply:
        """How this site learns, and what became of what is its own."""
        if request.model == GENERATOR:
            driver = await self._trained_here(context)
            told = asyncio.to_thread(_generator_reply, self._around, driver)
            generator_reply: control.LearningReply = await self._answered(context, told)
            return generator_reply
        reply: control.LearningReply = await self._answered(
            context, asyncio.to_thread(_learning_reply, self._around)
        )
        return reply

    async def AuditEmbeddings(
        self, request: control.AuditEmbeddingsRequest, context: Context
    ) -> AsyncIterator[control.AuditEmbeddingsProgress]:
        """Attack this site's own embeddings, step by step; ends when the caller hangs up."""
        async with (
            self._audited(context, "audit-embeddings", shown=request.show),
            aclosing(self._around.services.embeddings.steps(request)) as steps,
        ):
            while (step := await self._answered(context, anext(steps, None))) is not None:
                yield step

    # ---- pairs -------------------------------------------------------------------

    async def BuildPairs(
        self, request: control.BuildPairsRequest, context: Context
    ) -> AsyncIterator[control.BuildPairsProgress]:
        """Make pairs of this site's own documents."""
        how = await self._answered(context, _how(request.kind))
        written = _WRITTEN_A_PASSAGE if how == "llm" else 1
        plan = PairPlan(
            how=how,
            a_passage=request.a_passage or written,
            seed=request.seed,
            top_k=request.top_k or PairPlan.top_k,
            answers=request.answers,
        )
        async with self._audited(context, "build-pairs", kind=request.kind) as recorded:
            steps = self._pairs.build(plan)
            last = control.BuildPairsProgress()
            try:
                while (step := await self._answered(context, anext(steps, None))) is not None:
                    last = await self._told(step, context)
                    yield last
            finally:
                await steps.aclose()
            recorded["pairs"] = last.made
            await self._around.refresh()

    async def _told(
        self, step: PairProgress | PairCounts, context: Context
    ) -> control.BuildPairsProgress:
        if isinstance(step, PairProgress):
            return control.BuildPairsProgress(done=step.done, total=step.total)
        now = await self._answered(context, self._pairs.overview())
        return control.BuildPairsProgress(
            done=step.passages,
            total=step.passages,
            finished=True,
            made=step.made,
            repeated=step.repeated,
            lost=step.lost,
            seconds=step.seconds,
            learn_from=self._pairs.learn_from,
            training_pairs=now.training,
            answered=step.answered,
            unsupported=step.unsupported,
        )

    async def MadePairs(
        self, request: control.MadePairsRequest, context: Context
    ) -> control.MadePairsReply:
        """What was made so far; examples are texts of documents, and so audited."""
        how = await self._answered(context, _how(request.kind)) if request.kind else ""
        if not request.examples:
            return await self._made(context, how)
        async with self._audited(context, "show-pairs", kind=request.kind):
            return await self._made(context, how, request.examples)

    async def DropPairs(
        self, request: control.DropPairsRequest, context: Context
    ) -> control.MadePairsReply:
        """Forget the pairs of a kind, or all of them."""
        how = await self._answered(context, _how(request.kind)) if request.kind else ""
        async with self._audited(context, "drop-pairs", kind=request.kind):
            await self._answered(context, self._pairs.drop(how))
        await self._around.refresh()
        return await self._made(context)

    async def _made(
        self, context: Context, how: str = "", examples: int = 0
    ) -> control.MadePairsReply:
        overview = await self._answered(context, self._pairs.overview(how, examples))
        return control.MadePairsReply(
            kinds=[
                control.MadeKind(
                    kind=_KINDS[kind], pairs=one.pairs, usable=one.usable, answered=one.answered
                )
                for kind, one in overview.kinds.items()
            ],
            examples=[
                control.MadePair(
                    kind=_KINDS[one.how],
                    query=one.query,
                    texts=one.texts,
                    documents=one.documents,
                    answers=one.answers,
                )
                for one in overview.examples
            ],
            learn_from=self._pairs.learn_from,
            supplied=overview.supplied,
            training_pairs=overview.training,
            proposals=len(await self._answered(context, self._pairs.proposed())),
            triples=control.TripleCounts(
                supplied=overview.triples.supplied,
                made=overview.triples.made,
                to_distil=overview.triples.to_distil,
            ),
        )

    async def ListProposals(
        self, request: control.ListProposalsRequest, context: Context
    ) -> control.ListProposalsReply:
        """A page of what people say answers a question, with the passages; so it is audited."""
        async with self._audited(context, "show-pairs", kind="proposed"):
            found = sorted(
                await self._answered(context, self._pairs.proposed()), key=lambda one: one.id
            )
            page = [one for one in found if one.id > request.after][: request.limit]
            shown = await self._answered(
                context,
                self._around.collection.read(
                    lambda library: [_proposal_message(one, library) for one in page]
                ),
            )
        return control.ListProposalsReply(proposals=shown)

    async def DecideProposals(
        self, request: control.DecideProposalsRequest, context: Context
    ) -> control.DecideProposalsReply:
        """What becomes of them, by the operator's word."""
        proposals, ids = self._pairs.proposals, dict.fromkeys(request.reject)
        asked = {"token": request.forget_token} if request.forget_token else {}
        async with self._audited(context, "decide-proposals", **asked) as recorded:
            accepted = await self._answered(context, self._pairs.accept(request.accept))
            recorded["accepted"] = len(accepted.known)
            waiting = {one.id for one in await self._answered(context, proposals.waiting())}
            rejected = [name for name in ids if name in waiting]
            await self._answered(context, proposals.forget(rejected))
            recorded["rejected"], forgotten = len(rejected), 0
            if request.forget_token:
                work = proposals.forget_token(request.forget_token)
                recorded["votes"] = forgotten = await self._answered(context, work)
        await self._around.refresh()
        return control.DecideProposalsReply(
            accepted=len(accepted.known),
            rejected=len(rejected),
            forgotten=forgotten,
            waiting=len(await self._answered(context, self._pairs.proposed())),
            unknown=[*accepted.unknown, *(name for name in ids if name not in waiting)],
            not_accepted=accepted.refused,
        )

    # ---- evaluation -----------------------------------------------------------------

    async def Evaluate(
        self, request: control.EvaluateRequest, context: Context
    ) -> AsyncIterator[control.EvaluateProgress]:
        """Judge retrieval on this site's own pairs, step by step."""

        def begin(listener: Callable[[object], None]) -> Coroutine[Any, Any, Evaluation]:
            return self._around.collection.evaluate(request.split, listener)

        async with self._audited(context, "evaluate") as recorded:
            async with watched(begin, EvaluationProgress) as (steps, work):
                async for step in steps:
                    yield control.EvaluateProgress(**step._asdict())
                judged = await self._answered(context, work)
            recorded["questions"] = judged.dense.questions
        result = _evaluated(judged)
        served, facts = await self._answered(context, asyncio.to_thread(_own, self._around))
        if served.version == judged.model_digest:
            result.facts.extend(facts)
        yield control.EvaluateProgress(step="done", result=result)

    async def EvaluateAnswers(
        self, request: control.EvaluateAnswersRequest, context: Context
    ) -> AsyncIterator[control.EvaluateAnswersProgress]:
        """Judge answers to this site's own pairs, step by step."""
        judge = self._around.services.answers
        writers = await self._answered(context, self._writers(request.generators))

        async def begin(listener: Callable[[object], None]) -> control.EvaluateAnswersReply:
            if request.only_abstention:
                judged = await judge.abstention(request.split, listener)
                return control.EvaluateAnswersReply(abstention=abstention_judged(judged))
            if request.so_far:
                return answers_judged(await judge.so_far())
            return answers_judged(await judge.judge(request.split, listener, writers))

        kinds = (EvaluationProgress, AskedPair) if request.tell_answers else (EvaluationProgress,)
        async with self._audited(context, "evaluate-answers") as recorded:
            async with self._kept(writers), watched(begin, *kinds) as (steps, work):
                async for step in steps:
                    if isinstance(step, AskedPair):
                        yield control.EvaluateAnswersProgress(answer=answer_judged(step))
                    else:
                        yield control.EvaluateAnswersProgress(**step._asdict())
                result = await self._answered(context, work)
            recorded["questions"] = result.questions or result.abstention.questions
        yield control.EvaluateAnswersProgress(step="done", result=result)

    @asynccontextmanager
    async def _kept(self, writers: Sequence[Writer]) -> AsyncIterator[None]:
        """Meanwhile rounds prune none of the versions that answer."""
        driver = self._around.drivers.get(GENERATOR)
        named = [one.values.version for one in writers if one.values is not None]
        digests = [bytes.fromhex(version) for version in named if version]
        with driver.catch_up.keeping(digests) if driver is not None else nullcontext():
            yield

    async def _writers(self, names: Sequence[str]) -> list[Writer]:
        """Who is to answer, by what `EvaluateAnswersRequest` names.

        Raises RunRefused, and EvaluationError for what is not here.
        """
        set_here = self._around.settings.retrieval.generator
        if not names and set_here != FEDERATED:
            return [Writer(set_here)]
        if not self._around.generator.spec.base_model:
            raise EvaluationError(
                "this site has no base model to answer with: name one under [generator] in the "
                "settings (base_model), and restart fedd"
            )
        found: dict[InUse | None, str] = {}  # values, by what they were named
        writers = []
        for name in dict.fromkeys(names or [FEDERATED]):
            writer = await asyncio.to_thread(self._writer, name)
            if writer.values in found:
                same = f"{found[writer.values]} and {name}"
                raise EvaluationError(
                    f"{same} are the same version of the generator here: "
                    "name another round (`fedctl learning --model generator`)"
                )
            found[writer.values] = name
            writers.append(writer)
        return writers

    def _writer(self, name: str) -> Writer:
        generator = self._around.generator
        history = generator.history
        if name == BASE:
            return Writer(BASE, InUse())
        if name == FEDERATED:
            served = generator.served_digest
            round_ = history.round_of(served) if history is not None and served else 0
            return Writer(FEDERATED, generator.in_use.values, round_)
        driver = self._around.driver_of(GENERATOR)
        if history is None or not (digest := history.rounds().get(int(name), b"")):
            raise EvaluationError(
                f"the generator has no round {name}: its newest here is {driver.head_round}"
            )
        if int(name) == 0:
            return Writer(BASE, InUse())
        if not is_sound(driver.catch_up.state.versions, digest, driver.shapes.digest):
            raise EvaluationError(
                f"the generator's version of round {name} is not here any more "
                "(rounds.keep_versions): name a newer round"
            )
        return Writer(FEDERATED, InUse(digest.hex()), int(name))

    async def _trained_here(self, context: Context) -> Driver:
        """Of the generator's rounds; the call ends where this site can't train it."""
        driver = await self._driver_of(GENERATOR, context)
        if lacking := self._around.generator.lacking:
            remedy = "Name its base model under [generator] in the settings, and restart fedd"
            await refuse(context, f"this site {lacking}", remedy)
        return driver

    async def LearningCurve(
        self, request: control.LearningCurveRequest, context: Context
    ) -> control.LearningCurveReply:
        """How the committed versions did here."""
        if request.model == GENERATOR:
            driver = await self._trained_here(context)
            points = await asyncio.to_thread(driver.store.curve, request.metric)
            return await asyncio.to_thread(_generator_curve, self._around, driver, points)
        points = await asyncio.to_thread(self._driver.store.curve, request.metric)
        return _curve(points, self._around.services.curve.missing)


def _curve(points: Sequence[CurvePoint], missing: str) -> control.LearningCurveReply:
    return control.LearningCurveReply(
        points=[control.CurvePoint(**asdict(point)) for point in points], missing=missing
    )


def _generator_curve(
    around: ServiceContext, driver: Driver, points: Sequence[CurvePoint]
) -> control.LearningCurveReply:
    """As `_curve`, of the generator's versions; reads the disk."""
    generator = around.generator
    unjudged: list[Unjudged] = generator.history.unjudged() if generator.history else []
    newest = any(one.round == driver.head_round for one in unjudged)
    reply = _curve(points, generator.missing if newest else "")
    reply.answering_digest = generator.served_digest
    if generator.history is not None and not generator.served_digest:
        reply.answering_digest = generator.history.first
    reply.unjudged.extend(control.UnjudgedVersion(**asdict(one)) for one in unjudged)
    return reply


def _generator_reply(around: ServiceContext, driver: Driver) -> control.LearningReply:
    """How the generator is trained here, and which version of it answers; reads the disk."""
    training, learning, _ = of_generator(around.settings)
    own, run = around.settings.generator, driver.protocol.run
    generator = around.generator
    served, history = generator.served_digest, generator.history
    version = "the base model: no version is judged yet"
    if generator.in_use.judged:
        version = "the base model: no version does better on this site's validation questions"
    if served:
        round_ = history.round_of(served) if history is not None else 0
        version = f"version {served.hex()[:12]} of round {round_}"
        if share := generator.in_use.share:
            version = f"{version}, {share:.0%} of it this site's own half"
    set_here = around.settings.retrieval.generator
    if set_here != FEDERATED:
        version = f"{version}; not asked: retrieval.generator is {set_here!r}"
    choices = {
        **{axis.name: getattr(own, axis.name) for axis in fields(GeneratorAxes)},
        "lora_targets": ", ".join(own.lora_targets) or "query and value projections",
        "local_epochs": training.local_epochs,
        "batch_size": training.batch_size,
        "learning_rate": training.learning_rate,
    }
    facts = {
        "base model": own.base_model,
        "learns from": generator.last.reason or f"{generator.last.num_examples} triples",
        "answers": version,
    }
    return control.LearningReply(
        recipe=learning.recipe,
        choices=[
            control.Choice(axis=axis, value=str(value), in_recipe=str(value))
            for axis, value in choices.items()
        ],
        plan=run.plan if run is not None else None,
        shared_values=driver.shapes.total,
        adaptation_index=math.nan,
        own_share=math.nan,
        facts=[control.Fact(name=name, value=str(value)) for name, value in facts.items()],
    )


def _proposal_message(one: Proposal, library: Library) -> control.Proposal:
    (document_id,) = one.pair.positives
    passage, _, _ = library.passage(one.passage_id)
    stored = library.documents(document_id, "", 1)
    known = same_asked(one, library)
    told = control.Proposal(
        id=one.id,
        question=one.pair.query,
        document_id=document_id,
        title=stored[0].title if stored and stored[0].id == document_id else "",
        passage_id=one.passage_id,
        here_as=known[0].split if known else "",
        votes=[
            control.ProposalVote(
                token=vote.token,
                answers=vote.answers,
                unix_s=vote.unix_s,
                passage_id=vote.passage_id,
            )
            for vote in one.votes
        ],
    )
    if passage is not None and passage.document_id == document_id:
        told.passage, told.page = passage.text[:_PASSAGE_SHOWN], passage.page
    return told


async def _how(kind: str) -> How:
    if kind not in _HOW:
        raise LearningError(f"there are no pairs of kind {kind!r}: use one of {', '.join(_HOW)}")
    return _HOW[kind]


def _evaluated(judged: Evaluation) -> control.EvaluateReply:
    return control.EvaluateReply(
        questions=judged.dense.questions,
        mrr_at_10=judged.dense.mrr_at_10,
        recall_at_10=judged.dense.recall_at_10,
        hit_at_1=judged.dense.hit_at_1,
        ndcg_at_10=judged.dense.ndcg_at_10,
        model_digest=judged.model_digest,
        seconds=judged.seconds,
        retrieval="dense",
        figures=_figures(judged.figures),
        over_vanilla=_figures(judged.over_vanilla),
        split=judged.split,
        words_weight=judged.weights.words,
        title_weight=judged.weights.title,
        weighed_by=judged.weighed_by,
        fell_back=judged.fell_back,
        fell_back_because=judged.cause,
    )


def _figures(intervals: dict[str, dict[str, Interval]]) -> list[control.Figure]:
    return [
        control.Figure(ranking=ranking, metric=metric, mean=f.mean, low=f.low, high=f.high)
        for ranking, figures in intervals.items()
        for metric, f in figures.items()
    ]


def _learning_reply(around: ServiceContext) -> control.LearningReply:
    """Reads this site's personal files, so not on the event loop.

    Raises LearningError when one of them is damaged.
    """
    run = around.driver.protocol.run
    tables = {
        "retriever": around.settings.retriever.model_dump(),
        "training": around.settings.training.model_dump(),
        "learning": around.settings.learning.model_dump(),
    }
    recipe = RECIPES[around.settings.learning.recipe].settings
    serving, facts = _own(around)
    reply = control.LearningReply(
        recipe=around.settings.learning.recipe,
        choices=[
            control.Choice(axis=axis, value=str(tables[table][axis]), in_recipe=str(said))
            for table, axes in recipe.items()
            for axis, said in axes.items()
        ],
        plan=run.plan if run is not None else None,
        shared_values=around.driver.shapes.total,
        adaptation_index=math.nan,
        own_share=math.nan,
        facts=facts,
        fitted=LAYERS[around.settings.retriever.personal].fitted,
        being_fitted=around.services.personaliser.fitting,
    )
    if serving.state is not None:
        state = serving.state.facts
        reply.personal_digest = serving.version
        reply.own_share = float(state.get("share", math.nan))
        reply.untrained = bool(state.get("untrained", False))
        reply.carried = bool(state.get("carried", False))
    if (report := serving.report) is not None:
        reply.tier, reply.decision, reply.reason = report.tier, report.decision, report.reason
        reply.adaptation_index = math.nan if report.api is None else report.api
    return reply


def _own(around: ServiceContext) -> tuple[Serving, list[control.Fact]]:
    """What the version that answers has of this site's own, and what people are told of it.

    Not to fit it while it is being fitted. Reads files, as `_learning_reply` does.
    """
    serving = _serving(around)
    facts = LAYERS[around.settings.retriever.personal].facts(serving)
    if around.services.personaliser.fitting:
        facts = [fact for fact in facts if fact != NOTHING_YET]
        facts.append((NOTHING_YET[0], "being fitted now"))
    return serving, [control.Fact(name=name, value=value) for name, value in facts]


def _serving(around: ServiceContext) -> Serving:
    """What the version that answers has of this site's own: only what its index knows of."""
    collection, personal = around.collection, around.settings.retriever.personal
    served = collection.served_digest
    own = around.personal.serving(served) if served else None
    embedded = embedded_by(personal, around.personal.folder, served)
    answers = own is not None and collection.indexed_by(embedded)
    report = LAYERS[personal].report(around.personal)
    return Serving(served, own if answers else None, report)
