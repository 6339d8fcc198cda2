"""Which retriever a site runs: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from config.kinds import Pooling
from config.recipes import DEFAULT_ENCODER, AloneAxes, DepthOptions, RetrieverAxes
from daemon.library.dense.options import EMBEDDED, IndexOptions


@dataclass(frozen=True)
class ReadingOptions:
    """What takes the place of an encoder's own prompts and poolings; None: as its makers say."""

    query_prompt: str | None = None
    passage_prompt: str | None = None
    query_pooling: Pooling | None = None
    passage_pooling: Pooling | None = None


AS_MADE = ReadingOptions()


@dataclass(frozen=True)
class RetrieverSpec(RetrieverAxes):
    """Encoder and adaptation, as the operator chose them; options have their names in settings.

    ``encoder`` is a Hugging Face hub id or a local path; ``max_tokens`` the
    length at which texts are cut; ``threads`` those torch may use in one worker,
    ``processes`` those that share them to train, in which ``precision``.
    ``reading``: what it says otherwise of how the encoder reads.

    ``adapt``: what trains, and so what is exchanged: a ``head`` on the frozen
    encoder, ``lora`` factors of rank ``lora_rank``, all of the encoder (``full``), or
    its linear layers in full, of which rank ``lora_rank`` is exchanged
    (``lora_server``). ``lora_alpha`` scales the factors of ``lora``.

    ``personal``: a layer of this site's own, by its name in `daemon.personal.layers`. It
    lies in ``personal_folder`` and never leaves it; ``depth`` says how tiers change, ``alone``
    what is learned without others.

    ``learn_from``: the pairs that were supplied, those that the site has made of its
    own documents (kept in the file ``made_pairs``), or both.

    ``index``: what its passages are searched by.
    """

    encoder: str = DEFAULT_ENCODER
    max_tokens: int = 256
    reading: ReadingOptions = AS_MADE
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    processes: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = 8
    lora_alpha: int = 16
    personal_folder: str = ""
    depth: DepthOptions = field(default_factory=DepthOptions)
    alone: AloneAxes = field(default_factory=AloneAxes)
    learn_from: Literal["supplied", "supplied+made", "made"] = "supplied"
    made_pairs: str = ""
    index: IndexOptions = EMBEDDED
