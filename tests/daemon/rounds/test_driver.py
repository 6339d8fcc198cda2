"""The driver's one boundary: nothing that is asked of it, or sent to it, ends the daemon."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import math
import typing
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from structlog.testing import capture_logs

from config.loading import load
from crypto.quantize import CryptoError
from daemon.jobs.sums.sum_jobs import AttemptState
from daemon.main import Daemon
from daemon.rounds.driver import Attached, Driver
from daemon.rounds.progress import ProgressBoard
from daemon.services.collection import Collection
from daemon.state.audit import AuditLog
from daemon.wiring import Workers, way_of
from peers.attempts import effects as do
from peers.rounds.runs import RunRefused
from peers.wire.certificates import RULES
from peers.wire.errors import PeerRefused, RemoteProtocolError
from peers.wire.frames import ReceivedObject
from peers.wire.manifest import RETRIEVER, signed
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.federation import _toml, _words
from tests.support.small_models import small_encoder

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is logged is drawn with every local variable otherwise, which takes seconds."""
    with capture_logs():
        yield


def carried_out(base: Any) -> list[type]:
    """The effects there are: those that are built on this one, and can be made."""
    found: list[type] = []
    for kind in base.__subclasses__():
        found += [kind, *carried_out(kind)]
    return [one for one in dict.fromkeys(found) if one not in BASES]


BASES = {do.Work, do.WorkOfPlan, do.SendBehind}
EFFECTS = carried_out(do.Effect)
NO_NUMBER = 1 << 70  # no round and no attempt: neither SQLite nor protobuf can take it


def absurd(hint: Any) -> Any:
    """A value of that type that nothing can be done with."""
    hint = next((one for one in typing.get_args(hint) if isinstance(one, type)), hint)
    if hint is do.Durable:
        return do.Durable(NO_NUMBER, b"", promised=NO_NUMBER)
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint()
    return {int: NO_NUMBER, float: math.nan, str: "\0", bytes: b"\0"}.get(hint, ())


def made(kind: type) -> Any:
    """An effect that can't be carried out."""
    hints = typing.get_type_hints(kind)
    needed = [one for one in fields(kind) if one.default is MISSING]
    named = {one.name: absurd(hints[one.name]) for one in needed if one.default_factory is MISSING}
    return kind(**named)


async def started(folder: Path, stack: AsyncExitStack) -> Driver:
    """Everything of a daemon but its control socket, in this process."""
    federation = Federation.found(folder, "alder", "birch")
    home = folder / "alder"
    (home / "manifest.json").write_bytes(signed(federation.manifest(), federation.authority))
    encoder = small_encoder(folder / "encoder", words=_words())
    settings: dict[str, dict[str, Any]] = {
        "site": {"state_dir": str(home / "state")},
        "identity": {"directory": str(home), "manifest": str(home / "manifest.json")},
        "network": {"bind": federation.address("alder")},
        "retriever": {"encoder": str(encoder), "max_tokens": 64, "personal": "none"},
        # As in tests/support/federation.py.
        "retrieval": {"passage_tokens": 60, "lost_answers": 0.0},
        "workers": {"threads": 1},
    }
    (home / "fedd.toml").write_text(_toml(settings))
    daemon = Daemon(load(home / "fedd.toml"))
    workers = Workers.of(1)
    stack.push_async_callback(workers.stop)
    *_, driver = await daemon._make_driver(workers, stack)
    audit = AuditLog(home / "audit")
    stack.callback(audit.close)
    transport = daemon._make_transport({RETRIEVER: driver}, audit)
    attached = Attached(
        ProgressBoard(lambda: (0, 0)),
        audit,
        None,
        committed=lambda _round, _digest: None,
        run_ended=lambda: None,
    )
    running = asyncio.create_task(
        driver.run(way_of(transport, audit, driver), attached, lambda: None, heartbeat_s=5.0)
    )

    async def end() -> None:
        assert not running.done(), "whatever happened, it lives"
        running.cancel()
        await asyncio.wait([running])

    stack.push_async_callback(end)
    await transport.start()
    stack.push_async_callback(transport.stop, 0)
    driver.listening.set()
    await driver.ask(do.Tick())
    return driver


def collection_of(driver: Driver) -> Collection:
    """What the retriever's rounds are for."""
    return cast(Collection, driver.served)


def around_of(driver: Driver, audit: AuditLog, services: Any) -> Any:
    """What calls of the control service are made with, as far as documents go."""
    refresh = driver.readiness.refresh
    known = {"driver": driver, "collection": collection_of(driver), "refresh": refresh}
    return SimpleNamespace(**known, audit=audit, services=services)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    async with AsyncExitStack() as stack:
        yield await started(tmp_path_factory.mktemp("driver"), stack)


