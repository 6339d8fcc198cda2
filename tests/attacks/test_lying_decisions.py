"""Real daemons, one of which decides what is not its to decide, or disturbs those who would.

Every lie is told twice: to daemons as they are, which refuse it and go on beside the liar,
and to daemons from which only that defence was taken, where it has its way.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from safetensors import safe_open

from crypto.identity.authority import sign_request
from crypto.identity.site import install, renew_site
from daemon.state.versions import version_path, write_version
from peers.wire.certificates import certificate_of, sign_vote
from peers.wire.manifest import signed
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.authority import signer
from tests.support.federation import LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.faults,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

UNDEFENDED = pytest.mark.endurance  # of the attack: `make attacks`
THREE = ["alder", "birch", "cedar"]
FOUR = [*THREE, "dogwood"]
# Round r is led by the site at (r + attempt) mod n: round 1 by birch, cedar, dogwood, alder.
FARTHEST_ATTEMPT = 2**32 - 5  # the liar takes the last one of its own
LAST_RUN = 2**62  # no message has a larger number
CHEAP = 1e-6


@asynccontextmanager
async def federation(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    sites: list[str],
    *,
    without: str = "",
    faulty_sites: int = 1,
    phase_s: float = 60.0,
    **training: Any,
) -> AsyncIterator[LiveFederation]:
    """With corpora, one liar tolerated, and without one defence if ``without`` names one."""
    monkeypatch.setenv("HANSE_UNDEFENDED", without)
    async with LiveFederation.start(
        root,
        sites,
        surroundings=Surroundings(program="tests.attacks.programs.deciding_fedd"),
        connect_s=500,
        rounds={"phase_deadline_s": phase_s, "heartbeat_s": 1.0},
        faulty_sites=faulty_sites,
        **training,
    ) as live:
        await live.ingest_all()
        yield live


def tell(live: LiveFederation, site: str, lie: str) -> None:
    (live.sites[site].folder / "lie").write_text(lie)


def recant(live: LiveFederation, site: str) -> None:
    (live.sites[site].folder / "lie").unlink()


async def ask(site: LiveSite, rounds: int = 1, privacy: pb.PrivacyPlan | None = None) -> int:
    """A person at this site asks for rounds; up to which."""
    wish = control.TrainRequest(rounds=rounds, plan=pb.TrainingPlan(privacy=privacy))
    reply = await site.stub.Train(wish, timeout=60)
    return int(reply.run.target_round)


async def heads(live: LiveFederation, at: list[str], round_: int, within_s: float = 300) -> None:
    """Wait until these sites have committed that round."""
    async with asyncio.timeout(within_s):
        for name in at:
            while (await live.sites[name].status()).head_round < round_:
                assert live.sites[name].process.returncode is None, live.sites[name].log
                await asyncio.sleep(0.1)


async def logged(live: LiveFederation, at: list[str], words: str, within_s: float = 200) -> None:
    """Wait until all of these sites' logs say so."""
    async with asyncio.timeout(within_s):
        while not all(words in live.sites[name].log for name in at):
            await asyncio.sleep(0.1)


async def agreed(live: LiveFederation, at: list[str]) -> control.Round:
    """The last round, of which these sites know one and the same certificate body."""
    last = [(await live.sites[name].rounds())[-1] for name in at]
    assert len({one.certificate.body.SerializeToString(deterministic=True) for one in last}) == 1
    return last[0]


async def restarted(live: LiveFederation, names: list[str]) -> None:
    for name in names:
        assert await live.sites[name].terminate() == 0
    for name in names:
        await live.launch(name)
    await live.until_connected()


async def open_attempt(site: LiveSite) -> int:
    """The last attempt of the round under way that a site has entered; -1: none."""
    reply = await site.stub.Rounds(control.RoundsRequest(), timeout=60)
    return max((one.attempt for one in reply.open_attempts), default=-1)


def made(live: LiveFederation, liar: str) -> set[bytes]:
    """The versions that a liar has made up."""
    raw = (live.sites[liar].folder / "made").read_bytes()
    return {raw[at : at + 32] for at in range(0, len(raw), 32)}


# ---- row 4: absurd numbers -----------------------------------------------------------


