"""fedctl eval: the site's own held-out pairs, asked of rankings, their history, and answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    duration,
    facts,
    plain_text,
    remarks,
    short,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        AnswerFigure,
        EvaluateAnswersProgress,
        EvaluateAnswersReply,
        EvaluateProgress,
        EvaluateReply,
        LearningCurveReply,
    )
    from proto.control_pb2_grpc import ControlAsyncStub

topic = typer.Typer()

SHOWN = ("hit@1", "mrr@10", "recall@10", "ndcg@10")
SHOWN_OF_ANSWERS = (
    *("answered", "cites-p", "cites-r", "em", "token-f1", "rouge-l-p", "rouge-l-r", "rouge-l-f"),
    *("bleu", "chrf", "chrf++", "meteor", "meteor-stem", "cer", "wer"),
)
_SHOWN_OF_LABELS = ("cites-r", "token-f1", "rouge-l-f")
# What the daemon names otherwise than people do; the rest is printed as it comes.
_CALLED = {"bm25": "BM25", "dense": "this version"}
_PLACES = {"avg_rank": 2}  # a rank has digits before the point
_STEPS = {
    "index": "waiting for the index",
    "encoder": "passages embedded by the untrained encoder",
    "cross-encoder": "questions ranked by the cross-encoder",
    "questions": "asking",
    "answers": "questions answered and scored",
}
_BARS = "▁▂▃▄▅▆▇█"

Metric = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Show this metric, e.g. map, em, avg_rank, precision@5; may be repeated; "
        "of answers e.g. rouge-1-f; 'all' shows every one.",
    ),
]


@topic.command("eval")
@command
def evaluate(
    session: Session,
    split: Annotated[
        Literal["test", "valid", "train"] | None,
        typer.Option(help="Which pairs to ask. Default: test if there are any, else valid."),
    ] = None,
    metric: Metric = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="How each committed version did on the validation pairs; and with what is this "
            "site's own, where it answers with that.",
        ),
    ] = False,
    answers: Annotated[
        bool,
        typer.Option(
            "--answers",
            help="Judge answers instead: those to pairs that say a right one, each asked as "
            "`fedctl ask` asks it.",
        ),
    ] = False,
) -> None:
    """Judge retrieval on this site's own pairs, beside words alone and the untrained encoder.

    Every figure has its 95 % bootstrap interval; differences are paired by question. With
    adapt = "lora" or "full" the first time embeds every passage by the untrained encoder:
    Ctrl-C ends it, and the next time goes on from there.
    """
    if answers:
        _show_answers(session, split, metric, history=history)
        return
    if history:
        _show_history(session, split, metric)
        return
    try:
        reply = run(_evaluate(session, split or ""))
    except KeyboardInterrupt:
        raise CommandError(
            "given up; nothing was judged",
            "`fedctl eval` begins anew; passages that were embedded need not be again",
            exit_code=Exit.INTERRUPTED,
        ) from None
    wanted = _wanted(metric, [figure.metric for figure in reply.figures])
    plain = as_plain(reply)
    if metric:
        for name in ("figures", "over_vanilla"):
            plain[name] = [figure for figure in plain[name] if figure["metric"] in wanted]
    session.result(plain, lambda console: _show(console, reply, wanted))


@asynccontextmanager
async def _asking(
    session: Session,
) -> AsyncIterator[
    tuple[ControlAsyncStub, Callable[[EvaluateProgress | EvaluateAnswersProgress], None]]
]:
    """The daemon, and what shows the steps that it tells."""
    from rich.progress import BarColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        console=session.notes,
        transient=True,
        disable=session.json or not session.notes.is_terminal,
    )
    bar = bars.add_task("", total=None, count="")

    async with connected(socket_path(session)) as daemon, remarks(session) as now_at:

        def watch(step: EvaluateProgress | EvaluateAnswersProgress) -> None:
            count = f"{step.done}/{step.total}" if step.total else ""
            total = step.total or None
            text = _STEPS.get(step.step, step.step)
            bars.update(bar, description=text, completed=step.done, total=total, count=count)
            now_at(f"{text} {count}".strip())

        with bars:
            yield daemon, watch


async def _evaluate(session: Session, split: str) -> EvaluateReply:
    async with _asking(session) as (daemon, watch):
        return await judge(daemon, split, watch)


async def judge(
    daemon: ControlAsyncStub,
    split: str = "test",
    watch: Callable[[EvaluateProgress], None] = lambda _: None,
) -> EvaluateReply:
    """Have the daemon evaluate the version it answers with; "": on test, or else valid.

    It may take an hour the first time; ``watch`` sees each step. To cancel it ends it.
    """
    from proto.control_pb2 import EvaluateProgress, EvaluateRequest

    step = EvaluateProgress()
    async for step in daemon.Evaluate(EvaluateRequest(split=split)):
        watch(step)
    if not step.HasField("result"):
        raise _broken_off()
    return step.result


def _broken_off() -> CommandError:
    return CommandError(
        "the daemon stopped telling before it was done",
        "`fedctl status` shows how it is; `fedctl eval` begins anew",
        exit_code=Exit.UNREACHABLE,
    )


def _wanted(
    wanted: Sequence[str] | None, known: Sequence[str], shown: Sequence[str] = SHOWN
) -> list[str]:
    """The metrics to show, of those there are; raises CommandError for one that isn't."""
    names = list(dict.fromkeys(known))
    if not wanted:
        return [name for name in shown if name in names]
    if "all" in wanted:
        return names
    for name in wanted:
        if name not in names:
            raise CommandError(
                f"there is no metric {name!r}",
                f"Use 'all' or some of: {', '.join(names)}",
                exit_code=Exit.USAGE,
            )
    return list(dict.fromkeys(wanted))


