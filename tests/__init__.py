"""Tests. TLS 1.3 alone must be settled before anything here imports grpc."""

import peers.link.tls13  # noqa: F401
