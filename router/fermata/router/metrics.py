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


Scrape = Callable[[], tuple[Mapping[str, float], Iterable[Family]]]


class RouterCollector(Collector):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        numbers, labelled = self._scrape()
        for name, value in numbers.items():
            yield GaugeMetricFamily(PREFIX + name, name.replace("_", " "), value=value)
        for family in labelled:
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


def serve_metrics(scrape: Scrape, *, host: str, port: int) -> Callable[[], None]:
    """`/metrics` from a thread of its own, which calls `scrape`; returns what stops it."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(scrape))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
