"""When a turn is refused instead of waiting, and when its client should come again.

Waiting first: a turn is refused only when every slot that could take it is busy *and* the queue of its class is full.
Never refused are turns of a program that has had a completed turn already (its work so far would be lost), of a
priority above the class's line, and turns that waited or ran before, with another router or under an earlier attempt.
"""

from __future__ import annotations

from math import exp
from typing import Protocol

from fermata.core.ids import SessionId
from fermata.router.policy_class import ClassUse, PolicyClass
from fermata.wire.messages import Route

_MEMORY_S = 30.0
"""Grants older than that count for a third."""
_LEAST_S = 1.0
_UNKNOWN_S = 5.0
"""Nothing has drained yet: no rate to go by."""


class ProgramRecord(Protocol):
    @property
    def steps(self) -> int:
        """Turns that finished."""
        ...


class Programs(Protocol):
    def get(self, session: SessionId) -> ProgramRecord | None: ...


class DrainRate:
    """Grants a second out of a queue, exponentially weighted by age; right from the first on."""

    __slots__ = ("_at", "_began", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0
        self._began: float | None = None

    def drained(self, now: float) -> None:
        if self._began is None:
            self._began = self._at = now
        self._rate = self._rate * exp((self._at - now) / _MEMORY_S) + 1.0 / _MEMORY_S
        self._at = now

    def a_second(self, now: float) -> float:
        """What was seen weighs only as much as the time it was seen in: at least a second of it."""
        if self._began is None:
            return 0.0
        seen = 1.0 - exp(-max(1.0, now - self._began) / _MEMORY_S)
        return self._rate * exp((self._at - now) / _MEMORY_S) / seen


class Overload:
    def __init__(self, programs: Programs, *, waited_s: float) -> None:
        """`waited_s`: who says it has waited so long elsewhere was held there; less is the way here."""
        self._programs = programs
        self._waited_s = waited_s
        self._rates: dict[str, DrainRate] = {}
        """By class; a class that a policy has again goes on with its rate."""

    def refusal(
        self, route: Route, policy_class: PolicyClass, use: ClassUse, *, workers: int
    ) -> str:
        """Why the turn is refused, every slot that could take it being busy; empty: it may wait."""
        reached = policy_class.limit_reached(use, workers)
        return "" if not reached or self._is_spared(route, policy_class) else reached

    def _is_spared(self, route: Route, policy_class: PolicyClass) -> bool:
        line = policy_class.priority_line
        if line is not None and route.hints.priority > line:
            return True
        if route.attempt > 0 or route.waited_s >= self._waited_s:
            return True
        program = self._programs.get(route.session) if route.session else None
        return program is not None and program.steps > 0

    def drained(self, policy_class: PolicyClass, now: float) -> None:
        """A turn of the class that had waited was granted."""
        self._rates.setdefault(policy_class.name, DrainRate()).drained(now)

    def drain_rate(self, policy_class: PolicyClass, now: float) -> float:
        rate = self._rates.get(policy_class.name)
        return 0.0 if rate is None else rate.a_second(now)

    def retry_after_s(
        self, policy_class: PolicyClass, use: ClassUse, now: float, *, most: float
    ) -> float:
        """Until what waits now has drained, as fast as the class's turns went lately."""
        rate = self.drain_rate(policy_class, now)
        if rate <= 0:
            return min(_UNKNOWN_S, most)
        return min(max(_LEAST_S, use.turns / rate), most)

    def keep(self, names: set[str]) -> None:
        """Classes there are under the present policy; the others' rates are forgotten."""
        self._rates = {name: rate for name, rate in self._rates.items() if name in names}
