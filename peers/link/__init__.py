"""Connections between sites: mutual TLS, streams, quotas."""
