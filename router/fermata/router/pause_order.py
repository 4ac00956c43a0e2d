"""Which program gives way first when a slot is too full: small strategies, by the names a policy uses.

A key is compared within one phase only (Acting before Reasoning is the admission rule's business); the least is paused
first. `weight` is that of the program's gap, so that of two equal programs the one that waits for a person goes before
the one that waits for a tool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fermata.router.lazy_heap import LazyHeap
from fermata.router.program import Program

_LEAST_IDLE_S = 0.001
Key = tuple[float, float]


class PauseOrder(Protocol):
    is_static: bool
    """Keys stay as they are while a program stays as it is: then a heap can keep the order."""

    def key(self, program: Program, weight: float, now: float) -> Key: ...


class SmallestFirst:
    """Pausing costs a prefill of the context later, which grows faster than it does: many small ones are cheaper."""

    is_static = True

    def key(self, program: Program, weight: float, now: float) -> Key:
        return (program.context_tokens * weight, program.acting_since)


class IdlestFirst:
    """Whoever waits for longest; a gap of weight w counts as 1 / w times as long."""

    is_static = False

    def key(self, program: Program, weight: float, now: float) -> Key:
        return (-_idle_s(program, now) / max(weight, 0.01), program.context_tokens)


class TokensPerIdleSecond:
    """Small and long idle first."""

    is_static = False

    def key(self, program: Program, weight: float, now: float) -> Key:
        return (
            program.context_tokens * weight / _idle_s(program, now),
            program.acting_since,
        )


class DeclaredPriority:
    """What the client called least important; of equal ones the smallest."""

    is_static = True

    def key(self, program: Program, weight: float, now: float) -> Key:
        return (program.priority, program.context_tokens * weight)


def _idle_s(program: Program, now: float) -> float:
    return max(_LEAST_IDLE_S, now - program.acting_since)


_ORDERS: dict[str, Callable[[], PauseOrder]] = {
    "SmallestFirst": SmallestFirst,
    "IdlestFirst": IdlestFirst,
    "TokensPerIdleSecond": TokensPerIdleSecond,
    "DeclaredPriority": DeclaredPriority,
}


def pause_order(name: str) -> PauseOrder:
    return _ORDERS[name]()


class PauseQueue:
    """The Acting programs of one slot, in the order they would be paused.

    With a static order O(log n) a change; an order that moves with time is looked through when it is asked, which is
    only when the slot is too full.
    """

    def __init__(self, order: PauseOrder, weigh: Callable[[Program], float]) -> None:
        self._order = order
        self._weigh = weigh
        self._heap: LazyHeap[Key, Program] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, program: Program) -> bool:
        return program in self._heap

    def put(self, program: Program) -> None:
        """Anew, when it is there already: its key may have changed."""
        self.discard(program)
        key = self.key(program, program.acting_since) if self._order.is_static else (0.0, 0.0)
        self._heap.push(key, program)

    def discard(self, program: Program) -> None:
        if program in self._heap:
            self._heap.remove(program)

    def first(self, now: float) -> Program | None:
        if self._order.is_static:
            return self._heap.least()
        return min(self._heap, key=lambda program: self.key(program, now), default=None)

    def key(self, program: Program, now: float) -> Key:
        return self._order.key(program, self._weigh(program), now)

    def check_integrity(self) -> None:
        self._heap.check_integrity()
