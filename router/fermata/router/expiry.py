"""Deadlines in buckets: setting, moving and cancelling are O(1), expiry costs what expires.

A deadline fires with its bucket: up to one width late, never early. Heartbeats move theirs each second, so a heap
entry a move would only be garbage; here buckets are what the heap holds, a few for all.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from math import ceil
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Expiry(Generic[K]):
    def __init__(self, *, width_s: float) -> None:
        assert width_s > 0
        self._width_s = width_s
        self._bucket_of: dict[K, int] = {}
        self._buckets: dict[int, dict[K, None]] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, key: K) -> bool:
        return key in self._bucket_of

    def set(self, key: K, deadline: float) -> None:
        """Also moves one that is set."""
        number = ceil(deadline / self._width_s)
        before = self._bucket_of.get(key)
        if before == number:
            return
        if before is not None:
            del self._buckets[before][key]
        self._bucket_of[key] = number
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heappush(self._order, number)
        bucket[key] = None

    def cancel(self, key: K) -> None:
        """Cancelling what is not set is safe."""
        number = self._bucket_of.pop(key, None)
        if number is not None:
            del self._buckets[number][key]

    def next(self) -> float | None:
        while self._order:
            if self._buckets[self._order[0]]:
                return self._order[0] * self._width_s
            del self._buckets[heappop(self._order)]
        return None

    def first(self) -> K | None:
        """One of those that expire first; it stays."""
        return next(iter(self._buckets[self._order[0]])) if self.next() is not None else None

    def due(self, now: float) -> list[K]:
        """Takes out what has expired, oldest bucket first."""
        found: list[K] = []
        while (at := self.next()) is not None and at <= now:
            found += self._buckets.pop(heappop(self._order))
        for key in found:
            del self._bucket_of[key]
        return found
