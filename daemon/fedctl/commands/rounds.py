"""fedctl rounds: what was committed, who did it, how long it took; and is the history whole?

`verify` trusts the authority alone. The daemon is asked for certificates and manifests
and believed in nothing: each manifest must be signed by the authority, each round voted
for by a quorum of the manifest of its time (where a majority decided, by one), each
round's parent be the version before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.terminal.connection import (
    ANSWER_WITHIN_S,
    connected,
    run,
    settings_of,
    socket_path,
)
from daemon.fedctl.terminal.files import read_file
from daemon.fedctl.terminal.options import MODELS, Model, command
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    byte_count,
    columns,
    duration,
    facts,
    plain_text,
    short,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from crypto.identity.trust import Trust
    from peers.wire.manifest import FederationManifest
    from proto.control_pb2 import Attempt, RoundsReply
    from proto.federation_pb2 import Certificate, RoundReport

topic = typer.Typer(name="rounds", help="The committed rounds: who did what, and how long it took.")


@topic.callback(invoke_without_command=True)
@command
def rounds(
    session: Session,
    limit: Annotated[int, typer.Option(min=0, help="Only the newest so many; 0 means all.")] = 20,
    model: Model = MODELS[0],
) -> None:
    """List the committed rounds, oldest first; `rounds show N` tells one in full."""
    listed = run(_rounds(session, model, limit=limit)).rounds
    rows = [plain_round(one.certificate, one.report) for one in listed]
    session.result({"rounds": rows}, lambda console: _show_rounds(console, rows))


@topic.command("show")
@command
def rounds_show(
    session: Session,
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="The round.")],
    model: Model = MODELS[0],
) -> None:
    """Show one round in full: signatures, phases, and every attempt with why it failed."""
    reply = run(_rounds(session, model, first=number))
    if number == reply.open_round:
        attempts = [plain_attempt(attempt) for attempt in reply.open_attempts]
        plain: dict[str, Any] = {"round": number, "attempts": attempts}
        session.result(plain, lambda console: _show_open(console, plain))
        return
    round_ = next((r for r in reply.rounds if r.certificate.body.round == number), None)
    if round_ is None:
        raise CommandError(
            f"round {number} is not committed here",
            "`fedctl rounds` lists those that are",
            exit_code=Exit.USAGE,
        )
    plain = plain_round(round_.certificate, round_.report)
    plain["attempts"] = [plain_attempt(attempt) for attempt in round_.attempts]
    session.result(plain, lambda console: _show_round(console, plain))


def plain_round(certificate: Certificate, report: RoundReport) -> dict[str, Any]:
    """A committed round: what was signed, and what its coordinator saw of it.

    At a site that learned of the round afterwards, from its certificate, ``coordinator``,
    ``key_dealer`` and ``seconds`` are empty, and what only the report tells is None.
    """
    body, was_here = certificate.body, bool(report.coordinator)
    loss = body.mean_loss if body.rules else report.mean_loss
    reasons = {one.site: one.reason for one in report.rejections}
    return {
        "round": body.round,
        "attempt": certificate.attempt,
        "coordinator": report.coordinator,
        "key_dealer": report.key_dealer,
        "contributors": list(body.contributors),
        "rejected": {site: reasons.get(site, "") for site in body.rejected},
        "model_digest": body.model_digest.hex(),
        "parent_digest": body.parent_digest.hex(),
        "signed_by": [vote.site for vote in certificate.votes],
        "committed_unix_ms": certificate.unix_ms,
        "shared_values": report.shared_values if was_here else None,
        "mean_loss": loss if (was_here or body.rules) and math.isfinite(loss) else None,
        "noise_multiplier": report.noise_multiplier if was_here else None,
        "clip_norm": report.clip_norm if was_here else None,
        "seconds": {phase.phase: phase.seconds for phase in report.phases},
    }


def plain_attempt(attempt: Attempt) -> dict[str, Any]:
    """An attempt as this site saw it, with the reason where it failed."""
    return {
        "attempt": attempt.attempt,
        "coordinator": attempt.coordinator,
        "participants": list(attempt.participants),
        "contributors": list(attempt.contributors),
        "outcome": attempt.outcome,
        "phase": attempt.phase,
        "reason": attempt.reason,
        "started_unix_ms": attempt.started_unix_ms,
        "seconds": attempt.seconds,
        "bytes_sent": attempt.bytes_sent,
        "bytes_received": attempt.bytes_received,
    }


def _show_round(console: Console, plain: dict[str, Any]) -> None:
    console.print(_round_facts(plain))
    if plain["attempts"]:
        console.print(_attempts_table(plain["attempts"]))


def _show_open(console: Console, plain: dict[str, Any]) -> None:
    if not plain["attempts"]:
        console.print(f"Round {plain['round']} has not begun.")
        return
    console.print(f"Round {plain['round']} is not committed yet.")
    console.print(_attempts_table(plain["attempts"]))


def _attempts_table(attempts: list[dict[str, Any]]) -> Table:
    table = columns(
        ">attempt",
        "coordinator",
        "outcome",
        "last phase",
        "contributors",
        ">seconds",
        ">sent",
        ">received",
        "reason",
    )
    for _, group in groupby(attempts, key=_how_it_ended):
        alike = list(group)
        first, last = alike[0], alike[-1]
        several = f"{first['attempt']}–{last['attempt']} ({len(alike)} ×)"
        table.add_row(
            several if alike[1:] else str(first["attempt"]),
            ", ".join(dict.fromkeys(item["coordinator"] for item in alike)),
            first["outcome"],
            first["phase"],
            ", ".join(first["contributors"]),
            f"{sum(item['seconds'] for item in alike):.1f}",
            byte_count(sum(item["bytes_sent"] for item in alike)),
            byte_count(sum(item["bytes_received"] for item in alike)),
            plain_text(first["reason"]),
        )
    return table


def _how_it_ended(attempt: dict[str, Any]) -> tuple[object, ...]:
    """What attempts in a row have in common that are shown as one; coordinators take turns."""
    names = ("outcome", "phase", "reason")
    return (*(attempt[name] for name in names), *attempt["contributors"])


async def _rounds(session: Session, model: str, *, first: int = 0, limit: int = 0) -> RoundsReply:
    from proto.control_pb2 import RoundsRequest

    async with connected(socket_path(session)) as daemon:
        request = RoundsRequest(first=first, limit=limit, model=model)
        return await daemon.Rounds(request, timeout=ANSWER_WITHIN_S)


def _show_rounds(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console.print("No round is committed yet; `fedctl train --rounds 1` starts one.")
        return
    console.print(rounds_table(rows))
    if any(item["seconds"] for item in rows):
        console.print(phases_table(rows))


def rounds_table(rows: list[dict[str, Any]]) -> Table:
    """Who made each round, and of what."""
    table = columns(
        ">round", ">attempt", "coordinator", "key dealer", "contributors", "version", ">loss"
    )
    for item in rows:
        loss = item["mean_loss"]
        table.add_row(
            str(item["round"]),
            str(item["attempt"]),
            item["coordinator"] or "–",
            item["key_dealer"] or "–",
            _who(item),
            short(item["model_digest"]),
            "" if loss is None else f"{loss:.3f}{_noised(item)}",
        )
    return table


def _who(item: dict[str, Any]) -> str:
    contributors = ", ".join(item["contributors"])
    rejected = ", ".join(item["rejected"])
    return f"{contributors} (rejected: {rejected})" if rejected else contributors


def phases_table(rows: list[dict[str, Any]]) -> Table:
    """The seconds of each round's phases, as its coordinator saw them."""
    phases = list(dict.fromkeys(phase for item in rows for phase in item["seconds"]))
    table = columns(">round", *(f">{phase}" for phase in phases), ">seconds")
    for item in rows:
        spent = item["seconds"]
        # The key is dealt while others train: a span of its own, no part of the sum.
        total = sum(seconds for phase, seconds in spent.items() if phase != "key")
        cells = (f"{spent[phase]:.2f}" if phase in spent else "" for phase in phases)
        table.add_row(str(item["round"]), *cells, f"{total:.2f}" if spent else "")
    return table


