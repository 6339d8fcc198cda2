"""Attacks on an encrypted sum by the coordinator who makes it, and by a curious key holder.

With real keys, uploads and sums. Each attack is noticed, and goes unnoticed where the
check is left out. What no check can notice stands at the end, as ``test_limit_...``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32
from crypto.ckks import sum_proof
from crypto.ckks.parameters import choose_parameters
from crypto.ckks.sum_proof import (
    NONCE_BYTES,
    PRIME,
    VALUE_BYTES,
    Check,
    CheckKey,
    Claim,
    Tags,
    UnprovenSum,
    inner_products,
    size_of_tags,
)
from crypto.ckks.sums import RoundKey, RunningSum
from crypto.quantize import LOSS_BOUND, CryptoError, pack, quantise_fraction
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding, SumTerms
from daemon.state.versions import ShapeManifest, read_version, write_version
from peers.wire.vectors import read_encrypted, read_trailer, write_encrypted
from tests.attacks.programs.lattice import short_relation
from tests.crypto.ckks.test_sum_proof import expanded

pytestmark = pytest.mark.attacks

BITS = 16
EXPONENT = 0
LIMIT = 32767
LOSS = LOSS_BOUND * 100.05 / LIMIT  # its second integer is small: a few times it fits a digit
COORDINATOR, SITES = "a", ("a", "b", "c")
HOLDERS = ("b", "c")
AGREED = hashlib.sha256(b"the plan").digest()
PARAMETERS = choose_parameters(len(SITES), BITS)
IN_A_BLOCK = PARAMETERS.packing.values_per_block
ONE_BLOCK_AND_MORE = ShapeManifest("attacked", (("a", (IN_A_BLOCK + 1000,)),))

Blocks = dict[str, list[bytes]]


@dataclass
class Attempt:
    """One attempt in one process: the key holders' memory, and the coordinator's."""

    folder: Path
    number: int = 1
    shape: ShapeManifest = ONE_BLOCK_AND_MORE
    secret: bytes = b""
    public: bytes = b""
    uploads: list[str] = field(default_factory=list)
    nonces: tuple[tuple[str, bytes], ...] = ()
    digest: bytes = b""

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.holder, self.coordinator = (self.number, 0), (self.number, 1)
        for left in list(ckks._attempts):
            ckks.forget(*left)
        if self.secret:  # of an earlier attempt, if its dealer is careless
            ckks.hold_context(
                *self.holder, self.secret, secret=True, contributors=len(SITES), bits=BITS
            )
        else:
            dealt = ckks.deal_key(*self.holder, len(SITES), BITS)
            self.secret, self.public = dealt.secret, dealt.public
        ckks.hold_context(
            *self.coordinator, self.public, secret=False, contributors=len(SITES), bits=BITS
        )
        ckks.start_sum(*self.coordinator, self.shape.sizes, self.check(COORDINATOR))
        self.parent, _ = write_version(
            self.folder, self.shape.digest, np.zeros(self.shape.total, dtype=np.float32)
        )

    def check(self, site: str) -> Check:
        return Check(site, COORDINATOR, HOLDERS, AGREED)

    def path(self, site: str) -> Path:
        return self.folder / f"{self.number}-{site}.bin"

    def upload(self, site: str, vector: Float32, *, loss: float = LOSS, exponent: int = 0) -> None:
        """A site encrypts its update, and sends it with its tags."""
        update = self.folder / "update.npy"
        np.save(update, np.append(vector, loss / LOSS_BOUND).astype(np.float32))
        self.uploads.append(site)
        ckks.encrypt_update(
            *(self.coordinator if site == COORDINATOR else self.holder),
            update,
            self.shape.sizes,
            Hiding(1.0, [exponent]),
            self.path(site),
            check=self.check(site),
        )

    def add(self) -> None:
        """The coordinator adds what was uploaded, and claims that it did."""
        for site in self.uploads:
            ckks.add_update(*self.coordinator, site, self.path(site))
        finished = ckks.finish_sum(*self.coordinator, self.folder / "sum")
        self.nonces, self.digest = finished.nonces, finished.digest

    def blocks(self) -> Blocks:
        """Every update's blocks: what the coordinator has to work with."""
        values = self.shape.total + 2
        return {
            site: list(
                read_encrypted(self.path(site), PARAMETERS, values, trailer=len(self.tags(site)))
            )
            for site in self.uploads
        }

    def tags(self, site: str) -> bytes:
        """What stands behind a site's update."""
        size = 0 if site == COORDINATOR else size_of_tags(len(HOLDERS))
        return read_trailer(self.path(site), size)

    def replace_tags(self, site: str, tags: bytes) -> None:
        """Other tags behind the same update."""
        blob = self.path(site).read_bytes()
        self.path(site).write_bytes(blob[: -len(tags)] + tags)

    def replace_sum(self, rows: list[RunningSum]) -> None:
        """Make another encrypted sum, each block of which is a sum by itself."""
        blocks = (row.block(0) for row in rows)
        written = write_encrypted(self.folder / "sum", PARAMETERS, self.shape.total + 2, blocks)
        self.digest = written.digest

    def claim(self) -> Claim:
        return Claim(self.digest, self.nonces)

    def apply(self, holder: str = "b", *, checked: bool = True) -> Float32:
        """What the sum adds to the parent at one key holder."""
        ckks._attempts[self.holder].claimed = None  # another holder's memory
        asked = ckks.challenge(*self.holder, self.check(holder), self.claim())
        answer = ckks.answer_challenge(*self.coordinator, holder, asked)
        with pytest.MonkeyPatch.context() as patched:
            if not checked:
                patched.setattr(ckks, "_check_proof", lambda *_: None)
            applied = ckks.apply_sum(
                *self.holder,
                self.folder / "sum",
                SumTerms(
                    *(self.shape.sizes, [EXPONENT], float(len(SITES))),
                    *(self.parent, self.shape.digest, self.folder),
                ),
                answer=answer,
            )
        return read_version(self.folder, applied.model_digest, self.shape.digest)


