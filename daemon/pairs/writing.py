"""Queries that a language model writes, and their answers: what it is asked, and what it replies.

A passage is a stranger's text and a reply is whatever the model makes of it, so a
reply is only ever read as lines of text, each a query or nothing; whether a query
is one is then tried (`round_trip`). An answer is read as text; whether its passage
says so is for who keeps it to check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from string import Template
from typing import Protocol

from daemon.library.contents import Passage
from daemon.library.readers.documents import MAX_ANSWER_BYTES
from daemon.pairs.made import Made, PairError, usable

# Two of different intent for a passage, as pFedRAG (appendix C) has them written.
QUERIES = 2
_LONGEST = 400  # characters of a query
_SHORTEST_WORDS = 3
_AROUND = "\"'“”‘’«»*_` \t"
_BULLET = re.compile(
    r"^\s*(?:[-–•*]\s+|\(?\d{1,2}[.):]\s*|(?:query|question|q)\s*\d*\s*[:.]\s*)+", re.IGNORECASE
)

_FRAME = Template(
    """You help people find documents. $who
Write exactly $count different questions that the passage below answers, one a line,
each on its own: name what you ask about instead of saying "it" or "the passage".
Do not answer them. Write nothing else.

Title: $title
Passage: $text

Questions:
"""
)
_ANSWER_FRAME = Template(
    """Answer the question from the passage below and from nothing else, in one to three whole
sentences, with its words and figures. Where it does not answer it, write "$says_no". Write
nothing else.

Title: $title
Passage: $text

Question: $question
Answer:
"""
)
_SAYS_NO = "Not answered"
_WHO = {
    "general": "The people who ask know the subject a little.",
    "medical": (
        "Patients, relatives and clinicians ask about conditions, causes, symptoms, "
        "examinations, treatments and outlook."
    ),
    "financial": (
        "Analysts ask about companies' filings: figures with their unit and year, "
        "what drove a change, risks, and terms of agreements."
    ),
    "legal": "Lawyers and clients ask about duties, rights, deadlines, exceptions and definitions.",
    "technical": "Engineers ask how a thing works, how it is set up, and why it fails.",
}
DOMAINS = tuple(_WHO)


class Writer(Protocol):
    """A language model, seen from here."""

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """A reply for each prompt, in order; PairError when the model can't be asked."""


def prompt(passage: Passage, *, domain: str = "general", count: int = QUERIES) -> str:
    """What a writer is asked for one passage; raises PairError for an unknown domain."""
    if domain not in _WHO:
        raise PairError(f"no prompt for the domain {domain!r}: use one of {', '.join(DOMAINS)}")
    return _FRAME.substitute(
        who=_WHO[domain],
        count=count,
        title=passage.title or "(none)",
        text=" ".join(passage.text.split()),
    )


def written(
    passages: Sequence[Passage],
    writer: Writer,
    *,
    domain: str = "general",
    count: int = QUERIES,
    told: Callable[[int, int], None] | None = None,
) -> list[Made]:
    """Queries for each passage, not yet tried and not yet merged; ``told(done, total)``."""
    prompts = [prompt(passage, domain=domain, count=count) for passage in passages]
    made: list[Made] = []
    replies = writer.write(prompts)
    for done, (passage, reply) in enumerate(zip(passages, replies, strict=True), start=1):
        for query in queries_of(reply, count):
            made.append(Made(query, (passage.embedding_text,), (passage.document_id,), "llm"))
        if told is not None:
            told(done, len(passages))
    return made


def queries_of(reply: str, count: int = QUERIES) -> list[str]:
    """Up to ``count`` queries out of a reply: one a line, without numbers, bullets and quotes."""
    queries: dict[str, None] = {}
    for line in reply.splitlines():
        text = _BULLET.sub("", line).strip(_AROUND)
        text = " ".join(text.split())
        if len(text.split()) >= _SHORTEST_WORDS and len(text) <= _LONGEST and usable(text):
            queries.setdefault(text)
    return list(queries)[:count]


def answer_prompt(passage: Passage, question: str) -> str:
    """What a writer is asked to have a question answered by its passage."""
    return _ANSWER_FRAME.substitute(
        says_no=_SAYS_NO,
        title=passage.title or "(none)",
        text=" ".join(passage.text.split()),
        question=" ".join(question.split()),
    )


def answer_of(reply: str) -> str:
    """The answer in a reply, on one line; "" where the passage gives none, or it is too long."""
    text = " ".join(reply.split())
    said = text.strip(_AROUND).removesuffix(".").casefold()
    too_long = len(text.encode(errors="replace")) > MAX_ANSWER_BYTES
    return "" if too_long or said == _SAYS_NO.casefold() else text
