"""fedctl prompts: what a language model is asked by, and what a question would make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.commands.library import ASK_WITHIN_S
from daemon.fedctl.terminal.connection import ANSWER_WITHIN_S, connected, run, socket_path
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    counted,
    in_line,
    plain_text,
)
from proto.notes import notes_of

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import ListPromptsReply, TestPromptReply, TestPromptRequest

topic = typer.Typer()
prompts = typer.Typer(help="What a language model is asked by.", no_args_is_help=True)
topic.add_typer(prompts, name="prompts")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of a prompt, as `list` shows them.")]


@prompts.command("list")
@command
def list_prompts(session: Session) -> None:
    """Show the prompts, which questions they are for, and the rule of auto."""
    reply = run(_list(session))
    session.result(as_plain(reply), lambda console: _listed(console, reply))


async def _list(session: Session) -> ListPromptsReply:
    from proto.control_pb2 import ListPromptsRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.ListPrompts(ListPromptsRequest(), timeout=ANSWER_WITHIN_S)


def _listed(console: Console, reply: ListPromptsReply) -> None:
    table = columns("prompt", "in force", "slots", "for")
    for one in reply.prompts:
        said = getattr(one, "for")
        chosen = "yes" if one.name == reply.in_force else ""
        table.add_row(one.name, chosen, ", ".join(one.slots), plain_text(said))
    console.print(table)
    chosen = " (in force)" if reply.in_force == "auto" else ""
    console.print(f"auto{chosen}: of these the first that fits", soft_wrap=True)
    for rule in reply.rules:
        console.print(plain_text(f"  {rule}"), soft_wrap=True)
    if reply.generator == "extractive":
        text = "retrieval.generator is extractive: no language model is asked by any of them."
        console.print(text, soft_wrap=True)


@prompts.command("show")
@command
def show_prompt(session: Session, name: _Name) -> None:
    """Show one as its file has it, with its slots."""
    reply = run(_list(session))
    by_name = {one.name: one for one in reply.prompts}
    if (one := by_name.get(name)) is not None:
        text = plain_text(one.text)
        session.result(as_plain(one), lambda console: console.print(text, soft_wrap=True))
        return
    known = ", ".join(by_name)
    raise CommandError(f"there is no prompt {name!r}", f"Use one of: {known}", exit_code=Exit.USAGE)


@prompts.command("test")
@command
def test_prompt(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of a prompt; auto: as the rule chooses.")
    ],
    question: Annotated[str, typer.Option("--question", help="In quotes.")],
    documents: Annotated[
        list[str] | None,
        typer.Option(
            "--documents", metavar="ID", help="Take passages of this one alone; repeatable."
        ),
    ] = None,
    top_k: Annotated[
        int, of_field("TestPromptRequest", "top_k", help="Passages to find; 0: as configured.")
    ] = 0,
    run_it: Annotated[
        bool, typer.Option("--run", help="Have it answered, and the answer checked.")
    ] = False,
) -> None:
    """Show what a language model would be sent for a question."""
    from proto.control_pb2 import TestPromptRequest

    reply = run(
        _tested(
            session,
            TestPromptRequest(
                name=name, question=question, documents=documents or [], top_k=top_k, run=run_it
            ),
        )
    )
    session.result(as_plain(reply), lambda console: _shown(console, reply, run_it=run_it))


async def _tested(session: Session, request: TestPromptRequest) -> TestPromptReply:
    async with connected(socket_path(session)) as daemon:
        return await daemon.TestPrompt(request, timeout=ASK_WITHIN_S)


def _shown(console: Console, reply: TestPromptReply, *, run_it: bool) -> None:
    why = f", for it {reply.guessed_by}" if reply.guessed_by else ""
    console.print(plain_text(reply.text), soft_wrap=True)
    console.print()
    held = f"{reply.passages} of {counted(reply.found, 'passage')}"
    text = f"Prompt {reply.name}{why}: {held}, {reply.tokens} tokens."
    console.print(plain_text(text), soft_wrap=True)
    if not run_it:
        return
    console.print()
    console.print(plain_text(reply.answer), soft_wrap=True)
    for note in notes_of(reply):
        console.print(plain_text(in_line(note)), soft_wrap=True)
