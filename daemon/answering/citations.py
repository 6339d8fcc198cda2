"""Checks what a language model wrote against the passages that it cites.

The text is made plain and cut into statements. One stays if it cites a passage that was given and
that passage supports it (`daemon.answering.statements.support`); another is dropped, or kept and
marked, as the site chose. Citations are numbered anew, in the order in which they appear, and
each is of the sentence, or row, of its passage that is most like the statement.

A text that is still being written is checked as far as it can't become another any more: a
statement ends where the next one has begun, for its marks may stand behind its full stop.

Pure: the same text and passages give the same answer. A text is believed in nothing: a citation
of a passage that was not given is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from config.kinds import Unsupported
from daemon.answering.generator import Citation, cite
from daemon.answering.statements.plain_text import LONGEST, plain
from daemon.answering.statements.quantities import figures_of
from daemon.answering.statements.support import Source, Wording, supported
from daemon.library.contents import Passage
from daemon.library.passages import sentences
from daemon.library.search import Ranked

MARK = "(not supported)"
_MOST = 40  # statements of a reply that are looked at
_MARKS = re.compile(r"(?:\[\s*\d{1,3}(?:\s*[,;]\s*\d{1,3})*\s*\]\s*)+")
# "Oil burns. [1] Wool does not." cites in its first sentence.
# What one part has taken it does not give back (++): of ten thousand dots it would try each.
_BEHIND = re.compile(rf"(?<![.!?…])([.!?…]++[\"'”’)]*+)\s*({_MARKS.pattern})")
_NUMBER = re.compile(r"\d+")  # of any script, as in the marks above and for `int`
# Marks go through the cutting of sentences as letters that no text has left (category Co).
_OPEN, _CLOSE = "\ue000", "\ue001"
_HIDDEN = re.compile(f"{_OPEN}([\\d,]*){_CLOSE}")
# A text that goes on may not end with half a word.
_WHOLE_WORDS = re.compile(r"(.*\s)\S*", re.DOTALL)
# What is left of "According to [1], ".
_LEAD = re.compile(r"^(?:according to|as stated in|as said in|as per|in|per)\s*,\s*", re.IGNORECASE)
_END = re.compile(r"[\s.!?…,;:]*")


@dataclass(frozen=True)
class Statement:
    """A sentence without its marks; ``clauses``: what of it each run of marks stands behind."""

    text: str
    clauses: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Passages that it cites, each once."""
        return tuple(dict.fromkeys(number for _, cited in self.clauses for number in cited))


@dataclass(frozen=True)
class Checked:
    """What is left of a text: its statements with their marks, and what these are.

    ``supported``: how many of its statements are; ``dropped``: how many were taken out;
    ``statements``: how many there were.
    """

    text: str
    citations: tuple[Citation, ...]
    supported: int
    dropped: int
    statements: int


class StatementCheck:
    """Checks a text that may still be written, each statement once and for good.

    ``passages``: those that the model was given, [1] first.
    """

    def __init__(self, passages: Sequence[Ranked], unsupported: Unsupported) -> None:
        self._sources = [Source(one.passage) for one in passages]
        self._numbering = _Numbering(passages, self._sources)
        self._unsupported = unsupported
        # A reply is taken to be in the language of most of them.
        languages = Counter(one.passage.language for one in passages)
        self._language = max(languages, key=languages.__getitem__, default="")
        self._read: list[Statement] = []
        self._written: list[str] = []
        self._good = self._dropped = 0

    @property
    def left(self) -> Checked:
        """What is left of the statements that were read."""
        citations = tuple(self._numbering.citations)
        return Checked(
            *(" ".join(self._written), citations),
            *(self._good, self._dropped, len(self._read)),
        )

    def read(self, text: str, *, goes_on: bool = False) -> None:
        """The text so far, from its begin; ``goes_on``: there may be more of it.

        What was read stays where what comes behind makes something else of it (the begin of an
        image, say); nothing more is read then until all of it is here.
        """
        known = len(self._read)
        if goes_on:
            whole = _WHOLE_WORDS.fullmatch(text[:LONGEST])
            text = _closed(whole[1]) if whole else ""
            if text.count("{") > text.count("}"):  # of JSON nothing is read
                return
            found = statements(text, self._language)[:-1]
            if found[:known] != self._read:
                return
        else:
            found = statements(text, self._language)
            if found[:known] != self._read:
                found = self._read + [one for one in found if one not in self._read]
        for statement in found[known:]:
            self._check(statement)
        self._read = found

    def _check(self, statement: Statement) -> None:
        if plain(statement.text) != statement.text:  # two halves that became a link, or a list
            self._dropped += 1
            return
        given = tuple(n for n in statement.numbers if 1 <= n <= len(self._sources))
        holds = given == statement.numbers and all(
            supported(clause, [self._sources[n - 1] for n in numbers])
            for clause, numbers in statement.clauses
        )
        self._good += holds
        if not holds and self._unsupported == "drop":
            self._dropped += 1
            return
        marks = "".join(f" [{number}]" for number in self._numbering.of(statement, given, holds))
        self._written.append(f"{statement.text}{marks}{'' if holds else f' {MARK}'}")


