"""Whose calls and connections are open here, and how those of one site are ended at once.

A call is judged when it begins. When a site is expelled, calls of it may be under way,
and its connection would stay up for as long as it sends pings. grpc can close a server
or nothing, so the connection is shut down below grpc, which then sees that the other end
has gone, as after a cut. Connections of other sites are not touched.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

from peers.link.servicer import Caller

_REMEMBERED = 256  # connections a site; it has one, and a new one after each cut
_DESCRIPTORS = Path("/proc/self/fd")

Address = tuple[str, int]


class OpenCalls:
    """Which sites call us just now, and from where they have called."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[object], Caller] = {}
        self._addresses: defaultdict[str, deque[Address]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """A call is under way in this task."""
        task = asyncio.current_task()
        if task is not None:
            self._calls[task] = caller
        try:
            yield
        finally:
            if task is not None:
                self._calls.pop(task, None)
            self._remember(caller)

    def _remember(self, caller: Caller) -> None:
        address = _address(caller.address)
        if caller.site and address and address not in self._addresses[caller.site]:
            self._addresses[caller.site].append(address)

    def end(self, admitted: Callable[[str], bool], port: int) -> list[str]:
        """End the calls and connections to ``port`` of every site that is not admitted."""
        ended = set()
        for task, caller in list(self._calls.items()):
            if caller.site and not admitted(caller.site):
                self._remember(caller)
                task.cancel()
        for site in list(self._addresses):
            if not admitted(site) and _shut_down(set(self._addresses.pop(site)), port):
                ended.add(site)
        return sorted(ended)


def _address(text: str) -> Address | None:
    """ "ipv4:10.0.0.7:4711" or "ipv6:%5B::1%5D:4711", as grpc says it; None: none of ours."""
    family, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _host(host.strip("[]")), int(port)


def _host(text: str) -> str:
    """An IPv4 address that a socket for both kinds shows as ::ffff:a.b.c.d is that address."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _shut_down(peers: set[Address], port: int) -> int:
    """Shut down this process's connections between ``port`` and these peers; how many."""
    count = 0
    for link in _DESCRIPTORS.iterdir():
        with suppress(OSError), closing(_Own(int(link.name))) as own:
            count += own.shut_down_if(peers, port)
    return count


class _Own:
    """A descriptor of our own for something that is open in this process.

    What we look at is what we shut down, even if grpc closes its descriptor meanwhile
    and the number goes to another connection.
    """

    def __init__(self, number: int) -> None:
        self._descriptor = os.dup(number)

    def close(self) -> None:
        os.close(self._descriptor)

    def shut_down_if(self, peers: set[Address], port: int) -> bool:
        """Raises OSError when it is no connection."""
        if not stat.S_ISSOCK(os.fstat(self._descriptor).st_mode):
            return False
        connection = socket.socket(fileno=self._descriptor)
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            here, there = connection.getsockname(), connection.getpeername()
            matches = here[1] == port and (_host(there[0]), there[1]) in peers
            if matches:
                connection.shutdown(socket.SHUT_RDWR)
            return matches
        finally:
            connection.detach()
