"""fedctl privacy: what this site's updates have told so far, and what more would cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import Session, as_plain, facts, plain_text

if TYPE_CHECKING:
    from rich.table import Table

    from proto.control_pb2 import PrivacyReply

topic = typer.Typer()


@topic.command("privacy")
@command
def privacy(
    session: Session,
    noise: Annotated[
        float | None,
        of_field(
            "PrivacyPlan",
            "noise_multiplier",
            help="Noise multiplier of the further rounds; default: the run's.",
        ),
    ] = None,
    rounds: Annotated[
        int, of_field("PrivacyRequest", "rounds", help="How many further rounds to reckon with.")
    ] = 1,
) -> None:
    """Show what this site's updates have told, what is left of its budget, and what more costs."""
    reply = run(_privacy(session, noise or 0.0, rounds))
    session.result(as_plain(reply), lambda console: console.print(_table(reply)))


async def _privacy(session: Session, noise: float, rounds: int) -> PrivacyReply:
    from proto.control_pb2 import PrivacyRequest

    async with connected(socket_path(session)) as daemon:
        request = PrivacyRequest(noise_multiplier=noise, rounds=rounds)
        return await daemon.Privacy(request, timeout=ANSWER_WITHIN_S)


def _table(reply: PrivacyReply) -> Table:
    grid = facts()
    budget = "none set (privacy.epsilon)"
    left = "no budget" if reply.least_multiplier else "no budget, nothing is refused"
    if not math.isnan(reply.epsilon_budget):
        budget, left = f"epsilon {reply.epsilon_budget:g}", f"epsilon {reply.epsilon_left:.4g}"
    for name, value in (
        *([("WARNING", reply.warning)] if reply.warning else []),
        ("unit", reply.unit),
        ("delta", f"{reply.delta:g}"),
        ("spent", f"epsilon {reply.epsilon_spent:.4g}"),
        ("budget", budget),
        ("left", left),
        ("updates with noise", f"{reply.updates_noised}{_last(reply)}"),
        ("updates without", _bare(reply.updates_bare)),
        ("further rounds", _further(reply)),
        ("least noise", _least(reply)),
    ):
        grid.add_row(name, plain_text(value))
    return grid


def _last(reply: PrivacyReply) -> str:
    if not reply.last_multiplier:
        return ""
    return f", the last of multiplier {reply.last_multiplier:.4g}; failed attempts count"


def _bare(updates: int) -> str:
    return f"{updates}: no epsilon bounds what they told" if updates else "0"


def _further(reply: PrivacyReply) -> str:
    if not reply.further_multiplier:
        return "no run with noise is known; fedctl privacy --noise 1"
    count = "1 more" if reply.further_rounds == 1 else f"{reply.further_rounds} more"
    declined = ""
    if not reply.further_fits:
        too_little = reply.further_multiplier < reply.least_multiplier < math.inf
        cause = "less noise than the least below" if too_little else "more than is left"
        declined = f": {cause}, they would be declined"
    return (
        f"{count} of multiplier {reply.further_multiplier:.4g} would cost "
        f"epsilon {reply.further_cost:.4g}{declined}"
    )


def _least(reply: PrivacyReply) -> str:
    if math.isinf(reply.least_multiplier):
        return "whatever the noise, another round exceeds the budget"
    if not reply.least_multiplier:
        return "none demanded"
    return f"multiplier {reply.least_multiplier:.4g} for one more round"
