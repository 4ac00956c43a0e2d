"""How long turns waited, and for what: plain numbers that a collector reads when it is asked."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from fermata.router.waiting import Reason

BOUNDS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0)


class WaitStatistics:
    def __init__(self) -> None:
        self.holds: Counter[Reason] = Counter()
        """Waits that began, and waits that went on for another reason, by it."""
        self.counts: dict[Reason, list[int]] = {}
        """Of turns that were granted after a wait: by the reason they waited for last, by upper bound in seconds; the
        last is for everything above."""
        self.sums_s: dict[Reason, float] = {}

    def held(self, reason: Reason) -> None:
        self.holds[reason] += 1

    def granted(self, reason: Reason, waited_s: float) -> None:
        counts = self.counts.get(reason)
        if counts is None:
            counts = self.counts[reason] = [0] * (len(BOUNDS_S) + 1)
        counts[bisect_left(BOUNDS_S, waited_s)] += 1
        self.sums_s[reason] = self.sums_s.get(reason, 0.0) + waited_s
