"""Turns that can not be placed yet, each with a reason and a deadline, in the order of the policy's queue.

What a turn waits for decides where it stands: for room, among those that the same slots could take; for anything else
(a worker, the end of a boot, its program's admission), nowhere: then no room lets it go, only a change of what it waits
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fermata.core.ids import RequestId
from fermata.core.spec import QueueSpec
from fermata.router.expiry import Expiry
from fermata.router.model import Turn
from fermata.router.policy_class import PolicyClass, PolicyClasses
from fermata.router.queue import Key, Place, Queue

Reason = Literal["no_worker", "booting", "queue", "pressure", "admission", "policy"]


@dataclass(slots=True, eq=False)
class WaitingTurn:
    turn: Turn
    place: Place
    reason: Reason
    deadline: float

    @property
    def key(self) -> Key:
        return self.place.key


class Waiting:
    def __init__(self, spec: QueueSpec, *, width_s: float) -> None:
        self._turns: dict[Key, WaitingTurn] = {}
        self.classes = PolicyClasses(spec)
        self.queue = Queue(self.classes, fair_wait_s=spec.fair_wait_s)
        self.deadlines: Expiry[Key] = Expiry(width_s=width_s)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[WaitingTurn]:
        """Those who came first come first, whatever the order of the queue."""
        return iter(self._turns.values())

    def get(self, owner: str, request: RequestId) -> WaitingTurn | None:
        return self._turns.get((owner, request))

    def of_key(self, key: Key) -> WaitingTurn:
        return self._turns[key]

    def add(self, waiting: WaitingTurn) -> None:
        assert waiting.key not in self._turns
        self._turns[waiting.key] = waiting
        self.queue.add(waiting.place)
        self.deadlines.set(waiting.key, waiting.deadline)

    def remove(self, waiting: WaitingTurn) -> None:
        del self._turns[waiting.key]
        self.queue.remove(waiting.place)
        self.deadlines.cancel(waiting.key)

    def postpone(self, waiting: WaitingTurn, reason: Reason, deadline: float) -> None:
        waiting.reason, waiting.deadline = reason, deadline
        self.deadlines.set(waiting.key, deadline)

    def of_owner(self, owner: str) -> list[WaitingTurn]:
        """O(waiting)."""
        return [waiting for key, waiting in self._turns.items() if key[0] == owner]

    def apply(self, spec: QueueSpec, *, paced: bool) -> None:
        """Another queue: all that wait go over with their age, and are let go at its pace. O(waiting log waiting)."""
        self.classes = PolicyClasses(spec)
        self.queue = Queue(self.classes, fair_wait_s=spec.fair_wait_s)
        for waiting in self._turns.values():
            place = waiting.place
            place.policy_class = self._class(waiting.turn.route.policy_class, place)
            place.is_paced = paced
            self.queue.add(place)

    def _class(self, name: str, place: Place) -> PolicyClass:
        return self.classes.of(name, lambda: place.uncached_tokens)

    def check_integrity(self) -> None:
        self.queue.check_integrity()
        assert len(self.deadlines) == len(self._turns) == len(self.queue)
        for key, waiting in self._turns.items():
            assert key == waiting.key
            assert key in self.deadlines
            assert waiting.place in self.queue
