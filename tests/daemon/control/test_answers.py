"""Answers as messages: a field that both have is told, and nothing else of how it was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from daemon.answering.answering import Answered
from daemon.answering.generator import Citation
from daemon.control.library import _outcome
from daemon.control.library_messages import answer_fields
from daemon.process.metrics import counts
from daemon.services.indexes import warnings_of
from proto import control_pb2 as control

CITED = Citation(1, "locks", "locks#0", "Locks", "Locks leak.", 0.5, page=3, ocr=True)
ANSWERED = Answered(
    text="Locks leak. [1]",
    citations=(CITED,),
    passages=(CITED, CITED),
    model_digest=b"\x01",
    left_out="no cross-encoder",
    probability=0.5,
    instead="no room",
    cut_short="late",
    failed=True,
    dropped=2,
    unread_language="de",
    prompt="general",
    generator_digest=b"\x02",
)


def test_every_field_of_a_reply_is_told_of_an_answer() -> None:
    reply = control.AskReply(**answer_fields(ANSWERED, control.AskReply.DESCRIPTOR))
    told = {field.name for field, _ in reply.ListFields()}
    assert set(reply.DESCRIPTOR.fields_by_name) - told == {"abstained", "seconds"}
    assert (reply.answer, reply.instead, reply.cut_short) == ("Locks leak. [1]", "no room", "late")
    assert (len(reply.citations), len(reply.passages)) == (1, 2)
    assert (reply.citations[0].text, reply.citations[0].ocr) == ("Locks leak.", True)
    assert reply.by_ocr == [1]


def test_an_answer_that_cites_nothing_is_none() -> None:
    nothing = Answered(text="No.", citations=(), passages=(), model_digest=b"\x01")
    assert answer_fields(nothing, control.AskReply.DESCRIPTOR)["abstained"] is True


@pytest.mark.parametrize(
    ("said", "metric"),
    [
        ({}, "hanse_answers_given"),
        ({"instead": "no room"}, "hanse_answers_instead"),
        ({"cut_short": "late"}, "hanse_answers_cut_short"),
        ({"citations": (), "instead": "no room"}, "hanse_answers_abstained"),
    ],
    ids=lambda said: " ".join(said) if isinstance(said, dict) else "",
)
def test_each_kind_of_answer_is_counted_by_itself(said: dict[str, Any], metric: str) -> None:
    answered = replace(ANSWERED, **{"instead": "", "cut_short": ""} | said)
    assert _outcome(answered) == metric
    assert metric in counts()


def test_people_are_warned_of_what_failed_at_the_last_answer() -> None:
    assert warnings_of("", "no room") == ["answers are extracted, not written: no room"]
    assert warnings_of("", "", "late") == ["answers end before their end: late"]
    assert warnings_of("") == []


def test_other_messages_are_told_what_they_have_of_it() -> None:
    tried = answer_fields(ANSWERED, control.TestPromptReply.DESCRIPTOR)
    assert {"answer", "citations", "instead", "dropped"} <= tried.keys()
    judged = answer_fields(ANSWERED, control.JudgedAnswer.DESCRIPTOR)
    assert judged.keys() == {"answer", "citations", "abstained", "instead"}
