"""The address that peers call: looked at when a start begins, served when it is through."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from contextlib import ExitStack

_NAME = re.compile(r"(?!0x)[^*:\[\]]*[^*:\[\]0-9.][^*:\[\]]*")  # not all digits and dots


class ListenError(Exception):
    """The address that peers should call cannot be listened on."""

    def __init__(self, bind: str, why: str) -> None:
        super().__init__(
            f"cannot listen on {bind}: {why}; "
            "choose another `bind` in the settings, or stop who holds it"
        )


def check_free(bind: str) -> None:
    """Whether ``bind`` is an address of ours at which nobody listens. Raises ListenError.

    It is bound, and left again: grpc would say so in lines of its own, and late. Nothing is
    listened on yet, so that who calls is refused, as by a site that is down, and not kept
    waiting; and so somebody else may still be there first.
    """
    host, _, port = bind.rpartition(":")
    if not _is_understood(host):
        raise ListenError(bind, "no name, nor a whole address (0.0.0.0, [::])")
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
                bound = stack.enter_context(socket.socket(family, kind, protocol))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as grpc does
                bound.bind(address)
            except OSError as error:
                failures.append(error)
        # One address of a name is enough for grpc, and where there is no IPv6 it takes IPv4.
        grave = [error for error in failures if error.errno != errno.EAFNOSUPPORT]
        if grave and len(failures) == len(found):
            raise ListenError(bind, str(grave[0].strerror)) from grave[0]


def _is_understood(host: str) -> bool:
    """Whether grpc takes it: the resolver knows other ways to write an address."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return (ipaddress.ip_address(bare).version == 6) == (host != bare)
    except ValueError:
        return _NAME.fullmatch(host) is not None
