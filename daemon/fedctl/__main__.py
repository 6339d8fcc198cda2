"""Where ``fedctl``, or ``python -m daemon.fedctl``, begins: Ctrl-C ends it from here on.

It imports nothing heavy. While the rest is imported, which takes a moment, KeyboardInterrupt could
come up anywhere in it: there is nothing to clean up yet, so the process just ends, in the words and
with the exit code of every command.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    # Whoever starts it deaf to Ctrl-C (nohup) has it so.
    listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listening:
        signal.signal(signal.SIGINT, _ended)
    from daemon.fedctl.main import main as run

    if listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _ended(_number: int, _frame: FrameType | None) -> None:
    """As `daemon.fedctl.terminal.output.complain` tells it, which may not be here yet."""
    os.write(2, b"fedctl: interrupted.\n")
    words = sys.argv[1:]
    if "--json" in words[: words.index("--") if "--" in words else None]:
        os.write(1, b'{"error": "interrupted", "remedy": ""}\n')
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
