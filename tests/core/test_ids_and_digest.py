"""Lease ids carry who granted them and when; a digest over them tells sets apart."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermata.core.ids import (
    LeaseId,
    RequestId,
    RouterId,
    RoutingKey,
    Slot,
    WorkerId,
    lease_incarnation,
    lease_router,
    lease_serial,
    make_lease_id,
    new_request_id,
)
from fermata.core.lease_digest import LeaseDigest
from fermata.core.ring import Ring


@given(st.integers(0, 1023), st.integers(0, 1 << 40), st.integers(1, (1 << 32) - 1))
def test_a_lease_id_gives_back_what_it_was_made_of(
    router: int, incarnation: int, serial: int
) -> None:
    lease = make_lease_id(router=router, incarnation=incarnation, serial=serial)
    assert 0 < lease < 1 << 64
    assert lease_router(lease) == router
    assert lease_incarnation(lease) == incarnation % (1 << 22)
    assert lease_serial(lease) == serial


@pytest.mark.parametrize(("router", "serial"), [(1024, 1), (-1, 1), (0, 0), (0, 1 << 32)])
def test_a_lease_id_out_of_range_is_a_bug(router: int, serial: int) -> None:
    with pytest.raises(AssertionError):
        make_lease_id(router=router, incarnation=1, serial=serial)


def test_later_leases_of_one_router_life_have_higher_ids() -> None:
    ids = [make_lease_id(router=3, incarnation=9, serial=n) for n in (1, 2, 500, 1 << 31)]
    assert ids == sorted(ids), "`seen` compares them"


def test_request_ids_differ_and_slots_compare_by_value() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000
    assert isinstance(new_request_id(), str)
    assert RequestId("x") == "x"
    assert {Slot(WorkerId("a"), 0), Slot(WorkerId("a"))} == {Slot(WorkerId("a"), 0)}
    assert sorted([Slot(WorkerId("b")), Slot(WorkerId("a"), 1)])[0].worker == "a"


def lease(serial: int) -> LeaseId:
    return make_lease_id(router=1, incarnation=1, serial=serial)


def test_sets_that_xor_alike_raw_have_different_digests() -> None:
    assert 1 ^ 2 == 4 ^ 7
    assert LeaseDigest([LeaseId(1), LeaseId(2)]) != LeaseDigest([LeaseId(4), LeaseId(7)])


@given(st.sets(st.integers(1, 5000), max_size=60), st.randoms(use_true_random=False))
def test_a_digest_depends_on_the_set_alone(serials: set[int], rng: random.Random) -> None:
    order = [lease(n) for n in serials]
    rng.shuffle(order)
    grown = LeaseDigest()
    extra = lease(6000)
    grown.add(extra)
    for one in order:
        grown.add(one)
    grown.remove(extra)
    assert grown == LeaseDigest(lease(n) for n in serials)
    assert grown.count == len(serials)
    if serials:
        grown.remove(order[0])
        assert grown != LeaseDigest(order)
    assert grown.__eq__(3) is NotImplemented


MEMBERS = {RouterId(f"router-{n}"): f"tcp://127.0.0.1:{n}" for n in range(5)}
KEYS = [RoutingKey(f"session-{n}") for n in range(2000)]


def test_every_key_has_one_router_and_the_members_share_them_evenly() -> None:
    ring = Ring(epoch=1, members=MEMBERS)
    owners = [ring.router_for(key) for key in KEYS]
    assert owners == [
        Ring(epoch=2, members=dict(reversed(MEMBERS.items()))).router_for(k) for k in KEYS
    ]
    share = [owners.count(member) for member in MEMBERS]
    assert min(share) > 0.8 * len(KEYS) / 5
    assert max(share) < 1.2 * len(KEYS) / 5


def test_a_member_that_leaves_moves_its_own_keys_only() -> None:
    before = Ring(epoch=1, members=MEMBERS)
    after = Ring(epoch=2, members={m: e for m, e in MEMBERS.items() if m != "router-2"})
    moved = [k for k in KEYS if before.router_for(k) != after.router_for(k)]
    assert moved == [k for k in KEYS if before.router_for(k) == "router-2"]
    assert moved


def test_an_empty_ring_has_no_router() -> None:
    with pytest.raises(LookupError, match="the ring has no router"):
        Ring(epoch=0, members={}).router_for(RoutingKey("k"))