def _closed(text: str) -> str:
    """Nor with a bracket that nobody has closed yet."""
    opened = max(text.rfind("["), text.rfind("【"))
    return text[:opened] if opened > max(text.rfind("]"), text.rfind("】")) else text


def statements(text: str, language: str = "") -> list[Statement]:
    """The sentences of a text as a model wrote it, each with what it cites; plain.

    ``language``: ISO 639-1; "" where it is not known.
    """
    found: list[Statement] = []
    for line in plain(text).splitlines():
        line = _BEHIND.sub(lambda match: f" {match[2].strip()}{match[1]} ", line)
        line = _MARKS.sub(lambda run: f"{_OPEN}{','.join(_NUMBER.findall(run[0]))}{_CLOSE} ", line)
        for sentence in sentences(line, language):
            if (statement := _statement(sentence)) is not None:
                found.append(statement)
    return found[:_MOST]


def supported_text(text: str, passage: Passage) -> str:
    """The statements of a text, without marks, where a passage alone says each; else ""."""
    said, source = statements(text, passage.language), Source(passage)
    sound = all(plain(one.text) == one.text and supported(one.text, [source]) for one in said)
    return " ".join(one.text for one in said) if sound else ""


def support_of(text: str, passage: Passage) -> float:
    """How well a passage supports a text: how many of its statements, and then its words.

    The number of statements that it says, with the share of the text's content words that stand
    in it as what decides between equals: 0 where none of them does.
    """
    source, wanted = Source(passage), Wording.of(text).stems
    said = sum(supported(one.text, [source]) for one in statements(text, passage.language))
    return said + len(wanted & source.wording.stems) / (1 + len(wanted))


def _statement(sentence: str) -> Statement | None:
    """None for one that is nothing but marks and points."""
    *parts, last = _HIDDEN.split(sentence)
    clauses = [
        (said.strip(), tuple(map(int, marks.split(","))))
        for said, marks in zip(parts[::2], parts[1::2], strict=True)
    ]
    text = " ".join(" ".join([*(said for said, _ in clauses), last]).split())
    text = _LEAD.sub("", re.sub(r"\s+([.!?…,;:])", r"\1", text)).strip()
    if _END.fullmatch(text):
        return None
    whole = _END.fullmatch(last) and all(not _END.fullmatch(said) for said, _ in clauses)
    if clauses and not whole:  # "According to [1], oil burns.": all of it is of all that it cites
        clauses = [(text, tuple(n for _, numbers in clauses for n in numbers))]
    return Statement(text, tuple(clauses) or ((text, ()),))


class _Numbering:
    """Citations in the order in which they appear, one for each sentence that is cited."""

    def __init__(self, passages: Sequence[Ranked], sources: Sequence[Source]) -> None:
        self.citations: list[Citation] = []
        self._passages, self._sources = passages, sources
        self._known: dict[tuple[int, int], int] = {}

    def of(self, statement: Statement, given: Sequence[int], holds: bool) -> list[int]:
        """The new numbers of what a statement cites."""
        wording, figures = Wording.of(statement.text), figures_of(statement.text)
        numbers: list[int] = []
        for old in given:
            source = self._sources[old - 1]
            at, _ = source.best(wording, figures)
            if (old, at) not in self._known:
                number = len(self.citations) + 1
                self._known[old, at] = number
                self.citations.append(cite(number, self._passages[old - 1], source.parts[at]))
            numbers.append(self._known[old, at])
            if not holds:
                index = self._known[old, at] - 1
                self.citations[index] = replace(self.citations[index], unsupported=True)
        return list(dict.fromkeys(numbers))
