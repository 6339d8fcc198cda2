"""What a language model wrote, as plain text: no link, markup, code or call of a tool is left.

A page that shows an answer may draw an image of a stranger's server, and so tell it what stands
in the address; a program may run what looks like a call. So nothing of the kind gets as far as
that. What is taken out is looked through again, until nothing more is: two halves may make a
whole. What is still not plain then is no text.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable

LONGEST = 20_000  # characters of a reply that are looked at
_DEEPEST = 30  # braces in braces
_ROUNDS = 12  # each takes something out, or it was the last
_HOSTS = (
    "com|org|net|edu|gov|mil|int|info|biz|io|ai|co|dev|app|xyz|site|online|top|me|tv|cc|cloud|"
    "eu|uk|de|fr|nl|it|es|ch|at|pl|ru|cn|jp|in|br|us|example|test|invalid|local|onion"
)

Step = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _step(
    pattern: str, instead: str | Callable[[re.Match[str]], str] = " ", flags: int = 0
) -> Step:
    return re.compile(pattern, flags), instead


_TARGET = r"\((?:[^()]|\([^()]*\))*\)"  # of a link, with a call in it, if need be
_INNERMOST = re.compile(r"\{[^{}]*\}")
_STEPS: tuple[Step, ...] = (
    # Code, with all that is in it; a fence that nobody closes goes to the end.
    _step(r"(```|~~~).*?(?:\1|\Z)", flags=re.S),
    # What a model thinks, calls or hides, with all that is in it; then tags alone.
    _step(r"<!--.*?(?:-->|\Z)", flags=re.S),
    _step(
        r"<(script|style|svg|iframe|object|template|think|thinking|tool_call|tool_calls|"
        r"function_call|function|invoke|code|pre)\b[^>]*>.*?(?:</\1\s*>|\Z)",
        flags=re.S | re.I,
    ),
    _step(r"<\|.*?(?:\|>|$)", flags=re.M),
    _step(r"</?[^\s\d=<>][^<>]*(?:>|$)", flags=re.M),
    # JSON that nobody closes; what is closed has gone by then.
    _step(r"\{[^\n]*"),
    _step(r"\[\s*[A-Z_]{3,}\s*\][^\n]*"),  # [TOOL_CALLS] and its kin
    # Images go, of links the words stay. 【1】 is how some models cite.
    _step(rf"!\[[^\[\]]*\]\s?(?:{_TARGET}|\[[^\[\]]*\])"),
    _step(r"^\s*\[[^\[\]]+\]:\s*\S[^\n]*", flags=re.M),
    _step(rf"\[(\s*\d{{1,3}}\s*)\]{_TARGET}", r"[\1]"),
    _step(rf"\[([^\[\]]*)\]{_TARGET}", r"\1"),
    _step(
        r"[【\[]\s*+(?:(?:passage|source|document)\s*+)?(\d{1,3})(?:†[^】\]\[【]*+)?\s*+[】\]]",
        r"[\1]",
        re.I,
    ),
    # Addresses, with and without a scheme, and of mail.
    _step(r"(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]*:/+\S*"),
    _step(r"\b(?:javascript|vbscript|data|mailto|tel|file|blob):\S+", flags=re.I),
    _step(r"\bwww\.\S*", flags=re.I),
    _step(r"(?<!\S)//+\S*"),
    _step(r"(?<!\S)\S*@\S*"),
    _step(rf"(?<![\w.-])(?:[\w-]+\.)+(?:{_HOSTS})\b(?:[:/?#]\S*)?", flags=re.I),
    _step(r"(?<![\w.-])(?:[\w-]+\.)+[a-z]{2,}/\S*", flags=re.I),
    # What lines begin with, and what stands around words.
    _step(r"^[ \t]*(?:#+|>+|[-*+•]|\d{1,9}[.)])(?:[ \t]+|$)", "", re.M),
    _step(r"^[-*_=+ \t]+$", "", re.M),
    _step(r"^[ \t]*[#>]+", "", re.M),
    _step(r"\*\*+|__+|~~+|``+", ""),
    _step(r"~(?=\s?\d)", "≈"),
    _step(r"(?<=\d) ?\* ?(?=\d)", " × "),
    _step(r"\*", ""),
    _step(r"(?<!\w)_+|_+(?!\w)", ""),
    _step(r"#(?!\d)", ""),
    _step(r"<(?![\s\d=])|(?<![\s\d=])>(?![\s\d=])", " "),
    _step(r"[`|\\^{}~]", " "),
    # Brackets are those of citations alone, and begin neither a link nor an image.
    _step(r"(?<=\])(?=\()|(?<=!)(?=\[)", " "),
    _step(r"\[(?!\s*\d{1,3}(?:\s*[,;]\s*\d{1,3})*\s*\])", ""),
    _step(r"(?<!\d)(?<!\d )\]", ""),
)
_NOT_PLAIN = re.compile(
    r"[`{}|\\^~@]|<(?![\s\d=])|:/|(?<!\S)//|(?:javascript|vbscript|data|mailto|file|blob):\S|"
    r"www\.|\*\*|__|!\[|\](?=\()|\[(?!\s*\d{1,3}(?:\s*[,;]\s*\d{1,3})*\s*\])",
    re.IGNORECASE,
)
_BLANKS = re.compile(r"[^\S\n]+")
_EMPTY_LINES = re.compile(r" ?\n[ \n]*")
# Letters and marks that are drawn as nothing, though Unicode calls them letters and marks: joiners
# and fillers, and which of its drawings a letter is to have (Unicode 16, Default_Ignorable).
_UNDRAWN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# Marks that go on any letter: what a language writes so is one letter by then (NFC), and what is
# left strikes a letter out, or cuts a word in two for who reads letters.
_MARKS = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]")
# Within a word, whatever is typed for it: "isn`t" is a word, and says no.
_APOSTROPHES = re.compile(r"(?<=[^\W\d_])[`´‘′‛ʼ＇](?=[^\W\d_])")
_DRAWN = "°©®™℃℉№"  # of the pictures, those that texts are written with
_LINE_BREAKS = re.compile(r"[\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


def plain(text: str) -> str:
    """The text without any of that, its lines apart; "" where it can't be made plain."""
    # Of thousands of blanks a step would try each.
    text = _EMPTY_LINES.sub("\n", _BLANKS.sub(" ", text[:LONGEST]))
    for _ in range(_ROUNDS):
        before, text = text, _once(text)
        if text == before:
            return "" if _NOT_PLAIN.search(text) else text.strip()
    return ""


def _once(text: str) -> str:
    text = _LINE_BREAKS.sub("\n", html.unescape(text)).replace("\t", " ")
    text = _APOSTROPHES.sub("’", text)
    text = _MARKS.sub("", unicodedata.normalize("NFC", _UNDRAWN.sub("", text)))
    text = "".join(sign for sign in text if sign == "\n" or _is_seen(sign))
    nested = _DEEPEST
    while nested and _INNERMOST.search(text):  # JSON, and what looks like it
        text, nested = _INNERMOST.sub(" ", text), nested - 1
    for pattern, instead in _STEPS:
        text = pattern.sub(instead, text)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())


def _is_seen(sign: str) -> bool:
    """Neither a control, nor what turns or hides the letters around it, nor what nobody drew.

    Nor a picture, among which are letters that nobody can check: in squares, in Braille, flags.
    """
    category = unicodedata.category(sign)
    return category[0] != "C" and category != "Me" and (category != "So" or sign in _DRAWN)
