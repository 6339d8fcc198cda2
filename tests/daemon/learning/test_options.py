"""How to learn, from the operator's word to what a site trains and what becomes of the sum."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.recipes import RECIPES, ServerOptions
from config.settings import DepthSettings, LearningSettings, RobustSettings, TrainingSettings
from crypto.quantize import FRACTION_INTEGERS, LOSS_BOUND
from daemon.control.run_plan import ChoiceRefused, chosen, make_plan, put_noughts
from daemon.jobs.sums.integers import SumTerms, apply_integers
from daemon.learning.from_settings import learning_plan, options_from
from daemon.learning.options import TrainingOptions
from daemon.state.versions import ShapeManifest, read_whole_version, write_version
from peers.attempts.bundle import Bundle, Ground, derive_plan
from peers.plans.weights import clipped
from peers.wire.manifest import FederationManifest, ManifestSite
from peers.wire.messages import check
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.federation import Corpus, LiveFederation, LiveSite

ROOT = Path(__file__).parents[3]
TRAINING = TrainingSettings.model_validate({})
LEARNING = LearningSettings.model_validate({})
ROBUST = RobustSettings.model_validate({})
SHAPE = ShapeManifest("test", (("a", (3,)), ("b", (2, 2))))


def options(**choices: Any) -> TrainingOptions:
    """What a site is asked to do when these axes are chosen at the site that proposes."""
    words = [f"{axis}={value}" for axis, value in choices.items()]
    training, learning = chosen(TRAINING, LEARNING, "head", "fedavg", words)
    plan = make_plan(pb.TrainingPlan(), training, learning, ROBUST, "head")
    check(plan)
    return TrainingOptions.of(pb.TrainingPlan.FromString(plan.SerializeToString()))


# ---- what is on record of the papers' settings -------------------------------------

TABLE_8: dict[str, float] = {  # of pFedRAG, appendix D.3
    "local_epochs": 3,
    "learning_rate": 1e-5,
    "batch_size": 512,
    "weight_decay": 0.01,
    "temperature": 0.05,
    "window": 5,
    "stable_rounds": 3,
    "low_rounds": 4,
    "cooling_rounds": 5,
    "momentum_weight": 0.8,
    "kd_temperature": 3.0,
    "kd_epochs": 50,
    "kd_learning_rate": 0.1,
}


def test_each_setting_of_table_8_stands_beside_ours_and_why_it_differs() -> None:
    tables = RECIPES["pfedrag"].settings
    depth = DepthSettings.model_validate({}).model_dump()
    ours = tables["training"] | tables["learning"] | depth
    text = (ROOT / "docs/decisions/0018-recipes-and-axes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE))
    assert set(rows) == set(TABLE_8)
    for name, value in TABLE_8.items():
        theirs, here, why = (cell.strip() for cell in rows[name].split("|"))
        assert (float(theirs.split()[0]), float(here)) == (value, ours[name]), name
        assert why or value == ours[name], f"{name} differs without a reason"


# ---- from words to a plan, and from a plan to training ---------------------------


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        *(("negatives", value) for value in ("static", "bm25", "in_batch")),
        *(("batches", value) for value in ("random", "topic")),
        *(("distill", value) for value in ("none", "pairs", "matrix")),
        *(("start_from", value) for value in ("global", "local")),
        ("bm25_rounds", 2),
        ("random_negatives", 5),
        ("kd_weight", 2.5),
        ("proximal", 0.01),
        ("dropout", 0.2),
        ("weight_decay", 0.1),
        ("temperature", 0.1),
        ("local_epochs", 7),
        ("batch_size", 9),
        ("learning_rate", 0.002),
        ("hard_negatives", 3),
    ],
)
def test_a_choice_arrives_in_training_and_changes_nothing_else(axis: str, value: Any) -> None:
    plain, asked = options(), options(**{axis: value})
    assert getattr(asked, axis) == value
    different = {name for name in vars(plain) if vars(plain)[name] != vars(asked)[name]}
    assert different <= {axis, "seed"}


@pytest.mark.parametrize("rule", ["fedavg", "fedavgm", "fedadam"])
def test_what_becomes_of_the_mean_is_part_of_the_plan(rule: str) -> None:
    asked = options(aggregate=rule, server_learning_rate=0.1, momentum=0.5, adam_tau=0.01)
    step: dict[str, Any] = {"rule": rule, "learning_rate": 0.1, "momentum": 0.5}
    assert asked.server == ServerOptions(**step, second_momentum=0.99, adam_tau=0.01)


def test_uniform_weights_are_a_plan_that_counts_one_example_a_site() -> None:
    _, learning = chosen(TRAINING, LEARNING, "head", "", ["weigh=uniform"])
    plan = make_plan(pb.TrainingPlan(), TRAINING, learning, ROBUST, "head")
    assert plan.max_num_examples == 1
    examples = {"a": 10, "b": 9999, "c": 50}
    told = {site: min(count, plan.max_num_examples) for site, count in examples.items()}
    assert set(clipped(told, 1).values()) == {1}


def test_the_mode_whose_number_is_nought_is_chosen_by_name() -> None:
    masked = make_plan(
        pb.TrainingPlan(), TrainingSettings(mode="masking", min_pairs=8), LEARNING, ROBUST, "head"
    )
    assert masked.mode == pb.MASKING
    put_noughts(masked, ["mode"])
    assert masked.mode == pb.CKKS


@pytest.mark.parametrize("name", ["local_epoch", "colluders", "learning", ""])
def test_what_is_no_number_of_the_plan_can_not_be_nought(name: str) -> None:
    """Of its noise neither, where it has none."""
    with pytest.raises(ChoiceRefused, match=f"'{name}' is no number of this plan"):
        put_noughts(pb.TrainingPlan(local_epochs=3), ["local_epochs", name])


def test_words_warm_up_the_first_rounds_only() -> None:
    warm = options(bm25_rounds=2)
    assert [warm.in_round(n).negatives for n in (1, 2, 3)] == ["bm25", "bm25", "static"]
    none = options(bm25_rounds=2, negatives="in_batch")
    assert none.in_round(1).negatives == "in_batch"


def test_a_plan_of_a_site_that_knows_no_axes_trains_as_ever() -> None:
    plan = pb.TrainingPlan(local_epochs=3, batch_size=8, learning_rate=0.5, temperature=0.05)
    defaults = TrainingOptions(
        local_epochs=3, batch_size=8, learning_rate=0.5, hard_negatives=0, temperature=0.05
    )
    assert TrainingOptions.of(plan) == defaults


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_plan_that_sites_take(name: str) -> None:
    recipe = RECIPES[name]
    training, learning = chosen(TRAINING, LEARNING, recipe.adapt, name, ())
    plan = make_plan(pb.TrainingPlan(), training, learning, ROBUST, recipe.adapt)
    check(plan)
    assert plan.learning.recipe == name
    asked = options_from(
        TrainingSettings(**recipe.settings["training"]),
        LearningSettings(**recipe.settings["learning"]),
    )
    for axis in ("negatives", "batches", "distill", "start_from", "temperature", "dropout"):
        assert getattr(asked, axis) == getattr(recipe, axis)


@pytest.mark.parametrize(
    ("recipe", "choices", "told"),
    [
        ("fedrag", (), "there are hanse, fedavg"),
        ("fedsearch", (), "this federation exchanges 'head'"),
        ("", ("dropout",), "expected a number"),
        ("", ("dropout=2",), "lower it to 0.9 or less"),
        ("", ("floor=-1",), r"learning\.floor \(called adam_tau now\) = -1"),
        ("", ("negatives=none",), 'expected one of "static", "bm25", "in_batch"'),
        ("", ("willing=false",), "is no choice"),
        ("", ("min_pairs=2",), "is no choice"),
        ("", ("recipe=pfedrag",), "is no choice"),
        ("", ("local_only_rounds=3",), "is no choice"),
        ("", ("",), "axes are adam_tau, aggregate"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_can(
    recipe: str, choices: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ChoiceRefused, match=told):
        chosen(TRAINING, LEARNING, "head", recipe, choices)


@given(words=st.lists(st.text(max_size=30), max_size=4))
def test_whatever_is_typed_is_taken_or_explained(words: list[str]) -> None:
    try:
        _, learning = chosen(TRAINING, LEARNING, "head", "", words)
    except ChoiceRefused as refused:
        assert str(refused)
    else:
        check(learning_plan(learning))


# ---- what the sum becomes --------------------------------------------------------


def applied(folder: Path, parent: bytes, server: ServerOptions, integers: Any) -> bytes:
    terms = SumTerms(SHAPE.sizes, [0, 0], 2.0, parent, SHAPE.digest, folder, None, server)
    return apply_integers(np.asarray(integers, dtype=np.int64), 16, terms).model_digest


@pytest.mark.parametrize(("units", "loss"), [(-(2**20), 0.0), (2**20, LOSS_BOUND)])
def test_a_loss_is_one_whatever_a_contributor_sends_for_it(
    tmp_path: Path, units: int, loss: float
) -> None:
    """Peers would refuse any other number, and blame the honest site that tells it."""
    parent, _ = write_version(tmp_path, SHAPE.digest, np.zeros(SHAPE.total, np.float32))
    integers = np.zeros(SHAPE.total + 2, np.int64)
    integers[-2] = units
    terms = SumTerms(SHAPE.sizes, [0, 0], 2.0, parent, SHAPE.digest, tmp_path)
    assert apply_integers(integers, 16, terms).mean_loss == loss


@pytest.mark.parametrize("rule", ["fedavgm", "fedadam"])
def test_momentum_goes_on_from_the_version_that_a_site_fetched(tmp_path: Path, rule: Any) -> None:
    """Two holders, of whom the second has the first round's version from its file alone."""
    server = ServerOptions(rule, 0.5)
    chance = np.random.default_rng(5)
    sums = chance.integers(-30000, 30000, (2, SHAPE.total + FRACTION_INTEGERS))
    start = np.zeros(SHAPE.total, dtype=np.float32)
    genesis, _ = write_version(tmp_path / "one", SHAPE.digest, start)
    first = applied(tmp_path / "one", genesis, server, sums[0])
    vector, moments = read_whole_version(tmp_path / "one", first, SHAPE.digest)
    assert moments is not None
    fetched, _ = write_version(tmp_path / "two", SHAPE.digest, vector, moments)
    assert fetched == first
    seconds = [applied(tmp_path / at, first, server, sums[1]) for at in ("one", "two")]
    assert seconds[0] == seconds[1]
    bare, _ = write_version(tmp_path / "three", SHAPE.digest, vector)
    assert applied(tmp_path / "three", bare, server, sums[1]) != seconds[0]


