"""A network of one's own for each site: namespaces, joined by bridges that can be parted.

    with Network.made(["alder", "birch", "cedar"]) as network:
        network.part(["alder"], ["birch", "cedar"])     # packets between the groups vanish
        network.heal()

Every site has a namespace with one cable to a namespace in the middle, where a
bridge for each group joins the cables. To part them, cables are moved to other
bridges: the carrier stays, no connection is reset, packets are just gone, as
when a VPN is down. Names carry the process id, so that runs do not meet.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_run = itertools.count()

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


class NotPermitted(Exception):
    """Namespaces can't be made here; the text says why."""


class Network:
    """Namespaces of some sites; ``addresses`` are theirs within it."""

    def __init__(self, sites: Sequence[str]) -> None:
        """Nothing is made yet: see `made`."""
        unique = f"hanse-{os.getpid()}-{next(_run)}"
        self.sites = list(sites)
        self.addresses = {site: f"10.77.0.{n}" for n, site in enumerate(sites, start=1)}
        self._middle = f"{unique}-middle"
        self._names = {site: f"{unique}-{site}" for site in sites}

    @classmethod
    @contextmanager
    def made(cls, sites: Sequence[str]) -> Iterator[Network]:
        """Make it, join all sites, remove it in the end. Raises NotPermitted."""
        network = cls(sites)
        atexit.register(network._remove)
        try:
            network._make()
            yield network
        finally:
            network._remove()
            atexit.unregister(network._remove)

    def command(self, site: str) -> tuple[str, ...]:
        """The words before a command that shall run in this site's namespace."""
        return (IP, "netns", "exec", self._names[site])

    def file(self, site: str) -> Path:
        """What a process opens to enter this site's namespace."""
        return Path("/run/netns") / self._names[site]

    def part(self, *groups: Sequence[str]) -> None:
        """From now on packets pass within a group only; who is in none is alone."""
        named = [site for group in groups for site in group]
        alone = [[site] for site in self.sites if site not in named]
        self._batch(
            [
                f"link set {_cable(self.sites.index(site))} master group{number}"
                for number, group in enumerate([*groups, *alone])
                for site in group
            ],
            within=self._middle,
        )

    def cut(self, *sites: str) -> None:
        """Each of these sites is alone, the others are together."""
        self.part([site for site in self.sites if site not in sites])

    def heal(self) -> None:
        """All are together again."""
        self.part(self.sites)

    def slow_down(self, megabits: int) -> bool:
        """Limit what each site sends a second; False where the kernel has no such limit."""
        shape = f"root tbf rate {megabits}mbit burst 64kb latency 5s"
        done = [
            subprocess.run(
                [*self.command(site), "tc", "qdisc", "replace", "dev", "eth0", *shape.split()],
                capture_output=True,
                check=False,
            ).returncode
            for site in self.sites
        ]
        return not any(done)

    def _make(self) -> None:
        if not IP:
            raise NotPermitted("there is no `ip` command (iproute2)")
        namespaces = [self._middle, *self._names.values()]
        self._batch([f"netns add {name}" for name in namespaces])
        groups = [f"group{number}" for number, _ in enumerate(self.sites)]
        self._batch(
            [
                line
                for group in groups
                for line in (f"link add {group} type bridge", f"link set {group} up")
            ],
            within=self._middle,
        )
        for number, (site, name) in enumerate(self._names.items()):
            cable = _cable(number)
            lines = [
                f"link add {cable} type veth peer name eth0 netns {name}",
                f"link set {cable} up",
            ]
            self._batch(lines, within=self._middle)
            lines = [f"addr add {self.addresses[site]}/24 dev eth0", "link set eth0 up"]
            self._batch([*lines, "link set lo up"], within=name)
        self.heal()

    def _remove(self) -> None:
        """Whatever there is of it; cables and bridges go with their namespaces."""
        if not IP:
            return
        listed = subprocess.run([IP, "netns", "list"], capture_output=True, text=True, check=False)
        there = {line.split()[0] for line in listed.stdout.splitlines() if line}
        for name in {self._middle, *self._names.values()} & there:
            subprocess.run([IP, "netns", "delete", name], check=False)

    def _batch(self, lines: Sequence[str], within: str = "") -> None:
        """Several `ip` commands in one process, so that a cut takes a few milliseconds."""
        done = subprocess.run(
            [IP, *(["-n", within] if within else []), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            cause = done.stderr.strip() or f"exit {done.returncode}"
            raise NotPermitted(f"`ip` refused: {cause.splitlines()[0]}")


def _cable(number: int) -> str:
    return f"cable{number}"
