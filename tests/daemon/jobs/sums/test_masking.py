"""The crypto worker's jobs in masking mode, with certificates, from keys to the new version."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.durable import UNFINISHED
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.masking.roster import Agreement
from crypto.quantize import FRACTION_INTEGERS, LOSS_BOUND, CryptoError
from daemon.jobs.sums import masking
from daemon.jobs.sums.integers import Hiding, SumTerms, measure_update
from daemon.jobs.sums.masking import Believed, Unmasked
from daemon.state.versions import ShapeManifest, read_version, write_version
from peers.wire.vectors import BlobInfo
from tests.support.authority import Federation

SHAPE = ShapeManifest("test", (("a", (300, 100)), ("b", (500,)), ("c", (1,))))
SIZES = SHAPE.sizes
SITES = ("s00", "s01", "s02", "s03")
AT = (7, 0)
UNWRITTEN = BlobInfo(b"", 0)


@dataclass
class Process:
    """A crypto worker of its own: what it holds, no other one sees."""

    site: str
    identity: Identity
    held: tuple[dict[Any, Any], dict[Any, Any]] = field(default_factory=lambda: ({}, {}))

    def run(self, job: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(masking, "_sites", self.held[0])
            patched.setattr(masking, "_sums", self.held[1])
            return job(*args, **named)


@dataclass
class Attempt:
    """Four sites and the coordinator's worker (that of s00)."""

    folder: Path
    terms: Agreement
    believed: Believed
    processes: dict[str, Process]
    exponents: list[int] = field(default_factory=list)
    total: BlobInfo = UNWRITTEN

    @property
    def at(self) -> tuple[int, int]:
        return self.terms.round, self.terms.attempt

    @property
    def lead(self) -> Process:
        return self.processes["s00"]

    def share(self) -> dict[str, bytes]:
        """Keys and shares, up to everybody's masks; returns what everybody has shown."""
        shown = {}
        for site, process in self.processes.items():
            payload, content = process.run(masking.make_keys, self.terms, site, self.believed)
            shown[site] = content + process.identity.sign(payload)
        sealed = {s: p.run(masking.deal, *self.at, shown) for s, p in self.processes.items()}
        for site, process in self.processes.items():
            mine = {sender: batch[site] for sender, batch in sealed.items() if sender != site}
            process.run(masking.hold_shares, *self.at, mine)
        self.lead.run(masking.start_sum, self.terms, shown, self.believed, SITES)
        return shown

    def contribute(self, sites: tuple[str, ...], *, keep: bool = False) -> None:
        """Updates, masked; the sum of them. ``keep``: the integers, or those that are kept."""
        paths = {site: self.folder / f"{site}.npy" for site in SITES}
        if not self.exponents:
            for number, path in enumerate(paths.values()):
                np.save(path, np.append(delta(number), np.float32(0.5 / LOSS_BOUND)))
            measured = [measure_update(path, SIZES, 1.0) for path in paths.values()]
            self.exponents = [max(column) for column in zip(*measured, strict=True)]
        for site in sites:
            out = self.folder / f"{site}.masked"
            kept = self.folder / f"{site}.kept" if keep else None
            arguments = (paths[site], SIZES, Hiding(1.0, self.exponents, kept=kept), out)
            blob = self.processes[site].run(masking.mask_update, *self.at, *arguments)
            assert blob.size == 4 * self.terms.values
            assert blob.digest == hashlib.sha256(out.read_bytes()).digest()
            self.lead.run(masking.add_update, *self.at, site, out)
        self.total = self.lead.run(masking.finish_sum, *self.at, self.sum)

    @property
    def sum(self) -> Path:
        return self.folder / f"sum-{self.terms.attempt}"

    def open(
        self,
        survivors: tuple[str, ...],
        dropouts: tuple[str, ...],
        asked: tuple[str, ...] | None = None,
    ) -> dict[str, dict[str, bytes]]:
        """What those who were asked open, all survivors if nobody is named: by site, by owner."""
        job = masking.open_shares
        return {
            site: self.processes[site].run(job, *self.at, survivors, dropouts)
            for site in asked or survivors
        }

    def apply(
        self,
        site: str,
        outcome: tuple[tuple[str, ...], tuple[str, ...]],
        opened: dict[str, dict[str, bytes]],
        *,
        weight: float | None = None,
        digest: bytes | None = None,
    ) -> Unmasked:
        """At one site, in a folder of its own."""
        versions = self.folder / f"versions-{site}"
        parent, _ = write_version(versions, SHAPE.digest, delta(99))
        applied = self.processes[site].run(
            masking.apply_sum,
            *(*self.at, *outcome, opened, self.sum, digest or self.total.digest),
            SumTerms(
                *(SIZES, self.exponents, len(outcome[0]) if weight is None else weight),
                *(parent, SHAPE.digest, versions),
            ),
        )
        assert isinstance(applied, Unmasked)
        return applied

    def again(self, attempt: int) -> Attempt:
        """The same sites' next attempt: other keys, other masks."""
        terms = dataclasses.replace(self.terms, attempt=attempt)
        return dataclasses.replace(self, terms=terms, total=UNWRITTEN)


