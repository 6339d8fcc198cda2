"""The daemon's numbers in Prometheus' text format, by the table that `fedctl status` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.process.metrics import METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Figures(Collector):
    def __init__(self, figures: Mapping[str, float]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Each metric that fedd told; counters get the ending ``_total``."""
        for one in METRICS:
            if one.name in self._figures:
                kind = CounterMetricFamily if one.counts else GaugeMetricFamily
                yield kind(one.name, one.help, value=self._figures[one.name])


def exposition(figures: Mapping[str, float]) -> bytes:
    """The numbers, by metrics' names, as monitoring reads them."""
    registry = CollectorRegistry()
    registry.register(_Figures(figures))
    return generate_latest(registry)
