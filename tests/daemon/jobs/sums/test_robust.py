"""A robust round's arithmetic, from updates on disk to the new version's bits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32
from crypto.ckks.parameters import choose_measurable
from crypto.ckks.sums import DealtKey
from crypto.quantize import LOSS_BOUND, CryptoError
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding, SumTerms, measure_update
from daemon.process.workers import Worker
from daemon.rounds.catch_up import too_large
from daemon.state.versions import ShapeManifest, read_version, write_version
from peers.attempts import scale
from peers.plans import robust
from peers.plans.robust import Selection
from peers.plans.weights import weights
from peers.wire.vectors import largest_size
from proto import federation_pb2 as pb
from tests.daemon.jobs.sums.proofs import check_of, proven

SHAPE = ShapeManifest("test", (("a", (300, 100)), ("b", (500,))))
SITES = ("a", "b", "c", "d", "e", "f", "g")
HOLDER, COORDINATOR = (1, 0), (1, 1)


def plan(rule: pb.RobustRule.ValueType = pb.ROBUST_MULTI_KRUM) -> pb.Plan:
    training = pb.TrainingPlan(bits=16, min_participants=4, robust=rule, byzantine_sites=2)
    participants = [pb.Participant(site=s, num_examples=60 + 10 * k) for k, s in enumerate(SITES)]
    full = max(one.num_examples for one in participants)
    return pb.Plan(participants=participants, training=training, full_weight=full, coordinator="a")


def honest(seed: int) -> Float32:
    common = np.random.default_rng(0).normal(size=SHAPE.total)
    own = np.random.default_rng(seed).normal(size=SHAPE.total)
    return (0.01 * (common + 0.5 * own)).astype(np.float32)


@pytest.fixture
def keys() -> DealtKey:
    for left in [(2, 0), (2, 1), HOLDER, COORDINATOR]:
        ckks.forget(*left)
    dealt = ckks.deal_key(*HOLDER, len(SITES), 16, measurable=True)
    ckks.hold_context(
        *COORDINATOR, dealt.public, secret=False, contributors=7, bits=16, measurable=True
    )
    return dealt


def upload(folder: Path, vectors: list[Float32]) -> tuple[list[tuple[str, Path, bytes]], int]:
    """Every site measures and encrypts; the uploads and the common exponent."""
    ckks.start_sum(*COORDINATOR, SHAPE.sizes, check_of("a", SITES, "a"))
    weight = weights(plan())
    measured = []
    for site, vector in zip(SITES, vectors, strict=True):
        path = folder / f"{site}.npy"
        np.save(path, np.append(vector, np.float32(0.5 / LOSS_BOUND)))
        measured += measure_update(path, SHAPE.sizes, weight[site])
    exponent = max(measured)
    uploads = []
    for site in SITES:
        role = COORDINATOR if site == "a" else HOLDER
        out = folder / f"{site}.encrypted"
        exponents = [exponent] * len(SHAPE.sizes)
        uploaded = ckks.encrypt_update(
            *(*role, folder / f"{site}.npy", SHAPE.sizes, Hiding(weight[site], exponents), out),
            check=check_of(site, SITES, "a"),
        )
        uploads.append((site, out, uploaded.nonce))
    return uploads, exponent


def selected(question: ckks.Question, path: Path, exponent: int, made: pb.Plan) -> Selection:
    statement = pb.Statement(byzantine_sites=made.training.byzantine_sites)
    statement.contributions.extend(pb.Signed(site=site) for site in question.sites)
    products, imaginary = ckks.decrypt_products(*HOLDER, path, question.sites)
    answer = pb.Products(products=products, imaginary=imaginary)
    return robust.choose(made, statement, answer, exponent)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pb.ROBUST_NORM, pb.ROBUST_MULTI_KRUM])
def test_two_attackers_are_left_out_and_the_rest_is_summed_exactly(
    tmp_path: Path, rule: pb.RobustRule.ValueType, keys: DealtKey
) -> None:
    vectors = [honest(seed) for seed in range(1, 8)]
    vectors[2] *= 30
    vectors[5] *= -10
    made = plan(rule)
    uploads, exponent = upload(tmp_path, vectors)
    asked_at = tmp_path / "products"
    question = ckks.compare_updates(*COORDINATOR, uploads, SHAPE.total, asked_at)
    assert question.sites == SITES
    assert question.digest == hashlib.sha256(asked_at.read_bytes()).digest()
    chosen = selected(question, asked_at, exponent, made)
    assert {"c", "f"} <= chosen.rejected.keys()
    if rule == pb.ROBUST_NORM:
        assert chosen.kept == ("a", "b", "d", "e", "g")
        norm = float(np.linalg.norm(vectors[2]))
        said = float(chosen.rejected["c"].split()[1])
        assert said == pytest.approx(norm, rel=0.03)  # in the update's own units
    weight = weights(made)
    for site, path, nonce in uploads:
        if site in chosen.kept:
            ckks.add_update(*COORDINATOR, site, path, nonce)
    finished = ckks.finish_sum(*COORDINATOR, tmp_path / "sum")
    assert tuple(site for site, _ in finished.nonces) == chosen.kept
    versions = tmp_path / "versions"
    parent, _ = write_version(versions, SHAPE.digest, honest(99))
    total = sum(weight[site] for site in chosen.kept)
    exponents = [exponent] * len(SHAPE.sizes)
    applied = ckks.apply_sum(
        *HOLDER,
        tmp_path / "sum",
        SumTerms(SHAPE.sizes, exponents, total, parent, SHAPE.digest, versions),
        answer=proven(HOLDER, COORDINATOR, check_of("b", SITES, "a"), finished),
    )
    mean = sum(weight[site] * vectors[SITES.index(site)].astype(np.float64) for site in chosen.kept)
    new = read_version(versions, applied.model_digest, SHAPE.digest)
    unit = 2.0**exponent / 32767
    assert np.abs(new - honest(99) - mean / total).max() < 1.01 * unit * len(chosen.kept) / total
    assert applied.mean_loss == pytest.approx(0.5, abs=1e-4)


@pytest.mark.slow
def test_a_malformed_update_is_refused_by_name_and_the_others_are_compared(
    tmp_path: Path, keys: DealtKey
) -> None:
    uploads, _ = upload(tmp_path, [honest(seed) for seed in range(1, 8)])
    raw = uploads[3][1].read_bytes()
    uploads[3][1].write_bytes(raw[:100] + b"\xff" * 8 + raw[108:])
    uploads[6][1].write_bytes(raw[:-1])
    uploads[1] = (*uploads[1][:2], b"another nonce...")  # than it signed: it can't be added
    question = ckks.compare_updates(*COORDINATOR, uploads, SHAPE.total, tmp_path / "products")
    assert question.sites == ("a", "c", "e", "f")
    assert [site for site, _ in question.refused] == ["b", "d", "g"]


@pytest.mark.slow
async def test_key_holders_answer_with_equal_bits(tmp_path: Path, keys: DealtKey) -> None:
    """Each in a process of its own: f + 1 equal answers decide, so equal they must be."""
    uploads, _ = upload(tmp_path, [honest(seed) for seed in range(1, 8)])
    path = tmp_path / "products"
    question = ckks.compare_updates(*COORDINATOR, uploads, SHAPE.total, path)
    worker = Worker("crypto", threads=2)
    try:
        held = await worker.run(
            ckks.hold_context,
            *(*HOLDER, keys.secret),
            secret=True,
            contributors=7,
            bits=16,
            measurable=True,
        )
        assert held == hashlib.sha256(keys.secret).digest()
        theirs = await worker.run(ckks.decrypt_products, *HOLDER, path, question.sites)
    finally:
        await worker.stop()
    assert ckks.decrypt_products(*HOLDER, path, question.sites) == theirs


@pytest.mark.slow
def test_only_a_key_holder_decrypts_products(tmp_path: Path, keys: DealtKey) -> None:
    uploads, _ = upload(tmp_path, [honest(seed) for seed in range(1, 8)])
    path = tmp_path / "products"
    question = ckks.compare_updates(*COORDINATOR, uploads, SHAPE.total, path)
    with pytest.raises(CryptoError, match="no secret key"):
        ckks.decrypt_products(*COORDINATOR, path, question.sites)


def test_what_a_robust_round_may_upload_follows_from_its_plan() -> None:
    tags = {pb.ENCRYPTED_UPDATE: 16 + 24 * 7, pb.ENCRYPTED_SUM: 0}
    for kind, trailer in tags.items():
        most = largest_size(choose_measurable(7, 16), SHAPE.total + 2, trailer=trailer)
        assert too_large(kind, most, plan(), SHAPE) is None
        assert "more than the" in (too_large(kind, most + 1, plan(), SHAPE) or "")
    assert too_large(pb.ENCRYPTED_PRODUCTS, 8_258_114, plan(), SHAPE) is None
    assert "dot products" in (too_large(pb.ENCRYPTED_PRODUCTS, 8_258_115, plan(), SHAPE) or "")


# ---- scales ------------------------------------------------------------------------------


def test_a_site_with_a_wild_scale_is_out_before_it_costs_the_others_bits() -> None:
    made = plan()
    exponents = {site: [-8, -7] for site in SITES}
    assert scale.wild(made, exponents) == {}
    exponents["d"] = [-8, 0]  # within 2^6 of the others, once weights are taken out
    assert not scale.wild(made, exponents).keys() - {"d"}
    exponents["d"] = [127, -7]
    assert list(scale.wild(made, exponents)) == ["d"]
    assert "2.3e+38" in scale.wild(made, exponents)["d"]


def test_a_small_site_is_not_wild() -> None:
    made = plan()
    for place, one in enumerate(made.participants):
        one.num_examples = 1 if place < 4 else 100_000
    exponents = {site: [-24] if place < 4 else [-8] for place, site in enumerate(SITES)}
    assert scale.wild(made, exponents) == {}
