"""What a frontend counts: plain integers, touched once a response. A collector reads them when it is scraped.

A label lookup costs 2.6 us and a histogram up to 3.9; at 200,000 tokens a second, per token, that is most of a core. So
a histogram here is a list of counts, and nothing at all is counted per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import Cancelled, Failed, Finished, Times
from fermata.wire.messages import Usage

FOLD_AT = 1024
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0,
    1800.0,
)  # fmt: skip
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = tuple(float(1 << power) for power in range(21))


class Histogram:
    """Counts by upper bound; the last is for everything above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class FrontendMetrics:
    def __init__(self) -> None:
        self.started = 0
        self.responses: Counter[tuple[str, int]] = Counter()
        """By endpoint and HTTP status; a turn that failed after its first byte counts as its error's status."""
        self.disconnected = 0
        self.internal_errors = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.farewells = 0
        """Requests that only ended their session."""
        self.unheard_farewells = 0
        """Of those, the ones that no router answered."""
        self.held_turns = 0
        self.held_s = 0.0
        self.holds: dict[str, Histogram] = {}
        """By reason, how long turns were held for it; one value a turn and reason."""
        self.duration_s = Histogram(_SECONDS)
        self.first_token_s = Histogram(_SECONDS)
        self.between_tokens_s = Histogram(_SHORT_SECONDS)
        """Mean of one response, so one value a response."""
        self.input_sizes = Histogram(_TOKENS)
        self.output_sizes = Histogram(_TOKENS)
        self._ended: list[tuple[Times, Usage, bool, float]] = []

    def turn_ended(self, turn: Turn, *, received: float) -> None:
        """Kept as it is until somebody looks, or until there are many: sorting one into its histograms takes
        ten times as long as remembering it."""
        self._ended.append((turn.times, turn.usage, isinstance(turn.outcome, Finished), received))
        if len(self._ended) >= FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Before reading any of the numbers above."""
        ended, self._ended = self._ended, []
        for times, usage, is_finished, received in ended:
            self._count(times, usage, received=received, is_finished=is_finished)

    def _count(self, times: Times, usage: Usage, *, received: float, is_finished: bool) -> None:
        made = usage.completion_tokens
        self.input_tokens += usage.prompt_tokens
        self.output_tokens += made
        self.cached_tokens += usage.cached_tokens
        self.input_sizes.add(usage.prompt_tokens)
        if times.held:
            self.held_turns += 1
            self.held_s += times.held
            for reason, seconds in (times.holds or {}).items():
                histogram = self.holds.get(reason)
                if histogram is None:
                    histogram = self.holds[reason] = Histogram(_SECONDS)
                histogram.add(seconds)
        if is_finished:
            self.output_sizes.add(made)
            self.duration_s.add(times.ended - received)
        if times.first_token:
            self.first_token_s.add(times.first_token - received)
        if made > 1:
            self.between_tokens_s.add((times.last_token - times.first_token) / (made - 1))


def status_of(turn: Turn) -> int:
    """What the turn's end is in HTTP, 499 for a client that went away."""
    match turn.outcome:
        case Failed(error):
            return error.status
        case Cancelled():
            return 499
        case _:
            return 200
