"""What both the settings say and the answering worker is told of how answers are made.

An option that stands here reaches a generator as it is written in ``[retrieval]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import Ge, Gt, Le

from config.kinds import GeneratorName, PromptKind, RetrievalLevel, Unsupported

USUAL_GENERATOR: Final = "extractive"


@dataclass(frozen=True)
class AnsweringAxes:
    """``[retrieval]``: what an answer is made of and by whom."""

    level: RetrievalLevel = "passage"
    generator: GeneratorName = USUAL_GENERATOR
    cross_encoder_depth: Annotated[int, Ge(2), Le(50)] = 20
    lost_answers: Annotated[float, Ge(0.0), Le(0.5)] = 0.05
    prompt: PromptKind = "general"
    prompt_tokens: Annotated[int, Ge(128), Le(1_000_000)] = 2048
    new_tokens: Annotated[int, Ge(8), Le(8192)] = 512
    sampling_temperature: Annotated[float, Ge(0), Le(2)] = 0.1
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    answer_within_s: Annotated[float, Ge(1), Le(100)] = 30.0
    unsupported: Unsupported = "drop"
    eight_bit: bool = False
