"""Lease ids and digests, the ring, the clocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fermata.core.clock import SystemClock, VirtualClock
from fermata.core.ids import (
    LeaseId,
    RouterId,
    RoutingKey,
    lease_incarnation,
    lease_router,
    lease_serial,
    make_lease_id,
)
from fermata.core.lease_digest import LeaseDigest
from fermata.core.ring import Ring


@given(
    router=st.integers(0, 2**10 - 1),
    incarnation=st.integers(0, 2**63),
    serial=st.integers(1, 2**32 - 1),
)
@settings(derandomize=True)
def test_a_lease_id_names_router_incarnation_and_serial(router: int, incarnation: int, serial: int):
    lease = make_lease_id(router=router, incarnation=incarnation, serial=serial)
    assert 0 < lease < 2**64
    assert lease_router(lease) == router
    assert lease_incarnation(lease) == incarnation % 2**22
    assert lease_serial(lease) == serial


@given(st.sets(st.integers(1, 2**64 - 1)), st.sets(st.integers(1, 2**64 - 1)))
@settings(derandomize=True)
def test_a_digest_depends_on_the_set_alone(kept: set[LeaseId], dropped: set[LeaseId]):
    dropped -= kept
    digest = LeaseDigest()
    for lease in [*dropped, *kept]:
        digest.add(lease)
    for lease in dropped:
        digest.remove(lease)
    assert digest == LeaseDigest(sorted(kept))


def test_consecutive_ids_do_not_cancel_each_other_out():
    assert LeaseDigest([LeaseId(1), LeaseId(2)]) != LeaseDigest([LeaseId(4), LeaseId(7)])
    assert LeaseDigest([LeaseId(1)]) != 1


def ring(*members: str) -> Ring:
    return Ring(1, {RouterId(m): f"tcp://{m}" for m in members})


def test_a_member_that_joins_or_leaves_moves_only_its_own_share():
    keys = [RoutingKey(f"session-{i}") for i in range(2000)]
    three, four = ring("a", "b", "c"), ring("a", "b", "c", "d")
    moved = [k for k in keys if three.router_for(k) != four.router_for(k)]
    assert all(four.router_for(k) == "d" for k in moved)
    assert 0.2 < len(moved) / len(keys) < 0.3
    shares = [sum(four.router_for(k) == m for k in keys) for m in four.members]
    assert min(shares) > 0.8 * len(keys) / 4


def test_an_empty_ring_says_so():
    with pytest.raises(LookupError, match="no router"):
        ring().router_for(RoutingKey("k"))


def test_a_sped_up_clock_runs_as_much_faster_as_it_sleeps_shorter():
    clock = SystemClock(speedup=50)
    assert clock.speedup == 50
    assert clock.real_delay(5.0) == pytest.approx(0.1)
    assert clock.real_delay(-1.0) == 0.0
    first = clock.now()
    assert clock.now() >= first
    assert clock.unix_ms() > 1_600_000_000_000
    with pytest.raises(ValueError, match="above 0"):
        SystemClock(speedup=0)


def test_a_virtual_clock_moves_only_when_told_and_never_back():
    clock = VirtualClock(10.0, unix_start_ms=1_000)
    assert clock.now() == 10.0
    assert clock.advance(2.5) == 12.5
    assert clock.unix_ms() == 3_500
    assert clock.speedup == 1.0
    assert clock.real_delay(3.0) == 3.0
    with pytest.raises(ValueError, match="go back"):
        clock.advance_to(12.0)
