"""fedctl audit embeddings: what could be read out of this site's embeddings, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import CommandError, Exit, Session, as_plain, duration, short
from daemon.fedctl.show import columns, plain_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        AuditEmbeddingsRequest,
        EmbeddingsAudit,
        RecoveredShare,
        RecoveredText,
        TextsExposure,
    )

_LEGEND = """\
F1 (precision/recall): distinct words. Telling: words that few texts have. Names: share named
exactly, and how much of what was named is right. Overlap and cosine: what is left of the
negatives' use. A bucket is what a question leaves as; passages leave exactly or under noise."""


@command
def embeddings(
    session: Session,
    noise: Annotated[
        list[float] | None,
        typer.Option(min=0.001, max=100, help="A deviation of noise to try; as often as you like."),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(min=0.01, max=1e6, help="Noise to try, by its epsilon (at delta 1e-5)."),
    ] = None,
    bits: Annotated[
        list[int] | None,
        typer.Option(min=1, max=256, help="A bucket's bits to try; as often as you like."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.01, max=1440, help="For training attackers, all levels together.")
    ] = 10.0,
    show: Annotated[
        int,
        typer.Option(min=0, max=20, help="Show so many passages with what was recovered of them."),
    ] = 0,
) -> None:
    """Attack this site's own embeddings and show how much of unseen texts can be read from them.

    Nothing leaves the site, nothing is kept. Ctrl-C ends it. Without --noise, --epsilon and
    --bits the usual levels are tried.
    """
    from proto.control_pb2 import AuditEmbeddingsRequest

    request = AuditEmbeddingsRequest(
        noises=noise or [], epsilons=epsilon or [], bits=bits or [], minutes=minutes, show=show
    )
    found = run(_audited(session, request))
    session.result(as_plain(found), lambda console: _show(console, found))


async def _audited(session: Session, request: AuditEmbeddingsRequest) -> EmbeddingsAudit:
    """The result; a bar on stderr until it is there."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=session.notes,
        transient=True,
        disable=session.json or not session.notes.is_terminal,
    )
    task, result = bars.add_task("texts are read", total=1.0), None
    async with connected(socket_path(session)) as daemon:
        with bars:
            async for progress in daemon.AuditEmbeddings(request):
                bars.update(task, description=progress.step, completed=progress.fraction)
                if progress.HasField("result"):
                    result = progress.result  # and on to the end, or it counts as given up
    if result is not None:
        return result
    raise CommandError(
        "the daemon stopped telling before the audit was over",
        "Try again; its log says more",
        exit_code=Exit.UNREACHABLE,
    )


def _show(console: Console, found: EmbeddingsAudit) -> None:
    console.print(
        f"Attacked: {found.passages_unseen} passages and {found.questions_unseen} questions on "
        f"{found.subjects_unseen} subjects, by attackers that were trained on "
        f"{found.passages_known} passages of others in {duration(found.seconds)} and have a "
        f"dictionary of {found.dictionary_words} words and {found.dictionary_names} names. "
        f"Model version {short(found.model_digest.hex())}."
    )
    console.print(_table(found))
    console.print(_LEGEND, style="dim")
    if any(level.cut_short for level in found.levels):
        console.print("* more --minutes would have made a stronger attacker.", style="dim")
    console.print()
    console.print(plain_text(found.advice))
    for level in found.levels:
        for example in level.examples:
            _show_example(console, level.level, example)


def _table(found: EmbeddingsAudit) -> Table:
    asked = found.questions_unseen > 0
    of_questions = (">questions: F1", ">telling", ">names") if asked else ()
    table = columns(
        "disclosed",
        ">passages: F1 (P/R)",
        ">telling",
        ">names",
        *of_questions,
        ">overlap",
        ">cosine",
    )
    guessing = _questions(found.guessing_questions) if asked else []
    table.add_row(
        "(guessing)",
        *_passages(found.guessing_passages),
        *guessing,
        "",
        f"{found.cosine_at_random:.2f}",
    )
    if found.levels:
        others = _passages(found.levels[0].shuffled)
        table.add_row("(other texts)", *others, *[""] * len(guessing), "", "")
    for level in found.levels:
        table.add_row(
            plain_text(level.level + ("*" if level.cut_short else "")),
            *_passages(level.passages),
            *(_questions(level.questions) if asked else []),
            f"{level.overlap:.2f}",
            f"{level.cosine:.2f}",
        )
    return table


def _passages(texts: TextsExposure) -> list[str]:
    words = texts.words
    return [
        f"{words.f1:.3f} ({words.precision:.2f}/{words.recall:.2f})",
        f"{texts.telling.f1:.3f}",
        _share(texts.names),
    ]


def _questions(texts: TextsExposure) -> list[str]:
    return [f"{texts.words.f1:.3f}", f"{texts.telling.f1:.3f}", _share(texts.names)]


def _share(names: RecoveredShare) -> str:
    return f"{100 * names.recall:.0f} % ({100 * names.precision:.0f} %)"


def _show_example(console: Console, level: str, example: RecoveredText) -> None:
    console.print()
    console.print(plain_text(f"{level}: {example.text}"))
    for name, items in (
        ("right names", example.right_names),
        ("wrong names", example.wrong_names),
        ("right words", example.right_words),
        ("wrong words", example.wrong_words),
    ):
        console.print(plain_text(f"  {name}: {', '.join(items) or '–'}"), style="dim")
