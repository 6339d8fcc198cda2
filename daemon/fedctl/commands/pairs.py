"""fedctl pairs: questions that a site makes of its documents, and that its people propose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from daemon.fedctl.terminal.connection import connected, run, socket_path
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    counted,
    duration,
    in_line,
    plain_text,
)

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import (
        BuildPairsProgress,
        DecideProposalsReply,
        MadePairsReply,
        Proposal,
        TripleCounts,
    )

Kind = Literal["cloze", "titles", "keywords", "written"]

# Pairs are counted behind a question that is being answered, or a whole evaluation.
COUNTED_WITHIN_S = 600.0
_AT_ONCE = 100  # proposals, as bounds have it
_NOTHING_WAITS = (
    "Nothing waits: all that people said of passages is decided, or nobody has said anything."
)
_TEXT_SHOWN = 160
_NONE = {
    "cloze": "It needs passages of two sentences or more.",
    "titles": "It needs documents with titles.",
    "keywords": "It needs passages with words.",
    "written": "See what the model writes, or raise --top-k.",
}

topic = typer.Typer(
    name="pairs",
    help="Questions made of this site's own documents, to learn from. They never leave it.",
)


@topic.callback(invoke_without_command=True)
@command
def pairs(session: Session) -> None:
    """Count the pairs that were made, by kind, and those that training uses."""
    reply = run(_made(session))
    session.result(as_plain(reply), lambda console: _show(console, reply))


@topic.command("list")
@command
def pairs_list(session: Session) -> None:
    """Count the pairs that were made, by kind, and those that training uses."""
    reply = run(_made(session))
    session.result(as_plain(reply), lambda console: _show(console, reply))


@topic.command("show")
@command
def pairs_show(
    session: Session,
    how: Annotated[Kind | None, typer.Option(help="Of this kind only.")] = None,
    examples: Annotated[
        int, of_field("MadePairsRequest", "examples", help="How many of each kind.")
    ] = 3,
) -> None:
    """Show some of the pairs that were made, beside their numbers."""
    reply = run(_made(session, how or "", examples))
    session.result(as_plain(reply), lambda console: _show(console, reply))


@topic.command("build")
@command
def pairs_build(
    session: Session,
    how: Annotated[
        Kind,
        typer.Option(
            help="cloze: a sentence asks for the rest of its passage. titles: a title asks for "
            "what is below it. keywords: the words that mark a passage. written: a language "
            "model on this machine writes questions (pairs.writer)."
        ),
    ],
    a_passage: Annotated[
        int,
        of_field(
            "BuildPairsRequest",
            "a_passage",
            "--per-passage",
            help="Queries of a passage, cloze and written; 0: one, written two.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sentences drawn.")] = 0,
    top_k: Annotated[
        int,
        of_field(
            "BuildPairsRequest",
            "top_k",
            help="Written: keep queries that find their passage so far.",
        ),
    ] = 10,
    answers: Annotated[
        bool,
        typer.Option(
            "--answers",
            help="Written: have the model answer its questions, too, for a generator to learn "
            "from; an answer that its passage does not support is left out.",
        ),
    ] = False,
) -> None:
    """Make pairs of one kind of the documents that may be learned from.

    They replace those of this kind that there were; other kinds stay. Ctrl-C ends it, and what
    a language model has written by then is kept: the next build goes on from there.
    """
    last = run(_build(session, how, a_passage, seed, top_k, answers=answers))
    if last is None:
        raise CommandError("the daemon stopped before the pairs were made", "Try again")
    plain = as_plain(last)
    session.result(plain, lambda console: _say_built(console, how, last))


@topic.command("drop")
@command
def pairs_drop(
    session: Session,
    how: Annotated[Kind | None, typer.Option(help="Forget this kind.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget every kind.")] = False,
) -> None:
    """Forget pairs that were made; those that were ingested stay."""
    if (how is None) == (not everything):
        raise CommandError(
            "which pairs are to be forgotten?", "Say --how KIND or --all", exit_code=Exit.USAGE
        )
    reply = run(_drop(session, how or ""))
    session.result(as_plain(reply), lambda console: _show(console, reply))


@topic.command("review")
@command
def pairs_review(
    session: Session,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", metavar="ID", help="Make this one a validation pair; more than once."
        ),
    ] = None,
    reject: Annotated[
        list[str] | None,
        typer.Option("--reject", metavar="ID", help="Forget this one; more than once."),
    ] = None,
    forget: Annotated[
        str,
        typer.Option(
            "--forget",
            metavar="TOKEN",
            help="Forget what was said with the token of this name.",
        ),
    ] = "",
) -> Exit:
    """Look at what people say answers a question, and decide what becomes of it.

    At a terminal one after the other; each decision holds at once, Ctrl-C loses none. Accepted
    ones are validation pairs: versions are judged by them, nothing is trained on them. With --json,
    or without a terminal, what waits is listed. Ids that nothing has, and what can't be accepted,
    are told at the end (exit code 3).
    """
    if accept or reject or forget:
        reply = run(_decide(session, accept or [], reject or [], forget))
        session.result(as_plain(reply), lambda console: _show_decided(console, reply))
        return Exit.PARTLY if reply.unknown or reply.not_accepted else Exit.OK
    proposals = run(_proposals(session))
    if session.json or not sys.stdin.isatty():
        plain = {"proposals": [as_plain(one) for one in proposals]}
        session.result(plain, lambda console: _show_proposals(console, proposals))
    else:
        _review(session, proposals)
    return Exit.OK


def _review(session: Session, proposals: Sequence[Proposal]) -> None:
    """One after the other; what was decided is done before the next is shown."""
    console = session.console
    for number, one in enumerate(proposals, start=1):
        console.print(f"\n{number} of {len(proposals)}", style="bold")
        _show_proposal(console, one)
        answer = _answer(acceptable=any(vote.answers for vote in one.votes))
        if answer == "quit":
            return
        if answer != "skip":
            accepted, rejected = ([one.id], []) if answer == "accept" else ([], [one.id])
            _show_decided(console, run(_decide(session, accepted, rejected)))
    if not proposals:
        console.print(_NOTHING_WAITS)


def _answer(*, acceptable: bool) -> str:
    """What somebody at the terminal says: a word, or how it begins."""
    words = ["accept"] * acceptable + ["reject", "skip", "quit"]
    while True:
        said: str = typer.prompt(f"{', '.join(words)}?", err=True)
        begins = said.strip().lower()
        if begins and (meant := [word for word in words if word.startswith(begins)]):
            return meant[0]


async def _proposals(session: Session) -> list[Proposal]:
    """All that wait, the oldest first."""
    from proto.control_pb2 import ListProposalsRequest

    found: list[Proposal] = []
    async with connected(socket_path(session)) as daemon:
        while True:
            after = found[-1].id if found else ""
            request = ListProposalsRequest(after=after, limit=_AT_ONCE)
            reply = await daemon.ListProposals(request, timeout=COUNTED_WITHIN_S)
            found += reply.proposals
            if len(reply.proposals) < _AT_ONCE:
                return sorted(found, key=lambda one: (one.votes[0].unix_s, one.id))


async def _decide(
    session: Session, accept: Sequence[str], reject: Sequence[str], forget: str = ""
) -> DecideProposalsReply:
    from proto.control_pb2 import DecideProposalsRequest

    async with connected(socket_path(session)) as daemon:
        request = DecideProposalsRequest(accept=accept, reject=reject, forget_token=forget)
        return await daemon.DecideProposals(request, timeout=COUNTED_WITHIN_S)


def _show_proposals(console: Console, proposals: Sequence[Proposal]) -> None:
    for one in proposals:
        console.print(f"\n{one.id}", style="bold")
        _show_proposal(console, one)
    if proposals:
        console.print("\n`fedctl pairs review --accept ID` or `--reject ID` decides.")
    else:
        console.print(_NOTHING_WAITS)


def _show_proposal(console: Console, one: Proposal) -> None:
    page = f", page {one.page}" if one.page else ""
    title = f" ({in_line(one.title)})" if one.title else ""
    rows = [
        ("question", in_line(one.question)),
        ("document", f"{in_line(one.document_id)}{title}{page}"),
    ]
    if one.passage:
        rows.append(("passage", " ".join(one.passage.split())))
    elif one.passage_id:
        rows.append(("passage", "not in the document any more: it has changed"))
    if one.here_as:
        rows.append(("here", f"as a {one.here_as} pair already"))
    for vote in one.votes:
        at = datetime.fromtimestamp(vote.unix_s, UTC)
        what = "it" if vote.passage_id == one.passage_id else "another passage of it"
        word = "answers" if vote.answers else "does not answer"
        rows.append(("says", f"{in_line(vote.token)}: {what} {word} ({at:%Y-%m-%d %H:%M} UTC)"))
    for name, value in rows:
        console.print(plain_text(f"{name:<10}{value}"), soft_wrap=True)


def _show_decided(console: Console, reply: DecideProposalsReply) -> None:
    done = [
        f"{counted(reply.accepted, 'validation pair')} added" if reply.accepted else "",
        f"{reply.rejected} forgotten" if reply.rejected else "",
        f"{counted(reply.forgotten, 'vote')} of that token forgotten" if reply.forgotten else "",
        f"{reply.waiting} left",
    ]
    console.print(f"{'; '.join(part for part in done if part)}.")
    for name in reply.unknown:
        console.print(plain_text(f"nothing waits under {in_line(name)}"), soft_wrap=True)
    for name in reply.not_accepted:
        cause = "nobody says that the document answers it, or a test pair asks it already"
        line = f"{in_line(name)} can't be accepted: {cause}. `--reject` forgets it"
        console.print(plain_text(line), soft_wrap=True)


async def _made(session: Session, how: str = "", examples: int = 0) -> MadePairsReply:
    from proto.control_pb2 import MadePairsRequest

    async with connected(socket_path(session)) as daemon:
        request = MadePairsRequest(kind=how, examples=examples)
        return await daemon.MadePairs(request, timeout=COUNTED_WITHIN_S)


async def _drop(session: Session, how: str) -> MadePairsReply:
    from proto.control_pb2 import DropPairsRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.DropPairs(DropPairsRequest(kind=how), timeout=COUNTED_WITHIN_S)


async def _build(
    session: Session, how: str, a_passage: int, seed: int, top_k: int, *, answers: bool
) -> BuildPairsProgress | None:
    """The last word of the daemon, which may take hours to say it; a bar meanwhile."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from proto.control_pb2 import BuildPairsRequest

    bar = Progress(
        TextColumn("passages, then answers" if answers else "passages"),
        BarColumn(),
        MofNCompleteColumn(),
        console=session.notes,
        transient=True,
        disable=not session.notes.is_terminal,
    )
    task = bar.add_task("passages", total=None)
    request = BuildPairsRequest(
        kind=how, a_passage=a_passage, seed=seed, top_k=top_k, answers=answers
    )
    last: BuildPairsProgress | None = None
    async with connected(socket_path(session)) as daemon:
        with bar:
            async for step in daemon.BuildPairs(request):
                bar.update(task, completed=step.done, total=step.total or None)
                last = step if step.finished else None
    return last