def summed(*parts: bytes) -> RunningSum:
    """One block: the sum of these."""
    total = RunningSum(PARAMETERS, 1)
    for part in parts:
        total.add(0, part)
    return total


def updates(shape: ShapeManifest = ONE_BLOCK_AND_MORE, seed: int = 5) -> dict[str, Float32]:
    chance = np.random.default_rng(seed)
    return {s: chance.uniform(-0.2, 0.2, shape.total).astype(np.float32) for s in SITES}


def uploaded(folder: Path, vectors: dict[str, Float32]) -> Attempt:
    attempt = Attempt(folder)
    for site, vector in vectors.items():
        attempt.upload(site, vector)
    attempt.add()
    return attempt


def close(got: Float32, meant: np.ndarray) -> bool:
    """Equal but for rounding to integers, which a few additions multiply; NaN: whatever."""
    return bool(np.nanmax(np.abs(got - meant)) < 10 / LIMIT)


def test_an_honest_sum_is_proven_to_every_holder(tmp_path: Path) -> None:
    vectors = updates()
    attempt = uploaded(tmp_path, vectors)
    for holder in HOLDERS:
        assert close(attempt.apply(holder), np.sum(list(vectors.values()), axis=0) / 3)
    assert np.array_equal(attempt.apply(), attempt.apply(checked=False))


def test_a_late_site_is_in_neither_the_sum_nor_its_proof(tmp_path: Path) -> None:
    vectors = updates()
    attempt = Attempt(tmp_path)
    for site, vector in vectors.items():
        attempt.upload(site, vector)
    attempt.uploads.remove("c")
    attempt.add()
    assert dict(attempt.nonces).keys() == {"a", "b"}
    assert close(attempt.apply(), (vectors["a"] + vectors["b"]) / 3)
    attempt.nonces = (*attempt.nonces, ("c", attempt.tags("c")[:NONCE_BYTES]))
    with pytest.raises(UnprovenSum):
        attempt.apply()


# ---- the coordinator changes the sum ---------------------------------------------------------

Tampering = Callable[[Blocks], list[RunningSum]]
Effect = Callable[[dict[str, Float32]], np.ndarray]


def drops(u: Blocks) -> list[RunningSum]:
    return [summed(a, c) for a, c in zip(u["a"], u["c"], strict=True)]


def repeats(u: Blocks) -> list[RunningSum]:
    return [summed(a, b, b, c) for a, b, c in zip(u["a"], u["b"], u["c"], strict=True)]


def singles_out(u: Blocks) -> list[RunningSum]:
    """One update passed off as a sum: anyone who sees the new version could read it."""
    return [summed(b) for b in u["b"]]


