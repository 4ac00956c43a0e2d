"""The slot with the fewest requests; then the fewest blocks in use; then chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fermata.router.load import SlotLoad
from fermata.router.policy.placement_policy import NOTHING_SCORED, Question


class LeastLoaded:
    def __init__(self, generator: Random) -> None:
        self.scored = NOTHING_SCORED
        self._generator = generator

    def pick(self, question: Question, candidates: Sequence[SlotLoad]) -> int:
        if question.preferred is not None:
            return question.preferred
        least = min((load.active, load.decode_blocks) for load in candidates)
        best = [load.slot for load in candidates if (load.active, load.decode_blocks) == least]
        return best[0] if len(best) == 1 else self._generator.choice(best)
