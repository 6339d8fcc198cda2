"""How well a causal language model foretells texts; for figures on generated answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from daemon.learning.options import EvaluationError


def perplexity(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int = 512) -> float:
    """exp of the mean negative log-likelihood of a token, under a causal language model.

    All texts' tokens weigh equally. A text is preceded by the model's start token,
    if it has one, so that its first token counts, too; otherwise that one is only
    a condition. Texts are cut at ``max_tokens``. Raises EvaluationError when no
    token is left to predict or the figure isn't finite.
    """
    import torch
    from torch.nn import functional

    total, count = 0.0, 0
    start = tokenizer.bos_token_id
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
        row = torch.tensor([[*([] if start is None else [start]), *ids]], device=model.device)
        if row.shape[1] < 2:
            continue
        with torch.inference_mode():
            logits = model(input_ids=row).logits[0, :-1].float()  # [t - 1, vocabulary]
        total += float(functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        count += row.shape[1] - 1
    if not count:
        raise EvaluationError("perplexity needs a text of two tokens or more")
    mean = total / count
    if not math.isfinite(mean) or mean > 700.0:
        raise EvaluationError(
            f"the model's mean negative log-likelihood is {mean}: it has diverged"
        )
    return math.exp(mean)
