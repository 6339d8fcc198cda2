"""What people are told of how an answer came about, where that is not as they would think. PURE.

The only home of these sentences: fedctl, the page, the gateway's JSON, agents and chat programs
show them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _taken_out(count: int) -> str:
    if count == 1:
        return "1 statement was taken out: what it cites does not support it."
    return f"{count} statements were taken out: what they cite does not support them."


def _by_ocr(numbers: Sequence[int]) -> str:
    which = ", ".join(f"[{number}]" for number in numbers)
    return (
        f"Read from a picture (OCR), figures and names may be wrong: compare {which} with the page."
    )


NOTES: Final[dict[str, Callable[[Any], str]]] = {
    "unread_language": (
        "It seems to be asked in {}, which the encoder was not made for: what would answer it may "
        "not be found."
    ).format,
    "instead": (
        "Made of sentences of the documents, for the language model did not answer: {}"
    ).format,
    "cut_short": "The answer ends before its end, for the language model did: {}".format,
    "dropped": _taken_out,
    "by_ocr": _by_ocr,
}
"""By the field of AskReply that they are about, in the order in which they are told."""


def notes_of(reply: Message) -> list[str]:
    """A sentence for each of those fields that says something; the reply need not have all.

    What a model or a file said may be in it: to be shown as foreign text is.
    """
    told = {name: getattr(reply, name) for name in NOTES if name in reply.DESCRIPTOR.fields_by_name}
    if getattr(reply, "abstained", False):
        told.pop("unread_language", None)  # the answer itself says it
    return [NOTES[name](value) for name, value in told.items() if value]
