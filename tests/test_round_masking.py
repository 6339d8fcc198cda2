"""The crypto worker's jobs in masking mode, with certificates, from keys to the new version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.identity import Identity, IdentityError
from crypto.quantize import FRACTION_INTEGERS, CryptoError
from crypto.roster import Terms
from daemon import round_masking
from daemon.round_crypto import LOSS_BOUND, Applied, measure_update
from daemon.round_masking import Believed
from daemon.versions import ShapeManifest, read_version, write_version
from tests.authority import Federation

SHAPE = ShapeManifest("test", (("a", (300, 100)), ("b", (500,)), ("c", (1,))))
SIZES = SHAPE.sizes
SITES = ("s00", "s01", "s02", "s03")
AT = (7, 0)


@dataclass
class Process:
    """A crypto worker of its own: what it holds, no other one sees."""

    site: str
    identity: Identity
    held: tuple[dict[Any, Any], dict[Any, Any]] = field(default_factory=lambda: ({}, {}))

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(round_masking, "_sites", self.held[0])
            patched.setattr(round_masking, "_sums", self.held[1])
            return job(*args)


@dataclass
class Attempt:
    """Four sites and the coordinator's worker (that of s00)."""

    folder: Path
    terms: Terms
    believed: Believed
    processes: dict[str, Process]
    exponents: list[int] = field(default_factory=list)

    @property
    def lead(self) -> Process:
        return self.processes["s00"]

    def share(self) -> dict[str, bytes]:
        """Keys and shares, up to everybody's masks; returns what everybody has shown."""
        shown = {}
        for site, process in self.processes.items():
            payload, content = process.run(round_masking.make_keys, self.terms, site, self.believed)
            shown[site] = content + process.identity.sign(payload)
        sealed = {s: p.run(round_masking.deal, *AT, shown) for s, p in self.processes.items()}
        for site, process in self.processes.items():
            mine = {sender: batch[site] for sender, batch in sealed.items() if sender != site}
            process.run(round_masking.hold_shares, *AT, mine)
        self.lead.run(round_masking.start_sum, self.terms, shown, self.believed, SITES)
        return shown

    def contribute(self, sites: tuple[str, ...]) -> None:
        paths = {site: self.folder / f"{site}.npy" for site in SITES}
        for number, path in enumerate(paths.values()):
            np.save(path, np.append(delta(number), np.float32(0.5 / LOSS_BOUND)))
        measured = [measure_update(path, SIZES, 1.0) for path in paths.values()]
        self.exponents = [max(column) for column in zip(*measured, strict=True)]
        for site in sites:
            out = self.folder / f"{site}.masked"
            arguments = (paths[site], SIZES, 1.0, self.exponents, out)
            blob = self.processes[site].run(round_masking.mask_update, *AT, *arguments)
            assert blob.size == 4 * self.terms.values
            assert blob.digest == hashlib.sha256(out.read_bytes()).digest()
            self.lead.run(round_masking.add_update, *AT, site, out)
        self.lead.run(round_masking.finish_sum, *AT)

    def open(self, survivors: tuple[str, ...], dropouts: tuple[str, ...]) -> Path:
        outcome = (survivors, dropouts)
        signatures = {}
        for site in survivors:
            payload = self.processes[site].run(round_masking.confirm, *AT, *outcome)
            signatures[site] = self.processes[site].identity.sign(payload)
        opened = {
            site: self.processes[site].run(round_masking.open_shares, *AT, signatures)
            for site in survivors
        }
        path = self.folder / "sum"
        _, wrong = self.lead.run(round_masking.unmask, *AT, *outcome, opened, path)
        assert not wrong
        return path

    def apply(self, total: Path, weight: float = 3.0) -> Applied:
        versions = self.folder / "versions"
        parent, _ = write_version(versions, SHAPE.digest, delta(99))
        onto = (parent, SHAPE.digest, versions)
        return round_masking.apply_sum(self.terms, total, SIZES, self.exponents, weight, *onto)


def delta(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE.total).astype(np.float32)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.found(tmp_path_factory.mktemp("federation"), *SITES)


@pytest.fixture
def attempt(federation: Federation, tmp_path: Path) -> Attempt:
    identities = {site: federation.identity(site) for site in SITES}
    certificates = {site: one.certificate_der for site, one in identities.items()}
    terms = Terms(
        "med", *AT, hashlib.sha256(b"plan").digest(), SITES, 3, 16, SHAPE.total + FRACTION_INTEGERS
    )
    believed = Believed(federation.trust.authority_pem, certificates)
    processes = {site: Process(site, identity) for site, identity in identities.items()}
    return Attempt(tmp_path, terms, believed, processes)


@pytest.mark.parametrize("dropouts", [(), ("s02",)])
def test_from_keys_to_the_new_version(attempt: Attempt, dropouts: tuple[str, ...]) -> None:
    survivors = tuple(site for site in SITES if site not in dropouts)
    attempt.share()
    attempt.contribute(survivors)
    applied = attempt.apply(attempt.open(survivors, dropouts), float(len(survivors)))
    got = read_version(attempt.folder / "versions", applied.model_digest, SHAPE.digest)
    mean = np.mean([delta(SITES.index(site)) for site in survivors], axis=0)
    unit = np.repeat(np.ldexp(1.0, attempt.exponents), SIZES) / 32767
    assert (np.abs(got - (delta(99) + mean)) <= unit + 1e-6).all()
    assert applied.mean_loss == pytest.approx(0.5, abs=1e-6)


