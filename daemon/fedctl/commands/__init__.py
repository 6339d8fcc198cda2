"""fedctl's commands by topic, and the table of them.

A command of a group (`fedctl rounds show`) stands in its group's file and joins the group
there; a command or a group of its own has a line in the table, too. In that order they
are shown.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from daemon.fedctl.commands import (
    audit,
    authority,
    evaluate,
    learning,
    library,
    manifest,
    pairs,
    personalise,
    privacy,
    rounds,
    site,
    status,
    train,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "ingest": library.ingest,
    "train": train.train,
    "learning": learning.learning,
    "personalise": personalise.personalise,
    "ask": library.ask,
    "eval": evaluate.evaluate,
    "status": status.status,
    "peers": status.peers,
    "privacy": privacy.privacy,
}

GROUPS: dict[str, typer.Typer] = {
    "ca": authority.ca_app,
    "site": site.site_app,
    "manifest": manifest.manifest_app,
    "pairs": pairs.pairs_app,
    "rounds": rounds.rounds_app,
    "audit": audit.audit_app,
}
