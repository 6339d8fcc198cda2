"""A whole committed round without training, between three daemons over mutual TLS.

Three real daemons on loopback exchange the default retriever's head (1.18 M
values): prepare, plan, key, encrypt, aggregate, apply, vote, commit, all synced
to disk. The time of a round is from one commit to the next, as one site sees
it. The same daemons then train, and the event loops' lag is read. The control
averages the same vectors in the clear: three processes, plain TCP, no disk.

Memory of a daemon is that of all its processes: workers, the one that they are forked
from, multiprocessing's own. What forks share must not count once each, as it would if
resident sizes were added (they are the control), and what three daemons on one machine
share must count in each, as it would at a site. So: anonymous pages by their share
(Pss_Anon), and of each file that is mapped, the most that any one process has of it.

    python -m tests.benchmarks.bench_round [--json]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from daemon.fedctl.commands.train import watched
from daemon.fedctl.demo import sites as demo_sites
from daemon.fedctl.terminal.connection import connected
from daemon.fedctl.terminal.output import CommandError
from daemon.fedctl.transfer.sending import send
from proto import control_pb2 as control
from proto import federation_pb2 as pb

VALUES = 1_182_336  # 2 x 384 + 384 x 1536 + 1536 + 1536 x 384 + 384
ROUNDS = 10
TRAINED_ROUNDS = 3
CONTROL = "plain TCP, no encryption, no TLS, no disk, no votes: three processes average the vectors"
RESIDENT = "the sum of its processes' resident sizes, in which shared pages count several times"


# ---- the control ---------------------------------------------------------------


def _take(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(1 << 20, size - len(data)))
        if not piece:
            raise ConnectionError("the other end is gone")
        data += piece
    return bytes(data)


def _member(port: int, rounds: int) -> None:
    vector = np.random.default_rng(port).standard_normal(VALUES).astype(np.float32)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(rounds):
            connection.sendall(vector.tobytes())
            vector = np.frombuffer(_take(connection, VALUES * 4), dtype=np.float32)


def plain_averaging(rounds: int) -> float:
    """Median seconds of a round of averaging in the clear."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        members = [context.Process(target=_member, args=(port, rounds)) for _ in range(2)]
        for member in members:
            member.start()
        connections = [server.accept()[0] for _ in members]
        own = np.random.default_rng(0).standard_normal(VALUES).astype(np.float32)
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            parts = [np.frombuffer(_take(c, VALUES * 4), dtype=np.float32) for c in connections]
            own = ((own + parts[0] + parts[1]) / np.float32(3)).astype(np.float32)
            for connection in connections:
                connection.sendall(own.tobytes())
            seconds.append(time.perf_counter() - started)
        for connection in connections:
            connection.close()
        for member in members:
            member.join()
    return statistics.median(seconds)


# ---- memory -----------------------------------------------------------------------


def memory(pid: int) -> tuple[int, int]:
    """Bytes of memory of a daemon's processes together, and the sum of their resident sizes."""
    daemon = psutil.Process(pid)
    anonymous = resident = 0
    files: dict[str, int] = {}
    for process in [daemon, *daemon.children(recursive=True)]:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        anonymous += next(
            int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss_Anon:")
        )
        resident += process.memory_info().rss
        for mapped in process.memory_maps():  # one for each path
            clean = mapped.rss - mapped.anonymous
            files[mapped.path] = max(files.get(mapped.path, 0), clean)
    return anonymous * 1024 + sum(files.values()), resident


# ---- the federation --------------------------------------------------------------


async def _rounds(stub: Any, plan: dict[str, Any], rounds: int) -> list[float]:
    """Moments at which rounds were committed, as this site saw them."""
    request = control.TrainRequest(rounds=rounds, plan=pb.TrainingPlan(**plan))
    await stub.Train(request, timeout=30)
    return [time.perf_counter() async for p in watched(stub) if p.phase == "committed"]


