"""People ask one site of three through its gateway, over TLS, while all three train.

First rounds without anybody asking, as a control. Then ``--people`` at once, each of whom asks as
soon as they have an answer, and comes again after a 429 when it says; half as many tokens as would
fill the gateway, so that none is at its own bound. Then people who come one by one, independently
of one another (Poisson), with four fifths of `STATED` answers a second. Last somebody who asks
alone, and the same beside ``--bad`` slow, broken and hostile clients from a process of their own.

It is all on one machine: three sites, the people and the bad clients share its cores.

    python -m tests.benchmarks.answers.load [--minutes 10] [--keep]
    python -m tests.benchmarks.answers.load --minutes 0.5 --people 4 --bad 50 --questions 10
    python -m tests.benchmarks.answers.load --written      # a model's server that takes its time
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from daemon.fedctl.commands.train import watched
from daemon.fedctl.demo import sites as demo_sites
from daemon.fedctl.demo.sites import RunningDaemon
from daemon.fedctl.terminal.connection import connected
from daemon.fedctl.transfer.sending import send
from proto import control_pb2 as control
from tests.benchmarks.answers.bad_clients import Answers, Line, Target, honest, misbehaving, request
from tests.benchmarks.bench_round import memory, until_connected
from tests.daemon.gateway.test_starts import self_signed
from tests.daemon.process.model_server import writing

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "load.jsonl"
STATED: Final = 8.0  # answers a second beside rounds, on two cores: docs/figures.md
SHARE: Final = 0.8  # of them, below which nearly nobody is refused
TOKENS: Final = 8
STREAMED: Final = 4  # every so manieth answer is read as it comes
LOOK_S: Final = 10.0  # between two looks at memory
PIECE_S: Final = 0.02  # that the slow model's server takes for a piece
MIB: Final = 2**20


# ---- what was asked --------------------------------------------------------------


@dataclass
class Asked:
    """What became of people's questions: seconds from the first try on, and of single tries."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    waited: list[float] = field(default_factory=list)  # a person, for an answer
    tries: list[float] = field(default_factory=list)  # of these, the last
    refused: int = 0  # 429, with Retry-After
    wrong: Counter[str] = field(default_factory=Counter)  # anything else
    of: Counter[int] = field(default_factory=Counter)  # answers, by person

    @property
    def a_second(self) -> float:
        return len(self.waited) / (self.ended - self.began)

    @property
    def refusals(self) -> float:
        """Of all tries, how many were told to come again."""
        return self.refused / max(1, self.refused + len(self.waited))


class People:
    """Ask the gateway; a connection serves again whoever asks next."""

    def __init__(self, target: Target, tokens: Sequence[str], questions: Sequence[str]) -> None:
        self._target, self._tokens, self._questions = target, tokens, questions
        self._lines: list[Line] = []
        self._stack = AsyncExitStack()
        self._chance = random.Random(3)
        self._count = itertools.count()

    async def __aenter__(self) -> People:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def at_once(self, people: int, seconds: float) -> Asked:
        """All the time, each as soon as they have their answer."""
        asked = Asked()

        async def one(person: int) -> None:
            while True:
                await self._ask(asked, person)

        await _for(seconds, [one(person) for person in range(people)])
        asked.ended = time.monotonic()
        return asked

    async def coming(self, a_second: float, seconds: float) -> Asked:
        """So many on average, whoever still waits; those at the end are waited for."""
        asked = Asked()
        async with asyncio.TaskGroup() as group:
            until = time.monotonic() + seconds
            due = time.monotonic()
            while (due := due + self._chance.expovariate(a_second)) < until:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._ask(asked, next(self._count)))
            asked.ended = until
        return asked

    async def _ask(self, asked: Asked, person: int) -> None:
        """A question, until it is answered."""
        first = time.monotonic()
        token = self._tokens[person % len(self._tokens)]
        question = self._chance.choice(self._questions)
        while True:
            started = time.monotonic()
            told = await self._told(question, token)
            status = int(told.split(b" ", 2)[1]) if told.startswith(b"HTTP/1.1 ") else 0
            again = re.search(rb"retry-after: (\d+)", told.lower())
            if status == 429 and again:
                asked.refused += 1
                await asyncio.sleep(int(again[1]))
                continue
            if status == 200 and b'"content"' in told and b'"error"' not in told:
                asked.waited.append(time.monotonic() - first)
                asked.tries.append(time.monotonic() - started)
                asked.of[person] += 1
            else:
                asked.wrong[f"{status} {told[-200:]!r}"] += 1
                await asyncio.sleep(1)
            return

    async def _told(self, question: str, token: str) -> bytes:
        """What comes back; of a line that breaks, the kind of error."""
        streamed = next(self._count) % STREAMED == 0
        line = self._lines.pop() if self._lines else None
        try:
            if line is None or line.reader.at_eof():  # hung up on, having asked nothing for long
                line = await self._stack.enter_async_context(Line(self._target))
            await line.send(request(token, question=question, stream=streamed))
            told = await line.reply()
        except (OSError, asyncio.IncompleteReadError) as error:
            return type(error).__name__.encode()
        self._lines.append(line)
        return told


