"""Shares of one rank's KV budget: who gets how much, and when it can be given to another."""

from __future__ import annotations

import pytest

from fermata.worker.budget import SILENCE_S, Budget, Share, divided


def beat(budget: Budget, now: float, **routers: tuple[int, int]) -> dict[str, int]:
    """Each router named says (charged, waiting) under the share it was told, and a tick follows."""
    for name, (charged, waiting) in routers.items():
        number = budget.share(int(name[1:])).number
        budget.heard(int(name[1:]), charged=charged, waiting=waiting, number=number, now=now)
    budget.rebalance({}, now)
    budget.check_integrity()
    return {name: budget.share(int(name[1:])).tokens for name in routers}


def test_one_router_has_all_of_it_from_the_start():
    budget = Budget(1000)
    budget.joined(0, 0.0)
    budget.rebalance({}, 0.0)
    assert budget.share(0).tokens == 1000
    assert budget.share(7) == Share(0, 0), "nobody we know"


def test_a_second_router_gets_its_part_once_the_first_has_let_go():
    budget = Budget(1000)
    budget.joined(0, 0.0)
    assert beat(budget, 1, r0=(900, 900)) == {"r0": 1000}
    budget.joined(1, 1.5)
    assert beat(budget, 2, r0=(900, 900), r1=(0, 500)) == {"r0": 500, "r1": 0}
    assert beat(budget, 3, r0=(800, 900), r1=(0, 500)) == {"r0": 500, "r1": 200}
    assert beat(budget, 4, r0=(500, 900), r1=(200, 300)) == {"r0": 500, "r1": 500}


def test_a_lower_share_frees_nothing_before_it_was_answered():
    budget = Budget(1000)
    budget.joined(0, 0.0)
    beat(budget, 1, r0=(0, 0))
    told_first = budget.share(0)
    budget.joined(1, 1.5)
    budget.heard(1, charged=0, waiting=900, number=0, now=2)
    budget.rebalance({}, 2)
    assert budget.share(0).tokens < told_first.tokens
    budget.heard(0, charged=0, waiting=0, number=told_first.number, now=2.5)
    budget.rebalance({}, 3)
    assert budget.share(1).tokens == 0
    budget.heard(0, charged=0, waiting=0, number=budget.share(0).number, now=3.5)
    budget.rebalance({}, 4)
    assert budget.share(1).tokens >= 900


def test_a_silent_router_gives_its_share_back_but_for_what_still_runs():
    budget = Budget(1000)
    for router in (0, 1):
        budget.joined(router, 0.0)
    for now in range(1, 4):
        beat(budget, now, r0=(400, 800), r1=(400, 800))
    last = 3
    for now in range(4, last + int(SILENCE_S) + 1):
        budget.heard(0, charged=400, waiting=800, number=budget.share(0).number, now=now)
        budget.rebalance({1: 300}, now)
        assert budget.share(0).tokens == 500
    now = last + SILENCE_S + 1
    budget.heard(0, charged=400, waiting=800, number=budget.share(0).number, now=now)
    budget.rebalance({1: 300}, now)
    assert (budget.share(0).tokens, budget.share(1).tokens) == (700, 0)
    budget.heard(0, charged=400, waiting=800, number=budget.share(0).number, now=now + 1)
    budget.rebalance({}, now + 1)
    assert budget.share(0).tokens == 1000


def test_a_router_that_boots_acts_on_no_share_and_its_old_turns_still_count():
    budget = Budget(1000)
    for router in (0, 1):
        budget.joined(router, 0.0)
    for now in range(1, 4):
        beat(budget, now, r0=(500, 800), r1=(500, 800))
    budget.joined(1, 4.0)
    budget.heard(0, charged=500, waiting=800, number=budget.share(0).number, now=4)
    budget.rebalance({1: 450}, 4)
    assert budget.share(0).tokens <= 550
    assert budget.share(1).tokens >= 450, "what runs is its own"
    budget.check_integrity()


def test_turns_of_a_router_that_left_are_nobodys_to_give():
    budget = Budget(1000)
    budget.joined(0, 0.0)
    budget.left(1)
    budget.rebalance({1: 300}, 0.0)
    assert budget.share(0).tokens == 700
    budget.heard(1, charged=5, waiting=5, number=0, now=1.0)
    assert budget.share(1) == Share(0, 0)


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ({}, {}),
        ({0: 0, 1: 0}, {0: 500, 1: 500}),
        ({0: 300, 1: 100}, {0: 600, 1: 400}),
        ({0: 5000, 1: 100}, {0: 900, 1: 100}),
        ({0: 5000, 1: 1000}, {0: 500, 1: 500}),
        ({0: 2400, 1: 600, 2: 100}, {0: 543, 1: 356, 2: 100}),
    ],
)
def test_shares_go_by_demand_and_never_beyond_the_budget(wanted, shares):
    found = divided(1000, wanted)
    assert found == pytest.approx(shares, abs=15)
    assert sum(found.values()) <= 1000