async def test_absurd_numbers_move_nobody_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR) as live:
        tell(live, "dogwood", "absurd")
        assert await ask(live.sites["alder"]) == 1
        await heads(live, THREE, 1)
        assert (live.sites["dogwood"].folder / "did-absurd-0").exists()
        assert (await agreed(live, THREE)).certificate.attempt == 0
        await restarted(live, THREE)
        for name in THREE:
            assert (await live.sites[name].status()).run.generation == 1
        assert await ask(live.sites["birch"]) == 2
        await heads(live, THREE, 2)
        assert (live.sites["dogwood"].folder / "did-absurd-1").exists()
        for name in THREE:
            assert live.sites[name].process.returncode is None
            assert "Traceback" not in live.sites[name].log


@UNDEFENDED
async def test_where_one_promise_is_enough_it_takes_all_to_the_last_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, without="others") as live:
        tell(live, "cedar", "absurd")
        await ask(live.sites["alder"], 30)  # the first may be committed before it is heard
        async with asyncio.timeout(200):
            for name in ("alder", "birch"):
                while await open_attempt(live.sites[name]) < FARTHEST_ATTEMPT:
                    await asyncio.sleep(0.1)


@UNDEFENDED
async def test_where_a_runs_number_may_be_any_nobody_can_ask_for_a_run_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, without="farthest") as live:
        tell(live, "cedar", "usurping")
        await ask(live.sites["alder"])
        async with asyncio.timeout(200):
            for name in ("alder", "birch"):
                while (await live.sites[name].status()).run.generation < LAST_RUN:
                    await asyncio.sleep(0.1)
        await ask(live.sites["birch"])
        await logged(live, ["alder"], f"Run.generation is {LAST_RUN + 1}; expected 0 .. {LAST_RUN}")


# ---- row 5: any vector ---------------------------------------------------------------


async def test_a_version_that_its_coordinator_made_up_is_voted_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR, phase_s=10) as live:
        tell(live, "birch", "any vector")
        await ask(live.sites["alder"])
        honest = ["alder", "cedar", "dogwood"]
        await logged(live, honest, "1 sites have opened the sum, 2 prove a version")
        await heads(live, honest, 1)
        last = await agreed(live, honest)
        assert last.certificate.attempt > 0
        assert last.certificate.body.model_digest not in made(live, "birch")


@UNDEFENDED
async def test_without_the_proof_a_coordinator_commits_any_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, without="proof") as live:
        tell(live, "birch", "any vector")
        await ask(live.sites["alder"])
        await heads(live, THREE, 1)
        last = await agreed(live, THREE)
        assert last.certificate.attempt == 0
        assert {last.certificate.body.model_digest} == made(live, "birch")


# ---- row 6: two histories ------------------------------------------------------------


async def test_three_sites_that_bear_one_liar_have_one_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, phase_s=10) as live:
        tell(live, "birch", "forking")
        await ask(live.sites["alder"])
        await logged(live, ["alder", "cedar"], "1 sites have opened the sum, 2 prove a version")
        await heads(live, THREE, 1)
        last = await agreed(live, THREE)
        assert len(last.certificate.votes) == 3
        assert last.certificate.body.model_digest not in made(live, "birch")


