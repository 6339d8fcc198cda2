"""Four real daemons over mutual TLS, with every message that crosses on tape.

What is asserted here is what an institution's security officer asks: what left
the building, who could have read an update, and does everybody end with the
same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
import pytest
import pytest_asyncio
from google.protobuf.message import DecodeError

from crypto.ckks.parameters import choose_parameters
from crypto.ckks.sum_proof import size_of_tags
from crypto.ckks.sums import RoundKey
from crypto.quantize import CryptoError
from daemon.pairs import made
from daemon.pairs.made import Made
from daemon.state.versions import ShapeManifest
from peers.wire.manifest import signed
from peers.wire.vectors import read_encrypted
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.live.tapped_fedd import read_tape
from tests.support.federation import Corpus, LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

SITES = ["alder", "birch", "cedar", "dogwood"]


@dataclass
class Trained:
    """A federation that has committed two rounds, and what was seen meanwhile."""

    live: LiveFederation
    progress: list[control.TrainingProgress]
    updates: list[np.ndarray]
    keys_found: dict[str, bool]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trained]:
    root = tmp_path_factory.mktemp("federation")
    with pytest.MonkeyPatch.context() as patched:
        # Who is held still and searched answers late; what is lost then no deadline says again.
        patched.setenv("HANSE_PATIENCE_S", "120")
        async with _trained(root) as federation:
            yield federation


@contextlib.asynccontextmanager
async def _trained(root: Path) -> AsyncIterator[Trained]:
    # Each imports what it needs and salts its hashes itself, as an operator's do.
    async with LiveFederation.start(
        root,
        SITES,
        surroundings=Surroundings(cold=True),
        connect_s=300,
        # The clock goes on while they stand still and are searched: no deadline ends an attempt.
        rounds={"phase_deadline_s": 600.0, "train_deadline_s": 600.0, "heartbeat_s": 0.5},
        local_epochs=100,
        max_local_epochs=100,
        tables={"pairs": {"learn_from": "supplied+made"}},
    ) as live:
        await live.ingest_all()
        for site in live.sites.values():
            path = site.folder / "state" / "made_pairs.jsonl"
            made.write(path, _made_at(site.corpus))
            path.chmod(0o600)  # as the daemon's own umask has it
        updates: list[np.ndarray] = []
        keys: dict[str, bool] = {}
        watching = asyncio.create_task(_watch(live, updates, keys))
        progress = await live.train("birch", rounds=2)
        watching.cancel()
        yield Trained(live, progress, updates, keys)


def _made_at(corpus: Corpus) -> list[Made]:
    """What its own language model has asked and answered of each document, in words of its own."""
    return [
        Made(
            f"whose {n} hands at {corpus.site} mend it?",
            (f"{document.title}\n{document.text}",),
            (document.id,),
            "llm",
            (f"Mended by {n} hands of {corpus.site[::-1]}, says the model.",),
        )
        for n, document in enumerate(corpus.documents)
        if document.split == "train"
    ]


async def _watch(live: LiveFederation, updates: list[np.ndarray], keys: dict[str, bool]) -> None:
    """During the first round: copy local updates, look for the secret key in every process."""
    seen: set[Path] = set()
    while True:
        for path in live.federation.root.glob("*/state/spool/attempts/*/update.npy"):
            if path not in seen:
                seen.add(path)
                with contextlib.suppress(FileNotFoundError):  # its attempt ended just now
                    updates.append(np.load(path))
        needles = [] if keys else _secret_needles(live)
        if needles:
            await asyncio.sleep(0.1)  # let the holders unseal it
            with _all_stopped(live):  # the round stands still while we look
                for site in live.sites.values():
                    keys[site.id] = await asyncio.to_thread(_holds, site, needles)
        await asyncio.sleep(0.003)


@contextlib.contextmanager
def _all_stopped(live: LiveFederation) -> Iterator[None]:
    daemons = [psutil.Process(site.process.pid) for site in live.sites.values()]
    processes = [p for d in daemons for p in [d, *d.children(recursive=True)]]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def _secret_needles(live: LiveFederation) -> list[bytes]:
    """Pieces of the secret context that the first dealer sealed."""
    for site in live.sites.values():
        for _, _, secret in read_tape(site.folder, "sealed.bin"):
            return [secret[at : at + 48] for at in range(len(secret) // 4, len(secret), 8192)]
    return []


def _holds(site: LiveSite, needles: list[bytes]) -> bool:
    """Whether any process of this site has a piece of the secret in its memory."""
    daemon = psutil.Process(site.process.pid)
    return any(_in_memory(p.pid, needles) for p in [daemon, *daemon.children(recursive=True)])


def _in_memory(pid: int, needles: list[bytes]) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return False  # ended meanwhile
    try:
        for line in maps:
            span, rights = line.split()[:2]
            if "rw" not in rights or line.endswith(("[vvar]", "[vsyscall]")):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            for at in range(start, end, 64 << 20):
                try:
                    piece = os.pread(memory, min(64 << 20, end - at), at)
                except OSError:
                    break  # a guard page
                # Faster than one expression: what is sent meanwhile waits for five seconds at most.
                if any(needle in piece for needle in needles):
                    return True
    finally:
        os.close(memory)
    return False


async def _reported(trained: Trained) -> list[control.Round]:
    """The committed rounds; a site that was behind and fetched the certificate has no report."""
    reported: dict[int, control.Round] = {}
    for site in trained.live.sites.values():
        for one in await site.rounds():
            if one.report.coordinator:
                reported.setdefault(one.certificate.body.round, one)
    assert reported.keys() >= {1, 2}
    return [reported[number] for number in sorted(reported)]


def _tapes(trained: Trained) -> list[bytes]:
    return [raw for site in trained.live.sites.values() for _, _, raw in read_tape(site.folder)]


async def test_two_rounds_are_committed_by_two_coordinators(trained: Trained) -> None:
    rounds = await _reported(trained)
    assert [r.report.round for r in rounds] == [1, 2]
    assert [r.report.attempt for r in rounds] == [0, 0]
    assert rounds[0].report.coordinator != rounds[1].report.coordinator
    assert all(list(r.report.contributors) == SITES for r in rounds)
    for site in trained.live.sites.values():
        assert [one.certificate.body.round for one in await site.rounds()] == [1, 2]


async def test_three_key_holders_computed_the_same_version_to_the_last_bit(
    trained: Trained,
) -> None:
    """Each vote is one site's own digest, signed after it decrypted and applied the sum."""
    for round_ in await _reported(trained):
        holders = set(SITES) - {round_.report.coordinator}
        voters = {vote.site for vote in round_.certificate.votes}
        assert len(voters) >= 3
        assert len(holders) == 3
    digests = {(await site.status()).model_digest for site in trained.live.sites.values()}
    assert len(digests) == 1