def _show(console: Console, reply: EvaluateReply, wanted: Sequence[str]) -> None:
    grid = facts()
    learned = " (which is learned from: no measure of what was learned)"
    for name, value in (
        ("questions", f"{reply.questions}, of split {reply.split}"),
        ("model version", short(reply.model_digest.hex())),
        ("took", duration(reply.seconds)),
    ):
        grid.add_row(name, plain_text(value + (learned if value.endswith("train") else "")))
    for fact in reply.facts:  # of this site's own, which "this version" and "fused" answer with
        grid.add_row(plain_text(fact.name), plain_text(fact.value))
    console.print(grid)
    console.print(_figures_table(reply, wanted))
    how = f"chosen on {reply.weighed_by} pairs of split valid" if reply.weighed_by else "the usual"
    anew = any(figure.ranking == "cross-encoder" for figure in reply.figures)
    console.print(
        f"vanilla: the encoder before training; fused: {'' if anew else 'what a question meets, '}"
        f"where words add up to {reply.words_weight:g} to a cosine and a title up to "
        f"{reply.title_weight:g} ({how})"
        f"{'; cross-encoder: what a question meets, its best passages ranked anew' * anew}."
    )
    if reply.fell_back:
        left = f"the cross-encoder left out {reply.fell_back} of {reply.questions} questions"
        console.print(
            plain_text(f"{left}, which count as fused has them: {reply.fell_back_because}"),
            soft_wrap=True,
        )


def _figures_table(reply: EvaluateReply, wanted: Sequence[str]) -> Table:
    over = {(f.metric, f.ranking): f for f in reply.over_vanilla}
    table = columns("metric", "ranking", ">mean", "95 %", ">to vanilla", "95 %")
    for metric in wanted:
        first, places = True, _PLACES.get(metric, 3)
        for f in reply.figures:
            if f.metric != metric:
                continue
            gain = over.get((metric, f.ranking))
            table.add_row(
                metric if first else "",
                _CALLED.get(f.ranking, f.ranking),
                f"{f.mean:.{places}f}",
                f"{f.low:.{places}f}–{f.high:.{places}f}",
                f"{gain.mean:+.{places}f}" if gain else "",
                f"{gain.low:+.{places}f} to {gain.high:+.{places}f}" if gain else "",
            )
            first = False
    return table


# ---- answers --------------------------------------------------------------------------


def _show_answers(
    session: Session, split: str | None, metric: Sequence[str] | None, *, history: bool
) -> None:
    if history:
        raise CommandError(
            "no history is kept of answers",
            "Leave out --history or --answers",
            exit_code=Exit.USAGE,
        )
    try:
        reply = run(_evaluate_answers(session, split or ""))
    except KeyboardInterrupt:
        raise CommandError(
            "given up; nothing was judged",
            "`fedctl eval --answers` begins anew",
            exit_code=Exit.INTERRUPTED,
        ) from None
    wanted = _wanted(metric, [figure.metric for figure in reply.figures], SHOWN_OF_ANSWERS)
    plain = as_plain(reply)
    if metric:
        for some in (plain, *plain["by_label"]):
            some["figures"] = [one for one in some["figures"] if one["metric"] in wanted]
    of_labels = wanted if metric else [name for name in _SHOWN_OF_LABELS if name in wanted]
    session.result(plain, lambda console: _answers_shown(console, reply, wanted, of_labels))


async def _evaluate_answers(session: Session, split: str) -> EvaluateAnswersReply:
    from proto.control_pb2 import EvaluateAnswersProgress, EvaluateAnswersRequest

    async with _asking(session) as (daemon, watch):
        step = EvaluateAnswersProgress()
        async for step in daemon.EvaluateAnswers(EvaluateAnswersRequest(split=split)):
            watch(step)
    if not step.HasField("result"):
        raise _broken_off()
    return step.result


