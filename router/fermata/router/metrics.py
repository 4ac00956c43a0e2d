"""The router's plain numbers as Prometheus families, read at scrape time only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fermata.router.families import Family

PREFIX = "fermata_router_"


class RouterCollector(Collector):
    def __init__(
        self,
        numbers: Callable[[], Mapping[str, float]],
        families: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        self._numbers = numbers
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, value in self._numbers().items():
            yield GaugeMetricFamily(PREFIX + name, name.replace("_", " "), value=value)
        for family in self._families():
            yield _metric(family)


def _metric(family: Family) -> Metric:
    name = PREFIX + family.name
    if family.kind == "histogram":
        return _histogram(name, family)
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(name, family.help, labels=family.labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, sample.value)
    return metric


def _histogram(name: str, family: Family) -> Metric:
    metric = HistogramMetricFamily(name, family.help, labels=family.labels)
    buckets: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for sample in family.samples:
        labels, bound = sample.labels[:-1], sample.labels[-1]
        buckets.setdefault(labels, []).append((bound, sample.value))
    sums = family.sums or {}
    for labels, of in buckets.items():
        metric.add_metric(labels, of, sums.get(labels, 0.0))
    return metric


def serve_metrics(
    numbers: Callable[[], Mapping[str, float]],
    families: Callable[[], Iterable[Family]],
    *,
    host: str,
    port: int,
) -> Callable[[], None]:
    """`/metrics` from a thread of its own; returns what stops it."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(numbers, families))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
