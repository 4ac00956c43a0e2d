"""The router's plain numbers as Prometheus gauges, read at scrape time only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class RouterCollector(Collector):
    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._numbers().items():
            yield GaugeMetricFamily(f"fermata_router_{name}", name.replace("_", " "), value=value)


def serve_metrics(
    numbers: Callable[[], Mapping[str, float]], *, host: str, port: int
) -> Callable[[], None]:
    """`/metrics` from a thread of its own, which calls `numbers`; returns what stops it."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(numbers))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
