"""What fedd and fedctl agree on about the socket between them, before either reads settings."""

from __future__ import annotations

from pathlib import Path

PATH = Path("/run/hanse/fedd.sock")
# sun_path of sockaddr_un is 108 bytes on Linux, the closing NUL included (unix(7)).
LONGEST_PATH = 107
MESSAGE_BYTES = 32 << 20
