"""The numbers, dates and calculations of a text, so that two texts can be compared by them.

Exact: a number is a fraction, and the same one however it is written (1,234.50 and 1234.5, four
and 4). A calculation is a sum, a difference, a ratio or a percentage change that the text shows
with its operands and its result.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Set
from dataclasses import dataclass
from fractions import Fraction

_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_BY_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: Fraction(n) for n, word in enumerate(_TO_NINETEEN.split())} | {
    word: Fraction(10 * n) for n, word in enumerate(_BY_TENS.split(), start=2)
}
_UNSAID = ("one",)  # in a statement it is a pronoun more often
_SCALES = {"thousand": 10**3, "million": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9}
_SCALES |= {"trillion": 10**12}
_UNITS = {"%": "%", "percent": "%", "$": "$", "€": "€", "£": "£", "¥": "¥"}
_UNITS |= {"dollar": "$", "euro": "€", "pound": "£", "mcg": "µg", "μg": "µg", "°c": "°c"}
_AS_WRITTEN = (
    "mg g kg µg ng ml l dl cl mm cm m km mmhg mmol mol iu kcal hz kw kwh mw "
    "second minute hour day week month year"
)
_UNITS |= {one: one for one in _AS_WRITTEN.split()}
_WORDS_OF = {"%": ("percent", "percentage", "%"), "$": ("dollar", "usd", "$")}
_WORDS_OF |= {"€": ("euro", "eur", "€"), "£": ("pound", "gbp", "£")}

_NUMBER = r"\d+(?:[.,]\d+)*"
_QUANTITY = re.compile(
    rf"(?<![\w.,])(?P<sign>[-−–‐‑](?=[\d$€£¥]))?(?P<currency>[$€£¥]\s?)?(?P<number>{_NUMBER})"
    r"(?:st|nd|rd|th)?(?![\d_])"
    r"(?:[\s-]?(?P<scale>thousand|million|mn|billion|bn|trillion)s?(?!\w))?"
    r"(?:[\s-]?(?P<unit>%|per cent|[°µμ]?[^\W\d_]+))?"
)
# Letters and digits in one: B12, 10-K, COVID-19. Only as a whole it says anything.
_CODE = re.compile(r"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[^\W\d_])\w+(?:-\w+)*")
_NO_CODE = re.compile(rf"{_NUMBER}-?(?:st|nd|rd|th|[^\W\d_]+)", re.IGNORECASE)
_RAISED = re.compile("[⁰¹²³⁴-⁹₀-₉]+")
_YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")

_MONTHS = "January February March April May June July August September October November December"
_MONTH_OF = {
    name[:n]: number for number, name in enumerate(_MONTHS.split(), 1) for n in (3, 4, len(name))
}
_MONTH = "(" + "|".join(sorted(_MONTH_OF, key=len, reverse=True)) + r")\b\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATES = (
    (re.compile(r"(?<![\d-])(\d{4})-(\d{2})-(\d{2})(?![\d-])"), "ymd"),
    (re.compile(rf"(?<!\d){_DAY}\.?\s+{_MONTH},?\s+(\d{{4}})(?!\d)"), "dmy"),
    (re.compile(rf"\b{_MONTH}\s+{_DAY},?\s+(\d{{4}})(?!\d)"), "mdy"),
    (re.compile(r"(?<![\d./])(\d{1,2})[./](\d{1,2})[./](\d{4})(?![\d/])"), "dmy?"),
    (re.compile(rf"(?<!\d){_DAY}\.?\s+{_MONTH}"), "dm"),
    (re.compile(rf"\b{_MONTH}\s+{_DAY}(?![\d,.]*\d)"), "md"),
    (re.compile(rf"\b{_MONTH},?\s+(\d{{4}})(?!\d)"), "my"),
)

_OPERATORS = {"+": "+", "-": "-", "−": "-", "–": "-", "×": "*", "*": "*", "·": "*"}
_OPERATORS |= {"/": "/", "÷": "/"}
_TOKEN = re.compile(
    rf"[$€£¥]?{_NUMBER}(?:\s?(?:%|(?:mg|g|kg|µg|ml|l|mm|cm|m|km)\b))?|[-+−–×*·/÷()=]"
)
_MOST_TOKENS = 40


@dataclass(frozen=True)
class Quantity:
    """A number with its unit ("": none); ``value`` None: it is read in no way but as written."""

    literal: str
    value: Fraction | None
    scale: int = 1
    unit: str = ""

    def is_in(self, others: list[Quantity], beside: Set[str]) -> bool:
        """Whether one of these says the same; ``beside``: words above them, as of a header."""
        return any(self._same(other, beside) for other in others)

    def _same(self, other: Quantity, beside: Set[str]) -> bool:
        if self.value is None or other.value is None:
            alike = self.literal == other.literal
        else:
            alike = self.value * self.scale == other.value * other.scale or (
                self.value == other.value
                and other.scale == 1
                and not beside.isdisjoint(_words_of_scale(self.scale))
            )
        if not alike or self.unit in ("", other.unit):
            return alike
        return not other.unit and not beside.isdisjoint(_WORDS_OF.get(self.unit, (self.unit,)))


@dataclass(frozen=True)
class Date:
    """A day, a month or a day of some year; 0: not said."""

    year: int
    month: int
    day: int

    def is_in(self, others: Set[Date]) -> bool:
        """Whether one of these says as much, or more."""
        return any(
            all(mine in (0, its) for mine, its in zip(self._all, other._all, strict=True))
            for other in others
        )

    @property
    def _all(self) -> tuple[int, int, int]:
        return self.year, self.month, self.day


@dataclass(frozen=True)
class Calculation:
    """What is computed of what, and whether that comes out."""

    operands: tuple[Quantity, ...]
    result: Quantity
    right: bool


@dataclass(frozen=True)
class Figures:
    """All of that in a text."""

    quantities: list[Quantity]
    codes: frozenset[str]
    dates: frozenset[Date]
    calculations: tuple[Calculation, ...]

    def __bool__(self) -> bool:
        return bool(self.quantities or self.codes or self.dates or self.calculations)

    @property
    def operands(self) -> list[Quantity]:
        """What is computed with."""
        return [one for made in self.calculations for one in made.operands]


def figures_of(text: str, *, stated: bool = True) -> Figures:
    """Those of a text; ``stated`` False: of a source, which is read in every way it may be.

    A digit is one in whatever form it is drawn, a ring round it, say; but raised or lowered it is
    a number of its own: 10⁶ is not 106, nor is 5² with a note 52.
    """
    text = unicodedata.normalize("NFKC", _RAISED.sub(r"^\g<0>", text))
    calculations: list[Calculation] = []
    if stated:
        for found, begin, end in _calculations(text):
            calculations.append(found)
            text = text[:begin] + " " * (end - begin) + text[end:]
    dates: set[Date] = set()
    rest = text
    for pattern, order in _DATES:
        for match in pattern.finditer(rest):
            readings = [*_dates(match, order)]
            dates.update(readings if not stated else readings[:1])
            if stated and readings:
                rest = rest.replace(match[0], " " * len(match[0]), 1)
    codes = [one[0] for one in _CODE.finditer(rest) if not _NO_CODE.fullmatch(one[0])]
    quantities: list[Quantity] = []
    for code in codes:
        rest = rest.replace(code, " " * len(code), 1)
        if not stated:  # FY2021 tells the year
            quantities += [Quantity(year, Fraction(year)) for year in _YEAR.findall(code)]
    quantities += [_quantity(match) for match in _QUANTITY.finditer(rest)]
    quantities += [
        Quantity(word, NUMBER_WORDS[word])
        for word in re.findall(r"[a-z]+", rest.casefold())
        if word in NUMBER_WORDS and (not stated or word not in _UNSAID)
    ]
    return Figures(
        quantities,
        frozenset(code.casefold() for code in codes),
        frozenset(dates),
        tuple(calculations),
    )


def without_figures(text: str) -> str:
    """The text with its calculations, codes and numbers blanked; units go with their numbers."""
    for _, begin, end in _calculations(text):
        text = text[:begin] + " " * (end - begin) + text[end:]
    text = _CODE.sub(lambda one: one[0] if _NO_CODE.fullmatch(one[0]) else " ", text)

    def rest(match: re.Match[str]) -> str:
        unit = match["unit"] or ""
        return " " if _unit(unit) else f" {unit}"

    return _QUANTITY.sub(rest, text)


def _quantity(match: re.Match[str]) -> Quantity:
    value = _value(match["number"])
    if match["sign"] and value is not None:
        value = -value
    scale = _SCALES.get(match["scale"] or "", 1)
    unit = _unit((match["currency"] or "").strip()) or _unit(match["unit"] or "")
    return Quantity(f"{match['sign'] or ''}{match['number']}", value, scale, unit)


def _unit(written: str) -> str:
    small = "%" if written == "per cent" else written.casefold()
    return _UNITS.get(small) or _UNITS.get(small.removesuffix("s"), "")


def _value(literal: str) -> Fraction | None:
    """As English has it: commas between thousands, or one before decimals; None: neither."""
    if len(literal) > 30:
        return None
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?|\d+(\.\d+)?", literal):
        return Fraction(literal.replace(",", ""))
    if re.fullmatch(r"\d+,\d+", literal):
        return Fraction(literal.replace(",", "."))
    if re.fullmatch(r"\d{1,3}(\.\d{3})+(,\d+)?", literal):
        return Fraction(literal.replace(".", "").replace(",", "."))
    return None


def _words_of_scale(scale: int) -> set[str]:
    words = {word for word, one in _SCALES.items() if one == scale and scale > 1}
    return words | {f"{word}s" for word in words}


def _dates(match: re.Match[str], order: str) -> Iterator[Date]:
    said = dict(zip(order.rstrip("?"), match.groups(), strict=True))
    month = said["m"]
    year, day = int(said.get("y", 0)), int(said.get("d", 0))
    number = int(month) if month.isdigit() else _MONTH_OF[month]
    if number <= 12 and day <= 31:
        yield Date(year, number, day)
    if order.endswith("?") and day <= 12 and number <= 31:
        yield Date(year, day, number)


def _calculations(text: str) -> Iterator[tuple[Calculation, int, int]]:
    """Each with where it begins and ends, from left to right."""
    tokens = [*_TOKEN.finditer(text)]
    first = 0  # of what may be the left side
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else None
        if before is not None and (
            text[before.end() : token.start()].strip() or (_is_number(before) and _is_number(token))
        ):
            first = at
        if token[0] != "=":
            continue
        left, right = _balanced(tokens[first:at]), tokens[at + 1 : at + 3]
        first = at + 1
        sign = ""
        if right and right[0][0] in "-−":
            sign, right = "-", right[1:]
        if not left or not right or not _is_number(right[0]):
            continue
        if text[token.end() : right[0].start()].strip(" -−"):
            continue
        numbers = sum(map(_is_number, left))
        if numbers > 1 and len(left) <= _MOST_TOKENS:
            made = _calculation([one[0] for one in left], sign + right[0][0])
            yield made, left[0].start(), right[0].end()


def _is_number(token: re.Match[str]) -> bool:
    return any(sign.isdigit() for sign in token[0])


def _balanced(left: list[re.Match[str]]) -> list[re.Match[str]]:
    """Without what stands before a calculation, as the bracket of a remark."""
    opened = sum((one[0] == "(") - (one[0] == ")") for one in left)
    while left and (left[0][0] in "+−–-×*·/÷)" or (left[0][0] == "(" and opened > 0)):
        opened -= left[0][0] == "("
        left = left[1:]
    return left


def _calculation(left: list[str], right: str) -> Calculation:
    numbers = [one for one in left if one not in _OPERATORS and one not in "()"]
    result = _quantity_of(right)
    reading = _Reading(left)
    try:
        value = reading.sum()
    except (ArithmeticError, ValueError, IndexError):
        return Calculation(tuple(map(_quantity_of, numbers)), result, right=False)
    operands = tuple(
        _quantity_of(one) for n, one in enumerate(numbers) if n not in reading.hundreds
    )
    if result.unit == "%" and not reading.hundreds and any(one.unit != "%" for one in operands):
        value *= 100
    decimals = len(result.literal.partition(".")[2])
    comes_out = (
        reading.at == len(left)
        and len(operands) > 1
        and result.value is not None
        and abs(value - result.value) <= Fraction(1, 2 * 10**decimals)
    )
    return Calculation(operands, result, comes_out)


def _quantity_of(term: str) -> Quantity:
    match = _QUANTITY.search(term.strip())
    return _quantity(match) if match else Quantity(term, None)


class _Reading:
    """Reads a calculation from left to right; products are of a hundred alone, for percents."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.at = 0
        self._numbers = 0
        self.hundreds: set[int] = set()  # which of the numbers are such

    def sum(self) -> Fraction:
        value = self._ratio()
        while (sign := self._operator("+-")) is not None:
            other = self._ratio()
            value = value + other if sign == "+" else value - other
        return value

    def _ratio(self) -> Fraction:
        value = self._one()
        while (sign := self._operator("*/")) is not None:
            number = self._numbers
            other = self._one()
            if sign == "/":
                value /= other
            elif other == 100 and self._numbers == number + 1:
                value *= other
                self.hundreds.add(number)
            else:
                raise ValueError("a product")
        return value

    def _one(self) -> Fraction:
        term = self._tokens[self.at]
        self.at += 1
        if term == "(":
            value = self.sum()
            if self._tokens[self.at] != ")":
                raise ValueError("not closed")
            self.at += 1
            return value
        if _OPERATORS.get(term) == "-":
            return -self._one()
        number = _quantity_of(term).value
        if number is None:
            raise ValueError("no number")
        self._numbers += 1
        return number

    def _operator(self, among: str) -> str | None:
        if self.at < len(self._tokens):
            sign = _OPERATORS.get(self._tokens[self.at])
            if sign is not None and sign in among:
                self.at += 1
                return sign
        return None
