"""The benchmark of generators on a small institution's data, made here, and what it says of it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.jobs.pairs import triples_of
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from tests.generator_bench import base, report
from tests.generator_bench.base import Asking, Making, Stage
from tests.generator_bench.rows import ALONE, KEPT, STATIC, Schedule, Terms, Work, computed
from tests.generator_bench.sites import Site, Size, pooled, sites_of
from tests.generator_bench.sources import FINANCE, source_of

THINGS = ("pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln")
TINY = Making(
    words=400,
    width=16,
    layers=1,
    heads=2,
    stages=(Stage(20, 4, 32, 1e-3),),
    asking=Asking(6, 2, 1e-3, prompt_tokens=1500, answer_tokens=40),
)
FIRMS = ("Ardent", "Brightwater", "Calder", "Dunmore")


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
    _write_financebench(root / FINANCE)
    return root


def _write_financebench(folder: Path) -> None:
    """Filings of several companies, eight questions about each, and one nobody asks about."""
    filings, pages, questions = [], [], []
    for firm in FIRMS:
        for year in ("2021", "2022"):
            filings.append({"doc": f"{firm}_{year}", "company": firm})
        for number in range(8):
            name = f"{firm}_2022#{number}"
            fact = f"The {firm} balance of item {number} was {number}4 million."
            text = f"{'Notes. ' * 70}{fact}{' Notes.' * 70}"
            pages.append({"id": name, "doc": f"{firm}_2022", "text": text})
            asked = {"query": f"What is item {number} of {firm}?", "answer": f"{number}4 million"}
            told = {"positives": [name], "company": firm, "doc": f"{firm}_2022"}
            questions.append({**asked, **told})
        pages.append({"id": f"{firm}_2021#0", "doc": f"{firm}_2021", "text": f"{firm} was small."})
    _write(folder / "docs.jsonl", filings)
    (folder / "eval").mkdir()
    _write(folder / "eval" / "questions.jsonl", questions)
    lines = "".join(f"{json.dumps(row)}\n" for row in pages)
    (folder / "eval" / "pages.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


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


def test_a_company_that_is_asked_about_is_read_in_no_filing(data: Path) -> None:
    source = source_of(data, FINANCE)
    held_out = {page.id.partition("_")[0] for some, _ in source.asked for page in some}
    learned = {page.id.partition("_")[0] for some, _ in source.learned for page in some}
    assert len(source.asked) == 24
    assert len(held_out) == 3
    assert held_out | learned == set(FIRMS)
    assert not held_out & learned
    assert source.texts
    assert not any(firm in text for firm in held_out for text in source.texts)


def test_of_a_page_the_passage_is_where_question_and_answer_stand(data: Path) -> None:
    for (window,), pair in source_of(data, FINANCE).asked:
        assert pair.reference
        assert pair.reference.answers[0] in window.text
        assert len(window.text.split()) <= 60


def test_pooled_sites_learn_what_each_of_them_does(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pooled")
    sites = sites_of(data, ("mill", FINANCE), Size(4, 2), 0, folder)
    with Library.open(pooled(sites, folder)) as library:
        asked = {triple.question for triple in triples_of(RetrieverSpec(), library)}
    for site in sites:
        with Library.open(site.library) as library:
            own = {triple.question for triple in triples_of(RetrieverSpec(), library)}
        assert len(own) == 4
        assert own <= asked


def test_a_base_model_is_made_once_and_the_same_again(tmp_path: Path) -> None:
    texts = [f"{thing}\n{thing} and rope and sail and lamp" for thing in THINGS]
    first = base.made(tmp_path / "one", texts, TINY, lambda _: None)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert base.made(first, texts, TINY, pytest.fail) == first
    again = base.made(tmp_path / "two", texts, TINY, lambda _: None)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    weights = [(one / "model.safetensors").read_bytes() for one in (first, again)]
    assert weights[0] == weights[1]


def test_what_a_base_model_is_asked_stands_in_one_document() -> None:
    texts = [
        f"Pumps\nThe {thing} needs oil. It has been here for {n} years."
        for n, thing in enumerate(THINGS)
    ]
    asked = base.asked_of(texts, 6, np.random.default_rng(0))
    assert len({triple.passages for triple in asked}) == 6  # none twice while there are others
    assert {*asked[0].passages} != {texts[0]}
    for triple in asked:
        (passage,) = triple.passages
        title, _, body = passage.partition("\n")
        assert triple.answer in body
        assert {*triple.question.rstrip("?").split()} <= {f"{title}:", *triple.answer.split()}


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


def test_a_schedule_has_a_row_and_constant_noise_of_its_epsilon(
    sites: list[Site], spec: GeneratorSpec
) -> None:
    work, terms = (
        Work("scheduled", "federated", schedule=Schedule(base=2.0)),
        replace(TERMS, rounds=2),
    )
    scheduled, static = computed(work, sites, spec, terms, 0, lambda _: None)
    assert static["name"] == STATIC
    first, second = scheduled["multipliers"]
    assert first == pytest.approx(2.0)  # no loss is known, which counts as a large one
    assert second < 2.0 * 0.95
    assert len(set(static["multipliers"])) == 1
    assert second < static["multipliers"][0] < first
    assert static["epsilon"] == pytest.approx(scheduled["epsilon"], rel=1e-4)


@pytest.mark.parametrize("change", [{"proximal": 100.0}, {"aggregate": "fedavgm"}])
def test_a_rule_makes_another_version(
    sites: list[Site], spec: GeneratorSpec, change: dict[str, Any]
) -> None:
    plain, terms = Work("plain", "federated"), replace(TERMS, rounds=2, epochs=2)
    works = (plain, replace(plain, **change))
    (one,), (other,) = (computed(work, sites, spec, terms, 0, lambda _: None) for work in works)
    assert one["questions"] != other["questions"]


TERMS = Terms(rounds=1, prompt_tokens=1500, answer_tokens=4)


def test_the_verdict_is_by_the_worst_site() -> None:
    alone = _row(ALONE, mill=0.30, yard=0.40)
    for yard, said in ((0.391, "nowhere"), (0.389, "somewhere")):
        found = report.by_name([alone, _row("FedAvg, C", mill=0.5, yard=yard)])
        assert f"is {said} more than 0.01" in report.verdict(found)
        assert "above it at 1 of 2 sites" in report.verdict(found)
        assert "FedAvg, B" not in report.verdict(found)
    assert "a row is missing" in report.verdict(report.by_name([alone]))


def test_a_table_says_means_over_seeds_and_differences() -> None:
    rows = [
        _row(ALONE, mill=0.3, yard=0.4),
        _row("FedAvg, C", mill=0.4, yard=0.5),
        {**_row("FedAvg, C", mill=0.6, yard=0.7), "seed": 1},
    ]
    table = report.tables(rows)
    assert "4 held-out questions, 2 seeds." in table
    assert "| FedAvg, C | 0.550 [" in table
    # Of seeds that both have: alone has the first.
    assert "| +0.100 [+0.100, +0.100] |" in table


def test_a_difference_says_how_far_its_seeds_lie_apart() -> None:
    rows = [{**_row(ALONE, mill=0.3), "seed": seed} for seed in (0, 1)]
    rows += [{**_row("FedAvg, C", mill=0.3 + seed / 10), "seed": seed} for seed in (0, 1)]
    assert "| +0.050 [+0.050, +0.050]; +0.000 to +0.100 |" in report.tables(rows)


def test_a_row_with_noise_says_the_mean_of_what_its_seeds_promise() -> None:
    noise = (
        {"multipliers": [0.2, 0.1], "epsilon": 8.0},
        {"multipliers": [0.4, 0.3], "epsilon": 4.0},
    )
    rows = [{**_row("DP scheduled", mill=0.3), "seed": n} | one for n, one in enumerate(noise)]
    assert "| DP scheduled (z = 0.3 to 0.2, ε = 6.0) |" in report.tables(rows)


def _row(name: str, **levels: float) -> dict[str, Any]:
    questions = [
        {"site": site, "nats": 1.0, **dict.fromkeys(KEPT, level)}
        for site, level in levels.items()
        for _ in range(2)
    ]
    told: dict[str, Any] = {"who": "federated", "multipliers": [], "epsilon": None, "values": 1}
    made = {"train_seconds": 1.0, "exchange": "integers", "seed": 0, "questions": questions}
    return {"name": name, **told, **made}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
