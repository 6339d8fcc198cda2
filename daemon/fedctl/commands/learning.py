"""fedctl learning: what was chosen on each axis, and what became of the personal layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import Session, as_plain, facts, plain_text

if TYPE_CHECKING:
    from rich.table import Table

    from proto.control_pb2 import LearningReply

topic = typer.Typer()


@topic.command("learning")
@command
def learning(session: Session) -> None:
    """Show how this site learns: its recipe, every choice, and its personal layer."""
    reply = run(_learning(session))
    session.result(as_plain(reply), lambda console: console.print(_table(reply)))


async def _learning(session: Session) -> LearningReply:
    from proto.control_pb2 import LearningRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.Learning(LearningRequest(), timeout=ANSWER_WITHIN_S)


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
