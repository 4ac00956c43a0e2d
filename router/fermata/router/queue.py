"""Who of those that wait goes next.

    who has waited for fairWait, by age; then strict priority; then classes in turn; then the class's order

The first of these bounds starvation by the wait attained and holds across classes and strict priorities. Classes
share by deficit round robin on uncached tokens, which is what a turn costs; who goes by age is charged to nobody.

Turns stand in *lines*: of one class, for one set of slots, paced or not. Whatever decides whether a turn can go now is
the same all along a line, so looking at its head is exact: nobody stands in the way of a turn that could go, and
nothing is scanned. A turn enters and leaves in O(log n); who is next costs O(lines + classes), which policy and fleet
set, not the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fermata.core.ids import RequestId
from fermata.router.deficit_round_robin import DeficitRoundRobin
from fermata.router.lazy_heap import LazyHeap
from fermata.router.policy_class import ClassUse, PolicyClass, PolicyClasses

Key = tuple[str, RequestId]
"""Owner and request."""


@dataclass(slots=True, eq=False)
class Place:
    """A turn's place in the queue. `slots` is a mask of those that could take it; none while it waits for something
    else than room."""

    key: Key
    policy_class: PolicyClass
    since: float
    """Queue age, wherever it was spent."""
    strict: int
    jump_s: float
    input_tokens: int
    uncached_tokens: int
    slots: int = 0
    is_paced: bool = False
    """A policy switch freed it, or it came behind such ones."""
    serial: int = 0

    @property
    def cost(self) -> int:
        return max(1, self.uncached_tokens)

    @property
    def age(self) -> tuple[float, int]:
        return (self.since, self.serial)

    @property
    def rank(self) -> tuple[int, float, int]:
        of_class = self.policy_class.rank(self.since, self.jump_s, self.uncached_tokens)
        return (-self.strict, of_class, self.serial)


class Line:
    """Never empty."""

    __slots__ = ("ages", "is_paced", "order", "policy_class", "slots")

    def __init__(self, place: Place) -> None:
        self.policy_class = place.policy_class
        self.slots = place.slots
        self.is_paced = place.is_paced
        self.order: LazyHeap[tuple[int, float, int], Place] = LazyHeap()
        self.ages: LazyHeap[tuple[float, int], Place] = LazyHeap()

    @property
    def first(self) -> Place:
        place = self.order.least()
        assert place is not None
        return place

    @property
    def oldest(self) -> Place:
        place = self.ages.least()
        assert place is not None
        return place


@dataclass(frozen=True, slots=True)
class Next:
    """Who goes next, and what its class and those beside it would have paid; None: it goes by age."""

    place: Place
    costs: Mapping[int, int] | None


class Queue:
    def __init__(self, classes: PolicyClasses, *, fair_wait_s: float) -> None:
        self._fair_wait_s = fair_wait_s
        self._shares = DeficitRoundRobin([each.quantum for each in classes])
        self._lines: dict[tuple[int, int, bool], Line] = {}
        self._uses = [ClassUse() for _ in classes]
        self._last = 0
        """Serial."""
        self._count = 0
        self._paced = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, place: Place) -> bool:
        line = self._lines.get((place.policy_class.number, place.slots, place.is_paced))
        return line is not None and place in line.order

    def use(self, policy_class: PolicyClass) -> ClassUse:
        """Of its turns that wait for room."""
        return self._uses[policy_class.number]

    def add(self, place: Place) -> None:
        """A place that was in a queue before keeps its serial: among equals the first to come is the first."""
        place.serial = place.serial or self._last + 1
        self._last = max(self._last, place.serial)
        self._enter(place)
        self._count += 1

    def remove(self, place: Place) -> None:
        self._leave(place)
        self._count -= 1
        self._settle(place.policy_class.number)

    def move(self, place: Place, slots: int) -> None:
        """Other slots could take it now; its place among the others stays."""
        if slots != place.slots:
            self._leave(place)
            place.slots = slots
            self._enter(place)
            self._settle(place.policy_class.number)

    def has_paced(self, slots: int) -> bool:
        """Do paced turns wait for one of the slots, or, with none given, for anything?"""
        if not slots or not self._paced:
            return self._paced > 0
        return any(line.is_paced and line.slots & slots for line in self._lines.values())

    def has_line(self, may_go: Callable[[Line], bool]) -> bool:
        return any(may_go(line) for line in self._lines.values())

    def next(self, now: float, has_room: Callable[[Line], bool]) -> Next | None:
        """Changes nothing; `remove` or `move` follows, or what is asked is answered the same again."""
        lines = [line for line in self._lines.values() if line.slots and has_room(line)]
        if not lines:
            return None
        oldest = min((line.oldest for line in lines), key=_age)
        if now - oldest.since >= self._fair_wait_s:
            return Next(oldest, None)
        firsts = [line.first for line in lines]
        strict = max(place.strict for place in firsts)
        by_class: dict[int, Place] = {}
        for place in firsts:
            number = place.policy_class.number
            best = by_class.get(number)
            if place.strict == strict and (best is None or place.rank < best.rank):
                by_class[number] = place
        if len(by_class) == 1 and len(self._uses) == 1:
            return Next(by_class[0], None)
        costs = {number: place.cost for number, place in by_class.items()}
        return Next(by_class[self._shares.choose(costs)], costs)

    def charge(self, chosen: Next) -> None:
        """It goes: its class pays. Before `remove`."""
        if chosen.costs is not None:
            self._shares.serve(chosen.costs)

    def _enter(self, place: Place) -> None:
        key = (place.policy_class.number, place.slots, place.is_paced)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(place)
        line.order.push(place.rank, place)
        line.ages.push(place.age, place)
        self._paced += place.is_paced
        self._account(place, 1)

    def _leave(self, place: Place) -> None:
        key = (place.policy_class.number, place.slots, place.is_paced)
        line = self._lines[key]
        line.order.remove(place)
        line.ages.remove(place)
        self._paced -= place.is_paced
        if not len(line.order):
            del self._lines[key]
        self._account(place, -1)

    def _settle(self, number: int) -> None:
        """After a turn of the class left: credit is for those who have turns to serve."""
        if not self._uses[number].turns:
            self._shares.idle(number)

    def _account(self, place: Place, sign: int) -> None:
        if not place.slots:
            return
        use = self._uses[place.policy_class.number]
        use.turns += sign
        use.input_tokens += sign * place.input_tokens
        use.uncached_tokens += sign * place.uncached_tokens
        use.cached_tokens += sign * (place.input_tokens - place.uncached_tokens)

    def check_integrity(self) -> None:
        uses = [ClassUse() for _ in self._uses]
        total = paced = 0
        for (number, slots, is_paced), line in self._lines.items():
            line.order.check_integrity()
            line.ages.check_integrity()
            assert set(line.order) == set(line.ages) != set()
            for place in line.order:
                assert place.policy_class.number == number
                assert (place.slots, place.is_paced) == (slots, is_paced)
                total += 1
                paced += is_paced
                if slots:
                    uses[number].turns += 1
                    uses[number].input_tokens += place.input_tokens
                    uses[number].uncached_tokens += place.uncached_tokens
                    uses[number].cached_tokens += place.input_tokens - place.uncached_tokens
        assert uses == self._uses
        assert (total, paced) == (self._count, self._paced)
        self._shares.check_integrity()
        assert all(use.turns or not self._shares.credit(n) for n, use in enumerate(uses))


def _age(place: Place) -> tuple[float, int]:
    return place.age