def _votes(trained: Trained) -> dict[tuple[int, str], bytes]:
    """From the tapes: the votes that key holders sent; the coordinator's stays at home."""
    votes: dict[tuple[int, str], bytes] = {}
    for site in trained.live.sites.values():
        for direction, _, raw in read_tape(site.folder):
            vote = _envelope(raw)
            if direction == "sent" and vote is not None and vote.HasField("vote"):
                votes[vote.vote.body.round, site.id] = vote.vote.body.model_digest
    return votes


async def test_every_key_holder_votes_the_digest_it_computed_itself(trained: Trained) -> None:
    """Before anybody told them one. A majority commits: the third may be too slow to vote.

    So there are rounds until, in one of them, all three were in time.
    """
    complete = False
    for round_ in range(1, 9):
        if round_ > 2:
            await trained.live.train("birch", rounds=1)
        digests = [digest for (r, _), digest in _votes(trained).items() if r == round_]
        assert len(digests) >= 2
        assert len(set(digests)) == 1
        complete = complete or len(digests) == 3
        if complete and round_ >= 2:
            return
    pytest.fail("in no round did all three key holders compute and vote")


async def test_no_text_of_a_document_or_question_crosses(trained: Trained) -> None:
    crossed = _tapes(trained)
    assert len(crossed) > 100
    everything = b"\0".join(crossed).lower()
    for site in trained.live.sites.values():
        counts = await site.stub.MadePairs(control.MadePairsRequest(), timeout=60)
        assert (counts.training_pairs, counts.triples.supplied, counts.triples.made) == (24, 12, 12)
        ours = [text for one in _made_at(site.corpus) for text in (one.query, *one.answers)]
        for text in [*site.corpus.texts(), *ours]:
            needle = text.strip(". ").lower().encode()
            assert needle not in everything
            # Nor in pieces: any three words in a row.
            words = needle.split()
            for start in range(len(words) - 2):
                assert b" ".join(words[start : start + 3]) not in everything


async def test_the_search_for_text_would_find_it(trained: Trained) -> None:
    """The control of the test above: what does cross is found by the same search."""
    everything = b"\0".join(_tapes(trained))
    assert b"alder" in everything


