"""Turns that can not be placed yet, first come first served, each with a reason and a deadline.

Turns wait in lanes, by the slots that could take them: whoever fits only the wide workers, or is bound Hard to one
slot, does not stand in the way of the others. All turns of a lane can go or none can, so what frees capacity is judged
from the fronts of the lanes, oldest first: O(turns freed).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from fermata.core.ids import RequestId
from fermata.router.expiry import Expiry
from fermata.router.model import Turn

Reason = Literal["no_worker", "booting", "queue"]
Lane = tuple[str, int]
"""Model, and the mask of slots that could take the turn if they had room; 0 where there is none yet."""
Key = tuple[str, RequestId]
"""Owner and request."""


@dataclass(slots=True, eq=False)
class WaitingTurn:
    turn: Turn
    lane: Lane
    reason: Reason
    began: float
    deadline: float

    @property
    def key(self) -> Key:
        return (self.turn.owner.id, self.turn.route.request)


class Waiting:
    def __init__(self, *, width_s: float) -> None:
        self._turns: dict[Key, WaitingTurn] = {}
        self._lanes: dict[Lane, OrderedDict[Key, WaitingTurn]] = {}
        self.deadlines: Expiry[Key] = Expiry(width_s=width_s)

    def __len__(self) -> int:
        return len(self._turns)

    def get(self, owner: str, request: RequestId) -> WaitingTurn | None:
        return self._turns.get((owner, request))

    def of_key(self, key: Key) -> WaitingTurn:
        return self._turns[key]

    def add(self, waiting: WaitingTurn) -> None:
        assert waiting.key not in self._turns
        self._turns[waiting.key] = waiting
        self._lanes.setdefault(waiting.lane, OrderedDict())[waiting.key] = waiting
        self.deadlines.set(waiting.key, waiting.deadline)

    def remove(self, waiting: WaitingTurn) -> None:
        del self._turns[waiting.key]
        self.deadlines.cancel(waiting.key)
        self._leave_lane(waiting)

    def postpone(self, waiting: WaitingTurn, reason: Reason, now: float, deadline: float) -> None:
        waiting.reason, waiting.began, waiting.deadline = reason, now, deadline
        self.deadlines.set(waiting.key, deadline)

    def move(self, waiting: WaitingTurn, lane: Lane) -> None:
        """Behind those that wait there; in its own lane too."""
        self._leave_lane(waiting)
        waiting.lane = lane
        self._lanes.setdefault(lane, OrderedDict())[waiting.key] = waiting

    def lanes(self) -> list[Lane]:
        return list(self._lanes)

    def front(self, lane: Lane) -> WaitingTurn | None:
        turns = self._lanes.get(lane)
        return None if turns is None else next(iter(turns.values()))

    def oldest_first(self) -> list[WaitingTurn]:
        """O(waiting)."""
        return sorted(self._turns.values(), key=lambda waiting: waiting.turn.since)

    def of_owner(self, owner: str) -> list[WaitingTurn]:
        """O(waiting)."""
        return [waiting for key, waiting in self._turns.items() if key[0] == owner]

    def _leave_lane(self, waiting: WaitingTurn) -> None:
        lane = self._lanes[waiting.lane]
        del lane[waiting.key]
        if not lane:
            del self._lanes[waiting.lane]

    def check_integrity(self) -> None:
        in_lanes = {key: w for turns in self._lanes.values() for key, w in turns.items()}
        assert in_lanes == self._turns
        assert all(self._lanes.values())
        assert len(self.deadlines) == len(self._turns)
        for key, waiting in self._turns.items():
            assert key == waiting.key
            assert key in self.deadlines
            assert key in self._lanes[waiting.lane]