def delta(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE.total).astype(np.float32)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.found(tmp_path_factory.mktemp("federation"), *SITES)


@pytest.fixture
def attempt(federation: Federation, tmp_path: Path) -> Attempt:
    identities = {site: federation.identity(site) for site in SITES}
    certificates = {site: one.certificate_der for site, one in identities.items()}
    terms = Agreement(
        "med", *AT, hashlib.sha256(b"plan").digest(), SITES, 3, 16, SHAPE.total + FRACTION_INTEGERS
    )
    believed = Believed(federation.trust.authority_pem, certificates)
    processes = {site: Process(site, identity) for site, identity in identities.items()}
    return Attempt(tmp_path, terms, believed, processes)


@pytest.mark.parametrize("dropouts", [(), ("s02",)])
def test_from_keys_to_the_new_version(attempt: Attempt, dropouts: tuple[str, ...]) -> None:
    """Also at the site that is not in the sum: it has dealt its shares, and needs no more."""
    survivors = tuple(site for site in SITES if site not in dropouts)
    attempt.share()
    attempt.contribute(survivors)
    assert attempt.total == BlobInfo(
        hashlib.sha256(attempt.sum.read_bytes()).digest(), 4 * attempt.terms.values
    )
    opened = attempt.open(survivors, dropouts)
    [applied] = {attempt.apply(site, (survivors, dropouts), opened) for site in SITES}
    assert not applied.wrong_shares
    got = read_version(attempt.folder / "versions-s03", applied.model_digest, SHAPE.digest)
    mean = np.mean([delta(SITES.index(site)) for site in survivors], axis=0)
    unit = np.repeat(np.ldexp(1.0, attempt.exponents), SIZES) / 32767
    assert (np.abs(got - (delta(99) + mean)) <= unit + 1e-6).all()
    assert applied.mean_loss == pytest.approx(0.5, abs=1e-6)


def test_a_lost_worker_is_a_dropout(attempt: Attempt) -> None:
    """Its memory is gone, and with it its part in the attempt; the others open without it."""
    attempt.share()
    attempt.contribute(SITES)
    lost = attempt.processes["s03"]
    lost.run(masking.forget, *AT)
    with pytest.raises(CryptoError, match="dropped out of the attempt"):
        lost.run(masking.open_shares, *AT, SITES, ())
    opened = attempt.open(SITES, (), SITES[:3])
    assert attempt.apply("s02", (SITES, ()), opened).mean_loss == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(CryptoError, match="dropped out of the attempt"):
        attempt.apply("s03", (SITES, ()), opened)


# ---- a coordinator that passes on what it likes ------------------------------------------------


def wrong(share: bytes) -> bytes:
    return share[:-1] + bytes([share[-1] ^ 1])


