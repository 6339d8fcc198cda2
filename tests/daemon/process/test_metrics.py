"""The table of metrics: what `fedctl status` and exporters read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import get_args

import pytest

from daemon.process.metrics import METRICS, Unit, count, counts, rows
from proto.control_pb2 import StatusReply


def test_every_metric_is_read_from_a_status() -> None:
    status = StatusReply(documents=3, bytes_sent=5, loop_lag_p99_ms=1.5, warnings=["a", "b"])
    found = {metric.name: metric.of(status) for metric in METRICS}
    assert all(math.isfinite(number) for number in found.values())
    assert found["hanse_documents"] == 3
    assert found["hanse_sent_bytes"] == 5
    assert found["hanse_loop_lag_p99_milliseconds"] == 1.5
    assert found["hanse_warnings"] == 2


def test_a_metric_has_a_name_of_its_own_and_says_what_it_is() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"hanse_[a-z0-9]+(_[a-z0-9]+)*", name) for name in names)
    assert all(metric.help.endswith(".") or metric.help.endswith(")") for metric in METRICS)
    assert all(metric.phrase == "{}" or metric.row for metric in METRICS)


def test_metrics_of_a_row_stand_side_by_side() -> None:
    units = get_args(Unit)
    written: dict[Unit, Callable[[float], str]] = dict.fromkeys(units, "{:g}".format)
    found = dict(rows(StatusReply(documents=3, passages=7), written))
    assert found["library"] == "3 documents, 7 passages, 0 not indexed yet"
    waiting = StatusReply(documents=3, passages=7, passages_waiting=5, passages_embedded=2)
    assert dict(rows(waiting, written))["library"].endswith("5 not indexed yet, 2 of them embedded")
    assert list(found) == [
        "library",
        "pairs",
        "questions",
        "answers",
        "traffic",
        "memory",
        "loop lag",
    ], "none is open"
    assert "index" in dict(rows(StatusReply(index_recall=0.9), written))
    owed = StatusReply(erasure_owed=True)
    assert "may still be in the library's file" in dict(rows(owed, written))["removed text"]
    assert {metric.name: metric.of(owed) for metric in METRICS}["hanse_library_erasure_owed"] == 1


def test_what_happens_is_counted_under_a_name_of_the_table() -> None:
    before = counts()["hanse_questions"]
    count("hanse_questions")
    count("hanse_questions", 2)
    metric = next(metric for metric in METRICS if metric.name == "hanse_questions")
    assert metric.of(StatusReply(counted=counts())) == before + 3
    assert metric.of(StatusReply()) == 0
    for name in ("hanse_answers", "hanse_sent_bytes"):  # none such; read from its own field
        with pytest.raises(KeyError):
            count(name)
