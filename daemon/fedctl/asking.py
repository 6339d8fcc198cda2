"""fedctl ask and eval: questions to the site's own library, one or all of the test pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import Session, as_plain, duration, short, visible
from daemon.fedctl.show import facts, plain_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import AskReply, EvaluateReply
    from proto.control_pb2_grpc import ControlAsyncStub

# The first question after a start loads the encoder and the index.
ASK_WITHIN_S = 120.0
# Every test question of a large site, on a slow processor.
EVALUATE_WITHIN_S = 3600.0


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


@command
def evaluate(
    session: Session,
    split: Annotated[
        str, typer.Option(help="Which pairs to ask: test, valid or train.", metavar="SPLIT")
    ] = "test",
) -> None:
    """Judge retrieval on this site's own pairs: MRR@10, Recall@10 and more."""
    reply = run(_evaluate(session, split))
    session.result(
        {"split": split, **as_plain(reply)}, lambda console: console.print(_table(reply))
    )


async def _evaluate(session: Session, split: str) -> EvaluateReply:
    async with connected(socket_path(session)) as daemon:
        return await judge(daemon, split)


async def judge(daemon: ControlAsyncStub, split: str = "test") -> EvaluateReply:
    """Have the daemon evaluate the version it answers with."""
    from proto.control_pb2 import EvaluateRequest

    return await daemon.Evaluate(EvaluateRequest(split=split), timeout=EVALUATE_WITHIN_S)


def _table(reply: EvaluateReply) -> Table:
    grid = facts()
    for name, value in (
        ("questions", str(reply.questions)),
        ("ranking", reply.retrieval),
        ("MRR@10", f"{reply.mrr_at_10:.3f}"),
        ("Recall@10", f"{reply.recall_at_10:.3f}"),
        ("Hit@1", f"{reply.hit_at_1:.3f}"),
        ("nDCG@10", f"{reply.ndcg_at_10:.3f}"),
        ("model version", short(reply.model_digest.hex())),
        ("took", duration(reply.seconds)),
    ):
        grid.add_row(name, plain_text(value))
    return grid
