"""fedctl pairs: questions that a site makes of its own documents, to learn from."""

from __future__ import annotations

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

    from proto.control_pb2 import BuildPairsProgress, MadePairsReply

Kind = Literal["cloze", "titles", "keywords", "written"]

# Pairs are counted behind a question that is being answered, or a whole evaluation.
COUNTED_WITHIN_S = 600.0
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
) -> None:
    """Make pairs of one kind of the documents that may be learned from.

    They replace those of this kind that there were; other kinds stay. Ctrl-C ends it, and what
    a language model has written by then is kept: the next build goes on from there.
    """
    last = run(_build(session, how, a_passage, seed, top_k))
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
    session: Session, how: str, a_passage: int, seed: int, top_k: int
) -> BuildPairsProgress | None:
    """The last word of the daemon, which may take hours to say it; a bar meanwhile."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from proto.control_pb2 import BuildPairsRequest

    bar = Progress(
        TextColumn("passages"),
        BarColumn(),
        MofNCompleteColumn(),
        console=session.notes,
        transient=True,
        disable=not session.notes.is_terminal,
    )
    task = bar.add_task("passages", total=None)
    request = BuildPairsRequest(kind=how, a_passage=a_passage, seed=seed, top_k=top_k)
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
    if not done.made:
        text += f" {_NONE[how]}"
    console.print(text)
    console.print(_training(done.learn_from, done.training_pairs))


def _show(console: Console, reply: MadePairsReply) -> None:
    if reply.kinds:
        table = columns("kind", ">pairs", ">usable")
        for one in reply.kinds:
            table.add_row(one.kind, str(one.pairs), str(one.usable))
        console.print(table)
    else:
        console.print("No pairs were made here yet; `fedctl pairs build --how cloze` makes some.")
    for example in reply.examples:
        console.print(plain_text(f"\n[{example.kind}] {example.query}"), soft_wrap=True)
        for text, document in zip(example.texts, example.documents, strict=True):
            words = " ".join(text.split())
            cut = words[:_TEXT_SHOWN] + ("…" if len(words) > _TEXT_SHOWN else "")
            console.print(
                plain_text(f"    {in_line(document)}: {cut}"), soft_wrap=True, style="dim"
            )
    if reply.examples:
        console.print()
    console.print(f"{reply.supplied} training pairs were ingested.")
    console.print(_training(reply.learn_from, reply.training_pairs))


def _training(learn_from: str, count: int) -> str:
    text = f"This site trains on {counted(count, 'pair')} (pairs.learn_from is {learn_from})."
    if learn_from == "supplied":
        text += " Set it to supplied+made or made, and restart fedd, to learn from made pairs."
    return text