def test_a_lost_worker_is_a_dropout(attempt: Attempt) -> None:
    """Its memory is gone, and with it its part in the attempt; the others open without it."""
    attempt.share()
    attempt.contribute(SITES)
    lost = attempt.processes["s03"]
    lost.run(round_masking.forget, *AT)
    with pytest.raises(CryptoError, match="dropped out of the attempt"):
        lost.run(round_masking.confirm, *AT, SITES, ())
    signatures = {}
    for site in SITES[:3]:
        payload = attempt.processes[site].run(round_masking.confirm, *AT, SITES, ())
        signatures[site] = attempt.processes[site].identity.sign(payload)
    opened = {
        site: attempt.processes[site].run(round_masking.open_shares, *AT, signatures)
        for site in SITES[:3]
    }
    path = attempt.folder / "sum"
    attempt.lead.run(round_masking.unmask, *AT, SITES, (), opened, path)
    assert attempt.apply(path, 4.0).mean_loss == pytest.approx(0.5, abs=1e-6)


def test_keys_of_another_site_are_refused(attempt: Attempt) -> None:
    payload, content = attempt.lead.run(
        round_masking.make_keys, attempt.terms, "s00", attempt.believed
    )
    shown = attempt.share()
    attempt.lead.run(round_masking.make_keys, attempt.terms, "s00", attempt.believed)
    forged = {**shown, "s00": content + attempt.processes["s01"].identity.sign(payload)}
    with pytest.raises(IdentityError, match="not by site"):
        attempt.processes["s02"].run(round_masking.start_sum, attempt.terms, forged,
                                     attempt.believed, SITES)  # fmt: skip
    swapped = Believed(
        attempt.believed.authority_pem,
        {**attempt.believed.certificates, "s00": attempt.believed.certificates["s01"]},
    )
    with pytest.raises(IdentityError, match="gives the certificate of s01 for s00"):
        attempt.lead.run(round_masking.start_sum, attempt.terms, forged, swapped, SITES)


def test_steps_out_of_turn_are_refused(attempt: Attempt) -> None:
    process = attempt.lead
    with pytest.raises(CryptoError, match="no masks are held"):
        process.run(round_masking.deal, *AT, {})
    with pytest.raises(CryptoError, match="no masked sum was started"):
        process.run(round_masking.finish_sum, *AT)
    process.run(round_masking.make_keys, attempt.terms, "s00", attempt.believed)
    for job, arguments in (
        (round_masking.hold_shares, ({},)),
        (round_masking.confirm, (SITES, ())),
    ):
        with pytest.raises(CryptoError, match="out of turn"):
            process.run(job, *AT, *arguments)
    with pytest.raises(CryptoError, match="was not told of"):
        process.run(round_masking.open_shares, *AT, {})


def test_a_malformed_input_is_refused_and_the_sum_stays(attempt: Attempt) -> None:
    attempt.share()
    path = attempt.folder / "bad"
    for raw in (b"", bytes(4 * attempt.terms.values - 1), bytes(4 * attempt.terms.values + 1)):
        path.write_bytes(raw)
        with pytest.raises(CryptoError, match="the masked input of s01 has"):
            attempt.lead.run(round_masking.add_update, *AT, "s01", path)
    with pytest.raises(CryptoError, match="cannot read"):
        attempt.lead.run(round_masking.add_update, *AT, "s01", attempt.folder / "nowhere")
    attempt.contribute(SITES)
    attempt.open(SITES, ())
    with pytest.raises(CryptoError, match="the sum is closed"):
        attempt.lead.run(round_masking.add_update, *AT, "s01", path)


def test_another_sum_than_was_closed_is_not_opened(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES[:3])
    with pytest.raises(CryptoError, match="not the one that was closed"):
        attempt.lead.run(round_masking.unmask, *AT, SITES, (), {}, attempt.folder / "sum")


def test_a_sum_that_no_contributors_can_have_sent_is_not_applied(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES)
    good = attempt.open(SITES, ())
    for weight in (0.0, -1.0, float("nan"), 4.5):
        with pytest.raises(CryptoError, match="total weight"):
            attempt.apply(good, weight)
    good.write_bytes(b"\x7f" * (4 * attempt.terms.values))
    with pytest.raises(CryptoError, match="the unmasked sum was refused"):
        attempt.apply(good)


def test_two_attempts_are_held_and_older_ones_forgotten(attempt: Attempt) -> None:
    process = attempt.lead
    for number in range(3):
        terms = Terms(
            *("med", 7, number, attempt.terms.plan_digest, SITES, 3, 16, attempt.terms.values)
        )
        process.run(round_masking.make_keys, terms, "s00", attempt.believed)
    assert sorted(process.held[0]) == [(7, 1), (7, 2)]
    process.run(round_masking.forget, 7, 1)
    process.run(round_masking.forget, 7, 1)
    assert sorted(process.held[0]) == [(7, 2)]