@UNDEFENDED
async def test_where_a_majority_decides_two_versions_of_a_round_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No defence is patched away: ``faulty_sites = 0`` bears no liar, as it says."""
    async with federation(tmp_path, monkeypatch, THREE, faulty_sites=0) as live:
        tell(live, "birch", "forking")
        await ask(live.sites["alder"])
        await heads(live, ["alder", "cedar"], 1)
        last = [(await live.sites[name].rounds())[-1] for name in ("alder", "cedar")]
        digests = {one.certificate.body.model_digest for one in last}
        assert len(digests) == 2
        assert digests == made(live, "birch")


# ---- row 7: an older manifest --------------------------------------------------------


@pytest.mark.parametrize(
    "without", ["", pytest.param("order", marks=UNDEFENDED)], ids=["defended", "undefended"]
)
async def test_votes_of_an_expelled_site_commit_nothing_under_the_older_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Birch, with the key of cedar, which is expelled: two of the three of manifest 1."""
    settings = {"faulty_sites": 0, "phase_s": 20, "min_participants": 2}
    async with federation(tmp_path, monkeypatch, THREE, without=without, **settings) as live:
        await ask(live.sites["alder"])
        await heads(live, THREE, 1)
        expelling = live.federation.manifest(version=2, disabled={"cedar"})
        for name in ("alder", "birch"):
            site = live.sites[name]
            (site.folder / "manifest.json").write_bytes(
                signed(expelling, live.federation.authority)
            )
            site.process.send_signal(signal.SIGHUP)
        await logged(live, ["alder", "birch"], '"event": "reloaded"')
        await ask(live.sites["alder"])
        both = ["alder", "birch"]
        await heads(live, both, 2)
        head = await agreed(live, both)
        assert head.certificate.body.manifest_version == 2
        forged = forged_commit(live, head.certificate, ["birch", "cedar"])
        envelope = pb.Envelope(commit=forged)
        (live.sites["birch"].folder / "say-alder").write_bytes(envelope.SerializeToString())
        if without:
            await heads(live, ["alder"], 3)
            status = await live.sites["alder"].status()
            assert status.model_digest == forged.certificate.body.model_digest
            return
        await logged(live, ["alder"], "versions do not go back")
        assert (await live.sites["alder"].status()).head_round == 2
        await ask(live.sites["alder"])
        await heads(live, both, 3)
        assert (await agreed(live, both)).certificate.body.manifest_version == 2


def forged_commit(live: LiveFederation, head: pb.Certificate, voters: list[str]) -> pb.Commit:
    """A next round under manifest 1, by the keys of these sites, of any version."""
    folder = live.sites[voters[0]].folder / "state" / "versions"
    path = version_path(folder, head.body.model_digest)
    with safe_open(path, framework="numpy") as file:
        shape = bytes.fromhex(file.metadata()["shape_digest"])
        vector = file.get_tensor("shared") + np.float32(0.5)
    made_up, _ = write_version(folder, shape, vector)
    body = pb.VoteBody()
    body.CopyFrom(head.body)
    del body.contributors[:]
    body.contributors.extend(THREE)
    body.round, body.parent_digest = head.body.round + 1, head.body.model_digest
    body.model_digest, body.manifest_version = made_up, 1
    body.manifest_digest = live.federation.manifest(version=1).digest
    votes = [sign_vote(signer(live.federation.identity(one)), body, 0) for one in voters]
    return pb.Commit(certificate=certificate_of(0, votes, head.unix_ms + 1))


# ---- rows 9, 12, 14: honest attempts are not disturbed -------------------------------


async def test_honest_attempts_commit_at_once_whatever_a_liar_says_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged heads, attempts of its own, and other losses than those that were found."""
    async with federation(tmp_path, monkeypatch, FOUR, phase_s=30) as live:
        liar = "dogwood"  # it leads round 3, and deals the key of round 2
        for round_, lie in ((1, "pre-empting"), (2, "ahead"), (3, ""), (4, "other loss")):
            if lie:
                tell(live, liar, lie)
            assert await ask(live.sites["alder"]) == round_
            await heads(live, FOUR, round_)
            last = await agreed(live, THREE)
            assert (last.certificate.attempt, lie) == (0, lie)
            assert last.certificate.body.mean_loss > CHEAP
            if lie:
                recant(live, liar)
        said = "dogwood votes for something else than was proven"
        assert said in live.sites["alder"].log or liar not in {
            vote.site for vote in last.certificate.votes
        }


@UNDEFENDED
@pytest.mark.parametrize(("lie", "without"), [("ahead", "ahead"), ("pre-empting", "patience")])
async def test_where_a_liar_is_believed_at_once_only_its_own_attempts_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, without: str
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR, without=without) as live:
        tell(live, "dogwood", lie)
        await ask(live.sites["alder"])
        await heads(live, FOUR, 1)
        last = await agreed(live, FOUR)
        print(f"{lie}: committed in attempt {last.certificate.attempt}, a turn of dogwood's")
        assert last.report.coordinator == "dogwood", "honest attempts have failed, at least two"


async def test_who_ends_its_attempts_for_one_site_alone_parts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it would go on, and the others wait; it would be where they never are."""
    async with federation(tmp_path, monkeypatch, FOUR) as live:
        tell(live, "birch", "for one alone")
        await ask(live.sites["alder"])
        await heads(live, ["alder", "cedar", "dogwood"], 1)
        last = await agreed(live, ["alder", "cedar", "dogwood"])
        print(f"for one alone: committed in attempt {last.certificate.attempt}")
        assert last.certificate.attempt <= 2


