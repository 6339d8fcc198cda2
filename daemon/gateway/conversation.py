"""From a chat to the question that is meant, and from an answer to what chat programs show. PURE.

Hanse answers single questions. A chat program sends the whole conversation each time; what it
asks is the user's last message. Where that can't stand alone ("and in Bern?", "who signs it?"),
the user's message before it is put in front: search then finds what both are about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

from proto.control_pb2 import AskReply, Citation

_SHORT: Final = 3  # words; so few rarely say what they are about
# What a question begins with that goes on from another one, in English and German.
_GOES_ON: Final = re.compile(
    "and|but|or|also|so|then|its?|he|his|she|her|they|them|their|this|that|these|those|there"
    "|und|aber|oder|auch|dann|es|er|sie|ihre?|sein|seine|dies(e|er|es)?|das|dort"
)
_LONGEST: Final = 16 * 1024  # bytes; fedd takes no longer question
_MARK: Final = re.compile(r"\[(\d{1,4})\]")
_TASK: Final = "### Task:"
CHORES: Final = (
    '{"title": "Question", "tags": [], "follow_ups": [], "queries": [], "text": "", "emoji": ""}'
)
"""The answer to `is_chore`, whatever is asked for: each of them takes the one key that it knows."""


def question_of(said: Sequence[str]) -> str:
    """What is asked, of the user's messages in order; there is at least one."""
    last = said[-1].strip()
    if len(said) < 2:
        return last
    words = re.findall(r"[\w'-]+", last.lower())
    if len(words) > _SHORT and not _GOES_ON.fullmatch(words[0]):
        return last
    both = f"{said[-2].strip()} {last}"
    return both if len(both.encode(errors="replace")) <= _LONGEST else last


def is_chore(said: Sequence[str]) -> bool:
    """Whether a chat program asks on its own behalf: for a title, tags, follow-up questions.

    Open WebUI does after each answer, in the user's name, with the conversation below. It would
    be searched for and answered from documents, in a form that it can't read.
    """
    return said[-1].lstrip().startswith(_TASK)


def cited_at(reply: AskReply, url: str = "") -> list[dict[str, Any]]:
    """Where the answer's [n] stand, and what each cites, as OpenAI's clients read citations.

    ``start_index`` and ``end_index`` count characters: ``answer[start:end]`` is the mark. A
    bracket within a sentence that is quoted from a document is none.
    """
    cited = _named(reply.citations, url)
    quoted = list(_quoted(reply))
    return [
        _annotation(*cited[number], *mark.span())
        for mark in _MARK.finditer(reply.answer)
        if (number := int(mark[1])) in cited
        if not any(start <= mark.start() < end for start, end in quoted)
    ]


def _quoted(reply: AskReply) -> Iterator[tuple[int, int]]:
    """Where the sentences that are cited stand in the answer, word for word."""
    for one in reply.citations:
        at = reply.answer.find(one.text) if one.text else -1
        while at >= 0:
            yield at, at + len(one.text)
            at = reply.answer.find(one.text, at + len(one.text))


def _named(citations: Iterable[Citation], url: str) -> dict[int, tuple[str, str]]:
    """Address and title by number, each another one.

    Open WebUI makes one source of those that share either and counts sources for numbers: [3]
    would lead to what [2] cites.
    """
    named: dict[int, tuple[str, str]] = {}
    addresses, titles = set[str](), set[str]()
    for one in citations:
        page = f", page {one.page}" if one.page else ""
        address, title = address_of(one, url), f"{one.title or one.document_id}{page}"
        if address in addresses:
            address = f"{address}&citation={one.number}"
        if title in titles:
            title = f"{title} [{one.number}]"
        addresses.add(address)
        titles.add(title)
        named[one.number] = (f"{address}#here" if url else address, title)
    return named


def _annotation(address: str, title: str, start: int, end: int) -> dict[str, Any]:
    told = {"url": address, "title": title, "start_index": start, "end_index": end}
    return {"type": "url_citation", "url_citation": told}


def address_of(citation: Citation, url: str = "") -> str:
    """Where the page shows the passage, if people reach it at a ``url``; else a name for it.

    The name can stand where a URL must, with the id by which `fedctl documents show` knows it.
    """
    if url:
        told = {"document": citation.document_id, "passage": citation.passage_id}
        return f"{url}/source?{urlencode(told)}"
    page = f"page={citation.page}&" if citation.page else ""
    passage = quote(citation.passage_id, safe="")
    return f"hanse:/documents/{quote(citation.document_id, safe='/')}?{page}passage={passage}"


def pieces(answer: str) -> list[str]:
    """The answer in the pieces that are streamed: joined, they are the answer."""
    return re.findall(r".*?(?:\[\d+\]\s*|\n+|$)", answer, re.DOTALL)[:-1] or [answer]


def words_in(text: str) -> int:
    """What stands for tokens in ``usage``: nothing here is charged by them."""
    return len(text.split())
