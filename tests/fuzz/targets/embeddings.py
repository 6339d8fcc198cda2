"""Target: requests for negatives, and what a peer answers to ours."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from crypto.arrays import Float32
from crypto.disclosure import PrefixTable, Projections
from peers.link.negatives import AnswerPolicy, Declined, Desk
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import decode, parse
from peers.wire.negative_bounds import answers_of, buckets_of, count_of, queries_of, reply_of
from proto import federation_pb2 as pb
from tests.fuzz.mutators import mutate_bytes, mutate_message
from tests.fuzz.world import FEDERATION, GENESIS

_D, _TOP_N, _ROWS = 4, 3, 16
_POLICY = AnswerPolicy(
    answer=True,
    levels=frozenset({"exact", "noisy", "bucket"}),
    queries_per_round=1 << 40,
    top_n=_TOP_N,
    bits=64,
)
_DESK = Desk(_POLICY, _D)
_REQUEST, _REPLY = b"\0", b"\1"


def _units(n: int) -> Float32:
    values = np.random.default_rng(n).normal(size=(n, _D))
    result: Float32 = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype("<f4")
    return result


def _asking() -> pb.NegativesRequest:
    return pb.NegativesRequest(
        federation_id=FEDERATION,
        sender="beta",
        model_digest=GENESIS,
        level=pb.EXACT,
        dimension=_D,
        top_n=_TOP_N,
        queries=_units(2).tobytes(),
    )


def judge_negatives(data: bytes) -> bool:
    """Accepted: a request can be searched for; a reply is unit vectors, as many as it may be."""
    try:
        if data[:1] == _REPLY:
            _read(parse(pb.NegativesReply, data[1:]))
        else:
            _search(parse(pb.NegativesRequest, data[1:]))
    except (RemoteProtocolError, Declined):
        return False
    return True


def _search(request: pb.NegativesRequest) -> None:
    order = _DESK.admit(request.sender, request, GENESIS, 1)
    assert 1 <= order.count == count_of(request)
    assert 1 <= order.top_n <= _TOP_N
    table = _units(_ROWS)
    if order.level == "bucket":
        every = Projections(GENESIS, _D, _POLICY.bits).buckets(table)
        buckets = PrefixTable(every).of(request.bits)
        names = buckets_of(request)
        assert len(names) == order.count
        drawn = [buckets.draw(name, order.top_n, np.random.default_rng(0)) for name in names]
        assert all(1 <= len(rows) <= order.top_n for rows in drawn)
    else:
        cosines = queries_of(request) @ table.T
        assert cosines.shape == (order.count, _ROWS)
        assert (np.abs(cosines) < 1.01).all()


def _read(reply: pb.NegativesReply) -> None:
    found = answers_of(_asking(), reply)
    assert len(found) == 2
    for rows in found:
        assert rows.shape[1] == _D
        assert len(rows) <= _TOP_N
        assert (np.abs(np.linalg.norm(rows, axis=1) - 1.0) < 2e-3).all()


def mutate_negatives(data: bytes, chance: Random) -> bytes:
    """Half of the vectors made unit vectors again: else nothing behind that would be reached."""
    kind: type[pb.NegativesRequest | pb.NegativesReply] = (
        pb.NegativesReply if data[:1] == _REPLY else pb.NegativesRequest
    )
    try:
        message = decode(kind, data[1:])
    except RemoteProtocolError:
        return data[:1] + mutate_bytes(data[1:], chance)
    mutate_message(message, chance)
    name = "embeddings" if isinstance(message, pb.NegativesReply) else "queries"
    if chance.random() < 0.5:
        setattr(message, name, _unit_again(getattr(message, name)))
    return data[:1] + message.SerializeToString()


def _unit_again(raw: bytes) -> bytes:
    vectors = np.frombuffer(raw[: len(raw) // (4 * _D) * 4 * _D], "<f4").reshape(-1, _D)
    with np.errstate(invalid="ignore"):
        vectors = np.nan_to_num(vectors.astype(np.float64), posinf=1.0, neginf=-1.0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1.0)).astype("<f4").tobytes()


def negatives_seeds() -> Iterator[bytes]:
    request = _asking()
    yield _REQUEST + request.SerializeToString()
    request.level = pb.NOISY
    yield _REQUEST + request.SerializeToString()
    names = Projections(GENESIS, _D, 10).buckets(_units(3)).tobytes()
    request.level, request.bits, request.queries, request.buckets = pb.BUCKET, 10, b"", names
    yield _REQUEST + request.SerializeToString()
    yield _REPLY + reply_of([_units(3), _units(1)]).SerializeToString()
    yield _REPLY + reply_of([_units(0), _units(0)]).SerializeToString()
    yield _REPLY + reply_of([_units(4), _units(1)]).SerializeToString()  # more than was asked for
