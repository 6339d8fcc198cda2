"""fedctl learning and personalise: how this site learns, and what is its own is fitted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import MODELS, Model, command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    duration,
    facts,
    plain_text,
    short,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        Exchanged,
        LearningCurveReply,
        LearningReply,
        PersonaliseProgress,
    )

topic = typer.Typer()


# ---- how it learns --------------------------------------------------------------


@topic.command("learning")
@command
def learning(session: Session, model: Model = MODELS[0]) -> None:
    """Show how this site learns: its recipe, every choice, and its personal layer.

    Of the generator also what this site's own validation questions say of each version, by round;
    of the retriever's versions `fedctl eval --history` says that.
    """
    reply, curve = run(_learning(session, model))
    if model == MODELS[0]:
        session.result(as_plain(reply), lambda console: console.print(_table(reply)))
        return
    if not curve.points and curve.missing:
        raise CommandError(f"no version of the generator is judged here: {curve.missing}")
    plain = as_plain(reply) | {"curve": as_plain(curve)}
    session.result(plain, lambda console: _generator_shown(console, reply, curve))


async def _learning(session: Session, model: str) -> tuple[LearningReply, LearningCurveReply]:
    """The reply, and the curve of the generator's versions; of the retriever's none."""
    from proto.control_pb2 import LearningCurveReply, LearningCurveRequest, LearningRequest

    async with connected(socket_path(session)) as daemon:
        reply = await daemon.Learning(LearningRequest(model=model), timeout=ANSWER_WITHIN_S)
        if model == MODELS[0]:
            return reply, LearningCurveReply()
        asked = LearningCurveRequest(model=model)
        return reply, await daemon.LearningCurve(asked, timeout=ANSWER_WITHIN_S)


def _table(reply: LearningReply) -> Table:
    grid = facts()
    grid.add_row("recipe", reply.recipe)
    last = reply.plan.learning.recipe
    grid.add_row("last run", last or ("none yet" if not reply.HasField("plan") else "no recipe"))
    grid.add_row("exchanged", f"{reply.shared_values:,} values a round")
    for fact in reply.facts:  # what this site keeps to itself, and why it is that
        grid.add_row(plain_text(fact.name), plain_text(fact.value))
    for choice in reply.choices:
        differs = choice.value != choice.in_recipe
        otherwise = f"  (the recipe says {choice.in_recipe})" if differs else ""
        grid.add_row(choice.axis.replace("_", " "), f"{choice.value}{otherwise}")
    return grid


def _generator_shown(console: Console, reply: LearningReply, curve: LearningCurveReply) -> None:
    console.print(_table(reply))
    versions: dict[int, bytes] = {}
    figures: dict[tuple[int, str], str] = {}
    for point in curve.points:
        versions[point.round] = point.model_digest
        places = {"tokens": 0, "perplexity": 2}.get(point.metric, 3)
        figures[point.round, point.metric] = f"{point.value:,.{places}f}"
        if point.metric == "nats":
            figures[point.round, "triples"] = f"{point.questions}"
    names = ("perplexity", "triples", "rouge-l-f", "cited")
    shown = [name for name in names if any((n, name) in figures for n in versions)]
    table = columns(">round", "version", *(f">{name}" for name in shown), "")
    left = {one.round: one.model_digest for one in curve.unjudged if not one.pruned}
    # Of one version several rounds may be: where nothing was learned.
    answering = {n for n, digest in versions.items() if digest == curve.answering_digest}
    for n in sorted(versions | left):
        digest = versions.get(n) or left[n]
        remark = "answers here" if n == max(answering, default=-1) else ""
        if n not in versions:
            remark = "not judged yet"
        name = short(digest.hex()) if n else "base model"
        table.add_row(str(n), name, *(figures.get((n, one), "") for one in shown), remark)
    console.print(table)
    tokens = figures.get((max(versions, default=0), "tokens"), "0")
    console.print(f"Perplexities are over tokens of right answers: {tokens} in the newest row.")
    if pruned := [one.round for one in curve.unjudged if one.pruned]:
        which = f"round {pruned[0]}" if len(pruned) == 1 else f"rounds {pruned[0]} to {pruned[-1]}"
        text = f"Pruned before they were judged: {len(pruned)}, of {which}."
        console.print(plain_text(text), soft_wrap=True)
    if len({value for (_, name), value in figures.items() if name == "triples"}) > 1:
        text = "Rows of different triples don't compare: pairs came or went in between."
        console.print(plain_text(text), soft_wrap=True)
    if curve.missing:
        console.print(plain_text(f"The newest version: {curve.missing}."), soft_wrap=True)


# ---- what is its own is fitted --------------------------------------------------


@topic.command("personalise")
@command
def personalise(
    session: Session,
    local_epochs: Annotated[
        int | None,
        of_field(
            "TrainingPlan",
            "local_epochs",
            least=1,
            help="Passes over this site's own pairs; for a mixture, in each of its rounds alone.",
        ),
    ] = None,
    model: Model = MODELS[0],
) -> None:
    """Fit what is this site's own to its pairs, as retriever.personal says.

    For a mixture, train alone, and answer with the mean of that and the shared version, if
    pairs that are kept apart say that it is better.
    For a query encoder, fit how questions are embedded; other sites are asked for negatives
    as the settings' section negatives says.
    With --model generator, train on from its newest version, as generator.personal says, and
    answer with a point between the two, if validation pairs with answers say that it is better.
    It happens by itself when a run is over. Ctrl-C
    gives it up: nothing has changed then, and it can be begun anew.
    """
    try:
        last = run(_personalise(session, model, local_epochs or 0))
    except KeyboardInterrupt:
        raise CommandError(
            "given up; questions are answered as before",
            f"`{_again(model)}` begins anew",
            exit_code=Exit.INTERRUPTED,
        ) from None
    session.result(as_plain(last), lambda console: _show(console, last))


def _again(model: str) -> str:
    return "fedctl personalise" + (f" --model {model}" if model != MODELS[0] else "")


async def _personalise(session: Session, model: str, local_epochs: int) -> PersonaliseProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from proto.control_pb2 import PersonaliseProgress, PersonaliseRequest

    bars = Progress(
        TextColumn("passes over the pairs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=session.notes,
        transient=True,
        disable=session.json or not session.notes.is_terminal,
    )
    last = PersonaliseProgress()
    async with connected(socket_path(session)) as daemon:
        with bars:
            bar = bars.add_task("", total=None)
            request = PersonaliseRequest(local_epochs=local_epochs, model=model)
            async for last in daemon.Personalise(request):
                doing = f"loss {last.loss:.4f}" if math.isfinite(last.loss) else ""
                if last.answers_to_write:
                    written = f"answer {last.answers_written + 1} of {last.answers_to_write}"
                    doing = f"{doing}; judging, {written}"
                bars.update(bar, completed=last.epoch, total=last.epochs, description=doing)
    if not last.done:
        raise CommandError(
            "the daemon stopped telling before it was done",
            f"`fedctl status` shows how it is; `{_again(model)}` begins anew",
            exit_code=Exit.UNREACHABLE,
        )
    return last


def _show(console: Console, last: PersonaliseProgress) -> None:
    grid = facts()
    rows = [
        ("model version", short(last.model_digest.hex())),
        ("learned from", f"{last.pairs} pairs"),
        ("judged by", _judged(last)),
        ("answers with", last.answers_with),
        *((peer.site, _exchanged(peer)) for peer in last.peers),
    ]
    if last.steps_unanswered:
        note = f"{last.steps_unanswered} of {last.steps} steps had local negatives only"
        rows.append(("without peers", note))
    rows.append(("took", duration(last.seconds)))
    for name, value in rows:
        grid.add_row(plain_text(name), plain_text(value))
    console.print(grid)


def _judged(last: PersonaliseProgress) -> str:
    if last.base_perplexity:
        own = f"{last.own_perplexity:.2f}" if last.own_perplexity else "none was better"
        return (
            f"{last.pairs_judged} validation pairs with answers, {last.answers_written} of them "
            f"written: perplexity {last.base_perplexity:.2f} of the base model, "
            f"{last.shared_perplexity:.2f} of the version, of the best mixture {own}"
        )
    if not last.pairs_judged:
        return "nothing: too few pairs to keep some apart"
    if last.judged_in_turn:
        return (
            f"{last.pairs_judged} training pairs: MRR {last.mrr_before:.3f} with the shared "
            f"version, which has learned from them, {last.mrr_after:.3f} with what this site "
            "learns alone from others of them"
        )
    return (
        f"{last.pairs_judged} pairs kept apart: MRR {last.mrr_before:.3f} with the shared "
        f"version, {last.mrr_after:.3f} with this"
    )


def _exchanged(peer: Exchanged) -> str:
    text = f"answered {peer.answered} of {peer.asked} queries with {peer.embeddings} embeddings"
    return f"{text}; {visible(peer.reason)}" if peer.reason else text
