"""Placement policies on their own."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from fermata.core.spec import KvAwareSpec, SchedulerSpec, TierWeights
from fermata.router.load import SlotLoad
from fermata.router.policy import KvAware, LeastLoaded, Question, RoundRobin, placement_policy
from fermata.router.policy.kv_aware import bounded

BLOCK = 64


def load(slot: int, **fields: int) -> SlotLoad:
    return SlotLoad(
        slot=slot,
        capacity_blocks=1000,
        batched_tokens=8192,
        context_length=100_000,
        blocks_a_page=1.0,
        **fields,
    )


def kv_aware(**spec: object) -> KvAware:
    return KvAware(KvAwareSpec(**spec), block_size=BLOCK, generator=Random(1))


def ask(tokens: int = 1024, **fields: object) -> Question:
    return Question(input_tokens=tokens, blocks=-(-tokens // BLOCK), **fields)  # type: ignore[arg-type]


def test_round_robin_takes_slots_in_turn_and_survives_gaps():
    policy = RoundRobin()
    slots = [load(0), load(2), load(5)]
    assert [policy.pick(ask(), slots) for _ in range(4)] == [0, 2, 5, 0]
    assert policy.pick(ask(), [load(5)]) == 5
    assert policy.pick(ask(), slots) == 0
    assert policy.pick(ask(preferred=5), slots) == 5
    assert policy.pick(ask(), slots) == 2, "a session's own slot does not count as its turn"


def test_least_loaded_counts_requests_then_blocks_then_draws():
    policy = LeastLoaded(Random(1))
    slots = [
        load(0, active=2),
        load(1, active=1, decode_blocks=9),
        load(2, active=1, decode_blocks=3),
    ]
    assert policy.pick(ask(), slots) == 2
    assert policy.pick(ask(preferred=0), slots) == 0
    drawn = Counter(policy.pick(ask(), [load(0), load(1)]) for _ in range(200))
    assert min(drawn.values()) > 50


def test_costs_are_those_of_dynamos_router():
    """Empty worker, 1,024 tokens, block 64: 16 to prefill and 16 to hold; each like request before adds 32."""
    policy = kv_aware()
    costs = policy.costs(
        ask(), [load(i, pending_tokens=1024 * i, decode_blocks=16 * i) for i in range(4)]
    )
    assert costs == [32.0, 64.0, 96.0, 128.0]


def test_matched_blocks_are_credited_by_the_dearest_tier_that_has_them():
    policy = kv_aware(tier_weights=TierWeights(device=1.0, host=0.75, disk=0.25, shared=0.5))
    match = {
        "device": {0: 4},
        "host": {0: 8, 1: 8},
        "disk": {0: 16, 2: 16},
        "shared": {3: 10, 0: 6},
    }
    credit = policy._credit(ask(match=match))
    assert credit == {0: 4 + 4 * 0.75 + 8 * 0.25, 1: 6.0, 2: 4.0, 3: 5.0}


def test_credit_can_not_make_prefill_negative():
    policy = kv_aware()
    (cost,) = policy.costs(ask(tokens=128, match={"device": {0: 9}}, shared={0: 2}), [load(0)])
    assert cost == 0.0


def test_scale_and_weight_of_active_requests_count():
    policy = kv_aware(prefill_scale=2.0, decode_request_weight=3.0)
    (cost,) = policy.costs(ask(), [load(0, active=5)])
    assert cost == 2 * 16 + 16 + 3 * 5


def test_ties_are_broken_by_a_seeded_draw():
    picks = [kv_aware().pick(ask(), [load(0), load(1)]) for _ in range(5)]
    assert len(set(picks)) == 1, "the same seed, the same draw"
    policy = kv_aware()
    drawn = Counter(policy.pick(ask(), [load(0), load(1)]) for _ in range(200))
    assert min(drawn.values()) > 50


def test_temperature_spreads_turns_by_cost():
    policy = kv_aware(temperature=1.0)
    slots = [load(0), load(1, decode_blocks=40), load(2, decode_blocks=80)]
    drawn = Counter(policy.pick(ask(), slots) for _ in range(2000))
    assert drawn[0] > drawn[1] > drawn[2] > 100
    even = Counter(policy.pick(ask(), [load(0), load(1)]) for _ in range(200))
    assert min(even.values()) > 50


def test_the_sessions_slot_is_kept_while_it_is_a_candidate_and_within_the_bound():
    slots = [load(0, active=9, decode_blocks=500), load(1), load(2)]
    assert kv_aware().pick(ask(preferred=0), slots) == 0
    assert kv_aware(balance=0.5).pick(ask(preferred=0), slots) in {1, 2}
    assert kv_aware(balance=0.5).pick(ask(preferred=0), slots[:1]) == 0


@pytest.mark.parametrize("balance", [0.0, 0.25, 1.0])
def test_bounded_load_never_leaves_nobody_and_never_lets_anyone_above_the_bound(balance: float):
    random = Random(4)
    for _ in range(200):
        slots = [load(i, active=random.randrange(6)) for i in range(random.randrange(1, 9))]
        kept = bounded(slots, balance)
        assert kept
        mean = (sum(slot.active for slot in slots) + 1) / len(slots)
        assert all(slot.active + 1 <= -(-(1 + balance) * mean // 1) for slot in kept)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RoundRobin", RoundRobin),
        ("LeastLoaded", LeastLoaded),
        ("KVAware", KvAware),
        ("ThunderAgent", KvAware),
    ],
)
def test_the_registry_knows_every_scheduler_type(name, kind):
    policy = placement_policy(SchedulerSpec(type=name), block_size=BLOCK, generator=Random(1))
    assert isinstance(policy, kind)
