"""From what fedd says of its federation to what a page shows: rows and curves in words. PURE."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from proto.control_pb2 import Attempt, CurvePoint, LearningCurveReply, Peer, Round
from proto.questions_pb2 import ViewReply

_ROUNDS_LISTED: Final = 20
_METRICS: Final = ("mrr@10", "recall@10", "ndcg@10", "hit@1")
_WIDTH, _HEIGHT = 640.0, 240.0  # of a curve, in units of its own
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 12.0, 12.0, 28.0
_KINDS: Final = {
    "": "as an earlier version judged it",
    "shared": "shared version",
}
_WITH_OWN: Final = "with what is this site's own"  # a layer, by whatever name


@dataclass(frozen=True)
class Line:
    """What versions reached, as one kind: dots of the curve, joined."""

    name: str
    style: int  # from 1: of the stylesheet's
    path: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A metric over rounds: a picture, what it shows in a sentence, and all of it as rows."""

    metric: str
    sentence: str
    lines: list[Line]
    across: list[Tick]
    up: list[Tick]
    kinds: list[str]
    rows: list[tuple[int, str, int, list[str]]]  # round, version, questions, a value a kind


@dataclass(frozen=True)
class ShownAttempt:
    """An attempt that failed, or is under way."""

    number: int
    coordinator: str
    outcome: str
    phase: str
    reason: str


@dataclass(frozen=True)
class ShownRound:
    """A committed round."""

    number: int
    committed: str
    coordinator: str
    contributors: str
    rejected: str
    signed: int
    loss: str
    took: str
    version: str
    failed: list[ShownAttempt]


@dataclass(frozen=True)
class ShownPeer:
    """Another site, as this one sees it."""

    site: str
    address: str
    connected: bool
    head_round: int
    manifest: int
    last_seen: str
    lag: str
    software: str
    certificate: str
    rejected: int
    error: str


@dataclass(frozen=True)
class Shown:
    """All of the page. ``running``: what is under way, in a sentence."""

    running: str
    active: bool
    facts: list[tuple[str, str]]
    message: str
    warnings: list[str]
    accused: list[tuple[str, str, str]]
    under_way: list[ShownAttempt]
    open_round: int
    rounds: list[ShownRound]
    more_rounds: int
    peers: list[ShownPeer]
    curves: list[Curve]
    missing: str


def shown(reply: ViewReply, now_s: float) -> Shown:
    """``now_s``: seconds of Unix."""
    rounds = [_round(one) for one in reversed(reply.rounds.rounds)]
    progress, active = reply.progress, reply.run.target_round > reply.head_round
    return Shown(
        running=_running(reply, active=active),
        active=active,
        facts=_facts(reply),
        message=progress.message,
        warnings=list(reply.warnings),
        accused=[(one.site, one.signed, one.remedy) for one in reply.accused],
        under_way=[_attempt(one) for one in reversed(reply.rounds.open_attempts)],
        open_round=reply.rounds.open_round,
        rounds=rounds[:_ROUNDS_LISTED],
        more_rounds=max(0, reply.head_round - _ROUNDS_LISTED),
        peers=[_peer(one, now_s) for one in reply.peers],
        curves=curves(reply.curve),
        missing=reply.curve.missing,
    )


def _running(reply: ViewReply, *, active: bool) -> str:
    run, progress = reply.run, reply.progress
    if not run.run_id:
        return "No run has been started yet."
    if not active:
        return (
            f"No run is under way. The last one, started by {run.requested_by}, ended with round "
            f"{run.target_round}."
        )
    where = f"Round {reply.head_round + 1} of {run.target_round} is under way"
    phase = progress.phase if progress.phase not in ("", "idle", "committed") else "waiting"
    share = f", {progress.fraction:.0%} of it done" if 0 < progress.fraction < 1 else ""
    return f"{where}: phase {phase}{share}. The run was started by {run.requested_by}."


def _facts(reply: ViewReply) -> list[tuple[str, str]]:
    progress, version = reply.progress, reply.index_digest.hex()[:12]
    told = [
        ("Site", f"{reply.site} of {reply.federation_id}"),
        ("Committed", f"round {reply.head_round}" if reply.head_round else "no round yet"),
        ("Model version", reply.model_digest.hex()[:12]),
        ("Answers with", version or "none yet: it is being indexed"),
        ("Peers", f"{sum(one.connected for one in reply.peers)} of {len(reply.peers)} connected"),
        ("Manifest", f"version {reply.manifest_version}"),
        ("Daemon", f"{reply.software_version}, up {duration(reply.uptime_s)}"),
    ]
    if progress.coordinator:
        told.append(("Coordinator", progress.coordinator))
    if progress.participants:
        told.append(("Participants", ", ".join(progress.participants)))
    if reply.run.run_id and math.isfinite(progress.loss):
        told.append(("Loss", f"{progress.loss:.3f}"))
    return told


