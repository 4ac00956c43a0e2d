"""Deficit round robin (Shreedhar and Varghese 1995): classes share by tokens, whatever the size of their turns.

A class that is visited gets its quantum on top of what it has left, and serves turns while it can pay for them. With
quanta of 512 and turns of 100,000 tokens that is 200 rounds for one turn, so rounds in which nobody can pay are not
walked but computed: O(classes) a turn. Credit never exceeds a quantum and the dearest turn; a class that has nothing to
serve keeps none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Round:
    winner: int
    visits: Mapping[int, int]
    """Class -> how often it is visited until the winner can pay."""


class DeficitRoundRobin:
    """Classes go by number. `costs` names those that could serve now, and what their first turn costs."""

    def __init__(self, quanta: Sequence[int]) -> None:
        assert all(quantum > 0 for quantum in quanta)
        self._quanta = list(quanta)
        self._credits = [0] * len(quanta)
        self._at = len(quanta) - 1
        """The class visited last; it is served on as long as it can pay."""

    def credit(self, number: int) -> int:
        return self._credits[number]

    def choose(self, costs: Mapping[int, int]) -> int:
        """Who serves next; changes nothing."""
        return self._round(costs).winner

    def serve(self, costs: Mapping[int, int]) -> int:
        """The class chosen serves its first turn and pays for it."""
        found = self._round(costs)
        for number, visits in found.visits.items():
            self._credits[number] += visits * self._quanta[number]
        self._credits[found.winner] -= costs[found.winner]
        self._at = found.winner
        return found.winner

    def idle(self, number: int) -> None:
        """It has nothing to serve: credit is for those who wait."""
        self._credits[number] = 0

    def _round(self, costs: Mapping[int, int]) -> _Round:
        assert costs
        at = self._at
        if at in costs and self._credits[at] >= costs[at]:
            return _Round(at, {})
        count = len(self._quanta)
        ring = sorted(costs, key=lambda number: (number - at - 1) % count)
        needed = {number: self._visits_needed(number, costs[number]) for number in ring}
        fewest = min(needed.values())
        winner = next(number for number in ring if needed[number] == fewest)
        behind = False
        visits: dict[int, int] = {}
        for number in ring:
            visits[number] = fewest - behind
            behind = behind or number == winner
        return _Round(winner, visits)

    def _visits_needed(self, number: int, cost: int) -> int:
        return max(1, -(-(cost - self._credits[number]) // self._quanta[number]))

    def check_integrity(self) -> None:
        assert all(credit >= 0 for credit in self._credits)
