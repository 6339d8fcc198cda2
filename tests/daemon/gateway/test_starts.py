"""How `fedgate` starts, and how it refuses to; without a daemon behind it."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.daemon.gateway.gates import started
from tests.support.authority import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def settings(folder: Path, **options: object) -> Path:
    """A settings file with such a gateway."""
    usual = {"enabled": True, "socket": "nobody.sock", "listen": f"127.0.0.1:{free_port()}"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in (usual | options).items()]
    path = folder / "fedd.toml"
    path.write_text("\n".join(["[gateway]", *lines]) + "\n")
    return path


def refusal(path: Path) -> str:
    """What a start with these settings is refused with."""
    done = subprocess.run(
        [sys.executable, "-m", "daemon.gateway.main", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 78, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[None]:
    log = path.with_name("fedgate.log")
    with log.open("ab") as file:
        process = await started(path, file)
    try:
        async with asyncio.timeout(120):
            while '"ready"' not in log.read_text():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0, log.read_text()
    assert '"stopped"' in log.read_text()


def got(url: str, trusting: ssl.SSLContext | None = None) -> tuple[int, dict[str, str], bytes]:
    asked = Request(url, headers={"Authorization": "Bearer x"})  # noqa: S310  our own
    try:
        with closing(urlopen(asked, timeout=30, context=trusting)) as reply:  # noqa: S310
            return reply.status, dict(reply.headers), reply.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_a_network_without_tls_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for listen in ("0.0.0.0:8080", "[::]:8080", "10.1.2.3:8080", "gate.example.org:8080"):
        told = refusal(settings(tmp_path, listen=listen))
        assert "gateway.listen" in told
        assert "tls_certificate and tls_key" in told
        assert "in the clear" in told


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    assert "gateway.tls_key" in refusal(settings(tmp_path, tls_certificate="gateway.crt"))
    told = refusal(settings(tmp_path, tls_certificate="gateway.crt", tls_key="gateway.key"))
    assert "gateway.crt" in told or "No such file" in told
    assert "name PEM files that belong together" in told


def test_where_it_is_not_wanted_it_says_so(tmp_path: Path) -> None:
    told = refusal(settings(tmp_path, enabled=False))
    assert "gateway.enabled is false: set it to true" in told
    assert str(tmp_path / "fedd.toml") in told


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    path = settings(tmp_path)
    async with running(path):
        told = await asyncio.to_thread(refusal, path)
    assert "cannot listen at gateway.listen" in told
    assert "choose another address or port" in told


async def test_while_fedd_is_away_that_is_what_is_said(tmp_path: Path) -> None:
    path = settings(tmp_path)
    url = path.read_text().split('"')[-2]
    async with running(path):
        for asked in ("/v1/models", "/health"):
            status, headers, body = await asyncio.to_thread(got, f"http://{url}{asked}")
            told = json.loads(body)["error"]
            assert (status, told["code"]) == (503, "unavailable")
            assert "daemon (fedd) is not there" in told["message"]
            assert int(headers["retry-after"]) >= 1


async def test_with_a_certificate_it_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    path = settings(tmp_path, tls_certificate="gateway.crt", tls_key="gateway.key")
    url = next(line for line in path.read_text().splitlines() if "listen" in line).split('"')[1]
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with running(path):
        status, headers, _ = await asyncio.to_thread(got, f"https://{url}/v1/models", trusting)
        assert status == 503
        assert "strict-transport-security" in {name.lower() for name in headers}
        with pytest.raises(OSError, match=r"."):
            await asyncio.to_thread(got, f"http://{url}/v1/models")


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1, with its key beside it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(here, False)
        .sign(key, hashes.SHA256())
    )
    (folder / "gateway.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "gateway.key").write_bytes(secret)
    return folder / "gateway.crt"
