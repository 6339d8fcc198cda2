"""What a site books, what it refuses, and what it tells its people."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from crypto.privacy import NoiseTerms, epsilon_of
from crypto.quantize import CryptoError
from daemon.process.workers import Worker
from daemon.state.privacy_ledger import _SCHEMA, Booked, LedgerError, PrivacyBudget, PrivacyLedger
from peers.attempts import effects as do
from peers.plans import policy
from peers.wire.certificates import RULES
from proto import federation_pb2 as pb

DELTA = 1e-5
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


def terms(multiplier: float) -> NoiseTerms:
    return NoiseTerms(clip_norm=1.0, multiplier=multiplier, sharers=2)


def a_plan(multiplier: float | None, *, clip_norm: float = 1.0, colluders: int = 1) -> pb.Plan:
    plan = pb.Plan(training=pb.TrainingPlan(local_epochs=1, min_participants=3, bits=16))
    if multiplier is not None:
        plan.noise_multiplier, plan.clip_norm = multiplier, clip_norm
        plan.training.privacy.CopyFrom(
            pb.PrivacyPlan(
                clip_norm=clip_norm,
                noise_multiplier=multiplier,
                noise_floor=multiplier,
                noise_decay=1.0,
                first_round=1,
                colluders=colluders,
            )
        )
    return plan


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crypto() -> AsyncIterator[Worker]:
    """One process for all accounting here: what that needs takes a second to import."""
    worker = Worker("crypto", threads=1)
    yield worker
    await worker.stop()


@asynccontextmanager
async def budget_of(
    crypto: Worker, path: Path, epsilon: float | None, *, least_noise: float = 0.0
) -> AsyncIterator[PrivacyBudget]:
    ledger = PrivacyLedger(path)
    try:
        yield PrivacyBudget(ledger, crypto, epsilon, DELTA, least_noise=least_noise)
    finally:
        ledger.close()


# ---- the ledger ------------------------------------------------------------------------


def test_the_ledger_remembers_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "privacy.sqlite3"
    for attempt, noise in enumerate((terms(2.0), None, terms(1.5))):
        ledger = PrivacyLedger(path)
        ledger.book(7, attempt, noise)
        ledger.close()
    ledger = PrivacyLedger(path)
    assert ledger.booked() == Booked((2.0, 1.5), bare=1)
    ledger.close()
    rows = sqlite3.connect(path).execute("SELECT round, attempt, clip_norm, sharers FROM updates")
    assert rows.fetchall() == [(7, 0, 1.0, 2), (7, 1, 0.0, 0), (7, 2, 1.0, 2)]


def test_what_is_spent_is_synced_before_the_update_leaves(tmp_path: Path) -> None:
    with closing(PrivacyLedger(tmp_path / "privacy.sqlite3")) as ledger:
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


def test_the_same_attempt_twice_is_spent_twice(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "privacy.sqlite3")
    for _ in range(2):
        ledger.book(1, 0, terms(2.0))
    assert ledger.booked().multipliers == (2.0, 2.0)
    ledger.close()


def test_rounds_of_two_models_spend_of_one_ledger(tmp_path: Path) -> None:
    with closing(PrivacyLedger(tmp_path / "privacy.sqlite3")) as ledger:
        ledger.book(1, 0, terms(2.0))
        ledger.book(3, 0, terms(1.5), "generator")
        assert ledger.booked().multipliers == (2.0, 1.5)
        assert (ledger.rounds("retriever"), ledger.rounds("generator")) == ({1}, {3})


def test_a_ledger_from_before_there_were_models_is_the_retrievers(tmp_path: Path) -> None:
    path = tmp_path / "privacy.sqlite3"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SCHEMA)
        db.execute(
            "INSERT INTO updates (round, attempt, multiplier, clip_norm, sharers, unix_ms)"
            " VALUES (4, 0, 2.0, 1.0, 2, 0)"
        )
        db.commit()
    for _ in range(2):
        with closing(PrivacyLedger(path)) as ledger:
            assert ledger.booked() == Booked((2.0,), bare=0)
            assert (ledger.rounds("retriever"), ledger.rounds("generator")) == ({4}, set())


def test_a_damaged_or_newer_ledger_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "privacy.sqlite3"
    path.write_bytes(b"spent nothing at all, really" * 1000)
    with pytest.raises(LedgerError, match="No update leaves this site until"):
        PrivacyLedger(path)
    newer = tmp_path / "newer.sqlite3"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 3")
    with pytest.raises(LedgerError, match="newer Hanse"):
        PrivacyLedger(newer)
    with pytest.raises(LedgerError, match="cannot use"):
        PrivacyLedger(tmp_path / "nowhere" / "privacy.sqlite3")


# ---- the budget ------------------------------------------------------------------------


@pytest.mark.slow
@IN_ONE_LOOP
async def test_a_budget_is_spent_and_then_refuses_for_good(crypto: Worker, tmp_path: Path) -> None:
    path = tmp_path / "privacy.sqlite3"
    limit = epsilon_of([2.0] * 3, DELTA) * 1.001
    situation = do.Situation(20, willing=True)
    async with budget_of(crypto, path, limit) as budget:
        assert not math.isinf(await budget.least())
        for attempt in range(3):
            await budget.spend(1, attempt, terms(2.0))
        with pytest.raises(CryptoError, match="would exceed this site's privacy budget"):
            await budget.spend(1, 3, terms(2.0))
        with pytest.raises(CryptoError, match="it has no noise"):
            await budget.spend(1, 3, None)
        limited = await budget.limit(situation)
        assert limited.least_multiplier > 2.0
    async with budget_of(crypto, path, limit) as budget:  # the daemon was started again
        account = await budget.account(2.0, 1)
        assert account.booked == Booked((2.0,) * 3, 0)
        assert account.spent == pytest.approx(limit / 1.001)
        assert account.cost == pytest.approx(epsilon_of([2.0] * 4, DELTA) - account.spent)
        assert not account.fits
        with pytest.raises(CryptoError, match="would exceed"):
            await budget.spend(2, 0, terms(2.0))
    async with budget_of(crypto, path, limit / 2) as budget:  # the operator thought better of it
        limited = await budget.limit(situation)
        assert not limited.willing
        assert "budget is spent" in limited.reason
        assert math.isinf(limited.least_multiplier)


@IN_ONE_LOOP
async def test_attempts_that_fail_do_not_spend_a_budget_without_end(
    crypto: Worker, tmp_path: Path
) -> None:
    """Each may have been opened, so each is booked: after so many somebody must look."""
    situation = do.Situation(20, willing=True)
    async with budget_of(crypto, tmp_path / "privacy.sqlite3", None) as budget:
        for attempt in range(8):
            assert (await budget.limit(situation)).willing
            await budget.spend(3, attempt, terms(2.0))
        limited = await budget.limit(situation)
        assert not limited.willing
        assert "8 noised updates of round 3 are booked, and none was committed" in limited.reason
        assert budget.committed()
        assert (await budget.limit(situation)).willing
        assert not budget.committed()


@pytest.mark.slow
@IN_ONE_LOOP
async def test_without_a_budget_everything_is_booked_and_nothing_refused(
    crypto: Worker, tmp_path: Path
) -> None:
    async with budget_of(crypto, tmp_path / "privacy.sqlite3", None) as budget:
        for attempt, noise in enumerate((terms(0.01), None, terms(0.5))):
            await budget.spend(1, attempt, noise)
        assert await budget.least() == 0.0
        assert await budget.limit(do.Situation(5, willing=True)) == do.Situation(5, willing=True)
        account = await budget.account(0.0, 1)
        assert account.booked == Booked((0.01, 0.5), bare=1)
        assert math.isnan(account.cost)
        assert account.budget is None


@pytest.mark.slow
@IN_ONE_LOOP
async def test_a_budget_alone_refuses_noise_that_hides_nothing(
    crypto: Worker, tmp_path: Path
) -> None:
    """One round of multiplier 0.001 is epsilon = 506,184: at the plan, and again at booking."""
    async with budget_of(crypto, tmp_path / "privacy.sqlite3", 8.0) as budget:
        limited = await budget.limit(do.Situation(20, willing=True))
        assert "needs a multiplier of 0.63" in policy.noise_objection(
            a_plan(0.001), limited.least_multiplier
        )
        with pytest.raises(CryptoError, match="would exceed this site's privacy budget"):
            await budget.spend(1, 0, terms(0.001))
        assert (await budget.account(0.001, 1)).booked == Booked((), 0)


@pytest.mark.slow
@IN_ONE_LOOP
async def test_people_are_told_the_least_noise_that_is_demanded(
    crypto: Worker, tmp_path: Path
) -> None:
    """By the budget or by privacy.least_noise, whichever asks for more."""
    path = tmp_path / "privacy.sqlite3"
    async with budget_of(crypto, path, None, least_noise=2.0) as budget:
        assert (await budget.account(2.0, 1)).fits
        account = await budget.account(1.9, 1)
        assert (account.least, account.fits) == (2.0, False)
    async with budget_of(crypto, path, 8.0, least_noise=0.1) as budget:
        account = await budget.account(0.2, 1)
        assert account.least == pytest.approx(0.638, rel=1e-3)
        assert not account.fits


@IN_ONE_LOOP
async def test_an_update_that_can_not_be_booked_does_not_leave(
    crypto: Worker, tmp_path: Path
) -> None:
    path = tmp_path / "privacy.sqlite3"
    async with budget_of(crypto, path, None) as budget:
        await budget.spend(1, 0, terms(1.0))
        with sqlite3.connect(path) as other:
            other.execute("DROP TABLE updates")
        with pytest.raises(LedgerError, match="No update leaves"):
            await budget.spend(1, 1, terms(1.0))


class _Slow(PrivacyLedger):
    """A booking is under way until it is let go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def book(self, *update: Any) -> None:
        self.begun.set()
        self.goes_on.wait(60)
        super().book(*update)


