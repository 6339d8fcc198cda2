"""We call a peer, and whoever answers misbehaves: each blamed on the right side.

The counterpart of tests/peers/link/test_refusals.py, where others call us.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import os
from pathlib import Path

import pytest

from peers.wire.errors import PeerError, PeerRefused, PeerUnreachable, RemoteProtocolError
from peers.wire.messages import MIB, PROTOCOL_VERSION
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import HASTY, UPDATE, VERSION, hint, running, spooled
from tests.support.strangers import SPOILT, Answers, Spoil, answering, framed


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


async def blamed(federation: Federation, answers: Answers) -> str:
    """What alpha says after it has pulled from whoever answers."""
    async with answering(federation, answers), running(federation, "alpha") as alpha:
        with pytest.raises(RemoteProtocolError) as error:
            await alpha.transport.pull("beta", VERSION, alpha.spool / "version")
        assert alpha.transport.statistics()["beta"].last_error == str(error.value)
        assert spooled(alpha) == []
    return str(error.value)


@pytest.mark.parametrize(("spoil", "told"), SPOILT, ids=[spoil.__name__ for spoil, _ in SPOILT])
async def test_spoilt_pull(federation: Federation, spoil: Spoil, told: str) -> None:
    answers = Answers(spoil(await framed(os.urandom(2 * MIB + 500))))
    complaint = await blamed(federation, answers)
    assert complaint.startswith("site 'beta' misbehaves: ")
    assert told in complaint


async def test_answer_in_an_unknown_protocol_version(federation: Federation) -> None:
    answers = Answers([], pb.HelloReply(protocol_version=7, sender="beta", software_version="7.1"))
    complaint = await blamed(federation, answers)
    assert "speaks protocol version 7 (software '7.1'), we speak 2" in complaint


async def test_answer_under_another_name(federation: Federation) -> None:
    answers = Answers([], pb.HelloReply(protocol_version=PROTOCOL_VERSION, sender="gamma"))
    assert "it calls itself 'gamma'" in await blamed(federation, answers)


async def test_another_site_at_a_peers_address(federation: Federation) -> None:
    gamma = federation.enrol("gamma")
    async with (
        answering(federation, Answers([]), gamma),
        running(federation, "alpha", options=HASTY) as alpha,
    ):
        with pytest.raises(PeerUnreachable, match="whoever answers there cannot prove to be"):
            await alpha.transport.send("beta", hint("alpha"))


async def test_another_authoritys_site_at_a_peers_address(
    federation: Federation, tmp_path: Path
) -> None:
    other = Federation.found(tmp_path / "other", "beta").identity("beta")
    async with (
        answering(federation, Answers([]), other),
        running(federation, "alpha", options=HASTY) as alpha,
    ):
        with pytest.raises(PeerUnreachable, match="whoever answers there cannot prove to be"):
            await alpha.transport.send("beta", hint("alpha"))


async def test_thanks_for_what_was_not_yet_sent(federation: Federation) -> None:
    async with answering(federation, Answers([])), running(federation, "alpha") as alpha:
        # Where the thanks meet a write, grpc.aio says INTERNAL instead (grpc/grpc#36066):
        # refused either way, and never taken for success.
        early = "thanked for an object it had not yet got|ended the transfer early"
        with pytest.raises(PeerError, match=early):
            await alpha.transport.push("beta", UPDATE, bytes(40 * MIB))


async def test_refusals_tell_a_site_why(federation: Federation) -> None:
    """What an operator at beta reads when alpha's manifest does not list beta."""
    small = federation.manifest(without={"beta"})
    async with (
        running(federation, "alpha", manifest=small),
        running(federation, "beta") as beta,
    ):
        with pytest.raises(PeerRefused, match="site 'alpha' refused: site 'beta' is not in") as why:
            await beta.transport.send("alpha", hint("beta"))
        assert isinstance(why.value, PeerError)
        assert "have the federation's keeper sign a manifest that enables it" in str(why.value)
