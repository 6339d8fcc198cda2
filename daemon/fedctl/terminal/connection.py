"""The connection to the site's own daemon, over its Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from config import control_socket
from daemon.fedctl.terminal.output import CommandError, Exit, Session

if TYPE_CHECKING:
    import grpc.aio

    from config.settings import Settings
    from proto.control_pb2 import StatusReply
    from proto.control_pb2_grpc import ControlAsyncStub

T = TypeVar("T")

ANSWER_WITHIN_S = 30.0


def socket_path(session: Session) -> Path:
    """Where the daemon listens: --socket, else --config, else HANSE_SOCKET, else the default.

    The environment is read here and not by each option: an option before the command's
    name must not lose to it behind the name.
    """
    if session.socket is not None:
        return session.socket
    if session.config is not None:
        from config.loading import SettingsError, load

        try:
            return load(session.config).control.socket
        except SettingsError as error:
            problems = "; ".join(str(problem) for problem in error.problems)
            raise CommandError(
                f"settings refused: {error.path}: {problems}", exit_code=Exit.USAGE
            ) from error
    named = os.environ.get("HANSE_SOCKET", "")
    return Path(named) if named else control_socket.PATH


def settings_of(path: Path) -> Settings:
    """A daemon's settings; CommandError when they are refused."""
    from config.loading import SettingsError, load

    try:
        return load(path)
    except SettingsError as error:
        raise CommandError(str(error), exit_code=Exit.USAGE) from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; Ctrl-C cancels it and raises KeyboardInterrupt here."""
    return _runner().run(work, context=copy_context())


def over() -> None:
    """The command is: what it has left in its loop ends."""
    if _runner.cache_info().currsize:
        _runner().close()
        _runner.cache_clear()


@cache
def _runner() -> asyncio.Runner:
    """One loop for all that a command does.

    What grpc hears of a cancelled call after its loop was closed comes up as a traceback in the
    next one: after Ctrl-C a command asks once more, for what there is so far.
    """
    return asyncio.Runner()


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[ControlAsyncStub]:
    """A stub for the daemon at the socket; every failure in the body becomes a CommandError."""
    target = _knock(path)
    import grpc.aio

    from proto.control_pb2_grpc import ControlStub

    # No TLS here on purpose: the socket's file mode (0660, owner and group of the
    # daemon) is the guard, and nothing of this ever crosses a network.
    channel = grpc.aio.insecure_channel(
        target,
        options=[
            ("grpc.max_receive_message_length", control_socket.MESSAGE_BYTES),
            ("grpc.max_send_message_length", control_socket.MESSAGE_BYTES),
            # Without it grpc asks a configured http_proxy for the way to a local socket.
            ("grpc.enable_http_proxy", 0),
            ("grpc.default_authority", "localhost"),
        ],
    )
    try:
        yield ControlStub(channel)
    except grpc.aio.AioRpcError as error:
        raise _translated(error, path) from error
    finally:
        await channel.close(grace=None)


def _knock(path: Path) -> str:
    """Connect once without grpc, which would not say why it cannot; returns grpc's target."""
    absolute = str(path.absolute())
    if len(os.fsencode(absolute)) > control_socket.LONGEST_PATH:
        raise CommandError(
            f"the socket path {path} is longer than {control_socket.LONGEST_PATH} bytes",
            "Choose a shorter [control] socket in the settings",
            exit_code=Exit.USAGE,
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(5)
        try:
            knock.connect(absolute)
        except OSError as error:
            raise _unreachable(path, error) from error
    return f"unix:{absolute}"


def _unreachable(path: Path, error: OSError) -> CommandError:
    start = "Start it (systemctl start fedd, or fedd --config FILE) or name its socket (--socket)"
    cause, remedy = f"no daemon answers at {path} ({error.strerror or error})", start
    if isinstance(error, FileNotFoundError):
        cause = f"no daemon runs here, or it is still starting: {path} does not exist"
    elif isinstance(error, PermissionError):
        cause, remedy = f"you may not use {path}", "Join its group, or ask the site's operator"
    return CommandError(cause, remedy, exit_code=Exit.UNREACHABLE)


def _translated(error: grpc.aio.AioRpcError, path: Path) -> CommandError:
    """The daemon's refusal, or what became of it, in a person's words.

    The daemon's details are "cause", or "cause" and "remedy" on two lines.
    """
    import grpc

    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return CommandError(
            f"the daemon at {path} went away",
            "See its log (journalctl -u fedd) for why it ended, then try again",
            exit_code=Exit.UNREACHABLE,
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CommandError(
            "the daemon did not answer in time",
            "It may be busy: `fedctl status` shows what it is doing",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CommandError(
            "the daemon does not know this command",
            "fedctl and fedd must be of one version: restart fedd after an upgrade",
        )
    senseless = code is grpc.StatusCode.INVALID_ARGUMENT
    if not senseless and code is not grpc.StatusCode.FAILED_PRECONDITION:
        # The words are grpc's: the daemon chose none.
        return CommandError(
            f"the daemon failed at this, or broke it off ({code.name}: {details})",
            "See its log (journalctl -u fedd) for why, and report it if it names a defect",
        )
    cause, _, remedy = details.partition("\n")
    return CommandError(cause, remedy, exit_code=Exit.USAGE if senseless else Exit.FAILED)


async def asked_status(daemon: ControlAsyncStub) -> StatusReply:
    """How the daemon is, and at which site."""
    from proto.control_pb2 import StatusRequest

    return await daemon.Status(StatusRequest(), timeout=ANSWER_WITHIN_S)
