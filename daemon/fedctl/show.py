"""fedctl status, peers, rounds: what the daemon knows, for people and machines."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import (
    CommandError,
    Session,
    as_plain,
    byte_count,
    duration,
    plain_attempt,
    plain_round,
    short,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import PeersReply, RoundsReply, StatusReply
    from proto.control_pb2_grpc import ControlAsyncStub

ANSWER_WITHIN_S = 30.0

rounds_app = typer.Typer(help="The committed rounds: who did what, and how long it took.")


@command
def status(session: Session) -> None:
    """Show the daemon: federation, model version, library, training, health."""
    reply = run(_status(session))
    session.result(as_plain(reply), lambda console: console.print(_status_table(reply)))


async def _status(session: Session) -> StatusReply:
    async with connected(socket_path(session)) as daemon:
        return await asked_status(daemon)


async def asked_status(daemon: ControlAsyncStub) -> StatusReply:
    """How the daemon is, and at which site."""
    from proto.control_pb2 import StatusRequest

    return await daemon.Status(StatusRequest(), timeout=ANSWER_WITHIN_S)


def _status_table(reply: StatusReply) -> Table:
    grid = facts()
    run = reply.run
    training = "none" if not run.run_id else f"to round {run.target_round}, by {run.requested_by}"
    if run.run_id and run.target_round <= reply.head_round:
        training = f"none; the last run ended with round {run.target_round}, by {run.requested_by}"
    index = short(reply.index_digest.hex())
    if reply.index_digest != reply.model_digest:
        index += "  (the newer version is being embedded)"
    for name, value in (
        ("site", f"{reply.site} of {reply.federation_id}"),
        ("fedd", f"{reply.software_version}, up {duration(reply.uptime_s)}"),
        ("peers", f"{reply.peers_connected} of {reply.peers_total} connected"),
        ("manifest", f"version {reply.manifest_version}"),
        ("round", f"{reply.head_round}, phase {reply.phase or 'idle'}"),
        ("training", training),
        ("model version", short(reply.model_digest.hex())),
        ("answers from", index),
        ("encoder", reply.encoder),
        ("library", f"{reply.documents} documents, {reply.passages} passages"),
        (
            "pairs",
            f"{reply.pairs_train} train, {reply.pairs_valid} valid, {reply.pairs_test} test",
        ),
        (
            "traffic",
            f"{byte_count(reply.bytes_sent)} sent, {byte_count(reply.bytes_received)} received",
        ),
        ("memory", byte_count(reply.resident_bytes)),
        (
            "loop lag",
            f"p50 {reply.loop_lag_p50_ms:.1f} ms, p99 {reply.loop_lag_p99_ms:.1f} ms, "
            f"max {reply.loop_lag_max_ms:.1f} ms",
        ),
        ("audit log", f"{reply.audit_entries} entries, head {short(reply.audit_head.hex())}"),
        ("certificate", _expires_in(reply.certificate_expires_unix_s)),
        ("authority", _expires_in(reply.authority_expires_unix_s)),
        ("last error", reply.last_error or "none"),
        *(("WARNING", text) for text in reply.warnings),
    ):
        grid.add_row(name, plain_text(value))
    return grid


@command
def peers(session: Session) -> None:
    """Show the other sites: connected or not, since when not, and why."""
    reply = run(_peers(session))
    session.result(as_plain(reply), lambda console: _show_peers(console, reply))


def _show_peers(console: Console, reply: PeersReply) -> None:
    console.print(_peers_table(reply))
    for peer in reply.peers:
        if peer.last_error:  # too long for a column of this table
            console.print(
                plain_text(f"last error of {peer.site}: {peer.last_error}"), soft_wrap=True
            )
    for accused in reply.accused:
        seen = datetime.fromtimestamp(accused.first_seen_unix_ms / 1000, UTC)
        text = f"EVIDENCE  {accused.site} has signed {accused.signed} (seen {seen:%Y-%m-%d %H:%M})"
        console.print(plain_text(f"{text}: {accused.remedy}"), soft_wrap=True)
    for text in reply.warnings:
        console.print(plain_text(f"WARNING  {text}"), soft_wrap=True)


async def _peers(session: Session) -> PeersReply:
    from proto.control_pb2 import PeersRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.Peers(PeersRequest(), timeout=ANSWER_WITHIN_S)


def _peers_table(reply: PeersReply) -> Table:
    table = columns(
        "site",
        "address",
        "connected",
        "round",
        "manifest",
        ">last contact",
        ">lag",
        ">clock",
        ">certificate",
        ">sent",
        ">received",
        ">rejected",
    )
    for peer in reply.peers:
        never = peer.last_contact_s < 0
        table.add_row(
            peer.site,
            plain_text(peer.address),
            "yes" if peer.connected else "no",
            str(peer.head_round),
            str(peer.manifest_version),
            "never" if never else f"{duration(peer.last_contact_s)} ago",
            "" if peer.round_trip_ms < 0 or never else f"{peer.round_trip_ms:.1f} ms",
            "" if never else f"{peer.clock_offset_ms:+.0f} ms",
            _expiry(peer.certificate_expires_unix_s),
            byte_count(peer.bytes_sent),
            byte_count(peer.bytes_received),
            f"{peer.rejected_rounds} ×" if peer.rejected_rounds else "",
        )
    return table


def _expires_in(unix_s: int) -> str:
    left = unix_s - time.time()
    return f"expires in {duration(left)}" if left > 0 else "EXPIRED"


def _expiry(unix_s: int) -> str:
    if not unix_s:
        return ""
    left = unix_s - time.time()
    return duration(left) if left > 0 else "EXPIRED"


@rounds_app.callback(invoke_without_command=True)
@command
def rounds(
    session: Session,
    limit: Annotated[int, typer.Option(min=0, help="Only the newest so many; 0 means all.")] = 20,
) -> None:
    """List the committed rounds, oldest first; `rounds show N` tells one in full."""
    found = [
        plain_round(r.certificate, r.report) for r in run(_rounds(session, limit=limit)).rounds
    ]
    session.result({"rounds": found}, lambda console: _show_rounds(console, found))


@rounds_app.command("show")
@command
def rounds_show(
    session: Session,
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="The round.")],
) -> None:
    """Show one round in full: signatures, phases, and every attempt with why it failed."""
    reply = run(_rounds(session, first=number))
    if number == reply.open_round:
        attempts = [plain_attempt(attempt) for attempt in reply.open_attempts]
        plain: dict[str, Any] = {"round": number, "attempts": attempts}
        session.result(plain, lambda console: _show_open(console, plain))
        return
    found = next((r for r in reply.rounds if r.certificate.body.round == number), None)
    if found is None:
        raise CommandError(
            f"round {number} is not committed here", "`fedctl rounds` lists those that are"
        )
    plain = plain_round(found.certificate, found.report)
    plain["attempts"] = [plain_attempt(attempt) for attempt in found.attempts]
    session.result(plain, lambda console: _show_round(console, plain))


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
    told = ("outcome", "phase", "reason")
    return (*(attempt[name] for name in told), *attempt["contributors"])


async def _rounds(session: Session, *, first: int = 0, limit: int = 0) -> RoundsReply:
    from proto.control_pb2 import RoundsRequest

    async with connected(socket_path(session)) as daemon:
        request = RoundsRequest(first=first, limit=limit)
        return await daemon.Rounds(request, timeout=ANSWER_WITHIN_S)


def _show_rounds(console: Console, found: list[dict[str, Any]]) -> None:
    if not found:
        console.print("No round is committed yet; `fedctl train --rounds 1` starts one.")
        return
    console.print(rounds_table(found))
    if any(item["seconds"] for item in found):
        console.print(phases_table(found))


def rounds_table(found: list[dict[str, Any]]) -> Table:
    """Who made each round, and of what."""
    table = columns(
        ">round", ">attempt", "coordinator", "key dealer", "contributors", "version", ">loss"
    )
    for item in found:
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


def phases_table(found: list[dict[str, Any]]) -> Table:
    """The seconds of each round's phases, as its coordinator saw them."""
    phases = list(dict.fromkeys(phase for item in found for phase in item["seconds"]))
    table = columns(">round", *(f">{phase}" for phase in phases), ">seconds")
    for item in found:
        spent = item["seconds"]
        # The key is dealt while others train: a span of its own, no part of the sum.
        total = sum(seconds for phase, seconds in spent.items() if phase != "key")
        cells = (f"{spent[phase]:.2f}" if phase in spent else "" for phase in phases)
        table.add_row(str(item["round"]), *cells, f"{total:.2f}" if spent else "")
    return table


def _round_facts(item: dict[str, Any]) -> Table:
    grid = facts()
    committed = datetime.fromtimestamp(item["committed_unix_ms"] / 1000, UTC)
    loss = item["mean_loss"]
    for name, value in (
        ("round", f"{item['round']}, attempt {item['attempt']}"),
        ("committed", committed.isoformat(sep=" ", timespec="seconds")),
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


def facts() -> Table:
    """An empty two-column list of facts: name, value."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")  # a fingerprint must be seen whole
    return grid


def columns(*names: str) -> Table:
    """An empty table; a name that starts with ``>`` is of a column of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table


def plain_text(value: str) -> Any:
    """A cell with foreign text in it: no markup is read from it, no control character kept."""
    from rich.text import Text

    return Text(visible(value))
