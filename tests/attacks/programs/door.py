"""A site's door in a process of its own: its transport and an inbox, nothing behind it.

    python -m tests.attacks.programs.door FOLDER PORTS LIMITS [compression|parsing]

For every line on stdin it answers with one of JSON: how it is. ``LIMITS`` is a JSON
object that replaces fields of `Limits` and `Quotas`; ``compression`` takes grpc's
bounds on messages away, with ``parsing`` its time costs a peer nothing. So a test can
attack the same code with a defence removed.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from daemon.process.log import configure_logging
from peers.link import client
from peers.link.quotas import QuotaLedger, Quotas
from peers.link.servicer import Limits
from peers.link.transport import KeepInTouch, LinkOptions
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import Site, running


def limits_of(changes: dict[str, Any]) -> Limits:
    """The defaults, but for these."""
    of_quotas = {field.name for field in fields(Quotas)}
    quotas = replace(Quotas(), **{k: v for k, v in changes.items() if k in of_quotas})
    rest = {k: v for k, v in changes.items() if k not in of_quotas}
    return replace(Limits(), quotas=quotas, **rest)


async def serve(root: Path, ports: dict[str, int], limits: Limits) -> None:
    federation = Federation(root, "med", ports)
    options = LinkOptions(limits=limits, keep_in_touch=KeepInTouch(60, 60, 0))
    async with running(federation, "alpha", options=options) as alpha:
        alpha.inbox.shelf[pb.MODEL_VERSION] = bytes(1000)
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        print("ready", flush=True)
        while await lines.readline():
            print(json.dumps(state(alpha)), flush=True)


def state(alpha: Site) -> dict[str, Any]:
    seen = alpha.transport.statistics()["beta"]
    memory = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident_mib": int(memory["VmRSS"].split()[0]) // 1024,
        "peak_mib": int(memory["VmHWM"].split()[0]) // 1024,
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  of a process, no folder
        "messages": len(alpha.inbox.messages),
        "refused": seen.refused,
        "over_quota": seen.over_quota,
        "tasks": len(asyncio.all_tasks()),
    }


# ---- at the test's side ------------------------------------------------------


@dataclass
class Door:
    """The running process, from outside."""

    federation: Federation
    process: asyncio.subprocess.Process

    async def state(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"?\n")
        answer = await asyncio.wait_for(self.process.stdout.readline(), 60)
        found: dict[str, Any] = json.loads(answer)
        return found


@asynccontextmanager
async def door(
    federation: Federation, *, undefended: str = "", files: int = 1024, **limits: Any
) -> AsyncIterator[Door]:
    """alpha's door with these limits, and so many descriptors at most."""
    process = await asyncio.create_subprocess_exec(
        *("prlimit", f"--nofile={files}"),
        *(sys.executable, "-m", "tests.attacks.programs.door", str(federation.root)),
        *(json.dumps(federation.ports), json.dumps(limits), undefended),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        yield Door(federation, process)
    finally:
        with suppress(ProcessLookupError):  # it could not even tell how it is, and has ended
            process.kill()
        await process.wait()


if __name__ == "__main__":
    configure_logging("error")  # to stderr: stdout is for the answers
    if "compression" in sys.argv[4:]:
        bounds = ("grpc.max_receive_message_length", "grpc.compression_enabled_algorithms_bitset")
        kept = [option for option in client._OPTIONS if option[0] not in bounds]
        client._OPTIONS[:] = [*kept, ("grpc.max_receive_message_length", -1)]
    if "parsing" in sys.argv[4:]:
        QuotaLedger.parsed = lambda _ledger, _site, _seconds: None  # type: ignore[assignment,method-assign]
    root, ports, changes = sys.argv[1:4]
    asyncio.run(serve(Path(root), json.loads(ports), limits_of(json.loads(changes))))
