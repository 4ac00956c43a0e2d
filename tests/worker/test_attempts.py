from __future__ import annotations

import random

from fermata.core.ids import LeaseId, OwnerId, RequestId, make_lease_id
from fermata.core.lease_digest import LeaseDigest
from fermata.wire.messages import Generate, Role, Sampling
from fermata.wire.roles import Peer
from fermata.worker.fences import MAX_FENCES, Fences
from fermata.worker.leases import Attempt, Attempts
from fermata.worker.outputs import OutputBuffer


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(Role.FRONTEND, name, incarnation)


def attempt(serial: int, *, router: int = 0, owner: Peer | None = None) -> Attempt:
    lease = make_lease_id(router=router, incarnation=1, serial=serial)
    owner = owner or peer("frontend-0")
    generate = Generate(
        lease=lease,
        request=RequestId(str(serial)),
        attempt=0,
        owner=OwnerId(owner.id),
        incarnation=owner.incarnation,
        sampling=Sampling(max_tokens=1),
    )
    return Attempt(owner, generate, 10, OutputBuffer(lease, 0))


def test_each_router_is_told_of_its_own_leases() -> None:
    attempts = Attempts()
    first, second, other = attempt(1), attempt(2), attempt(1, router=3)
    for one in (first, second, other):
        attempts.add(one)
    assert attempts.digest(0) == LeaseDigest([first.lease, second.lease])
    assert attempts.digest(3) == LeaseDigest([other.lease])
    assert attempts.digest(7) == LeaseDigest()
    assert attempts.of_router(0) == [first.lease, second.lease]


def test_what_the_engine_finished_runs_no_more_but_is_kept_until_it_was_sent() -> None:
    attempts = Attempts()
    one = attempt(1)
    attempts.add(one)
    attempts.finish(one)
    attempts.finish(one)
    assert attempts.running == 0
    assert attempts.digest(0) == LeaseDigest([one.lease]), "its owner is owed the end"
    assert attempts.of_router(0) == [one.lease]
    assert one.lease in attempts
    attempts.remove(one)
    assert attempts.digest(0) == LeaseDigest()
    assert len(attempts) == attempts.owner_count == 0
    attempts.check_integrity()


def test_attempts_are_found_by_the_boot_of_their_owner() -> None:
    attempts = Attempts()
    old, new = attempt(1, owner=peer("f", 1)), attempt(2, owner=peer("f", 2))
    attempts.add(old)
    attempts.add(new)
    assert attempts.of_owner(peer("f", 1)) == [old]
    assert attempts.of_owner(peer("g")) == []
    assert set(attempts.owners()) == {peer("f", 1), peer("f", 2)}


def test_counts_and_digests_hold_under_any_order_of_changes() -> None:
    dice, attempts, held = random.Random(5), Attempts(), list[Attempt]()
    for serial in range(1, 400):
        one = attempt(serial, router=dice.randrange(3), owner=peer(f"f{dice.randrange(4)}"))
        attempts.add(one)
        held.append(one)
        if dice.random() < 0.4:
            attempts.finish(dice.choice(held))
        if dice.random() < 0.8:
            attempts.remove(held.pop(dice.randrange(len(held))))
        attempts.check_integrity()
    assert len(attempts) == len(held)
    assert {one.lease for one in attempts.all()} == {one.lease for one in held}
    assert attempts.get(LeaseId(99)) is None


def test_a_fence_holds_up_to_its_incarnation_and_only_rises() -> None:
    fences = Fences()
    owner = OwnerId("frontend-0")
    fences.add(owner, 5)
    fences.add(owner, 3)
    assert fences.holds(owner, 5)
    assert not fences.holds(owner, 6)
    assert not fences.holds(OwnerId("frontend-1"), 1)


def test_fences_are_bounded_and_the_oldest_goes_first() -> None:
    fences = Fences()
    for number in range(MAX_FENCES + 1):
        fences.add(OwnerId(str(number)), 1)
    assert len(fences) == MAX_FENCES
    assert not fences.holds(OwnerId("0"), 1)
    assert fences.holds(OwnerId("1"), 1)