def test_other_shares_for_each_site_give_the_same_version(attempt: Attempt) -> None:
    """Some are withheld, some are spoilt, each site gets others: the masks are the same."""
    attempt.share()
    survivors, dropouts = SITES, ()
    attempt.contribute(survivors)
    opened = attempt.open(survivors, dropouts)
    given = {
        "s00": opened,
        "s01": {site: opened[site] for site in ("s03", "s01", "s02")},
        "s02": {**opened, "s00": {**opened["s00"], "s01": wrong(opened["s00"]["s01"])}},
        "s03": {**opened, "s02": {}, "s09": opened["s01"]},
    }
    applied = {s: attempt.apply(s, (survivors, dropouts), shares) for s, shares in given.items()}
    assert len({one.model_digest for one in applied.values()}) == 1
    assert {s: one.wrong_shares for s, one in applied.items()} == {
        "s00": (),
        "s01": (),
        "s02": ("the share of a secret of s01 is wrong, as it came from s00",),
        "s03": (
            "the shares that came from s02 were refused: s02 has opened other shares than those "
            "asked for",
            "the shares that came from s09 were refused: shares of 's09' are not due: it is not "
            "in the sum, or they came",
        ),
    }


def test_shares_of_the_wrong_secret_open_nothing(attempt: Attempt) -> None:
    """Well-formed, by the right holders, of another owner: and tried again, the right ones do."""
    attempt.share()
    survivors, dropouts = SITES[:3], ("s03",)
    attempt.contribute(survivors)
    opened = attempt.open(survivors, dropouts)
    for owner, other in (("s00", "s01"), ("s03", "s00"), ("s01", "s03")):
        swapped = {site: {**shares, owner: shares[other]} for site, shares in opened.items()}
        with pytest.raises(CryptoError, match=f"a secret of {owner} do not fit"):
            attempt.apply("s02", (survivors, dropouts), swapped)
    for few in ({}, {site: opened[site] for site in ("s00", "s02")}):
        with pytest.raises(CryptoError, match="sites have opened their shares, 3 are needed"):
            attempt.apply("s02", (survivors, dropouts), few)
    refused = r"2 sites have opened .*; the shares that came from s01 were refused: s01 has opened"
    with pytest.raises(CryptoError, match=refused):
        attempt.apply("s02", (survivors, dropouts), {**opened, "s01": {}})
    attempt.apply("s02", (survivors, dropouts), opened)


def test_another_masked_sum_than_was_certified_is_not_opened(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES)
    opened, good = attempt.open(SITES, ()), attempt.sum.read_bytes()
    for raw, refusal in (
        (bytes([good[0] ^ 1]) + good[1:], "not the one whose digest was certified"),
        (good[:-1], f"has {len(good) - 1} bytes; expected {len(good)}"),
        (good + b"0", f"has {len(good) + 1} bytes; expected {len(good)}"),
        (b"", "has 0 bytes"),
    ):
        attempt.sum.write_bytes(raw)
        with pytest.raises(CryptoError, match=refusal):
            attempt.apply("s01", (SITES, ()), opened)
    attempt.sum.unlink()
    with pytest.raises(CryptoError, match="cannot read the masked sum"):
        attempt.apply("s01", (SITES, ()), opened)
    attempt.sum.write_bytes(good)
    with pytest.raises(CryptoError, match="not the one whose digest was certified"):
        attempt.apply("s01", (SITES, ()), opened, digest=bytes(32))
    assert len(list((attempt.folder / "versions-s01").iterdir())) == 1
    attempt.apply("s01", (SITES, ()), opened)


def test_a_second_outcome_is_not_opened(attempt: Attempt) -> None:
    """It would be the other secret of s03; what was opened is given again when it is lost."""
    attempt.share()
    attempt.contribute(SITES)
    first = attempt.open(SITES, ())
    with pytest.raises(CryptoError, match="another outcome of this attempt was opened"):
        attempt.open(SITES[:3], ("s03",))
    assert attempt.open(SITES, ()) == first
    with pytest.raises(CryptoError, match="opens no sum that its own input is not in"):
        attempt.open(SITES[:3], ("s03",), ("s03",))


