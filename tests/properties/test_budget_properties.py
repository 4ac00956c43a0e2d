"""Shares as routers believe them: messages are late, routers fall silent, boot, join and leave.

Each router here acts on the last share it heard and forgets it when it hears nothing for three seconds, as it would
forget the worker. What the worker hears is what a router said some time ago.
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fermata.worker.budget import Budget, Share, divided

CAPACITY = 10_000
GIVES_UP_S = 3.0
SEEN: Counter[str] = Counter()
routers = st.integers(0, 3)


class RouterModel:
    def __init__(self, now: float) -> None:
        self.share = Share(0, 0)
        self.charged = 0
        self.waiting = 0
        self.heard_at = now
        self.is_cut_off = False
        self.downlink: deque[Share] = deque()
        self.uplink: deque[tuple[int, int, int]] = deque()

    def hear(self, now: float) -> None:
        while self.downlink:
            self.share = self.downlink.popleft()
            self.heard_at = now

    def tick(self, now: float) -> None:
        if now - self.heard_at >= GIVES_UP_S:
            self.share, self.charged = Share(0, 0), 0
        admitted = min(self.waiting, max(0, self.share.tokens - self.charged))
        self.charged += admitted
        self.waiting -= admitted


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.budget = Budget(CAPACITY)
        self.routers: dict[int, RouterModel] = {}
        for router in (0, 1):
            self.boot(router)

    @rule(router=routers)
    def boot(self, router: int) -> None:
        SEEN["boots"] += 1
        self.routers[router] = RouterModel(self.now)
        self.budget.joined(router, self.now)

    @rule(router=routers)
    def leave(self, router: int) -> None:
        known = self.routers.get(router)
        if known is not None and not known.charged:
            SEEN["leaves"] += 1
            del self.routers[router]
            self.budget.left(router)

    @rule(router=routers, tokens=st.integers(0, 8000))
    def turns_come(self, router: int, tokens: int) -> None:
        if router in self.routers:
            self.routers[router].waiting += tokens

    @rule(router=routers)
    def turns_end(self, router: int) -> None:
        if router in self.routers:
            self.routers[router].charged = 0

    @rule(router=routers)
    def force_one(self, router: int) -> None:
        """At its deadline a turn is placed whatever the share."""
        known = self.routers.get(router)
        if known is not None and known.waiting:
            SEEN["forced"] += known.charged + known.waiting > known.share.tokens
            known.charged += min(known.waiting, 1000)
            known.waiting -= min(known.waiting, 1000)

    @rule(router=routers)
    def cut_or_mend(self, router: int) -> None:
        known = self.routers.get(router)
        if known is not None:
            SEEN["cuts"] += 1
            known.is_cut_off = not known.is_cut_off
            known.downlink.clear()
            known.uplink.clear()

    @rule(router=routers)
    def router_reads(self, router: int) -> None:
        known = self.routers.get(router)
        if known is not None:
            known.hear(self.now)
            known.tick(self.now)

    @rule(router=routers)
    def worker_reads(self, router: int) -> None:
        known = self.routers.get(router)
        while known is not None and known.uplink:
            charged, waiting, number = known.uplink.popleft()
            self.budget.heard(router, charged=charged, waiting=waiting, number=number, now=self.now)

    @rule(count=st.integers(1, 6))
    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()
            self.no_more_is_believed_than_there_is()

    @rule(router=routers)
    def stay_busy(self, router: int) -> None:
        known = self.routers.get(router)
        if known is not None:
            known.charged, known.waiting = known.charged // 2, 20_000
            self.seconds(2)

    def second(self) -> None:
        """What is on its way arrives within the second; what is said now may take as long."""
        for router in self.routers:
            self.router_reads(router)
            self.worker_reads(router)
        self.now += 1.0
        for known in self.routers.values():
            known.tick(self.now)
        self.budget.rebalance({r: k.charged for r, k in self.routers.items()}, self.now)
        for router, known in self.routers.items():
            if not known.is_cut_off:
                known.downlink.append(self.budget.share(router))
                known.uplink.append((known.charged, known.waiting, known.share.number))

    @invariant()
    def no_more_is_believed_than_there_is(self) -> None:
        self.budget.check_integrity()
        believed = [known.share.tokens for known in self.routers.values()]
        SEEN["shared"] += sum(tokens > 0 for tokens in believed) > 1
        assert sum(believed) <= CAPACITY


def test_routers_never_believe_in_more_than_the_budget():
    SEEN.clear()
    run_state_machine_as_test(
        BudgetMachine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None)
    )
    for event in ("boots", "leaves", "forced", "cuts", "shared"):
        assert SEEN[event] > 10, (event, SEEN)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=4))
def test_shares_converge_on_demand_and_starve_nobody(demand: list[int]):
    """Routers that fill their share and always have as much waiting as at first."""
    budget = Budget(CAPACITY)
    models = {number: RouterModel(0.0) for number in range(len(demand))}
    for number in models:
        budget.joined(number, 0.0)
    for second in range(1, 20):
        for number, model in models.items():
            total = demand[number]
            model.charged = min(total, model.share.tokens)
            budget.heard(
                number,
                charged=model.charged,
                waiting=total - model.charged,
                number=model.share.number,
                now=second,
            )
        budget.rebalance({}, second)
        for number, model in models.items():
            model.share = budget.share(number)
    targets = divided(CAPACITY, dict(enumerate(demand)))
    for number, model in models.items():
        assert abs(model.share.tokens - targets[number]) <= CAPACITY / 64 + 1
        assert model.share.tokens >= min(demand[number], CAPACITY // len(demand)) - CAPACITY / 64
