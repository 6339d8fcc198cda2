"""What training minimises, each term written out.

All embeddings have rows of length 1, so that a dot product is a cosine. Every
function returns a scalar that can be differentiated; `minimised` adds up what a plan
asks for, wherever something is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from daemon.learning.options import TrainingOptions

Embedded = tuple[Tensor, Tensor]
"""Queries [b, d] and their positives [b, d]: row i of both is pair i."""


def info_nce(
    queries: Tensor, passages: Tensor, target: Tensor, hidden: Tensor, temperature: float
) -> Tensor:
    """Cross entropy of each query's positive among the batch's passages (a scalar).

    ``queries`` [b, d] and ``passages`` [m, d] have rows of length 1; ``target``
    [b] names each query's column; ``hidden`` [b, m] is true where a passage is
    neither the positive nor a negative of that query. Source: van den Oord et
    al. 2018, equation 4, on cosines divided by ``temperature`` (FedE4RAG, Eq. 7;
    pFedRAG, Eq. 2, whose explicit negatives are columns like the others).
    """
    scores = queries @ passages.T / temperature  # [b, m]
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    return functional.cross_entropy(scores, target.to(scores.device))


def kd_pairs(local: Embedded, teacher: Embedded) -> Tensor:
    """Mean square between the local and the global cosine of each pair.

    No gradient flows to the teacher. Source: FedE4RAG, Eq. 8.
    """
    ours = (local[0] * local[1]).sum(dim=1)  # [b]
    theirs = (teacher[0] * teacher[1]).sum(dim=1).detach()  # [b]
    return (ours - theirs).square().mean()


def kd_matrix(local: Embedded, teacher: Embedded) -> Tensor:
    """Mean square between the local and the global cosines of all queries with all positives.

    As `kd_pairs`, over the whole [b, b] matrix: also what is *no* answer must
    stay as far as the global model has it. Source: FedE4RAG's released code, which
    weighs it by 100.
    """
    ours = local[0] @ local[1].T  # [b, b]
    theirs = (teacher[0] @ teacher[1].T).detach()  # [b, b]
    return (ours - theirs).square().mean()


def proximal(parameters: Sequence[Tensor], anchor: Sequence[Tensor]) -> Tensor:
    """Half the squared distance of the shared parameters from the parent version's.

    Times mu it is FedProx's term (Li et al. 2020, Eq. 2). Groups correspond one
    to one; no gradient flows to ``anchor``.
    """
    total = torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device)
    for value, start in zip(parameters, anchor, strict=True):
        total = total + (value - start.detach()).square().sum()
    return 0.5 * total


def distillation(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], temperature: float
) -> Tensor:
    """Cross entropy of the student's distributions over the batch's passages to the teacher's.

    ``student`` and ``teacher``: (queries [b, d], passages [m, d]); a query's
    distribution is the softmax of its cosines divided by ``temperature``. Mean
    over the queries; no gradient flows to the teacher. Source: pFedRAG, Eq. 7.
    """
    p_teacher = functional.softmax(teacher[0] @ teacher[1].T / temperature, dim=1).detach()
    log_student = functional.log_softmax(student[0] @ student[1].T / temperature, dim=1)  # [b, m]
    return -(p_teacher * log_student).sum(dim=1).mean()


DISTILL: Final[Mapping[str, Callable[[Embedded, Embedded], Tensor]]] = {
    "pairs": kd_pairs,
    "matrix": kd_matrix,
}
"""By the names of the axis `distill`, but for "none"."""


def minimised(
    contrast: Tensor,
    options: TrainingOptions,
    local: Callable[[], Embedded],
    teacher: Callable[[], Embedded],
    moved: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Tensor:
    """What a step minimises: ``contrast``, and what the options add to it.

    ``local``: a batch as it is embedded now, ``teacher`` as the global model embeds it, both
    asked for only where something is distilled;
    ``moved``: parameters, and where the proximal term holds them to.
    """
    loss = contrast
    if options.distill != "none":
        loss = loss + options.kd_weight * DISTILL[options.distill](local(), teacher())
    if options.proximal:
        loss = loss + options.proximal * proximal(*moved)
    return loss
