"""Which generator a site trains: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from config.kinds import PromptChoice
from config.recipes import GeneratorAxes
from daemon.learning.retriever.spec import RetrieverSpec


@dataclass(frozen=True)
class GeneratorSpec(GeneratorAxes):
    """Base model and adaptation, as the operator chose them; options have their names in settings.

    ``base_model``: a folder with a language model of Hugging Face, causal or from text to text.
    ``threads``: those torch may use in one worker; ``processes`` those that share them to train;
    ``precision``: of its products.
    ``prompt``: how it is asked, in training as by people.
    ``retriever``: what makes this site's pairs, from which triples follow.
    ``personal``: what it keeps to itself, none or a mixture, and in ``personal_folder``.
    """

    base_model: str = ""
    retriever: RetrieverSpec = field(default_factory=RetrieverSpec)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    processes: int = 1
    prompt: PromptChoice = "general"
    precision: Literal["float32", "bfloat16"] = "float32"
    personal: Literal["none", "mixture"] = "none"
    personal_folder: str = ""
