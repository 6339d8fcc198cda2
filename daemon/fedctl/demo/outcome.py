"""What the demo shows and what it found out: for people, and as an object for machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.fedctl.demo.sites import HouseWord
from daemon.fedctl.terminal.output import as_plain, byte_count, columns, duration, facts, plain_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from proto.control_pb2 import AskReply, EvaluateReply, StatusReply

# Two answers beside one another are hard to read in longer lines.
WIDEST_ANSWERS = 100
_WORD = re.compile(r"\w+")


@dataclass
class SiteOutcome:
    """What a site had before and after, and what it exchanged for that."""

    id: str
    before: EvaluateReply
    after: EvaluateReply
    status: StatusReply


@dataclass(frozen=True)
class SiteAnswer:
    """One question to one site, answered before training and after it."""

    site: str
    question: str
    answered_in: frozenset[str]  # document ids; empty: not known
    before: AskReply
    after: AskReply

    def rank(self, reply: AskReply) -> int | None:
        """Where the first right passage stands among those retrieved, from 1; None: nowhere."""
        ranks = (
            n for n, one in enumerate(reply.passages, 1) if one.document_id in self.answered_in
        )
        return next(ranks, None)

    def plain(self, glossary: Sequence[HouseWord]) -> dict[str, Any]:
        """The JSON object; what stands outside ``before`` is the answer after training."""
        return {
            "site": self.site,
            "question": self.question,
            **self._plain(self.after),
            "before": self._plain(self.before),
            "house_words": {word.term: word.means for word in self.house_words(glossary)},
        }

    def _plain(self, reply: AskReply) -> dict[str, Any]:
        return {
            "answer": reply.answer,
            "citations": [as_plain(citation) for citation in reply.citations],
            "rank": self.rank(reply),
        }

    def house_words(self, glossary: Sequence[HouseWord]) -> list[HouseWord]:
        """Those that a stranger meets in the two answers or in the titles beneath them."""
        replies = (self.before, self.after)
        texts = [
            text for one in replies for text in (one.answer, *(c.title for c in one.citations))
        ]
        met = {word.lower() for text in texts for word in _WORD.findall(text)}
        return [word for word in glossary if word.forms & met]


@dataclass
class DemoOutcome:
    """What the demo found out."""

    sites: list[SiteOutcome] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    answers: list[SiteAnswer] = field(default_factory=list)
    glossary: Sequence[HouseWord] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # of each step, in order
    work: Path | None = None  # where it was kept
    opened: bool = False  # one of the sites can be asked, until somebody ends it

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
            "answers": [answer.plain(self.glossary) for answer in self.answers],
            "seconds_to_federation": self.seconds["federation"],
            "seconds_total": sum(self.seconds.values()),
            "seconds": self.seconds,
            "work": str(self.work) if self.work else None,
        }


def _figures(reply: EvaluateReply) -> dict[str, float]:
    return {"mrr_at_10": reply.mrr_at_10, "recall_at_10": reply.recall_at_10}


def opening(who: str, glossary: Sequence[HouseWord]) -> str:
    """Two lines that say to a stranger what is shown; ``who`` are the sites, in the plural."""
    shown = f"{who} train one search model together; no document or question leaves its site.\n"
    if not glossary:
        return shown + "Each is asked one question twice, before the training and after it."
    words = ", ".join(word.term for word in glossary[:3])
    return shown + (
        f"Handbooks use house words ({words} …) no public model knows; people ask in plain ones."
    )


def show_outcome(console: Console, outcome: DemoOutcome) -> None:
    """For people: answers before beside answers after, then the figures of the sites."""
    for answer in outcome.answers:
        _show_answer(console, answer, outcome.glossary)
    questions = sum(site.after.questions for site in outcome.sites)
    console.print(
        f"\n{questions} questions about documents that no site trained on. Found: the share whose "
        "right document is\namong the first ten documents (Recall@10). Rank: 1 if it always comes "
        "first, 0.5 if second (MRR@10)."
    )
    table = columns(
        "site", ">found before", ">after", ">rank before", ">after", ">sent", ">received"
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


def _show_answer(console: Console, answer: SiteAnswer, glossary: Sequence[HouseWord]) -> None:
    console.print(plain_text(f"\n{answer.site}: {answer.question}"), style="bold")
    console.print(_side_by_side(answer, min(console.width, WIDEST_ANSWERS)))
    explained = facts()
    for word in answer.house_words(glossary):
        explained.add_row(plain_text(f"  {word.term}"), plain_text(word.means))
    console.print(explained)


def _side_by_side(answer: SiteAnswer, width: int) -> Table:
    table = columns("before training", "after training")
    table.width = width
    for column in table.columns:
        column.ratio = 1
    replies = (answer.before, answer.after)
    table.add_row(*(plain_text(reply.answer) for reply in replies))
    table.add_row(*(_sources(reply) for reply in replies), style="dim")
    if answer.answered_in:
        table.add_row(*(plain_text(_verdict(answer, reply)) for reply in replies), style="bold")
    return table


def _sources(reply: AskReply) -> RenderableType:
    """One line a document: the marks of the sentences that were taken from it, and its title."""
    marks: dict[str, str] = {}
    titles: dict[str, str] = {}
    for citation in reply.citations:
        marks[citation.document_id] = f"{marks.get(citation.document_id, '')}[{citation.number}]"
        titles[citation.document_id] = citation.title or citation.document_id
    lines = [f"{marks[document]} {titles[document]}" for document in marks]
    text: RenderableType = plain_text("\n".join(lines))
    return text


def _verdict(answer: SiteAnswer, reply: AskReply) -> str:
    rank = answer.rank(reply)
    place = "not in" if rank is None else f"{_nth(rank)} of"
    return f"right document: {place} the {len(reply.passages)} passages"


def _nth(number: int) -> str:
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
