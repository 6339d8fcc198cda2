"""Every loss by hand on small cases, and its gradient against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from daemon.learning.losses import distillation, info_nce, kd_matrix, kd_pairs, proximal

RIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # two queries
SLANT = torch.tensor([[0.8, 0.6], [0.6, 0.8]])  # two passages
SAME = torch.tensor([[1.0, 0.0], [1.0, 0.0]])


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return functional.normalize(rows, dim=1).requires_grad_(True)


def hidden() -> Tensor:
    return torch.tensor([[False, False, True, False], [False, True, False, False]])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "info_nce": lambda q, p: info_nce(q, p, torch.tensor([0, 2]), hidden(), 0.2),
    "kd_pairs": lambda q, p: kd_pairs((q, p[:2]), (RIGHT.double(), SLANT.double())),
    "kd_matrix": lambda q, p: kd_matrix((q, p[:2]), (RIGHT.double(), SLANT.double())),
    "proximal": lambda q, p: proximal([q, p], [torch.zeros(2, 2), torch.ones(4, 2)]),
    "distillation": lambda q, p: distillation((q, p), (RIGHT.double(), unit(4, 2, seed=9)), 0.3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    assert torch.autograd.gradcheck(LOSSES[name], (unit(2, 2, seed=1), unit(4, 2, seed=2)))


def test_explicit_negatives_are_columns_like_the_others() -> None:
    passages = torch.cat([SLANT, torch.tensor([[0.0, -1.0]])])
    loss = info_nce(RIGHT[:1], passages, torch.tensor([0]), torch.zeros(1, 3).bool(), 1.0)
    expected = -math.log(math.exp(0.8) / (math.exp(0.8) + math.exp(0.6) + math.exp(0.0)))
    assert float(loss) == pytest.approx(expected)


def test_kd_over_pairs_by_hand() -> None:
    # Local cosines 0.8 and 0.8, global ones 1 and 0: (0.04 + 0.64) / 2.
    assert float(kd_pairs((RIGHT, SLANT), (RIGHT, SAME))) == pytest.approx(0.34)


def test_kd_over_the_matrix_by_hand() -> None:
    # Local [[.8, .6], [.6, .8]], global [[1, 1], [0, 0]]: (.04 + .16 + .36 + .64) / 4.
    assert float(kd_matrix((RIGHT, SLANT), (RIGHT, SAME))) == pytest.approx(0.3)


def test_the_proximal_term_by_hand() -> None:
    here = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    there = [torch.tensor([0.0, 2.0]), torch.tensor([[5.0]])]
    assert float(proximal(here, there)) == pytest.approx((1 + 0 + 4) / 2)


def test_distillation_by_hand() -> None:
    # Temperature 1; teacher's logits (1, 0), student's (0.8, 0.6).
    teacher = (RIGHT[:1], RIGHT)
    p = math.exp(1) / (math.exp(1) + 1)
    q = math.exp(0.8) / (math.exp(0.8) + math.exp(0.6))
    expected = -(p * math.log(q) + (1 - p) * math.log(1 - q))
    assert float(distillation((RIGHT[:1], SLANT), teacher, 1.0)) == pytest.approx(expected)


def test_no_gradient_reaches_a_teacher() -> None:
    teacher = (unit(2, 2, seed=3), unit(2, 2, seed=4))
    student = (unit(2, 2, seed=5), unit(2, 2, seed=6))
    for loss in (kd_pairs(student, teacher), kd_matrix(student, teacher)):
        loss.backward()  # type: ignore[no-untyped-call]
    distillation(student, teacher, 0.5).backward()  # type: ignore[no-untyped-call]
    assert teacher[0].grad is None
    assert teacher[1].grad is None
    assert student[0].grad is not None


def test_distillation_is_least_where_student_and_teacher_agree() -> None:
    teacher = (unit(3, 4, seed=7).detach(), unit(5, 4, seed=8).detach())
    queries = teacher[0].clone().requires_grad_(True)
    distillation((queries, teacher[1]), teacher, 0.15).backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert float(queries.grad.abs().max()) < 1e-12
