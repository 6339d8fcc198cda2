"""Attacks on a site's door, each over a real connection on loopback.

Every attack must meet a clear error, and the site must still answer a good peer
afterwards: `attacked` holds the latter for each test.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import os
import ssl
import struct
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from peers.wire.errors import PeerUnreachable
from peers.wire.messages import MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import until
from tests.support.loopback import (
    CONTEXT,
    HASTY,
    QUICK,
    UPDATE,
    VERSION,
    Site,
    begun,
    hint,
    running,
    spooled,
)
from tests.support.strangers import (
    ALPHA,
    SERVICE,
    SPOILT,
    Caller,
    Spoil,
    begin_in_the_middle,
    beta_calling,
    calling,
    framed,
    greeting,
    pushed,
    refused,
    truncate,
)

Code = grpc.StatusCode


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


@pytest.fixture
async def attacked(federation: Federation) -> AsyncIterator[Site]:
    """The site alpha, which the good peer beta can still talk with after the attack."""
    async with running(federation, "alpha") as alpha:
        yield alpha
        heard = len(alpha.inbox.messages)
        async with running(federation, "beta", manifest=federation.manifest()) as beta:
            await beta.transport.send("alpha", hint("beta", 1000))
            await beta.transport.push("alpha", CONTEXT, b"good")
        assert alpha.inbox.messages[heard:] == [("beta", hint("beta", 1000))]
        assert alpha.inbox.blobs[-1][2].data == b"good"
        assert [blob.path for _, _, blob in alpha.inbox.blobs if blob.path] == spooled(alpha)


# ---- who may connect at all --------------------------------------------------


async def test_no_certificate(federation: Federation, attacked: Site) -> None:
    async with calling(federation, None) as nobody:
        with refused(Code.UNAVAILABLE, "Socket closed"):
            await nobody.hello()


async def test_certificate_of_another_authority(
    federation: Federation, attacked: Site, tmp_path: Path
) -> None:
    other = Federation.found(tmp_path / "other", "beta")
    ours = (federation.authority / "ca.crt").read_bytes()
    async with calling(federation, other.identity("beta"), ours) as stranger:
        with refused(Code.UNAVAILABLE, "Socket closed"):
            await stranger.hello()


async def test_expired_certificate(federation: Federation, attacked: Site) -> None:
    expired = federation.enrol("gamma", expired=True)
    async with calling(federation, expired) as late:
        with refused(Code.UNAVAILABLE, "Socket closed"):
            await late.hello("gamma")


async def test_our_own_expired_certificate_is_named_as_the_cause(
    federation: Federation, attacked: Site
) -> None:
    federation.ports["gamma"] = 1
    expired, manifest = federation.enrol("gamma", expired=True), federation.manifest()
    gamma_runs = running(federation, "gamma", identity=expired, manifest=manifest, options=HASTY)
    async with gamma_runs as gamma:
        with pytest.raises(PeerUnreachable, match="our own certificate expired on"):
            await gamma.transport.send("alpha", hint("gamma"))
    del federation.ports["gamma"]


@pytest.mark.parametrize(
    "names",
    [
        ["hanse://elsewhere/site/beta", "beta.med.hanse.internal"],
        ["hanse://med/site/beta", "hanse://med/site/alpha", "beta.med.hanse.internal"],
        ["https://med/site/beta", "beta.med.hanse.internal"],
        ["beta.med.hanse.internal"],
    ],
)
async def test_certificate_with_a_wrong_name(
    federation: Federation, attacked: Site, names: list[str]
) -> None:
    forged = federation.forge(
        [x509.UniformResourceIdentifier(n) if "//" in n else x509.DNSName(n) for n in names]
    )
    async with calling(federation, forged) as impostor:
        with refused(Code.UNAUTHENTICATED, "certificate"):
            await impostor.hello()


@pytest.mark.slow
async def test_certificate_that_expires_on_an_open_connection(
    federation: Federation, attacked: Site
) -> None:
    names = [
        x509.UniformResourceIdentifier("hanse://med/site/beta"),
        x509.DNSName("beta.med.hanse.internal"),
    ]
    brief = federation.forge([*names], seconds=3)
    async with calling(federation, brief) as beta:
        await beta.hello()
        await asyncio.sleep((brief.not_after - datetime.now(UTC)).total_seconds() + 1)
        with refused(Code.UNAUTHENTICATED, "expired"):
            await beta.call("Deliver", hint("beta"))


async def test_tls_1_2_is_refused_and_1_3_works(federation: Federation, attacked: Site) -> None:
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await handshake(federation, ssl.TLSVersion.TLSv1_2)
    assert await handshake(federation, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


async def handshake(federation: Federation, version: ssl.TLSVersion) -> str:
    reader, writer = await tls_to_alpha(federation, version)
    try:
        await asyncio.wait_for(reader.read(1), 5)  # the server's HTTP/2 settings
        return str(writer.get_extra_info("ssl_object").version())
    finally:
        writer.close()


async def tls_to_alpha(
    federation: Federation, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    folder = federation.root / "beta"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "site.crt", folder / "site.key")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    port = federation.ports["alpha"]
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=ALPHA)


# ---- who may say what --------------------------------------------------------


async def test_good_certificate_but_not_in_the_manifest(
    federation: Federation, attacked: Site
) -> None:
    async with calling(federation, federation.enrol("gamma")) as guest:
        with refused(Code.PERMISSION_DENIED, "'gamma' is not in manifest version 1"):
            await guest.hello("gamma")


async def test_disabled_site(federation: Federation, attacked: Site) -> None:
    disabled = federation.manifest(version=2, disabled={"beta"})
    attacked.transport.reload(attacked.identity, disabled)
    async with calling(federation, federation.identity("beta")) as beta:
        with refused(Code.PERMISSION_DENIED, "'beta' is disabled in manifest version 2"):
            await beta.hello()
    attacked.transport.reload(attacked.identity, federation.manifest(version=3))


@pytest.mark.parametrize("method", ["Hello", "Deliver", "Push", "Pull"])
async def test_certificate_of_one_site_speaking_as_another(
    federation: Federation, attacked: Site, method: str
) -> None:
    federation.ports["gamma"] = 1
    attacked.transport.reload(attacked.identity, federation.manifest(version=2))
    lie = "the message names 'beta' as its sender, the certificate is of 'gamma'"
    async with calling(federation, federation.enrol("gamma")) as gamma:
        await gamma.hello("gamma")
        with refused(Code.PERMISSION_DENIED, lie):
            await speak(gamma, method, sender="beta")
    assert attacked.inbox.messages == []
    del federation.ports["gamma"]


@pytest.mark.parametrize("method", ["Hello", "Deliver", "Push", "Pull"])
async def test_message_for_another_federation(
    federation: Federation, attacked: Site, method: str
) -> None:
    async with beta_calling(federation) as beta:
        with refused(Code.PERMISSION_DENIED, "for federation 'other', this is 'med'"):
            await speak(beta, method, federation_id="other")


async def speak(
    caller: Caller, method: str, sender: str = "beta", federation_id: str = "med"
) -> None:
    """One well-formed call of each kind."""
    message: Any = {
        "Hello": greeting(sender),
        "Deliver": hint(sender),
        "Push": pushed(await framed(b"x"))[0],
        "Pull": pb.PullRequest(sender=sender, name=VERSION),
    }[method]
    message.federation_id, message.sender = federation_id, sender
    if method == "Push":
        await caller.push([message])
    elif method == "Pull":
        call = caller.channel.unary_stream(f"/{SERVICE}/Pull")
        async for _ in call(message.SerializeToString(), timeout=5):
            pass
    else:
        await caller.call(method, message)


@pytest.mark.parametrize("method", ["Deliver", "Push", "Pull"])
async def test_no_greeting(federation: Federation, attacked: Site, method: str) -> None:
    async with calling(federation, federation.identity("beta")) as rude:
        with refused(Code.FAILED_PRECONDITION, "say Hello first", "protocol version 2"):
            await speak(rude, method)


async def test_unknown_protocol_version(federation: Federation, attacked: Site) -> None:
    async with beta_calling(federation) as beta:
        both = "'beta' speaks protocol version 1", "'alpha' speaks 2"
        with refused(Code.FAILED_PRECONDITION, *both):
            await beta.hello(version=1)
        # and what was agreed before no longer counts
        with refused(Code.FAILED_PRECONDITION, "say Hello first"):
            await beta.call("Deliver", hint("beta"))


async def test_unknown_method(federation: Federation, attacked: Site) -> None:
    async with beta_calling(federation) as beta:
        with refused(Code.UNIMPLEMENTED):
            await beta.call("Backdoor", b"")


# ---- messages ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Hello", "Deliver", "Push", "Pull"])
async def test_garbage_instead_of_a_message(
    federation: Federation, attacked: Site, method: str
) -> None:
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, "12 bytes that are no "):
            garbage = b"\xff" * 12
            if method == "Push":
                await beta.push([garbage])
            elif method == "Pull":
                call = beta.channel.unary_stream(f"/{SERVICE}/Pull")(garbage, timeout=5)
                assert [frame async for frame in call] == []
            else:
                await beta.call(method, garbage)


async def test_message_out_of_bounds(federation: Federation, attacked: Site) -> None:
    message = hint("beta")
    message.behind.round = 0
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, "Envelope.behind.round is 0; expected 1"):
            await beta.call("Deliver", message)
    assert attacked.transport.statistics()["beta"].refused == 1


async def test_oversized_message(federation: Federation, attacked: Site) -> None:
    message = hint("beta")
    message.attempt_failed.reason = "x" * (2 * MIB)
    async with beta_calling(federation) as beta:
        with refused(Code.RESOURCE_EXHAUSTED, "larger than max"):
            await beta.call("Deliver", message)
    assert attacked.inbox.messages == []


async def test_raw_garbage_on_the_socket(federation: Federation, attacked: Site) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" * 9):
        reader, writer = await asyncio.open_connection("127.0.0.1", federation.ports["alpha"])
        writer.write(garbage)
        writer.write_eof()
        assert len(await read_to_the_end(reader)) < 100  # at most a TLS alert
        writer.close()


async def test_garbage_inside_tls(federation: Federation, attacked: Site) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    huge_frame = struct.pack(">I", 0xFFFFFF)[1:] + b"\0\0" + bytes(5)
    for garbage in (os.urandom(5000), preface + os.urandom(5000), preface + huge_frame):
        reader, writer = await tls_to_alpha(federation)
        writer.write(garbage)
        await read_to_the_end(reader)
        writer.close()


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except (ConnectionResetError, ssl.SSLError):
        return b""


# ---- large objects ---------------------------------------------------------------


@pytest.mark.parametrize(("spoil", "told"), SPOILT, ids=[spoil.__name__ for spoil, _ in SPOILT])
@pytest.mark.parametrize("name", [UPDATE, CONTEXT], ids=["file", "memory"])
async def test_spoilt_push(
    federation: Federation, attacked: Site, spoil: Spoil, told: str, name: pb.BlobName
) -> None:
    pieces = spoil(await framed(os.urandom(2 * MIB + 500)))
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, told):
            await beta.push(pushed(pieces, name, total=2 * MIB + 500))
    assert (attacked.inbox.blobs, spooled(attacked)) == ([], [])
    # What ended too early may go on; all else was damaged and is not kept.
    kept = [2 * MIB] if spoil is truncate and name is UPDATE else []
    assert [path.stat().st_size for path in begun(attacked)] == kept


async def test_push_that_begins_in_the_middle(federation: Federation, attacked: Site) -> None:
    pieces = begin_in_the_middle(await framed(bytes(3 * MIB)))
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, "the name in the first frame only"):
            await beta.push(pushed(pieces))
        with refused(Code.INVALID_ARGUMENT, "does not begin with what it is"):
            await beta.push([pb.PushFrame(frame=pieces[0])])
        with refused(Code.INVALID_ARGUMENT, "does not begin with what it is"):
            await beta.push([])


async def test_object_of_another_length_than_declared(
    federation: Federation, attacked: Site
) -> None:
    pieces = await framed(bytes(2 * MIB))
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, "larger than the 1048577 bytes declared"):
            await beta.push(pushed(pieces, total=MIB + 1))
        with refused(Code.INVALID_ARGUMENT, "2097152 bytes arrived of 2097153 declared"):
            await beta.push(pushed(pieces, total=2 * MIB + 1))
    assert (attacked.inbox.blobs, spooled(attacked), begun(attacked)) == ([], [], [])


async def test_object_larger_than_its_kind_allows(federation: Federation, attacked: Site) -> None:
    async with beta_calling(federation) as beta:
        with refused(Code.INVALID_ARGUMENT, "total_bytes is 8388609; expected 0 .. 8388608"):
            await beta.push(pushed(await framed(b"x"), CONTEXT, total=8 * MIB + 1))


async def test_push_that_nobody_asked_for(federation: Federation, attacked: Site) -> None:
    attacked.inbox.why_not = "no attempt 0 of round 1 is under way here"
    async with beta_calling(federation) as beta:
        with refused(Code.ABORTED, "encrypted_update-1-0 declined: no attempt 0 of round 1"):
            await beta.push(pushed(await framed(bytes(3 * MIB))))
    assert (attacked.inbox.blobs, spooled(attacked)) == ([], [])
    attacked.inbox.why_not = None


@pytest.mark.slow
async def test_sender_that_falls_silent(federation: Federation, attacked: Site) -> None:
    pieces = pushed(await framed(bytes(2 * MIB)))
    async with beta_calling(federation) as beta:
        call = beta.channel.stream_unary(f"/{SERVICE}/Push")(timeout=5)
        await call.write(pieces[0].SerializeToString())
        with refused(Code.ABORTED, f"no frame for {QUICK.limits.frame_s:g} s"):
            await call
    assert [path.stat().st_size for path in begun(attacked)] == [MIB]


async def test_sender_that_hangs_up(federation: Federation, attacked: Site) -> None:
    pieces = pushed(await framed(bytes(2 * MIB)))
    async with beta_calling(federation) as beta:
        call = beta.channel.stream_unary(f"/{SERVICE}/Push")(timeout=5)
        await call.write(pieces[0].SerializeToString())
        await until(lambda: [path.stat().st_size for path in begun(attacked)] == [MIB])
        call.cancel()


async def test_an_object_of_one_frame_whose_line_broke_is_taken_anew(
    federation: Federation, attacked: Site
) -> None:
    """Gone on with, it would wait for a frame that no sender has."""
    pieces = pushed(await framed(b"a small update"))
    async with beta_calling(federation) as beta:
        call = beta.channel.stream_unary(f"/{SERVICE}/Push")(timeout=5)
        await call.write(pieces[0].SerializeToString())
        await until(lambda: [path.stat().st_size for path in begun(attacked)] == [14])
        call.cancel()
        await beta.push(pieces)
    assert [blob.size for _, _, blob in attacked.inbox.blobs] == [14]


async def test_sender_that_hangs_up_again_and_again(federation: Federation, attacked: Site) -> None:
    """Each time another object; what is kept of them does not grow with them."""
    bounds = QUICK.limits.partials
    async with beta_calling(federation) as beta:
        for attempt in range(bounds.of_a_peer + 2):
            name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=attempt)
            with refused(Code.INVALID_ARGUMENT, "truncated"):
                await beta.push(pushed(truncate(await framed(bytes(2 * MIB))), name, 2 * MIB))
            assert len(begun(attacked)) == min(attempt + 1, bounds.of_a_peer)
    assert "update-1-0." not in begun(attacked)[0].name


async def test_pull_from_beyond_the_end(federation: Federation, attacked: Site) -> None:
    attacked.inbox.shelf[pb.MODEL_VERSION] = b"short"
    request = pb.PullRequest(federation_id="med", sender="beta", name=VERSION, offset=6)
    async with beta_calling(federation) as beta:
        call = beta.channel.unary_stream(f"/{SERVICE}/Pull")
        with refused(Code.OUT_OF_RANGE, "bytes from 6 of an object of 5"):
            async for _ in call(request.SerializeToString(), timeout=5):
                pass
