"""The address that peers call is had long before anybody is answered there."""

from __future__ import annotations

import socket
from contextlib import closing, nullcontext

import pytest

from peers.link.port import ListenError, held
from tests.support.authority import free_port

REMEDY = "choose another `bind` in the settings, or stop who holds it"


def test_who_calls_before_it_is_served_is_refused_and_not_kept_waiting() -> None:
    port = free_port()
    with held(f"127.0.0.1:{port}"), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_what_is_held_is_served_by_this_process_and_hinders_nobody_after() -> None:
    address = ("127.0.0.1", free_port())
    with held(f"127.0.0.1:{address[1]}"), socket.create_server(address) as server:
        with socket.create_connection(address, timeout=5):
            server.accept()[0].close()
        with pytest.raises(ListenError, match="Address already in use"), held(bind_of(server)):
            pass
    with held(f"127.0.0.1:{address[1]}"):
        pass


def bind_of(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


@pytest.mark.parametrize("bind", ["0.0.0.0:{}", "[::]:{}", "localhost:{}", "127.0.0.1:{}"])
def test_every_way_to_write_an_address_is_understood(bind: str) -> None:
    with held(bind.format(free_port())):
        pass


def test_a_port_of_all_interfaces_is_in_use_if_it_is_of_one() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        bind = f"0.0.0.0:{server.getsockname()[1]}"
        with pytest.raises(ListenError, match="Address already in use"), held(bind):
            pass


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("192.0.2.1:7443", "Cannot assign requested address"),
        ("no..host:7443", ""),  # in the resolver's words
    ],
)
def test_an_address_that_is_not_ours_is_said_with_the_remedy(bind: str, why: str) -> None:
    with pytest.raises(ListenError) as refused, held(bind):
        pass
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
            with outcome, held("localhost:1"):
                pass
