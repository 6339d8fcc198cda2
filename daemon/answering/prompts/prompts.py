"""From a question and passages to what a language model is asked.

The kinds of questions are FedE4RAG's three (section V-A: domain, metric, novel), pFedRAG's
domain-aware one (table 1: medical) and a general one; each is a text file beside this one, in
words of our own, with slots as `string.Template` has them. A slot's value is never looked
through for slots.

A passage is a stranger's text. It stands between marks with its number, and nothing in it can
end it: what looks like a tag, a turn of a conversation or a number in brackets is written with
other signs. A model may believe what a passage says all the same; what it then writes is checked
(`daemon.answering.citations`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from string import Template

from daemon.library.contents import Passage

_FILES = files(__package__)
_BYTES_A_TOKEN = 3  # tokenizers make some four of English, three of German and of figures
_LONGEST_TITLE = 200  # characters
_LONGEST_ABOVE = 500
# "<" before a letter, a slash or a sign begins a tag or a token that ends a turn; before a
# number or a space it compares. Brackets of a number would be a citation, of capitals a turn.
_TAG = re.compile(r"<(?=[^\s\d=]|\s+/?\s*passage)|(?<=[^\s\d=])>")
_BRACKETED = re.compile(r"[\[【](\s*(?:\d[\d\s,;–-]*|/?[A-Z_]{2,})\s*)[\]】]")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


class NoRoomError(Exception):
    """Not even one passage fits beside the question; the message says what to do."""


def prompt(
    kind: str,
    question: str,
    passages: Sequence[Passage],
    budget: int,
    count: Callable[[str], int],
    special: Sequence[str] = (),
) -> tuple[str, int]:
    """What is asked, of at most ``budget`` tokens by ``count``, and of how many passages.

    ``kind``: the name of a file here. Passages are taken best first until the budget is full;
    the last is cut behind a sentence, or a row. ``special``: what the model's tokenizer reads
    as more than letters. Raises NoRoomError.
    """
    frame = Template(text_of(kind))
    asked = neutral(" ".join(question.split()), special)
    blocks: list[str] = []

    def filled(last: Sequence[str]) -> str:
        return frame.substitute(question=asked, passages="\n\n".join([*blocks, *last]))

    for number, passage in enumerate(passages, start=1):
        whole = _block(number, passage, passage.text, special)
        if count(filled([whole])) <= budget:
            blocks.append(whole)
            continue
        if part := _cut(passage, lambda text: count(filled([text])) <= budget, number, special):
            blocks.append(part)
        break
    if passages and not blocks:
        raise NoRoomError(
            f"no passage fits beside the question into {budget} tokens: raise "
            "retrieval.prompt_tokens, or ask in fewer words"
        )
    return filled([]), len(blocks)


def estimated_tokens(text: str) -> int:
    """Where nobody knows the tokenizer: rather too many."""
    return -(-len(text.encode(errors="replace")) // _BYTES_A_TOKEN)


def text_of(kind: str) -> str:
    """A prompt as its file has it."""
    return (_FILES / f"{kind}.txt").read_text(encoding="utf-8").rstrip("\n")


def slots_of(kind: str) -> list[str]:
    """What is filled in, in its order."""
    return list(dict.fromkeys(Template(text_of(kind)).get_identifiers()))


def neutral(text: str, special: Iterable[str] = ()) -> str:
    """A stranger's text with nothing in it that ends a passage, a turn, or cites."""
    text = _UNSEEN.sub(" ", text)
    for token in special:
        if len(token) > 1 and not token.isalnum():
            other = token.translate(_OTHER_SIGNS)
            text = text.replace(token, other if other != token else f"{token[0]} {token[1:]}")
    text = _TAG.sub(lambda found: "‹" if found[0] == "<" else "›", text)
    return _BRACKETED.sub(r"(\1)", text)


_OTHER_SIGNS = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")", "|": "/", "#": "♯"})


def _block(number: int, passage: Passage, text: str, special: Sequence[str]) -> str:
    title = " ".join(passage.title.split())[:_LONGEST_TITLE]
    page = f", page {passage.page}" if passage.page else ""
    head = f"<passage {number}> {neutral(title or 'without a title', special)}{page}"
    above = neutral(passage.context[-_LONGEST_ABOVE:], special)
    body = neutral(text, special)
    return "\n".join(filter(None, (head, above, body, f"</passage {number}>")))


def _cut(passage: Passage, fits: Callable[[str], bool], number: int, special: Sequence[str]) -> str:
    """As many of its first sentences as fit, by halving; "" where the first does not."""
    table = passage.kind == "table"
    parts = passage.text.splitlines() if table else passage.sentences
    joined = "\n" if table else " "
    least, most = 0, len(parts)
    best = ""
    while least < most:
        half = (least + most + 1) // 2
        block = _block(number, passage, joined.join(parts[:half]), special)
        if fits(block):
            least, best = half, block
        else:
            most = half - 1
    return best
