"""fedctl status and peers: how the daemon is, and the other sites, for people and machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from daemon.fedctl.terminal.connection import (
    ANSWER_WITHIN_S,
    asked_status,
    connected,
    run,
    socket_path,
)
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import (
    Session,
    as_plain,
    byte_count,
    columns,
    duration,
    facts,
    plain_text,
    short,
)
from daemon.process import metrics

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import GeneratorStatus, PeersReply, StatusReply

topic = typer.Typer()


# Numbers of the metrics' units, for people.
_WRITTEN: dict[metrics.Unit, Callable[[float], str]] = {
    "count": lambda number: f"{number:.0f}",
    "bytes": lambda number: byte_count(int(number)),
    "seconds": duration,
    "milliseconds": lambda number: f"{number:.1f} ms",
    "unix seconds": lambda number: _expires_in(int(number)),
    "ratio": lambda number: f"{number:.3f}",
}


@topic.command("status")
@command
def status(session: Session) -> None:
    """Show the daemon: federation, model version, library, training, health."""
    reply = run(_status(session))
    session.result(as_plain(reply), lambda console: console.print(_status_table(reply)))


async def _status(session: Session) -> StatusReply:
    async with connected(socket_path(session)) as daemon:
        return await asked_status(daemon)


def _status_table(reply: StatusReply) -> Table:
    grid = facts()
    run = reply.run
    training = "none" if not run.run_id else f"to round {run.target_round}, by {run.requested_by}"
    if run.run_id and run.target_round <= reply.head_round:
        training = f"none; the last run ended with round {run.target_round}, by {run.requested_by}"
    for name, value in (
        ("site", f"{reply.site} of {reply.federation_id}"),
        ("fedd", f"{reply.software_version}, up {duration(reply.uptime_s)}"),
        ("peers", f"{reply.peers_connected} of {reply.peers_total} connected"),
        ("manifest", f"version {reply.manifest_version}"),
        ("round", f"{reply.head_round}, phase {reply.phase or 'idle'}"),
        ("training", training),
        ("model version", short(reply.model_digest.hex())),
        ("answers from", _answers_from(reply)),
        ("not answered", _not_answered(reply)),
        ("encoder", reply.encoder),
        ("retriever", reply.retriever),
        *([("next retriever", reply.next_retriever)] if reply.next_retriever else []),
        *_generator(reply.generator),
        *metrics.rows(reply, _WRITTEN),
        *([("under way", reply.library_change)] if reply.library_change else []),
        ("audit log", f"{reply.audit_entries} entries, head {short(reply.audit_head.hex())}"),
        ("certificate", _expires_in(reply.certificate_expires_unix_s)),
        ("authority", _expires_in(reply.authority_expires_unix_s)),
        ("last error", reply.last_error or "none"),
        *(("WARNING", text) for text in reply.warnings),
    ):
        grid.add_row(name, plain_text(value))
    return grid


def _generator(its: GeneratorStatus) -> list[tuple[str, str]]:
    """Of the language model that is trained together, where there is something to tell."""
    if not (its.base_model or its.named):
        return []
    rows = [("generator", its.own or "no base model here")]
    if its.named and its.named != its.own:
        rows.append(("generator's name", f"{its.named} (in the manifest)"))
    if its.model_digest:
        where = f"{its.head_round}, phase {its.phase or 'idle'}"
        rows.append(("generator's round", f"{where}, version {short(its.model_digest.hex())}"))
    learns = f"{its.triples} questions with passages and answers"
    rows.append(("generator learns", f"no: {its.why_not}" if its.why_not else learns))
    rows.append(("generator answers", _judged(its)))
    if its.newest_perplexity and its.judged_digest != its.answering_digest:
        rows.append(("generator refused", _refused(its)))
    return rows + ([("generator's error", its.last_error)] if its.last_error else [])


def _judged(its: GeneratorStatus) -> str:
    """What of it answers, where it is asked to, and by what that was chosen."""
    version = short(its.answering_digest.hex()) if its.answering_digest else "the base model"
    if its.own_share:
        version += f", {its.own_share:.0%} of it this site's own"
    if not its.base_perplexity:
        return f"{version}: no version is judged yet (by 10 validation pairs with answers or more)"
    return (
        f"{version}: perplexity {its.perplexity:.2f}, the base model's {its.base_perplexity:.2f}, "
        f"on {its.judged_by} validation pairs, {its.answers_written} of them written"
    )


def _refused(its: GeneratorStatus) -> str:
    """The newest version beside what answers: better in the one, and no worse in the other."""
    newest = f"{short(its.judged_digest.hex())}: perplexity {its.newest_perplexity:.2f}"
    if math.isnan(its.newest_rouge_l + its.rouge_l):
        return newest
    return f"{newest}, ROUGE-L {its.newest_rouge_l:.3f}; of what answers {its.rouge_l:.3f}"


def _answers_from(reply: StatusReply) -> str:
    """The version that is searched; where there is none, what is waited for."""
    if not reply.passages:
        return "nothing yet: no documents are here"
    if not reply.index_digest:
        return "nothing yet: passages are being embedded"
    version = short(reply.index_digest.hex())
    if reply.index_digest != reply.wanted_digest:
        version += " (the newer version is being embedded)"
    return f"{version}, searched by {reply.index_engine}" if reply.index_engine else version


def _not_answered(reply: StatusReply) -> str:
    """What is too little for an answer, and what that was found by."""
    if not reply.index_digest or math.isnan(reply.abstention_threshold):
        return "nothing: every question gets an answer" if reply.index_digest else "nothing yet"
    by = (
        f"{reply.abstention_pairs} validation pairs"
        if reply.abstention_pairs
        else "general questions, of which half get an answer (for want of 20 validation pairs)"
    )
    return f"with evidence below {reply.abstention_threshold:.3f}, found by {by}"


@topic.command("peers")
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
