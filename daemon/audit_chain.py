"""The form of the audit log, and how it is verified. PURE: no clock, no network.

One JSON object a line. Every entry names the hash of the one before and ends with
its own, SHA-256 over the hash before and its own bytes, so that nobody can alter,
remove, insert or reorder a line without changing every later hash. Whoever can
write the file can do just that, from some line to the end: what they cannot change
is a head that was noted elsewhere. Verify against it.

A log is a row of segments, audit-000001.jsonl and so on. A segment's first entry
names the last hash of the segment before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BEGINNING: Final = bytes(32)
"""What the first entry of a log names as the hash before."""

TORN: Final = "torn-line-found"
"""The action of the entry that accounts for the bytes of a line that a crash left unfinished."""

_DOMAIN: Final = b"hanse-audit-v1\0"
_LINE: Final = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
_FIELDS: Final = {
    "seq": int,
    "time": str,
    "actor": str,
    "action": str,
    "outcome": str,
    "objects": dict,
    "hash": str,
}
_SEGMENT: Final = re.compile(r"audit-(\d{6,})\.jsonl")


class AuditError(Exception):
    """The audit log can't be written or used; the text says why and what to do."""


class Break(AuditError):
    """The first line that is not what the chain says it must be."""

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}")
        self.why = why
        self.path = path
        self.line = line


@dataclass
class Chain:
    """Where a log stands: its last entry, and what was found on the way there."""

    seq: int = 0
    head: bytes = BEGINNING
    first: int = 0  # the first entry that was seen; above 1 when older segments are elsewhere
    torn: list[str] = field(default_factory=list)  # accounted for by the entry after
    unread: list[bytes] = field(default_factory=list)  # not accounted for yet


def hash_of(previous: bytes, body: bytes) -> bytes:
    """Of an entry whose line, up to its own hash, is ``body``."""
    return hashlib.sha256(_DOMAIN + previous + body).digest()


def line_of(entry: Mapping[str, Any], previous: bytes) -> tuple[bytes, bytes]:
    """The line of an entry, without the line's end, and its hash."""
    text = json.dumps({**entry, "previous": previous.hex()}, separators=(",", ":"), allow_nan=False)
    body = text.removesuffix("}").encode("ascii")
    digest = hash_of(previous, body)
    return body + b',"hash":"' + digest.hex().encode() + b'"}', digest


def parsed(line: bytes) -> dict[str, Any] | None:
    """An entry whose own hash is right, or None."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        entry = json.loads(line)
        previous = bytes.fromhex(entry["previous"])
    except (ValueError, KeyError, TypeError):
        return None
    formed = all(isinstance(entry.get(name), kind) for name, kind in _FIELDS.items())
    if not formed or hash_of(previous, match[1]).hex() != entry["hash"]:
        return None
    return dict(entry)


def segments(folder: Path) -> list[Path]:
    """The segments of a log, oldest first. Raises AuditError when one between is missing."""
    found = sorted((int(m[1]), p) for p in folder.glob("*") if (m := _SEGMENT.fullmatch(p.name)))
    numbers = [number for number, _ in found]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        raise AuditError(f"{segment(folder, missing[0])} is missing: put it back")
    return [path for _, path in found]


def segment(folder: Path, number: int) -> Path:
    """The file of one segment."""
    return folder / f"audit-{number:06}.jsonl"


def number_of(path: Path) -> int:
    """Which segment a file is; raises AuditError."""
    match = _SEGMENT.fullmatch(path.name)
    if match is None:
        raise AuditError(f"{path} is no segment of an audit log (audit-000001.jsonl)")
    return int(match[1])


def entries(
    paths: Sequence[Path], chain: Chain | None = None, *, torn_end: bool = False
) -> Iterator[dict[str, Any]]:
    """Every entry of these segments, verified; ``chain`` follows.

    Lines that are no entries are passed over if the next entry accounts for them, as
    the daemon does after a crash; ``torn_end``: also at the end, where it has not done
    so yet (they are left in ``chain.unread``). Raises Break, OSError.
    """
    chain = chain if chain is not None else Chain()
    for path in paths:
        chain.unread = []
        number = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removesuffix(b"\n")
                entry = parsed(line)
                if entry is None and _torn(line):
                    chain.unread.append(line)
                elif entry is None:
                    raise Break(path, number, "this entry does not have its hash: altered")
                elif line == raw and not torn_end:
                    raise Break(path, number, "the line's end is missing: a crash, or it was cut")
                else:
                    _account(chain, entry, path, number)
                    _follow(chain, entry, path, number)
                    yield entry
        if chain.unread and not (torn_end and path == paths[-1]):
            why = "this is no entry: torn by a crash (fedd says so when it starts), or cut"
            raise Break(path, number - len(chain.unread) + 1, why)


def _torn(line: bytes) -> bool:
    """Whether a crash can have left this: a line without its end, or with pages of zeros."""
    return b"\0" in line or _LINE.fullmatch(line) is None


def _account(chain: Chain, entry: Mapping[str, Any], path: Path, number: int) -> None:
    """What could not be read before ``entry`` is what it says that it was."""
    if not chain.unread:
        return
    first = number - len(chain.unread)
    told = entry["objects"].get("sha256") if entry["action"] == TORN else None
    if told != hashlib.sha256(b"\n".join(chain.unread)).hexdigest():
        raise Break(path, first, "this is no entry, and the next one does not account for it")
    chain.torn.append(f"{path.name}, line {first}")
    chain.unread = []


def _follow(chain: Chain, entry: Mapping[str, Any], path: Path, number: int) -> None:
    previous, seq = bytes.fromhex(entry["previous"]), entry["seq"]
    if not chain.first:
        if seq < 1 or (seq == 1) != (previous == BEGINNING):
            raise Break(path, number, "the first entry does not begin a log")
        chain.first, chain.seq, chain.head = seq, seq - 1, previous
    if previous != chain.head or seq != chain.seq + 1:
        raise Break(
            path,
            number,
            f"entry {seq} does not follow entry {chain.seq}: one was removed, inserted or moved",
        )
    chain.seq, chain.head = seq, bytes.fromhex(entry["hash"])
