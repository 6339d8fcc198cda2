"""fedctl eval: the site's own held-out pairs, asked of rankings, their history, and answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daemon.fedctl.commands.evaluation.answers import evaluate_abstention, evaluate_answers
from daemon.fedctl.commands.evaluation.rating import rate
from daemon.fedctl.commands.evaluation.steps import LEARNED, asking, broken_off, wanted_of
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
    short,
)
from proto import bounds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        EvaluateProgress,
        EvaluateReply,
        LearningCurveReply,
    )
    from proto.control_pb2_grpc import ControlAsyncStub

topic = typer.Typer()

SHOWN = ("hit@1", "mrr@10", "recall@10", "ndcg@10")
# What the daemon names otherwise than people do; the rest is printed as it comes.
_CALLED = {"bm25": "BM25", "dense": "this version"}
_PLACES = {"avg_rank": 2}  # a rank has digits before the point
_BARS = "▁▂▃▄▅▆▇█"

Metric = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Show this metric, e.g. map, em, avg_rank, precision@5; may be repeated; "
        "of answers e.g. rouge-1-f; 'all' shows every one.",
    ),
]


_Split = Annotated[
    Literal["test", "valid", "train"] | None,
    typer.Option(help="Which pairs to ask. Default: test if there are any, else valid."),
]
_History = Annotated[
    bool,
    typer.Option(
        "--history",
        help="How each committed version did on the validation pairs; and with what is this "
        "site's own, where it answers with that.",
    ),
]
_Answers = Annotated[
    bool,
    typer.Option(
        "--answers",
        help="Judge answers instead: those to pairs that say a right one, each asked as "
        "`fedctl ask` asks it. Ctrl-C shows the figures of those that were.",
    ),
]


def _checked_generators(values: list[str] | None) -> list[str] | None:
    rule = bounds.of("EvaluateAnswersRequest", "generators")
    for value in values or ():
        if not re.fullmatch(rule.pattern, value):
            raise typer.BadParameter(f"{value!r}; expected {rule.words}")
    return values


_Generators = Annotated[
    list[str] | None,
    typer.Option(
        "--generator",
        metavar="base|federated|ROUND",
        callback=_checked_generators,
        help="With --answers: who writes them, the site's own base model, the version that "
        "does best here, or that of a round. Given again, it is compared with the first on the "
        "same questions. Default: as the settings have it.",
    ),
]
_Abstention = Annotated[
    bool,
    typer.Option(
        "--abstention",
        help="Judge instead which questions are refused as not answered here; for that no "
        "pair needs to say a right answer.",
    ),
]
_Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --answers: keep each question with its answer in a file, for you alone.",
    ),
]
_Force = Annotated[
    bool, typer.Option("--force", help="With --save: in the place of a file that is there.")
]
_Rate = Annotated[
    list[Path] | None,
    typer.Option(
        "--rate",
        metavar="FILE",
        help="Rate answers that --save kept instead, of two such files or more, blind, at "
        "the terminal; no daemon is asked.",
    ),
]
_Ratings = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --rate: where scores are kept, of all raters."),
]
_Rater = Annotated[
    str, typer.Option(metavar="NAME", help="With --rate: who rates. Default: your user.")
]
_Results = Annotated[
    bool,
    typer.Option("--results", help="With --rate: show what came of it, and how raters agree."),
]


@topic.command("eval")
@command
def evaluate(
    session: Session,
    split: _Split = None,
    metric: Metric = None,
    history: _History = False,
    answers: _Answers = False,
    generator: _Generators = None,
    abstention: _Abstention = False,
    save: _Save = None,
    force: _Force = False,
    rate_files: _Rate = None,
    ratings: _Ratings = None,
    rater: _Rater = "",
    results: _Results = False,
) -> Exit | None:
    """Judge retrieval on this site's own pairs, beside words alone and the untrained encoder.

    Every figure has its 95 % bootstrap interval; differences are paired by question. With
    adapt = "lora" or "full" the first time embeds every passage by the untrained encoder:
    Ctrl-C ends it, and the next time goes on from there.
    """
    chosen = {
        "--history": history,
        "--answers": answers,
        "--abstention": abstention,
        "--rate": bool(rate_files),
    }
    _not_together([name for name, said in chosen.items() if said], save, generator or [])
    if rate_files:
        return rate(session, rate_files, ratings, rater, results=results)
    if answers:
        return evaluate_answers(session, split or "", metric, generator or [], save, force=force)
    if abstention:
        return evaluate_abstention(session, split or "")
    if history:
        _show_history(session, split, metric)
        return None
    try:
        reply = run(_evaluate(session, split or ""))
    except KeyboardInterrupt:
        raise CommandError(
            "given up; nothing was judged",
            "`fedctl eval` begins anew; passages that were embedded need not be again",
            exit_code=Exit.INTERRUPTED,
        ) from None
    wanted = wanted_of(metric, [figure.metric for figure in reply.figures], SHOWN)
    plain = as_plain(reply)
    if metric:
        for name in ("figures", "over_vanilla"):
            plain[name] = [figure for figure in plain[name] if figure["metric"] in wanted]
    session.result(plain, lambda console: _show(console, reply, wanted))
    return None


def _not_together(chosen: Sequence[str], save: Path | None, generators: Sequence[str]) -> None:
    if len(chosen) > 1:
        cause = f"{' and '.join(chosen)} are two different questions"
        raise CommandError(cause, "Give one of them", exit_code=Exit.USAGE)
    if save is not None and "--answers" not in chosen:
        cause = "there are no answers to save"
        raise CommandError(cause, "Give --answers, too", exit_code=Exit.USAGE)
    if generators and "--answers" not in chosen:
        cause = "there are no answers for --generator to write"
        raise CommandError(cause, "Give --answers, too", exit_code=Exit.USAGE)
    if save is not None and len(generators) > 1:
        cause = "a file keeps the answers of one generator"
        raise CommandError(cause, "Give --generator once with --save", exit_code=Exit.USAGE)


async def _evaluate(session: Session, split: str) -> EvaluateReply:
    async with asking(session) as (daemon, watch):
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
        raise broken_off()
    return step.result


def _show(console: Console, reply: EvaluateReply, wanted: Sequence[str]) -> None:
    grid = facts()
    for name, value in (
        ("questions", f"{reply.questions}, of split {reply.split}"),
        ("model version", short(reply.model_digest.hex())),
        ("took", duration(reply.seconds)),
    ):
        grid.add_row(name, plain_text(value + (LEARNED if value.endswith("train") else "")))
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


# ---- history --------------------------------------------------------------------------


def _show_history(session: Session, split: str | None, metric: Sequence[str] | None) -> None:
    if split not in (None, "valid"):
        raise CommandError(
            "the history is of the validation pairs", "Leave out --split", exit_code=Exit.USAGE
        )
    reply = run(_history(session))
    wanted = (
        wanted_of(metric, [point.metric for point in reply.points], SHOWN) if reply.points else []
    )
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
