"""`fedd` whose coordinator lies about its sum, among sites that may believe it.

    HANSE_UNDEFENDED=proof python -m tests.attacks.lying_fedd --config fedd.toml

As long as the daemon's folder (HANSE_TAPE) holds a file ``lie`` with "drops SITE" or
"singles-out SITE", that is done to the sums that it makes, behind a claim that says
nothing of it. With HANSE_UNDEFENDED=proof a key holder applies what it is sent, as if
there were no proof. Every update is kept as ``update-ROUND-ATTEMPT.npy``, so that a
test can tell what an attacker has learnt.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from daemon import main as fedd
from daemon import round_crypto
from daemon.round_crypto import Finished
from peers.vectors import BlobInfo, read_encrypted, write_encrypted


def _lie(folder: Path) -> None:
    """Change what the crypto worker does, from within."""
    add_update, finish_sum = round_crypto.add_update, round_crypto.finish_sum
    encrypt_update = round_crypto.encrypt_update
    blocks: dict[str, list[bytes]] = {}

    def keeping_update(round: int, attempt: int, path: Path, *rest: Any, **named: Any) -> BlobInfo:
        # A sum that is made again has no update of its own: it is that of the earlier attempt.
        before = folder / f"update-{named['kept_path'].stem}.npy"
        shutil.copy(path if path.exists() else before, folder / f"update-{round}-{attempt}.npy")
        return encrypt_update(round, attempt, path, *rest, **named)

    def keeping_blocks(round: int, attempt: int, site: str, path: Path) -> None:
        held = round_crypto._held(round, attempt)
        assert held.total is not None
        values, behind = held.total._values, round_crypto._tags_behind(held, site)
        blocks[site] = list(read_encrypted(path, held.parameters, values, trailer=behind))
        add_update(round, attempt, site, path)

    def lying(round: int, attempt: int, out_path: Path) -> Finished:
        finished = finish_sum(round, attempt, out_path)
        lie = folder / "lie"
        how, _, victim = lie.read_text().partition(" ") if lie.exists() else ("", "", "")
        held = round_crypto._held(round, attempt)
        assert held.total is not None
        if how == "drops":
            for index, block in enumerate(blocks[victim]):
                held.total._total.subtract(index, block)
            written = held.total.write(out_path)
        elif how == "singles-out":
            values = held.total._values
            written = write_encrypted(out_path, held.parameters, values, blocks[victim])
        else:
            written = finished
        return Finished(written.digest, written.size, finished.nonces)

    round_crypto.encrypt_update = keeping_update  # type: ignore[assignment]
    round_crypto.add_update = keeping_blocks
    round_crypto.finish_sum = lying
    if os.environ.get("HANSE_UNDEFENDED") == "proof":
        round_crypto._check_proof = lambda *_: None


# A worker imports its daemon's main module anew, under this name (multiprocessing.spawn).
if __name__ == "__mp_main__":
    _lie(Path(os.environ["HANSE_TAPE"]))

if __name__ == "__main__":
    fedd.main()
