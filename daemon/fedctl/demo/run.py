"""fedctl demo: a whole federation on one machine, from nothing to answers with citations."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from daemon.fedctl.commands.evaluation.evaluate import judge
from daemon.fedctl.commands.library import put_question
from daemon.fedctl.commands.rounds import plain_round
from daemon.fedctl.commands.train import start, watched
from daemon.fedctl.demo import sites as demo_sites
from daemon.fedctl.demo.opened import gateway_of, opened, show_open
from daemon.fedctl.demo.outcome import DemoOutcome, SiteAnswer, SiteOutcome, opening, show_outcome
from daemon.fedctl.demo.sites import DemoSite, RunningDaemon, SiteCorpus, log_tail
from daemon.fedctl.terminal.connection import connected, run
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import CommandError, Exit, Session, visible
from daemon.fedctl.terminal.training_view import TrainingView
from daemon.fedctl.transfer.sending import Ingested, send

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import AskReply, LearningReply, StatusReply
    from proto.control_pb2_grpc import ControlAsyncStub

T = TypeVar("T")

# The aim is 15 s on 2 cores; a machine under load is given longer before we call it broken.
READY_WITHIN_S = 180.0
# For the last site to learn of the last round and to embed its passages anew.
SETTLED_WITHIN_S = 600.0
LOOK_AGAIN_AFTER_S = 0.1


@command
def demo(
    session: Session,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the sites live; must be new or empty, and stays.",
            show_default="a temporary folder, removed at the end; with --keep ./demo-work",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folders DIR/<site> with documents.jsonl[.gz] and pairs_train|test.jsonl.",
            show_default="the bundled corpus of three fictional institutions",
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Which folders of --data take part.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds to train.")] = 12,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the work folder behind.")] = False,
    stay: Annotated[
        bool,
        typer.Option("--open", help="Keep the sites until Ctrl-C, one with its gateway open."),
    ] = False,
) -> None:
    """Run a federation of three sites on this machine, from nothing to answers.

    Makes an authority and the sites, starts their daemons on loopback, ingests,
    evaluates and asks each site a question, trains, evaluates and asks again,
    shows both answers side by side, and stops everything it started.
    """
    names = [name.strip() for name in sites.split(",") if name.strip()] if sites else None
    corpora = demo_sites.find_corpora(data, names)
    if work is None and keep:
        work = Path("demo-work")
    chosen = work and work.absolute()  # the daemons run in folders of their own
    outcome = DemoOutcome(glossary=demo_sites.find_glossary(data), work=chosen)
    if not session.json:
        who = f"{len(corpora)} {'fictional hospitals' if data is None else 'sites'}"
        session.note(opening(who, outcome.glossary) + "\n")
    run(_guarded(_in_work_folder(session, corpora, outcome, rounds, stay), outcome))
    if outcome.opened:
        session.note("stopped every daemon")
    else:
        session.result(outcome.plain(), lambda console: show_outcome(console, outcome))


async def _guarded(story: Coroutine[Any, Any, None], outcome: DemoOutcome) -> None:
    """Let Ctrl-C, SIGTERM and a closed terminal end the story in order: once, not midway again."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(story)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:  # a second Ctrl-C must not cut short the stopping of daemons
            interrupted = True
            print("\nstopping the daemons …", file=sys.stderr)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if outcome.opened:  # which was to last until then
            return
        raise CommandError(
            "interrupted; every daemon is stopped", exit_code=Exit.INTERRUPTED
        ) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


# ---- the work folder --------------------------------------------------------


async def _in_work_folder(
    session: Session,
    corpora: Sequence[SiteCorpus],
    outcome: DemoOutcome,
    rounds: int,
    stay: bool,
) -> None:
    """Run the story in a folder; a temporary one goes away, unless a failure's log is in it."""
    chosen = outcome.work
    if chosen is not None:
        _check_new(chosen)
    work = Path(tempfile.mkdtemp(prefix="hanse-demo-")) if chosen is None else chosen
    steps = Steps(session, outcome)
    failed = False
    try:
        with demo_sites.short_folder() as sockets:
            names = [corpus.site for corpus in corpora]
            sites = demo_sites.provision(work, names, Path(sockets), opened=stay)
            await _with_daemons(session, corpora, sites, rounds, steps)
    except Exception:
        failed = True
        session.note(f"the sites and their logs are kept in {work}")
        raise
    finally:
        if chosen is None and not failed:
            shutil.rmtree(work)


def _check_new(work: Path) -> None:
    try:
        occupied = work.exists() and (not work.is_dir() or any(work.iterdir()))
    except OSError as error:
        raise CommandError(
            f"cannot read {work}: {error.strerror}", "Choose another --work"
        ) from error
    if occupied:
        raise CommandError(
            f"{work} is not empty",
            "Remove it (a site's key is never overwritten) or choose another --work",
            exit_code=Exit.USAGE,
        )