async def _for(seconds: float, work: list[Any]) -> None:
    """All of it at once, broken off when the time is up; what goes wrong in it is raised."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)


# ---- the site beside it ------------------------------------------------------------


@dataclass
class Memory:
    """MiB at a moment; a daemon's with what its processes share counted once."""

    at: float
    fedd: float
    fedgate: float


class Watch:
    """Commits of rounds and memory, as they come."""

    def __init__(self, fedd: RunningDaemon, fedgate: RunningDaemon) -> None:
        self._pids = (fedd.process.pid, fedgate.process.pid)
        self.commits: list[float] = []
        self.memory: list[Memory] = []

    async def rounds(self, stub: Any) -> None:
        """As a site sees them, until it is stopped."""
        async for progress in watched(stub):
            if progress.phase == "committed":
                self.commits.append(time.monotonic())

    async def looks(self) -> None:
        """At memory, in a thread: maps of a process are long."""
        while True:
            started = time.monotonic()
            fedd, gate = [(await asyncio.to_thread(memory, pid))[0] / MIB for pid in self._pids]
            self.memory.append(Memory(started, fedd, gate))
            await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - started)))

    def round_s(self, began: float, ended: float) -> tuple[int, float]:
        """How many were committed in that time, and the median seconds from one to the next."""
        inside = [moment for moment in self.commits if began <= moment <= ended]
        gaps = np.diff(inside)
        return len(inside), float(np.median(gaps)) if len(gaps) else float("nan")

    def over(self, began: float, ended: float) -> list[Memory]:
        return [one for one in self.memory if began <= one.at <= ended]


@dataclass
class Scene:
    """A federation that trains, and the door of one of its sites."""

    watch: Watch
    target: Target
    tokens: list[str]
    questions: list[str]

    def people(self) -> People:
        return People(self.target, self.tokens, self.questions)


@asynccontextmanager
async def scene(work: Path, written: str) -> AsyncIterator[Scene]:
    """Three of the demo's sites with its documents; the first has its gateway over TLS.

    ``written``: a language model's server, that writes that one's answers.
    """
    corpora = demo_sites.find_corpora(None, None)
    self_signed(work)
    async with AsyncExitStack() as stack:
        sockets = Path(stack.enter_context(demo_sites.short_folder()))
        sites = demo_sites.provision(work, [c.site for c in corpora], sockets, opened=True)
        _configure(sites[0], work, written)
        daemons = await stack.enter_async_context(demo_sites.running(sites))
        (gate,) = await stack.enter_async_context(demo_sites.running(sites[:1], "fedgate"))
        await until_connected(sites)
        for site, corpus in zip(sites, corpora, strict=True):
            async with connected(site.socket) as stub:
                await send(stub, list(corpus.files), lambda _: None)
        first = await stack.enter_async_context(connected(sites[0].socket))
        other = await stack.enter_async_context(connected(sites[1].socket))
        tokens = [await _token(first, f"people-{n}") for n in range(TOKENS)]
        bad = await _token(first, "bad")
        target = Target("127.0.0.1", sites[0].gateway_port, work / "gateway.crt", bad)
        await other.Train(control.TrainRequest(rounds=10_000), timeout=60)
        watch = Watch(daemons[0], gate)
        beside = [asyncio.create_task(one) for one in (watch.rounds(first), watch.looks())]
        try:
            yield Scene(watch, target, tokens, list(_questions(corpora[0])))
        finally:
            await other.StopTraining(control.StopTrainingRequest(), timeout=60)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


