"""TLS 1.3 and nothing lower. Import this before grpc.

grpcio offers no switch for the lowest TLS version. What it lets a program
choose are the cipher suites of TLS 1.2 and below, through an environment
variable that its core reads once, when it is loaded. The one suite named here
needs an RSA certificate; every certificate of a federation is ECDSA. So a
handshake below TLS 1.3 finds no common suite and fails, while the suites of
TLS 1.3, which that variable does not touch, work as ever.
(Observed with grpcio 1.85; tests/peers/link/test_refusals.py holds it with real handshakes.)
"""

from __future__ import annotations

import os
import sys
from typing import Final

_VARIABLE: Final = "GRPC_SSL_CIPHER_SUITES"
_RSA_ONLY: Final = "ECDHE-RSA-AES128-GCM-SHA256"

if "grpc" not in sys.modules:
    os.environ[_VARIABLE] = _RSA_ONLY


def holds() -> bool:
    """Whether grpc was loaded with the floor in place."""
    return os.environ.get(_VARIABLE) == _RSA_ONLY