@IN_ONE_LOOP
@pytest.mark.slow
async def test_a_booking_is_finished_even_when_its_attempt_is_given_up(
    crypto: Worker, tmp_path: Path
) -> None:
    """What is asked next must see it: else one round too many would fit."""
    limit = epsilon_of([2.0], DELTA) * 1.001
    with closing(_Slow(tmp_path / "privacy.sqlite3")) as ledger:
        budget = PrivacyBudget(ledger, crypto, limit, DELTA)
        assert await budget.least() <= 2.0
        spending = asyncio.create_task(budget.spend(1, 0, terms(2.0)))
        await asyncio.to_thread(ledger.begun.wait, 60)
        spending.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not spending.done(), "nobody else has its turn yet"
        ledger.goes_on.set()
        await asyncio.wait([spending])
        assert spending.cancelled()
        assert await budget.least() > 2.0


@pytest.mark.slow
@IN_ONE_LOOP
async def test_a_budget_schedule_spends_what_was_asked_for(crypto: Worker, tmp_path: Path) -> None:
    async with budget_of(crypto, tmp_path / "privacy.sqlite3", None) as budget:
        multiplier = await budget.calibrated(20, 2.0)
        assert epsilon_of([multiplier] * 20, DELTA) == pytest.approx(2.0, rel=1e-4)


