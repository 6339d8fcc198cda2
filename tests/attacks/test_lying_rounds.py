"""Real daemons whose coordinator lies to read one site's update; with each defence, and without.

Each lie is told by the coordinator of a round's first attempt (programs/lying_fedd.py). With
all defences nothing of it is opened, or nothing that tells more than an honest sum, and the
next attempt commits. The cosine that is printed is that of the victim's update with what the
liar can work out: the sum, without its own update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.arrays import Float64
from peers.plans.weights import DOMINANCE, clipped
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.attacks.programs.lying_fedd import HEAVY
from tests.attacks.test_lying_coordinator import shared, update, vector_of
from tests.benchmarks.attacks import poisoning
from tests.support.federation import Corpus, LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.faults,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

SITES = ["alder", "birch", "cedar", "dogwood"]
VICTIM = "alder"
PROGRAM = Surroundings(program="tests.attacks.programs.lying_fedd")
ROUNDS = {"phase_deadline_s": 15.0, "heartbeat_s": 1.0}  # one liar lets a phase pass
DATA = poisoning.DATA.parent / "medquad_tiny"
NOISE = pb.PrivacyPlan(clip_norm=0.5, noise_multiplier=1.0)
# Of updates that have nothing in common, where the largest one weighs the most it may.
BOUND = float(np.sqrt(1 / DOMINANCE))


def cosine(a: Float64, b: Float64) -> float:
    """Of the angle between two vectors."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def lead_of(round_: int, names: list[str]) -> str:
    """Who coordinates its first attempt."""
    return names[round_ % len(names)]


def sum_of(
    live: LiveFederation, round_: int, weights: Mapping[str, float], attempt: int = 0
) -> Float64:
    """What these sites' updates make, weighted, as nobody but a test can add them."""
    total: Float64 = np.sum(
        [weight * update(live.sites[s], round_, attempt) for s, weight in weights.items()], axis=0
    )
    return total


async def step_of(site: LiveSite, number: int) -> Float64:
    """What a committed round added to the version before it."""
    rounds = {one.certificate.body.round: one.certificate.body for one in await site.rounds()}
    body = rounds[number]
    return shared(site, body.model_digest) - shared(site, body.parent_digest)


def opened(site: LiveSite, round_: int, attempt: int) -> Float64:
    """The version that a site made of an attempt's sum, committed or not."""
    return vector_of(site.folder / f"opened-{round_}-{attempt}.safetensors")


async def a_round(
    live: LiveFederation,
    lie: str,
    *,
    mode: pb.Mode.ValueType = pb.CKKS,
    privacy: pb.PrivacyPlan | None = None,
    most: int = HEAVY,
) -> tuple[str, control.Round]:
    """A round whose first coordinator lies, if there is a lie; who that is, and how it went."""
    asking = live.sites[VICTIM]
    number = (await asking.status()).head_round + 1
    liar = lead_of(number, sorted(live.sites))
    if lie:
        (live.sites[liar].folder / "lie").write_text(f"{lie} {VICTIM}")
    plan = pb.TrainingPlan(mode=mode, privacy=privacy, max_num_examples=most, min_participants=3)
    await asking.stub.Train(control.TrainRequest(rounds=1, plan=plan), timeout=60)
    await live.until_head(number, within_s=180)
    (live.sites[liar].folder / "lie").unlink(missing_ok=True)
    (last,) = [one for one in await asking.rounds() if one.certificate.body.round == number]
    return liar, last


def fits(step: Float64, weights: Mapping[str, float], meant: Float64) -> bool:
    """Whether a step is this sum's mean, but for rounding to 16 bits."""
    total = sum(weights.values())
    return bool(np.abs(total * step - meant).max() < 5e-4 * np.abs(meant).max())


def refused(live: LiveFederation, liar: str, told: str) -> None:
    """Every honest site has refused the liar, in these words."""
    for name, site in live.sites.items():
        if name != liar:
            assert told in site.log, f"{name} does not say: {told}"


def failed(last: control.Round) -> str:
    """Why the liar's attempt failed."""
    first = next(one for one in last.attempts if one.attempt == 0)
    assert first.outcome == "failed"
    return str(first.reason)


# ---- with every defence --------------------------------------------------------------


