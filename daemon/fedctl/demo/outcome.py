"""What the demo found out, as an object for machines and as tables for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.fedctl.output import byte_count, duration
from daemon.fedctl.show import columns, phases_table, plain_text, rounds_table

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import EvaluateReply, StatusReply


@dataclass
class SiteOutcome:
    """What a site had before and after, and what it exchanged for that."""

    id: str
    before: EvaluateReply
    after: EvaluateReply
    status: StatusReply


@dataclass
class Outcome:
    """What the demo found out."""

    sites: list[SiteOutcome] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of each step, in order
    work: Path | None = None  # where it was kept

    def plain(self) -> dict[str, Any]:
        """The JSON object: sites, rounds, answers, seconds."""
        return {
            "sites": [
                {
                    "id": site.id,
                    "before": _figures(site.before),
                    "after": _figures(site.after),
                    "questions": site.after.questions,
                    "bytes_sent": site.status.bytes_sent,
                    "bytes_received": site.status.bytes_received,
                }
                for site in self.sites
            ],
            "rounds": self.rounds,
            "answers": self.answers,
            "seconds_to_federation": self.seconds["federation"],
            "seconds_total": sum(self.seconds.values()),
            "seconds": self.seconds,
            "work": str(self.work) if self.work else None,
        }


def _figures(reply: EvaluateReply) -> dict[str, float]:
    return {"mrr_at_10": reply.mrr_at_10, "recall_at_10": reply.recall_at_10}


def show_outcome(console: Console, outcome: Outcome) -> None:
    """For people: answers, rounds, and the table of the sites, which comes last."""
    for answer in outcome.answers:
        console.print(plain_text(f"\n{answer['site']}: {answer['question']}"), style="bold")
        console.print(plain_text(answer["answer"]), soft_wrap=True)
        for citation in answer["citations"]:
            title = citation["title"] or citation["document_id"]
            console.print(
                plain_text(f"  [{citation['number']}] {title} ({citation['passage_id']})"),
                style="dim",
            )
    console.print()
    console.print(rounds_table(outcome.rounds))
    console.print(phases_table(outcome.rounds))
    table = columns(
        "site", ">Recall@10 before", ">after", ">MRR@10 before", ">after", ">sent", ">received"
    )
    for site in outcome.sites:
        table.add_row(
            site.id,
            f"{site.before.recall_at_10:.3f}",
            f"{site.after.recall_at_10:.3f}",
            f"{site.before.mrr_at_10:.3f}",
            f"{site.after.mrr_at_10:.3f}",
            byte_count(site.status.bytes_sent),
            byte_count(site.status.bytes_received),
        )
    console.print(table)
    plain = outcome.plain()
    console.print(
        f"{duration(plain['seconds_to_federation'])} to a federation, "
        f"{duration(plain['seconds_total'])} in all."
    )
    if outcome.work:
        console.print(plain_text(f"Kept in {outcome.work}"))
