"""What memory training takes, said before it starts.

Weights, gradients and AdamW's moments are counted. Activations are measured: what autograd keeps
of two short examples says what it keeps of a token and of a pair of tokens (attention), and so of
the largest batch. Of checkpointed layers one is computed again at a time, at its full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from daemon.learning.adaptations import ProjectedWeights
from daemon.learning.generator.encoding import Batch, Lesson, Lessons, padded_share
from daemon.learning.generator.generator import Generator
from daemon.learning.options import GeneratorLoad, TrainingError

_PROBES = (16, 32)  # tokens of a prompt, and as many of an answer
_GRADIENT_AND_MOMENTS = 3  # numbers for each that trains
# Logits, the answered ones, and the gradients of both come and go at the peak. With FLAN-T5-small's
# measures the process then grew by 0.98 to 1.06 times what is stated here.
_LOGITS = 5
_PROCESS = 400 << 20  # bytes of one of several before it has loaded anything; measured: 377 MiB
_CGROUPS = Path("/sys/fs/cgroup")


def load_of(
    generator: Generator, taken: Lessons, batch_size: int, available: int | None = None
) -> GeneratorLoad:
    """What training takes on these lessons; ``available`` bytes, None: what this machine has.

    Raises TrainingError where that isn't enough.
    """
    made = generator.batches(taken.lessons, batch_size)
    weights = _bytes(generator.language_model.model.parameters())
    trained = _bytes(generator.parameters())
    copies = 1  # the proximal term's anchor, or the vector that is trained less the parent's
    if isinstance(generator.adaptation, ProjectedWeights):
        copies += 1  # of a change in full
    optimiser = (_GRADIENT_AND_MOMENTS + copies) * trained
    activations = _largest(generator, taken.lessons, batch_size)
    processes, how = generator.spec.processes, ""
    if processes > 1:
        # Each loads the model for itself. Of GPUs each has one, on which ours is there, too.
        beside = processes if generator.device.type == "cpu" else 1
        optimiser = beside * (_PROCESS + weights + optimiser)
        activations *= beside
        how = f" (in workers.processes = {processes}, each with a model: lower that first)"
    there = available_bytes(generator.device) if available is None else available
    load = GeneratorLoad(
        examples=len(taken.lessons),
        cut=taken.cut,
        left_out=taken.left_out,
        padding=padded_share(made),
        weights=weights,
        optimiser=optimiser,
        activations=activations,
        available=there,
    )
    if optimiser + activations > there:
        raise TrainingError(
            f"training takes {_mib(optimiser)} for the optimiser and {_mib(activations)} for a "
            f"batch of {batch_size} beside the model's {_mib(weights)}, and {_mib(there)} are "
            f"free{how}: lower training.batch_size (and raise generator.accumulation), set "
            "generator.checkpointing, lower generator.prompt_tokens, or adapt = 'lora'"
        )
    return load


def kept_by(generator: Generator, batch: Batch) -> int:
    """Bytes that autograd keeps of one pass over a batch, the parameters themselves not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in _all(generator)}
    kept: dict[int, int] = {}

    def count(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with generator.training(0), torch.autograd.graph.saved_tensors_hooks(count, lambda one: one):
        loss = generator.loss(batch)
    del loss  # until here nothing of it could be freed and counted twice
    return sum(kept.values())


def available_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of this machine as far as this process may have it."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    lines = Path("/proc/meminfo").read_text().splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    return min(int(entries["MemAvailable"].split()[0]) * 1024, *_left_by_cgroups())


def _left_by_cgroups() -> list[int]:
    """Of each group that this process is in (systemd's MemoryHigh and MemoryMax).

    What files have left in the cache goes when memory is wanted, and is not counted.
    """
    own = Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
    left = [2**62]
    for group in (_CGROUPS / own, *(_CGROUPS / own).parents):
        for name in ("memory.high", "memory.max"):
            if not (group / name).is_file():
                continue
            limit = (group / name).read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                cached = int(dict(line.split() for line in lines).get("inactive_file", "0"))
                left.append(max(0, int(limit) - max(0, used - cached)))
    return left


def _largest(generator: Generator, lessons: Sequence[Lesson], size: int) -> int:
    """Of whatever batches are drawn the most, by what two short ones keep.

    The longest prompt and the longest answer may meet in one.
    """
    model = generator.language_model.model
    first, second = (_probe(generator, length) for length in _PROBES)
    # f(n) = a n + b n^2 of n positions.
    n, m = (2 * length for length in _PROBES)
    square = max(0.0, (second / m - first / n) / (m - n))
    line = first / n - square * n
    words = int(model.get_output_embeddings().weight.shape[0])
    rows = min(size, len(lessons))
    total = labels = max(lesson.length for lesson in lessons)
    if generator.language_model.to_text:
        labels = max(len(lesson.answer) for lesson in lessons)
        total = max(len(lesson.prompt) for lesson in lessons) + labels
    logits = _LOGITS * rows * labels * words * 4
    return int(rows * (line * total + square * total * total) + logits)


def _probe(generator: Generator, length: int) -> float:
    """What an example of so many tokens on both sides keeps at the most."""
    lesson = Lesson((1,) * length, (1,) * length)
    (batch,) = generator.batches([lesson], 1)
    model = generator.language_model.model
    if not generator.spec.checkpointing:
        return kept_by(generator, batch)
    checkpointed = kept_by(generator, batch)
    model.gradient_checkpointing_disable()
    try:
        in_full = kept_by(generator, batch)
    finally:
        generator.checkpoint()
    return checkpointed + in_full / max(1, int(model.config.num_hidden_layers))


def _all(generator: Generator) -> list[Tensor]:
    return list(generator.language_model.model.parameters())


def _bytes(values: Sequence[Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in values)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
