"""fedctl mcp before it speaks: where its token comes from, and where that may go."""

from __future__ import annotations

import os
import ssl
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from daemon.fedctl.terminal.output import Exit
from tests.daemon.gateway.test_starts import self_signed
from tests.support.authority import free_port
from tests.support.command_line import Fedctl

SECRET = "hanse_secret"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANSE_TOKEN", SECRET)


@pytest.mark.parametrize(
    "address",
    ["http://gate.example.org", "http://10.1.2.3:8080", "http://127.0.0.1.example.org"],
)
def test_a_token_crosses_no_network_in_the_clear(fedctl: Fedctl, address: str) -> None:
    told = fedctl("mcp", "--gateway", address)
    assert told.code == Exit.USAGE
    assert "in the clear" in told.err
    assert "Use https://" in told.err


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8080", "ftp://127.0.0.1", "http://", "http://[", "http://u@127.0.0.1"]
)
def test_what_is_no_address_is_refused(fedctl: Fedctl, address: str) -> None:
    told = fedctl("mcp", "--gateway", address)
    assert (told.code, "is no address of a gateway" in told.err) == (Exit.USAGE, True)


def test_without_a_token_it_says_where_one_is_looked_for(
    fedctl: Fedctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HANSE_TOKEN")
    told = fedctl("mcp")
    assert told.code == Exit.USAGE
    assert "the environment has no HANSE_TOKEN. Put it there, or ask whoever" in told.err


@pytest.mark.parametrize("held", ["two words", "tok\u00e9n", "x" * 8193])
def test_what_is_no_token_is_refused_and_not_repeated(
    fedctl: Fedctl, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setenv("HANSE_TOKEN", held)
    told = fedctl("mcp")
    assert (told.code, "what HANSE_TOKEN holds is no token" in told.err) == (Exit.USAGE, True)
    assert held not in told.err


def test_a_file_that_others_may_read_is_refused(fedctl: Fedctl, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    for mode in (0o640, 0o604, 0o644):
        file.chmod(mode)
        told = fedctl("mcp", "--token-file", file)
        assert (told.code, f"chmod 600 {file}" in told.err) == (Exit.USAGE, True)
    told = fedctl("mcp", "--token-file", tmp_path / "none")
    assert (told.code, "Check --token-file" in told.err) == (Exit.USAGE, True)


def test_a_gateway_that_is_away_is_said_at_once(fedctl: Fedctl, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    address = f"http://127.0.0.1:{free_port()}"
    told = fedctl("mcp", "--gateway", address, "--token-file", file)
    assert told.code == Exit.UNREACHABLE
    assert f"no gateway answers at {address}/mcp" in told.err
    assert "systemctl status fedgate" in told.err
    assert (told.out, SECRET in told.err) == ("", False)


def test_a_token_that_an_identity_provider_signed_is_long(
    fedctl: Fedctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSE_TOKEN", "x" * 8192)
    told = fedctl("mcp", "--gateway", f"http://127.0.0.1:{free_port()}")
    assert (told.code, "no gateway answers" in told.err) == (Exit.UNREACHABLE, True)


def test_a_certificate_that_nobody_here_knows_names_the_option(
    fedctl: Fedctl, tmp_path: Path
) -> None:
    certificate = self_signed(tmp_path)
    here = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    here.load_cert_chain(certificate, tmp_path / "gateway.key")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = here.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        told = fedctl("mcp", "--gateway", f"https://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert (told.code, "(--ca FILE)" in told.err) == (Exit.UNREACHABLE, True)


def test_certificates_that_are_none_are_named(fedctl: Fedctl, tmp_path: Path) -> None:
    told = fedctl("mcp", "--gateway", "https://127.0.0.1", "--ca", tmp_path / "none")
    assert (told.code, "Check --ca" in told.err) == (Exit.USAGE, True)
    assert os.environ["HANSE_TOKEN"] not in told.err