def scales(u: Blocks) -> list[RunningSum]:
    return [summed(a, c, *[b] * 5) for a, b, c in zip(u["a"], u["b"], u["c"], strict=True)]


def turns_round(u: Blocks) -> list[RunningSum]:
    rows = [summed(a, c) for a, c in zip(u["a"], u["c"], strict=True)]
    for row, b in zip(rows, u["b"], strict=True):
        row.subtract(0, b)
    return rows


def swaps_blocks(u: Blocks) -> list[RunningSum]:
    u["b"].reverse()
    return [summed(*parts) for parts in zip(*u.values(), strict=True)]


def swapped(x: Float32) -> np.ndarray:
    """What the sum gets of an update whose second block comes first."""
    result = np.zeros(x.size)
    rest = x.size - IN_A_BLOCK
    result[:rest] = x[IN_A_BLOCK:]
    result[rest : rest + 2] = np.nan  # the loss, which came behind the update
    result[IN_A_BLOCK:] = x[:rest]
    return result


@pytest.mark.parametrize(
    ("tampering", "effect"),
    [
        (drops, lambda x: x["a"] + x["c"]),
        (repeats, lambda x: x["a"] + 2 * x["b"] + x["c"]),
        (singles_out, lambda x: x["b"]),
        (scales, lambda x: x["a"] + 5 * x["b"] + x["c"]),
        (turns_round, lambda x: x["a"] - x["b"] + x["c"]),
        (swaps_blocks, lambda x: x["a"] + swapped(x["b"]) + x["c"]),
    ],
)
def test_the_coordinator_changes_what_a_site_contributed(
    tmp_path: Path, tampering: Tampering, effect: Effect
) -> None:
    vectors = updates()
    attempt = uploaded(tmp_path, vectors)
    attempt.replace_sum(tampering(attempt.blocks()))
    for holder in HOLDERS:
        with pytest.raises(UnprovenSum, match="that of the updates of a, b, c"):
            attempt.apply(holder)
    assert close(attempt.apply(checked=False), effect(vectors) / 3)


def with_one_more(attempt: Attempt, place: int = 17) -> list[RunningSum]:
    """The true sum, one unit more at one place: the coordinator can encrypt, too."""
    integers = np.zeros(attempt.shape.total + 2, dtype=np.int32)
    integers[place] = 1
    key = RoundKey(PARAMETERS, attempt.public, secret=False)
    more = [key.encrypt(row) for row in pack(integers, PARAMETERS.packing)]
    return [summed(*parts) for parts in zip(*attempt.blocks().values(), more, strict=True)]


def test_the_coordinator_alters_one_value_by_one_unit(tmp_path: Path) -> None:
    attempt = uploaded(tmp_path, updates())
    honest = attempt.apply()
    attempt.replace_sum(with_one_more(attempt))
    with pytest.raises(UnprovenSum):
        attempt.apply()
    assert np.flatnonzero(attempt.apply(checked=False) != honest).tolist() == [17]


def test_a_coordinator_replays_an_update_under_a_key_that_was_dealt_twice(
    tmp_path: Path,
) -> None:
    """A fresh key makes nonsense of old ciphertexts; this holds should a dealer be careless."""
    old, new = updates(seed=1), updates(seed=2)
    before = uploaded(tmp_path, old)
    attempt = Attempt(tmp_path, number=2, secret=before.secret, public=before.public)
    for site, vector in new.items():
        attempt.upload(site, vector)
    # The tags of now, but for nonce and checksums: the commitments are no secret.
    tags = bytearray(attempt.tags("b"))
    tags[: NONCE_BYTES + VALUE_BYTES] = before.tags("b")[: NONCE_BYTES + VALUE_BYTES]
    before.path("b").replace(attempt.path("b"))
    attempt.replace_tags("b", bytes(tags))
    attempt.add()
    with pytest.raises(UnprovenSum):
        attempt.apply()
    assert close(attempt.apply(checked=False), (new["a"] + old["b"] + new["c"]) / 3)