def _configure(site: demo_sites.DemoSite, work: Path, written: str) -> None:
    secured = f'tls_certificate = "{work}/gateway.crt"\ntls_key = "{work}/gateway.key"\n'
    text = site.settings.read_text().replace("[gateway]\n", f"[gateway]\n{secured}")
    if written:
        text += f'\n[retrieval]\ngenerator = "openai"\nlanguage_model = "{written}#m"\n'
    site.settings.write_text(text)


def _questions(corpus: demo_sites.SiteCorpus) -> Iterator[str]:
    for file in corpus.files:
        if file.name.startswith("pairs_"):
            yield from (json.loads(line)["query"] for line in file.read_text().splitlines())


async def _token(stub: Any, name: str) -> str:
    wanted = control.CreateTokenRequest(name=name, scopes=["ask"], days=1)
    return str((await stub.CreateToken(wanted, timeout=30)).secret)


def slowly(prompt: str) -> Iterator[str]:
    """The first sentence of the first passage, word by word: it is supported."""
    found = re.search(r"<passage 1>.*\n(.*?\.)\s", prompt)
    said = f"{found[1][:-1]} [1]." if found else "Nothing is said of it."
    for word in said.split(" "):
        time.sleep(PIECE_S)
        yield f"{word} "


# ---- what is measured ---------------------------------------------------------------

Say = Callable[[str], None]


async def measured(chosen: argparse.Namespace, work: Path, written: str, say: Say) -> list[Any]:
    """The rows, each told as soon as it is known."""
    seconds = chosen.minutes * 60
    rows: list[dict[str, Any]] = []

    def found(more: list[dict[str, Any]]) -> None:
        rows.extend(more)
        for row in more:
            say(json.dumps(row))

    async with scene(work, written) as on:
        say("rounds alone")
        began = time.monotonic()
        await asyncio.sleep(max(20.0, seconds / 5))
        alone = (began, time.monotonic())
        async with on.people() as people:
            say(f"{chosen.people} people at once")
            crowd = await people.at_once(chosen.people, seconds)
            found(_crowd(on.watch, crowd, chosen.people, alone))
            stated = crowd.a_second if written else STATED
            say(f"{stated * SHARE:.2f} questions a second")
            few = await people.coming(stated * SHARE, seconds / 3)
            found(_few(on.watch, few, stated * SHARE, alone))
        say("one honest person")
        mine = replace(on.target, token=on.tokens[0])
        control_answers = await honest(mine, chosen.questions, 0.2)
        say(f"one honest person beside {chosen.bad} bad clients")
        async with misbehaving(on.target, chosen.bad) as seen:
            beside = await honest(mine, chosen.questions, 0.2)
        say(f"they tried {dict(seen.attempts)}, and were told {dict(seen.statuses)}")
        found(_honest(chosen.bad, control_answers, beside))
        found([_row("memory of fedgate behind them", on.watch.memory[-1].fedgate, "MiB")])
        for asked in (crowd, few):
            for status, count in asked.wrong.items():
                say(f"{count} times: {status}")
    return rows


def _crowd(
    watch: Watch, asked: Asked, people: int, alone: tuple[float, float]
) -> list[dict[str, Any]]:
    name = f"{people} people at once"
    each = [asked.of[person] for person in range(people)]
    share = min(each) / max(1, max(each))
    return [
        _row(f"{name}, answers", asked.a_second, "answers/s"),
        _row(f"{name}, refused (429) of all tries", asked.refusals, "ratio"),
        _row(f"{name}, anything else", sum(asked.wrong.values()), "count"),
        _row(f"{name}, answers of who had fewest, of who had most", share, "ratio"),
        *_percentiles(name, asked),
        *_rounds(name, watch, asked, alone),
        *_memory(name, watch, asked),
    ]


def _few(
    watch: Watch, asked: Asked, a_second: float, alone: tuple[float, float]
) -> list[dict[str, Any]]:
    name = f"{a_second:.1f} questions a second"
    return [
        _row(f"{name}, answers", asked.a_second, "answers/s"),
        _row(f"{name}, refused (429) of all tries", asked.refusals, "ratio"),
        _row(f"{name}, anything else", sum(asked.wrong.values()), "count"),
        *_percentiles(name, asked),
        *_rounds(name, watch, asked, alone),
    ]


