"""The benchmark of generators on a small institution's data, made here, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.learning.generator.spec import GeneratorSpec
from tests.generator_bench import base, report
from tests.generator_bench.base import Making, Stage
from tests.generator_bench.rows import KEPT, Terms, Work, computed
from tests.generator_bench.sites import Site, Size, sites_of

THINGS = ("pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln")
TINY = Making(words=400, width=16, layers=1, heads=2, stages=(Stage(20, 4, 32, 1e-3),))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two sites, as MedQuAD's folders are laid out."""
    root = tmp_path_factory.mktemp("data")
    for site in ("mill", "yard"):
        folder = root / "medquad" / site
        folder.mkdir(parents=True)
        documents, pairs = [], {"train": [], "test": []}  # type: ignore[var-annotated]
        for number, thing in enumerate(THINGS):
            split = "test" if number % 4 == 3 else "train"
            name = f"{site}/{number}#0"
            text = f"The {thing} of the {site} needs oil. " + "Nobody knows who built it. " * 6
            documents.append({"id": name, "title": thing, "text": text, "split": split})
            pairs[split].append({"query": f"What does the {thing} need?", "doc_id": name})
        _write(folder / "documents.jsonl", documents)
        for split, rows in pairs.items():
            _write(folder / f"pairs_{split}.jsonl", rows)
    return root


@pytest.fixture(scope="module")
def sites(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    return sites_of(data, ("mill", "yard"), Size(4, 2), 0, tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def spec(sites: list[Site], tmp_path_factory: pytest.TempPathFactory) -> GeneratorSpec:
    texts = [text for site in sites for text in site.texts]
    folder = base.made(tmp_path_factory.mktemp("base") / "tiny", texts, TINY, lambda _: None)
    return GeneratorSpec(base_model=str(folder), device="cpu")


def test_nothing_held_out_is_learned_or_read_by_the_base_model(sites: list[Site]) -> None:
    for site in sites:
        read = " ".join(site.texts)
        assert len(site.tests) == 2
        for triple in site.tests:
            assert triple.answer in triple.passages[0]
            assert triple.answer.split(". ")[0] not in read


def test_a_base_model_is_made_once_and_the_same_again(tmp_path: Path) -> None:
    texts = [f"{thing} and rope and sail and lamp" for thing in THINGS]
    first = base.made(tmp_path / "one", texts, TINY, lambda _: None)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert base.made(first, texts, TINY, pytest.fail) == first
    again = base.made(tmp_path / "two", texts, TINY, lambda _: None)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    weights = [(one / "model.safetensors").read_bytes() for one in (first, again)]
    assert weights[0] == weights[1]


def test_each_way_to_add_the_same_integers_is_a_row(sites: list[Site], spec: GeneratorSpec) -> None:
    work = Work("FedAvg, C", "federated", exchanges=("integers", "ckks", "masking"))
    rows = computed(work, sites, spec, TERMS, 0, lambda _: None)
    assert [row["exchange"] for row in rows] == ["integers", "ckks", "masking"]
    assert rows[0]["questions"] == rows[2]["questions"]
    assert 0 < rows[0]["uploaded"] < rows[2]["uploaded"] < rows[1]["uploaded"]
    assert [one["site"] for one in rows[0]["questions"]] == ["mill"] * 2 + ["yard"] * 2
    assert {*KEPT, "nats", "site"} == rows[0]["questions"][0].keys()


def test_noise_says_its_epsilon_and_a_base_model_learns_nothing(
    sites: list[Site], spec: GeneratorSpec
) -> None:
    (noisy,) = computed(
        Work("DP", "federated", multiplier=1.0), sites, spec, TERMS, 0, lambda _: None
    )
    assert 1.0 < noisy["epsilon"] < 10.0
    (bare,) = computed(Work("base model", "nobody"), sites, spec, TERMS, 0, lambda _: None)
    assert bare["norms"] == []
    assert bare["epsilon"] is None
    assert noisy["questions"][0]["nats"] != bare["questions"][0]["nats"]


TERMS = Terms(rounds=1, prompt_tokens=1500, answer_tokens=4)


def test_the_verdict_is_by_the_worst_site() -> None:
    alone = _row(report.ALONE, mill=0.30, yard=0.40)
    for yard, said in ((0.391, "nowhere"), (0.389, "somewhere")):
        found = report.by_name([alone, _row("FedAvg, C", mill=0.5, yard=yard)])
        assert f"is {said} more than 0.01" in report.verdict(found)
        assert "above it at 1 of 2 sites" in report.verdict(found)
    assert "a row is missing" in report.verdict(report.by_name([alone]))


def test_a_table_says_means_over_seeds_and_differences() -> None:
    rows = [
        _row(report.ALONE, mill=0.3, yard=0.4),
        _row("FedAvg, C", mill=0.4, yard=0.5),
        {**_row("FedAvg, C", mill=0.6, yard=0.7), "seed": 1},
    ]
    table = report.tables(rows)
    assert "4 held-out questions, 2 seeds." in table
    assert "| FedAvg, C | 0.550 [" in table
    assert "| +0.200 [+0.200, +0.200] |" in table


def _row(name: str, **levels: float) -> dict[str, Any]:
    questions = [
        {"site": site, "nats": 1.0, **dict.fromkeys(KEPT, level)}
        for site, level in levels.items()
        for _ in range(2)
    ]
    told = {"who": "federated", "multiplier": 0.0, "epsilon": None, "values": 1}
    made = {"train_seconds": 1.0, "exchange": "integers", "seed": 0, "questions": questions}
    return {"name": name, **told, **made}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