# ---- the story --------------------------------------------------------------


class Steps:
    """Says what is going on and remembers how long each step took."""

    def __init__(self, session: Session, outcome: DemoOutcome) -> None:
        self._session = session
        self.outcome = outcome
        self._started = time.monotonic()
        self._last = self._started

    def done(self, step: str, text: str) -> None:
        """A step is over: ``step`` for machines, ``text`` for people."""
        now = time.monotonic()
        self.outcome.seconds[step] = now - self._last
        self._last = now
        self._session.note(f"{now - self._started:6.1f} s  {text}")


async def _with_daemons(
    session: Session,
    corpora: Sequence[SiteCorpus],
    sites: Sequence[DemoSite],
    rounds: int,
    steps: Steps,
) -> None:
    session.note(f"starting {len(sites)} daemons: {', '.join(site.id for site in sites)}")
    async with demo_sites.running(sites) as daemons:
        await _while_alive(daemons, _story(session, corpora, daemons, rounds, steps))
        if sites[0].questions is not None:
            await _stay(session, corpora[0].question, daemons, steps.outcome)
    steps.done("stop", "stopped every daemon")


async def _stay(
    session: Session, question: str, daemons: Sequence[RunningDaemon], outcome: DemoOutcome
) -> None:
    """Show what came of it and how one of the sites is asked; then until somebody ends it."""
    first = daemons[0].site
    async with gateway_of(first) as gate, connected(first.socket) as stub:
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                one = await _while_alive([*daemons, gate], opened(first, stub, question))
        except TimeoutError:
            raise _with_log(gate, f"does not listen after {READY_WITHIN_S:.0f} s") from None

        def show(console: Console) -> None:
            show_outcome(console, outcome)
            show_open(console, one, len(daemons))

        session.result(outcome.plain() | {"open": one.plain()}, show)
        outcome.opened = True
        await _while_alive([*daemons, gate], asyncio.Event().wait())