@UNDEFENDED
async def test_where_sites_go_on_alone_they_are_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR, without="company") as live:
        tell(live, "birch", "for one alone")
        await ask(live.sites["alder"])
        async with asyncio.timeout(200):
            while await open_attempt(live.sites["alder"]) < 2:
                await asyncio.sleep(0.1)
        for name in ("cedar", "dogwood"):
            assert await open_attempt(live.sites[name]) == 0
        assert (await live.sites["alder"].status()).head_round == 0


# ---- row 14 --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "anew"),
    [("", False), ("", True), pytest.param("newest certificate", False, marks=UNDEFENDED)],
    ids=["defended", "restarted", "undefended"],
)
async def test_a_replaced_certificate_is_in_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, anew: bool
) -> None:
    """Cedar has alder's old key: the round's key would be sealed for whoever has that one.

    ``anew``: daemons that were started since know of the new one from the last round.
    """
    async with federation(tmp_path, monkeypatch, THREE, without=without, phase_s=10) as live:
        alder, root = live.sites["alder"].folder, tmp_path
        stolen = live.sites["cedar"].folder / "stolen"
        stolen.mkdir()
        for name in ("site.crt", "site.key"):
            shutil.copy(alder / name, stolen / name)
        old = live.federation.identity("alder")
        renew_site(alder, new_key=True)
        request = (alder / "site.csr").read_bytes()
        certificate = sign_request(root / "ca", request, expect_site="alder")
        install(alder, certificate, (root / "ca" / "ca.crt").read_bytes())
        live.sites["alder"].process.send_signal(signal.SIGHUP)
        await ask(live.sites["birch"])
        await heads(live, THREE, 1)  # all have seen the new certificate
        if anew:
            await restarted(live, THREE)
        tell(live, "cedar", "stolen key")  # it leads round 2
        await ask(live.sites["birch"])
        await heads(live, THREE, 2)
        plans = sorted(live.sites["birch"].folder.glob("plan-2-*.bin"))
        named = {
            one.certificate
            for path in plans
            for one in pb.Plan.FromString(path.read_bytes()).participants
        }
        assert plans
        if without:
            assert old.certificate_der in named
            return
        assert old.certificate_der not in named
        await logged(live, ["birch"], "alder has had a newer certificate since")
        assert (await agreed(live, THREE)).certificate.attempt > 0


@UNDEFENDED
async def test_without_the_proof_a_coordinator_names_the_loss_and_the_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, without="proof") as live:
        tell(live, "birch", "cheap loss")
        await ask(live.sites["alder"])
        await heads(live, THREE, 1)
        body = (await agreed(live, THREE)).certificate.body
        assert (body.mean_loss, body.next_clip_norm) == (CHEAP, CHEAP)


async def test_the_loss_of_a_round_is_what_those_who_opened_its_sum_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR, phase_s=10) as live:
        tell(live, "birch", "cheap loss")
        await ask(live.sites["alder"])
        honest = ["alder", "cedar", "dogwood"]
        await logged(live, honest, "1 sites have opened the sum, 2 prove a version")
        await heads(live, honest, 1)
        last = await agreed(live, honest)
        assert last.certificate.body.mean_loss > CHEAP
        assert last.certificate.body.next_clip_norm == 0.0


@pytest.mark.parametrize(
    "without", ["", pytest.param("signed runs", marks=UNDEFENDED)], ids=["defended", "undefended"]
)
async def test_a_round_that_no_person_asked_for_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Cedar leads round 2, for a run that it says alder's people wanted, and for none."""
    async with federation(tmp_path, monkeypatch, FOUR, without=without, phase_s=10) as live:
        tell(live, "cedar", "nobody's run")
        assert await ask(live.sites["alder"]) == 1
        await heads(live, FOUR, 1)
        honest = ["alder", "birch", "dogwood"]
        if without:
            await heads(live, FOUR, 2)
            assert (await live.sites["alder"].status()).run.run_id == "nobodys"
            return
        await logged(live, honest, "the certificate is of cedar, not of the signer")
        for name in honest:
            status = await live.sites[name].status()
            assert (status.head_round, status.phase) == (1, "idle")
        recant(live, "cedar")
        assert await ask(live.sites["alder"]) == 2
        await heads(live, honest, 2)


