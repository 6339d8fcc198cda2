"""Messages with one thing changed, signed anew where the signature is the liar's own."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from peers.attempts import effects as do
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check
from peers.wire.signing import Keys, Kind, sign
from proto import federation_pb2 as pb

_KINDS: dict[str, tuple[Kind, type[Message]]] = {
    "run": (Kind.RUN, pb.Run),
    "promise": (Kind.PROMISE, pb.Promise),
    "commitment": (Kind.KEY_COMMITMENT, pb.KeyCommitment),
    "exponents": (Kind.EXPONENTS, pb.Exponents),
    "contribution": (Kind.CONTRIBUTION, pb.Contribution),
    "products": (Kind.PRODUCTS, pb.Products),
    "applied": (Kind.APPLIED, pb.Applied),
    "ended": (Kind.ENDED, pb.Ended),
}


class Spoiler:
    """Changes messages of one site, within the bounds of the wire.

    ``digests``: of statements that were heard, to be put in the place of others.
    """

    def __init__(
        self,
        site: str,
        keys: Keys,
        world: Any,
        chance: random.Random,
        digests: Collection[bytes],
    ) -> None:
        self.site = site
        self._keys = keys
        self._world = world
        self._random = chance
        self._statements = digests

    def changed(self, body: do.Body) -> do.Body | None:
        """The message with one thing changed; None when it would not get past the door."""
        copy = type(body)()
        copy.CopyFrom(body)
        for _ in range(4):
            if self._change(copy) and in_bounds(copy):
                return copy
            copy.CopyFrom(body)
        return None

    def _change(self, message: Message, depth: int = 0) -> bool:
        fields = message.ListFields()
        if not fields:
            return False
        field, value = self._random.choice(fields)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = self._random.choice(list(value)) if field.is_repeated else value
            if isinstance(inner, pb.Signed):
                return self._change_signed(field.name, inner)
            if field.is_repeated and self._random.random() < 0.3:
                value.remove(inner)
                return True
            return self._change(inner, depth + 1)
        if field.is_repeated:
            values = list(value)
            position = self._random.randrange(len(values))
            if self._random.random() < 0.5:
                del values[position]
            else:
                values[position] = self._other(field, values[position])
            del value[:]
            value.extend(values)
            return True
        setattr(message, field.name, self._other(field, value))
        return True

    def _change_signed(self, name: str, signed: pb.Signed) -> bool:
        known = _KINDS.get(name.rstrip("s") if name.rstrip("s") in _KINDS else name)
        if known is None or signed.site != self.site:
            signed.body = bytes(self._random.randbytes(len(signed.body)))
            return True
        kind, as_a = known
        inner = as_a.FromString(signed.body)
        if not self._change(inner):
            return False
        signed.CopyFrom(sign(self._keys, kind, inner))
        if self._random.random() < 0.3:  # as if another one had said it
            signed.site = self._random.choice(sorted(self._world.disks))
        return True

    def _other(self, field: FieldDescriptor, value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, bytes):
            pool = [digest for digest in self._statements if len(digest) == len(value)]
            if pool and self._random.random() < 0.5:
                return self._random.choice(pool)
            return self._random.randbytes(len(value))
        if isinstance(value, str):
            return self._random.choice(sorted(self._world.disks))
        if isinstance(value, float):
            return value * self._random.choice((0.0, 0.5, 2.0, 1000.0)) + self._random.random()
        low = self._random.choice((0, 1, 2, 7, 2**31 - 1))
        wide = field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64)
        huge = 2**62 if wide else 2**31 - 2
        return self._random.choice((low, max(0, value - 1), value + 1, huge))


def in_bounds(message: Any) -> bool:
    """Whether the message would get past the door."""
    try:
        check(message)
    except RemoteProtocolError:
        return False
    return True
