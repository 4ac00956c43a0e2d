"""How long programs stay away between turns, by class of gap, learned as they come back.

A histogram on a logarithmic grid, older gaps fading, and of it what an admission rule may ask: the mean, the share
that is back within a time, and the rate of return of a program that has been away for a while (its Gittins index, 1/s:
the best odds of seeing it back for the time its memory is held until then). O(1) a gap; the table of rates is made anew
at most once in `_REFIT` gaps.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from fermata.router.program import Gap

_BINS = 46
_SHORTEST_S = 0.05
_RATIO = 10 ** (1 / 9)
_REFIT = 200
_FADE_AT = 4096.0
"""Halved when this many gaps are counted, so that what is learned follows the load."""

EDGES = tuple(_SHORTEST_S * _RATIO**i for i in range(_BINS))
"""Upper edges of the bins, in seconds: 50 ms to 83 minutes, nine a decade. The last takes what is longer, too."""


class GapHistogram:
    def __init__(self, *, mean_s: float) -> None:
        """`mean_s` is believed until the first gap was seen."""
        self._counts = [0.0] * _BINS
        self._total = 0.0
        self._believed_s = mean_s
        self._sum_s = 0.0
        self._since_fit = 0
        self._rates: list[float] = []
        self.seen = 0

    def add(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._counts[min(bisect_left(EDGES, seconds), _BINS - 1)] += 1
        self._total += 1
        self._sum_s += seconds
        self.seen += 1
        self._since_fit += 1
        if self._total >= _FADE_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
            self._sum_s /= 2

    @property
    def mean_s(self) -> float:
        return self._sum_s / self._total if self._total else self._believed_s

    def share_within(self, seconds: float) -> float:
        """Of the gaps; up to one bin too few."""
        if not self._total:
            return 0.0
        return sum(self._counts[: bisect_left(EDGES, seconds)]) / self._total

    def rate(self, idle_s: float) -> float:
        """Of return, 1/s, for one that has been away for `idle_s`."""
        if not self._total:
            return 1 / self._believed_s
        if not self._rates or self._since_fit >= _REFIT:
            self._rates = self._fit()
            self._since_fit = 0
        return self._rates[min(bisect_left(EDGES, idle_s), _BINS - 1)]

    def _fit(self) -> list[float]:
        return [self._best_rate(at) for at in range(_BINS)]

    def _best_rate(self, at: int) -> float:
        """max over d of P(gap <= a + d | gap > a) / E[min(gap - a, d) | gap > a], with a the edge before bin `at`."""
        away = sum(self._counts[at:])
        if away <= 0:
            return 1 / max(self.mean_s, EDGES[at])
        since = EDGES[at - 1] if at else 0.0
        best = waited = 0.0
        left = away
        for end, back in zip(EDGES[at:], accumulate(self._counts[at:]), strict=True):
            waited += left * (end - since)
            since, left = end, away - back
            best = max(best, back / waited)
        return best


class GapStatistics:
    """One histogram a class."""

    def __init__(self) -> None:
        self._of: dict[Gap, GapHistogram] = {
            "tool": GapHistogram(mean_s=10.0),
            "human": GapHistogram(mean_s=120.0),
        }

    def __getitem__(self, gap: Gap) -> GapHistogram:
        return self._of[gap]