async def test_no_update_crosses_in_the_clear(trained: Trained) -> None:
    assert len(trained.updates) >= 4, "one a site, copied while the round ran"
    everything = b"\0".join(_tapes(trained))
    for update in trained.updates:
        assert np.abs(update).max() > 0
        for dtype in ("<f4", ">f4", "<f8", "<f2"):
            raw = update.astype(dtype).tobytes()
            width = np.dtype(dtype).itemsize
            for at in range(0, len(update) - 8, 97):
                piece = raw[at * width : (at + 8) * width]
                if len(set(piece)) > 8:  # not a run of zeros
                    assert piece not in everything


async def test_the_coordinators_processes_never_hold_the_secret_key(trained: Trained) -> None:
    rounds = await _reported(trained)
    first = rounds[0].report
    assert trained.keys_found[first.coordinator] is False
    # The control: the same search finds it where it belongs.
    holders = [site for site in SITES if site != first.coordinator]
    assert any(trained.keys_found[site] for site in holders)
    assert trained.keys_found[first.key_dealer]


async def test_the_coordinator_cannot_decrypt_what_it_holds(
    trained: Trained, tmp_path: Path
) -> None:
    rounds = await _reported(trained)
    coordinator = trained.live.sites[rounds[0].report.coordinator]
    blobs = _pushed_to(coordinator, round_=1)
    context = blobs[pb.PUBLIC_CONTEXT][0]
    parameters = choose_parameters(len(SITES), 16)
    public = RoundKey(parameters, context, secret=False)
    assert not public.can_decrypt
    with pytest.raises(CryptoError):
        RoundKey(parameters, context, secret=True)
    assert len(blobs[pb.ENCRYPTED_UPDATE]) == 3
    for number, blob in enumerate(blobs[pb.ENCRYPTED_UPDATE]):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(blob)
        values, tags = _exchanged_values(trained), size_of_tags(len(SITES) - 1)
        for block in read_encrypted(path, parameters, values, trailer=tags):
            with pytest.raises(CryptoError):
                public.decrypt(block)
            break
    assert pb.SEALED_CONTEXT not in blobs


def _exchanged_values(trained: Trained) -> int:
    return len(trained.updates[0]) + 1  # the loss travels as two integers


async def test_sealed_keys_go_to_key_holders_only_and_open_for_one(trained: Trained) -> None:
    rounds = await _reported(trained)
    report = rounds[0].report
    sealed_for = {
        site: _pushed_to(trained.live.sites[site], round_=1).get(pb.SEALED_CONTEXT, [])
        for site in SITES
    }
    assert sealed_for[report.coordinator] == []
    holders = set(SITES) - {report.coordinator, report.key_dealer}
    # A push may have been repeated until the holder expected it: the same bytes again.
    assert all(len(set(sealed_for[site])) == 1 for site in holders)
    assert len({sealed_for[site][0] for site in holders}) == len(holders)


async def test_the_loss_that_people_see_is_a_mean_and_nobody_s_own(trained: Trained) -> None:
    rounds = await _reported(trained)
    assert all(0 < r.report.mean_loss < 64 for r in rounds)


async def test_watching_shows_phases_and_ends_with_the_run(trained: Trained) -> None:
    phases = [p.phase for p in trained.progress]
    assert "train" in phases
    assert phases.count("committed") == 2
    assert trained.progress[-1].finished
    assert trained.progress[-1].bytes_sent > 0


async def test_a_question_is_answered_with_citations(trained: Trained) -> None:
    site = trained.live.sites["cedar"]
    question = "who looks after the capstan brake of cedar?"
    reply = await site.stub.Ask(control.AskRequest(question=question), timeout=60)
    assert reply.citations
    assert all(c.document_id.startswith("cedar/") for c in reply.citations)
    assert re.search(r"\[1\]", reply.answer)


async def test_the_head_version_answers_after_the_run(trained: Trained) -> None:
    site = trained.live.sites["alder"]
    steps = [s async for s in site.stub.Evaluate(control.EvaluateRequest(), timeout=60)]
    assert [step.step for step in steps] == ["index", "questions", "done"]
    judged = steps[-1].result
    status = await site.status()
    assert judged.model_digest == status.model_digest == status.index_digest
    assert judged.questions == 4


async def test_a_second_ingest_of_the_same_is_free(trained: Trained) -> None:
    progress = await trained.live.sites["dogwood"].ingest()
    assert progress.done
    assert progress.documents_new == progress.documents_changed == 0
    assert progress.documents_unchanged == 16


