"""The form of the audit log, and how it is verified. PURE: no clock, no network.

One JSON object a line. Every entry names the hash of the one before and ends with
its own, SHA-256 over the hash before and its own bytes, so that nobody can alter,
remove, insert or reorder a line without changing every later hash. Whoever can
write the file can do just that, from some line to the end: what they cannot change
is a head that was noted elsewhere. Verify against it.

A log is a row of segments, audit-000001.jsonl and so on. A segment's first entry
names the last hash of the segment before.

Where a log is not what the chain says, it *breaks*. What stands behind a break is a
chain again, and the daemon goes on with it: its next entry (`BROKEN`) says where the
breaks are and pins down what is there now, by a digest, so that whatever is changed at
the same place later is a break that nobody has recorded. That a person has seen it is
one more entry (`ACKNOWLEDGED`). Neither takes the break away.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

BEGINNING: Final = bytes(32)
"""What the first entry of a log names as the hash before."""

TORN: Final = "torn-line-found"
"""The action of the entry that accounts for the bytes of a line that a crash left unfinished."""

BROKEN: Final = "break-found"
"""The action of the entry that records breaks, found when the daemon opened the log."""

ACKNOWLEDGED: Final = "acknowledge"
"""The action of the entry by which a person has seen the breaks that others recorded."""

_BREAK_DOMAIN: Final = b"hanse-audit-break-v1\0"
_LAST_NUMBER: Final = (1 << 63) - 1  # of an entry; StatusReply's have 64 bits
_NOTED: Final = re.compile(rb'\{"entries":(\d{1,19}),"head":"([0-9a-f]{64})"\}\n')
_NOTED_BYTES: Final = 128  # more than the longest takes
_DOMAIN: Final = b"hanse-audit-v1\0"
_LINE: Final = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
_HASH: Final = re.compile("[0-9a-f]{64}")
_FIELDS: Final = {
    "seq": int,
    "time": str,
    "actor": str,
    "action": str,
    "outcome": str,
    "objects": dict,
    "hash": str,
}
HEAD_FILE: Final = "audit-head.json"
"""Name of the file in the state folder, beside the log's, that notes the last entry."""

_ALTERED: Final = "this entry does not have its hash: altered"
_SEGMENT: Final = re.compile(r"audit-(\d{6,})\.jsonl")


class AuditError(Exception):
    """The audit log can't be written or used; the text says why and what to do."""


class Break(AuditError):
    """A line that is not what the chain says it must be, after entry ``after``."""

    def __init__(self, path: Path, line: int, why: str, after: int, digest: str = "") -> None:
        """``digest``: of what is there now; empty where nothing follows yet that would pin it."""
        super().__init__(f"{path}, line {line}: {why}")
        self.why = why
        self.path = path
        self.line = line
        self.after = after
        self.digest = digest


@dataclass(frozen=True)
class BreakRecord:
    """The entry by which the daemon recorded breaks, and who has acknowledged it.

    ``breaks`` were found together; file, line and why are the first one's. ``head`` is the
    hash with which the log ended, or should have, when they were found. ``state`` is the
    digest of all breaks in the log by then, whose first entry was ``first``.
    """

    entry: int
    time: str
    file: str
    line: int
    why: str
    breaks: int
    head: str
    first: int
    state: str
    digests: frozenset[str]
    acknowledged_by: str = ""  # actor, and the user's name where it is known
    acknowledged_at: str = ""

    @property
    def text(self) -> str:
        """For people, in one line."""
        others = f" (and {self.breaks - 1} more)" if self.breaks > 1 else ""
        return f"{self.file}, line {self.line}: {self.why}{others}"


@dataclass
class Chain:
    """Where a log stands: its last entry, and what was found on the way there."""

    seq: int = 0
    head: bytes = BEGINNING
    first: int = 0  # the first entry that was seen; above 1 when older segments are elsewhere
    torn: list[str] = field(default_factory=list)  # accounted for by the entry after
    last_line: tuple[Path, int] | None = None
    unread: list[bytes] = field(default_factory=list)  # not accounted for yet
    unread_from: tuple[Path, int] | None = None  # file and line of the first
    altered: bool = False  # one of them is nothing that a crash leaves
    breaks: list[Break] = field(default_factory=list)
    records: list[BreakRecord] = field(default_factory=list)

    @property
    def unread_end(self) -> Break | None:
        """The break at the end of a log, if what is unread is all that follows."""
        if self.unread_from is None:
            return None
        why = "this is no entry: torn by a crash (fedd says so when it starts), or cut"
        return Break(*self.unread_from, _ALTERED if self.altered else why, self.seq)

    @property
    def unrecorded(self) -> list[Break]:
        """Breaks that no entry records."""
        known = frozenset[str]().union(*(record.digests for record in self.records))
        return [one for one in self.breaks if one.digest not in known]

    @property
    def unacknowledged(self) -> list[BreakRecord]:
        """Recorded breaks that no person has acknowledged."""
        return [record for record in self.records if not record.acknowledged_by]

    def learn(self, entry: Mapping[str, Any]) -> bool:
        """Take note of an entry that records breaks (True) or acknowledges them."""
        if entry["action"] == BROKEN and (record := _record(entry)) is not None:
            self.records.append(record)
            return True
        if entry["action"] == ACKNOWLEDGED:
            seen, name = entry["objects"].get("breaks"), entry["objects"].get("user")
            by = f"{entry['actor']} ({name})" if name else entry["actor"]
            for place, record in enumerate(self.records):
                if isinstance(seen, list) and record.entry in seen and not record.acknowledged_by:
                    self.records[place] = replace(
                        record, acknowledged_by=by, acknowledged_at=entry["time"]
                    )
        return False


