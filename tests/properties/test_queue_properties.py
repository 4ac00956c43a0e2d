"""The queue against a model that sorts everything each time, and walks its rounds one visit after another.

Whatever comes, leaves, moves, ages or is switched, in any order: who goes next is whom the model names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fermata.core.spec import PolicyClassSpec, QueueSpec
from fermata.router.deficit_round_robin import DeficitRoundRobin
from fermata.router.lazy_heap import LazyHeap
from fermata.router.policy_class import PolicyClasses
from fermata.router.queue import Line, Place, Queue

SLOTS = 4
FAIR_WAIT_S = 60.0
orders = st.sampled_from(["FCFS", "LCFS", "WSPT"])
masks = st.sampled_from([0b1111] * 6 + [0b0011, 0b1000, 0])
classes = st.lists(st.tuples(orders, st.sampled_from([1, 512, 2048])), min_size=1, max_size=3)

Arrival = tuple[int, int, float, int, int, float, bool]
arrivals = st.tuples(
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 0, 0, 1, 7]),
    st.sampled_from([0.0, 0.0, 5.0, 2e9]),
    st.sampled_from([0, 1, 100, 100, 5000]),
    masks,
    st.sampled_from([0.0, 0.0, 0.0, 30.0, 90.0]),
    st.sampled_from([False, False, True]),
)


@dataclass
class Waiter:
    """As the model sees a turn. `number` is the order of arrival."""

    number: int
    policy_class: int
    since: float
    strict: int
    jump: float
    uncached: int
    mask: int
    paced: bool

    def key(self, order: str) -> float:
        if order == "FCFS":
            return self.since - self.jump
        if order == "LCFS":
            return -(self.since + self.jump)
        return -(1 + self.jump) / max(1, self.uncached)


class NaiveRounds:
    def __init__(self, quanta: list[int]) -> None:
        self.quanta = quanta
        self.credits = [0] * len(quanta)
        self.at = len(quanta) - 1

    def serve(self, costs: dict[int, int]) -> int:
        if not (self.at in costs and self.credits[self.at] >= costs[self.at]):
            while True:
                self.at = (self.at + 1) % len(self.quanta)
                if self.at in costs:
                    self.credits[self.at] += self.quanta[self.at]
                    if self.credits[self.at] >= costs[self.at]:
                        break
        self.credits[self.at] -= costs[self.at]
        return self.at


class QueueMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()

    @initialize(spec=classes)
    def start(self, spec: list[tuple[str, int]]) -> None:
        self.now = 1000.0
        self.arrivals = 0
        self.open, self.open_to_paced = 0b1111, 0b0101
        self.waiters: dict[int, tuple[Waiter, Place]] = {}
        self.build(spec)

    def build(self, spec: list[tuple[str, int]]) -> None:
        self.spec = spec
        named = [
            PolicyClassSpec(name=f"c{i}", order=order, quantum=quantum)
            for i, (order, quantum) in enumerate(spec)
        ]
        queue_spec = QueueSpec(classes=named, fair_wait_s=FAIR_WAIT_S)
        self.classes = list(PolicyClasses(queue_spec))
        self.queue = Queue(PolicyClasses(queue_spec), fair_wait_s=FAIR_WAIT_S)
        self.rounds = NaiveRounds([quantum for _, quantum in spec])

    @rule(turns=st.lists(arrivals, min_size=1, max_size=5))
    def arrive(self, turns: list[Arrival]) -> None:
        for turn in turns:
            self.arrive_one(*turn)

    def arrive_one(
        self,
        policy_class: int,
        strict: int,
        jump: float,
        uncached: int,
        mask: int,
        waited: float,
        paced: bool,
    ) -> None:
        self.arrivals += 1
        number = self.arrivals
        waiter = Waiter(
            number,
            policy_class % len(self.classes),
            self.now - waited,
            strict,
            jump,
            uncached,
            mask,
            paced,
        )
        place = Place(
            key=("f", number),  # type: ignore[arg-type]
            policy_class=self.classes[waiter.policy_class],
            since=waiter.since,
            strict=strict,
            jump_s=jump,
            input_tokens=uncached + 64,
            uncached_tokens=uncached,
            slots=mask,
            is_paced=paced,
        )
        self.waiters[number] = (waiter, place)
        self.queue.add(place)

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiters)))
        self.seen["cancelled"] += 1
        self.leave(number)

    @precondition(lambda self: self.waiters)
    @rule(data=st.data(), mask=masks)
    def move(self, data: st.DataObject, mask: int) -> None:
        waiter, place = self.waiters[data.draw(st.sampled_from(sorted(self.waiters)))]
        waiter.mask = mask
        self.queue.move(place, mask)
        self.settle(waiter.policy_class)

    @rule(seconds=st.sampled_from([0.0, 1.0, 1.0, 20.0]))
    def age(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        slots=st.sampled_from([0b1111, 0b1111, 0b1111, 0b0001, 0b1010, 0]), paced=st.integers(0, 15)
    )
    def room(self, slots: int, paced: int) -> None:
        self.open, self.open_to_paced = slots, paced

    @rule(spec=classes)
    def switch(self, spec: list[tuple[str, int]]) -> None:
        """Another policy: a new queue, and everybody goes over."""
        before = self.waiters
        self.seen["switched with waiters"] += bool(before)
        self.build(spec)
        for waiter, place in before.values():
            waiter.policy_class %= len(spec)
            waiter.paced = place.is_paced = True
            place.policy_class = self.classes[waiter.policy_class]
            self.queue.add(place)

    @rule(times=st.integers(1, 6))
    def go(self, times: int) -> None:
        for _ in range(times):
            chosen = self.queue.next(self.now, self.has_room)
            expected = self.expected()
            assert (chosen and chosen.place.key[1]) == expected
            if chosen is None or expected is None:
                self.seen["nobody could go"] += bool(self.waiters)
                return
            self.check_age(self.waiters[expected][0])
            self.queue.charge(chosen)
            self.leave(expected)
            self.seen["went"] += 1

    def has_room(self, line: Line) -> bool:
        return bool(line.slots & (self.open_to_paced if line.is_paced else self.open))

    def can_go(self) -> list[Waiter]:
        return [
            w
            for w, _ in self.waiters.values()
            if w.mask & (self.open_to_paced if w.paced else self.open)
        ]

    def expected(self) -> int | None:
        able = self.can_go()
        if not able:
            return None
        old = [w for w in able if self.now - w.since >= FAIR_WAIT_S]
        if old:
            self.seen["went by age"] += 1
            return min(old, key=lambda w: (w.since, w.number)).number
        strict = max(w.strict for w in able)
        self.seen["strict before others"] += any(w.strict < strict for w in able)
        firsts: dict[int, Waiter] = {}
        for w in sorted(
            (w for w in able if w.strict == strict),
            key=lambda w: (w.key(self.spec[w.policy_class][0]), w.number),
        ):
            firsts.setdefault(w.policy_class, w)
        if len(self.spec) == 1:
            return firsts[0].number
        self.seen["classes shared"] += len(firsts) > 1
        served = self.rounds.serve({c: max(1, w.uncached) for c, w in firsts.items()})
        return firsts[served].number

    def check_age(self, went: Waiter) -> None:
        """Nobody who could have gone waits beyond fairWait behind a younger turn."""
        if self.now - went.since < FAIR_WAIT_S:
            assert all(self.now - w.since < FAIR_WAIT_S for w in self.can_go())

    def leave(self, number: int) -> None:
        waiter, place = self.waiters.pop(number)
        self.queue.remove(place)
        self.settle(waiter.policy_class)

    def settle(self, policy_class: int) -> None:
        """A class of which nobody waits for room keeps no credit."""
        if not any(w.policy_class == policy_class and w.mask for w, _ in self.waiters.values()):
            self.rounds.credits[policy_class] = 0

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiters)
        for number, policy_class in enumerate(self.classes):
            of_class = [w for w, _ in self.waiters.values() if w.policy_class == number and w.mask]
            use = self.queue.use(policy_class)
            assert use.turns == len(of_class)
            assert use.uncached_tokens == sum(w.uncached for w in of_class)
            assert use.cached_tokens == 64 * len(of_class)
        paced = any(w.paced and w.mask & 0b1000 for w, _ in self.waiters.values())
        assert self.queue.has_paced(0b1000) == paced

    def teardown(self) -> None:
        """Whoever is left leaves; nothing stays behind."""
        for number in list(getattr(self, "waiters", {})):
            self.leave(number)
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert len(self.queue) == 0
            assert self.queue.next(self.now, lambda line: True) is None


@pytest.mark.timeout(240)
def test_the_order_is_the_one_of_a_model_that_sorts_everything():
    QueueMachine.seen.clear()
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seen = QueueMachine.seen
    for event, least in {
        "went": 200,
        "went by age": 40,
        "strict before others": 30,
        "classes shared": 15,
        "cancelled": 100,
        "switched with waiters": 60,
        "nobody could go": 25,
    }.items():
        assert seen[event] >= least, (event, seen)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    quanta=st.lists(st.integers(1, 5000), min_size=2, max_size=5),
    costs=st.lists(st.integers(1, 200_000), min_size=5, max_size=40),
)
def test_backlogged_classes_share_within_one_quantum(quanta: list[int], costs: list[int]):
    """Each gets its quantum as often as any other, give or take one visit; what it has not served of that it has as
    credit, and that is less than its next turn costs."""
    rounds = DeficitRoundRobin(quanta)
    served = [0] * len(quanta)
    heads = {number: costs[number % len(costs)] for number in range(len(quanta))}
    for turn in range(200):
        winner = rounds.serve(heads)
        served[winner] += heads[winner]
        heads[winner] = costs[(turn * 7 + winner) % len(costs)]
        given_ = [served[i] + rounds.credit(i) for i in range(len(quanta))]
        assert all(total % quantum == 0 for total, quantum in zip(given_, quanta, strict=True))
        visits = [total // quantum for total, quantum in zip(given_, quanta, strict=True)]
        assert max(visits) - min(visits) <= 1
        assert all(rounds.credit(i) < heads[i] for i in range(len(quanta)) if i != winner)
        rounds.check_integrity()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    quanta=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    asked=st.lists(
        st.dictionaries(st.integers(0, 3), st.integers(1, 500), min_size=1), max_size=30
    ),
    idle=st.sets(st.integers(0, 29)),
)
def test_computed_rounds_are_the_rounds_walked(
    quanta: list[int], asked: list[dict[int, int]], idle: set[int]
):
    computed, walked = DeficitRoundRobin(quanta), NaiveRounds(quanta)
    for step, costs in enumerate(asked):
        costs = {number % len(quanta): cost for number, cost in costs.items()}
        expected = walked.serve(costs)
        assert computed.choose(costs) == computed.serve(costs) == expected
        if step in idle:
            computed.idle(expected)
            walked.credits[expected] = 0
        assert [computed.credit(i) for i in range(len(quanta))] == walked.credits


class Counted(float):
    """A key that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)


