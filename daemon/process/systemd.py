"""What systemd is told of the daemon (sd_notify(3)), and its watchdog."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import MutableMapping

import structlog


class Notifier:
    """Tells systemd how the daemon is (sd_notify(3)); silent when it did not ask.

    Our own few lines because the protocol is one datagram, and the packages that
    wrap it have not been maintained for years.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        if address is not None and address[:1] not in ("/", "@"):
            raise ValueError(
                f"NOTIFY_SOCKET={address!r} refused: expected a path or an abstract name (@…); "
                "start fedd by systemd with Type=notify, or unset the variable"
            )
        self._address = address
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """As systemd set it up; takes NOTIFY_SOCKET away so that no child speaks for us."""
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environment.get("WATCHDOG_USEC", "") if ours else ""
        watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() else None
        return cls(environment.pop("NOTIFY_SOCKET", None) or None, watchdog_s)

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send("READY=1", _status(status))

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={microseconds}")

    def stopping(self, status: str) -> None:
        """Shutdown begins."""
        self._send("STOPPING=1", _status(status))

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(_status(status))

    async def keep_watchdog_fed(self) -> None:
        """Say that the event loop runs, at half the watchdog's interval, until cancelled.

        A loop that hangs stops saying so and systemd restarts the daemon.
        Returns at once when no watchdog is set.
        """
        while self._address is not None and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        address = self._address.replace("@", "\0", 1) if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)  # a busy systemd must not hold up the event loop
            try:
                channel.sendto("\n".join(lines).encode(), address)
            except OSError as error:
                # Not fatal: what systemd makes of our silence is its operator's choice.
                structlog.get_logger().warning("systemd not notified", cause=str(error))


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.splitlines())