def _record(entry: Mapping[str, Any]) -> BreakRecord | None:
    """What an entry says of breaks, or None where it is not of our making.

    Whoever can write the log can write this, too; it must not break what shows it.
    """
    objects, digests = entry["objects"], entry["objects"].get("digests")
    texts = {"time": entry["time"], **{name: objects.get(name) for name in ("file", "why")}}
    numbers = {name: objects.get(name) for name in ("line", "breaks", "first")}
    hashes = {name: objects.get(name) for name in ("head", "state")}
    formed = (
        all(isinstance(text, str) and text.isprintable() for text in texts.values())
        and sum(len(text) for text in texts.values()) < 1000
        and all(isinstance(n, int) and 0 < n <= _LAST_NUMBER for n in numbers.values())
        and all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes.values())
        and isinstance(digests, list)
    )
    if not formed:
        return None
    known = frozenset(digest for digest in digests if isinstance(digest, str) and digest)
    return BreakRecord(entry=entry["seq"], digests=known, **texts, **numbers, **hashes)


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
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    formed = all(isinstance(entry.get(name), kind) for name, kind in _FIELDS.items())
    if not formed or hash_of(previous, match[1]).hex() != entry["hash"]:
        return None
    if len(previous) != len(BEGINNING) or not 0 < entry["seq"] <= _LAST_NUMBER:
        return None
    return dict(entry)


def segments(folder: Path) -> list[Path]:
    """The segments of a log, oldest first."""
    numbered = sorted((int(m[1]), p) for p in folder.glob("*") if (m := _SEGMENT.fullmatch(p.name)))
    return [path for _, path in numbered]


def segment(folder: Path, number: int) -> Path:
    """The file of one segment."""
    return folder / f"audit-{number:06}.jsonl"


def number_of(path: Path) -> int:
    """Which segment a file is; raises AuditError."""
    match = _SEGMENT.fullmatch(path.name)
    if match is None:
        raise AuditError(f"{path} is no segment of an audit log (audit-000001.jsonl)")
    return int(match[1])


def walk(
    paths: Sequence[Path], chain: Chain, *, torn_end: bool = False
) -> Iterator[dict[str, Any]]:
    """Every entry that can be read, verified, on both sides of each of ``chain.breaks``.

    Lines that are no entries are passed over if the next entry accounts for them, as
    the daemon does after a crash; ``torn_end``: also at the end, where it has not done
    so yet (they are left in ``chain.unread``). Raises OSError.
    """
    last = 0
    for path in paths:
        lost = segment(path.parent, last + 1) if 0 < last < number_of(path) - 1 else None
        last = number_of(path)
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                chain.last_line = (path, number)
                line = raw.removesuffix(b"\n")
                entry = parsed(line)
                if entry is None:
                    _pass_over(chain, line, path, number)
                    continue
                _account(chain, entry)
                _follow(chain, entry, path, number, lost if number == 1 else None)
                if line == raw and not (torn_end and path == paths[-1]):
                    _cut_line(chain, path, number)
                if chain.learn(entry):
                    _changed_since(chain, path, number)
                yield entry
    if chain.unread_end is not None and not torn_end:
        chain.breaks.append(chain.unread_end)


def _torn(line: bytes) -> bool:
    """Whether a crash can have left this: a line without its end, or with pages of zeros."""
    return b"\0" in line or _LINE.fullmatch(line) is None


def _pass_over(chain: Chain, line: bytes, path: Path, number: int) -> None:
    chain.unread_from = chain.unread_from or (path, number)
    chain.altered = chain.altered or not _torn(line)
    chain.unread.append(line)


def read_over(chain: Chain) -> bytes:
    """What could not be read, and is no longer waited for."""
    unread = b"\n".join(chain.unread)
    chain.unread, chain.unread_from, chain.altered = [], None, False
    return unread


def _account(chain: Chain, entry: Mapping[str, Any]) -> None:
    """Forget what could not be read before ``entry`` if it is what the entry says that it was."""
    if chain.unread_from is None or chain.altered or entry["action"] != TORN:
        return
    if entry["objects"].get("sha256") == hashlib.sha256(b"\n".join(chain.unread)).hexdigest():
        path, number = chain.unread_from
        chain.torn.append(f"{path.name}, line {number}")
        read_over(chain)