def test_the_coordinator_tells_one_site_another_scale(tmp_path: Path) -> None:
    """Then the same integers mean half as much: nothing encrypted need be touched."""
    vectors = updates()
    attempt = Attempt(tmp_path)
    for site, vector in vectors.items():
        attempt.upload(site, vector, exponent=EXPONENT + (site == "b"))
    attempt.add()
    with pytest.raises(UnprovenSum):
        attempt.apply()
    assert close(attempt.apply(checked=False), (vectors["a"] + vectors["b"] / 2 + vectors["c"]) / 3)


# ---- the order: first the sum, then the challenge --------------------------------------------


def test_the_coordinator_claims_one_sum_and_sends_another(tmp_path: Path) -> None:
    attempt = uploaded(tmp_path, updates())
    holder = attempt.holder
    asked = ckks.challenge(*holder, attempt.check("b"), attempt.claim())
    assert asked == ckks.challenge(*holder, attempt.check("b"), attempt.claim())
    answer = ckks.answer_challenge(*attempt.coordinator, "b", asked)
    with pytest.raises(CryptoError, match="a checksum is 8 bytes"):
        apply_as_told(attempt, b"")
    attempt.replace_sum(drops(attempt.blocks()))
    with pytest.raises(CryptoError, match="a second sum after it was told the challenge"):
        ckks.challenge(*holder, attempt.check("b"), attempt.claim())
    with pytest.raises(UnprovenSum, match="not the one that a claimed"):
        apply_as_told(attempt, answer)


def apply_as_told(attempt: Attempt, answer: bytes) -> None:
    ckks.apply_sum(
        *attempt.holder,
        attempt.folder / "sum",
        SumTerms(
            *(attempt.shape.sizes, [EXPONENT], 3.0),
            *(attempt.parent, attempt.shape.digest, attempt.folder),
        ),
        answer=answer,
    )


@pytest.mark.slow
def test_who_knew_a_challenge_too_early_could_move_what_it_cannot_see(tmp_path: Path) -> None:
    """Why the challenge comes last, and why each holder has one of its own.

    Small m with <r, m> = 0 are easily found for a known r. Site b's loss, which the
    coordinator doesn't know, stands alone in the last block; added m times to the
    others it changes the sum, unseen in the answer. (Were r public, this would do.)
    """
    shape = ShapeManifest("many", (("a", (15 * IN_A_BLOCK - 1,)),))
    attempt = Attempt(tmp_path, shape=shape)
    for site, vector in updates(shape).items():
        attempt.upload(site, vector, loss=LOSS_BOUND * 158.1 / LIMIT)
    attempt.add()
    honest = attempt.apply()

    blocks = attempt.blocks()
    rows = [summed(*parts) for parts in zip(*blocks.values(), strict=True)]
    early = CheckKey(attempt.secret, *attempt.holder).challenge("b")
    r = expanded(early, shape.total + 2)[::IN_A_BLOCK]
    multiples = short_relation(r, PRIME)
    for row, multiple in zip(rows, multiples, strict=True):
        for _ in range(abs(multiple)):
            (row.add if multiple > 0 else row.subtract)(0, blocks["b"][-1])
    attempt.replace_sum(rows)

    got = attempt.apply("b")  # accepted, and altered by what nobody but b knows
    moved = np.rint((got - honest).astype(np.float64) * 3 * LIMIT)[::IN_A_BLOCK]
    secret = moved[np.argmax(multiples[:-1])] / max(multiples[:-1])
    assert 3000 < secret < 3600
    assert np.array_equal(moved, secret * np.array(multiples[: moved.size]))
    with pytest.raises(UnprovenSum):  # c's challenge was not known
        attempt.apply("c")


# ---- what the check itself might tell ---------------------------------------------------------