def _round_facts(item: dict[str, Any]) -> Table:
    grid = facts()
    try:
        at = datetime.fromtimestamp(item["committed_unix_ms"] / 1000, UTC)
        committed = at.isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):  # its coordinator says when, and may say anything
        committed = "at no time there is"
    loss = item["mean_loss"]
    for name, value in (
        ("round", f"{item['round']}, attempt {item['attempt']}"),
        ("committed", committed),
        ("coordinator", item["coordinator"] or "unknown here: this site caught up later"),
        ("key dealer", item["key_dealer"] or "unknown here"),
        ("contributors", ", ".join(item["contributors"])),
        *((f"rejected {site}", why) for site, why in item["rejected"].items()),
        ("signed by", ", ".join(item["signed_by"])),
        ("version", item["model_digest"]),
        ("parent", item["parent_digest"]),
        ("shared values", _or_unknown(item["shared_values"])),
        ("mean loss", "unknown" if loss is None else f"{loss:.4f}{_noised(item)}"),
        ("noise", _noise(item)),
        *((f"  {phase}", duration(s)) for phase, s in item["seconds"].items()),
    ):
        grid.add_row(name, plain_text(value))
    return grid


def _or_unknown(number: int | None) -> str:
    return "unknown here" if number is None else str(number)


def _noised(item: dict[str, Any]) -> str:
    """Behind a loss: with differential privacy it is as noisy as the sum that it came in."""
    return " (noised)" if item["noise_multiplier"] else ""


