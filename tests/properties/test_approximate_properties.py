"""The learned index against a list: what is remembered, how deep it matches, and when it goes."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fermata.core.spec import KvSpec
from fermata.router.approximate import ApproximateIndex

CAPACITY = 8
TTL_S = 20.0
Chain = tuple[int, ...]
SEEN: Counter[str] = Counter()

paths = st.lists(st.integers(0, 2), min_size=0, max_size=7)
slots = st.integers(0, 2)


def chain_of(path: list[int]) -> Chain:
    """A hash names its whole prefix."""
    name = 1
    found: list[int] = []
    for step in path:
        name = name * 3 + step
        found.append(name)
    return tuple(found)


class Model:
    def __init__(self) -> None:
        self.records: list[tuple[Chain, float]] = []

    def learn(self, chain: Chain, now: float) -> None:
        if not chain:
            return
        kept = [r for r in self.records if r[0] != chain[: len(r[0])]]
        SEEN["superseded"] += len(kept) < len(self.records)
        self.records = [*kept, (chain, now)]
        while len({block for c, _ in self.records for block in c}) > CAPACITY:
            SEEN["displaced"] += 1
            self.records.pop(0)

    def expire(self, now: float) -> None:
        kept = [r for r in self.records if r[1] + TTL_S > now]
        SEEN["aged out"] += len(self.records) - len(kept)
        self.records = kept

    def depth(self, chain: Chain) -> int:
        return max((_shared(c, chain) for c, _ in self.records), default=0)


def _shared(a: Chain, b: Chain) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class ApproximateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.is_ttl = False
        self.index = ApproximateIndex(KvSpec(), width_s=1.0)
        self.models: dict[int, Model] = {}
        for slot in range(2):
            self.open(slot)

    def open(self, slot: int) -> None:
        self.index.open(slot, capacity_blocks=CAPACITY)
        self.models[slot] = Model()

    @rule(slot=slots, path=paths)
    def learn(self, slot: int, path: list[int]) -> None:
        chain = chain_of(path)
        self.index.learn(slot, array("Q", chain), self.now)
        if slot in self.models:
            self.models[slot].learn(chain, self.now)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.index.expire(self.now)
        if self.is_ttl:
            for model in self.models.values():
                model.expire(self.now)

    @rule(slot=slots, path=paths)
    def learn_and_let_it_age(self, slot: int, path: list[int]) -> None:
        self.learn(slot, path)
        self.wait(25)

    @rule()
    def switch(self) -> None:
        self.is_ttl = not self.is_ttl
        SEEN["switched"] += 1
        spec = KvSpec(approximate="Ttl" if self.is_ttl else "Lru", approximate_ttl_s=TTL_S)
        self.index.apply(spec, self.now)
        if self.is_ttl:
            for model in self.models.values():
                model.records = [(chain, self.now) for chain, _ in model.records]

    @rule(slot=slots)
    def come_and_go(self, slot: int) -> None:
        if slot in self.models:
            del self.models[slot]
            self.index.close(slot)
        else:
            self.open(slot)

    @rule(path=paths)
    def match(self, path: list[int]) -> None:
        chain = chain_of(path)
        wanted = {slot: m.depth(chain) for slot, m in self.models.items() if m.depth(chain)}
        SEEN["matched"] += bool(wanted)
        assert self.index.match(array("Q", chain)) == wanted

    @invariant()
    def counts_agree(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == sum(len(m.records) for m in self.models.values())


def test_the_learned_index_equals_a_list_of_what_was_sent():
    SEEN.clear()

    run_state_machine_as_test(
        ApproximateMachine,
        settings=settings(max_examples=80, stateful_step_count=30, deadline=None),
    )
    for event in ("superseded", "displaced", "aged out", "switched", "matched"):
        assert SEEN[event] >= 3, (event, SEEN)
