"""What who looks on is shown of rounds, peers and curves: a real site, and replies of any kind."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from daemon.gateway.pages import federation
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from proto.questions_pb2 import ViewReply
from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.browsers import (
    NEEDS_CHROMIUM,
    check_accessible,
    opened,
    sign_in,
)
from tests.daemon.gateway.pages.conftest import MANUAL, browsing

ON_A_SITE = [pytest.mark.federation, pytest.mark.asyncio(loop_scope="package")]
NOW = 1_800_000_000.0


def on_a_site(test: Any) -> Any:
    for mark in (*ON_A_SITE, pytest.mark.timeout(300)):
        test = mark(test)
    return test


def certified(round_: int, *contributors: str) -> control.Round:
    body = pb.VoteBody(
        round=round_, model_digest=bytes([round_] * 32), contributors=contributors, rules=2
    )
    body.mean_loss = 0.25
    votes = [pb.Vote(site=one) for one in contributors]
    certificate = pb.Certificate(body=body, votes=votes, unix_ms=int(NOW * 1000))
    phases = [pb.PhaseTime(phase="key", seconds=9), pb.PhaseTime(phase="train", seconds=150)]
    report = pb.RoundReport(round=round_, coordinator="fir", phases=phases)
    return control.Round(certificate=certificate, report=report)


def judged(round_: int, value: float, kind: str = "shared") -> control.CurvePoint:
    return control.CurvePoint(
        round=round_,
        model_digest=bytes([round_] * 32),
        metric="mrr@10",
        value=value,
        questions=40,
        kind=kind,
    )


# ---- in words ----------------------------------------------------------------------


def test_rounds_are_told_newest_first_with_what_failed() -> None:
    first, second = certified(1, "elm", "fir"), certified(2, "elm", "fir", "oak")
    second.attempts.add(attempt=0, coordinator="oak", outcome="failed", reason="oak is away")
    second.attempts.add(attempt=1, coordinator="fir", outcome="committed")
    reply = ViewReply(head_round=2, rounds=control.RoundsReply(rounds=[first, second]))
    newest, oldest = federation.shown(reply, NOW).rounds
    assert (newest.number, oldest.number) == (2, 1)
    assert (newest.coordinator, newest.contributors, newest.signed) == ("fir", "elm, fir, oak", 3)
    assert (newest.loss, newest.took, newest.committed) == ("0.250", "2 min", "2027-01-15 08:00")
    assert [(one.coordinator, one.reason) for one in newest.failed] == [("oak", "oak is away")]
    assert not oldest.failed


@pytest.mark.parametrize(
    ("target", "phase", "words"),
    [
        (0, "idle", "No run has been started yet."),
        (3, "idle", "ended with round 3"),
        (5, "train", "Round 4 of 5 is under way: phase train, 50% of it done"),
        (5, "idle", "Round 4 of 5 is under way: phase waiting."),
    ],
)
def test_what_is_running_is_said(target: int, phase: str, words: str) -> None:
    run = pb.Run(run_id="r" if target else "", target_round=target, requested_by="oak")
    progress = control.TrainingProgress(phase=phase, fraction=0.5 * (phase == "train"))
    reply = ViewReply(head_round=3, run=run, progress=progress)
    assert words in federation.shown(reply, NOW).running


def test_a_peer_that_was_never_met_has_no_lag() -> None:
    away = control.Peer(site="oak", last_contact_s=-1, round_trip_ms=-1)
    here = control.Peer(
        site="fir",
        connected=True,
        last_contact_s=2,
        round_trip_ms=12.4,
        certificate_expires_unix_s=int(NOW) + 10 * 86_400,
    )
    late, met = federation.shown(ViewReply(peers=[away, here]), NOW).peers
    assert (late.connected, late.last_seen, late.lag, late.certificate) == (False, "never", "", "")
    assert (met.last_seen, met.lag, met.certificate) == ("2.0 s ago", "12 ms", "10 d left")


def test_a_curve_is_a_picture_and_the_same_as_words_and_rows() -> None:
    points = [judged(0, 0.5), judged(1, 0.62), judged(2, 0.6), judged(2, 0.7, "mixture")]
    (curve,) = federation.curves(control.LearningCurveReply(points=points))
    assert curve.sentence == (
        "mrr@10 over rounds. shared version: from 0.500 at round 0 to 0.600 at round 2; "
        "with what is this site's own (mixture): 0.700 at round 2."
    )
    assert [(row[0], row[2], row[3]) for row in curve.rows] == [
        (2, 40, ["0.600", "0.700"]),
        (1, 40, ["0.620", ""]),
        (0, 40, ["0.500", ""]),
    ]
    shared, mixture = curve.lines
    assert [x for x, _ in shared.dots] == sorted(x for x, _ in shared.dots)
    assert shared.dots[1][1] < shared.dots[2][1] < shared.dots[0][1], "what is better is higher"
    assert mixture.dots[0][0] == shared.dots[2][0]
    assert [tick.text for tick in curve.across] == ["0", "1", "2"]


@pytest.mark.parametrize("values", [[0.0], [1.0], [0.3], [0.999, 1.0], [0.0, 1.0], [0.31, 0.32]])
def test_every_value_has_its_place_within_the_picture(values: list[float]) -> None:
    points = [judged(round_, value) for round_, value in enumerate(values)]
    (curve,) = federation.curves(control.LearningCurveReply(points=points))
    for x, y in curve.lines[0].dots:
        assert 0 <= x <= 640
        assert 0 <= y <= 240
        assert math.isfinite(x + y)


# ---- of a real site ----------------------------------------------------------------


@on_a_site
async def test_who_looks_on_sees_the_federation_and_no_document(gate: Gate) -> None:
    async with browsing(gate, await gate.token("view")) as client:
        home = await client.get("/")
        assert (home.status_code, home.headers["location"]) == (303, "/federation")
        page = await client.get("/federation")
        assert page.status_code == 200
        for words in ("No run has been started yet", "fir", "oak", "No round is committed yet"):
            assert words in page.text
        for secret in (MANUAL, "deck", "jetty", str(gate.site.folder), *gate.tokens.values()):
            assert secret not in page.text
        assert '<a href="/search"' not in page.text
        assert (await client.get("/search")).status_code == 403


@on_a_site
async def test_who_only_asks_sees_no_federation(gate: Gate) -> None:
    async with browsing(gate, await gate.token("ask", "search", "metrics")) as client:
        assert '"/federation"' not in (await client.get("/")).text
        page = await client.get("/federation")
        assert page.status_code == 403
        assert re.search("needs the scope &#39;view&#39;", page.text)


@on_a_site
@NEEDS_CHROMIUM
async def test_axe_finds_nothing_on_the_federation_s_page(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("view"))
        await page.get_by_role("heading", name="Peers").wait_for()
        await check_accessible(page, "the federation")


@pytest.mark.parametrize("unix_s", [253402300800.0, 2.0**62, float("inf"), float("nan"), -1e18])
def test_a_time_that_nobody_lives_at_is_said_to_be_none(unix_s: float) -> None:
    """A coordinator says when a round was committed, and nobody signs that."""
    assert federation.day_and_minute(unix_s) == "at no time there is"
