"""Answers control.proto: what fedctl may ask of its own daemon.

Whoever may write to the control socket (daemon/control/socket.py) may administer
the site. What changes something or reads documents goes into the audit log, with
the user's id.
"""

from __future__ import annotations

from daemon.control.learning import LearningCalls
from daemon.control.library import LibraryCalls
from daemon.control.originals import OriginalCalls
from daemon.control.status import StatusCalls
from daemon.control.tokens import TokenCalls
from daemon.control.training import TrainingCalls


class ControlService(  # its method names are control.proto's
    TrainingCalls, LibraryCalls, OriginalCalls, LearningCalls, StatusCalls, TokenCalls
):
    """Answers one user's fedctl; every method is thin over the driver and the services."""
