"""What `fedctl learning` shows: how this site learns, and the tier of its personal layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from config.recipes import RECIPES
from daemon.personal.personal import embedded_by, report_of
from proto import control_pb2 as control

if TYPE_CHECKING:
    from daemon.control.service import Surroundings


def learning_reply(around: Surroundings) -> control.LearningReply:
    """Reads this site's personal files, so not on the event loop.

    Raises LearningError when one of them is damaged.
    """
    run = around.node.protocol.run
    tables = {
        "retriever": around.retriever.model_dump(),
        "training": around.training.model_dump(),
        "learning": around.learning.model_dump(),
    }
    recipe = RECIPES[around.learning.recipe].settings
    reply = control.LearningReply(
        recipe=around.learning.recipe,
        choices=[
            control.Choice(axis=axis, value=str(tables[table][axis]), in_recipe=str(said))
            for table, axes in recipe.items()
            for axis, said in axes.items()
        ],
        plan=run.plan if run is not None else None,
        shared_values=around.node.shapes.total,
        adaptation_index=math.nan,
        own_share=math.nan,
    )
    collection, personal = around.node.collection, around.retriever.personal
    served = collection.served_digest
    kept = around.personal.serving(served) if served else None
    embedded = embedded_by(personal, around.personal.folder, served)
    if kept is not None and collection.indexed_by(embedded):
        reply.personal_digest = served
        reply.own_share = float(kept.facts.get("share", math.nan))
        reply.untrained = bool(kept.facts.get("untrained", False))
        reply.carried = bool(kept.facts.get("carried", False))
    report = None
    if around.retriever.personal == "tiered_head":
        report = report_of(around.personal.newest())
    if report is not None:
        reply.tier, reply.decision, reply.reason = report.tier, report.decision, report.reason
        reply.adaptation_index = math.nan if report.api is None else report.api
    return reply
