"""What both the settings say and the answering worker is told of how answers are made.

An option that stands here reaches a generator as it is written in ``[retrieval]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import Ge, Le

from config.kinds import GeneratorName, RetrievalLevel

USUAL_GENERATOR: Final = "extractive"


@dataclass(frozen=True)
class AnsweringAxes:
    """``[retrieval]``: what an answer is made of and by whom."""

    level: RetrievalLevel = "passage"
    generator: GeneratorName = USUAL_GENERATOR
    cross_encoder_depth: Annotated[int, Ge(2), Le(50)] = 20
    lost_answers: Annotated[float, Ge(0.0), Le(0.5)] = 0.05