def _noise(item: dict[str, Any]) -> str:
    if not item["coordinator"]:
        return "unknown here"
    if not item["noise_multiplier"]:
        return "none"
    return f"multiplier {item['noise_multiplier']:.4g}, clip norm {item['clip_norm']:.4g}"


# ---- is the history whole? ------------------------------------------------------


@dataclass
class Verified:
    """What has been verified so far."""

    rounds: int = 0
    genesis: bytes = b""
    head: bytes = b""
    manifests: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rounds": self.rounds,
            "genesis_digest": self.genesis.hex(),
            "head_digest": self.head.hex(),
            "manifests": list(self.manifests),
        }


@topic.command("verify")
@command
def verify(
    session: Session,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The authority's ca.crt.",
            show_default="the one of the settings (--config)",
        ),
    ] = None,
    model: Model = MODELS[0],
) -> None:
    """Verify every committed round, from the first: signatures, quorums, and no gap."""
    from crypto.identity.keys import IdentityError
    from crypto.identity.trust import Trust

    try:
        trust = Trust.from_pem(read_file(authority or _configured(session)))
    except IdentityError as error:
        raise CommandError(str(error)) from error
    verified = run(_verify(session, trust, model))
    session.result(verified.plain(), lambda console: console.print(_in_words(verified)))


def _configured(session: Session) -> Path:
    if session.config is None:
        raise CommandError(
            "whom do you trust?",
            "Name the authority's certificate (--authority ca.crt), or the settings (--config)",
            exit_code=Exit.USAGE,
        )
    return settings_of(session.config).identity.authority


async def _verify(session: Session, trust: Trust, model: str) -> Verified:
    from peers.wire.certificates import CertificateError, verify_chain
    from peers.wire.manifest import ManifestError, log_id, parse_signed
    from proto.control_pb2 import ChainRequest

    verified = Verified()
    manifests: dict[int, FederationManifest] = {}
    async with connected(socket_path(session)) as daemon:
        async for part in daemon.Chain(ChainRequest(first=1, model=model)):
            try:
                for signed in part.manifests:
                    manifest = parse_signed(signed, trust)
                    log = log_id(manifest.federation_id, model)
                    manifests[manifest.version] = manifest.of_log(log)
                if not part.certificates:
                    continue
                if not verified.rounds:
                    # Nothing signs the version before the first round: it is named, not proved.
                    verified.genesis = part.certificates[0].body.parent_digest
                verify_chain(
                    list(part.certificates),
                    trust,
                    manifests.get,
                    verified.head or verified.genesis,
                    first_round=verified.rounds + 1,
                )
            except (CertificateError, ManifestError) as error:
                raise CommandError(
                    f"the chain breaks after round {verified.rounds}: {error}",
                    "Verify at another site too; do not train on this one until it is known why",
                ) from error
            verified.rounds += len(part.certificates)
            verified.head = part.certificates[-1].body.model_digest
    verified.manifests = tuple(sorted(manifests))
    return verified


def _in_words(verified: Verified) -> str:
    if not verified.rounds:
        return "No round is committed here yet: there is nothing to verify."
    return (
        f"{verified.rounds} rounds verified, without a gap: from version "
        f"{short(verified.genesis.hex())} to {short(verified.head.hex())}, "
        f"under manifests {', '.join(map(str, verified.manifests))}."
    )
