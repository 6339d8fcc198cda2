"""fedctl eval --answers: how near answers are to the right ones, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.fedctl.commands.evaluation.saved import save
from daemon.fedctl.commands.evaluation.steps import LEARNED, asking, broken_off, wanted_of
from daemon.fedctl.terminal.connection import connected, run, socket_path
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
from daemon.fedctl.transfer.originals import free_place

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        AbstentionFigures,
        AnswerFigure,
        EvaluateAnswersReply,
        EvaluateAnswersRequest,
        JudgedAnswer,
    )

SHOWN = (
    *("answered", "cites-p", "cites-r", "em", "token-f1", "rouge-l-p", "rouge-l-r", "rouge-l-f"),
    *("bleu", "chrf", "chrf++", "meteor", "meteor-stem", "cer", "wer"),
    *("ppl-reference", "ppl-written"),
)
_SHOWN_OF_LABELS = ("cites-r", "token-f1", "rouge-l-f", "ppl-reference", "ppl-written")
_SO_FAR_WITHIN_S = 120.0  # one question may still be under way


def evaluate_answers(
    session: Session,
    split: str,
    metric: Sequence[str] | None,
    generators: Sequence[str],
    out: Path | None,
    *,
    force: bool,
) -> Exit:
    """Judge answers; after Ctrl-C those that there are, with exit code 3."""
    from proto.control_pb2 import EvaluateAnswersRequest

    place = None if out is None else free_place(out, replace=force)
    answers: list[JudgedAnswer] = []
    asked = EvaluateAnswersRequest(
        split=split, tell_answers=place is not None, generators=generators
    )
    try:
        reply = run(_judged(session, asked, answers.append))
    except KeyboardInterrupt:
        reply = _so_far(session)
    if place is not None:
        save(place, as_plain(reply), map(as_plain, answers), replace=force)
    replies = (reply, *reply.compared)
    known = [figure.metric for one in replies for figure in one.figures]
    wanted = wanted_of(metric, known, SHOWN)
    plain = as_plain(reply)
    if metric:
        of_labels = [one for each in (plain, *plain["compared"]) for one in each["by_label"]]
        for some in (plain, *plain["compared"], *of_labels):
            for name in some.keys() & {"figures", "over_first"}:
                some[name] = [one for one in some[name] if one["metric"] in wanted]
    labelled = wanted if metric else [name for name in _SHOWN_OF_LABELS if name in wanted]
    session.result(plain, lambda console: _all_shown(console, reply, wanted, labelled))
    return Exit.PARTLY if any(one.partial or one.failed for one in replies) else Exit.OK


def evaluate_abstention(session: Session, split: str) -> Exit:
    """Judge only which questions are refused; for that no pair needs to say a right answer."""
    from proto.control_pb2 import EvaluateAnswersRequest

    asked = EvaluateAnswersRequest(split=split, only_abstention=True)
    judged = run(_judged(session, asked)).abstention
    if judged.missing:
        raise CommandError(f"it can't be judged what is refused: {judged.missing}")
    session.result(as_plain(judged), lambda console: _abstention_shown(console, judged))
    return Exit.OK


def _so_far(session: Session) -> EvaluateAnswersReply:
    """What was judged until Ctrl-C; CommandError where that is nothing."""
    from proto.control_pb2 import EvaluateAnswersRequest

    async def told() -> EvaluateAnswersReply:
        async with connected(socket_path(session)) as daemon:
            asked = EvaluateAnswersRequest(so_far=True)
            async for step in daemon.EvaluateAnswers(asked, timeout=_SO_FAR_WITHIN_S):
                if step.HasField("result"):
                    return step.result
        raise broken_off()

    try:
        return run(told())
    except (CommandError, KeyboardInterrupt) as error:
        cause = error.cause if isinstance(error, CommandError) else "you did not wait for it"
        raise CommandError(
            f"given up; nothing was judged: {cause}",
            "`fedctl eval --answers` goes on from what was asked",
            exit_code=Exit.INTERRUPTED,
        ) from None


async def _judged(
    session: Session,
    asked: EvaluateAnswersRequest,
    keep: Callable[[JudgedAnswer], object] = lambda _: None,
) -> EvaluateAnswersReply:
    from proto.control_pb2 import EvaluateAnswersProgress

    async with asking(session) as (daemon, watch):
        step = EvaluateAnswersProgress()
        async for step in daemon.EvaluateAnswers(asked):
            if step.HasField("answer"):
                keep(step.answer)
            else:
                watch(step)
    if not step.HasField("result"):
        raise broken_off()
    return step.result


def _all_shown(
    console: Console, reply: EvaluateAnswersReply, wanted: Sequence[str], of_labels: Sequence[str]
) -> None:
    _answers_shown(console, reply, wanted, of_labels)
    for one in reply.compared:
        console.print()
        _answers_shown(console, one, wanted, of_labels)
        if not one.over_first:
            continue
        console.print(plain_text(f"To {_writer(reply)}, paired by question:"), soft_wrap=True)
        table = columns("metric", ">difference", "95 %", "")
        for name in wanted:
            for f in one.over_first:
                if f.metric == name:
                    table.add_row(name, *_difference(f))
        console.print(table)


def _difference(f: AnswerFigure) -> tuple[str, str, str]:
    remark = "less is better" * f.lower_is_better
    if f.metric.startswith("ppl-"):
        return f"×{f.mean:.3f}", f"×{f.low:.3f} to ×{f.high:.3f}", remark
    return f"{f.mean:+.3f}", f"{f.low:+.3f} to {f.high:+.3f}", remark


def _writer(reply: EvaluateAnswersReply) -> str:
    """The generator, and which version of it."""
    if reply.generator_digest:
        version = short(reply.generator_digest.hex())
        said = f"{reply.generator}, version {version} of round {reply.generator_round}"
        share = reply.generator_share
        return f"{said}, {share:.0%} of this site's own half" if share else said
    if reply.generator == "federated":
        return "federated, the base model (no version does better here)"
    return "base model" if reply.generator == "base" else reply.generator


def _answers_shown(
    console: Console, reply: EvaluateAnswersReply, wanted: Sequence[str], of_labels: Sequence[str]
) -> None:
    failed = sum(one.questions for one in reply.failed)
    over = f"{reply.questions}, of split {reply.split}{LEARNED * (reply.split == 'train')}"
    if reply.questions < reply.pairs:
        over = f"{reply.questions} of the {reply.pairs} of split {reply.split}"
    grid = facts()
    for name, value in (
        ("questions", over),
        *([("PARTIAL", f"{reply.partial}: the rest was not asked")] if reply.partial else []),
        *([("FAILED", f"{failed}, which no figure is over")] if failed else []),
        *([("asked before", f"{reply.asked_before}")] if reply.asked_before else []),
        ("left out", f"{reply.without_answer}, whose pairs say no right answer"),
        ("no answer", f"{reply.unanswered}, which count as answered with nothing"),
        ("generator", _writer(reply)),
        *(
            ("NOT ITS OWN", f"{one.questions} answers were extracted in its place: {one.cause}")
            for one in reply.stood_in
        ),
        ("model version", short(reply.model_digest.hex())),
        ("took", duration(reply.seconds)),
    ):
        grid.add_row(name, plain_text(value))
    console.print(grid)
    table = columns("metric", ">mean", "95 %", "")
    for name in wanted:
        for f in reply.figures:
            if f.metric == name:
                fewer = f", over {f.questions}" if 0 < f.questions < reply.questions else ""
                remark = "less is better" * f.lower_is_better + fewer
                table.add_row(name, *_with_interval(f), remark.strip(", "))
    console.print(table)
    if reply.by_label:
        console.print(_labels_table(reply, of_labels))
    if reply.HasField("abstention"):
        _abstention_shown(console, reply.abstention)
    for cause in dict.fromkeys(one.cause for one in reply.missing):
        names = ", ".join(one.metric for one in reply.missing if one.cause == cause)
        console.print(plain_text(f"Without {names}: {cause}."), soft_wrap=True)
    for one in reply.failed:
        console.print(plain_text(f"Failed: {one.questions}, {one.cause}"), soft_wrap=True)
        for question in one.first:
            console.print(plain_text(f"  {question}"), soft_wrap=True)
    if reply.partial or failed:
        text = "`fedctl eval --answers` asks the rest, until fedd is restarted."
        console.print(plain_text(text), soft_wrap=True)


def _abstention_shown(console: Console, judged: AbstentionFigures) -> None:
    """What is refused, and by which threshold that is."""
    by = f"{judged.fitted_on} validation pairs" if judged.fitted_on else "general questions"
    known = judged.threshold == judged.threshold
    console.print(
        plain_text(
            f"Refused is a question with evidence below {judged.threshold:.3f}, found by {by}."
            if known
            else "No question is refused (retrieval.lost_answers is 0, or too few pairs allow it)."
        ),
        soft_wrap=True,
    )
    if judged.missing:
        console.print(plain_text(f"How well, is not known: {judged.missing}."), soft_wrap=True)
        return
    table = columns("refusals", ">mean", "95 %", "")
    for f in judged.figures:
        table.add_row(f.metric, *_with_interval(f), "less is better" * f.lower_is_better)
    console.print(table)
    console.print(
        plain_text(
            f"Of {judged.questions} questions of split {judged.split} that this was not found by, "
            "each as it is and without the documents that answer it."
        ),
        soft_wrap=True,
    )


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
