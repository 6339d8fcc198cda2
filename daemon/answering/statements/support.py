"""Whether a passage says what a statement says, as far as words and figures tell.

A statement is supported by the passages that it cites if

- of its content words at least `SHARE` stand there (in text, title, or what stands above), and
  each name among them;
- each of its numbers, dates and codes does, and a number or date in one sentence (or row) with
  most of the statement's words: the beds of the west wing are not those of the east;
- what it computes is shown, is of numbers that stand there, and comes out;
- it says "not" where the sentence that is most like it does, and nowhere else.

That is words, not meaning: a passage's own words can be put together to what it does not say.
What it catches is measured on planted instructions in tests/daemon/answering.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from daemon.answering.statements.quantities import (
    NUMBER_WORDS,
    Calculation,
    Date,
    Figures,
    Quantity,
    figures_of,
    without_figures,
)
from daemon.library.contents import Passage

SHARE = 0.8  # of a statement's content words; of up to four words, then, all
_LONGEST = 2000  # characters of a statement; of thousands of numbers each is looked for
_ALIKE = 0.6  # of them in one sentence, from which "not" there counts against a statement

_WORD = re.compile(r"[^\W\d_]+(?:[’'][^\W\d_]+)*")
_STOP_WORDS = """
    the a an and or but if then than that this these those there here it its itself he she they
    them their his her him we our you your who whom whose which what when where why how of in on
    at by for from to into onto with within upon as is are was were be been being am has have had
    having do does did doing can could may might must shall should will would also about after
    before between during over under again further once each every any all both more most other
    some such only own same so too very just because while until through out off up down per
    according passage passages document documents states says said me my
"""
_NEGATING = """
    not no never none nor neither without cannot nobody nothing nicht kein keine keinen keiner
    nie ohne pas sans jamais aucun sin ningún nunca non senza niet geen
"""
# The same, with their apostrophe left out.
_CONTRACTED = """
    isnt arent wasnt werent dont doesnt didnt cant couldnt maynt mightnt mustnt shant shouldnt
    wont wouldnt hasnt havent hadnt neednt aint
"""
# They make another number of the one in front of them, or turn a comparison round: what says so
# has to stand in the passage.
_MULTIPLYING = """
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen
    dozens score lakh lakhs crore crores half double twice triple thrice quarter third
"""
_SIGNS = re.compile(r"[¬≠≮≯≰≱∉∄<>≤≥‰]")
# What a statement that computes may call it, though no passage does.
_COMPUTING = """
    sum total altogether together difference ratio percentage percent change increase increased
    decrease decreased growth grew rose fell rise fall higher lower more less result amounts
"""
_TOGETHER = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")  # in one text, as it is written
_STOP, _NEGATORS = frozenset(_STOP_WORDS.split()), frozenset(_NEGATING.split())
_APOSTROPHE_LEFT_OUT, _TIMES = frozenset(_CONTRACTED.split()), frozenset(_MULTIPLYING.split())
# "No, oil does not." but not "No oil does.", which denies.
_VERDICT = re.compile(r"^\s*(?:yes|no)\s*[,.:;–-]+\s*", re.IGNORECASE)
_ENDINGS = ("ies", "ing", "ed", "es", "s")


@dataclass(frozen=True)
class Wording:
    """A text's content words as stems, those of them that are names, and whether it negates."""

    stems: frozenset[str]
    names: frozenset[str]
    negates: bool

    @classmethod
    def of(cls, text: str) -> Wording:
        """Names are words with a capital that doesn't begin the text.

        And those with letters of another script than most words have: "nοt" with a Greek o is
        read as "not" by people alone, so it has to stand in the passage as it is.
        """
        stems: set[str] = set()
        names: set[str] = set()
        negates = False
        folded = _folded(text)
        signs = set(_SIGNS.findall(folded))
        text = without_figures(folded)
        usual = _usual_script(text)
        for number, match in enumerate(_WORD.finditer(text)):
            word = match[0]
            small = word.casefold().replace("’", "'")
            negates |= _negates(small)
            counts = small in _TIMES
            if not counts and (
                small in NUMBER_WORDS or small in _STOP or small in _NEGATORS or "n't" in small
            ):
                continue
            stems.add(_stem(small))
            acronym = len(word) > 1 and word.isupper()
            if counts or acronym or (number and word[0].isupper()) or _scripts_of(word) != {usual}:
                names.add(_stem(small))
        for one in _taken_apart(text):
            stems.add(_stem(one))
            negates |= _negates(one)
        stems |= signs
        names |= signs
        return cls(frozenset(stems), frozenset(names), negates)