def stepping(driver: Driver, monkeypatch: pytest.MonkeyPatch, *effects: do.Effect) -> None:
    """The next step wishes these."""
    monkeypatch.setattr(driver.protocol, "step", lambda _event, _now: list(effects))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in EFFECTS if kind is not do.Persist], ids=lambda kind: kind.__name__
)
async def test_an_effect_that_cannot_be_carried_out_costs_itself(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    shown: list[do.Progress] = []
    monkeypatch.setattr(driver.progress, "phase", lambda effect, *_: shown.append(effect))
    last = do.Progress(1, 0, "prepare", "birch")
    stepping(driver, monkeypatch, made(kind), last)
    before = asyncio.all_tasks()
    # Refused, or taken: some fail later, as tasks of their own.
    await asyncio.gather(driver.ask(do.Tick()), return_exceptions=True)
    assert shown[-1] is last, "what stands behind it is carried out"
    stepping(driver, monkeypatch)
    if begun := asyncio.all_tasks() - before:
        await asyncio.wait(begun, timeout=0.05)
    await asyncio.wait_for(driver.ask(do.Tick()), 10)


@pytest.mark.parametrize(
    "error",
    [OverflowError("too large"), ValueError("no"), RuntimeError("a bug"), KeyError("gone")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "kind", [kind for kind in EFFECTS if kind is not do.Persist], ids=lambda kind: kind.__name__
)
async def test_whatever_an_effect_raises_its_message_is_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, kind: type, error: Exception
) -> None:
    async def raising(effect: do.Effect) -> None:
        if isinstance(effect, kind):
            raise error

    monkeypatch.setattr(driver, "_carry_out", raising)
    stepping(driver, monkeypatch, made(kind))
    with pytest.raises(RemoteProtocolError, match=f"can't carry that out .{type(error).__name__}"):
        await driver.ask(do.MessageReceived("birch", pb.Recall(round=1)))
    assert kind.__name__ in driver.last_error
    assert str(error) in driver.last_error
    with pytest.raises(RunRefused, match="can't carry that out"):
        await driver.ask(do.StopRequested("run"))


@pytest.mark.parametrize("error", [OverflowError("too large"), AssertionError("a bug")])
async def test_a_step_that_fails_refuses_its_message_and_keeps_what_it_had_done(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kept = do.Progress(1, 0, "waiting", "birch", message="kept")
    shown: list[do.Progress] = []
    monkeypatch.setattr(driver.progress, "phase", lambda effect, *_: shown.append(effect))

    def failing(_event: do.Event) -> None:
        driver.protocol._here.emit(kept)
        raise error

    monkeypatch.setattr(driver.protocol, "_dispatch", failing)
    with pytest.raises(RemoteProtocolError, match="can't carry that out"):
        await driver.ask(do.MessageReceived("birch", pb.Recall(round=1)))
    assert shown == [kept]
    monkeypatch.undo()
    await asyncio.wait_for(driver.ask(do.Tick()), 10)


async def test_a_manifest_that_waits_is_warned_of_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.protocol._here.manifests, "waiting", "Manifest 4 is installed")
    with capture_logs() as logged:
        for _ in range(2):
            await driver.ask(do.Tick())
    told = [one for one in logged if "Manifest 4" in one["event"]]
    assert [one["log_level"] for one in told] == ["warning"]


async def test_an_error_of_an_attempt_goes_with_a_later_round_and_others_stay(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def committed(round_: int) -> None:
        stepping(driver, monkeypatch, do.Adopt(round_, bytes(32), ("birch",)))
        await asyncio.gather(driver.ask(do.Tick()), return_exceptions=True)

    async def failed(round_: int) -> None:
        why = do.Progress(round_, 46, "failed", "birch", message="birch: did not answer")
        stepping(driver, monkeypatch, why)
        await driver.ask(do.Tick())

    driver.report("alder's disk is full")
    await failed(1)
    assert driver.last_error == "round 1 attempt 46: birch: did not answer"
    await committed(1)
    assert driver.last_error == "round 1 attempt 46: birch: did not answer"
    await committed(2)
    assert driver.last_error == "alder's disk is full"
    await failed(3)
    driver.report("birch has signed two things")
    assert driver.last_error == "birch has signed two things", "the last one is shown"
    await committed(4)
    assert driver.last_error == "birch has signed two things"
    driver.went_well("reload")
    assert driver.last_error == "birch has signed two things", "it is about something else"
    driver.report("a reload was refused", about="reload")
    driver.went_well("reload")
    assert driver.last_error == ""


@pytest.mark.slow
async def test_a_state_that_was_forgotten_on_purpose_raises_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        driver = await started(tmp_path, stack)
        driver.store.forget_round()
        with capture_logs() as logged:
            for round_ in (1, 2):
                back = do.WentBack(round_, "birch", "promised attempt 4")
                stepping(driver, monkeypatch, back)
                await driver.ask(do.Tick())
                if round_ == 1:
                    assert driver.last_error == ""
        told = [one for one in logged if "went back" in one["event"]]
        assert [one["log_level"] for one in told] == ["info", "warning"]
        assert "on purpose (fedctl site forget-round)" in told[0]["event"]
        assert "of round 2" in driver.last_error, "of another round it was nobody's purpose"
        monkeypatch.undo()


@pytest.mark.slow
async def test_a_ledger_that_lacks_rounds_in_which_the_site_took_part_is_noticed(
    tmp_path: Path,
) -> None:
    """Its state was restored: certificates come back from peers, what was spent does not."""
    async with AsyncExitStack() as stack:
        driver = await started(tmp_path, stack)
        for round_ in (2, 5):
            await driver.privacy.spend(round_, 0, None)
        commits = [one_of(round_, "alder", "birch") for round_ in range(1, 6)]
        commits += [one_of(6, "birch"), one_of(7, "alder", "birch", rules=0)]
        driver.store.persist(driver.protocol.durable, tuple(commits[:4]))
        with capture_logs() as logged:
            await driver.unbooked.look()
            assert "lacks rounds 1 and 3 to 4, in which it took part" in driver.unbooked.warning
            driver.store.persist(driver.protocol.durable, tuple(commits[4:]))
            await driver.unbooked.look()
        assert [one["log_level"] for one in logged if "lacks" in one["event"]] == ["warning"]
        assert "lacks rounds 1 and 3 to 4," in driver.unbooked.warning
        driver.store.persist(driver.protocol.durable, (one_of(8, "alder", "birch"),))
        await driver.unbooked.look()
        assert "lacks rounds 1, 3 to 4 and 8," in driver.unbooked.warning


async def test_an_upload_of_an_attempt_that_is_over_leaves_no_file(
    driver: Driver, tmp_path: Path
) -> None:
    (late := tmp_path / "late").write_bytes(b"late")
    name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=99)
    await driver._work.arrived("birch", name, ReceivedObject(4, bytes(32), path=late))
    assert not late.exists()


@pytest.mark.parametrize("kept", [False, True])
async def test_an_update_is_booked_before_it_is_hidden_and_once(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """There is none to hide here, or what is kept is damaged: booked it is all the same."""
    round_ = 11 + kept
    monkeypatch.setattr(driver._work, "_state", AttemptState(round_, 0, tmp_path))
    driver._work.take_plan(pb.Plan(round=round_, training=pb.TrainingPlan(bits=16)))
    if kept:
        path = driver._folders.kept_integers(round_, 0)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(CryptoError):
        await driver._work.hide_update(do.HideUpdate(round_, 0, "birch", 1.0, (1,), 0))
    assert await driver.privacy.unbooked([round_]) == [round_] * kept


async def test_integers_that_are_to_be_sent_again_are_not_made_anew(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sum that may have been opened: others would tell their difference."""
    monkeypatch.setattr(driver._work, "_state", AttemptState(13, 1, tmp_path))
    training = pb.TrainingPlan(bits=16)
    driver._work.take_plan(pb.Plan(round=13, attempt=1, scale_exponents=[1], training=training))
    with pytest.raises(CryptoError, match="to be made again, and this site does not have"):
        await driver._work.hide_update(do.HideUpdate(13, 1, "birch", 1.0, (1,), 0))
    assert await driver.privacy.unbooked([13]) == [13]


def one_of(round_: int, *contributors: str, rules: int = RULES) -> pb.Commit:
    body = pb.VoteBody(round=round_, contributors=contributors, rules=rules)
    return pb.Commit(certificate=pb.Certificate(body=body))


@pytest.mark.slow
async def test_a_message_that_cannot_be_sent_is_lost_and_said(driver: Driver) -> None:
    driver._out.put("birch", cast(pb.RunWish, pb.Envelope()))  # none that a peer could take
    driver._out.put("nobody", pb.RunWish())
    driver._out.put("birch", pb.RunWish())
    async with asyncio.timeout(10):
        while "could not be sent" not in driver.last_error:
            await asyncio.sleep(0.01)
    await asyncio.wait_for(driver.ask(do.Tick()), 10)


@pytest.mark.slow
async def test_a_state_that_cannot_be_written_leaves_the_site_refusing_and_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        driver = await started(tmp_path, stack)
        said: list[do.Send] = []
        monkeypatch.setattr(driver._out, "put", lambda to, body: said.append(do.Send(to, body)))
        promise = do.Send("birch", pb.Promised())
        stepping(driver, monkeypatch, made(do.Persist), promise)
        with pytest.raises(PeerRefused, match="stands still"):
            await driver.ask(do.MessageReceived("birch", pb.Recall(round=1)))
        assert promise not in said, "nothing is said that is not on the disk"
        monkeypatch.undo()
        for event, refusal in (
            (do.MessageReceived("birch", pb.Recall(round=1)), PeerRefused),
            (do.StopRequested("run"), RunRefused),
        ):
            with pytest.raises(refusal, match="restart it"):
                await driver.ask(event)
        for _ in range(20):  # its own events pile up nowhere
            await driver.feed(do.Tick())
        async with asyncio.timeout(10):
            while len(driver._events):
                await asyncio.sleep(0.01)
        assert "restart it" in driver.last_error
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1)
        assert "restart it" in (driver.accepts("birch", name, 1) or "")
