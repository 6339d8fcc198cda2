"""The four figures that a daemon reports, of rankings that a test has at hand."""

from __future__ import annotations

from collections.abc import Sequence, Set

from daemon.evaluation.evaluation import Metrics, judge


def evaluate_rankings(rankings: Sequence[Sequence[str]], positives: Sequence[Set[str]]) -> Metrics:
    """Score document rankings (best first) against each question's right documents.

    Raises EvaluationError as `judge` does.
    """
    return judge(rankings, positives).metrics()
