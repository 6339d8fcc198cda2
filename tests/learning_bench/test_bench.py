"""The learning benchmark on a made-up federation small enough to train in seconds."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from config.recipes import ServerOptions
from crypto.ckks.parameters import choose_parameters
from crypto.ckks.sum_proof import size_of_tags
from crypto.quantize import FRACTION_INTEGERS
from daemon.jobs import learning
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.state.versions import read_version
from peers.wire.vectors import largest_size
from tests.learning_bench import __main__ as bench
from tests.learning_bench import cells, report, worlds
from tests.learning_bench.cells import Work
from tests.learning_bench.corpora import corpus_at
from tests.learning_bench.recipes.exchange import Training, exchange, in_the_clear
from tests.learning_bench.recipes.learning import (
    Part,
    _copy,
    _set_aside,
    central_library,
    federate,
    learned,
    libraries_of,
    retriever_of,
)
from tests.learning_bench.recipes.tables import ABLATIONS, CONTROLS, RECIPES, changed
from tests.support.small_models import small_encoder

TOPICS = {
    "north": ("heart", "lung", "vein", "pulse"),
    "south": ("skin", "bone", "knee", "joint"),
    "west": ("nerve", "brain", "spine", "sleep"),
}


def told(*_: object) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    words = [word for topic in TOPICS.values() for word in topic]
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), words)
    return RetrieverSpec(encoder=str(folder), max_tokens=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the layout of the real data: seven words of folders, files and keys."""
    root = tmp_path_factory.mktemp("data") / "medquad"
    for site, words in TOPICS.items():
        folder = root / site
        folder.mkdir(parents=True)
        documents: list[dict[str, str]] = []
        pairs: dict[str, list[dict[str, object]]] = {"train": [], "valid": [], "test": []}
        for number, word in enumerate(words):
            for split in ("train", "test"):
                name = f"{site}/{split}{number}#0"
                text = f"{word} {split} says what {word} number {number} does."
                documents.append({"id": name, "title": word, "text": text, "split": split})
                pair: dict[str, object] = {
                    "query": f"what is {word} {split}",
                    "doc_id": name,
                    "positives": [name],
                }
                pairs[split].append(pair)
        # A question that another site answers, too: shared by all three.
        pairs["train"].append(
            {
                "query": f"what does {site} say",
                "positives": [f"{site}/train0#0"],
                "other_site_positives": [f"{o}/train0#0" for o in TOPICS if o != site],
            }
        )
        rows = "".join(json.dumps(row) + "\n" for row in documents)
        (folder / "documents.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
        for split, some in pairs.items():
            lines = "".join(json.dumps(row) + "\n" for row in some)
            (folder / f"pairs_{split}.jsonl").write_text(lines)
    synonyms = {"query": "nerves?", "doc_id": "west/test0#0", "positives": ["west/test0#0"]}
    (root / "west" / "pairs_test_synonyms.jsonl").write_text(json.dumps(synonyms) + "\n")
    return root.parent


@pytest.fixture(scope="module")
def world(
    data: Path, spec: RetrieverSpec, tmp_path_factory: pytest.TempPathFactory
) -> worlds.World:
    made = worlds.medquad(data, tmp_path_factory.mktemp("cache"), spec)
    worlds.embed(made, spec, told)
    return made


@pytest.mark.slow
def test_synonym_questions_are_asked_apart_and_nothing_tested_is_learned(
    world: worlds.World,
) -> None:
    assert {name: len(test.questions) for name, test in world.tests.items()} == {
        "test": 12,
        "pooled": 12,
        "synonyms": 1,
    }
    for site in (*world.sites, "pooled"):
        with Library.open(world.library(site)) as library:
            learned = {pair.query for pair in library.pairs("train")}
            documents = {p.document_id for p in library.passages(split="train")}
            assert library.pairs("test") == []
        assert not learned & {q.text for test in world.tests.values() for q in test.questions}
        assert not any("/test" in name for name in documents)


def test_other_sites_answers_count_only_where_they_can_be_found(world: worlds.World) -> None:
    with Library.open(world.library("north")) as own, Library.open(world.library("pooled")) as all_:
        asked = "what does north say"
        (alone,) = [pair for pair in own.pairs("train") if pair.query == asked]
        (pooled,) = [pair for pair in all_.pairs("train") if pair.query == asked]
    question = worlds.Question("north", asked, frozenset({"a"}), elsewhere=frozenset({"b"}))
    assert world.tests["test"].right(question) == {"a"}
    assert world.tests["pooled"].right(question) == {"a", "b"}
    assert alone.positives == ("north/train0#0",)
    assert pooled.positives == tuple(f"{s}/train0#0" for s in ("north", "south", "west"))


def test_a_text_is_encoded_once_whoever_holds_it(world: worlds.World, spec: RetrieverSpec) -> None:
    embedded: list[object] = []
    worlds.embed(world, spec, lambda *said: embedded.append(said))
    assert embedded == [], "a second run has nothing to do"
    digest = worlds.encoder_of(spec).digest
    pooled = corpus_at(world.library("pooled"), digest)
    north = corpus_at(world.library("north"), digest)
    rows = [pooled.documents.tolist().index(name) for name in north.documents.tolist()]
    np.testing.assert_array_equal(pooled.features[rows], north.features)


def test_a_share_of_the_pairs_is_the_same_for_everyone_who_trains(
    world: worlds.World, tmp_path: Path
) -> None:
    part = Part(("north", "south"), share=0.4, seed=3)
    kept: set[str] = set()
    for path in libraries_of(world, part, tmp_path).values():
        with Library.open(path) as library:
            pairs = library.pairs("train")
            assert len(pairs) == 2, "0.4 of five"
            kept |= {pair.query for pair in pairs}
    with Library.open(central_library(world, part, tmp_path)) as library:
        assert {pair.query for pair in library.pairs("train")} == kept
        assert not any("west" in p.document_id for p in library.passages()), "it takes no part"
    with Library.open(world.library("north")) as library:
        assert len(library.pairs("train")) == 5, "the copy was cut, not the library"


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_a_round_is_the_mean_of_what_the_sites_trained(
    world: worlds.World, spec: RetrieverSpec, tmp_path: Path, weighted: bool
) -> None:
    part = Part(("north", "south"), seed=5)
    libraries = libraries_of(world, part, tmp_path)
    with Library.open(world.library("south"), read_only=True) as library:
        few = [pair.query for pair in library.pairs("train")][:2]
    libraries["south"] = _copy(world.library("south"), tmp_path / "few.sqlite")
    _set_aside(libraries["south"], set(few))
    training = Training(rounds=1, weighted=weighted, options=TrainingOptions(local_epochs=2))
    run = federate(libraries, spec, training, 5, tmp_path)

    versions = tmp_path / "apart"
    parent = learning.write_initial_version(spec, versions)
    updates, weights = [], []
    for site, library_path in libraries.items():
        out, options = tmp_path / f"{site}.npy", replace(training.options, seed=5)
        result = learning.train(spec, library_path, versions, parent, options, 1, site, out)
        updates.append(np.load(out)[:-1])
        weights.append(float(result.num_examples) if weighted else 1.0)
        alone = federate({site: library_path}, spec, training, 5, tmp_path / site)
        start = retriever_of(spec).initial_vector()
        np.testing.assert_allclose(alone.vector, start + updates[-1], rtol=1e-6, atol=1e-7)
    assert weights == ([5.0, 2.0] if weighted else [1.0, 1.0])
    mean = np.average(updates, axis=0, weights=weights) + retriever_of(spec).initial_vector()
    largest = max(np.abs(update).max() for update in updates)
    np.testing.assert_allclose(run.vector, mean, atol=4 * largest * 2.0**-15)
    assert np.abs(mean - retriever_of(spec).initial_vector()).max() > 100 * largest * 2.0**-15
    halving = replace(training.options, server=ServerOptions("fedavgm", 0.5))
    half = federate(libraries, spec, replace(training, options=halving), 5, tmp_path / "half")
    np.testing.assert_allclose(
        half.vector, (run.vector + retriever_of(spec).initial_vector()) / 2, atol=1e-6
    )
    parameters = choose_parameters(2, training.bits)
    values = run.trained_values + FRACTION_INTEGERS
    block = parameters.seeded_block + 4
    rest = run.update_bytes - parameters.packing.blocks(values) * block - size_of_tags(2)
    assert 0 <= rest < 64
    assert run.round_bytes < run.update_bytes + largest_size(parameters, values)


def test_masked_encrypted_and_open_updates_make_the_same_version(
    spec: RetrieverSpec, tmp_path: Path
) -> None:
    """Up to the rounding, which each site draws for itself."""
    manifest = learning.describe(spec).shape_manifest
    chance = np.random.default_rng(3)
    updates, largest = {}, 0.0
    for number, site in enumerate(("far_north", "south", "west")):
        update = chance.normal(0.0, 0.01, manifest.total + 1).astype(np.float32)
        update[-1] = 0.5
        np.save(tmp_path / f"{site}.npy", update)
        updates[site] = (tmp_path / f"{site}.npy", 10 * (number + 1))
        largest = max(largest, float(np.abs(update[:-1]).max()))
    at = (tmp_path / "versions", learning.write_initial_version(spec, tmp_path / "versions"))
    made = {
        mode: exchange(updates, Training(exchange=mode), 1, at, manifest, tmp_path)
        for mode in ("ckks", "masking")
    }
    plain = read_version(at[0], in_the_clear(updates, at, manifest.digest), manifest.digest)
    for one in made.values():
        got = read_version(at[0], one.version, manifest.digest)
        np.testing.assert_allclose(got, plain, atol=6 * largest * 2.0**-15)
    assert np.abs(plain - read_version(*at, manifest.digest)).max() > 0.005
    words = 4 * (manifest.total + FRACTION_INTEGERS)
    masked = made["masking"]
    assert (masked.uploaded, masked.sent) == (words, 4 * words / 3), "two go up, two come down"


@pytest.mark.slow
def test_a_whole_run_writes_tables_and_can_be_taken_up_again(
    world: worlds.World, spec: RetrieverSpec, tmp_path: Path
) -> None:
    planned = bench.plan(world, seeds=(0,), quick=False)
    beside = [*ABLATIONS, *CONTROLS]
    works = [w for w in planned if w.part.share in (0.5, 1.0) and w.recipe not in beside]
    noised = next(r for r in ABLATIONS if r.name.endswith("noise multiplier 1"))
    clear = next(r for r in ABLATIONS if r.name.endswith("in the clear"))
    whole = Part(world.sites)
    works += [Work(world, recipe, whole) for recipe in (noised, clear, CONTROLS[1])]
    console = Console(quiet=True)

    def stop(done: dict[Work, cells.Cell]) -> None:
        if len(done) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(works, spec, tmp_path, console, stop, jobs=2)
    kept = len(list((tmp_path / "cells").glob("*.json")))
    assert 3 <= kept <= 5, "those that were finished, and what two others had just finished"
    fresh: list[int] = []
    done = bench.run(works, spec, tmp_path, console, lambda some: fresh.append(len(some)))
    assert len(fresh) == len(works) - kept, "what was finished is not made again"
    report.write(tmp_path / "out", done, quick=False, planned=len(done) + 1)

    told_of = (tmp_path / "out" / "learning.md").read_text()
    for recipe in RECIPES:
        assert f"| {recipe.name} |" in told_of
    rows = json.loads((tmp_path / "out" / "learning.json").read_text())["medquad"]
    assert len(rows) == len(works)
    assert (tmp_path / "out" / "learning-medquad-curves.svg").stat().st_size > 1000
    shared = [row for row in rows if row["recipe"] == "FedAvg" and not row["held_out"]]
    assert all(row["cost"]["update_bytes"] > 4 * row["cost"]["trained_values"] for row in shared)
    held_out = {row["held_out"]: row["sites"] for row in rows if row["held_out"]}
    assert held_out["west"] == ["north", "south"]
    means = {row["recipe"]: row["means"]["test"]["mrr@10"] for row in rows if not row["held_out"]}
    assert "| 1 | 12 | " in told_of, "the noise, its rounds"
    assert f"A full run, of which {len(works)} of {len(works) + 1} cells are done." in told_of
    assert "as good encrypted as in the clear" in told_of
    assert {noised.name, clear.name, CONTROLS[1].name} <= set(means)


@pytest.mark.slow
def test_institutions_are_dealt_out_anew_whole(
    data: Path, spec: RetrieverSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "_FEWEST", 2)
    dealt = worlds.split_anew(data, tmp_path, spec, 1.0)
    assert dealt.sites == ("site1", "site2", "site3")
    held: list[str] = []
    for site in dealt.sites:
        with Library.open(dealt.library(site), read_only=True) as library:
            own = {passage.document_id for passage in library.passages()}
            held += sorted(own)
            for pair in library.pairs("train"):
                assert set(pair.positives) <= own
            assert len(library.pairs("train")) >= 2
        for question in dealt.tests["test"].questions:
            assert (question.site == site) == bool(question.positives & own)
    with Library.open(dealt.library("pooled"), read_only=True) as library:
        assert sorted(held) == sorted(passage.document_id for passage in library.passages())
    assert len(dealt.tests["test"].questions) == 12
    again = worlds.split_anew(data, tmp_path / "again", spec, 1.0)
    assert again.tests["test"].questions == dealt.tests["test"].questions


def test_an_ablation_is_compared_with_what_it_changes() -> None:
    bases = {recipe.name: changed(recipe) for recipe in ABLATIONS}
    assert bases["hanse, shared version, 8 bits a value"] == "hanse, shared version"
    assert bases["pdd-as2 (head), no stage 2"] == "pdd-as2 (head)"
    last = "pfedrag, rounds of one epoch, scheduler at work"
    assert bases[last] == "pfedrag, rounds of one epoch"


@pytest.mark.slow
def test_a_run_is_learned_once_and_kept_whole(
    world: worlds.World, spec: RetrieverSpec, tmp_path: Path
) -> None:
    part = Part(("north", "south"), seed=7)
    data = (world, part, libraries_of(world, part, tmp_path))
    said: list[str] = []
    training = Training(rounds=1, options=TrainingOptions(local_epochs=1))
    first = learned(data, spec, training, 7, tmp_path / "1", said.append)
    assert said
    heard = len(said)
    second = learned(data, spec, training, 7, tmp_path / "2", said.append)
    assert len(said) == heard, "nothing was trained"
    np.testing.assert_array_equal(first.vector, second.vector)
    assert vars(first) | {"vector": 0} == vars(second) | {"vector": 0}
    other = learned(data, spec, training, 8, tmp_path / "3", said.append)
    assert len(said) > heard
    assert not np.array_equal(first.vector, other.vector)


def test_a_cell_has_another_name_when_anything_it_follows_from_changes(
    world: worlds.World, spec: RetrieverSpec
) -> None:
    recipe = next(r for r in RECIPES if r.name == "FedAvg")
    part = Part(world.sites)
    works = [
        Work(world, recipe, part),
        Work(world, recipe, Part(world.sites, seed=1)),
        Work(world, recipe, Part(world.sites, share=0.5)),
        Work(world, recipe, Part(world.sites[:2])),
        Work(world, recipe, Part(world.sites[:2]), held_out=world.sites[2]),
        *(Work(world, other, part) for other in RECIPES if other is not recipe),
    ]
    names = {json.dumps(cells.identity_of(work, spec), sort_keys=True) for work in works}
    assert len(names) == len(works)
