"""Bring a site back whose record of the round under way is damaged or absurd; fedd is stopped.

Under the state's lock, with an entry in the audit log before it and one behind it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

from daemon.process.log import configure_logging
from daemon.state.audit import AuditLog
from daemon.state.audit_format import AuditError
from daemon.state.folder import StateFolder
from daemon.state.state_lock import StateError, locked
from daemon.state.store import Store, StoreError


class NotForgotten(Exception):
    """The round was not forgotten; the text says why."""


def forget_round(root: Path, model: str = "", *, sums: bool) -> int:
    """Forget what this site has said in the round under way; the round's number.

    ``model``: whose rounds; "": the retriever's. ``sums``: only how many of its sums each site's
    update was in. Raises NotForgotten.
    """
    state = StateFolder(root)
    rounds, of = (state.of_model(model), {"model": model}) if model else (state, {})
    configure_logging("warning")  # to stderr: the result is alone on stdout
    actor = f"uid:{os.getuid()}"
    try:
        head = state.audit_head
        with locked(state.root), closing(AuditLog(state.audit, head_file=head)) as log:
            what = "sums" if sums else "all"
            log.write(actor, "forget-round", "begun", what=what, **of)
            try:
                round_ = _forget_sums(rounds) if sums else _forget(rounds)
            except (StoreError, OSError):
                log.write(actor, "forget-round", "refused or failed", what=what, **of)
                raise
            log.write(actor, "forget-round", "done", what=what, round=round_, **of)
    except (StateError, StoreError, AuditError, OSError) as error:
        raise NotForgotten(str(error)) from error
    return round_


def _forget_sums(state: StateFolder) -> int:
    with closing(Store(state.store)) as store:
        return store.forget_sums()


def _forget(state: StateFolder) -> int:
    with closing(Store(state.store)) as store:
        # First this site's integers of the round: those that were in a sum must be in no
        # other one. Without them it draws anew, and books that.
        if (folder := state.kept).exists():
            shutil.rmtree(folder)
        return store.forget_round()