def _say_built(console: Console, how: str, done: BuildPairsProgress) -> None:
    text = (
        f"{counted(done.made, 'pair')} ({how}) of {counted(done.total, 'passage')} "
        f"in {duration(done.seconds)}."
    )
    if how == "written":
        text += (
            f" {done.lost} queries did not find their passage and {done.repeated} said what "
            "another one says: they were left out."
        )
    if done.answered or done.unsupported:
        text += (
            f" {done.answered} of them have an answer; {done.unsupported} answers that their "
            "passage does not support, or that were not given, were left out."
        )
    if not done.made:
        text += f" {_NONE[how]}"
    console.print(text)
    console.print(_training(done.learn_from, done.training_pairs))


def _show(console: Console, reply: MadePairsReply) -> None:
    if reply.kinds:
        table = columns("kind", ">pairs", ">usable", ">answered")
        for one in reply.kinds:
            table.add_row(one.kind, str(one.pairs), str(one.usable), str(one.answered))
        console.print(table)
    else:
        console.print("No pairs were made here yet; `fedctl pairs build --how cloze` makes some.")
    for example in reply.examples:
        console.print(plain_text(f"\n[{example.kind}] {example.query}"), soft_wrap=True)
        answers = example.answers or [""] * len(example.texts)
        sources = zip(example.texts, example.documents, answers, strict=True)
        for text, document, answer in sources:
            line = f"    {in_line(document)}: {_cut(text)}"
            console.print(plain_text(line), soft_wrap=True, style="dim")
            if answer:
                console.print(plain_text(f"    answer: {_cut(answer)}"), soft_wrap=True)
    if reply.examples:
        console.print()
    console.print(f"{reply.supplied} training pairs were ingested.")
    console.print(_training(reply.learn_from, reply.training_pairs))
    console.print(_triples(reply.triples))
    if reply.proposals:
        wait = f"{counted(reply.proposals, 'proposal')} of people wait for you"
        console.print(f"{wait}: `fedctl pairs review`.")


def _cut(text: str) -> str:
    words = " ".join(text.split())
    return words[:_TEXT_SHOWN] + ("…" if len(words) > _TEXT_SHOWN else "")


def _triples(counts: TripleCounts) -> str:
    total = counts.supplied + counts.made + counts.to_distil
    return (
        f"A generator would learn from {counted(total, 'question')}: the answers of "
        f"{counts.supplied} were supplied, of {counts.made} made here, of {counts.to_distil} they "
        "are picked from the passages, where any sentence suits."
    )


def _training(learn_from: str, count: int) -> str:
    text = f"This site trains on {counted(count, 'pair')} (pairs.learn_from is {learn_from})."
    if learn_from == "supplied":
        text += " Set it to supplied+made or made, and restart fedd, to learn from made pairs."
    return text
