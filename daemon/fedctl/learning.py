"""fedctl learning: what was chosen on each axis, and what became of the personal layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import Session, as_plain, short, visible
from daemon.fedctl.personalising import UNTRAINED
from daemon.fedctl.show import facts

if TYPE_CHECKING:
    from rich.table import Table

    from proto.control_pb2 import LearningReply

ANSWER_WITHIN_S = 30.0


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
    for name, value in _own(reply):
        grid.add_row(name, value)
    for choice in reply.choices:
        differs = choice.value != choice.in_recipe
        otherwise = f"  (the recipe says {choice.in_recipe})" if differs else ""
        grid.add_row(choice.axis.replace("_", " "), f"{choice.value}{otherwise}")
    return grid


def _own(reply: LearningReply) -> Iterator[tuple[str, str]]:
    """What this site keeps to itself, and why it is that."""
    personal = next(choice.value for choice in reply.choices if choice.axis == "personal")
    fitted = f"for version {short(reply.personal_digest.hex())}"
    if personal == "tiered_head" and reply.tier:
        index = reply.adaptation_index
        known = f", adaptation index {index:.4f}" if math.isfinite(index) else ""
        yield "personal layer", f"{reply.tier} ({reply.decision}{known})"
        yield "", visible(reply.reason)
    elif personal == "tiered_head":
        yield "personal layer", "none until this site has trained for a round"
    elif personal == "none":
        return
    elif not reply.personal_digest:
        yield "this site's own", "nothing yet for the version that answers: fedctl personalise"
    elif personal == "mixture":
        share = f"{reply.own_share:.0%} of what this site learned alone"
        yield "mixture", f"{UNTRAINED if reply.untrained else share}, {fitted}"
        if reply.carried:
            yield "", "as found for an earlier version; found anew when the run is over"
    else:
        yield "query encoder", f"this site's own, {fitted}"
