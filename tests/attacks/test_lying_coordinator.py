"""Real daemons whose coordinator lies about its sum; and the same without the proof."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float64
from proto import control_pb2 as control
from tests.support.federation import LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SITES = ["alder", "birch", "cedar"]
VICTIM = "alder"
ROUNDS = {"phase_deadline_s": 300.0, "heartbeat_s": 2.0}


def shared(site: LiveSite, digest: bytes) -> Float64:
    """The exchanged vector of a version on a site's disk."""
    return vector_of(site.folder / "state" / "versions" / f"{digest.hex()}.safetensors")


def vector_of(path: Path) -> Float64:
    """The exchanged vector of a version."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        vector: Float64 = file.get_tensor("shared").astype(np.float64)
    return vector


def update(site: LiveSite, round_: int, attempt: int) -> Float64:
    """What a site trained, as nobody but itself should ever see it."""
    kept: Float64 = np.load(site.folder / f"update-{round_}-{attempt}.npy")[:-1].astype(np.float64)
    return kept


def total(live: LiveFederation, names: list[str], round_: int, attempt: int) -> Float64:
    """The true sum of these sites' updates."""
    together: Float64 = np.sum([update(live.sites[s], round_, attempt) for s in names], axis=0)
    return together


async def one_round(live: LiveFederation, liar: str, lie: str) -> tuple[control.Round, Float64]:
    """A round whose first coordinator lies; as all have it, and what it added to the version."""
    asking = live.sites[VICTIM]
    before = await asking.status()
    (live.sites[liar].folder / "lie").write_text(lie)
    await asking.stub.Train(control.TrainRequest(rounds=1), timeout=60)
    await live.until_head(before.head_round + 1, within_s=400)
    (live.sites[liar].folder / "lie").unlink()
    last = (await asking.rounds())[-1]
    after = last.certificate.body.model_digest
    return last, shared(asking, after) - shared(asking, before.model_digest)


def close(step: Float64, meant: Float64) -> bool:
    """Equal but for rounding to 16 bits; all three sites have the same weight."""
    return bool(np.abs(3 * step - meant).max() < 2e-4 * np.abs(meant).max())


async def test_a_coordinator_that_changes_the_sum_is_refused_and_another_commits(
    tmp_path: Path,
) -> None:
    program = Surroundings(program="tests.attacks.programs.lying_fedd")
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=program, connect_s=500, rounds=ROUNDS
    ) as live:
        await live.ingest_all()
        for liar, lie, follows in (
            ("birch", "drops", "cedar"),
            ("cedar", "singles-out", "alder"),
        ):
            last, step = await one_round(live, liar, f"{lie} {VICTIM}")
            number = last.certificate.body.round
            assert last.certificate.attempt == 1
            assert last.report.coordinator == follows
            # The sum that was stated is made again, of what was trained for it.
            assert close(step, total(live, SITES, number, 0))
            failed = next(one for one in last.attempts if one.attempt == 0)
            assert failed.outcome == "failed"
            assert "0 sites could open the sum, 1 prove it" in failed.reason
            told = f"not that of the updates of alder, birch, cedar. {liar}, who summed, changed it"
            for holder in {*SITES} - {liar}:
                site = live.sites[holder]
                assert told in site.log
                log = "".join(p.read_text() for p in (site.folder / "state" / "audit").iterdir())
                entries = [line for line in log.splitlines() if told in line]
                assert len(entries) == 1
                assert '"action":"attempt"' in entries[0].replace(" ", "")


@pytest.mark.endurance  # of the attack: `make attacks`
async def test_without_the_proof_it_drops_an_update_unseen_and_reads_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the proof is for: the new version then *is* one site's update, for all to read."""
    monkeypatch.setenv("HANSE_UNDEFENDED", "proof")
    program = Surroundings(program="tests.attacks.programs.lying_fedd")
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=program, connect_s=500, rounds=ROUNDS
    ) as live:
        await live.ingest_all()
        last, step = await one_round(live, "birch", f"drops {VICTIM}")
        assert (last.certificate.attempt, list(last.certificate.body.contributors)) == (0, SITES)
        assert close(step, total(live, ["birch", "cedar"], 1, 0))
        last, step = await one_round(live, "cedar", f"singles-out {VICTIM}")
        assert (last.certificate.attempt, list(last.certificate.body.contributors)) == (0, SITES)
        assert close(step, update(live.sites[VICTIM], 2, 0))
        assert not math.isnan(last.report.mean_loss)