def test_the_coordinator_tries_its_guess_of_an_update_on_the_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has been told the challenge, a tag without a pad would say whether it is right."""

    def fits(attempt: Attempt, vector: Float32) -> bool:
        attempt.upload("b", vector)
        tag = Tags.parse(attempt.tags("b"), len(HOLDERS)).values[0]
        challenge = CheckKey(attempt.secret, *attempt.holder).challenge("b")
        return tag == inner_products([challenge], guess)[0]

    vector = np.zeros(ONE_BLOCK_AND_MORE.total, dtype=np.float32)  # rounds to one vector alone
    guess = np.zeros(vector.size + 2, dtype=np.int32)
    guess[-2:] = quantise_fraction(0.0, BITS, np.random.default_rng(0))
    attempt = Attempt(tmp_path)
    monkeypatch.setattr(attempt, "upload", lambda s, v: Attempt.upload(attempt, s, v, loss=0.0))
    assert not fits(attempt, vector)
    monkeypatch.setattr(CheckKey, "_pad", lambda *_: 0)
    assert fits(attempt, vector)
    vector[3] = 1.0
    assert not fits(attempt, vector)


def test_the_coordinator_compares_two_uploads_of_one_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that encrypts again, after a crash, takes another pad."""
    zero = np.zeros(ONE_BLOCK_AND_MORE.total, dtype=np.float32)

    def difference(attempt: Attempt) -> int:
        tags = []
        for _ in range(2):
            attempt.upload("b", zero, loss=0.0)
            tags.append(Tags.parse(attempt.tags("b"), len(HOLDERS)).values[0])
        return tags[0] - tags[1]

    attempt = Attempt(tmp_path)
    assert difference(attempt) != 0
    monkeypatch.setattr(os, "urandom", bytes)  # one nonce, hence one pad, for both
    assert difference(attempt) == 0


def test_a_key_holder_asks_about_the_coordinators_own_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a challenge r' of its own: the answer would tell it <r' - r, that update>."""
    attempt = uploaded(tmp_path, updates())
    right = CheckKey(attempt.secret, *attempt.holder).challenge("b")
    wrong = bytes(32)
    with pytest.raises(CryptoError, match="another challenge than b, c made tags for"):
        ckks.answer_challenge(*attempt.coordinator, "b", wrong)

    monkeypatch.setattr(sum_proof, "commitment", lambda _: attempt_commitment(attempt, right))
    answers = [
        int.from_bytes(ckks.answer_challenge(*attempt.coordinator, "b", c), "little")
        for c in (wrong, right)
    ]
    tally = ckks._attempts[attempt.coordinator].tally
    assert tally is not None
    assert tally._own is not None
    told = inner_products([wrong, right], tally._own)
    assert (answers[0] - answers[1] - told[0] + told[1]) % PRIME == 0


def attempt_commitment(attempt: Attempt, challenge: bytes) -> bytes:
    """What an honest site committed to, read from its tags."""
    tags = Tags.parse(attempt.tags("b"), len(HOLDERS))
    return tags.commitments[0]


def test_a_tag_that_does_not_fit_fails_the_attempt_and_its_site_is_suspect(
    tmp_path: Path,
) -> None:
    attempt = Attempt(tmp_path)
    for site, vector in updates().items():
        attempt.upload(site, vector)
    tags = bytearray(attempt.tags("c"))
    tags[NONCE_BYTES] ^= 1
    attempt.replace_tags("c", bytes(tags))
    attempt.add()
    with pytest.raises(UnprovenSum, match=r"a, b, c\. a, who summed, .* one of them sent a tag"):
        attempt.apply()


# ---- limits -----------------------------------------------------------------------------------


def test_limit_the_coordinators_own_part_may_be_anything(tmp_path: Path) -> None:
    """What it adds knowingly it can answer for, as if it had contributed that."""
    attempt = uploaded(tmp_path, updates())
    honest = attempt.apply()
    attempt.replace_sum(with_one_more(attempt))
    tally = ckks._attempts[attempt.coordinator].tally
    assert tally is not None
    assert tally._own is not None
    tally._own[17] += 1
    assert np.flatnonzero(attempt.apply() != honest).tolist() == [17]


def test_limit_with_a_key_holder_the_coordinator_proves_anything(tmp_path: Path) -> None:
    """As it could read every update with one (docs/decisions/0001)."""
    vectors = updates()
    attempt = uploaded(tmp_path, vectors)
    attempt.replace_sum(drops(attempt.blocks()))
    holder, check = attempt.holder, attempt.check("b")
    accomplice = CheckKey(attempt.secret, *holder)
    asked = ckks.challenge(*holder, check, attempt.claim())
    values = vectors["b"].size + 2
    key = ckks._attempts[holder]
    integers = ckks._decrypt_sum(key, tmp_path / "sum", values)
    forged = inner_products([asked], integers)[0]
    for site, nonce in attempt.nonces:
        if site != COORDINATOR:
            forged += accomplice._pad(sum_proof._terms(check, [EXPONENT]), "b", site, nonce)
    apply_as_told(attempt, (forged % PRIME).to_bytes(8, "little"))