async def test_a_second_run_while_one_is_under_way_is_refused(trained: Trained) -> None:
    first, second = trained.live.sites["alder"], trained.live.sites["birch"]
    reply = await first.stub.Train(control.TrainRequest(rounds=1), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await first.stub.Train(control.TrainRequest(rounds=1), timeout=30)
    assert "is under way" in (refused.value.details() or "")
    # Re-attached from another site, and watched to the end.
    async for progress in second.stub.WatchTraining(control.WatchTrainingRequest(), timeout=120):
        last = progress
    assert last.finished
    await trained.live.until_head(reply.run.target_round)


async def test_the_event_loop_is_free_while_arithmetic_runs(trained: Trained) -> None:
    for site in trained.live.sites.values():
        status = await site.status()
        assert status.loop_lag_p99_ms > 0, "it is measured"


async def test_a_site_disabled_in_the_manifest_is_refused_after_sighup(trained: Trained) -> None:
    live = trained.live
    newer = live.federation.manifest(version=2, disabled={"dogwood"})
    for name in ("alder", "birch", "cedar"):
        site = live.sites[name]
        (site.folder / "manifest.json").write_bytes(signed(newer, live.federation.authority))
        site.process.send_signal(1)  # SIGHUP
    async with asyncio.timeout(20):
        while (await live.sites["alder"].status()).manifest_version != 2:
            await asyncio.sleep(0.1)
        outcast = live.sites["dogwood"]
        while (await outcast.status()).peers_connected:
            await asyncio.sleep(0.1)
    peers = await outcast.stub.Peers(control.PeersRequest(), timeout=10)
    assert any("dogwood" in peer.last_error for peer in peers.peers)


async def test_a_killed_daemon_starts_again_where_it_was(trained: Trained) -> None:
    live = trained.live
    site = live.sites["cedar"]
    before = await site.status()
    workers = psutil.Process(site.process.pid).children(recursive=True)
    site.process.kill()
    await site.process.wait()
    async with asyncio.timeout(30):
        while any(_is_running(worker) for worker in workers):  # they end with their daemon
            await asyncio.sleep(0.05)
    manifest = (site.folder / "manifest.json").read_bytes()
    again = await live.launch("cedar")
    (again.folder / "manifest.json").write_bytes(manifest)
    async with asyncio.timeout(60):
        while True:
            try:
                after = await again.status()
                break
            except grpc.aio.AioRpcError:
                assert again.process.returncode is None, again.log
                await asyncio.sleep(0.2)
    assert after.head_round == before.head_round
    assert after.model_digest == before.model_digest
    assert after.documents == before.documents


def _is_running(process: psutil.Process) -> bool:
    """Nor is one that has ended and that nobody has buried yet: who adopts it may be busy."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


async def test_the_control_socket_is_for_its_owner_and_group_alone(trained: Trained) -> None:
    for site in trained.live.sites.values():
        assert stat.S_IMODE((site.folder / "fedd.sock").stat().st_mode) == 0o660


async def test_what_a_site_keeps_is_for_its_owner_alone(trained: Trained) -> None:
    for site in trained.live.sites.values():
        kept = [path for path in (site.folder / "state").rglob("*") if path.is_file()]
        assert kept
        assert not [path for path in kept if stat.S_IMODE(path.stat().st_mode) & 0o077]


async def test_sigterm_ends_a_daemon_cleanly(trained: Trained) -> None:
    site = trained.live.sites["birch"]
    assert await site.terminate() == 0
    assert not (site.folder / "fedd.sock").exists()
    assert '"event": "stopped"' in site.log


def _envelope(raw: bytes) -> pb.Envelope | None:
    envelope = pb.Envelope()
    try:
        envelope.ParseFromString(raw)
    except DecodeError:
        return None
    return envelope if envelope.WhichOneof("body") else None


def _pushed_to(site: LiveSite, round_: int) -> dict[int, list[bytes]]:
    """Large objects of a round that this site received whole, put together from its tape."""
    whole: dict[int, list[bytes]] = {}
    under_way: dict[str, tuple[pb.BlobName, bytes]] = {}
    for direction, peer, raw in read_tape(site.folder):
        if direction != "received":
            continue
        frame = pb.PushFrame()
        with contextlib.suppress(DecodeError):  # other kinds of messages are on the tape too
            frame.ParseFromString(raw)
        if not frame.HasField("frame"):
            continue
        if frame.HasField("name"):
            under_way[peer] = (frame.name, b"")
        if peer not in under_way:
            continue
        name, data = under_way[peer]
        under_way[peer] = (name, data + frame.frame.data)
        if frame.frame.last:
            if name.round == round_:
                whole.setdefault(name.kind, []).append(data + frame.frame.data)
            del under_way[peer]
    return whole


async def test_shape_manifests_of_two_encoders_differ() -> None:
    groups = (("a", (2, 3)),)
    assert ShapeManifest("one", groups).digest != ShapeManifest("two", groups).digest
