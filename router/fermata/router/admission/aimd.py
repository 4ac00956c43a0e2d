"""A window of active programs a slot, moved as TCP moves its own (after CONCUR, arXiv 2601.22705).

No capacity and no sizes are needed, only what turns say when they finish: how much of what their program left on the
slot was still there. While that share is high and the window is used, it grows by a step; when it falls, the window
shrinks by a factor. A slot starts small.
"""

from __future__ import annotations

from fermata.core.spec import AimdSpec
from fermata.router.admission.budget import ProgramBudget
from fermata.router.occupancy import Occupancy


class Aimd:
    def __init__(self, occupancy: Occupancy, spec: AimdSpec) -> None:
        self._occupancy = occupancy
        self._spec = spec
        self.budget = ProgramBudget(occupancy, initial=spec.initial)
        self._heard: dict[int, list[int]] = {}
        """Slot -> turns, tokens found, tokens expected, since its window last moved."""

    def completed(self, slot: int, *, found: int, expected: int) -> None:
        heard = self._heard.setdefault(slot, [0, 0, 0])
        heard[0] += 1
        heard[1] += min(found, expected)
        heard[2] += expected

    def forget(self, slot: int) -> None:
        self._heard.pop(slot, None)
        self.budget.forget(slot)

    def adapt(self) -> list[int]:
        """Once a round. O(slots that were heard of); returns those whose window moved."""
        moved: list[int] = []
        for slot, (turns, found, expected) in list(self._heard.items()):
            if turns < self._spec.turns or slot not in self._occupancy:
                continue
            del self._heard[slot]
            before = self.budget.window(slot)
            window = self._next(before, found / expected, self._occupancy.programs(slot))
            if window != before:
                self.budget.set_window(slot, window)
                moved.append(slot)
        return moved

    def _next(self, window: float, share: float, active: int) -> float:
        if share < self._spec.low:
            return max(1.0, min(window, float(active)) * self._spec.decrease)
        if share >= self._spec.high and active + 1 > window:
            return window + self._spec.increase
        return window
