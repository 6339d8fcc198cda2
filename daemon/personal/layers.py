"""All personal layers by the name that ``retriever.personal`` gives them.

What settings must know of each stands in `config.recipes.PERSONAL`, under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.layer import Layer
from daemon.personal.mixture import Mixture
from daemon.personal.query_encoder import QueryEncoder
from daemon.personal.tiered_head import TieredHead

LAYERS: Final[Mapping[str, Layer]] = {
    "none": Layer("none"),
    "tiered_head": TieredHead("tiered_head"),
    "query_encoder": QueryEncoder("query_encoder"),
    "mixture": Mixture("mixture"),
}


def layer_of(spec: RetrieverSpec) -> Layer:
    """The layer that a site's retriever has."""
    return LAYERS[spec.personal]
