"""Requests that have no pages yet: by priority, then arrival; those whose answer is delayed come in when due."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from fermata.worker.engine.sequence import Phase, Sequence


class WaitingQueue:
    """O(log n) a move. An aborted request stays in its heap until it comes to the top."""

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, int], Sequence]] = []
        self._delayed: list[tuple[float, tuple[int, int], Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        heappush(self._ready, (sequence.order, sequence))

    def push_delayed(self, sequence: Sequence, until: float) -> None:
        heappush(self._delayed, (until, sequence.order, sequence))

    def admit_due(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            self.push(heappop(self._delayed)[2])

    def peek(self) -> Sequence | None:
        """The one to run next."""
        ready = self._ready
        while ready and ready[0][1].phase is Phase.ENDED:
            heappop(ready)
        return ready[0][1] if ready else None

    def pop(self) -> Sequence:
        return heappop(self._ready)[1]

    def next_due(self) -> float | None:
        """When the next delayed one comes in."""
        delayed = self._delayed
        while delayed and delayed[0][2].phase is Phase.ENDED:
            heappop(delayed)
        return delayed[0][0] if delayed else None

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in (*(e[1] for e in self._ready), *(e[2] for e in self._delayed)):
            if sequence.phase is not Phase.ENDED:
                yield sequence
