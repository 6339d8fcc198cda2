"""How a site answers, as its operator chose: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from config.kinds import RetrievalLevel

USUAL: Final = "extractive"  # generator


@dataclass(frozen=True)
class AnsweringOptions:
    """Options of ``[retrieval]`` by their names.

    ``generator``: of `GENERATORS`; it is given all of these. ``level``: as in
    `daemon.library.levels`.

    ``cross_encoder``: the folder of a model that ranks the ``cross_encoder_depth`` best passages
    anew (`daemon.answering.cross_encoder`); "": none does.
    """

    generator: str = USUAL
    level: RetrievalLevel = "passage"
    cross_encoder: str = ""
    cross_encoder_depth: int = 20


AS_USUAL = AnsweringOptions()
