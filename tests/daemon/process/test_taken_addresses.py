"""A start that is in vain, because somebody else serves there, ends before it does anything."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from peers.wire.manifest import signed
from tests.support.authority import Federation
from tests.support.federation import _toml


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alder", "birch")


def start(federation: Federation, **control: str) -> str:
    """What a fedd says that ends at once. Its encoder is missing: that is found out later."""
    home = federation.root / "alder"
    (home / "manifest.json").write_bytes(signed(federation.manifest(), federation.authority))
    (home / "fedd.toml").write_text(
        _toml(
            {
                "site": {"state_dir": "state"},
                "identity": {"directory": ".", "manifest": "manifest.json"},
                "network": {"bind": federation.address("alder")},
                "control": {"socket": "fedd.sock", **control},
                "retriever": {"encoder": str(home / "no-encoder")},
            }
        )
    )
    ended = subprocess.run(
        [sys.executable, "-m", "daemon.main", "--config", home / "fedd.toml"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_a_port_in_use_is_said_first_and_by_fedd_alone(federation: Federation) -> None:
    with closing(socket.create_server(("127.0.0.1", federation.ports["alder"]))):
        told = start(federation)
    assert f"fedd: cannot listen on {federation.address('alder')}: Address already in use" in told
    assert re.findall(r"^[EWI]\d{4} .*", told, re.MULTILINE) == [], "grpc's own words"


def test_a_control_socket_that_is_served_is_said_first(federation: Federation) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(federation.root / "alder" / "fedd.sock"))
        other.listen()
        assert "another fedd has it open: stop it first" in start(federation)


def test_a_group_that_is_not_there_is_said_first(federation: Federation) -> None:
    told = start(federation, group="no-such-group")
    assert "cannot serve the control socket" in told
    assert "no-such-group" in told
