"""Every claim of docs/security.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = sorted(
    set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/security.md").read_text()))
)


def test_claims_are_found() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_what_a_claim_names_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in functions
