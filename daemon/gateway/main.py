"""`fedgate`: settings -> TLS -> a port -> an HTTP server, until SIGTERM.

A process of its own and of another user than fedd, for it is what strangers' bytes come to
first: who takes it over has the tokens that pass through it from then on, and no document, key
or state of the site.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import traceback
from pathlib import Path
from typing import Any, Final

import structlog
import uvicorn

from config.loading import SettingsError, load
from config.settings import GatewaySettings
from daemon.gateway.application import Gateway
from daemon.gateway.connections import HEADER_BYTES, Arrivals, Server
from daemon.gateway.fedd import Fedd

log = structlog.get_logger()

_DESCRIPTORS: Final = 4096  # more than connections, each of which takes one
_LEAVE_S: Final = 10  # for answers under way


class StartRefused(Exception):
    """The gateway can't start as it is; the text says why and what to do."""


def main() -> None:
    """Entry point of `fedgate`.

    Exit code 0 after SIGTERM; 78 (EX_CONFIG) when a person must act first, so that systemd does
    not try again.
    """
    parser = argparse.ArgumentParser(
        prog="fedgate", description="HTTP gateway to the questions of one Hanse site."
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/hanse/fedd.toml"),
        help="settings file of the site (default: %(default)s)",
    )
    arguments = parser.parse_args()
    try:
        settings = load(arguments.config)
        _configure_logging(settings.log.level)
        asyncio.run(_serve(settings.gateway, arguments.config))
    except (SettingsError, StartRefused) as refusal:
        print(f"fedgate: {refusal}", file=sys.stderr)
        sys.exit(os.EX_CONFIG)


async def _serve(settings: GatewaySettings, file: Path) -> None:
    if not settings.enabled:
        remedy = f"set it to true in {file}, and restart fedd, too"
        raise StartRefused(f"gateway.enabled is false: {remedy}")
    _allow_descriptors()
    fedd = Fedd(settings.socket)
    try:
        server = Server(_configured(settings, fedd))
        _end_by_signals(server)
        with _listening(settings.listen) as listening:
            log.info("ready", listen=settings.listen, tls=settings.tls_key is not None)
            await server.serve(sockets=[listening])
    finally:
        await fedd.close()
    log.info("stopped")


def _allow_descriptors() -> None:
    """As many as there may be connections, where this process may say so itself."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if before != resource.RLIM_INFINITY and before < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _end_by_signals(server: uvicorn.Server) -> None:
    """uvicorn ends by a signal, and then raises it again: that must not end the process by it."""

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _configured(settings: GatewaySettings, fedd: Fedd) -> uvicorn.Config:
    configured = uvicorn.Config(
        Gateway(fedd, settings.requests, settings.url or "").application(),
        http=Arrivals(_tls(settings)),  # type: ignore[arg-type]  # a class, says uvicorn
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,  # who asks stands in fedd's audit log
        server_header=False,
        proxy_headers=False,  # who calls is who the kernel says
        timeout_graceful_shutdown=_LEAVE_S,
    )
    configured.load()
    return configured


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """As uvicorn would make it; None: in the clear, on this machine alone."""
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise StartRefused(
            f"gateway.tls_certificate and tls_key cannot be used: {error}; name PEM files that "
            "belong together and that this user may read"
        ) from error
    return context


def _listening(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise StartRefused(
            f"cannot listen at gateway.listen = {listen!r}: {error.strerror or error}; stop what "
            "does, or choose another address or port"
        ) from error


def _configure_logging(level: str) -> None:
    """Lines of JSON on standard error; of libraries from warnings on."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    lines = logging.StreamHandler()
    lines.setFormatter(_Libraries('{"level": "%(levelname)s", "event": "%(name)s: %(message)s"}'))
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    # It warns of each request that is none: a stranger would fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class _Libraries(logging.Formatter):
    """What libraries log, without what an exception says: that may repeat what somebody asked."""

    def formatException(self, ei: Any) -> str:  # noqa: N802  logging's name
        """Its kind, and where."""
        kind, _, where = ei
        return f"{kind.__name__}\n{''.join(traceback.format_tb(where))}"


if __name__ == "__main__":
    main()