def test_an_outcome_other_than_the_sums_gives_no_version(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES)
    opened = attempt.open(SITES, ())
    for outcome, refusal in (
        ((SITES[:3], ("s03",)), "do not fit"),  # of s03 they opened the seed, not the mask key
        ((SITES[:3], ()), "were refused|are needed"),
        ((SITES, ("s03",)), "both secrets of s03"),
        ((SITES[:2], SITES[2:]), "at least 3 must be"),
    ):
        with pytest.raises(CryptoError, match=refusal):
            attempt.apply("s01", outcome, opened)


def test_sites_that_were_shown_other_keys_name_other_rosters(attempt: Attempt) -> None:
    """What a statement is refused by. All but s03 hear of all four, s03 of the others' three."""
    shown = attempt.share()
    digests = {s: p.run(masking.roster_digest, *AT) for s, p in attempt.processes.items()}
    assert len(set(digests.values())) == 1
    assert len(digests["s00"]) == 32
    other, contents = attempt.processes["s03"], {}
    payload, content = other.run(masking.make_keys, attempt.terms, "s03", attempt.believed)
    with pytest.raises(CryptoError, match="has dealt no shares"):
        other.run(masking.roster_digest, *AT)
    contents = {**shown, "s03": content + other.identity.sign(payload)}
    del contents["s02"]
    other.run(masking.deal, *AT, contents)
    assert other.run(masking.roster_digest, *AT) != digests["s00"]


# ---- the same integers in two attempts ---------------------------------------------------------


def test_two_attempts_of_a_round_sum_the_same_integers(attempt: Attempt) -> None:
    """Under other keys and masks, without what training left: the same version, bit for bit."""
    versions, inputs = [], []
    for number in range(2):
        here = attempt.again(number)
        here.share()
        here.contribute(SITES[:3], keep=True)
        attempt.exponents = here.exponents
        versions.append(here.apply("s02", (SITES[:3], ("s03",)), here.open(SITES[:3], ("s03",))))
        inputs.append((here.folder / "s01.masked").read_bytes())
        for site in SITES:
            (here.folder / f"{site}.npy").unlink(missing_ok=True)
    assert versions[0] == versions[1]
    assert inputs[0] != inputs[1]


def test_without_kept_integers_two_attempts_differ(attempt: Attempt) -> None:
    """By what rounding did in each: what the difference of the two sums would tell."""
    versions = []
    for number in range(2):
        here = attempt.again(number)
        here.share()
        here.contribute(SITES)
        attempt.exponents = here.exponents
        versions.append(here.apply("s02", (SITES, ()), here.open(SITES, ())))
    assert versions[0].model_digest != versions[1].model_digest


def test_kept_integers_of_another_scale_are_not_masked(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES, keep=True)
    here = attempt.again(1)
    here.share()
    here.exponents = [exponent + 1 for exponent in attempt.exponents]
    with pytest.raises(CryptoError, match="kept under another scale"):
        here.contribute(SITES, keep=True)


# ---- what else is refused ----------------------------------------------------------------------


def test_keys_of_another_site_are_refused(attempt: Attempt) -> None:
    payload, content = attempt.lead.run(masking.make_keys, attempt.terms, "s00", attempt.believed)
    shown = attempt.share()
    attempt.lead.run(masking.make_keys, attempt.terms, "s00", attempt.believed)
    forged = {**shown, "s00": content + attempt.processes["s01"].identity.sign(payload)}
    with pytest.raises(IdentityError, match="not by site"):
        attempt.processes["s02"].run(masking.start_sum, attempt.terms, forged,
                                     attempt.believed, SITES)  # fmt: skip
    swapped = Believed(
        attempt.believed.authority_pem,
        {**attempt.believed.certificates, "s00": attempt.believed.certificates["s01"]},
    )
    with pytest.raises(IdentityError, match="gives the certificate of s01 for s00"):
        attempt.lead.run(masking.start_sum, attempt.terms, forged, swapped, SITES)