# ---- what sites tell of their documents ------------------------------------------


def test_the_range_of_complexity_is_that_of_those_who_told() -> None:
    told = {"a": 2.5, "b": 0.0, "c": 1.5, "d": 4.0}
    made = planned(told)
    assert (made.least_complexity, made.most_complexity) == (1.5, 4.0)
    assert planned(dict.fromkeys(told, 0.0)).most_complexity == 0.0


def planned(complexity: dict[str, float]) -> pb.Plan:
    """What follows from promises of sites that tell this of their documents."""
    sites = tuple(ManifestSite(site, f"{site}:1") for site in complexity)
    ground = Ground("test", FederationManifest("test", 1, sites), 1, 0, bytes(32))
    promises = {
        site: pb.Promise(num_examples=5, willing=True, complexity=told)
        for site, told in complexity.items()
    }
    run = pb.Run(plan=pb.TrainingPlan(max_num_examples=10))
    certificates = dict.fromkeys(complexity, b"")
    bundle = Bundle(pb.Bundle(), run, promises, certificates, None, None, bytes(32))
    return derive_plan(bundle, ground)


# ---- live --------------------------------------------------------------------------


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_federation_learns_as_one_site_chose_and_layers_stay_at_home(
    tmp_path: Path,
) -> None:
    sites = ["alder", "birch", "cedar"]
    async with LiveFederation.start(
        tmp_path,
        sites,
        tables={
            "retriever": {"personal": "tiered_head"},
            "learning": {"recipe": "pfedrag"},
            "depth": {"tell_complexity": True},
        },
    ) as live:
        # The others write alike; this site has a longer document of words of its own.
        report = " ".join(f"lock{number} basin{number} gauge{number}." for number in range(200))
        cedar = live.sites["cedar"].corpus.documents
        cedar.append(control.Document(id="cedar/report", title="R", text=report, split="train"))
        await live.ingest_all()
        stub = live.sites["alder"].stub
        choices = ["aggregate=fedavgm", "distill=matrix", "local_epochs=1"]
        request = control.TrainRequest(rounds=2, choices=choices)
        await stub.Train(request, timeout=60)
        await live.until_head(2, within_s=240)
        tiers = {}
        for site in live.sites.values():
            reply = await site.stub.Learning(control.LearningRequest(), timeout=60)
            plan = reply.plan.learning
            assert (plan.recipe, plan.aggregate, plan.distill) == (
                "pfedrag",
                pb.AGGREGATE_FEDAVGM,
                pb.DISTILL_MATRIX,
            )
            assert reply.reason, site.log
            tiers[site.id] = reply.tier
            personal = site.folder / "state" / "personal"
            assert {"round-1.safetensors", "round-2.safetensors"} <= {
                path.name for path in personal.iterdir()
            }
        # By their place in the range of the sites' scores (pFedRAG, Eq. 5).
        assert tiers == {"alder": "base", "birch": "base", "cedar": "extended"}
        digests = {(await site.status()).model_digest for site in live.sites.values()}
        assert len(digests) == 1


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_site_answers_with_what_it_found_best_also_during_the_next_run(
    tmp_path: Path,
) -> None:
    sites = ["alder", "birch", "cedar"]
    tables: dict[str, dict[str, Any]] = {
        "retriever": {"personal": "mixture"},
        "training": {"learning_rate": 0.3, "batch_size": 4},  # so that it does harm
        "learning": {"local_only_rounds": 2},
    }
    async with LiveFederation.start(tmp_path, sites, tables=tables) as live:
        alder = live.sites["alder"]
        give_validation_pairs(alder.corpus)  # that can judge; the others have none
        await live.ingest_all()
        await live.train("birch", 1, seed=1)  # what is drawn does good now and then
        before = await fitted(alder)
        assert before.untrained, "its validation pairs say so"
        for site in live.sites.values():
            reply = await fitted(site)
            assert reply.own_share == 0.0 or site is alder, "nothing to judge by: the shared one"
            (folder,) = [path.name for path in (site.folder / "state" / "index").iterdir()]
            assert not folder.startswith(reply.personal_digest.hex()), "as the mixture embeds"
            asked = control.AskRequest(question="who looks after the lantern?")
            answer = await site.stub.Ask(asked, timeout=60)
            assert answer.passages
            assert answer.model_digest == reply.personal_digest

        await live.sites["cedar"].stub.Train(control.TrainRequest(rounds=1000), timeout=60)
        async with asyncio.timeout(120):
            while True:
                during = await alder.stub.Learning(control.LearningRequest(), timeout=60)
                if during.personal_digest not in (b"", before.personal_digest):
                    break
                await asyncio.sleep(0.05)
        assert during.carried
        assert during.untrained, "it does not fall back to the version that does worse"
        # Nobody waits for a thousand rounds: what is stopped is over as well.
        await live.sites["birch"].stub.StopTraining(control.StopTrainingRequest(), timeout=60)
        assert not (await fitted(alder)).carried


def give_validation_pairs(corpus: Corpus) -> None:
    """Two more questions for each document that may be learned from."""
    for pair in [pair for pair in corpus.pairs if pair.split == "train"]:
        topic = pair.query.removeprefix("who looks after the ")
        for again in (f"whose {topic}", f"the wardens and the {topic}"):
            corpus.pairs.append(control.Pair(query=again, positives=pair.positives, split="valid"))


async def fitted(site: LiveSite) -> control.LearningReply:
    """When a site answers with something of its own that was made for its newest version."""
    async with asyncio.timeout(120):
        while True:
            reply = await site.stub.Learning(control.LearningRequest(), timeout=60)
            status = await site.status()
            folders = list((site.folder / "state" / "index").iterdir())
            current = reply.personal_digest == status.model_digest and not reply.carried
            if current and len(folders) == 1 and status.phase in ("idle", "committed"):
                return reply
            await asyncio.sleep(0.2)