async def _measure(work: Path) -> dict[str, float]:
    corpora = demo_sites.find_corpora(None, None)
    with demo_sites.short_folder() as sockets:
        sites = demo_sites.provision(work, [c.site for c in corpora], Path(sockets))
        for site in sites:
            with site.settings.open("a") as file:
                file.write("\n[training]\nlocal_epochs = 0\n")
        async with demo_sites.running(sites) as daemons:
            await until_connected(sites)
            alone = [psutil.Process(d.process.pid).memory_info().rss for d in daemons]
            idle = [memory(d.process.pid) for d in daemons]
            for site, corpus in zip(sites, corpora, strict=True):
                async with connected(site.socket) as stub:
                    await send(stub, list(corpus.files), lambda _: None)
            async with connected(sites[0].socket) as stub:
                moments = await _rounds(stub, {}, ROUNDS + 1)
                exchanged = await stub.Status(control.StatusRequest())
                await _rounds(stub, {"local_epochs": 4}, TRAINED_ROUNDS)
            trained = [memory(d.process.pid) for d in daemons]
            lags = []
            for site in sites:
                async with connected(site.socket) as stub:
                    status = await stub.Status(control.StatusRequest())
                    lags.append(status.loop_lag_p99_ms)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return {
        "round_s": statistics.median(gaps),
        "lag_p99_ms": max(lags),
        "alone_mib": statistics.median(alone) / 2**20,
        "idle_mib": statistics.median(own for own, _ in idle) / 2**20,
        "idle_rss_mib": statistics.median(rss for _, rss in idle) / 2**20,
        "trained_mib": statistics.median(own for own, _ in trained) / 2**20,
        "trained_rss_mib": statistics.median(rss for _, rss in trained) / 2**20,
        "sent_mib": exchanged.bytes_sent / (ROUNDS + 1) / 2**20,
    }


async def until_connected(sites: list[demo_sites.DemoSite]) -> None:
    async with asyncio.timeout(120):
        for site in sites:
            while True:
                try:
                    async with connected(site.socket) as stub:
                        status = await stub.Status(control.StatusRequest())
                        if status.peers_connected == len(sites) - 1 and status.index_digest:
                            break
                except CommandError:
                    pass  # not listening yet; the timeout ends the wait
                await asyncio.sleep(0.3)


def figures() -> list[dict[str, Any]]:
    """One row a figure, each beside its control."""
    with tempfile.TemporaryDirectory(prefix="hanse-bench-") as folder:
        measured = asyncio.run(_measure(Path(folder)))
    plain = plain_averaging(ROUNDS)

    def row(
        name: str, value: float, unit: str, what: str = "", beside: float = 0.0
    ) -> dict[str, Any]:
        return {
            "name": name,
            "value": round(value, 4),
            "unit": unit,
            "control": what or None,
            "control_value": round(beside, 4) if what else None,
            "ratio": round(value / beside, 3) if what else None,
        }

    clear = VALUES * 4 * 2 * 2 / 3 / 2**20  # up and down, of two members, a site's share
    return [
        row("committed round, 1.18 M values, 3 daemons", measured["round_s"], "s", CONTROL, plain),
        row("sent by a site per round", measured["sent_mib"], "MiB", CONTROL, clear),
        row("event-loop lag p99 while training and encrypting", measured["lag_p99_ms"], "ms"),
        row("resident memory of an idle daemon's main process", measured["alone_mib"], "MiB"),
        row("memory of an idle daemon, all processes", *_beside(measured, "idle")),
        row("memory of a daemon, all processes, after training", *_beside(measured, "trained")),
    ]


def _beside(measured: dict[str, float], when: str) -> tuple[float, str, str, float]:
    return measured[f"{when}_mib"], "MiB", RESIDENT, measured[f"{when}_rss_mib"]


if __name__ == "__main__":
    rows = figures()
    for one in rows:
        print(json.dumps(one) if "--json" in sys.argv else one)
