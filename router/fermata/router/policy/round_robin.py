"""Each slot in turn, by number."""

from __future__ import annotations

from collections.abc import Sequence

from fermata.router.load import SlotLoad
from fermata.router.policy.placement_policy import NOTHING_SCORED, Question


class RoundRobin:
    def __init__(self) -> None:
        self.scored = NOTHING_SCORED
        self._last = -1

    def pick(self, question: Question, candidates: Sequence[SlotLoad]) -> int:
        if question.preferred is not None:
            return question.preferred
        slots = [load.slot for load in candidates]
        self._last = min((slot for slot in slots if slot > self._last), default=min(slots))
        return self._last
