"""What both the settings say and the answering worker is told of how answers are made.

An option that stands here reaches a generator as it is written in ``[retrieval]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from annotated_types import Ge, Gt, Le

from config.kinds import DecodingName, GeneratorName, PromptChoice, RetrievalLevel, Unsupported

USUAL_GENERATOR: Final = "extractive"
USUAL_DECODING: Final = "fede4rag"
# How a language model writes, by whom it is from: what `decoding` puts into ``[retrieval]``, each
# until that says otherwise. What a paper does not tell is as the other one has it, or off.
DECODINGS: Final[dict[str, dict[str, Any]]] = {
    # FedE4RAG, section VI-C. It tells no top-k.
    "fede4rag": {
        "prompt_tokens": 2048,
        "new_tokens": 512,
        "sampling_temperature": 0.1,
        "top_p": 0.9,
        "sampling_top_k": 0,
        "repetition_penalty": 1.0,
    },
    # pFedRAG, appendix D.3. It tells no bound of the prompt.
    "pfedrag": {
        "prompt_tokens": 2048,
        "new_tokens": 128,
        "sampling_temperature": 0.4,
        "top_p": 0.9,
        "sampling_top_k": 50,
        "repetition_penalty": 1.2,
    },
}
_USUAL = DECODINGS[USUAL_DECODING]


@dataclass(frozen=True)
class AnsweringAxes:
    """``[retrieval]``: what an answer is made of and by whom."""

    level: RetrievalLevel = "passage"
    generator: GeneratorName = USUAL_GENERATOR
    cross_encoder_depth: Annotated[int, Ge(2), Le(50)] = 20
    lost_answers: Annotated[float, Ge(0.0), Le(0.5)] = 0.05
    prompt: PromptChoice = "general"
    decoding: DecodingName = USUAL_DECODING
    prompt_tokens: Annotated[int, Ge(128), Le(1_000_000)] = _USUAL["prompt_tokens"]
    new_tokens: Annotated[int, Ge(8), Le(8192)] = _USUAL["new_tokens"]
    sampling_temperature: Annotated[float, Ge(0), Le(2)] = _USUAL["sampling_temperature"]
    top_p: Annotated[float, Gt(0), Le(1)] = _USUAL["top_p"]
    sampling_top_k: Annotated[int, Ge(0), Le(1000)] = _USUAL["sampling_top_k"]
    repetition_penalty: Annotated[float, Ge(1), Le(2)] = _USUAL["repetition_penalty"]
    answer_within_s: Annotated[float, Ge(1), Le(100)] = 30.0
    unsupported: Unsupported = "drop"
    eight_bit: bool = False