def _answers_shown(
    console: Console, reply: EvaluateAnswersReply, wanted: Sequence[str], of_labels: Sequence[str]
) -> None:
    grid = facts()
    learned = " (which is learned from: no measure of what was learned)"
    for name, value in (
        (
            "questions",
            f"{reply.questions}, of split {reply.split}{learned * (reply.split == 'train')}",
        ),
        ("left out", f"{reply.without_answer}, whose pairs say no right answer"),
        ("no answer", f"{reply.unanswered}, which count as answered with nothing"),
        ("generator", reply.generator),
        ("model version", short(reply.model_digest.hex())),
        ("took", duration(reply.seconds)),
    ):
        grid.add_row(name, plain_text(value))
    console.print(grid)
    table = columns("metric", ">mean", "95 %", "")
    for name in wanted:
        for f in reply.figures:
            if f.metric == name:
                table.add_row(name, *_with_interval(f), "less is better" * f.lower_is_better)
    console.print(table)
    if reply.by_label:
        console.print(_labels_table(reply, of_labels))
    for cause in dict.fromkeys(one.cause for one in reply.missing):
        names = ", ".join(one.metric for one in reply.missing if one.cause == cause)
        console.print(plain_text(f"Without {names}: {cause}."), soft_wrap=True)


def _with_interval(f: AnswerFigure) -> tuple[str, str]:
    return f"{f.mean:.3f}", f"{f.low:.3f}–{f.high:.3f}"


def _labels_table(reply: EvaluateAnswersReply, wanted: Sequence[str]) -> Table:
    """A line for each figure of each label that enough questions have."""
    table = columns("label", "value", ">questions", "metric", ">mean", "95 %")
    for one in reply.by_label:
        head = (one.label, plain_text(one.value), str(one.questions))
        for name in wanted:
            for f in one.figures:
                if f.metric == name:
                    table.add_row(*head, name, *_with_interval(f))
                    head = ("", plain_text(""), "")
    return table


# ---- history --------------------------------------------------------------------------


def _show_history(session: Session, split: str | None, metric: Sequence[str] | None) -> None:
    if split not in (None, "valid"):
        raise CommandError(
            "the history is of the validation pairs", "Leave out --split", exit_code=Exit.USAGE
        )
    reply = run(_history(session))
    wanted = _wanted(metric, [point.metric for point in reply.points]) if reply.points else []
    plain = as_plain(reply)
    if metric:
        plain["points"] = [point for point in plain["points"] if point["metric"] in wanted]
    session.result(plain, lambda console: _history_table(console, reply, wanted))


async def _history(session: Session) -> LearningCurveReply:
    from proto.control_pb2 import LearningCurveRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.LearningCurve(LearningCurveRequest(), timeout=ANSWER_WITHIN_S)


def _history_table(console: Console, reply: LearningCurveReply, wanted: Sequence[str]) -> None:
    rows: dict[tuple[int, bytes, str], dict[str, Any]] = {}
    for point in reply.points:
        key = (point.round, point.model_digest, point.kind)
        row = rows.setdefault(key, {"asked": point.questions})
        row[point.metric] = point.value
    if rows:
        names = (f">{name}" for name in wanted)
        table = columns(">round", "version", "kind", ">questions", *names)
        for (round_, digest, kind), row in rows.items():
            cells = (f"{row[name]:.3f}" if name in row else "" for name in wanted)
            row_cells = (str(round_), short(digest.hex()), _kind(kind), str(row["asked"]))
            table.add_row(*row_cells, *cells)
        console.print(table)
        for line in _curves(rows, wanted):
            console.print(line)
    if reply.missing:
        console.print(plain_text(f"The newest version: {reply.missing}."), soft_wrap=True)


def _curves(
    rows: dict[tuple[int, bytes, str], dict[str, Any]], wanted: Sequence[str]
) -> Iterator[str]:
    """For each metric a line of each kind, versions below one another."""
    versions = list(dict.fromkeys((round_, digest) for round_, digest, _ in rows))
    for name in wanted:
        for kind in dict.fromkeys(kind for _, _, kind in rows):
            line = [rows.get((*version, kind), {}).get(name, math.nan) for version in versions]
            known = [value for value in line if math.isfinite(value)]
            if known:
                bars = f"{name:>12}  {_kind(kind):<13}  {sparkline(line)}"
                yield f"{bars}  {min(known):.3f} to {max(known):.3f}"


def _kind(kind: str) -> str:
    return kind or "not recorded"


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of bars, the least lowest; a space where one is unknown."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    steps = len(_BARS) - 1
    return "".join(
        _BARS[round(steps * (value - low) / (high - low)) if high > low else 0]
        if math.isfinite(value)
        else " "
        for value in values
    )
