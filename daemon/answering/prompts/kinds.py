"""Which prompt suits a question, where the settings leave that open (``prompt = "auto"``).

FedE4RAG lets the person who asks say the type (section V-A: domain, metric, novel); where nobody
does, the rule below does. The first line that has something of the question decides: it reads
words, English and German, and knows nothing of what is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from config.kinds import PromptKind

# For which questions each prompt is, as people are told.
FOR: Final[Mapping[PromptKind, str]] = {
    "general": "any question, answered in whole sentences",
    "domain": "yes or no, and the fact that decides it (FedE4RAG: domain-relevant)",
    "metric": "one figure, computed if need be (FedE4RAG: metrics-based)",
    "novel": "the least that answers, from several places (FedE4RAG: novel-generated)",
    "medical": "medical ones, in detail with all restrictions (pFedRAG)",
}
AUTO: Final = "auto"
OTHERWISE: Final[PromptKind] = "general"


@dataclass(frozen=True)
class Rule:
    """Questions that have what it ``says`` are of that kind."""

    kind: PromptKind
    says: str
    pattern: re.Pattern[str]


def _has(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(words.split())})", re.IGNORECASE)


def _begins(words: str) -> re.Pattern[str]:
    return re.compile(rf"\A\s*({'|'.join(words.split())})\b", re.IGNORECASE)


RULES: Final = (
    Rule(
        "medical",
        "speaks of illness or treatment",
        _has(
            "symptom disease syndrom diagnos treatment therap medicin medicat dosage dose patient "
            "surger vaccin infection inherited krank beschwerd behandlung dosis arznei medikament"
        ),
    ),
    Rule(
        "metric",
        "asks for a number",
        re.compile(
            r"\b(how (much|many|high|large)|wie (viel|viele|hoch|groß)|percent|prozent|ratio|margin"
            r"|total|average|growth rate|per (share|year|day)|calculate|compute|berechne)\b|[%$€£]",
            re.IGNORECASE,
        ),
    ),
    Rule(
        "domain",
        "begins so that yes or no answers it",
        _begins(
            "is are was were am do does did has have had can could may must should shall will would"
            " ist sind war waren hat haben kann können darf dürfen muss müssen soll sollen wird"
        ),
    ),
    Rule(
        "novel",
        "begins with a word that asks for one thing",
        _begins("who whose whom when where which wer wessen wem wann wo wohin welche[rsnm]?"),
    ),
)


def guessed(question: str) -> tuple[PromptKind, str]:
    """The kind, and why: what the question has of the rule."""
    for rule in RULES:
        if found := rule.pattern.search(question):
            return rule.kind, f"{rule.says}: {found[0].strip()!r}"
    return OTHERWISE, "no rule is about it"


def kind_of(said: str, question: str) -> str:
    """The prompt that is meant: what was said, or for "auto" what is guessed."""
    return guessed(question)[0] if said == AUTO else said