def _round(one: Round) -> ShownRound:
    body, report = one.certificate.body, one.report
    loss = body.mean_loss if body.rules else report.mean_loss
    known = math.isfinite(loss) and bool(body.rules or report.coordinator)
    # The key is dealt while others train: a span of its own, no part of the sum.
    took = sum(phase.seconds for phase in report.phases if phase.phase != "key")
    return ShownRound(
        number=body.round,
        committed=day_and_minute(one.certificate.unix_ms / 1000),
        coordinator=report.coordinator,
        contributors=", ".join(body.contributors),
        rejected=", ".join(body.rejected),
        signed=len(one.certificate.votes),
        loss=f"{loss:.3f}" if known else "",
        took=duration(took) if took else "",
        version=body.model_digest.hex()[:12],
        failed=[_attempt(attempt) for attempt in one.attempts if attempt.outcome != "committed"],
    )


def _attempt(one: Attempt) -> ShownAttempt:
    return ShownAttempt(one.attempt, one.coordinator, one.outcome, one.phase, one.reason)


def _peer(one: Peer, now_s: float) -> ShownPeer:
    never = one.last_contact_s < 0
    left_s = one.certificate_expires_unix_s - now_s
    expires = f"{duration(left_s)} left" if left_s > 0 else "expired"
    return ShownPeer(
        site=one.site,
        address=one.address,
        connected=one.connected,
        head_round=one.head_round,
        manifest=one.manifest_version,
        last_seen="never" if never else f"{duration(one.last_contact_s)} ago",
        lag="" if never or one.round_trip_ms < 0 else f"{one.round_trip_ms:.0f} ms",
        software=one.software_version,
        certificate=expires if one.certificate_expires_unix_s else "",
        rejected=one.rejected_rounds,
        error=one.last_error,
    )


# ---- curves ------------------------------------------------------------------------


def curves(reply: LearningCurveReply) -> list[Curve]:
    """Of each metric that the page shows, as far as it was judged."""
    found = ((name, [p for p in reply.points if p.metric == name]) for name in _METRICS)
    return [_curve(name, points) for name, points in found if points]


def _curve(metric: str, points: Sequence[CurvePoint]) -> Curve:
    kinds = list(dict.fromkeys(point.kind for point in points))
    low, high = _ends(point.value for point in points)
    first, last = points[0].round, max(points[-1].round, points[0].round + 1)

    def place(round_: int, value: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (round_ - first) / (last - first)
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)
        return round(x, 1), round(y, 1)

    step = 0.1 if high - low > 0.45 else 0.05
    steps = [low + step * part for part in range(round((high - low) / step) + 1)]
    numbers = range(first, last + 1, math.ceil((last - first) / 6))
    lines = []
    for style, kind in enumerate(kinds, start=1):
        dots = [place(point.round, point.value) for point in points if point.kind == kind]
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in dots)
        lines.append(Line(_named(kind), style, path, dots))
    return Curve(
        metric=metric,
        sentence=_sentence(metric, points, kinds),
        lines=lines,
        across=[Tick(place(number, low)[0], str(number)) for number in numbers],
        up=[Tick(place(first, value)[1], f"{value:.2f}") for value in steps],
        kinds=[line.name for line in lines],
        rows=_rows(points, kinds),
    )


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """Tenths around all values, within 0 and 1, at least two apart: small steps stay small."""
    there = [value for value in values if math.isfinite(value)] or [0.0]
    low = max(0.0, math.floor(min(there) * 10) / 10)
    high = min(1.0, math.ceil(max(there) * 10) / 10)
    if high - low < 0.2:
        low = max(0.0, round(high - 0.2, 1))
        high = max(high, round(low + 0.2, 1))
    return low, high


def _named(kind: str) -> str:
    return _KINDS.get(kind, f"{_WITH_OWN} ({kind.replace('_', ' ')})")


def _sentence(metric: str, points: Sequence[CurvePoint], kinds: Sequence[str]) -> str:
    told = []
    for kind in kinds:
        own = [point for point in points if point.kind == kind]
        first, last = own[0], own[-1]
        ended = f"{last.value:.3f} at round {last.round}"
        moved = f"from {first.value:.3f} at round {first.round} to {ended}" if own[1:] else ended
        told.append(f"{_named(kind)}: {moved}")
    return f"{metric} over rounds. {'; '.join(told)}."


def _rows(
    points: Sequence[CurvePoint], kinds: Sequence[str]
) -> list[tuple[int, str, int, list[str]]]:
    """A row a version, newest first."""
    rows: dict[tuple[int, bytes], dict[str, CurvePoint]] = {}
    for point in points:
        rows.setdefault((point.round, point.model_digest), {})[point.kind] = point
    return [
        (
            round_,
            digest.hex()[:12],
            max(point.questions for point in row.values()),
            [f"{row[kind].value:.3f}" if kind in row else "" for kind in kinds],
        )
        for (round_, digest), row in reversed(rows.items())
    ]


# ---- for people --------------------------------------------------------------------


def duration(seconds: float) -> str:
    """In the unit that is read most easily."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def day_and_minute(unix_s: float) -> str:
    """Of UTC; a coordinator says when, and may say anything."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "at no time there is"
