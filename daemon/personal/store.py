"""What a site keeps to itself between rounds: its student, or its personal layer.

A folder of safetensors files that no message ever reads:

- ``round-<n>``: what training for round n left behind. Training for a round starts
  from the newest file of an *earlier* round, so that a second attempt, or one after
  a crash, starts from where the first did and nothing is learned twice.
- ``version-<digest>``: the state that a model version was first indexed with, and
  with which it answers: passages in an index and the questions asked of it must go
  through the same layers, also while the next round is being trained. A personal query
  encoder is of one version, too, but comes after the index, which knows nothing of it.
- ``half``: what the last mixture was made of beside the shared version.

A file is of use only with the retriever it was made for: it names the digest of
that one's shape, which covers encoder and adaptation, and is passed over otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from config.recipes import PERSONAL
from crypto.arrays import Float32
from crypto.durable import whole
from daemon.learning.options import DepthReport, LearningError

_ROUNDS_KEPT = 3  # the next attempt needs the one before its round
_VERSIONS_KEPT = 8


@dataclass(frozen=True)
class PersonalState:
    """Arrays of a site's own, and facts about them that JSON can hold."""

    arrays: Mapping[str, Float32]
    facts: Mapping[str, Any] = field(default_factory=dict)


def seed_for(seed: int, model_digest: bytes) -> int:
    """128 bits; the same for another try at the same version."""
    text = b"hanse-personal-v1\0" + seed.to_bytes(8, "little") + model_digest
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


class PersonalStore:
    """The files of one site, for one shape of retriever."""

    def __init__(self, folder: Path, shape_digest: bytes) -> None:
        self.folder = folder
        self._shape = shape_digest.hex()

    def before(self, round: int) -> PersonalState | None:
        """The state to train round ``round`` from; None: there is none that fits."""
        for number, path in reversed(self._rounds()):
            if number < round and (state := self._read(path)) is not None:
                return state
        return None

    def newest(self) -> PersonalState | None:
        """The state of the last round that was trained for; None: there is none that fits."""
        rounds = self._rounds()
        return self.before(rounds[-1][0] + 1) if rounds else None

    def keep(self, round: int, state: PersonalState) -> None:
        """Keep what training for a round left behind, whole or not at all."""
        self._write(self.folder / f"round-{round}.safetensors", state)
        earlier = [path for number, path in self._rounds() if number <= round]
        # A later round than the one under way belongs to a history that was given up.
        for number, path in self._rounds():
            if number > round or path in earlier[:-_ROUNDS_KEPT]:
                path.unlink(missing_ok=True)

    def forget_rounds(self) -> None:
        """Drop what rounds left behind: one is trained that goes on from nothing of the site's."""
        for _, path in self._rounds():
            path.unlink(missing_ok=True)

    def serving(self, model_digest: bytes) -> PersonalState | None:
        """The state that a model version answers with; None: none was pinned to it."""
        path = self._version(model_digest)
        return self._read(path) if path.exists() else None

    def pin(self, model_digest: bytes) -> bool:
        """Make the newest state the one that this version answers with.

        False, and nothing changes, where one is pinned to it already or there is none.
        """
        path = self._version(model_digest)
        if path.exists() and self._read(path) is not None:
            return False
        newest = self.newest()
        if newest is None:
            return False
        self._write(path, newest)
        self._forget_old_versions(path)
        return True

    def put(self, model_digest: bytes, state: PersonalState) -> None:
        """Make a state the one that a version answers with, in place of any before."""
        path = self._version(model_digest)
        self._write(path, state)
        self._forget_old_versions(path)

    @property
    def half_path(self) -> Path:
        """Where `keep_half` keeps it."""
        return self.folder / "half.safetensors"

    def keep_half(self, half: PersonalState) -> None:
        """Keep this site's own half of a mixture, in place of the one before."""
        self._write(self.half_path, half)

    def half(self) -> PersonalState | None:
        """This site's own half of the last mixture; None: there is none that fits."""
        return self._read(self.half_path) if self.half_path.exists() else None

    def _forget_old_versions(self, keep: Path) -> None:
        pinned = sorted(self.folder.glob("version-*"), key=lambda file: file.stat().st_mtime_ns)
        for old in pinned[:-_VERSIONS_KEPT]:
            if old != keep:
                old.unlink(missing_ok=True)

    def _version(self, model_digest: bytes) -> Path:
        return self.folder / f"version-{model_digest.hex()}.safetensors"

    def _rounds(self) -> list[tuple[int, Path]]:
        rounds = []
        for path in self.folder.glob("round-*.safetensors"):
            number = path.stem.removeprefix("round-")
            if number.isdecimal():
                rounds.append((int(number), path))
        return sorted(rounds)

    def _read(self, path: Path) -> PersonalState | None:
        """None when it belongs to another retriever; LearningError when it is damaged."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("shape_digest") != self._shape:
                    return None
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(metadata.get("facts", "{}"))
        except (OSError, SafetensorError, ValueError) as error:
            raise LearningError(
                f"cannot read this site's personal parameters {path}: {error}; delete the file "
                "to begin them anew"
            ) from error
        return PersonalState(arrays, facts)

    def _write(self, path: Path, state: PersonalState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        metadata = {"shape_digest": self._shape, "facts": json.dumps(dict(state.facts))}
        try:
            with whole(path) as unfinished:
                save_file(dict(state.arrays), unfinished, metadata=metadata)
        except SafetensorError as error:  # a full disk, too, is one of these
            raise OSError(f"cannot write {path}: {error}") from error


def embedded_by(personal: str, folder: str | Path, model_digest: bytes) -> bytes:
    """Name (32 bytes) of what passages are embedded by, as an index has it.

    The version's own digest, unless they go through parameters of this site, too
    (``personal`` as in settings): then that and the digest of these. So an index never
    meets questions that were embedded otherwise than its passages. Reads a file.
    """
    own = own_digest(folder, model_digest) if PERSONAL[personal].owns_passages else b""
    if not own:
        return model_digest
    return hashlib.sha256(b"hanse-embedded-by-v1\0" + model_digest + own).digest()


def own_digest(folder: str | Path, model_digest: bytes) -> bytes:
    """SHA-256 of what this site keeps for a version; b"" where it keeps nothing. Reads a file."""
    path = Path(folder) / f"version-{model_digest.hex()}.safetensors"
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return hashlib.file_digest(cast(Any, file), "sha256").digest()


def report_of(state: PersonalState | None) -> DepthReport | None:
    """What was last decided, and why."""
    report = None if state is None else state.facts.get("report")
    if report is None:
        return None
    try:
        return DepthReport(**report)
    except TypeError as error:
        raise LearningError(f"a personal file says {report!r} of its tier: {error}") from error
