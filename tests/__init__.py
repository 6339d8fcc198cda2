"""Tests. TLS 1.3 alone must be settled before anything here imports grpc."""

import peers.tls_floor  # noqa: F401
