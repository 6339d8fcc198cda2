"""What the documents name is there: tests, files, headings, paths of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = tuple(sorted(path.name for path in ROOT.glob("*.md")))
DOCUMENTS = (
    *TOP,
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)
# Decisions tell of the code of their time.
OF_TODAY = [name for name in DOCUMENTS if not name.startswith("docs/decisions/")]
ROOMS = ("proto", "config", "crypto", "peers", "daemon", "tests")
MOST_LINES_OF_THE_README = 150


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def claims_of(text: str) -> set[tuple[str, str]]:
    """File and function of each test that a text names in backticks."""
    return set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text))


NAMED = sorted(set().union(*(claims_of(text_of(document)) for document in OF_TODAY)))


def test_claims_are_found() -> None:
    assert len(claims_of(text_of("docs/security.md"))) > 30


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_what_a_claim_names_is_there(file: str, name: str) -> None:
    functions = functions_of(file)  # for a file alone, too: it is there
    assert not name or name in functions


def anchors(markdown: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_link_leads_somewhere(document: str) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        found = path.exists() and (not anchor or anchor in anchors(path.read_text()))
        if not found:
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("document", [d for d in OF_TODAY if "results" not in d])
def test_a_path_of_the_code_is_there(document: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/.]*)`", text_of(document))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_readme_is_read_at_one_sitting() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= MOST_LINES_OF_THE_README
    assert not [line for line in lines if len(line) > 400]
