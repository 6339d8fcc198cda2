"""What is measured of a running daemon, in one table, which `fedctl status` prints.

Names and kinds are those that monitoring systems expect, for an exporter to read.

To add a metric: its line here, read from a field of `StatusReply` that tells it; without one
it is what `count` was told of its name, wherever in the daemon the thing happens. With a ``row``
it stands in `fedctl status`, too, and there rows come in the order of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from proto.control_pb2 import StatusReply

Unit = Literal["count", "bytes", "seconds", "milliseconds", "unix seconds", "ratio"]


@dataclass(frozen=True)
class Metric:
    """One number. ``counts``: it only grows while the daemon runs; otherwise it goes both ways."""

    name: str  # as exporters say it: hanse_<what>_<unit>
    help: str
    unit: Unit
    read: Callable[[StatusReply], float] | None = None  # None: as `count` was told
    counts: bool = False
    row: str = ""  # of `fedctl status`; several metrics may share one
    phrase: str = "{}"  # there, around the number
    unless_none: bool = False  # there only where it is not 0

    def of(self, status: StatusReply) -> float:
        """The number in this status."""
        if self.read is not None:
            return self.read(status)
        return status.counted.get(self.name, 0.0)


METRICS = (
    Metric(
        "hanse_documents",
        "Documents in this site's library.",
        "count",
        lambda s: s.documents,
        row="library",
        phrase="{} documents",
    ),
    Metric(
        "hanse_passages",
        "Passages that the documents were cut into, equal ones each.",
        "count",
        lambda s: s.passages,
        row="library",
        phrase="{} passages",
    ),
    Metric(
        "hanse_passages_waiting",
        "Passages that are not in the index yet: words alone find them.",
        "count",
        lambda s: s.passages_waiting,
        row="library",
        phrase="{} not indexed yet",
    ),
    Metric(
        "hanse_passages_waiting_embedded",
        "Of these, those that are embedded already, and wait for the rest and the index.",
        "count",
        lambda s: s.passages_embedded,
        row="library",
        phrase="{} of them embedded",
        unless_none=True,
    ),
    Metric(
        "hanse_library_erasure_owed",
        "1 while text of removed documents may be in the library's file or its log, else 0.",
        "count",
        lambda s: s.erasure_owed,
        row="removed text",
        phrase="may still be in the library's file, which fedd writes anew by itself",
        unless_none=True,
    ),
    Metric(
        "hanse_index_recall_ratio",
        "Share of the ten nearest passages that the index finds, measured when it was built.",
        "ratio",
        lambda s: s.index_recall,
        row="index",
        phrase="recall@10 {}",
        unless_none=True,  # not measured
    ),
    Metric(
        "hanse_pairs_train",
        "Ingested pairs of split train whose documents are here.",
        "count",
        lambda s: s.pairs_train,
        row="pairs",
        phrase="{} train",
    ),
    Metric(
        "hanse_pairs_valid",
        "The same of split valid.",
        "count",
        lambda s: s.pairs_valid,
        row="pairs",
        phrase="{} valid",
    ),
    Metric(
        "hanse_pairs_test",
        "The same of split test.",
        "count",
        lambda s: s.pairs_test,
        row="pairs",
        phrase="{} test",
    ),
    Metric(
        "hanse_questions",
        "Questions answered since the start, by `ask` or `search`.",
        "count",
        counts=True,
        row="questions",
        phrase="{} answered",
    ),
    Metric(
        "hanse_question_seconds",
        "What answering them took, all together.",
        "seconds",
        counts=True,
    ),
    Metric(
        "hanse_questions_waiting",
        "Questions of people's programs that are being answered, or wait for it.",
        "count",
    ),
    Metric(
        "hanse_questions_given_up",
        "Questions of people's programs that nobody waited for any more, since the start.",
        "count",
        counts=True,
    ),
    Metric(
        "hanse_questions_refused",
        "Questions of people's programs that came when as many waited as may, since the start.",
        "count",
        counts=True,
    ),
    Metric(
        "hanse_answers_given",
        "Answers since the start that `ask` gave as the settings want them made.",
        "count",
        counts=True,
        row="answers",
        phrase="{} given",
    ),
    Metric(
        "hanse_answers_abstained",
        "Questions since the start that the documents do not answer, as `ask` said.",
        "count",
        counts=True,
        row="answers",
        phrase="{} not answered",
    ),
    Metric(
        "hanse_answers_instead",
        "Answers since the start that stand in for those of the language model.",
        "count",
        counts=True,
        row="answers",
        phrase="{} without the language model",
        unless_none=True,
    ),
    Metric(
        "hanse_answers_cut_short",
        "Answers since the start that end where the language model failed.",
        "count",
        counts=True,
        row="answers",
        phrase="{} cut short",
        unless_none=True,
    ),
    Metric(
        "hanse_abstention_threshold",
        "Evidence below which a question is not answered; NaN where every one is.",
        "ratio",
        lambda s: s.abstention_threshold,
    ),
    Metric(
        "hanse_abstention_pairs",
        "Validation pairs that this threshold was found by; 0: general questions found it.",
        "count",
        lambda s: s.abstention_pairs,
    ),
    Metric(
        "hanse_token_refusals",
        "Calls of people's programs refused for their token since the start.",
        "count",
        counts=True,
    ),
    Metric(
        "hanse_votes_for",
        "Times somebody said that a passage answers a question, since the start.",
        "count",
        counts=True,
    ),
    Metric(
        "hanse_votes_against",
        "Times somebody said that a passage does not answer a question, since the start.",
        "count",
        counts=True,
    ),
    Metric(
        "hanse_sent_bytes",
        "Sent to all peers since the start.",
        "bytes",
        lambda s: s.bytes_sent,
        counts=True,
        row="traffic",
        phrase="{} sent",
    ),
    Metric(
        "hanse_received_bytes",
        "Received from all peers since the start.",
        "bytes",
        lambda s: s.bytes_received,
        counts=True,
        row="traffic",
        phrase="{} received",
    ),
    Metric(
        "hanse_resident_bytes",
        "Resident memory of the daemon and its workers; what they share counts once.",
        "bytes",
        lambda s: s.resident_bytes,
        row="memory",
    ),
    Metric(
        "hanse_loop_lag_p50_milliseconds",
        "How late the event loop runs what is due: median since the start.",
        "milliseconds",
        lambda s: s.loop_lag_p50_ms,
        row="loop lag",
        phrase="p50 {}",
    ),
    Metric(
        "hanse_loop_lag_p99_milliseconds",
        "The same: of a hundred times, one is worse.",
        "milliseconds",
        lambda s: s.loop_lag_p99_ms,
        row="loop lag",
        phrase="p99 {}",
    ),
    Metric(
        "hanse_loop_lag_max_milliseconds",
        "The same: the worst.",
        "milliseconds",
        lambda s: s.loop_lag_max_ms,
        row="loop lag",
        phrase="max {}",
    ),
    # Told among the facts of `fedctl status`, and so without a row of their own.
    Metric("hanse_uptime_seconds", "Since the start.", "seconds", lambda s: s.uptime_s),
    Metric("hanse_head_round", "The newest committed round.", "count", lambda s: s.head_round),
    Metric(
        "hanse_generator_head_round",
        "The newest committed round of the generator.",
        "count",
        lambda s: s.generator.head_round,
    ),
    Metric(
        "hanse_manifest_version",
        "Of the federation manifest in use.",
        "count",
        lambda s: s.manifest_version,
    ),
    Metric(
        "hanse_peers_connected",
        "Other sites that answer now.",
        "count",
        lambda s: s.peers_connected,
    ),
    Metric(
        "hanse_peers", "Other sites that the manifest enables.", "count", lambda s: s.peers_total
    ),
    Metric(
        "hanse_audit_entries",
        "Entries of the audit log.",
        "count",
        lambda s: s.audit_entries,
        counts=True,
    ),
    Metric(
        "hanse_audit_breaks",
        "Breaks of the audit log that nobody has acknowledged; the oldest 20.",
        "count",
        lambda s: len(s.audit_breaks),
    ),
    Metric(
        "hanse_documents_waiting",
        "Documents with pages that only OCR can read, where no engine has.",
        "count",
        lambda s: s.documents_waiting,
    ),
    Metric(
        "hanse_warnings",
        "What people should look at (`fedctl status` says it in words).",
        "count",
        lambda s: len(s.warnings),
    ),
    Metric(
        "hanse_certificate_expires",
        "When this site's certificate does.",
        "unix seconds",
        lambda s: s.certificate_expires_unix_s,
    ),
    Metric(
        "hanse_authority_expires",
        "When the authority's certificate does.",
        "unix seconds",
        lambda s: s.authority_expires_unix_s,
    ),
)


_COUNTS = {metric.name: 0.0 for metric in METRICS if metric.read is None}


def count(name: str, more: float = 1.0) -> None:
    """Adds to a metric that is counted, on the event loop; KeyError if the table has none such."""
    _COUNTS[name] += more


def counts() -> dict[str, float]:
    """What was counted since the start of this process, by the metric's name."""
    return dict(_COUNTS)


def rows(
    status: StatusReply, written: Mapping[Unit, Callable[[float], str]]
) -> Iterator[tuple[str, str]]:
    """What has a row, in words; ``written`` says how numbers of a unit are written."""
    shown: dict[str, list[str]] = {}
    for metric in METRICS:
        read = metric.of(status)
        if metric.row and (read or not metric.unless_none):
            number = written[metric.unit](read)
            shown.setdefault(metric.row, []).append(metric.phrase.format(number))
    yield from ((row, ", ".join(phrases)) for row, phrases in shown.items())
