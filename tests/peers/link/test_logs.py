"""Rounds of two models over one connection: each log gets its own, and no other's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from peers.link.transport import KeepInTouch
from peers.wire.errors import PeerRefused
from peers.wire.messages import MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import until
from tests.support.loopback import QUICK, KeepsAll, Site, hint, running

LOG = "med.generator"
UPDATE = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=3, attempt=1)
EAGER = replace(QUICK, keep_in_touch=KeepInTouch(0.1, 0.05, 0.05))


def envelope_of(log: str) -> pb.Envelope:
    envelope = hint("alpha")
    envelope.federation_id = log
    return envelope


@pytest_asyncio.fixture
async def sites(tmp_path: Path) -> AsyncIterator[tuple[Site, Site, KeepsAll]]:
    """Alpha and beta, and what beta gets of its second log."""
    federation = Federation.found(tmp_path, "alpha", "beta")
    async with (
        running(federation, "alpha", options=EAGER) as alpha,
        running(federation, "beta", options=EAGER) as beta,
    ):
        second = KeepsAll(head_round=7)
        beta.transport._servicer.inboxes = {"med": beta.inbox, LOG: second}
        yield alpha, beta, second


async def test_a_message_reaches_the_log_that_it_names(
    sites: tuple[Site, Site, KeepsAll],
) -> None:
    alpha, beta, second = sites
    for log in ("med", LOG, LOG):
        await alpha.transport.send("beta", envelope_of(log))
    assert [one.federation_id for _, one in beta.inbox.messages] == ["med"]
    assert [one.federation_id for _, one in second.messages] == [LOG, LOG]


async def test_an_object_of_one_log_is_none_of_the_other(
    sites: tuple[Site, Site, KeepsAll],
) -> None:
    """Of the same kind, round and attempt, and both under way: neither takes the other's place."""
    alpha, beta, second = sites
    ours, theirs = b"a" * (MIB + 1), b"b" * (MIB + 1)
    await alpha.transport.push("beta", UPDATE, ours)
    await alpha.transport.push("beta", UPDATE, theirs, log=LOG)
    files = [blob.path for inbox in (beta.inbox, second) for *_, blob in inbox.blobs]
    assert [path.read_bytes() for path in files if path is not None] == [ours, theirs]
    second.why_not = "no attempt is under way"
    with pytest.raises(PeerRefused, match="no attempt is under way"):
        await alpha.transport.push("beta", UPDATE, theirs, log=LOG)
    await alpha.transport.push("beta", UPDATE, ours)


async def test_what_is_pulled_is_of_the_log_that_is_named(
    sites: tuple[Site, Site, KeepsAll], tmp_path: Path
) -> None:
    alpha, beta, second = sites
    name = pb.BlobName(kind=pb.CERTIFICATES, round=1)
    beta.inbox.shelf[pb.CERTIFICATES] = b"of the retriever"
    second.shelf[pb.CERTIFICATES] = b"of the generator"
    for log, expected in ((None, b"of the retriever"), (LOG, b"of the generator")):
        await alpha.transport.pull("beta", name, tmp_path / "got", log=log)
        assert (tmp_path / "got").read_bytes() == expected
        (tmp_path / "got").unlink()


@pytest.mark.parametrize("log", ["med.planner", "med.generator.generator", "med2", "med."])
async def test_a_log_that_is_not_kept_here_is_refused(
    sites: tuple[Site, Site, KeepsAll], tmp_path: Path, log: str
) -> None:
    alpha, beta, second = sites
    with pytest.raises(PeerRefused, match="is for federation"):
        await alpha.transport.send("beta", envelope_of(log))
    with pytest.raises(PeerRefused, match="is for federation"):
        await alpha.transport.push("beta", UPDATE, b"x", log=log)
    name = pb.BlobName(kind=pb.CERTIFICATES, round=1)
    with pytest.raises(PeerRefused, match="is for federation"):
        await alpha.transport.pull("beta", name, tmp_path / "got", log=log)
    assert (beta.inbox.messages, second.messages, second.blobs) == ([], [], [])


async def test_a_greeting_tells_how_far_each_log_is(
    sites: tuple[Site, Site, KeepsAll],
) -> None:
    alpha, beta, _ = sites
    beta.inbox.head_round = 2
    await until(lambda: alpha.transport.statistics()["beta"].head_of("med") == 2)
    seen = alpha.transport.statistics()["beta"]
    assert (seen.head_of(LOG), seen.head_of("med.planner")) == (7, 0)
