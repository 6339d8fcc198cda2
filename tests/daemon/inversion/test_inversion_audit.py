"""The audit as operators have it: from the daemon's worker, and on fedctl's screen."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc.aio
import psutil
import pytest

from daemon.control.context import ServiceContext
from daemon.control.service import ControlService
from daemon.fedctl.main import main
from daemon.inversion import exposure
from daemon.inversion.exposure import AuditOptions, ExposureError
from daemon.jobs import learning
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.workers import Worker
from daemon.services.collection import NotIndexedYet
from daemon.services.inversion_audit import (
    AuditProcess,
    AuditUnderWay,
    EmbeddingAudit,
    options_of,
)
from daemon.state.audit import AuditLog
from daemon.state.audit_format import segments
from proto import control_pb2 as control
from proto.control_pb2_grpc import add_ControlServicer_to_server
from tests.daemon.inversion.test_attackers import COLOURS, THINGS, WORDS, small_site
from tests.daemon.state.entries import entries
from tests.support.canned_daemon import canned_daemon
from tests.support.small_models import small_encoder

QUICK = control.AuditEmbeddingsRequest(noises=[50.0], minutes=0.05)


@dataclass
class Served:
    library_path: Path
    readable_digest: bytes


@pytest.mark.slow
async def test_an_audit_can_be_hung_up_on_and_its_end_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, *(word.lower() for word in [*COLOURS, *THINGS])]
    encoder = small_encoder(tmp_path / "encoder", words, dimension=64, layers=1)
    spec = RetrieverSpec(encoder=str(encoder), max_tokens=48, device="cpu")
    served = Served(tmp_path / "library.sqlite3", b"")
    learning.ingest(spec, served.library_path, *small_site(), passage_tokens=40)
    learning.embed_passages(spec, served.library_path)
    worker = Worker("auditing", threads=1, patience_s=5.0)
    audit = EmbeddingAudit(spec, tmp_path / "versions", served, AuditProcess(worker), 0.05)

    with pytest.raises(NotIndexedYet):
        await anext(audit.steps(QUICK))
    served.readable_digest = learning.write_initial_version(spec, tmp_path / "versions")
    with pytest.raises(ExposureError, match="18 levels are asked about, 16 at most"):
        await anext(audit.steps(control.AuditEmbeddingsRequest(bits=range(1, 18))))

    first = audit.steps(QUICK)
    assert (await anext(first)).step == "texts"
    process = worker.pid
    assert process is not None
    with pytest.raises(AuditUnderWay, match="wait until it has ended"):
        await anext(audit.steps(QUICK))
    await first.aclose()  # whoever asked hung up
    assert not psutil.pid_exists(process)

    log = AuditLog(tmp_path / "audit")
    async with listening(tmp_path / "s", audit, log):
        words_of = ["--noise", "50", "--minutes", "0.05", "--show", "1", "--json"]
        capsys.readouterr()
        assert await asyncio.to_thread(fedctl, tmp_path / "s", *words_of) == 0
    log.close()
    found = json.loads(capsys.readouterr().out)
    assert found["model_digest"] == served.readable_digest.hex()
    exact, noised = found["levels"]
    assert exact["passages"]["telling"]["f1"] > noised["passages"]["telling"]["f1"] + 0.2
    recorded = list(entries(segments(tmp_path / "audit")))
    assert [(one["action"], one["outcome"]) for one in recorded] == [
        ("audit-embeddings", "begun"),
        ("audit-embeddings", "done"),
    ]
    shown = exact["examples"][0]["text"].split()
    assert not [word for word in shown if word in json.dumps(recorded)]


@asynccontextmanager
async def listening(socket: Path, audit: EmbeddingAudit, log: AuditLog) -> AsyncIterator[None]:
    """The daemon's own service at a socket, with as much around it as an audit needs."""
    services = SimpleNamespace(embeddings=audit)
    around = SimpleNamespace(driver=None, audit=log, services=services)
    server = grpc.aio.server()
    service = ControlService(cast(ServiceContext, around), "uid:7")
    add_ControlServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=10)


def test_usual_levels_unless_some_are_asked_for() -> None:
    assert options_of(control.AuditEmbeddingsRequest()) == AuditOptions()
    asked = options_of(control.AuditEmbeddingsRequest(epsilons=[8.0], minutes=2, show=3))
    assert asked == AuditOptions(noises=(), epsilons=(8.0,), bits=(), minutes=2, show=3)
    assert [str(level) for level in asked.levels] == ["exact", "noisy, sigma 1.2, epsilon 8"]


def test_figures_travel_under_their_names() -> None:
    fields = set(control.EmbeddingsAudit.DESCRIPTOR.fields_by_name)
    assert fields == {*exposure.Exposure.__dataclass_fields__, "model_digest"}
    fields = set(control.LevelExposure.DESCRIPTOR.fields_by_name)
    assert fields == set(exposure.LevelExposure.__dataclass_fields__)


# ---- on the screen ---------------------------------------------------------------------------


def fedctl(socket: Path, *words: str) -> int:
    return main(["--socket", str(socket), "audit", "embeddings", *words])


def test_the_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        del daemon.exposed.levels[0].examples[:]
        assert fedctl(tmp_path / "s", "--bits", "8", "--noise", "0.1", "--minutes", "2") == 0
    asked = daemon.asked[0]
    assert (list(asked.bits), list(asked.noises), asked.minutes) == ([8], [0.1], 2.0)
    assert asked.show == 0
    out = capsys.readouterr().out
    rows = {line.strip().split("  ")[0]: line.split() for line in out.splitlines() if "%" in line}
    assert list(rows) == ["(guessing)", "(other texts)", "exact", "bucket, 8 bits"]
    assert rows["exact"][1:7] == ["0.500", "(0.50/0.50)", "0.500", "50", "%", "(50"]
    assert rows["exact"][-2:] == ["1.00", "0.62"]
    assert "200 passages and 50 questions on 30 subjects" in out
    assert out.rstrip().endswith("It is a lower bound.")


def test_recovered_text_is_shown_when_asked_for_and_safe_for_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        assert fedctl(tmp_path / "s", "--show", "1") == 0
    assert daemon.asked[0].show == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "right words: locks" in out


def test_the_object_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_daemon(tmp_path / "s"):
        assert fedctl(tmp_path / "s", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [level["level"] for level in found["levels"]] == ["exact", "bucket, 8 bits"]
    assert found["levels"][0]["passages"]["names"]["attacker"] == "decoder"


def test_refusals_and_senseless_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        daemon.refusal = "12 passages on 3 subjects are too few"
        assert fedctl(tmp_path / "s") == 1
        assert capsys.readouterr().err == "fedctl: 12 passages on 3 subjects are too few.\n"
        assert fedctl(tmp_path / "s", "--bits", "257") == 2
        assert fedctl(tmp_path / "s", "--epsilon", "0") == 2
