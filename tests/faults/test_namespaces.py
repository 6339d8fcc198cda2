"""The network of tests/faults/test_faults.py does what it says, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.faults.namespaces import IP, Network, NotPermitted

pytestmark = pytest.mark.faults

SITES = ["alder", "birch", "cedar"]
_LISTEN = (
    "import socket, sys; door = socket.create_server((sys.argv[1], 7000));"
    "print('open', flush=True)\n"
    "while True: door.accept()"
)
_CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=0.5)"


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network.made(SITES) as network:
            yield network
    except NotPermitted as reason:
        pytest.skip(f"network namespaces are not permitted here: {reason}")


def reaches(network: Network, caller: str, called: str) -> bool:
    """Whether one site gets a TCP connection to another."""
    program = [*network.command(caller), sys.executable, "-c", _CALL, network.addresses[called]]
    return subprocess.run(program, stderr=subprocess.DEVNULL, check=False).returncode == 0


def namespaces() -> str:
    return subprocess.run([IP, "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_packets_pass_within_a_group_only(network: Network) -> None:
    program = [*network.command("alder"), sys.executable, "-c", _LISTEN, network.addresses["alder"]]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"open\n"
            assert reaches(network, "birch", "alder")
            network.part(["alder", "cedar"], ["birch"])
            assert not reaches(network, "birch", "alder")
            assert reaches(network, "cedar", "alder")
            network.cut("alder")
            assert not reaches(network, "cedar", "alder")
            network.heal()
            assert reaches(network, "birch", "alder")
            assert reaches(network, "cedar", "alder")
        finally:
            listener.kill()


@pytest.mark.parametrize("end", [AssertionError, KeyboardInterrupt])
def test_nothing_is_left_after_a_failure(end: type[BaseException]) -> None:
    before = namespaces()
    with pytest.raises((end, NotPermitted)) as ended, Network.made(SITES):
        assert namespaces() != before
        raise end
    if ended.type is NotPermitted:
        pytest.skip(f"network namespaces are not permitted here: {ended.value}")
    assert namespaces() == before