def _follow(
    chain: Chain, entry: Mapping[str, Any], path: Path, number: int, lost: Path | None
) -> None:
    """Go on with ``entry``, which may be the first behind a break; ``lost``: a segment before."""
    broken = break_before(chain, (entry["seq"], entry["previous"]), path, number, lost)
    if broken is not None:
        chain.breaks.append(broken)
        read_over(chain)
    chain.first = chain.first or entry["seq"]
    chain.seq, chain.head = entry["seq"], bytes.fromhex(entry["hash"])


def break_before(
    chain: Chain, entry: tuple[int, str], path: Path, number: int, lost: Path | None = None
) -> Break | None:
    """The break in front of an entry of this number, after this hash, at that line; or None."""
    seq, previous = entry[0], bytes.fromhex(entry[1])
    why = ""
    if chain.unread_from is not None:
        path, number = chain.unread_from
        no_entry = "this is no entry, and the next one does not account for it"
        why = _ALTERED if chain.altered else no_entry
    elif not chain.first:
        # Older segments may be kept elsewhere; the first one begins with the first entry.
        begins = (seq == 1) == (previous == BEGINNING) and (seq == 1 or number_of(path) > 1)
        why = "" if begins else "the first entry does not begin a log"
    elif previous != chain.head or seq != chain.seq + 1:
        why = f"entry {seq} does not follow entry {chain.seq}: one was removed, inserted or moved"
        path, number, why = (lost, 1, "it is missing: put it back") if lost else (path, number, why)
    if not why:
        return None
    digest = _digest_of_break(chain.head, previous, b"\n".join(chain.unread))
    return Break(path, number, why, chain.seq, digest)


def _changed_since(chain: Chain, path: Path, number: int) -> None:
    """What the last record saw of the log must be there as it was.

    A break says what is right before it and behind it. Where breaks stand close together
    whole entries between them could go, and only take breaks away.
    """
    record, now = chain.records[-1], digest_of_all(chain.breaks)
    if record.first == chain.first and record.state != now:
        why = "the log was changed where this entry, or one before it, records that it is broken"
        digest = _digest_of_break(chain.head, chain.head, now.encode())
        chain.breaks.append(Break(path, number, why, chain.seq, digest))


def digest_of_all(breaks: Iterable[Break]) -> str:
    """Of all breaks of a log up to some entry."""
    return hashlib.sha256(_BREAK_DOMAIN + b"".join(b.digest.encode() for b in breaks)).hexdigest()


def _cut_line(chain: Chain, path: Path, number: int) -> None:
    why = "the line's end is missing: a crash, or it was cut"
    digest = _digest_of_break(chain.head, chain.head, b"no end")
    chain.breaks.append(Break(path, number, why, chain.seq, digest))


def _digest_of_break(head: bytes, previous: bytes, unread: bytes) -> str:
    """Of a break: the hash before it, the one that the next entry names, and what is between.

    Whoever changes an entry on either side, or what is between, makes it another break.
    """
    return hashlib.sha256(_BREAK_DOMAIN + head + previous + unread).hexdigest()


# ---- the head, noted beside the log ---------------------------------------------


Head = tuple[int, bytes]
"""Number and hash of an entry."""


def read_noted(path: Path) -> Head | None:
    """The last entry that was written, as noted beside the log.

    None when nothing is noted. Raises AuditError when what is there is no head, OSError.
    """
    try:
        with path.open("rb") as file:
            match = _NOTED.match(file.read(_NOTED_BYTES))
    except FileNotFoundError:
        return None
    if match is None:
        raise AuditError(f"{path} does not name the last entry of an audit log")
    return int(match[1]), bytes.fromhex(match[2].decode())


def noted(head: Head) -> bytes:
    """What is noted of a head."""
    return b'{"entries":%d,"head":"%s"}\n' % (head[0], head[1].hex().encode())


def is_at(entry: Mapping[str, Any] | None, head: Head | None) -> bool:
    """Whether a log with this entry has had that head: its own, the one before, or told in it.

    Every log has had none, and an empty one (None) no other.
    """
    if head is None or not head[0]:
        return True
    if entry is None:
        return False
    recorded = entry["objects"].get("head") if entry["action"] == BROKEN else None
    return head[1].hex() in (entry["hash"], entry["previous"], recorded)


def lost_end(head: Head, chain: Chain, path: Path) -> Break:
    """A log, read to its end, in which the head that was noted is not; ``path``: if it is empty."""
    path, line = chain.last_line or (path, 0)
    why = f"entry {head[0]} is not the one that was written: the log was written anew"
    if head[0] > chain.seq:
        why = f"the log went on to entry {head[0]}: its end was cut off, or it was written anew"
    return Break(path, line + 1, why, min(chain.seq, head[0]))
