"""The bounds of what sites ask one another of embeddings, and what a reply may hold. PURE.

The bounds of single fields are said in proto/federation.proto; here is what joins several.

A vector that crosses is finite and of length 1, which is looked at here and not later:
to look at 1 MiB of them took 0.6 ms where it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message

from crypto.arrays import Float32, UInt8
from peers.wire.bounds import most, number, octets, refuse
from proto import bounds
from proto import federation_pb2 as pb

VECTOR_BYTES: Final = most("NegativesReply", "embeddings")
MAX_QUERIES: Final = bounds.of("NegativesReply", "counts").items.most
MAX_DIMENSION: Final = most("NegativesRequest", "dimension")
MAX_BITS: Final = most("NegativesRequest", "bits")
_VALUE: Final = 4  # bytes of a float32
# A float32 has 24 bits, and the sum of 16,384 squares may lose a few of them.
_UNIT_TOLERANCE: Final = 1e-3


def most_queries(dimension: int, top_n: int) -> int:
    """Queries that one request may hold; 0: not even one, ask for fewer embeddings."""
    row = _VALUE * dimension
    return min(MAX_QUERIES, VECTOR_BYTES // (row * top_n))


def count_of(request: pb.NegativesRequest) -> int:
    """How many queries a request holds."""
    if request.level == pb.BUCKET:
        return len(request.buckets) // -(-request.bits // 8)
    return len(request.queries) // (_VALUE * request.dimension)


def queries_of(request: pb.NegativesRequest) -> Float32:
    """The queries [q, d] of a checked request that is not about buckets."""
    return np.frombuffer(request.queries, dtype="<f4").reshape(-1, request.dimension)


def buckets_of(request: pb.NegativesRequest) -> UInt8:
    """The buckets [q, width] of a checked request."""
    return np.frombuffer(request.buckets, dtype=np.uint8).reshape(-1, -(-request.bits // 8))


def reply_of(answers: Sequence[Float32]) -> pb.NegativesReply:
    """One array [n, d] for each query, as it is sent."""
    raw = b"".join(np.ascontiguousarray(answer, dtype="<f4").tobytes() for answer in answers)
    return pb.NegativesReply(counts=[len(answer) for answer in answers], embeddings=raw)


def answers_of(request: pb.NegativesRequest, reply: pb.NegativesReply) -> list[Float32]:
    """What a checked reply holds for each query: [n, d], n <= top_n.

    Raises RemoteProtocolError when it is no answer to this request.
    """
    wanted, path = count_of(request), "NegativesReply"
    if len(reply.counts) != wanted:
        raise refuse(f"{path}.counts", f"{len(reply.counts)} long", f"{wanted}, one a query")
    if max(reply.counts) > request.top_n:
        raise refuse(f"{path}.counts", str(max(reply.counts)), f"0 .. top_n = {request.top_n}")
    total = sum(reply.counts)
    if len(reply.embeddings) != _VALUE * request.dimension * total:
        size = f"{len(reply.embeddings)} bytes"
        raise refuse(f"{path}.embeddings", size, f"{total} rows of {request.dimension} float32")
    vectors = _units(f"{path}.embeddings", reply.embeddings, request.dimension)
    ends = np.cumsum(reply.counts)
    return np.split(vectors, ends[:-1])


def _request(path: str, request: pb.NegativesRequest) -> None:
    """Queries of one kind, whole, and few enough that the reply has room."""
    if request.level == pb.BUCKET:
        octets(0, 0)(f"{path}.queries", request.queries)
        number(1, MAX_BITS)(f"{path}.bits", request.bits)
        _rows(f"{path}.buckets", request.buckets, -(-request.bits // 8))
        _padding(f"{path}.buckets", request)
    else:
        number(0, 0)(f"{path}.bits", request.bits)
        octets(0, 0)(f"{path}.buckets", request.buckets)
        _rows(f"{path}.queries", request.queries, _VALUE * request.dimension)
        _units(f"{path}.queries", request.queries, request.dimension)
    most = most_queries(request.dimension, request.top_n)
    if count_of(request) > most:
        shape = f"{count_of(request)} times, of {request.dimension} values"
        raise refuse(f"{path}.top_n", f"{request.top_n}, {shape}", "a reply of 1 MiB at most")


def _rows(path: str, raw: bytes, width: int) -> None:
    count, rest = divmod(len(raw), width)
    if rest or not 1 <= count <= MAX_QUERIES:
        raise refuse(path, f"{len(raw)} bytes", f"1 .. {MAX_QUERIES} rows of {width} bytes")


def _padding(path: str, request: pb.NegativesRequest) -> None:
    """One bucket has one name: what fills its last byte is zero."""
    if request.bits % 8 and (buckets_of(request)[:, -1] >> request.bits % 8).any():
        raise refuse(path, "longer than bits", "zeros behind the last bit")


def _units(path: str, raw: bytes, dimension: int) -> Float32:
    vectors = np.frombuffer(raw, dtype="<f4").reshape(-1, dimension)
    # NaN and infinity fail the comparison, too. In float64: the square of a large float32
    # is no float32.
    with np.errstate(invalid="ignore"):  # refused below, and no line on stderr for a peer's NaN
        squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    if not (np.abs(squares - 1.0) <= 2 * _UNIT_TOLERANCE).all():
        raise refuse(path, "not of length 1, or not finite", "rows of length 1")
    return vectors


def _reply(path: str, reply: pb.NegativesReply) -> None:
    """What can be told without the request: whole rows, if there are any."""
    total = sum(reply.counts)
    if total == 0:
        octets(0, 0)(f"{path}.embeddings", reply.embeddings)
        return
    dimension, rest = divmod(len(reply.embeddings), _VALUE * total)
    if rest or not 1 <= dimension <= MAX_DIMENSION:
        size = f"{len(reply.embeddings)} bytes"
        raise refuse(f"{path}.embeddings", size, f"{total} rows of float32, as counts say")
    _units(f"{path}.embeddings", reply.embeddings, dimension)


RELATIONS: Final[dict[type[Message], Callable[[str, Any], None]]] = {
    pb.NegativesRequest: _request,
    pb.NegativesReply: _reply,
}
