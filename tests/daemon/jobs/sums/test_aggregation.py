"""The coordinator's streamed sum: whole updates or nothing, memory of one sum."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from crypto.arrays import Int64
from crypto.ckks import parameters
from crypto.ckks.parameters import CkksParameters, choose_parameters
from crypto.ckks.sums import RoundKey, deal
from crypto.quantize import FRACTION_INTEGERS, CryptoError, pack, unpack
from daemon.jobs.sums.aggregation import CiphertextSum
from daemon.rounds.catch_up import too_large
from daemon.state.versions import ShapeManifest
from peers.wire.vectors import BlobInfo, largest_size, read_encrypted, read_trailer, write_encrypted
from proto import federation_pb2 as pb

PARAMETERS = choose_parameters(4, 16)
VALUES = PARAMETERS.packing.values_per_block * 2 + 7  # three blocks, the last nearly empty
HEADER = 26

# `make test` runs these; HANSE_CKKS_CASES=10000 takes some ten minutes.
CASES = int(os.environ.get("HANSE_CKKS_CASES", "30"))


@dataclass
class Round:
    folder: Path
    holder: RoundKey
    coordinator: RoundKey

    def update(self, name: str, integers: Int64, *, key: RoundKey | None = None) -> Path:
        path = self.folder / name
        blocks = ((key or self.holder).encrypt(row) for row in pack(integers, PARAMETERS.packing))
        write_encrypted(path, PARAMETERS, integers.size, blocks)
        return path

    def decrypted(self, path: Path, values: int = VALUES) -> Int64:
        rows = [self.holder.decrypt(b) for b in read_encrypted(path, PARAMETERS, values)]
        return unpack(np.stack(rows), PARAMETERS.packing, values)

    def state(self, total: CiphertextSum) -> bytes:
        path = self.folder / "state"
        total.write(path)
        return path.read_bytes()


@pytest.fixture(scope="module")
def keys() -> tuple[RoundKey, RoundKey]:
    dealt = deal(PARAMETERS)
    return (
        RoundKey(PARAMETERS, dealt.secret, secret=True),
        RoundKey(PARAMETERS, dealt.public, secret=False),
    )


@pytest.fixture
def round_(tmp_path: Path, keys: tuple[RoundKey, RoundKey]) -> Round:
    return Round(tmp_path, *keys)


def integers(seed: int, values: int = VALUES) -> Int64:
    return np.random.default_rng(seed).integers(-32767, 32768, values)


def test_the_sum_of_files_is_the_sum_of_integers(round_: Round) -> None:
    parts = [integers(seed) for seed in range(4)]
    total = CiphertextSum(PARAMETERS, VALUES)
    for number, part in enumerate(parts):
        key = round_.coordinator if number == 2 else round_.holder
        total.add_file(round_.update(f"u{number}", part, key=key), f"site-{number}")
    out = round_.folder / "sum"
    blob = total.write(out)
    written = out.read_bytes()
    assert blob == BlobInfo(hashlib.sha256(written).digest(), len(written))
    assert blob.size == largest_size(PARAMETERS, VALUES)
    assert (round_.decrypted(out) == sum(parts)).all()
    assert total.contributors == {f"site-{n}" for n in range(4)}


def two_contributors(round_: Round) -> CiphertextSum:
    total = CiphertextSum(PARAMETERS, VALUES)
    total.add_file(round_.update("a", integers(1)), "a")
    total.add_file(round_.update("b", integers(2), key=round_.coordinator), "b")
    return total


def test_second_update_of_one_site_is_refused(round_: Round) -> None:
    total = two_contributors(round_)
    before = round_.state(total)
    with pytest.raises(CryptoError, match="a is in the sum already"):
        total.add_file(round_.update("a2", integers(3)), "a")
    assert round_.state(total) == before


def test_more_contributors_than_the_digits_have_room_for_are_refused(round_: Round) -> None:
    total = two_contributors(round_)
    total.add_file(round_.update("c", integers(3)), "c")
    total.add_file(round_.update("d", integers(4)), "d")
    with pytest.raises(CryptoError, match="all 4 contributors"):
        total.add_file(round_.update("e", integers(5)), "e")


def test_a_sum_of_one_is_not_shown_to_anyone(round_: Round) -> None:
    total = CiphertextSum(PARAMETERS, VALUES)
    total.add_file(round_.update("a", integers(1)), "a")
    with pytest.raises(CryptoError, match="site's own update"):
        total.write(round_.folder / "sum")
    assert not (round_.folder / "sum").exists()


def damaged(whole: bytes, how: str) -> bytes:
    last = len(whole) - 100
    return {
        "empty": b"",
        "header only": whole[:HEADER],
        "cut in a length": whole[: HEADER + 2],
        "cut in the last block": whole[:-1],
        "a byte too many": whole + b"\0",
        "magic": b"XXXX" + whole[4:],
        "version": whole[:4] + b"\x02\0" + whole[6:],
        "other parameters": whole[:6] + bytes(8) + whole[14:],
        "more values than agreed": whole[:14] + b"\xff" * 8 + whole[22:],
        "a million blocks": whole[:22] + (10**6).to_bytes(4, "little") + whole[26:],
        "a huge length": whole[:HEADER] + b"\xff\xff\xff\xff" + whole[HEADER + 4 :],
        "a zero length": whole[:HEADER] + bytes(4) + whole[HEADER + 4 :],
        "residues beyond the prime, first block": whole[:100] + b"\xff" * 64 + whole[164:],
        "residues beyond the prime, last block": whole[: last - 64] + b"\xff" * 64 + whole[last:],
        "garbage": np.random.default_rng(1).bytes(len(whole)),
    }[how]


DAMAGES = [
    "empty",
    "header only",
    "cut in a length",
    "cut in the last block",
    "a byte too many",
    "magic",
    "version",
    "other parameters",
    "more values than agreed",
    "a million blocks",
    "a huge length",
    "a zero length",
    "residues beyond the prime, first block",
    "residues beyond the prime, last block",
    "garbage",
]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("first", [True, False], ids=["into an empty sum", "into a sum of two"])
def test_a_damaged_update_is_in_the_sum_not_even_in_part(
    round_: Round, how: str, first: bool
) -> None:
    total = CiphertextSum(PARAMETERS, VALUES) if first else two_contributors(round_)
    before = b"" if first else round_.state(total)
    bad = round_.folder / "bad"
    bad.write_bytes(damaged(round_.update("good", integers(3)).read_bytes(), how))
    with pytest.raises(CryptoError, match="the update of mallory was refused"):
        total.add_file(bad, "mallory")
    if first:
        total.add_file(round_.update("a", integers(1)), "a")
        total.add_file(round_.update("b", integers(2)), "b")
        total.write(round_.folder / "sum")
        assert (round_.decrypted(round_.folder / "sum") == integers(1) + integers(2)).all()
    else:
        assert round_.state(total) == before
    # Who sent a damaged update may send a whole one.
    total.add_file(round_.update("good", integers(3)), "mallory")


def test_an_update_of_another_length_is_refused(round_: Round) -> None:
    total = CiphertextSum(PARAMETERS, VALUES)
    for values in (VALUES - 1, VALUES + 1, PARAMETERS.packing.values_per_block):
        with pytest.raises(CryptoError, match="another length"):
            total.add_file(round_.update("short", integers(1, values)), "a")


def test_a_missing_update_is_refused(round_: Round) -> None:
    with pytest.raises(CryptoError, match="cannot read"):
        CiphertextSum(PARAMETERS, VALUES).add_file(round_.folder / "nowhere", "a")


def test_what_stands_behind_a_vector_is_as_long_as_both_sides_know(round_: Round) -> None:
    plain = round_.update("plain", integers(1))
    path = round_.folder / "tagged"
    blocks = list(read_encrypted(plain, PARAMETERS, VALUES))
    blob = write_encrypted(path, PARAMETERS, VALUES, blocks, b"tags of it")
    written = path.read_bytes()
    assert written == plain.read_bytes() + b"tags of it"
    assert blob == BlobInfo(hashlib.sha256(written).digest(), len(written))
    assert list(read_encrypted(path, PARAMETERS, VALUES, trailer=10)) == blocks
    assert read_trailer(path, 10) == b"tags of it"
    total = two_contributors(round_)
    before = round_.state(total)
    for trailer in (0, 9, 11):
        with pytest.raises(CryptoError, match=f"10 bytes follow the last block, not {trailer}"):
            total.add_file(path, "c", trailer=trailer)
    assert round_.state(total) == before
    total.add_file(path, "c", trailer=10)
    out = round_.folder / "sum"
    total.write(out)
    assert (round_.decrypted(out) == 2 * integers(1) + integers(2)).all()


def test_a_file_appears_only_when_it_is_whole(round_: Round) -> None:
    def broken_off() -> list[bytes]:
        raise CryptoError("out of breath")

    path = round_.folder / "sum"
    with pytest.raises(CryptoError, match="out of breath"):
        write_encrypted(path, PARAMETERS, VALUES, (b for b in broken_off()))
    assert list(round_.folder.iterdir()) == []


def test_memory_is_one_sum_whatever_the_number_of_contributors(round_: Round) -> None:
    parameters: CkksParameters = choose_parameters(16, 8)
    values = parameters.packing.values_per_block * 64  # 8 MiB of ciphertext
    dealt = deal(parameters)
    key = RoundKey(parameters, dealt.secret, secret=True)
    slots = pack(np.ones(parameters.packing.values_per_block, dtype=np.int32), parameters.packing)
    path = round_.folder / "update"
    write_encrypted(path, parameters, values, [key.encrypt(slots[0], seeded=False)] * 64)
    total = CiphertextSum(parameters, values)
    for number in range(3):
        total.add_file(path, f"warm-{number}")
    rss = psutil.Process().memory_info().rss
    for number in range(12):
        total.add_file(path, f"site-{number}")
    assert psutil.Process().memory_info().rss - rss < 4 << 20


def test_a_peer_may_send_what_the_plan_implies_and_not_a_byte_more() -> None:
    plan = pb.Plan(
        participants=[pb.Participant(site=site) for site in "abcd"],
        training=pb.TrainingPlan(bits=16),
    )
    shapes = ShapeManifest("model", (("head", (VALUES - FRACTION_INTEGERS,)),))
    tags = {pb.ENCRYPTED_UPDATE: 16 + 24 * 4, pb.ENCRYPTED_SUM: 0}
    for kind, trailer in tags.items():
        most = largest_size(PARAMETERS, VALUES, trailer=trailer)
        assert too_large(kind, most, plan, shapes) is None
        refused = too_large(kind, most + 1, plan, shapes)
        assert refused is not None
        assert f"more than the {most}" in refused
        assert too_large(kind, 0, None, shapes) == "the attempt is only beginning here"


# ---- whole attempts, and who drops out of them ---------------------------------------

STAYS, SILENT, CUT, DAMAGED = "stays", "sends nothing", "cut off", "damaged"
BOUNDS = ("random", "mixed", "top", "bottom")


@dataclass(frozen=True)
class Case:
    """One attempt: what becomes of each participant's update, and what is in them.

    The first participant coordinates: it encrypts under the public key. ``tail``
    values lie in a second block; 0: there is only one.
    """

    bits: int
    fates: tuple[str, ...]
    bounds: str
    tail: int
    seed: int

    def inputs(self, limit: int, values: int) -> Int64:
        """At random, or at the bounds that clipping leaves; shape [participants, values]."""
        chance, shape = np.random.default_rng(self.seed), (len(self.fates), values)
        if self.bounds == "random":
            return chance.integers(-limit, limit, shape, endpoint=True)
        if self.bounds == "mixed":
            return limit * chance.choice(np.array([-1, 1]), shape)
        return np.full(shape, limit if self.bounds == "top" else -limit)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(2, 8) | st.integers(2, 16) | st.integers(2, 16) | st.integers(2, 64))
    # All stay, or some do not: before they send, in the midst of it, at its last bytes.
    fate = st.sampled_from([STAYS, STAYS, STAYS, SILENT, CUT, DAMAGED])
    fates = draw(st.just([STAYS] * count) | st.lists(fate, min_size=count, max_size=count))
    tail = draw(st.sampled_from([0, 0, 0, 1, 5]))
    bounds, seed = draw(st.sampled_from(BOUNDS)), draw(st.integers(0, 2**32))
    return Case(draw(st.integers(8, 24)), tuple(fates), bounds, tail, seed)


def sent(case: Case, key: RoundKey, integers: Int64, fate: str, path: Path) -> Path:
    packing = key.parameters.packing
    write_encrypted(path, key.parameters, integers.size, map(key.encrypt, pack(integers, packing)))
    whole = path.read_bytes()
    if fate == CUT:
        path.write_bytes(whole[: 1 + case.seed % (len(whole) - 1)])
    if fate == DAMAGED:  # words of the last block that are no residues: all before it is sound
        end = -64 if key.can_decrypt else len(whole)  # a seed may be any bytes
        path.write_bytes(whole[: end - 64] + b"\xff" * 64 + whole[end:])
    return path


@pytest.mark.slow
@pytest.mark.timeout(max(300, 2 * CASES))
@settings(
    max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases())
@example(Case(8, (STAYS, STAYS), "top", 0, 1))
@example(Case(24, (STAYS,) * 64, "bottom", 0, 1))
@example(Case(16, (STAYS, DAMAGED, STAYS, CUT, SILENT), "mixed", 1, 1))
@example(Case(24, (SILENT, CUT, DAMAGED, STAYS), "random", 0, 1))
def test_the_sum_is_exact_whoever_drops_out_at_whichever_step(tmp_path: Path, case: Case) -> None:
    """And it is not shown where fewer than two updates are left.

    The daemon offers 8, 12 and 16 bits; what is chosen for any other width is as exact.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parameters, "BITS", range(8, 25))
        chosen = choose_parameters(len(case.fates), case.bits)
    dealt = deal(chosen)
    keys = [RoundKey(chosen, dealt.public, secret=False)]
    keys += [RoundKey(chosen, dealt.secret, secret=True) for _ in range(2)]
    values = (chosen.packing.values_per_block if case.tail else 100) + case.tail
    inputs, path = case.inputs(chosen.packing.limit, values), tmp_path / "update"
    total = CiphertextSum(chosen, values)
    for number, fate in enumerate(case.fates):
        if fate == SILENT:
            continue
        file = sent(case, keys[min(number, 1)], inputs[number], fate, path)
        if fate == STAYS:
            total.add_file(file, str(number))
        else:
            with pytest.raises(CryptoError, match="was refused"):
                total.add_file(file, str(number))
    left = [number for number, fate in enumerate(case.fates) if fate == STAYS]
    if len(left) < 2:
        with pytest.raises(CryptoError, match="site's own update"):
            total.write(path)
        return
    total.write(path)
    # Whoever encrypted may have left by now: any other key holder decrypts the same.
    rows = [keys[2].decrypt(block) for block in read_encrypted(path, chosen, values)]
    assert np.array_equal(unpack(np.stack(rows), chosen.packing, values), inputs[left].sum(axis=0))