async def test_a_coordinator_that_lies_in_an_encrypted_round_learns_nothing(
    tmp_path: Path,
) -> None:
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        alike = dict.fromkeys(SITES, 1.0)
        for lie, privacy, told in (
            ("weighs", None, "signature"),
            ("drops-privacy", NOISE, "signature"),
        ):
            liar, last = await a_round(live, lie, privacy=privacy)
            number = last.certificate.body.round
            refused(live, liar, told)
            print(f"{lie}, led by {liar}: {failed(last)}")
            assert last.certificate.attempt == 1
            assert list(last.certificate.body.contributors) == SITES
            assert last.report.noise_multiplier == (privacy.noise_multiplier if privacy else 0)
            for site in live.sites.values():
                assert not (site.folder / f"opened-{number}-0.safetensors").exists()
            step = await step_of(live.sites[VICTIM], number)
            others = {**alike, liar: 0.0}
            left = len(SITES) * step - update(live.sites[liar], number, 1)
            learnt = cosine(left, update(live.sites[VICTIM], number, 1))
            honest = cosine(sum_of(live, number, others, 1), update(live.sites[VICTIM], number, 1))
            print(f"  cosine with {VICTIM}'s update {learnt:.6f}; of an honest sum {honest:.6f}")
            if privacy is None:
                assert fits(step, alike, sum_of(live, number, alike, 1))
        liar, last = await a_round(live, "two-sums")
        number = last.certificate.body.round
        refused(live, liar, "two statements in one attempt")
        paths = [site.folder / f"opened-{number}-0.safetensors" for site in live.sites.values()]
        made = {path.read_bytes() for path in paths if path.exists()}
        assert len(made) <= 1
        assert not (live.sites[liar].folder / f"told-{number}-0.safetensors").exists()
        print(f"two-sums, led by {liar}: {len(made)} sum of its attempt was opened")


async def test_a_coordinator_that_lies_in_a_masked_round_learns_nothing(tmp_path: Path) -> None:
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        for lie, told in (
            ("weighs", "signature"),
            ("scales", "something else"),
            ("hands-out", "1 sites have opened the sum, 2 prove a version"),
        ):
            liar, last = await a_round(live, lie, mode=pb.MASKING)
            number, attempt = last.certificate.body.round, last.certificate.attempt
            refused(live, liar, told)
            print(f"{lie}, led by {liar}: {failed(last)}")
            assert attempt == 1
            # Who claims a version that is not proven is not believed in the next attempt, either.
            names = [site for site in SITES if site != liar or lie != "hands-out"]
            assert list(last.certificate.body.contributors) == names
            step, alike = await step_of(live.sites[VICTIM], number), dict.fromkeys(names, 1.0)
            assert fits(step, alike, sum_of(live, number, alike, 1))
            left = sum_of(live, number, {s: 1.0 for s in names if s != liar}, 1)
            learnt = cosine(left, update(live.sites[VICTIM], number, 1))
            print(f"  cosine with {VICTIM}'s update {learnt:.6f}, of an honest sum")


async def test_two_attempts_of_a_round_make_the_same_sum(tmp_path: Path) -> None:
    """What differs by one site is that site's update; what is made again tells nothing new."""
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        liar, last = await a_round(live, "leaves-out", mode=pb.MASKING)
        number = last.certificate.body.round
        without_victim = [site for site in SITES if site != VICTIM]
        print(f"leaves-out, led by {liar}: {failed(last)}")
        assert list(last.certificate.body.contributors) == without_victim
        again = shared(live.sites[VICTIM], last.certificate.body.model_digest)
        assert np.array_equal(opened(live.sites[liar], number, 0), again)
        print("  the second attempt made the same version: the difference is nought")

        liar, last = await a_round(live, "sulks", mode=pb.MASKING)
        number, body = last.certificate.body.round, last.certificate.body
        left = await difference(live, liar, last)
        victims = update(live.sites[VICTIM], number, last.certificate.attempt)
        print(
            f"sulks, led by {liar}: drawn anew by {', '.join(body.contributors)}; cosine of the "
            f"difference with {VICTIM}'s update {cosine(left, victims):.6f}, of the sum alone "
            f"{cosine(await step_of(live.sites[VICTIM], number), victims):.6f}: a limit, "
            "which only differential privacy bounds"
        )
        assert list(body.contributors) == [site for site in SITES if site != liar]


async def test_a_sum_drawn_anew_tells_an_update_where_training_draws_nothing(
    tmp_path: Path,
) -> None:
    """A limit: documents of one passage, no more pairs than a batch. Two trainings are alike."""
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        for site in live.sites.values():
            for document in site.corpus.documents:
                document.text = document.text.split(". ")[0] + "."
        await live.ingest_all()
        liar, last = await a_round(live, "sulks", mode=pb.MASKING)
        number, attempt = last.certificate.body.round, last.certificate.attempt
        victims = update(live.sites[VICTIM], number, attempt)
        learnt = cosine(await difference(live, liar, last), victims)
        print(
            f"sulks, led by {liar}: drawn anew by sites that train in one batch; cosine of the "
            f"difference with {VICTIM}'s update {learnt:.6f}, of the sum alone "
            f"{cosine(await step_of(live.sites[VICTIM], number), victims):.6f}: a limit, "
            "which only differential privacy bounds"
        )
        assert learnt > 0.999


