"""What weighs in a placement beside the prefix, end to end: active requests, chance, the bound on a slot's load."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from fermata.core.spec import AffinitySpec, KvAwareSpec, RouterPolicySpec, SchedulerSpec

HOT = list(range(1, 101))


def a_world(make_world, *, mode: str = "None", seed: int = 0, **kv_aware: object):
    world = make_world(
        seed=seed,
        policy=RouterPolicySpec(
            scheduler=SchedulerSpec(kv_aware=KvAwareSpec(**kv_aware)),
            session_affinity=AffinitySpec(mode=mode),
        ),
    )
    world.peer = world.worker(ranks=4, kv_blocks={"device": 40_000}, features=["kv_events"])
    world.client = world.frontend()
    world.stored(world.peer, 0, *HOT)
    return world


def place(world, many: int, **fields: object) -> Counter[int]:
    """Turns that share a hot prefix of 100 blocks, prefilled at once and running on."""
    ranks: Counter[int] = Counter()
    for i in range(many):
        grant = world.grant(world.client, f"r{i}", *HOT, 1000 + i, **fields)
        world.progress(world.client, grant.lease, "prefilled", output_tokens=1)
        ranks[grant.rank] += 1
    return ranks


def test_each_request_that_runs_is_charged_by_its_weight(make_world):
    assert place(a_world(make_world), 12) == {0: 12}, "its prefix is cheaper than their decoding"
    charged = place(a_world(make_world, decode_request_weight=60.0), 12)
    assert len(charged) > 1
    # Two blocks of its own and a tail for each turn that shares the prefix, besides the weight.
    first_elsewhere = ceil(2 * 100 / (60.0 + 2))
    assert first_elsewhere - 2 <= charged[0] <= first_elsewhere + 2


@pytest.mark.parametrize("balance", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("mode", ["None", "Soft"])
def test_no_rank_is_loaded_beyond_the_bound_whatever_prefix_or_affinity_say(
    make_world, balance, mode
):
    world = a_world(make_world, mode=mode, balance=balance)
    ranks: Counter[int] = Counter()
    for i in range(40):
        grant = world.grant(world.client, f"r{i}", *HOT, 1000 + i, session="one")
        world.progress(world.client, grant.lease, "prefilled", output_tokens=1)
        ranks[grant.rank] += 1
        assert max(ranks.values()) <= ceil((1 + balance) * (i + 1) / 4)
    if mode == "Soft" and balance:
        assert max(ranks.values()) > 40 / 4, "and up to it affinity counts"


def first_ranks(make_world, *, temperature: float) -> Counter[int]:
    return sum(
        (place(a_world(make_world, temperature=temperature, seed=i), 1) for i in range(80)),
        Counter[int](),
    )


def test_above_temperature_nought_costs_are_odds(make_world):
    """The hot rank costs 100 blocks less than the three others: 1 against e^-1 and e^-10 each."""
    assert first_ranks(make_world, temperature=0.0) == {0: 80}
    warm = first_ranks(make_world, temperature=1.0)
    assert len(warm) == 4
    assert 0.33 < warm[0] / 80 < 0.62, "1 / (1 + 3 / e) is 0.48"
    assert first_ranks(make_world, temperature=1.0) == warm, "drawn from the seed"
    assert first_ranks(make_world, temperature=0.1)[0] >= 79
