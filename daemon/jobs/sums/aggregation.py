"""The streamed sum of encrypted updates at the coordinator.

Memory is one block to read and one sum to add, whatever the number of contributors.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from crypto.ckks.parameters import CkksParameters
from crypto.ckks.sums import RunningSum
from crypto.quantize import CryptoError
from peers.wire.vectors import BlobInfo, blocks_of, open_vector, write_encrypted

# With one contributor the "sum" would be its update, readable to every key holder.
MIN_CONTRIBUTORS = 2


class CiphertextSum:
    """The coordinator's running sum. It holds no key.

    An update is in the sum entirely or not at all: what was added of one that
    turns out malformed is subtracted again, which is exact in the ring.
    """

    def __init__(self, parameters: CkksParameters, values: int) -> None:
        if values < 1:
            raise CryptoError(f"a sum needs at least one value, got {values}")
        self._parameters = parameters
        self._values = values
        self._blocks = parameters.packing.blocks(values)
        self._total = RunningSum(parameters, self._blocks)
        self._contributors: set[str] = set()
        self._broken = False

    @property
    def contributors(self) -> frozenset[str]:
        """Sites whose updates are in the sum."""
        return frozenset(self._contributors)

    def add_file(self, path: Path, contributor: str, *, trailer: int = 0) -> None:
        """Add one site's update, behind which so many bytes follow.

        Raises CryptoError, and leaves the sum as it was, when the file is not a
        well-formed update of this round, when the contributor is in the sum
        already, or when the sum has all the contributors it was sized for.
        """
        self._check_usable()
        if contributor in self._contributors:
            raise CryptoError(f"{contributor} is in the sum already; its second update was refused")
        if len(self._contributors) >= self._parameters.packing.contributors:
            raise CryptoError(
                f"the sum has all {len(self._contributors)} contributors that the round's "
                f"parameters allow; the update of {contributor} was refused"
            )
        try:
            # Opened once: another file of that name must not be what is taken back.
            with open_vector(path) as file:
                self._add_blocks(file, trailer)
        except (CryptoError, OSError) as error:
            raise CryptoError(f"the update of {contributor} was refused: {error}") from error
        self._contributors.add(contributor)

    def _add_blocks(self, file: BinaryIO, trailer: int) -> None:
        added = 0
        try:
            for block in blocks_of(file, self._parameters, self._values, trailer):
                self._total.add(added, block)
                added += 1
        except (CryptoError, OSError):
            self._take_back(file, added, trailer)
            raise

    def write(self, path: Path) -> BlobInfo:
        """Write the sum. Raises CryptoError when fewer than two updates are in it."""
        self._check_usable()
        if len(self._contributors) < MIN_CONTRIBUTORS:
            raise CryptoError(
                f"a sum of {len(self._contributors)} updates would show a site's own update to "
                f"the key holders; at least {MIN_CONTRIBUTORS} must contribute"
            )
        blocks = (self._total.block(index) for index in range(self._blocks))
        return write_encrypted(path, self._parameters, self._values, blocks)

    def _take_back(self, file: BinaryIO, added: int, trailer: int) -> None:
        if not self._contributors:  # nothing else is in it; and a zero sum is not a ciphertext
            self._total = RunningSum(self._parameters, self._blocks)
            return
        self._broken = True  # until every block is out again
        if added:
            blocks = blocks_of(file, self._parameters, self._values, trailer)
            for index, block in zip(range(added), blocks, strict=False):
                self._total.subtract(index, block)
        self._broken = False

    def _check_usable(self) -> None:
        if self._broken:
            raise CryptoError(
                "the sum is unusable: a malformed update changed on disk while it was being "
                "taken back; the attempt must fail"
            )