async def difference(live: LiveFederation, liar: str, last: control.Round) -> Float64:
    """The committed sum, less the one that the liar opened for itself before; all weigh alike.

    What it knows of itself it takes off.
    """
    body = last.certificate.body
    number, attempt = body.round, last.certificate.attempt
    parent = shared(live.sites[liar], body.parent_digest)
    first = 3 * (opened(live.sites[liar], number, 0) - parent)
    first -= update(live.sites[liar], number, 0)
    second = len(body.contributors) * (shared(live.sites[liar], body.model_digest) - parent)
    if liar in body.contributors:
        own = live.sites[liar].folder / f"update-{number}-{attempt}.npy"
        second -= update(live.sites[liar], number, attempt if own.exists() else 0)
    return second - first


@pytest.mark.parametrize("mode", ["ckks", "masking"])
async def test_honest_numbers_of_examples_of_which_one_is_huge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """No lie at all: 100,000 examples among sites with 10."""
    step, weights, live_updates = await counted(tmp_path, monkeypatch, mode)
    told = tell_what_is_left(step, weights, live_updates, f"{mode}, clipped to {weights}")
    assert max(weights.values()) == 2 * min(weights.values())
    # Were the honest updates at right angles it would be the bound; alike as they are, more.
    assert told < 0.9999


@pytest.mark.endurance
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA} (set HANSE_DATA)")
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "undefended"])
async def test_real_training_on_real_questions_of_which_one_site_has_100_000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: bool
) -> None:
    """Three institutes' own passages and questions; the largest says that it has many more."""
    if not clip:
        monkeypatch.setenv("HANSE_UNDEFENDED", "weights")
    folders = dict(zip((VICTIM, "birch", "cedar"), sorted(DATA.glob("*/")), strict=False))
    corpora = {site: institute(site, folder) for site, folder in folders.items()}
    step, weights, updates = await counted(tmp_path, monkeypatch, "ckks", clip=clip, of=corpora)
    told = tell_what_is_left(step, weights, updates, f"real data, weights {weights}")
    assert told < 0.9999 if clip else told > 0.99999


def institute(site: str, folder: Path) -> Corpus:
    """An institute's passages and questions, as this site's."""

    def rows(name: str) -> list[dict[str, Any]]:
        text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    made = Corpus(site)
    fields = ("id", "title", "text", "split")
    made.documents = [control.Document(**{f: row[f] for f in fields}) for row in rows("documents")]
    made.pairs = [
        control.Pair(query=row["query"], positives=row["positives"], split="train")
        for row in rows("pairs_train")
    ]
    return made


