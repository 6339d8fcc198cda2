"""Answers as messages: a field that both have is told, and nothing else of how it was made."""

from __future__ import annotations

from daemon.answering.answering import Answered
from daemon.answering.generator import Citation
from daemon.control.library_messages import answer_fields
from proto import control_pb2 as control

CITED = Citation(1, "locks", "locks#0", "Locks", "Locks leak.", 0.5)
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
)


def test_every_field_of_a_reply_is_told_of_an_answer() -> None:
    reply = control.AskReply(**answer_fields(ANSWERED, control.AskReply.DESCRIPTOR))
    told = {field.name for field, _ in reply.ListFields()}
    assert set(reply.DESCRIPTOR.fields_by_name) - told == {"abstained", "seconds"}
    assert (reply.answer, reply.instead, reply.cut_short) == ("Locks leak. [1]", "no room", "late")
    assert (len(reply.citations), len(reply.passages)) == (1, 2)
    assert reply.citations[0].text == "Locks leak."


def test_an_answer_that_cites_nothing_is_none() -> None:
    nothing = Answered(text="No.", citations=(), passages=(), model_digest=b"\x01")
    assert answer_fields(nothing, control.AskReply.DESCRIPTOR)["abstained"] is True


def test_other_messages_are_told_what_they_have_of_it() -> None:
    tried = answer_fields(ANSWERED, control.TestPromptReply.DESCRIPTOR)
    assert {"answer", "citations", "instead", "dropped"} <= tried.keys()
    judged = answer_fields(ANSWERED, control.JudgedAnswer.DESCRIPTOR)
    assert judged.keys() == {"answer", "citations", "abstained", "instead"}
