"""fedctl ask: a question to the site's own library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import Session, as_plain, duration, short, visible
from daemon.fedctl.show import plain_text

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import AskReply
    from proto.control_pb2_grpc import ControlAsyncStub

# The first question after a start loads the encoder and the index.
ASK_WITHIN_S = 120.0


@command
def ask(
    session: Session,
    question: Annotated[str, typer.Argument(help="In quotes.")],
    top_k: Annotated[
        int, typer.Option(min=0, max=1000, help="Passages to retrieve; 0: as configured.")
    ] = 0,
) -> None:
    """Answer a question from this site's documents, with citations."""
    reply = run(_ask(session, question, top_k))
    session.result(
        {"question": question, **as_plain(reply)}, lambda console: show_answer(console, reply)
    )


async def _ask(session: Session, question: str, top_k: int) -> AskReply:
    async with connected(socket_path(session)) as daemon:
        return await put_question(daemon, question, top_k)


async def put_question(daemon: ControlAsyncStub, question: str, top_k: int = 0) -> AskReply:
    """Ask the daemon one question."""
    from proto.control_pb2 import AskRequest

    return await daemon.Ask(AskRequest(question=question, top_k=top_k), timeout=ASK_WITHIN_S)


def show_answer(console: Console, reply: AskReply) -> None:
    """The answer and, below it, what each of its marks stands for."""
    answer = reply.answer or "No passage here answers that."
    console.print(plain_text(answer), soft_wrap=True)
    if reply.citations:
        console.print()
    for citation in reply.citations:
        title = visible(citation.title) or citation.document_id
        line = f"[{citation.number}] {title} ({citation.passage_id}): {citation.text}"
        console.print(plain_text(line), soft_wrap=True)
    passages = len(reply.passages)
    console.print(
        plain_text(
            f"\n{passages} passages retrieved in {duration(reply.seconds)}, "
            f"model version {short(reply.model_digest.hex())}"
        ),
        style="dim",
    )
