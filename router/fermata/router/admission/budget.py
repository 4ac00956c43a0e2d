"""What a slot can hold: in tokens where its worker tells its capacity, else in programs."""

from __future__ import annotations

from math import inf
from typing import Protocol

from fermata.core.spec import ThunderAgentSpec
from fermata.router.occupancy import Occupancy


class Budget(Protocol):
    def room(self, slot: int, *, is_resume: bool) -> float:
        """Tokens that may be added; not above 0 when it is full."""
        ...

    def places(self, slot: int) -> float:
        """Programs that may be added, as far as their number counts."""
        ...

    def is_over(self, slot: int) -> bool:
        """So full that programs have to leave."""
        ...

    def is_safe(self, slot: int) -> bool:
        """Enough have left, or are going to."""
        ...

    def has_relief(self, slot: int) -> bool:
        """Enough have left: a program that is to go may stay."""
        ...


class TokenBudget:
    """Use against capacity: over at the pause threshold, safe at the pause target, resumed below a lower ceiling."""

    def __init__(self, occupancy: Occupancy, spec: ThunderAgentSpec) -> None:
        self._occupancy = occupancy
        self._spec = spec

    def room(self, slot: int, *, is_resume: bool) -> float:
        """An empty slot takes whatever fits it: nobody would be the better for waiting."""
        capacity = self._occupancy[slot].capacity or 0
        if not self._occupancy.programs(slot):
            return capacity
        share = self._spec.pause_threshold - (self._spec.resume_hysteresis if is_resume else 0.0)
        return share * capacity - self._occupancy.use(slot)

    def is_over(self, slot: int) -> bool:
        capacity = self._occupancy[slot].capacity or 0
        return self._occupancy.use(slot) > self._spec.pause_threshold * capacity

    def is_safe(self, slot: int) -> bool:
        target = self._spec.pause_target * (self._occupancy[slot].capacity or 0)
        return min(self._occupancy.use(slot), self._occupancy.staying(slot)) <= target

    def places(self, slot: int) -> float:
        return inf

    def has_relief(self, slot: int) -> bool:
        """Below the ceiling it would be resumed under, pausing it would be for nothing."""
        spec = self._spec
        share = max(spec.pause_target, spec.pause_threshold - spec.resume_hysteresis)
        return self._occupancy.use(slot) <= share * (self._occupancy[slot].capacity or 0)


class ProgramBudget:
    """So many programs at a time: a window for each slot, which a rule moves."""

    def __init__(self, occupancy: Occupancy, *, initial: float) -> None:
        self._occupancy = occupancy
        self._initial = initial
        self._windows: dict[int, float] = {}

    def window(self, slot: int) -> float:
        return self._windows.get(slot, self._initial)

    def set_window(self, slot: int, window: float) -> None:
        self._windows[slot] = window

    def forget(self, slot: int) -> None:
        self._windows.pop(slot, None)

    def room(self, slot: int, *, is_resume: bool) -> float:
        return inf if self.places(slot) >= 1 else 0.0

    def places(self, slot: int) -> float:
        return self.window(slot) - self._occupancy.programs(slot)

    def is_over(self, slot: int) -> bool:
        return self._occupancy.programs(slot) > self.window(slot)

    def is_safe(self, slot: int) -> bool:
        return self._occupancy.staying_programs(slot) <= self.window(slot)

    def has_relief(self, slot: int) -> bool:
        return not self.is_over(slot)
