"""What the documents say of learning is what the benchmark wrote, figure by figure."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.generator import sizes
from tests.generator_bench import report
from tests.learning_bench import picture

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TESTS = ("test", "pooled", "synonyms")
# Rows of the table in docs/learning.md, and what they are called in the benchmark's.
ROWS = {
    "BM25": "BM25",
    "encoder as it comes": "vanilla encoder",
    "largest site alone": "largest site alone",
    "smallest site alone": "smallest site alone",
    "each site alone": "each site alone",
    "all data pooled": "centralised",
    "`fedavg`": "FedAvg",
    "`fede4rag` with a head": "fede4rag (head)",
    "`fedsearch` with a head": "fedsearch (head)",
    "`pfedrag`": "pfedrag",
    "`pdd-as2` with a head": "pdd-as2 (head)",
    "each site alone, rounds of one epoch": "each site alone, rounds of one epoch",
    "all data pooled, rounds of one epoch": "centralised, rounds of one epoch",
    "`pfedrag`, rounds of one epoch": "pfedrag, rounds of one epoch",
    "`pdd-as2` with a head, rounds of one epoch": "pdd-as2 (head), rounds of one epoch",
    "`fedavg` with LoRA, one epoch, one seed": "FedAvg (LoRA)",
    "`hanse`, the shared version alone": "hanse, shared version",
    "**`hanse`**": "hanse",
}


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    worlds: dict[str, list[dict[str, Any]]] = json.loads((RESULTS / "learning.json").read_text())
    return worlds["medquad"]


def mean_of(cells: list[dict[str, Any]], recipe: str, test: str) -> float:
    """Over the seeds that took part with all sites and all pairs."""
    most = max(len(cell["sites"]) for cell in cells)
    found = [
        cell["means"][test]["mrr@10"]
        for cell in cells
        if cell["recipe"] == recipe
        and cell["share"] == 1.0
        and cell["held_out"] is None
        and len(cell["sites"]) == most
    ]
    assert found, recipe
    return float(np.mean(found))


def test_the_table_of_recipes_is_the_benchmarks(cells: list[dict[str, Any]]) -> None:
    _, _, benchmark = (ROOT / "docs/learning.md").read_text().partition("### In the benchmark")
    seen = []
    for line in benchmark.splitlines():
        name, *figures = [part.strip() for part in line.strip("|").split(" | ")]
        if name not in ROWS or not figures or not re.match(r"\**0\.\d{3}", figures[0]):
            continue
        seen.append(name)
        for test, figure in zip(TESTS, figures, strict=True):
            said = re.search(r"0\.\d{3}", figure)
            assert said is not None, line
            assert float(said.group()) == pytest.approx(
                mean_of(cells, ROWS[name], test), abs=0.0006
            ), (name, test)
    assert seen == list(ROWS)


def test_the_readmes_figures_of_recipes_are_the_benchmarks(cells: list[dict[str, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    said = dict(re.findall(r"^\| `([\w-]+)`[^|]*\|[^|]*\| (0\.\d{3})[^|]*\|$", text, re.M))
    assert set(said) == {"hanse", "fedavg", "pfedrag", "fede4rag", "fedsearch", "pdd-as2"}
    whole = {"hanse": "hanse", "fedavg": "FedAvg", "pfedrag": "pfedrag"}
    for name, figure in said.items():
        expected = mean_of(cells, whole.get(name, f"{name} (head)"), "pooled")
        assert float(figure) == pytest.approx(expected, abs=0.0006), name
    levels = re.search(r"as it comes gets (0\.\d{3}) and each site alone (0\.\d{3})", text)
    assert levels is not None
    for figure, recipe in zip(levels.groups(), ("vanilla encoder", "each site alone"), strict=True):
        assert float(figure) == pytest.approx(mean_of(cells, recipe, "pooled"), abs=0.0006)


@pytest.mark.slow
def test_the_plot_is_drawn_from_what_was_recorded(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "learning.json", tmp_path)
    drawn = picture.draw(tmp_path)
    assert drawn.read_bytes() == (RESULTS / drawn.name).read_bytes(), (
        "draw it again: make bench-learning ARGS=--picture"
    )


def test_every_figure_of_the_benchmark_lies_between_its_bounds(
    cells: list[dict[str, Any]],
) -> None:
    for cell in cells:
        for means in cell["means"].values():
            assert 0.0 < means["mrr@10"] <= means["hit@10"] <= 1.0
            assert means["hit@1"] <= means["mrr@10"]


def test_what_a_site_gives_its_people_is_what_was_measured() -> None:
    rows = map(json.loads, (RESULTS / "load.jsonl").read_text().splitlines())
    value = {row["name"]: row["value"] for row in rows if row["generator"] == "extractive"}
    crowd, few = "32 people at once", "6.4 questions a second"
    text = (ROOT / "docs" / "figures.md").read_text()
    waits = {
        name: [value[f"{name}, p{share}, from the first try"] for share in (50, 95, 99)]
        for name in (crowd, few)
    }
    assert f"**{value[f'{crowd}, answers']:.1f}**; " in text
    assert "{:.1f} / {:.1f} / {:.1f} s".format(*waits[crowd]) in text
    assert f"; {value[f'{crowd}, refused (429) of all tries']:.0%}".replace("%", " %") in text
    assert "**{:.2f} / {:.2f} / {:.2f} s**".format(*waits[few]) in text
    for name in (crowd, few):
        assert f"a round takes {value[f'{name}, a round']:.1f} s" in text
        assert value[f"{name}, anything else"] == 0
    assert value[f"{few}, refused (429) of all tries"] <= 0.05
    beside = "one who asks beside 1000 bad clients"
    assert value[f"{beside}, not answered"] == 0
    longest = value[f"{beside}, p50"], value[f"{beside}, p100"]
    assert "**{:.0f}**; {:.0f} / {:.0f} s".format(value[f"{beside}, answered"], *longest) in text
    benchmark = (ROOT / "tests" / "benchmarks" / "answers" / "load.py").read_text()
    stated = float(re.findall(r"^STATED: Final = (\S+)", benchmark, re.M)[0])
    assert value[f"{crowd}, answers"] >= stated
    assert f"**{stated:.0f} answers a second**" in text


def test_what_the_configurations_exchange_is_what_was_counted() -> None:
    text = (RESULTS / "generator.md").read_text()
    assert f"{sizes.BEGIN}{sizes.table()}{sizes.END}" in text


def test_how_generators_answer_is_what_was_recorded() -> None:
    text = (RESULTS / "generator.md").read_text()
    rows = report.read(RESULTS / "generator.jsonl")
    assert f"{report.BEGIN}{report.tables(rows)}{report.END}" in text


@pytest.mark.parametrize(
    ("paper", "model", "configuration"),
    [
        (3777.74, "FLAN-T5-base", "A, all weights"),
        (27.00, "FLAN-T5-base", "C, queries and values, rank 16"),  # the paper's B sends these
        (1174.33, "FLAN-T5-small", "A, all weights"),  # its C sends all weights
        (10.5, "FLAN-T5-small", "C, queries and values, rank 16"),
    ],
)
def test_the_papers_megabytes_are_four_updates(
    paper: float, model: str, configuration: str
) -> None:
    (row,) = (
        one for one in sizes.rows() if (one.model, one.configuration) == (model, configuration)
    )
    sent = sizes.TRANSFERS * row.bytes_sent / sizes.MIB
    assert sent == pytest.approx(paper, abs=0.005)
