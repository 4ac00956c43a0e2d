"""One clock for a whole deployment.

`now()` is deployment time in seconds: monotonic, and `speedup` times as fast as the wall.
Everything modelled in time reads it: ticks, TTLs, holds, tool gaps, engine steps. Liveness between
processes (heartbeats, dispatch time-outs) is about real machines, so shells multiply such limits
by `speedup` before handing them to a pure core, which knows only `now`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    @property
    def speedup(self) -> float: ...

    def now(self) -> float:
        """Deployment seconds, monotonic; differences mean something, the value does not."""
        ...

    def unix_ms(self) -> int:
        """Wall time for records that people read."""
        ...

    def real_delay(self, deployment_s: float) -> float:
        """Real seconds to sleep so that `deployment_s` of deployment time pass; never negative."""
        ...


class SystemClock:
    def __init__(self, speedup: float = 1.0) -> None:
        if not speedup > 0:
            raise ValueError(f"speedup must be above 0, got {speedup}")
        self._speedup = speedup

    @property
    def speedup(self) -> float:
        return self._speedup

    def now(self) -> float:
        return time.monotonic() * self._speedup

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def real_delay(self, deployment_s: float) -> float:
        return max(0.0, deployment_s / self._speedup)


class VirtualClock:
    """Time that moves only when told to: for tests and for the simulator."""

    def __init__(self, start: float = 0.0, *, unix_start_ms: int = 0) -> None:
        self._start = start
        self._now = start
        self._unix_start_ms = unix_start_ms

    @property
    def speedup(self) -> float:
        return 1.0

    def now(self) -> float:
        return self._now

    def unix_ms(self) -> int:
        return self._unix_start_ms + round((self._now - self._start) * 1000)

    def real_delay(self, deployment_s: float) -> float:
        return max(0.0, deployment_s)

    def advance(self, seconds: float) -> float:
        return self.advance_to(self._now + seconds)

    def advance_to(self, now: float) -> float:
        if now < self._now:
            raise ValueError(f"time can not go back from {self._now} to {now}")
        self._now = now
        return now