async def counted(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    *,
    clip: bool = True,
    of: Mapping[str, Corpus] | None = None,
) -> tuple[Float64, dict[str, int], dict[str, Float64]]:
    """A round of three sites with 100,000, 10 and 10; its step, their weights and updates."""
    counts = {VICTIM: HEAVY, "birch": 10, "cedar": 10}
    monkeypatch.setenv("HANSE_COUNTS", " ".join(f"{s}={n}" for s, n in counts.items()))
    async with LiveFederation.start(
        folder, list(counts), surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        for site, corpus in (of or {}).items():
            live.sites[site].corpus = corpus
        await live.ingest_all()
        asked = pb.MASKING if mode == "masking" else pb.CKKS
        _, last = await a_round(live, "", mode=asked)
        weights = clipped(counts, 1) if clip else counts
        attempt = last.certificate.attempt
        step = await step_of(live.sites[VICTIM], 1)
        assert fits(step, weights, sum_of(live, 1, weights, attempt))
        return step, weights, {s: update(live.sites[s], 1, attempt) for s in counts}


def tell_what_is_left(
    step: Float64, weights: Mapping[str, int], updates: Mapping[str, Float64], what: str
) -> float:
    """Print and return the cosine that is left when another site takes off its own."""
    looking = "birch"
    left = sum(weights.values()) * step - weights[looking] * updates[looking]
    cosines = [cosine(updates[a], updates[b]) for a, b in combinations(sorted(updates), 2)]
    longest = max(float(np.linalg.norm(u)) for u in updates.values())
    shortest = min(float(np.linalg.norm(u)) for u in updates.values())
    told = cosine(left, updates[VICTIM])
    print(
        f"{what}: cosine of the sum with {VICTIM}'s update {cosine(step, updates[VICTIM]):.6f}, "
        f"of what {looking} has when it takes off its own {told:.6f}; honest updates among "
        f"each other {np.mean(cosines):.6f} (bound for 0: {BOUND:.3f}), lengths "
        f"{shortest:.3g} to {longest:.3g}"
    )
    return told


# ---- each without its defence: `make attacks` ---------------------------------------------


@pytest.mark.endurance
@pytest.mark.parametrize("mode", ["ckks", "masking"])
async def test_without_clipping_a_huge_number_of_examples_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("HANSE_UNDEFENDED", "weights")
    step, weights, updates = await counted(tmp_path, monkeypatch, mode, clip=False)
    assert tell_what_is_left(step, weights, updates, f"{mode}, not clipped") > 0.99999
    assert cosine(step, updates[VICTIM]) > 0.99999


@pytest.mark.endurance
async def test_without_signed_promises_a_coordinator_weighs_and_drops_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without the weights' bound, which would hold against that lie alone."""
    monkeypatch.setenv("HANSE_UNDEFENDED", "promises,weights")
    names = SITES[:3]
    async with LiveFederation.start(
        tmp_path, names, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        for mode in (pb.CKKS, pb.MASKING):
            liar, last = await a_round(live, "weighs", mode=mode)
            number = last.certificate.body.round
            assert last.certificate.attempt == 0
            step = await step_of(live.sites[VICTIM], number)
            learnt = cosine(step, update(live.sites[VICTIM], number, 0))
            print(f"weighs, {pb.Mode.Name(mode)}, led by {liar}: cosine {learnt:.6f}")
            assert learnt > 0.99999
        liar, last = await a_round(live, "drops-privacy", privacy=NOISE)
        number = last.certificate.body.round
        assert last.certificate.attempt == 0
        step = await step_of(live.sites[VICTIM], number)
        assert fits(step, dict.fromkeys(names, 1.0), sum_of(live, number, dict.fromkeys(names, 1)))
        print(f"drops-privacy: committed with noise {last.report.noise_multiplier}")
        assert last.report.noise_multiplier == 0


@pytest.mark.endurance
async def test_without_one_scale_the_others_send_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSE_UNDEFENDED", "scale")
    names = SITES[:3]
    async with LiveFederation.start(
        tmp_path, names, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        liar, last = await a_round(live, "scales", mode=pb.MASKING)
        assert last.certificate.attempt == 0
        left = 3 * await step_of(live.sites[VICTIM], 1) - update(live.sites[liar], 1, 0)
        learnt = cosine(left, update(live.sites[VICTIM], 1, 0))
        print(f"scales, led by {liar}: cosine {learnt:.6f}")
        assert learnt > 0.999


@pytest.mark.endurance
async def test_without_one_statement_an_attempt_two_sums_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSE_UNDEFENDED", "one statement")
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        liar, last = await a_round(live, "two-sums")
        assert last.certificate.attempt == 0
        here = live.sites[liar]
        body = last.certificate.body
        parent = shared(here, body.parent_digest)
        without_victim = 3 * (vector_of(here.folder / "told-1-0.safetensors") - parent)
        stolen = 4 * (shared(here, body.model_digest) - parent) - without_victim
        learnt = cosine(stolen, update(live.sites[VICTIM], 1, 0))
        print(f"two-sums, led by {liar}: cosine {learnt:.6f}")
        assert learnt > 0.999


@pytest.mark.endurance
@pytest.mark.parametrize("removed", ["repeating", "repeating,drawing"])
async def test_without_the_same_sum_again_the_difference_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """With a draw of each attempt's own it is blurred by what training draws."""
    monkeypatch.setenv("HANSE_UNDEFENDED", removed)
    async with LiveFederation.start(
        tmp_path, SITES, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        liar, last = await a_round(live, "leaves-out", mode=pb.MASKING)
        assert last.certificate.attempt == 1
        assert list(last.certificate.body.contributors) == SITES
        left = await difference(live, liar, last)
        learnt = cosine(left, update(live.sites[VICTIM], 1, 1))
        print(f"leaves-out without {removed}, led by {liar}: cosine {learnt:.6f}")
        assert learnt > (0.999 if "drawing" in removed else 0)


@pytest.mark.endurance
async def test_without_proof_of_the_version_who_opens_alone_hands_out_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSE_UNDEFENDED", "proof of version")
    names = SITES[:3]
    async with LiveFederation.start(
        tmp_path, names, surroundings=PROGRAM, connect_s=500, rounds=ROUNDS, faulty_sites=1
    ) as live:
        await live.ingest_all()
        liar, last = await a_round(live, "hands-out", mode=pb.MASKING)
        assert last.certificate.attempt == 0
        step = await step_of(live.sites[VICTIM], 1)
        print(f"hands-out, led by {liar}: committed the parent and {step.mean():.3f} everywhere")
        assert np.allclose(step, 1.0, atol=1e-5)