def _percentiles(name: str, asked: Asked) -> list[dict[str, Any]]:
    return [
        _row(
            f"{name}, p{share}, from the first try",
            float(np.percentile(asked.waited or [np.nan], share)),
            "s",
            "of the try that was answered alone",
            float(np.percentile(asked.tries or [np.nan], share)),
        )
        for share in (50, 95, 99)
    ]


def _rounds(
    name: str, watch: Watch, asked: Asked, alone: tuple[float, float]
) -> list[dict[str, Any]]:
    count, each = watch.round_s(asked.began, asked.ended)
    _, before = watch.round_s(*alone)
    control_name = "nobody asks"
    return [
        _row(f"{name}, rounds committed meanwhile", count, "count"),
        _row(f"{name}, a round", each, "s", control_name, before),
    ]


def _memory(name: str, watch: Watch, asked: Asked) -> list[dict[str, Any]]:
    looks = watch.over(asked.began, asked.ended)
    rows = []
    for what in ("fedd", "fedgate"):
        values = np.array([getattr(one, what) for one in looks])
        minutes = np.array([(one.at - asked.began) / 60 for one in looks])
        rows.append(
            _row(
                f"{name}, memory of {what} at the end",
                float(values[-3:].mean()),
                "MiB",
                "at the begin",
                float(values[:3].mean()),
            )
            | {
                "each_minute": [
                    round(float(values[minutes.astype(int) == minute].mean()), 1)
                    for minute in sorted(set(minutes.astype(int)))
                ]
            }
        )
        late = minutes >= minutes.max() / 2  # caches have filled by then
        if late.sum() > 2:
            slope = float(np.polyfit(minutes[late] / 60, values[late], 1)[0])
            rows.append(_row(f"{name}, growth of {what}, second half", slope, "MiB/h"))
    return rows


def _honest(bad: int, alone: Answers, beside: Answers) -> list[dict[str, Any]]:
    name = f"one who asks beside {bad} bad clients"
    shares = [
        _row(
            f"{name}, p{share}",
            float(np.percentile(beside.seconds or [np.nan], share)),
            "s",
            "without them",
            float(np.percentile(alone.seconds or [np.nan], share)),
        )
        for share in (50, 95, 100)
    ]
    tries = [
        _row(f"{name}, {what}", value, "count", "without them", before)
        for what, value, before in (
            ("answered", len(beside.seconds), len(alone.seconds)),
            ("not answered", len(beside.unanswered), len(alone.unanswered)),
            ("told to come again (429)", beside.refused, alone.refused),
            ("lines that broke and were tried again", beside.broken, alone.broken),
        )
    ]
    return [*shares, *tries]


def _row(
    name: str, value: float, unit: str, beside: str = "", control_value: float = 0.0
) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "control": beside or None,
        "control_value": round(control_value, 4) if beside else None,
        "ratio": round(value / control_value, 3) if beside and control_value else None,
    }


def main() -> None:
    """Measure, tell a row a line, and keep them if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--people", type=int, default=32)
    parser.add_argument("--bad", type=int, default=1000)
    parser.add_argument("--questions", type=int, default=100, help="of one beside bad clients")
    parser.add_argument("--written", action="store_true", help="by a slow model's server")
    parser.add_argument("--keep", action="store_true", help=f"in {RESULTS.name}")
    chosen = parser.parse_args()
    # Whoever ends it ends the sites that it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    server = writing(slowly) if chosen.written else nullcontext()
    with tempfile.TemporaryDirectory(prefix="hanse-load-") as folder, server as model:
        url = model.url if model is not None else ""
        rows = asyncio.run(measured(chosen, Path(folder), url, _say))
    kind = "written" if chosen.written else "extractive"
    rows = [{"generator": kind, "cores": os.cpu_count(), **row} for row in rows]
    if chosen.keep:
        _keep(rows, kind)


def _say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


def _keep(rows: list[dict[str, Any]], kind: str) -> None:
    """In the place of those of the same generator."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    others = [row for row in map(json.loads, lines) if row["generator"] != kind]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *others]))


if __name__ == "__main__":
    main()
