"""Take one defence out of a function, for the length of a test.

    without(monkeypatch, CiphertextSum, "add_file", "if contributor in self._contributors:")

The condition is found in the function's own source, where it must stand exactly once,
and never holds any more; all else is as it was. A defence that was rewritten or is gone
fails the test, which would otherwise prove nothing.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest


def without(
    patched: pytest.MonkeyPatch, owner: Any, name: str, *texts: str, instead: str = "if False:"
) -> None:
    """``owner.name``, a plain function or method, with ``instead`` in the place of each text."""
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    for text in texts:
        assert source.count(text) == 1, f"{text!r} stands {source.count(text)} times in {name}"
        source = source.replace(text, instead)
    program = "from __future__ import annotations\n" + source
    made: dict[str, Any] = {}
    exec(compile(program, f"<{name} undefended>", "exec"), original.__globals__, made)  # noqa: S102  our own source
    patched.setattr(owner, name, made[name])


FOR_GOOD = pytest.MonkeyPatch()
"""For a program of its own, where nothing is put back."""

put = FOR_GOOD.setattr
