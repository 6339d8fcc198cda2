"""The address that peers call: taken when a start begins, served when it is through."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class ListenError(Exception):
    """The address that peers should call cannot be listened on."""

    def __init__(self, bind: str, why: str) -> None:
        super().__init__(
            f"cannot listen on {bind}: {why}; "
            "choose another `bind` in the settings, or stop who holds it"
        )


@contextmanager
def held(bind: str) -> Iterator[None]:
    """Have ``bind``, and take no connections there yet. Raises ListenError.

    The sockets are bound and do not listen: who calls is refused, as by a site that is down,
    and not kept waiting. A server of this process can listen beside them (SO_REUSEADDR, which
    grpc sets, too), and they hinder no other that does; so it may still find the port in use.
    """
    host, _, port = bind.rpartition(":")
    with ExitStack() as stack:
        failures: list[OSError] = []
        try:
            # In bytes: Python would refuse some names by a UnicodeError, before the resolver.
            name = host.strip("[]").encode()
            found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise ListenError(bind, str(error.strerror)) from error
        for family, kind, protocol, _, address in found:
            try:
                holder = stack.enter_context(socket.socket(family, kind, protocol))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(address)
            except OSError as error:
                failures.append(error)
        # One address of a name is enough for grpc, and where there is no IPv6 it takes IPv4.
        grave = [error for error in failures if error.errno != errno.EAFNOSUPPORT]
        if grave and len(failures) == len(found):
            raise ListenError(bind, str(grave[0].strerror)) from grave[0]
        yield
