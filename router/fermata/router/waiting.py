"""Turns that can not be placed yet, first come first served, each with a reason and a deadline.

Turns wait in lanes: one a model, and one a slot for sessions bound Hard to it, so that those who wait for one slot
do not stand in the way of the others. What frees capacity is judged from the front of each lane: O(turns freed).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from fermata.core.ids import RequestId
from fermata.router.expiry import Expiry
from fermata.router.model import Turn

Reason = Literal["no_worker", "booting", "queue"]
Lane = tuple[str, int]
"""Model, and the slot a Hard session is bound to; -1 for all others."""
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
        """Behind those that wait there."""
        if lane != waiting.lane:
            self._leave_lane(waiting)
            waiting.lane = lane
            self._lanes.setdefault(lane, OrderedDict())[waiting.key] = waiting

    def lanes(self) -> list[Lane]:
        return list(self._lanes)

    def ahead(self, lane: Lane) -> int:
        """How many wait there."""
        return len(self._lanes.get(lane, ()))

    def front(self, lane: Lane, most: int | None) -> list[WaitingTurn]:
        """The first of a lane, in order; None: all of it."""
        turns = self._lanes.get(lane)
        return [] if turns is None else list(islice(turns.values(), most))

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
