"""Which engine the dense index has, and where: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexOptions:
    """As the operator chose it; what is empty is not used.

    ``engine``: of `daemon.library.dense.engines.ENGINES`. ``uri``: of a server that searches,
    ``owner``: whose what lies there is, for several sites may have one server. ``token_file``
    holds what the server asks for; ``ca_file`` whom it is believed by, ``cert_file`` and
    ``key_file`` who asks.
    """

    engine: str = "hnswlib"
    uri: str = ""
    owner: str = ""
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


EMBEDDED = IndexOptions()


class EngineUnavailable(Exception):
    """An engine's server does not answer, or its client isn't installed; cause and remedy."""
