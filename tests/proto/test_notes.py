"""What people are told of how an answer came about: one sentence each, one place for all.

That each place tells all of them is tested where these are, with `with_every_note`: the page,
JSON and agents in tests/daemon/gateway/pages/test_views.py, chat programs in
tests/daemon/gateway/test_conversation.py, fedctl in tests/daemon/fedctl/test_search.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from proto import control_pb2 as control
from proto.control_pb2 import AskReply
from proto.notes import NOTES, notes_of

# What an answer is, and what is shown of it where it is shown.
STRING = FieldDescriptor.TYPE_STRING
SHOWN = {
    *("answer", "citations", "passages", "abstained", "probability", "seconds"),
    *("model_digest", "generator_digest"),
}


def with_every_note() -> AskReply:
    """An answer of which everything is told that there is to tell."""
    fields = AskReply.DESCRIPTOR.fields_by_name
    told: dict[str, Any] = {
        name: f"<b>{name}</b>" if fields[name].type == STRING else 2 for name in NOTES
    }
    lists = {name: [value] for name, value in told.items() if fields[name].is_repeated}
    return AskReply(**told | lists, generator_digest=b"\xab" * 32)


def test_each_field_of_an_answer_is_shown_or_has_a_sentence() -> None:
    """So nobody adds one that no person is ever told."""
    assert set(AskReply.DESCRIPTOR.fields_by_name) - SHOWN == NOTES.keys()
    assert len(notes_of(with_every_note())) == len(NOTES)


def test_an_answer_as_one_would_think_has_no_notes() -> None:
    assert notes_of(AskReply(answer="It floats. [1]", seconds=2, probability=0.5)) == []


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (AskReply(dropped=1), "1 statement was taken out: what it cites does not support it."),
        (
            AskReply(dropped=2),
            "2 statements were taken out: what they cite does not support them.",
        ),
        (
            AskReply(instead="it is late"),
            "Made of sentences of the documents, for the language model did not answer: it is late",
        ),
        (
            AskReply(cut_short="it is late"),
            "The answer ends before its end, for the language model did: it is late",
        ),
        (
            AskReply(unread_language="de"),
            "It seems to be asked in de, which the encoder was not made for: what would answer it "
            "may not be found.",
        ),
        (
            AskReply(by_ocr=[1, 3]),
            "Read from a picture (OCR), figures and names may be wrong: compare [1], [3] with the "
            "page.",
        ),
    ],
    ids=["one taken out", "two", "stood in for", "cut short", "unread", "by OCR"],
)
def test_each_of_what_is_not_as_one_would_think_is_a_sentence(reply: AskReply, note: str) -> None:
    assert notes_of(reply) == [note]


def test_what_the_answer_says_itself_is_not_said_again() -> None:
    assert notes_of(AskReply(unread_language="de", abstained=True)) == []


def test_who_tries_a_prompt_is_told_likewise_of_what_there_is() -> None:
    tried = control.TestPromptReply(instead="it is late", dropped=1, tokens=30)
    assert notes_of(tried) == notes_of(AskReply(instead="it is late", dropped=1))


def test_braces_in_a_cause_are_nothing_but_braces() -> None:
    assert notes_of(AskReply(instead="{0} {x}"))[0].endswith(": {0} {x}")