def comparisons_a_turn(many: int) -> float:
    """Of a heap with so many in it: one comes, one goes from the front, one from the middle; keys are scattered."""
    heap: LazyHeap[Counted, int] = LazyHeap()
    for number in range(many):
        heap.push(Counted(number * 7919 % many), number)
    Counted.comparisons = 0
    middle = many // 2
    for number in range(many, many + 1000):
        heap.push(Counted(number * 7919 % many), number)
        first = heap.least()
        assert first is not None
        heap.remove(first)
        while middle not in heap:
            middle += 1
        heap.remove(middle)
        heap.push(Counted(middle * 31 % many), middle)
    heap.check_integrity()
    return Counted.comparisons / 1000


def test_a_turn_costs_the_logarithm_of_how_many_wait():
    small, large = comparisons_a_turn(1000), comparisons_a_turn(100_000)
    assert large < 100
    assert large < 2.5 * small + 10, (small, large)


@pytest.mark.parametrize("many", [1000, 20_000])
def test_who_is_next_is_found_without_a_look_at_those_behind(many: int):
    """What is asked of lines, not of turns: three classes, two sets of slots."""
    spec = QueueSpec(classes=[PolicyClassSpec(name=f"c{i}") for i in range(3)], fair_wait_s=1e6)
    classes = list(PolicyClasses(spec))
    queue = Queue(PolicyClasses(spec), fair_wait_s=1e6)
    for number in range(many):
        queue.add(
            Place(
                key=("f", number),  # type: ignore[arg-type]
                policy_class=classes[number % 3],
                since=float(number % 97),
                strict=0,
                jump_s=0.0,
                input_tokens=100,
                uncached_tokens=100,
                slots=0b11 if number % 2 else 0b01,
            )
        )
    asked = 0

    def has_room(line: Line) -> bool:
        nonlocal asked
        asked += 1
        return True

    for _ in range(100):
        chosen = queue.next(0.0, has_room)
        assert chosen is not None
        queue.charge(chosen)
        queue.remove(chosen.place)
    assert asked == 600
