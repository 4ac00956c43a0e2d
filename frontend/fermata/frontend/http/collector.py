"""Plain counters to Prometheus families, at scrape time only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fermata.frontend.lineage import Lineages
from fermata.frontend.metrics import FrontendMetrics, Histogram
from fermata.frontend.prompt import PromptPath
from fermata.frontend.service import FrontendService
from fermata.trace import TraceWriter

PREFIX = "fermata_frontend_"


class FrontendCollector(Collector):
    """No client's id is ever a label."""

    def __init__(
        self,
        *,
        service: FrontendService,
        metrics: FrontendMetrics,
        prompts: PromptPath,
        lineages: Lineages,
        trace: TraceWriter | None,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._prompts = prompts
        self._lineages = lineages
        self._trace = trace

    def collect(self) -> Iterable[Metric]:
        yield from self._responses()
        yield from self._turns()
        yield from self._prompt_path()
        yield from self._links()
        if self._trace is not None:
            yield _counter("trace_records", "Trace records written", self._trace.written)
            yield _counter(
                "trace_dropped", "Trace records lost to a full queue or disk", self._trace.dropped
            )

    def _responses(self) -> Iterator[Metric]:
        m = self._metrics
        m.fold()
        yield _counter("requests_started", "Requests to a turn endpoint", m.started)
        responses = CounterMetricFamily(
            PREFIX + "requests",
            "Turn requests by their end; 499 is a client that left",
            labels=["endpoint", "status"],
        )
        for (endpoint, status), count in sorted(m.responses.items()):
            responses.add_metric([endpoint, str(status)], count)
        yield responses
        yield _counter(
            "disconnected_clients", "Clients that left before their answer ended", m.disconnected
        )
        yield _counter(
            "internal_errors", "Faults of this process at the request boundary", m.internal_errors
        )
        yield _counter("input_tokens", "Prompt tokens", m.input_tokens)
        yield _counter("output_tokens", "Answer tokens", m.output_tokens)
        yield _counter("cached_tokens", "Prompt tokens found in a worker's cache", m.cached_tokens)
        yield _counter("held_turns", "Turns that a router held", m.held_turns)
        yield _counter("held_seconds", "Time that turns were held", m.held_s)
        yield _histograms("hold_seconds", "Time that a turn was held, by reason", "reason", m.holds)
        yield _counter("farewells", "Requests that only ended their session", m.farewells)
        yield _counter(
            "unheard_farewells", "Of those, the ones no router answered", m.unheard_farewells
        )
        yield _histogram("request_duration_seconds", "Finished turns, request to end", m.duration_s)
        yield _histogram("time_to_first_token_seconds", "Request to first token", m.first_token_s)
        yield _histogram("inter_token_latency_seconds", "Mean of one response", m.between_tokens_s)
        yield _histogram("input_sequence_tokens", "Prompt length", m.input_sizes)
        yield _histogram(
            "output_sequence_tokens", "Answer length of finished turns", m.output_sizes
        )

    def _turns(self) -> Iterator[Metric]:
        table, counters = self._service.table, self._service.table.counters
        yield _gauge("turns", "Turns in the table", len(table))
        yield _gauge("leases", "Leases owned", table.leases)
        yield _gauge(
            "incarnation", "Unix milliseconds of this incarnation", self._service.incarnation
        )
        yield _counter("migrations", "Turns moved off a lost or draining worker", table.migrations)
        yield _counter("cancellations", "Turns whose client left", counters.cancellations)
        yield _counter("repeats", "Turns that were asked for again", table.repeats.found)
        yield _counter("poisons", "Turns refused as poison", counters.poisons)
        yield _counter("stale_grants", "Leases given back at once", counters.stale_grants)
        yield _counter("stale_outputs", "Output of leases no longer owned", counters.stale_outputs)

    def _prompt_path(self) -> Iterator[Metric]:
        counters = self._prompts.counters
        yield _counter("prompts", "Prompts prepared", counters.prompts)
        yield _counter(
            "prompt_cached_tokens", "Prompt tokens known from earlier turns", counters.cached_tokens
        )
        yield _counter(
            "prompt_tokenised_tokens", "Prompt tokens tokenised", counters.tokenised_tokens
        )
        yield _counter(
            "prompt_full_passes", "Prompts of which nothing was known", counters.full_passes
        )
        yield _counter(
            "prompt_prefix_rewrites", "Turns whose history was rewritten", counters.prefix_rewrites
        )
        yield _gauge("prompt_cache_bytes", "Size of the session cache", self._prompts.cache_bytes)
        yield _gauge(
            "prompt_cache_spans", "Entries of the session cache", self._prompts.cache_spans
        )
        yield _gauge("lineages", "Anonymous sessions remembered", len(self._lineages))
        yield _counter("lineages_begun", "Anonymous sessions that began", self._lineages.begun)
        yield _counter(
            "lineages_continued", "Anonymous turns that continued one", self._lineages.continued
        )

    def _links(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("routers_answering", "Routers that answer", service.routers.answering)
        yield _gauge(
            "workers_ready",
            "Workers that can take a turn, as routers have it",
            service.routers.workers_ready,
        )
        yield _gauge("worker_links", "Open links to workers", len(service.workers))
        yield _wire("router", service.routers.counters())
        yield _wire("worker", service.workers.counters())


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(
        PREFIX + name, help_text, buckets=_buckets(histogram), sum_value=histogram.total
    )


def _histograms(
    name: str, help_text: str, label: str, histograms: Mapping[str, Histogram]
) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=[label])
    for value, histogram in sorted(histograms.items()):
        family.add_metric([value], _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return buckets


def _wire(peer: str, numbers: Mapping[str, float]) -> Metric:
    """Of links that are open now: a gauge, since a closed link takes its counts with it."""
    family = GaugeMetricFamily(
        f"{PREFIX}{peer}_wire_messages", f"Messages with each {peer} linked now", labels=["event"]
    )
    for name, value in sorted(numbers.items()):
        family.add_metric([name.removeprefix("wire_")], value)
    return family