# ---- plans and what the site can afford ---------------------------------------------------


def test_a_plan_that_is_too_dear_is_declined_with_what_would_do() -> None:
    assert policy.noise_objection(a_plan(2.0), 2.0) == ""
    assert "needs a multiplier of 2.001 or more" in policy.noise_objection(a_plan(2.0), 2.001)
    assert "it has no noise" in policy.noise_objection(a_plan(None), 2.0)
    assert "nothing is left" in policy.noise_objection(a_plan(1000.0), math.inf)
    assert policy.noise_objection(a_plan(None), 0.0) == ""


def test_noise_that_the_grid_can_not_carry_is_declined() -> None:
    assert "too coarse" in policy.noise_objection(a_plan(1e-5), 0.0)
    assert "choose less noise" in policy.noise_objection(a_plan(1000.0), 0.0)
    assert "beyond the grid" in policy.noise_objection(a_plan(1.0, clip_norm=1e300), 0.0)


def test_a_rounds_noise_follows_the_loss_in_the_certificate_before_it() -> None:
    training = a_plan(2.0, clip_norm=0.5).training
    training.privacy.noise_floor = 0.1
    training.privacy.noise_decay = 0.5
    training.privacy.loss_threshold = 1.0
    training.privacy.first_round = 4
    assert policy.noise_of_round(training, 4, None) == pytest.approx((2.0, 0.5))
    body = pb.VoteBody(rules=RULES, mean_loss=1.0, next_clip_norm=0.6)
    head = pb.Certificate(body=body)
    assert policy.noise_of_round(training, 5, head) == pytest.approx((2.0 / 2 * 0.5, 0.5))
    training.privacy.clip_quantile = 0.5
    assert policy.noise_of_round(training, 5, head)[1] == 0.6
    assert policy.noise_of_round(training, 4, head)[1] == 0.5  # a run begins with its own norm
    assert policy.noise_of_round(a_plan(None).training, 5, head) == (0.0, 0.0)


def test_what_is_not_in_the_body_that_all_voted_on_changes_no_noise() -> None:
    """Of a round of old each vote named its own loss: a coordinator chose among the votes."""
    training = a_plan(2.0, clip_norm=0.5).training
    training.privacy.noise_floor = 0.1
    training.privacy.clip_quantile = 0.5
    votes = [pb.Vote(mean_loss=0.0, next_clip_norm=1e9)] * 3
    told = policy.noise_of_round(training, 5, pb.Certificate(votes=votes))
    assert told == policy.noise_of_round(training, 5, None) == (2.0, 0.5)
    today = pb.Certificate(body=pb.VoteBody(rules=RULES, mean_loss=1.0), votes=votes)
    bare = pb.Certificate(body=pb.VoteBody(rules=RULES, mean_loss=1.0))
    assert policy.noise_of_round(training, 5, today) == policy.noise_of_round(training, 5, bare)


def test_shares_count_on_the_fewest_contributors_less_those_who_collude() -> None:
    found = policy.terms_of(a_plan(2.0, clip_norm=0.5))
    assert found == NoiseTerms(clip_norm=0.5, multiplier=2.0, sharers=2)
    assert policy.terms_of(a_plan(None)) is None


def test_in_a_robust_round_each_sites_noise_is_enough_alone() -> None:
    """What is compared there is decrypted on the coordinator's word: it may be one site's."""
    plan = a_plan(2.0)
    plan.training.robust = pb.ROBUST_NORM
    found = policy.terms_of(plan)
    assert found is not None
    assert found.sharers == 1