def test_steps_out_of_turn_are_refused(attempt: Attempt) -> None:
    process = attempt.lead
    with pytest.raises(CryptoError, match="no masks are held"):
        process.run(masking.deal, *AT, {})
    with pytest.raises(CryptoError, match="no masks are held"):
        process.run(masking.roster_digest, *AT)
    with pytest.raises(CryptoError, match="no masked sum was started"):
        process.run(masking.finish_sum, *AT, attempt.sum)
    process.run(masking.make_keys, attempt.terms, "s00", attempt.believed)
    for job, arguments in (
        (masking.hold_shares, ({},)),
        (masking.open_shares, (SITES, ())),
    ):
        with pytest.raises(CryptoError, match="out of turn"):
            process.run(job, *AT, *arguments)
    with pytest.raises(CryptoError, match="has dealt no shares"):
        attempt.apply("s00", (SITES, ()), {}, digest=bytes(32))


def test_a_malformed_input_is_refused_and_the_sum_stays(attempt: Attempt) -> None:
    attempt.share()
    path = attempt.folder / "bad"
    for raw in (b"", bytes(4 * attempt.terms.values - 1), bytes(4 * attempt.terms.values + 1)):
        path.write_bytes(raw)
        with pytest.raises(CryptoError, match="the masked input of s01 has"):
            attempt.lead.run(masking.add_update, *AT, "s01", path)
    with pytest.raises(CryptoError, match="cannot read"):
        attempt.lead.run(masking.add_update, *AT, "s01", attempt.folder / "nowhere")
    attempt.contribute(SITES)
    with pytest.raises(CryptoError, match="the sum is closed"):
        attempt.lead.run(masking.add_update, *AT, "s01", path)
    with pytest.raises(CryptoError, match="the sum is closed"):
        attempt.lead.run(masking.finish_sum, *AT, attempt.sum)


def test_a_sum_that_could_not_be_written_is_not_lost(attempt: Attempt) -> None:
    """The disk was full, say: it may be written elsewhere, and nothing is added any more."""
    attempt.share()
    with pytest.raises(CryptoError, match="0 sites are in the sum"):
        attempt.lead.run(masking.finish_sum, *AT, attempt.sum)
    attempt.sum.mkdir()
    with pytest.raises(OSError, match="sum-0"):
        attempt.contribute(SITES)
    assert not list(attempt.folder.glob(f"{UNFINISHED}*"))
    with pytest.raises(CryptoError, match="not due"):
        attempt.lead.run(masking.add_update, *AT, "s01", attempt.folder / "s01.masked")
    attempt.sum.rmdir()
    attempt.total = attempt.lead.run(masking.finish_sum, *AT, attempt.sum)
    attempt.apply("s01", (SITES, ()), attempt.open(SITES, ()))


def test_a_sum_that_no_contributors_can_have_sent_is_not_applied(attempt: Attempt) -> None:
    attempt.share()
    attempt.contribute(SITES)
    opened = attempt.open(SITES, ())
    for weight in (0.0, -1.0, float("nan"), 4.5):
        with pytest.raises(CryptoError, match="total weight"):
            attempt.apply("s01", (SITES, ()), opened, weight=weight)
    attempt.sum.write_bytes(b"\x7f" * (4 * attempt.terms.values))
    stated = hashlib.sha256(attempt.sum.read_bytes()).digest()  # by a coordinator that lies
    with pytest.raises(CryptoError, match="the unmasked sum was refused"):
        attempt.apply("s01", (SITES, ()), opened, digest=stated)


def test_two_attempts_are_held_and_older_ones_forgotten(attempt: Attempt) -> None:
    process = attempt.lead
    for number in range(3):
        terms = Agreement(
            *("med", 7, number, attempt.terms.plan_digest, SITES, 3, 16, attempt.terms.values)
        )
        process.run(masking.make_keys, terms, "s00", attempt.believed)
    assert sorted(process.held[0]) == [(7, 1), (7, 2)]
    process.run(masking.forget, 7, 1)
    process.run(masking.forget, 7, 1)
    assert sorted(process.held[0]) == [(7, 2)]