async def _while_alive(daemons: Sequence[RunningDaemon], work: Coroutine[Any, Any, T]) -> T:
    """The work's result; a daemon's death ends it, and is the error that is told."""
    task = asyncio.ensure_future(work)
    deaths = {asyncio.ensure_future(one.process.wait()): one for one in daemons}
    try:
        await asyncio.wait([task, *deaths], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and _lost_connection(task.exception()):
            # The connection to a daemon breaks a moment before it is seen to be dead.
            await asyncio.wait(deaths, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for death, one in deaths.items():
            if death.done():
                raise _with_log(one, f"ended by itself with exit code {death.result()}")
        return await task
    finally:
        for waiting in (task, *deaths):
            waiting.cancel()
        await asyncio.gather(task, *deaths, return_exceptions=True)


def _lost_connection(error: BaseException | None) -> bool:
    return isinstance(error, CommandError) and error.exit_code is Exit.UNREACHABLE


def _with_log(one: RunningDaemon, what: str) -> CommandError:
    print(f"--- the end of {one.log}", file=sys.stderr)
    print(visible(log_tail(one.log)), file=sys.stderr)
    print("---", file=sys.stderr)
    return one.failure(what)


async def _story(
    session: Session,
    corpora: Sequence[SiteCorpus],
    daemons: Sequence[RunningDaemon],
    rounds: int,
    steps: Steps,
) -> None:
    """From daemons that are starting to the filled-in outcome."""
    outcome = steps.outcome
    async with AsyncExitStack() as stack:
        stubs = await asyncio.gather(*(_ready(one, stack) for one in daemons))
        steps.done("federation", "every daemon is connected to every other over mutual TLS")
        await _ingest(session, stubs, corpora)
        # Not what the ingests say: an index that was begun before may have embedded some.
        passages = sum([(await _status(stub)).passages for stub in stubs])
        steps.done("ingest", f"{passages} passages ingested, embedded and indexed")
        before = await asyncio.gather(*(judge(stub) for stub in stubs))
        steps.done("evaluate_before", "evaluated before training")
        answers = await _ask_each(stubs, corpora)
        steps.done("ask_before", "asked each site a question")
        await _train(session, stubs, rounds)
        steps.done("train", f"{rounds} rounds trained, and every site answers with the result")
        after = await asyncio.gather(*(judge(stub) for stub in stubs))
        steps.done("evaluate_after", "evaluated after training")
        outcome.answers = [
            SiteAnswer(corpus.site, corpus.question, corpus.answered_in, *replies)
            for corpus, *replies in zip(
                corpora, answers, await _ask_each(stubs, corpora), strict=True
            )
        ]
        statuses = await asyncio.gather(*(_status(stub) for stub in stubs))
        outcome.rounds = await _rounds(stubs[0])
        outcome.sites = [
            SiteOutcome(corpus.site, *figures)
            for corpus, figures in zip(
                corpora, zip(before, after, statuses, strict=True), strict=True
            )
        ]
        steps.done("ask", "asked each site the same question again")


async def _ready(one: RunningDaemon, stack: AsyncExitStack) -> ControlAsyncStub:
    """A stub for the daemon, once it answers and is connected to all its peers."""
    state = "does not answer"
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            # Nothing tells of a socket that another process is about to make: look again.
            while not one.site.socket.exists():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_AGAIN_AFTER_S)
            stub = await stack.enter_async_context(connected(one.site.socket))
            while True:
                status = await _status(stub)
                if status.peers_connected == status.peers_total > 0:
                    return stub
                state = f"reached {status.peers_connected} of {status.peers_total} peers"
                await asyncio.sleep(LOOK_AGAIN_AFTER_S)
    except TimeoutError:
        raise _with_log(one, f"{state} after {READY_WITHIN_S:.0f} s") from None


async def _status(stub: ControlAsyncStub) -> StatusReply:
    from proto.control_pb2 import StatusRequest

    return await stub.Status(StatusRequest(), timeout=30)


async def _rounds(stub: ControlAsyncStub) -> list[dict[str, Any]]:
    from proto.control_pb2 import RoundsRequest

    reply = await stub.Rounds(RoundsRequest(), timeout=30)
    return [plain_round(one.certificate, one.report) for one in reply.rounds]


async def _ingest(
    session: Session, stubs: Sequence[ControlAsyncStub], corpora: Sequence[SiteCorpus]
) -> None:
    """All sites at once, a bar for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=session.notes,
        transient=True,
        disable=session.json or not session.notes.is_terminal,
    )

    def watcher(site: str) -> Callable[[Ingested], None]:
        bar = bars.add_task(f"{site}: passages embedded", total=None)
        return lambda so_far: bars.update(
            bar, completed=so_far.passages_embedded, total=so_far.passages_total or None
        )

    with bars:
        ingested = await asyncio.gather(
            *(
                send(stub, list(corpus.files), watcher(corpus.site))
                for stub, corpus in zip(stubs, corpora, strict=True)
            )
        )
    for corpus, one in zip(corpora, ingested, strict=True):
        if one.problems:
            first = one.problems[0]
            raise CommandError(
                f"{corpus.site}: {len(one.problems)} refused, the first: {first['path'] or ''} "
                f"{first['cause']}",
                "The demo needs a corpus without errors",
            )


async def _train(session: Session, stubs: Sequence[ControlAsyncStub], rounds: int) -> None:
    """Train, asked for at the first site; returns when all sites answer with the result."""
    started = await start(stubs[0], rounds, {})
    target, last = started.run.target_round, None
    with TrainingView(session.notes, quiet=session.json, phases=False) as view:
        async for progress in watched(stubs[0]):
            last = progress
            view.show(progress)
    if last is None or last.head_round < target:
        reached = last.head_round if last else 0
        message = last.message if last else ""
        raise CommandError(
            f"training ended at round {reached} of {target}{message and ': '}{message}"
        )
    try:
        async with asyncio.timeout(SETTLED_WITHIN_S):
            await asyncio.gather(*(_settled(stub, target) for stub in stubs))
    except TimeoutError:
        raise CommandError(
            f"not every site answers with round {target} after {SETTLED_WITHIN_S:.0f} s",
            "Their logs in the work folder say why",
        ) from None


async def _settled(stub: ControlAsyncStub, target: int) -> None:
    """Returns once this site has committed the round and answers with it, and with its own."""
    from proto.control_pb2 import LearningRequest

    while True:
        status = await _status(stub)
        if status.head_round >= target and status.index_digest == status.model_digest:
            break
        await asyncio.sleep(LOOK_AGAIN_AFTER_S)
    while True:
        reply = await stub.Learning(LearningRequest(), timeout=30)
        if _fitted(reply, status.model_digest):
            return
        await asyncio.sleep(LOOK_AGAIN_AFTER_S)


def _fitted(reply: LearningReply, version: bytes) -> bool:
    """Whether the site answers with what is to be its own, if anything is."""
    return not reply.fitted or reply.personal_digest == version


async def _ask_each(
    stubs: Sequence[ControlAsyncStub], corpora: Sequence[SiteCorpus]
) -> list[AskReply]:
    """Each site its own question; one after the other, as the machine is shared."""
    return [
        await put_question(stub, corpus.question)
        for stub, corpus in zip(stubs, corpora, strict=True)
    ]
