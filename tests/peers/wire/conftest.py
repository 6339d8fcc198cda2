"""What several tests of the wire need."""

from __future__ import annotations

import pytest

from crypto.identity.authority import create_authority
from crypto.identity.trust import Trust
from tests.crypto.identity.forgery import enrol
from tests.peers.wire.votes import (
    ENABLED,
    MANIFEST,
    Federation,
)


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    root = tmp_path_factory.mktemp("federation")
    create_authority(root / "ca", "med")
    identities = {}
    for site in (*ENABLED, "zeta", "stranger"):
        identities[site] = enrol(root, site)
    return Federation(identities, Trust.from_pem(identities["alpha"].authority_pem), MANIFEST)
