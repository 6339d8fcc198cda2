"""Four real daemons with a robust rule: an attacker is measured, named, told, counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.federation import LiveFederation, Surroundings

SITES = ["alder", "birch", "cedar", "douglas"]


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_poisoned_update_stays_out_of_the_model_and_its_site_is_told(
    tmp_path: Path,
) -> None:
    program = Surroundings(program="tests.live.poisoning_fedd")
    async with LiveFederation.start(
        tmp_path,
        SITES,
        surroundings=program,
        connect_s=500,
        rounds={"phase_deadline_s": 300.0, "heartbeat_s": 2.0},
    ) as live:
        await live.ingest_all()
        plan = pb.TrainingPlan(robust=pb.ROBUST_NORM, byzantine_sites=1, min_participants=3)
        request = control.TrainRequest(rounds=1, plan=plan)
        poison = live.sites["cedar"].folder / "poison"
        poison.write_text("30")
        await live.sites["alder"].stub.Train(request, timeout=60)
        await live.until_head(1, within_s=400)
        poison.unlink()
        await live.sites["alder"].stub.Train(request, timeout=60)
        await live.until_head(2, within_s=400)
        for site in live.sites.values():
            first, second = await site.rounds()
            assert list(first.certificate.body.rejected) == ["cedar"]
            assert list(first.certificate.body.contributors) == ["alder", "birch", "douglas"]
            assert first.certificate.attempt == 0, first.attempts
            assert not second.certificate.body.rejected
            assert list(second.certificate.body.contributors) == SITES
            assert "select" in [phase.phase for phase in first.report.phases]
        told = live.sites["cedar"].log
        assert "our update was rejected" in told
        assert "MADs above the median" in told
        peers = await live.sites["birch"].stub.Peers(control.PeersRequest(), timeout=60)
        assert {peer.site: peer.rejected_rounds for peer in peers.peers} == {
            "alder": 0,
            "cedar": 1,
            "douglas": 0,
        }
