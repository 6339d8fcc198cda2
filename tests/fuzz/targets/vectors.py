"""Targets: what SEAL is given to load, encrypted vectors, and model versions.

A ciphertext has 128 KiB, of which a corpus can't hold many. So for the targets
of round keys an input is a list of edits (`Edit`) to an object that is the same
in every process; half of what blind mutation makes of such a list is an edit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from crypto.ckks.parameters import choose_parameters
from crypto.ckks.sum_proof import NONCE_BYTES, Check, CheckKey, Tags, TagTally
from crypto.ckks.sums import RoundKey, RunningSum
from crypto.quantize import CryptoError
from daemon.jobs.sums.aggregation import CiphertextSum
from daemon.state.versions import (
    ShapeManifest,
    VersionError,
    import_version,
    read_version,
    version_digest,
    write_version,
)
from peers.wire.vectors import largest_size, read_encrypted, write_encrypted
from tests.fuzz.mutators import mutate_bytes, mutate_json, read_json
from tests.fuzz.world import world

PARAMETERS = choose_parameters(3, 16)
TWO_PRIMES = choose_parameters(3, 12)
_PRIME = 0x0FFFFFFFFFFF4001  # SEAL's 60-bit prime at N = 8192
_EDIT = struct.Struct("<BIQ")
_MOST_EDITS = 16
_HEADER = 14  # of a round context
_NEAR = (0, 1, _PRIME - 1, _PRIME, _PRIME + 1, 1 << 60, 1 << 63, (1 << 64) - 1)


def edited(base: bytes, edits: bytes, header: int = 0) -> bytes:
    """``base`` after each edit: what to do (1 byte), where (4), with what (8).

    Words begin behind a ``header`` of so many bytes.
    """
    data = bytearray(base)
    for start in range(0, min(len(edits), _MOST_EDITS * _EDIT.size), _EDIT.size):
        record = edits[start : start + _EDIT.size].ljust(_EDIT.size, b"\0")
        kind, position, value = _EDIT.unpack(record)
        at = position % (len(data) + 1)
        word = at // 8 * 8 + header % 8
        match kind % 8:
            case 0:
                data[word : word + 8] = value.to_bytes(8, "little")
            case 1:
                data[at : at + 1] = bytes([value & 0xFF])
            case 2:
                del data[at:]
            case 3:
                data += bytes(value % 4096)
            case 4:
                data[word : word + 8] = _NEAR[value % len(_NEAR)].to_bytes(8, "little")
            case 5:
                size = min(len(data) - at, value % (1 << 18))
                data[at : at + size] = bytes(size)
            case 6:
                size = min(len(data) - at, value % (1 << 18))
                data[at : at + size] = b"\xff" * size
            case 7:
                del data[at : at + value % 4096]
    return bytes(data)


def mutate_edits(data: bytes, chance: Random) -> bytes:
    """The first byte says which object; an edit more, less, or another one."""
    head, edits = data[:1] or b"\0", data[1:]
    records = [edits[at : at + _EDIT.size] for at in range(0, len(edits), _EDIT.size)]
    place = chance.choice((chance.getrandbits(32), chance.randrange(1 << 18), chance.randrange(32)))
    value = chance.choice((chance.randrange(8), chance.randrange(4096), chance.getrandbits(64)))
    edit = _EDIT.pack(chance.randrange(8), place, value)
    match chance.randrange(4):
        case 0 if records:
            records[chance.randrange(len(records))] = edit
        case 1 if records:
            del records[chance.randrange(len(records))]
        case 2:
            head = bytes([chance.randrange(8)])
        case _:
            records.append(edit)
    return head + b"".join(records)


def edit_seeds() -> Iterator[bytes]:
    for which in range(4):
        yield bytes([which])
        for kind, place, value in (
            *((0, 64, _PRIME - 1), (4, 64, 3), (4, 0, 7), (2, 14, 0), (2, 100, 0), (3, 0, 8)),
            *((1, 4, 2), (1, 5, 2), (5, 0, 1 << 17), (6, 64, 1 << 17), (7, 0, 8)),
        ):
            yield bytes([which]) + _EDIT.pack(kind, place, value)


# ---- what they are made of ------------------------------------------------------------


@cache
def _residues(count: int, seed: int) -> bytes:
    """Words below every prime that is used: what SEAL takes for polynomials."""
    words = np.random.default_rng(seed).integers(0, 1 << 59, count, np.uint64)
    return words.astype("<u8").tobytes()


def _context(which: int) -> tuple[bytes, bool]:
    """A round context, and whether it is a secret one; of one and of two primes."""
    parameters = (PARAMETERS, TWO_PRIMES)[which >> 1 & 1]
    secret = bool(which & 1)
    words = parameters.degree * len(parameters.primes) * (1 if secret else 2)
    header = struct.pack("<4sBB8s", b"HNSK", 1, 2 if secret else 1, parameters.identity)
    return header + _residues(words, 1), secret


def _block(which: int) -> bytes:
    """A ciphertext of two polynomials, or of one and a seed."""
    if which & 1:
        return _residues(PARAMETERS.degree, 2) + bytes(range(64))
    return _residues(2 * PARAMETERS.degree, 3)


@cache
def _holder() -> RoundKey:
    return RoundKey(PARAMETERS, _context(1)[0], secret=True)


# ---- contexts ------------------------------------------------------------------------------


def judge_context(data: bytes) -> bool:
    """Accepted: SEAL can work with it."""
    which = data[0] if data else 0
    context, secret = _context(which)
    parameters = (PARAMETERS, TWO_PRIMES)[which >> 1 & 1]
    try:
        key = RoundKey(parameters, edited(context, data[1:], _HEADER), secret=secret)
        block = key.encrypt(np.zeros(parameters.packing.slots, dtype=np.complex128))
    except CryptoError:
        return False
    assert len(block) == (parameters.seeded_block if secret else parameters.full_block)
    return True


# ---- ciphertexts ----------------------------------------------------------------------------


def judge_block(data: bytes) -> bool:
    """Accepted or refused: a sum changes by it alone, and is put back to the last bit."""
    block = edited(_block(data[0] if data else 0), data[1:])
    total = RunningSum(PARAMETERS, 1)
    total.add(0, _block(0))
    try:
        total.add(0, block)
    except CryptoError:
        assert total.block(0) == _block(0)
        return False
    total.subtract(0, block)
    assert total.block(0) == _block(0)
    assert _holder().decrypt(block).shape == (PARAMETERS.packing.slots,)
    return True


# ---- encrypted vectors -------------------------------------------------------------------------

_VALUES = PARAMETERS.packing.values_per_block + 1  # two blocks


@cache
def _vector_file() -> bytes:
    path = world().folder("vectors") / "honest"
    write_encrypted(path, PARAMETERS, _VALUES, (_block(0), _block(1)))
    return path.read_bytes()


def judge_vector(data: bytes) -> bool:
    """Refused: the sum is as before. Accepted: as many blocks as the round agreed on."""
    folder = world().folder("vectors")
    honest, path = folder / "honest", folder / "update"
    content = edited(_vector_file(), data[1:], 26 + 4)
    path.write_bytes(content)
    total = CiphertextSum(PARAMETERS, _VALUES)
    if data and data[0] & 1:
        total.add_file(honest, "alpha")
    before = total.contributors
    try:
        total.add_file(path, "beta")
    except CryptoError:
        assert total.contributors == before
        total.add_file(honest, "gamma")
        return False
    assert len(content) <= largest_size(PARAMETERS, _VALUES)
    assert len(list(read_encrypted(path, PARAMETERS, _VALUES))) == 2
    return True


# ---- tags behind an update ---------------------------------------------------------------------

_CHECK = Check("beta", "alpha", ("beta", "gamma", "omega"), bytes(32))


@cache
def _tags() -> bytes:
    integers = np.arange(-50, 50, dtype=np.int32)
    return CheckKey(b"fuzz", 1, 0).tags(_CHECK, (0,), integers, bytes(range(NONCE_BYTES)))


def judge_tags(data: bytes) -> bool:
    """Accepted: there is one encoding of what they say. Then the coordinator can work with them."""
    content = edited(_tags(), data[1:])
    try:
        tags = Tags.parse(content, len(_CHECK.holders))
    except CryptoError:
        return False
    pairs = zip(tags.values, tags.commitments, strict=True)
    again = [value.to_bytes(8, "little") + commitment for value, commitment in pairs]
    assert b"".join([tags.nonce, *again]) == content
    tally = TagTally(replace(_CHECK, site="alpha"))
    tally.add("beta", tags)
    assert tally.nonces(["beta"]) == (("beta", tags.nonce),)
    with suppress(CryptoError):  # it committed to another challenge
        assert len(tally.answer(["beta"], "gamma", CheckKey(b"fuzz", 1, 0).challenge("gamma"))) == 8
    return True


# ---- model versions -----------------------------------------------------------------

SHAPE = ShapeManifest("fuzz", (("a", (2, 3)), ("b", (4,))))
_VECTOR = np.linspace(-1, 1, SHAPE.total, dtype=np.float32)
_DIGEST = version_digest(SHAPE.digest, _VECTOR)


def judge_version(data: bytes) -> bool:
    """Accepted: the vector of that name, which every reader can split into its groups."""
    folder = world().folder("versions")
    arrived = folder / "arrived"
    arrived.write_bytes(data)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    try:
        import_version(arrived, folder, _DIGEST)
    except VersionError:
        assert not list(folder.iterdir())
        return False
    vector = read_version(folder, _DIGEST, SHAPE.digest)
    assert sum(part.size for part in SHAPE.split(vector).values()) == SHAPE.total
    assert vector.tobytes() == _VECTOR.tobytes()
    return True


def mutate_version(data: bytes, chance: Random) -> bytes:
    """Its JSON header changed, with the length right; or its values."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data):
        return data
    header, values = data[8 : 8 + length], data[8 + length :]
    if chance.random() < 0.2:
        return data[: 8 + length] + mutate_bytes(values, chance)
    value = read_json(header)
    if isinstance(value, dict) and isinstance(value.get("shared"), dict) and chance.random() < 0.6:
        value = {**value, "shared": _other_tensor(value["shared"], chance)}
    else:
        value = mutate_json(value, chance)
    text = json.dumps(value, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + values


def _other_tensor(tensor: dict[str, object], chance: Random) -> dict[str, object]:
    match chance.randrange(3):
        case 0:
            kinds = ("F16", "F32", "F64", "BF16", "F8_E4M3", "BOOL", "I32", "U64", "C64", "F4")
            return {**tensor, "dtype": chance.choice(kinds)}
        case 1:
            shapes: tuple[list[int], ...] = (
                [10],
                [10, 1],
                [1, 10],
                [2, 5],
                [],
                [0],
                [5],
                [2**62, 4],
                [20],
            )
            return {**tensor, "shape": chance.choice(shapes)}
    ends = chance.choice(([0, 40], [0, 20], [20, 40], [40, 0], [0, 2**63], [0, 0]))
    return {**tensor, "data_offsets": ends}


def version_seeds() -> Iterator[bytes]:
    folder = world().folder("seeds")
    yield _written(folder)
    yield mutate_version(_written(folder), Random(1))


def _written(folder: Path) -> bytes:
    return write_version(folder, SHAPE.digest, _VECTOR)[1].read_bytes()
