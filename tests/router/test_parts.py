"""The small parts: time-outs in buckets, seats, the memory of what is over, promises, affinity."""

from __future__ import annotations

from array import array

from fermata.core.ids import Slot, WorkerId
from fermata.router.affinity import Affinity, affinity_key
from fermata.router.chain_trie import ChainTrie
from fermata.router.expiry import Expiry
from fermata.router.model import Seats
from fermata.router.promise import Promises
from fermata.router.recent import Recent
from fermata.router.reconcile import Doubt, OwnerLedger, WorkerLedger


def chain(*names: int) -> array[int]:
    return array("Q", names)


class TestExpiry:
    def test_a_deadline_fires_with_its_bucket_never_early(self):
        expiry: Expiry[str] = Expiry(width_s=0.5)
        expiry.set("a", 10.1)
        assert expiry.next() == 10.5
        assert expiry.due(10.49) == []
        assert expiry.due(10.5) == ["a"]
        assert expiry.next() is None

    def test_moving_a_deadline_leaves_nothing_behind(self):
        expiry: Expiry[str] = Expiry(width_s=1.0)
        for second in range(1000):
            expiry.set("a", float(second))
        assert len(expiry) == 1
        assert expiry.next() == 999.0
        assert len(expiry._buckets) == 1
        assert expiry.due(2000.0) == ["a"]

    def test_cancelling_is_safe_twice_and_empty_buckets_are_skipped(self):
        expiry: Expiry[str] = Expiry(width_s=1.0)
        expiry.set("a", 5.0)
        expiry.set("b", 9.0)
        expiry.set("b", 8.5)
        expiry.cancel("a")
        expiry.cancel("a")
        assert "a" not in expiry
        assert "b" in expiry
        assert expiry.next() == 9.0
        assert expiry.due(100.0) == ["b"]

    def test_what_is_due_comes_oldest_bucket_first(self):
        expiry: Expiry[int] = Expiry(width_s=1.0)
        for at in (7, 3, 5):
            expiry.set(at, float(at))
        assert expiry.due(6.0) == [3, 5]
        assert expiry.due(7.0) == [7]


def test_seats_are_used_again():
    seats = Seats()
    slot = Slot(WorkerId("w"), 1)
    assert seats.take(slot) == 0
    assert seats.take(Slot(WorkerId("w"), 2)) == 1
    seats.leave(0)
    assert seats.taken() == {1}
    assert seats.take(slot) == 0
    assert seats[0] is slot


def test_the_oldest_of_what_is_over_is_forgotten_first():
    recent: Recent[str, int] = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    recent.put("a", 3)
    recent.put("c", 4)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (3, None, 4)
    assert len(recent) == 2
    assert "b" not in recent


class TestPromises:
    def test_a_promise_outlives_its_lease_until_the_events_are_in(self):
        promises = Promises()
        node = promises.hold(2, chain(1, 2, 3))
        assert promises.match(chain(1, 2, 9)) == ({2: 2}, {2: 2})
        promises.keep(2, node, 5)
        assert promises.match(chain(1, 2, 9)) == ({2: 2}, {})
        assert promises.distinct_blocks(2) == 0
        promises.settle(2, 4)
        assert promises.lingering == 1
        promises.settle(2, 5)
        assert promises.match(chain(1, 2, 9)) == ({}, {})
        promises.settle(2, 6)
        promises.check_integrity({})

    def test_shared_blocks_are_counted_once_a_slot(self):
        promises = Promises()
        a = promises.hold(0, chain(1, 2, 3))
        b = promises.hold(0, chain(1, 2, 4, 5))
        promises.hold(1, chain(1))
        assert (promises.distinct_blocks(0), promises.distinct_blocks(1)) == (5, 1)
        promises.withdraw(0, a)
        assert promises.distinct_blocks(0) == 4
        promises.check_integrity({0: [b]})

    def test_lingering_promises_are_bounded_and_go_with_their_slot(self):
        promises = Promises()
        for sequence in range(2000):
            promises.keep(0, promises.hold(0, chain(sequence + 1)), sequence)
        assert promises.lingering == 1024
        assert promises.match(chain(1)) == ({}, {})
        assert promises.match(chain(2000)) == ({0: 1}, {})
        promises.drop(0)
        promises.drop(7)
        assert promises.lingering == 0
        promises.check_integrity({0: []})

    def test_a_prompt_without_a_full_block_promises_nothing(self):
        promises = Promises()
        node = promises.hold(0, chain())
        assert promises.distinct_blocks(0) == 0
        promises.keep(0, node, 1)
        promises.settle(0, 1)
        promises.check_integrity({0: []})


def test_a_frame_that_is_no_chain_promises_nothing():
    trie = ChainTrie()
    trie.hold(chain(1, 2, 3, 4), 0)
    receipt = trie.hold(chain(4), 1)
    assert receipt.end == 0
    assert trie.refused_chains == 1
    assert trie.match(chain(4)) == {}
    trie.release(receipt, 1)
    trie.check_integrity()


