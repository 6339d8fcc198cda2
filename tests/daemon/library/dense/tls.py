"""Certificates, and a listener that speaks TLS before a server that does not."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Who issues certificates of 127.0.0.1; its own is `file`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.pem"
        self._folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        is_authority = x509.BasicConstraints(ca=True, path_length=None)
        self._write(self.file, self._name, self._key, is_authority)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate, secret = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        self._write(certificate, _named(name), key, x509.SubjectAlternativeName([address]))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, secret

    def _write(
        self,
        path: Path,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
    ) -> None:
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder(
                self._name, subject, key.public_key(), x509.random_serial_number()
            )
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path.write_bytes(made.public_bytes(serialization.Encoding.PEM))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@contextmanager
def tls_before(uri: str, server: tuple[Path, Path], clients: Path | None) -> Iterator[str]:
    """Where it listens; ``clients``: whose certificates one must have to be let in."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
    context.load_cert_chain(*server)
    context.set_alpn_protocols(["h2"])
    context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
    host, port = uri.removeprefix("http://").split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            inner, out = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_copied(reader, out), _copied(inner, writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(relay, "127.0.0.1", 0, ssl=context), loop
        ).result()
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_ended(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(1 << 16):
            writer.write(some)
            await writer.drain()
    writer.close()
