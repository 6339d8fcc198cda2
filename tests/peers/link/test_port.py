"""Whether peers can be answered at an address is known long before they are."""

from __future__ import annotations

import socket
from contextlib import closing, nullcontext

import pytest

from peers.link.port import ListenError, check_free
from tests.support.authority import free_port

REMEDY = "choose another `bind` in the settings, or stop who holds it"


def test_what_is_looked_at_is_free_afterwards() -> None:
    address = ("127.0.0.1", free_port())
    check_free(f"127.0.0.1:{address[1]}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    with socket.create_server(address) as server:
        with socket.create_connection(address, timeout=5):
            server.accept()[0].close()
        with pytest.raises(ListenError, match="Address already in use"):
            check_free(bind_of(server))
    check_free(f"127.0.0.1:{address[1]}")  # whatever still waits of a connection there


def bind_of(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


@pytest.mark.parametrize("bind", ["0.0.0.0:{}", "[::]:{}", "localhost:{}", "127.0.0.1:{}"])
def test_every_way_to_write_an_address_is_understood(bind: str) -> None:
    check_free(bind.format(free_port()))


def test_a_port_of_all_interfaces_is_in_use_if_it_is_of_one() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        bind = f"0.0.0.0:{server.getsockname()[1]}"
        with pytest.raises(ListenError, match="Address already in use"):
            check_free(bind)


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("192.0.2.1:7443", "Cannot assign requested address"),
        ("no..host:7443", ""),  # in the resolver's words
        ("*:7443", "no name, nor a whole address"),
        ("0:7443", "no name"),
        ("127.1:7443", "no name"),
        ("0x7f000001:7443", "no name"),
        ("::1:7443", "no name"),
        ("[127.0.0.1]:7443", "no name"),
    ],
)
def test_an_address_that_is_not_ours_is_said_with_the_remedy(bind: str, why: str) -> None:
    with pytest.raises(ListenError) as refused:
        check_free(bind)
    assert str(refused.value).startswith(f"cannot listen on {bind}: {why}")
    assert str(refused.value).endswith(REMEDY)


def test_one_address_of_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for grpc; and of a family that this machine lacks, nothing is held against it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        taken = (socket.AF_INET, socket.SOCK_STREAM, 0, "", server.getsockname())
        free = (*taken[:4], ("127.0.0.1", free_port()))
        lacking = (99, *free[1:])
        for found, outcome in (
            ([taken, free], nullcontext()),
            ([lacking], nullcontext()),
            ([taken], pytest.raises(ListenError)),
            ([lacking, taken], pytest.raises(ListenError, match="in use")),
        ):
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
            with outcome:
                check_free("localhost:1")