class TestAffinity:
    def test_siblings_bind_together_and_apart_from_their_parent(self):
        assert affinity_key("", "p") == ""
        assert affinity_key("a", "p") == affinity_key("b", "p")
        assert affinity_key("p", "") != affinity_key("a", "p")

    def test_a_session_is_bound_by_acceptance_not_by_the_grant(self):
        affinity = Affinity()
        turn = affinity.granted("s")
        assert affinity.slot_of("s") is None
        affinity.accepted(turn, 3)
        affinity.accepted(turn, 3)
        assert affinity.slot_of("s") == 3
        assert affinity.granted("") is None
        affinity.check_integrity()

    def test_it_expires_a_ttl_after_the_last_turn_ended(self):
        affinity = Affinity()
        first, second = affinity.granted("s"), affinity.granted("s")
        affinity.accepted(first, 1)
        affinity.accepted(second, 1)
        affinity.ended(first, 100.0)
        affinity.expire(1e9, 10.0)
        assert affinity.slot_of("s") == 1, "a turn is in flight"
        assert affinity.next_expiry(10.0) is None
        affinity.ended(second, 200.0)
        assert affinity.next_expiry(10.0) == 210.0
        affinity.expire(209.0, 10.0)
        assert affinity.slot_of("s") == 1
        third = affinity.granted("s")
        affinity.ended(third, 300.0)
        affinity.expire(210.0, 10.0)
        assert affinity.slot_of("s") == 1
        affinity.expire(310.0, 10.0)
        assert affinity.slot_of("s") is None
        affinity.check_integrity()

    def test_of_two_racing_turns_the_first_accepted_decides(self):
        affinity = Affinity()
        first, second = affinity.granted("s"), affinity.granted("s")
        affinity.accepted(second, 5)
        affinity.accepted(first, 6)
        assert affinity.slot_of("s") == 5
        affinity.ended(first, 1.0)
        affinity.ended(second, 2.0)
        affinity.check_integrity()

    def test_a_turn_that_went_elsewhere_takes_its_session_along(self):
        affinity = Affinity()
        affinity.accepted(affinity.granted("s"), 1)
        moved, late = affinity.granted("s"), affinity.granted("s")
        affinity.accepted(moved, 2)
        assert affinity.slot_of("s") == 2
        affinity.accepted(late, 3)
        assert affinity.slot_of("s") == 2, "it was placed under the binding to slot 1"
        affinity.check_integrity()

    def test_failure_breaks_a_binding_to_that_slot_only(self):
        affinity = Affinity()
        turn = affinity.granted("s")
        affinity.accepted(turn, 1)
        affinity.failed(turn, 2)
        assert affinity.slot_of("s") == 1
        affinity.failed(turn, 1)
        assert affinity.slot_of("s") is None
        affinity.failed(turn, 1)
        affinity.ended(turn, 5.0)
        assert len(affinity) == 0
        affinity.check_integrity()

    def test_a_lost_slot_takes_its_bindings_along(self):
        affinity = Affinity()
        for key, slot in (("a", 1), ("b", 1), ("c", 2)):
            affinity.accepted(affinity.granted(key), slot)
        affinity.lose_slot(1)
        affinity.lose_slot(9)
        affinity.unbind("nobody")
        assert [affinity.slot_of(key) for key in "abc"] == [None, None, 2]
        affinity.unbind("c")
        assert len(affinity) == 0

    def test_a_new_binding_counts_turns_of_a_broken_one_no_more(self):
        affinity = Affinity()
        old = affinity.granted("s")
        affinity.accepted(old, 1)
        affinity.lose_slot(1)
        new = affinity.granted("s")
        affinity.accepted(new, 2)
        affinity.ended(new, 10.0)
        affinity.ended(old, 11.0)
        affinity.check_integrity()
        assert affinity.next_expiry(1.0) == 11.0

    def test_the_idlest_binding_makes_room(self):
        affinity = Affinity(limit=2)
        turns = {}
        for key in "abc":
            turns[key] = affinity.granted(key)
            affinity.accepted(turns[key], 1)
        assert len(affinity) == 3, "turns in flight are not forgotten"
        affinity.ended(turns["b"], 1.0)
        affinity.accepted(affinity.granted("d"), 1)
        assert affinity.slot_of("b") is None
        assert affinity.evicted == 1


class TestLedgers:
    def test_a_lease_under_way_counts_for_neither_side(self):
        ledger = OwnerLedger()
        ledger.add(10, is_present=True)
        assert ledger.agrees(seen=9, count=0, xor=0)
        assert not ledger.agrees(seen=10, count=0, xor=0)
        assert ledger.missing_from([], seen=10) == [10]
        ledger.remove(10)
        assert ledger.agrees(seen=10, count=0, xor=0)

    def test_leases_of_an_earlier_boot_always_count(self):
        ledger = OwnerLedger()
        ledger.add(99, is_present=False)
        ledger.add(5, is_present=True)
        assert not ledger.agrees(seen=0, count=0, xor=0)
        assert ledger.missing_from([], seen=0) == [99]
        ledger.check_integrity()
        ledger.remove(5)
        ledger.remove(99)
        assert ledger.agrees(seen=0, count=0, xor=0)

    def test_a_workers_ledger_is_what_owners_said_runs_there(self):
        ledger = WorkerLedger()
        ledger.add(1)
        assert not ledger.agrees(count=0, xor=0)
        ledger.remove(1)
        assert ledger.agrees(count=0, xor=0)

    def test_the_list_is_asked_for_at_the_second_mismatch_in_a_row(self):
        doubt = Doubt()
        said = [doubt.heard(agrees=agrees) for agrees in (False, True, False, False, False, False)]
        assert said == [False, False, False, True, False, True]
