"""What of a text an attacker has recovered: words, names, and how they are counted. Pure.

**Words** are runs of letters and digits in lower case; a passage is the set of its
distinct words, as in the literature on inverting embeddings (token F1).

**Names** are what identifies somebody or something, found by rule and not by a model:

- spans of two or more capitalised words within a sentence ("Alpha-1 Antitrypsin
  Deficiency"), small words such as *of* allowed inside; a sentence's first word is
  capitalised anyway and so never begins one;
- codes: a word with two capitals or with letters and digits ("CFTR", "IL-2", "T315I");
- dates, and numbers with a unit ("20 mg", "3.5 %", "6 months");
- the title of the passage's document, up to eight words: what it is about.

The rules are those of English. They take a heading that runs into its sentence for a
name, and overlook names of one plain word and all names in a language without capitals.
A name counts as recovered only if it was named exactly, letter case and spaces aside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

_MOST_TITLE_WORDS = 8
_LONGEST_NAME = 80  # characters
_LEAD = 8  # characters before a span that tell whether a sentence begins there
_WORD = re.compile(r"[^\W_]+")
_MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December"
    "|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
)
_DATE = re.compile(
    rf"\b(?:\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}"
    rf"|(?:\d{{1,2}}\s+)?(?:{_MONTHS})\.?\s+(?:\d{{1,2}},?\s+)?\d{{4}})\b"
)
_UNITS = (
    "mg|g|kg|mcg|µg|ng|ml|mL|l|L|dl|dL|mm|cm|m|km|mmHg|mmol|IU|kcal|Hz|kHz|MHz|kW|kWh|V|°C|°F|%"
    "|percent|seconds?|minutes?|hours?|days?|weeks?|months?|years?|pounds?|ounces?|inches|feet"
    "|miles?|dollars?|euros?|million|billion"
)
_QUANTITY = re.compile(
    rf"(?<![\w.,/])\d+(?:[.,/]\d+)*\s?(?:{_UNITS})(?!\w)|[$€£]\s?\d+(?:[.,]\d+)*"
)
_CODE = re.compile(
    r"(?<![\w-])(?=[\w-]*[^\W\d_])(?=[\w-]*(?:\d|[A-Z][\w-]*[A-Z]))[^\W_][\w-]*[^\W_]"
)
_CAPITALISED = r"[A-Z][^\W_]+(?:[-'’][^\W_]+)*"
_SPAN = re.compile(
    rf"{_CAPITALISED}(?: (?:(?:of|the|de|la|von|van) ){{0,2}}(?:{_CAPITALISED}|\d+(?![\w.,%])))+"
)
_SENTENCE_START = re.compile(r"(?:^|[.!?:;\n•]['\"”)]*)\s*['\"“(]*$")


def words(text: str) -> frozenset[str]:
    """The distinct words of a text, in lower case."""
    return frozenset(match.group().lower() for match in _WORD.finditer(text))


def names(text: str, title: str = "") -> frozenset[str]:
    """The names in a passage and its document's title, in lower case; see above."""
    matches = {match.group() for rule in (_DATE, _QUANTITY, _CODE) for match in rule.finditer(text)}
    undated = _DATE.sub(lambda date: "\0" * len(date.group()), text)  # March 2019 is no one's name
    for match in _SPAN.finditer(undated):
        span, start = match.group(), match.start()
        if _SENTENCE_START.search(undated, max(0, start - _LEAD), start):
            span = span.partition(" ")[2]
            span = re.sub(r"^(?:(?:of|the|de|la|von|van) )+", "", span)
        if " " in span:
            matches.add(span)
    if title and len(title.split()) <= _MOST_TITLE_WORDS:
        matches.add(title)
    plain = (" ".join(name.casefold().split()) for name in matches)
    return frozenset(name for name in plain if 1 < len(name) <= _LONGEST_NAME)


@dataclass(frozen=True)
class Recovery:
    """How much of some texts was recovered: shares from 0 to 1.

    ``precision`` of what was guessed is right, ``recall`` of what is there was
    guessed; ``f1`` is their harmonic mean.
    """

    f1: float
    precision: float
    recall: float


def mean_recovery(guessed: Sequence[Set[str]], true: Sequence[Set[str]]) -> Recovery:
    """Each text counts alike: means of its own F1, precision and recall (for words).

    A text with nothing in it is left out; a guess of nothing has precision 0.
    """
    scores = [_of(len(g & t), len(g), len(t)) for g, t in zip(guessed, true, strict=True) if t]
    if not scores:
        return Recovery(0.0, 0.0, 0.0)
    f1, precision, recall = (
        sum(getattr(score, name) for score in scores) / len(scores)
        for name in ("f1", "precision", "recall")
    )
    return Recovery(f1, precision, recall)


def pooled_recovery(guessed: Sequence[Set[str]], true: Sequence[Set[str]]) -> Recovery:
    """Each item counts alike, whichever text it is in (for names, of which many have few)."""
    pairs = list(zip(guessed, true, strict=True))
    return _of(
        sum(len(g & t) for g, t in pairs),
        sum(len(g) for g, _ in pairs),
        sum(len(t) for _, t in pairs),
    )


def _of(right: int, guessed: int, true: int) -> Recovery:
    if right == 0:
        return Recovery(0.0, 0.0, 0.0)
    return Recovery(2 * right / (guessed + true), right / guessed, right / true)
