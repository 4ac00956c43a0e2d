"""A heap whose items may leave from anywhere: removal marks, and what is marked is dropped when it comes up.

Pushing and taking the least cost O(log n) comparisons; so does removing, amortised, since a heap that is more than half
marked is built anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T", bound=Hashable)

_MOST_MARKED = 16
"""A heap this small is never worth building anew."""


class LazyHeap(Generic[K, T]):
    """Keys are ordered; of equal keys the one that was pushed first comes first."""

    __slots__ = ("_heap", "_pushes", "_tickets")

    def __init__(self) -> None:
        # K is ordered in ways its bound can not say: tuples of numbers are, and so is what tests count with.
        self._heap: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: T) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[T]:
        return iter(self._tickets)

    def push(self, key: K, item: T) -> None:
        assert item not in self._tickets
        self._pushes += 1
        self._tickets[item] = self._pushes
        heappush(self._heap, (key, self._pushes, item))

    def remove(self, item: T) -> None:
        del self._tickets[item]
        if len(self._heap) > 2 * len(self._tickets) + _MOST_MARKED:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def least(self) -> T | None:
        heap = self._heap
        while heap:
            if self._is_live(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def _is_live(self, entry: tuple[Any, int, T]) -> bool:
        return self._tickets.get(entry[2]) == entry[1]

    def check_integrity(self) -> None:
        live = [entry for entry in self._heap if self._is_live(entry)]
        assert len(live) == len(self._tickets)
        assert len(self._heap) <= 2 * len(live) + _MOST_MARKED
