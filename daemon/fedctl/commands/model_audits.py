"""fedctl audit embeddings, and memory: what could be read out of this site's models, measured."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.terminal.connection import connected, run, socket_path
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    duration,
    plain_text,
    short,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import (
        AuditEmbeddingsRequest,
        AuditMemoryRequest,
        EmbeddingsAudit,
        MemoryAudit,
        RecoveredShare,
        RecoveredText,
        TextsExposure,
    )

# ---- what embeddings tell -------------------------------------------------------

_LEGEND = """\
F1 (precision/recall): distinct words. Telling: words that few texts have. Names: share named
exactly, and how much of what was named is right. Overlap and cosine: what is left of the
negatives' use. A bucket is what a question leaves as; passages leave exactly or under noise."""


@command
def embeddings(
    session: Session,
    noise: Annotated[
        list[float] | None,
        of_field(
            "AuditEmbeddingsRequest",
            "noises",
            help="A deviation of noise to try; as often as you like.",
        ),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        of_field(
            "AuditEmbeddingsRequest",
            "epsilons",
            help="Noise to try, by its epsilon (at delta 1e-5).",
        ),
    ] = None,
    bits: Annotated[
        list[int] | None,
        of_field(
            "AuditEmbeddingsRequest", "bits", help="A bucket's bits to try; as often as you like."
        ),
    ] = None,
    minutes: Annotated[
        float,
        of_field(
            "AuditEmbeddingsRequest", "minutes", help="For training attackers, all levels together."
        ),
    ] = 10.0,
    show: Annotated[
        int,
        of_field(
            "AuditEmbeddingsRequest",
            "show",
            help="Show so many passages with what was recovered of them.",
        ),
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
    exposure = run(_attacked(session, request))
    session.result(as_plain(exposure), lambda console: _show_exposure(console, exposure))


async def _attacked(session: Session, request: AuditEmbeddingsRequest) -> EmbeddingsAudit:
    async with connected(socket_path(session)) as daemon:
        result: EmbeddingsAudit = await _followed(session, daemon.AuditEmbeddings(request))
    return result


async def _followed(session: Session, steps: AsyncIterable[Any]) -> Any:
    """An audit's result; a bar on stderr until it is there."""
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
    with bars:
        async for progress in steps:
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


def _show_exposure(console: Console, exposure: EmbeddingsAudit) -> None:
    console.print(
        f"Attacked: {exposure.passages_unseen} passages and "
        f"{exposure.questions_unseen} questions on "
        f"{exposure.subjects_unseen} subjects, by attackers that were trained on "
        f"{exposure.passages_known} passages of others in {duration(exposure.seconds)} and have a "
        f"dictionary of {exposure.dictionary_words} words and {exposure.dictionary_names} names. "
        f"Model version {short(exposure.model_digest.hex())}."
    )
    console.print(_exposure_table(exposure))
    console.print(_LEGEND, style="dim")
    if any(level.cut_short for level in exposure.levels):
        console.print("* more --minutes would have made a stronger attacker.", style="dim")
    console.print()
    console.print(plain_text(exposure.advice))
    for level in exposure.levels:
        for example in level.examples:
            _show_example(console, level.level, example)


def _exposure_table(exposure: EmbeddingsAudit) -> Table:
    with_questions = exposure.questions_unseen > 0
    of_questions = (">questions: F1", ">telling", ">names") if with_questions else ()
    table = columns(
        "disclosed",
        ">passages: F1 (P/R)",
        ">telling",
        ">names",
        *of_questions,
        ">overlap",
        ">cosine",
    )
    guessing = _questions(exposure.guessing_questions) if with_questions else []
    table.add_row(
        "(guessing)",
        *_passages(exposure.guessing_passages),
        *guessing,
        "",
        f"{exposure.cosine_at_random:.2f}",
    )
    if exposure.levels:
        others = _passages(exposure.levels[0].shuffled)
        table.add_row("(other texts)", *others, *[""] * len(guessing), "", "")
    for level in exposure.levels:
        table.add_row(
            plain_text(level.level + ("*" if level.cut_short else "")),
            *_passages(level.passages),
            *(_questions(level.questions) if with_questions else []),
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


# ---- what the generator remembers ------------------------------------------------

_MEMORY_LEGEND = """\
Exposure: how far up a secret ranks among those that were not planted. Written: word for word, by
who asks the canary's question. Epsilon: of the whole site over these rounds, at delta 1e-5."""


def _of(name: str, *flags: str, help: str, least: int = 0) -> Any:
    return of_field("AuditMemoryRequest", name, *flags, help=help, least=least)


@command
def memory(
    session: Session,
    canaries: Annotated[
        int, _of("canaries", help="Secrets to plant; the more, the surer.", least=1)
    ] = 8,
    rounds: Annotated[int, _of("rounds", help="Rounds to train.", least=1)] = 4,
    epochs: Annotated[
        int | None,
        _of(
            *("local_epochs", "--epochs"),
            help="Passes in each; otherwise as set for the generator.",
            least=1,
        ),
    ] = None,
    sites: Annotated[
        int | None,
        _of("sites", help="Of a federation of so many; otherwise as in the manifest.", least=1),
    ] = None,
    noise: Annotated[
        list[float] | None,
        _of("noises", "--noise", help="A noise to try, as in a run; as often as you like."),
    ] = None,
    clip: Annotated[
        float | None,
        _of(
            *("clip_norm", "--clip"),
            help="With noise: L2 norm of an update at most; otherwise that of the first one.",
        ),
    ] = None,
    choose: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="AXIS=VALUE", help="One choice of training, as in a run; repeat."
        ),
    ] = None,
) -> None:
    """Train the generator on planted secrets, and show how much of them it gives away.

    In a copy in memory: nothing leaves the site, and nothing is kept. Ctrl-C ends it. Without
    --noise the usual ones are tried.
    """
    from proto.control_pb2 import AuditMemoryRequest

    request = AuditMemoryRequest(
        canaries=canaries,
        rounds=rounds,
        local_epochs=epochs or 0,
        sites=sites or 0,
        noises=noise or [],
        clip_norm=clip or 0.0,
        choices=choose or [],
    )
    found = run(_remembered(session, request))
    session.result(as_plain(found), lambda console: _show_memory(console, found))


async def _remembered(session: Session, request: AuditMemoryRequest) -> MemoryAudit:
    async with connected(socket_path(session)) as daemon:
        result: MemoryAudit = await _followed(session, daemon.AuditMemory(request))
    return result


def _show_memory(console: Console, found: MemoryAudit) -> None:
    began = f"version {short(found.model_digest.hex())}" if found.model_digest else "the base model"
    console.print(
        f"Planted: {found.canaries} canaries among {found.triples} triples of this site, trained "
        f"on from {began} in {found.rounds} rounds of {found.local_epochs} epochs (adapt "
        f"{found.adapt}, learning rate {found.learning_rate:g}) in {duration(found.seconds)}. The "
        f"first update has a norm of {found.update_norm:.3g}; under noise updates are clipped to "
        f"{found.clip_norm:.3g}."
    )
    table = columns("version", ">noise", ">epsilon", ">mean exposure", ">largest", ">written")
    for one in found.versions:
        table.add_row(
            plain_text(one.version),
            f"{one.multiplier:g}" if one.multiplier else "",
            f"{one.epsilon:.3g}" if one.multiplier else "",
            f"{one.mean:.2f}",
            f"{one.largest:.2f}",
            f"{one.written} of {found.canaries}",
        )
    console.print(table)
    console.print(
        f"By chance {found.by_chance:.2f} bits, give or take {found.chance_error:.2f}; at most "
        f"{found.most:.2f}."
    )
    console.print(_MEMORY_LEGEND, style="dim")
    console.print()
    console.print(plain_text(found.advice))
