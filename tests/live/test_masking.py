"""Four real daemons in masking mode: a site dies behind its input, and the sum is still exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from proto import control_pb2 as control
from tests.support.federation import LiveFederation

pytestmark = [pytest.mark.federation, pytest.mark.timeout(400)]

SITES = ["alder", "birch", "cedar", "dogwood"]
LEAD, VICTIM = "birch", "dogwood"  # of round 1, attempt 0: the second of the sorted sites


@pytest.mark.parametrize(
    ("fault", "contributes"),
    [
        ("openshares:before=kill", True),  # the sum is certified, with its input: it opens nothing
        # its shares are told, and it opens nothing itself
        pytest.param("openshares:after=kill", True, marks=pytest.mark.endurance),
        # its secrets are shared, its input never comes: a deadline must pass
        pytest.param("hideupdate:before=kill", False, marks=pytest.mark.endurance),
    ],
)
async def test_a_site_is_killed_and_the_sum_is_exact(
    tmp_path: Path, fault: str, contributes: bool
) -> None:
    deadlines = {"phase_deadline_s": 60.0}
    async with LiveFederation.start(
        tmp_path, SITES, rounds=deadlines, mode="masking", min_participants=3
    ) as live:
        await live.ingest_all()
        await live.sites[VICTIM].terminate()
        await live.launch(VICTIM, fault=fault)
        await live.until_connected()
        site = live.sites[LEAD]
        await site.stub.Train(control.TrainRequest(rounds=1), timeout=30)
        assert await live.sites[VICTIM].process.wait() == -9
        del live.sites[VICTIM]
        await live.until_head(1)
        (committed,) = await site.rounds()
        body, report = committed.certificate.body, committed.report
        expected = SITES if contributes else [name for name in SITES if name != VICTIM]
        assert list(body.contributors) == expected
        assert (report.attempt, report.coordinator, report.key_dealer) == (0, LEAD, "")
        assert "open" in [phase.phase for phase in report.phases]
        # A mask left in the sum would be some 10^9 in every value; the loss is one of them.
        assert math.isfinite(report.mean_loss)
        assert 0 < report.mean_loss < 20
        digests = {(await one.status()).model_digest for one in live.sites.values()}
        assert digests == {body.model_digest}
        await live.launch(VICTIM)  # and it catches up
        await live.until_connected()
        await live.until_head(1)