@dataclass(frozen=True)
class Part:
    """A sentence or a row; ``above``: the stems of what stands above it, and of the title."""

    wording: Wording
    above: frozenset[str]
    figures: Figures

    @property
    def stems(self) -> frozenset[str]:
        """With those above it."""
        return self.wording.stems | self.above

    def is_about(self, said: Wording, *, at_least_half: bool) -> bool:
        """Whether it has most of the words that do not stand above it anyhow.

        Half of them are enough in a table, of which a statement may compare two rows.
        """
        own = said.stems - self.above
        shared = 2 * len(own & self.wording.stems)
        return shared >= len(own) if at_least_half else shared > len(own) or not own


class Source:
    """A passage, read once for all the statements that cite it."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage

    @cached_property
    def parts(self) -> list[str]:
        """Its sentences, or the rows of a table; at least one."""
        text = self.passage.text
        if self.passage.kind == "table":
            return [row for row in text.splitlines() if row.strip()] or [text]
        return [" ".join(one.split()) for one in self.passage.sentences] or [text]

    @cached_property
    def read_parts(self) -> list[Part]:
        """Each as it is compared."""
        return [
            Part(
                Wording.of(part),
                Wording.of(f"{self.passage.title}\n{self.passage.above(part)}").stems,
                figures_of(part, stated=False),
            )
            for part in self.parts
        ]

    @cached_property
    def above(self) -> Figures:
        """The figures of title and headings, which concern all of its parts."""
        return figures_of(f"{self.passage.title}\n{self.passage.context}", stated=False)

    @cached_property
    def whole(self) -> Figures:
        """Those of its text."""
        return figures_of(self.passage.text, stated=False)

    @cached_property
    def wording(self) -> Wording:
        """That of all of it."""
        return Wording.of(self._all)

    @cached_property
    def beside(self) -> frozenset[str]:
        """What stands above its numbers, word by word: a header says units and scales."""
        above = [self.passage.title, *(self.passage.above(part) for part in self.parts[-1:])]
        text = _folded("\n".join(above)).casefold()
        return frozenset({*_WORD.findall(text), *re.findall(r"[%$€£¥]", text)})

    @cached_property
    def runs(self) -> frozenset[str]:
        """Its runs of letters, digits and hyphens, of which codes are some."""
        return frozenset(re.findall(r"\w+(?:-\w+)*", _folded(self._all).casefold()))

    def has(self, one: Quantity | Date, there: Figures) -> bool:
        """Whether one of its figures is among some of them."""
        if isinstance(one, Date):
            return one.is_in(there.dates)
        return one.is_in(there.quantities, self.beside)

    @property
    def _all(self) -> str:
        passage = self.passage
        return "\n".join((passage.title, passage.context, passage.text))

    def best(self, wording: Wording, figures: Figures) -> tuple[int, float]:
        """Which of its parts is most like that, and the share of the words that it has."""
        wanted: list[Quantity | Date] = [
            *(*figures.quantities, *figures.operands),
            *figures.dates,
        ]
        scores = [
            len(wording.stems & part.stems) + sum(self.has(one, part.figures) for one in wanted)
            for part in self.read_parts
        ]
        at = max(range(len(scores)), key=scores.__getitem__)
        shared = wording.stems & self.read_parts[at].stems
        return at, len(shared) / max(1, len(wording.stems))


def supported(text: str, sources: Sequence[Source]) -> bool:
    """Whether these passages together say what a statement says; False where it says nothing."""
    if len(text) > _LONGEST:
        return False
    said = _VERDICT.sub("", text)
    figures, wording = figures_of(said), Wording.of(said)
    made = figures.calculations
    if not sources or not (wording.stems or figures):
        return False
    return (
        _has_words(wording, figures, sources)
        and figures.codes <= frozenset[str]().union(*(one.runs for one in sources))
        and all(one.right and _has_operands(one, sources) for one in made)
        and all(
            any(_is_result(one, of.result) for of in made) or _stands(one, wording, sources)
            for one in figures.quantities
        )
        and all(_stands(one, wording, sources) for one in figures.dates)
        and _same_sense(wording, figures, sources)
    )


def _is_result(one: Quantity, result: Quantity) -> bool:
    return (one.value, one.scale) == (result.value, result.scale) and one.unit in ("", result.unit)


def _has_words(wording: Wording, figures: Figures, sources: Sequence[Source]) -> bool:
    there = frozenset[str]().union(*(one.wording.stems for one in sources))
    wanted = wording.stems
    if figures.calculations:
        wanted = frozenset(word for word in wanted if word not in _COMPUTING_STEMS)
    return (
        len(wanted & there) >= math.ceil(SHARE * len(wanted)) and (wording.names & wanted) <= there
    )


def _has_operands(made: Calculation, sources: Sequence[Source]) -> bool:
    """In any of their rows: a change is of two years."""
    return all(
        any(source.has(one, source.whole) or source.has(one, source.above) for source in sources)
        for one in made.operands
    )


def _stands(one: Quantity | Date, wording: Wording, sources: Sequence[Source]) -> bool:
    return any(
        source.has(one, source.above)
        or any(
            source.has(one, part.figures)
            and part.is_about(wording, at_least_half=source.passage.kind == "table")
            for part in source.read_parts
        )
        for source in sources
    )


def _same_sense(wording: Wording, figures: Figures, sources: Sequence[Source]) -> bool:
    """Of a row of a table nothing is said: a "no" in it is a cell."""
    alike = []
    for source in sources:
        at, share = source.best(wording, figures)
        if source.passage.kind != "table":
            alike.append((share, source.read_parts[at].wording.negates))
    if not alike:
        return True
    share, negates = max(alike)
    return not wording.negates if share < _ALIKE else wording.negates == negates


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("μ", "µ")


def _negates(small: str) -> bool:
    """Also where dots or bars stand at its letters, or its apostrophe was left out."""
    letters = unicodedata.normalize("NFD", small)
    bare = "".join(one for one in letters if unicodedata.category(one) != "Mn").replace("'", "")
    return (
        small in _NEGATORS
        or bare in _NEGATORS
        or bare in _APOSTROPHE_LEFT_OUT
        or small.endswith("n't")
    )


def _taken_apart(text: str) -> Iterator[str]:
    """Words that somebody has cut into pieces which say nothing alone: "he-at", "k.i.l.l"."""
    for run in text.casefold().split():
        pieces = _WORD.findall(run)
        if len(pieces) > 1 and all(len(one) < 3 or one in _STOP for one in pieces):
            yield "".join(pieces)


def _usual_script(text: str) -> str:
    """That of most of its words."""
    found = Counter(script for word in _WORD.findall(text) for script in _scripts_of(word))
    return max(found, key=found.__getitem__, default="")


def _scripts_of(word: str) -> set[str]:
    """The scripts of its letters, as Unicode's names of these say; "" for rare and drawn ones."""
    if word.isascii():
        return {"LATIN"}
    return {_script_of(letter) for letter in word if letter not in "'’"}


@lru_cache(maxsize=4096)
def _script_of(letter: str) -> str:
    if letter.isascii():
        return "LATIN"
    script = unicodedata.name(letter, "").partition(" ")[0]
    if script == "LATIN" and not (letter < "\u0250" or "\u1e00" <= letter < "\u1f00"):
        return ""  # small capitals, letters of phonetics: they look like others
    return "CJK" if script in _TOGETHER else script


def _stem(word: str) -> str:
    """A word without its ending, so that "burns" is "burn"; never shorter than three letters."""
    word = word.removesuffix("'s").removesuffix("'")
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word.removesuffix(ending) + ("y" if ending == "ies" else "")
            break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word


_COMPUTING_STEMS = frozenset(map(_stem, _COMPUTING.split()))
