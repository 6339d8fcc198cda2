"""`fedd`, recorded: the real daemon with a tap on its transport.

    python -m tests.live.tapped_fedd --config site/fedd.toml     (HANSE_TAPE=folder)

Every message that crosses between peers is appended to ``tape.bin``, and what a
key dealer seals to ``sealed.bin``, so that a test can look for what must not be
there. No setting of the daemon can do this: it is done from outside, here.
With HANSE_PATIENCE_S its calls wait that long for a peer that a test holds still.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from crypto.identity.trust import Trust
from daemon import main as fedd
from peers.link.client import CallTimeouts
from peers.link.transport import LinkOptions

_HEADER = struct.Struct(">BHI")


def _tape(folder: Path, name: str, direction: str, peer: str, raw: bytes) -> None:
    site = peer.encode()
    with (folder / name).open("ab") as tape:
        tape.write(_HEADER.pack(direction == "sent", len(site), len(raw)) + site + raw)


def read_tape(folder: Path, name: str = "tape.bin") -> Iterator[tuple[str, str, bytes]]:
    """(direction, peer, bytes) of each record."""
    path = folder / name
    raw = path.read_bytes() if path.exists() else b""
    start = 0
    while start + _HEADER.size <= len(raw):
        sent, site_length, length = _HEADER.unpack_from(raw, start)
        start += _HEADER.size
        if start + site_length + length > len(raw):
            return  # being written just now
        site = raw[start : start + site_length].decode()
        start += site_length
        yield ("sent" if sent else "received"), site, raw[start : start + length]
        start += length


def run() -> None:
    """The daemon's own main, observed."""
    folder = Path(os.environ["HANSE_TAPE"])
    seal_for = Trust.seal_for

    def recorded(self: Trust, certificate: bytes, plaintext: bytes, associated: bytes) -> bytes:
        _tape(folder, "sealed.bin", "sent", self.site_of(certificate, at=None), plaintext)
        return seal_for(self, certificate, plaintext, associated)

    Trust.seal_for = recorded  # type: ignore[method-assign]

    def tap(direction: Literal["sent", "received"], peer: str, raw: bytes) -> None:
        _tape(folder, "tape.bin", direction, peer, raw)

    if said := os.environ.get("HANSE_PATIENCE_S"):
        options, wait = LinkOptions, float(said)
        timeouts = replace(CallTimeouts(), hello_s=wait, call_s=wait, frame_s=wait)
        vars(fedd)["LinkOptions"] = partial(options, timeouts=timeouts)

    fedd.main(tap)


if __name__ == "__main__":
    run()
