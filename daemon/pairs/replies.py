"""A writer's replies, kept on disk as they come: hours of writing survive an interruption.

One JSON object a line, appended; a line that a crash cut short is passed over. A
reply belongs to the model and the very prompt, and so to the text of a passage:
what has changed since is asked anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from daemon.pairs.writing import Writer

_LONGEST = 1 << 14  # characters of a reply that are kept: a few lines are asked for
_MAX_LINE = 1 << 18


class Remembered:
    """A writer that asks another one for nothing twice. Not for two processes at a time."""

    def __init__(self, path: Path | None, model: str, writer: Callable[[], Writer]) -> None:
        """``writer`` is called when there is something to ask, and not before.

        Without a ``path`` nothing outlives this object.
        """
        self._path = path
        self._model = model
        self._writer = writer
        self._known = {} if path is None else _read(path)

    def knows(self, prompt: str) -> bool:
        """Whether the reply to a prompt is here."""
        return self._key(prompt) in self._known

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """See `daemon.pairs.writing.Writer`."""
        for prompt in prompts:
            key = self._key(prompt)
            if key not in self._known:
                (reply,) = self._writer().write([prompt])
                self._keep(key, reply[:_LONGEST])
            yield self._known[key]

    def _keep(self, key: str, reply: str) -> None:
        self._known[key] = reply
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            # After a line that a crash cut short, a new one begins.
            file.write(f"\n{json.dumps({'key': key, 'reply': reply})}")

    def _key(self, prompt: str) -> str:
        return hashlib.sha256(f"{self._model}\0{prompt}".encode(errors="replace")).hexdigest()


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    known: dict[str, str] = {}
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_MAX_LINE), b""):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut short by a crash: it is asked again
            if isinstance(row, dict) and isinstance(row.get("reply"), str):
                known[str(row.get("key"))] = row["reply"]
    return known
