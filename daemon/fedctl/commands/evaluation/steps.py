"""What `fedctl eval` has in common: the daemon at work, and which figures are wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from daemon.fedctl.terminal.connection import connected, socket_path
from daemon.fedctl.terminal.output import CommandError, Exit, Session, remarks

if TYPE_CHECKING:
    from proto.control_pb2 import EvaluateAnswersProgress, EvaluateProgress
    from proto.control_pb2_grpc import ControlAsyncStub

_STEPS = {
    "index": "waiting for the index",
    "encoder": "passages embedded by the untrained encoder",
    "cross-encoder": "questions ranked by the cross-encoder",
    "questions": "asking",
    "abstention": "looking for what is there for questions",
    "answers": "questions answered and scored",
}
LEARNED = " (which is learned from: no measure of what was learned)"


@asynccontextmanager
async def asking(
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


def broken_off() -> CommandError:
    """Where no result came, and no refusal."""
    return CommandError(
        "the daemon stopped telling before it was done",
        "`fedctl status` shows how it is; `fedctl eval` begins anew",
        exit_code=Exit.UNREACHABLE,
    )


def wanted_of(
    wanted: Sequence[str] | None, known: Sequence[str], shown: Sequence[str]
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
