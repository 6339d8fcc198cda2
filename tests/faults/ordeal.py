"""What real daemons go through, and what must hold meanwhile: for tests/faults/test_faults.py.

    async with Ordeal.begun(root, ["alder", "birch", "cedar"]) as ordeal:
        ordeal.network.cut("alder")
        ...
        await ordeal.until_agreed()

From the beginning to the end somebody asks at every site, over and over. A
question must be answered unless its daemon is being restarted just then.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from proto import control_pb2 as control
from tests.faults.namespaces import Network
from tests.support.federation import LiveFederation, LiveSite, Surroundings

_BETWEEN_QUESTIONS_S = 0.5
_LONGEST_ANSWER_S = 60.0  # a frozen daemon answers when it goes on
_BETWEEN_LOOKS_S = 0.2  # at all heads: a status costs a daemon some milliseconds


@dataclass
class Asked:
    """What became of the questions at one site."""

    answered: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Ordeal:
    """Daemons in namespaces of their own, with somebody asking at each."""

    def __init__(self, live: LiveFederation, network: Network) -> None:
        self.live = live
        self.network = network
        self.names = sorted(live.sites)
        self.quorum = live.federation.manifest().quorum
        self.down: set[str] = set()  # not running, or not ready yet
        self.away: set[str] = set()  # those, and who has not answered a question since
        self.asked = {name: Asked() for name in self.names}

    @classmethod
    @asynccontextmanager
    async def begun(
        cls, root: Path, network: Network, deadlines: dict[str, float], *, faulty_sites: int = 0
    ) -> AsyncIterator[Ordeal]:
        """Start a daemon for each site of the network; all have documents and are asked.

        ``faulty_sites``: how many may lie; with 0 a plain majority decides.
        """
        around = Surroundings(
            hosts=network.addresses,
            networks={site: network.file(site) for site in network.sites},
            program="tests.faults.halting_fedd",
        )
        async with LiveFederation.start(
            root,
            network.sites,
            rounds=deadlines,
            surroundings=around,
            faulty_sites=faulty_sites,
        ) as live:
            await live.ingest_all()
            ordeal = cls(live, network)
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(ordeal._ask_on(name)) for name in ordeal.names]
                # In the first round libraries are loaded: no test's deadline should wait for that.
                await ordeal.train(ordeal.names[0], rounds=1)
                await ordeal.until_head(1, ordeal.names, within_s=120.0)
                yield ordeal
                for task in asking:
                    task.cancel()

    # ---- who does what ---------------------------------------------------------

    def coordinator(self, round_: int, attempt: int = 0) -> str:
        """By the rule of rotation."""
        return self.names[(round_ + attempt) % len(self.names)]

    def others(self, *sites: str) -> list[str]:
        return [name for name in self.names if name not in sites]

    @property
    def may_be_down(self) -> int:
        """How many sites can be away and the others still decide."""
        return len(self.names) - self.quorum

    async def head(self) -> int:
        """The last round that anybody has committed."""
        return max([await self._head_of(name) for name in self.names])

    async def train(self, at: str, rounds: int) -> int:
        """Ask one site for more rounds; the last of them."""
        reply = await self.live.sites[at].stub.Train(
            control.TrainRequest(rounds=rounds), timeout=30
        )
        return reply.run.target_round

    # ---- faults ------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        self._leave(name)
        process = self.live.sites[name].process
        process.kill()
        await process.wait()

    async def stop(self, name: str) -> None:
        """SIGTERM."""
        self._leave(name)
        await self.live.sites[name].terminate()

    def _leave(self, name: str) -> None:
        self.down.add(name)
        self.away.add(name)

    async def revive(self, name: str, within_s: float = 120.0) -> None:
        """Start a daemon again; returns when it answers questions, or was killed once more."""
        site = self.live.sites[name]
        if site.process.returncode is not None:
            site = await self.live.launch(name)
        async with asyncio.timeout(within_s):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await site.status()
                    self.down.discard(name)
                    await _ask(site)
                    break
                if site.process.returncode == -signal.SIGKILL:
                    return
                assert site.process.returncode is None, f"{name} ended:\n{site.log}"
                await asyncio.sleep(0.2)
        if name not in self.down:
            self.away.discard(name)

    def freeze(self, name: str) -> list[psutil.Process]:
        """SIGSTOP for a daemon and its workers; give the result to `thaw`."""
        daemon = psutil.Process(self.live.sites[name].process.pid)
        processes = [daemon, *daemon.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        return processes

    @staticmethod
    def thaw(processes: Sequence[psutil.Process]) -> None:
        """SIGCONT for all of them."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def halted(
        self, name: str, phase: str, *, rounds: int = 1, within_s: float = 30.0
    ) -> AsyncIterator[None]:
        """Begin a run; when an attempt that this site coordinates enters a phase, it stands still.

        It goes on at the end.
        """
        folder = self.live.sites[name].folder
        wanted, halted = folder / "halt-at", folder / "halted"
        wanted.write_text(phase)
        try:
            await self.train(self.others(name)[0], rounds)
            async with asyncio.timeout(within_s):
                while not halted.exists():
                    await asyncio.sleep(0.01)
            yield
        finally:
            wanted.unlink()
            halted.unlink(missing_ok=True)

    # ---- what must hold ------------------------------------------------------------

    async def until_head(
        self, round_: int, among: Sequence[str], within_s: float, *, of: int = 0
    ) -> float:
        """Until ``of`` of these sites (all) have committed a round; seconds it took."""
        began = time.monotonic()
        needed = of or len(among)
        async with asyncio.timeout(within_s):
            while True:
                heads = [await self._head_of(name) for name in among]
                if sum(head >= round_ for head in heads) >= needed:
                    return time.monotonic() - began
                await asyncio.sleep(_BETWEEN_LOOKS_S)

    async def stands_still(self, round_: int, for_s: float) -> None:
        """Nobody commits a round for so long, though a run is under way."""
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            heads = {name: await self._head_of(name) for name in self.names}
            assert max(heads.values()) < round_, f"committed without a quorum: {heads}"
            await asyncio.sleep(0.2)

    async def until_at_rest(self, within_s: float = 60.0) -> None:
        """Until what an earlier test left is over: every site is up, no run is under way."""
        for name in sorted(self.down):
            await self.revive(name)
        async with asyncio.timeout(within_s):
            for site in self.live.sites.values():
                while (status := await site.status()).head_round < status.run.target_round:
                    await asyncio.sleep(0.1)
        for asked in self.asked.values():
            asked.failures.clear()

    async def until_all_are_up(self, within_s: float = 120.0) -> None:
        """Until every daemon that was started again is ready."""
        async with asyncio.timeout(within_s):
            while self.down:
                await asyncio.sleep(0.1)

    async def until_agreed(self, within_s: float = 30.0) -> float:
        """Until all sites have the same head; then compare every round that ever was."""
        began = time.monotonic()
        heads: list[tuple[int, bytes]] = []
        try:
            async with asyncio.timeout(within_s):
                while True:
                    sites = self.live.sites.values()
                    # A connection to a daemon that was killed may end only now.
                    with suppress(grpc.aio.AioRpcError):
                        statuses = [await site.status() for site in sites]
                        heads = [(s.head_round, s.model_digest) for s in statuses]
                        if len(set(heads)) == 1:
                            break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            told = {name: (r, d.hex()[:12]) for name, (r, d) in zip(self.names, heads, strict=True)}
            raise AssertionError(f"no common head after {within_s} s: {told}") from None
        took = time.monotonic() - began
        histories = {
            name: [
                (r.certificate.body.round, r.certificate.body.model_digest)
                for r in await self.live.sites[name].rounds()
            ]
            for name in self.names
        }
        first = histories[self.names[0]]
        assert [round_ for round_, _ in first] == list(range(1, heads[0][0] + 1))
        assert all(history == first for history in histories.values()), "the history forked"
        return took

    async def attempt_of(self, round_: int, at: str) -> int:
        """Which attempt committed a round, as a site's certificate says."""
        rounds = await self.live.sites[at].rounds()
        return next(r.certificate.attempt for r in rounds if r.certificate.body.round == round_)

    async def answered_throughout(self, before: dict[str, int]) -> str:
        """No question failed, and each site answers now; a line for people."""
        failures = {name: asked.failures for name, asked in self.asked.items() if asked.failures}
        assert not failures, failures
        counts = {name: self.asked[name].answered - before[name] for name in self.names}
        await asyncio.gather(*(_ask(site) for site in self.live.sites.values()))
        slowest = max(asked.slowest_s for asked in self.asked.values())
        return f"{sum(counts.values())} questions answered, slowest so far {slowest:.1f} s"

    def counts(self) -> dict[str, int]:
        """How many questions each site has answered so far."""
        return {name: asked.answered for name, asked in self.asked.items()}

    # ---- small parts -----------------------------------------------------------------

    async def _head_of(self, name: str) -> int:
        """-1 while the daemon is being restarted."""
        if name in self.down:
            return -1
        try:
            return (await self.live.sites[name].status()).head_round
        except grpc.aio.AioRpcError:
            if name not in self.down:
                raise
            return -1

    async def _ask_on(self, name: str) -> None:
        asked = self.asked[name]
        while True:
            await asyncio.sleep(_BETWEEN_QUESTIONS_S)
            site, began = self.live.sites[name], time.monotonic()
            if name in self.away:
                continue
            try:
                reply = await _ask(site)
            except grpc.aio.AioRpcError as error:
                restarted = name in self.away or site is not self.live.sites[name]
                if not restarted:
                    asked.failures.append(f"{error.code().name}: {error.details()}")
                continue
            if not reply.citations:
                asked.failures.append(f"an answer without citations: {reply.answer!r}")
            asked.answered += 1
            asked.slowest_s = max(asked.slowest_s, time.monotonic() - began)


async def _ask(site: LiveSite) -> control.AskReply:
    question = f"who looks after the capstan brake of {site.id}?"
    return await site.stub.Ask(control.AskRequest(question=question), timeout=_LONGEST_ANSWER_S)