# ---- evidence, and a state that went back --------------------------------------------


async def test_two_promises_of_one_attempt_are_shown_with_the_remedy_ever_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = THREE
    async with federation(tmp_path, monkeypatch, FOUR) as live:
        tell(live, "dogwood", "two promises")
        await ask(live.sites["alder"])
        await heads(live, honest, 1)
        recant(live, "dogwood")
        words = "dogwood has signed two promises of one attempt"
        for again in (False, True):
            if again:
                await restarted(live, honest)
            for name in honest:
                shown = await fedctl_peers(live.sites[name])
                assert words in shown
                assert "expel it" in shown
        for name in honest:
            entries = audited(live.sites[name], "evidence")
            assert len(entries) == 1
            assert '"site":"dogwood"' in entries[0]
            assert '"signed":"two_promises"' in entries[0]
        assert await ask(live.sites["birch"]) == 2
        await heads(live, honest, 2)


def audited(site: LiveSite, action: str) -> list[str]:
    """The lines of its audit log that are of this action."""
    folder = site.folder / "state" / "audit"
    lines = "".join(path.read_text() for path in sorted(folder.iterdir())).splitlines()
    return [line for line in lines if f'"action":"{action}"' in line]


async def fedctl_peers(site: LiveSite) -> str:
    """What an operator sees."""
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "daemon.fedctl", "peers"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "HANSE_SOCKET": str(site.folder / "fedd.sock")},
    )
    out, _ = await ran.communicate()
    assert ran.returncode == 0
    return out.decode()


async def test_a_state_restored_within_a_round_is_noticed_and_not_gone_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alder signs what is summed; then its people bring back a copy of before.

    Cedar stands still meanwhile, so that the round can't do without alder.
    """
    async with federation(tmp_path, monkeypatch, FOUR, phase_s=15) as live:
        alder = live.sites["alder"]
        assert await alder.terminate() == 0
        alder = await live.launch("alder", fault="send.stated:after=kill")
        await live.until_connected()
        cedar = live.sites["cedar"].process
        cedar.send_signal(signal.SIGSTOP)
        try:
            await ask(live.sites["dogwood"])
            await phase(alder, "train")
            copied_as_it_is(alder)
            await asyncio.wait_for(alder.process.wait(), 200)
            restore(alder)
            before = len(alder.log)
            alder = await live.launch("alder")
            async with asyncio.timeout(200):
                while "this site's state went back" not in alder.log[before:]:
                    assert alder.process.returncode is None, alder.log
                    await asyncio.sleep(0.1)
            error = (await ready(alder)).last_error
        finally:
            cedar.send_signal(signal.SIGCONT)
        assert "signed a statement in attempt 0" in alder.log[before:]
        assert "Find out who restored it" in alder.log[before:]
        assert len(audited(alder, "state")) >= 1
        print("last error:", error)
        await heads(live, FOUR, 1)
        await agreed(live, FOUR)
        for name in FOUR:  # nobody has seen it contradict itself
            assert "a site contradicts itself" not in live.sites[name].log
            assert not any(
                "has signed two" in w for w in (await live.sites[name].status()).warnings
            )


async def ready(site: LiveSite) -> control.StatusReply:
    async with asyncio.timeout(200):
        while True:
            try:
                return await site.status()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def phase(site: LiveSite, name: str) -> None:
    """Wait until a site's attempt is in that phase."""
    async with asyncio.timeout(200):
        while (await site.status()).phase != name:
            await asyncio.sleep(0.01)


def copied_as_it_is(site: LiveSite) -> None:
    """A copy of a running site's state, as a snapshot of its disk would be."""
    site.process.send_signal(signal.SIGSTOP)
    shutil.copytree(site.folder / "state", site.folder / "earlier")
    site.process.send_signal(signal.SIGCONT)


def restore(site: LiveSite) -> None:
    shutil.rmtree(site.folder / "state")
    shutil.copytree(site.folder / "earlier", site.folder / "state")
