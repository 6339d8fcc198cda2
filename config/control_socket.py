"""What fedd agrees on with fedctl and the gateway about the sockets between them."""

from __future__ import annotations

from pathlib import Path

PATH = Path("/run/hanse/fedd.sock")
# In a folder of its own: whoever may enter that of fedctl's socket is to administer the site.
QUESTIONS_PATH = Path("/run/hanse-gateway/questions.sock")
# sun_path of sockaddr_un is 108 bytes on Linux, the closing NUL included (unix(7)).
LONGEST_PATH = 107
MESSAGE_BYTES = 32 << 20
METADATA_BYTES = 24 << 10  # of a call: two signed tokens of people, and what grpc adds
# Beside a token: for whom it asks. Lower case, as metadata of gRPC is.
ASKS_FOR = "x-openwebui-user-jwt"
RETRY_AFTER = "hanse-retry-after-ms"  # trailing metadata of a question that was one too many
