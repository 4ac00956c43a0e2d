"""Life of an owner: silence, fences, successors; and two sides that agree on who holds which lease."""

from __future__ import annotations

from array import array

import pytest

from fermata.core.ids import make_lease_id
from fermata.router.owner import Owners
from fermata.wire import messages as wire
from fermata.wire.roles import Peer


def beat_all(world, *peers: Peer) -> None:
    for peer in peers:
        world.beat(peer)


def ids(*leases: int) -> array[int]:
    return array("Q", leases)


class TestDeath:
    def test_a_silent_owner_ends_with_all_its_leases_and_is_fenced(self, world):
        worker = world.worker()
        dead, alive = world.frontend("dead", incarnation=7), world.frontend("alive")
        mine = [world.grant(dead, f"r{i}").lease for i in range(3)]
        other = world.grant(alive, "r").lease
        for lease in (*mine, other):
            world.progress(dead if lease != other else alive, lease, "accepted")
        for _ in range(4):
            world.wait(1.2)
            beat_all(world, worker, alive)
        assert world.numbers["leases"] == 4
        world.wait(0.5)
        assert world.revoked(worker) == {"owner_lost": mine}
        (fence,) = world.take(wire.Fence, worker)
        assert (fence.owner, fence.incarnation) == ("dead", 7)
        assert world.numbers["leases"] == 1
        assert world.numbers["owners"] == 1

    def test_the_dead_is_told_and_comes_back_under_a_new_incarnation_only(self, world):
        worker = world.worker()
        dead = world.frontend("f", incarnation=7)
        for _ in range(6):
            world.wait(1.0)
            world.beat(worker)
        assert world.numbers["owners"] == 0
        (ack,) = world.beat(dead)
        assert not ack.known
        assert ack.fenced == 7
        (welcome,) = world.say(dead, wire.Hello("frontend", "f", 7))
        assert isinstance(welcome, wire.Welcome), "the same boot of the router: so it knows"
        assert world.numbers["owners"] == 0
        answer = world.route(dead, "r1")
        assert isinstance(answer, wire.HeartbeatAck)
        assert not answer.known
        back = world.frontend("f", incarnation=8)
        assert world.grant(back, "r1", attempt=1)
        (ack,) = world.beat(dead)
        assert (ack.known, ack.fenced) == (False, -1), (
            "its successor lives, and is not to be passed"
        )

    def test_its_waiting_turns_are_forgotten(self, world):
        frontend = world.frontend()
        assert isinstance(world.route(frontend, "r1"), wire.Hold)
        world.wait(6.0)
        assert world.numbers["turns_waiting"] == 0

    def test_a_successor_ends_what_its_predecessor_had(self, world):
        worker = world.worker()
        old = world.frontend("f", incarnation=1)
        lease = world.grant(old, "r1").lease
        world.take(wire.Fence)
        new = world.frontend("f", incarnation=5)
        assert world.revoked(worker) == {"owner_lost": [lease]}
        assert [f.incarnation for f in world.take(wire.Fence, worker)] == [1]
        assert world.grant(new, "r1", attempt=1)
        world.say(old, wire.Hello("frontend", "f", 1))
        assert world.router.state.owners.get(new) is not None
        (ack,) = world.beat(old)
        assert not ack.known
        world.say(Peer(wire.Role.FRONTEND, "f", 3), wire.Hello("frontend", "f", 3))
        assert world.router.state.owners.get(new) is not None, "a boot between the two is old too"

    def test_bye_ends_its_leases(self, world):
        worker = world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.say(frontend, wire.Bye(1))
        assert world.revoked(worker) == {"owner_lost": [lease]}

    def test_hello_again_is_idempotent(self, world):
        world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.frontend()
        assert world.numbers["owners"] == 1
        assert lease in world.router.state.leases

    def test_fences_are_remembered_and_bounded(self):
        owners = Owners(width_s=0.1, most_fences=2)
        for name, incarnation in (("a", 3), ("b", 1), ("a", 2), ("c", 9)):
            owners.fence(Peer(wire.Role.FRONTEND, name, incarnation))
        assert owners.fences == [("a", 3), ("c", 9)]
        assert owners.is_fenced(Peer(wire.Role.FRONTEND, "a", 3))
        assert not owners.is_fenced(Peer(wire.Role.FRONTEND, "a", 4))


class TestReconciliation:
    def test_equal_digests_ask_for_nothing(self, world):
        world.worker()
        frontend = world.frontend()
        leases = [world.grant(frontend, f"r{i}").lease for i in range(3)]
        for seen, held in ((0, []), (leases[0], leases[:1]), (leases[2], leases)):
            (ack,) = world.beat(frontend, seen=seen, leases=held)
            assert (ack.known, ack.workers_ready) == (True, 1)

    def test_two_mismatches_in_a_row_ask_for_the_list_and_both_sides_drop(self, world):
        worker = world.worker()
        frontend = world.frontend()
        held, lost = world.grant(frontend, "r1").lease, world.grant(frontend, "r2").lease
        strange = make_lease_id(router=3, incarnation=77, serial=999)
        assert len(world.beat(frontend, seen=lost, leases=[held, strange])) == 1
        answers = world.beat(frontend, seen=lost, leases=[held, strange])
        assert [type(a) for a in answers] == [wire.LeaseListRequest, wire.HeartbeatAck]
        later = world.grant(frontend, "r3").lease
        world.say(frontend, wire.LeaseList(seen=lost), ids(held, strange))
        assert world.revoked(frontend) == {"unknown": [strange]}
        assert world.revoked(worker) == {"unknown": [lost]}
        assert world.router.state.leases.get(later) is not None, "granted after what it has seen"
        assert world.numbers["leases_not_held"] == 1
        assert len(world.beat(frontend, seen=later, leases=[held, later])) == 1

    def test_a_list_that_agrees_changes_nothing(self, world):
        world.worker()
        frontend, other = world.frontend(), world.frontend("f1")
        lease, others = world.grant(frontend, "r1").lease, world.grant(other, "r1").lease
        world.say(frontend, wire.LeaseList(seen=lease), ids(lease))
        assert world.numbers["leases"] == 2
        world.say(frontend, wire.LeaseList(seen=others), ids(lease, others))
        assert world.revoked(frontend) == {"unknown": [others]}, "not its own"
        assert world.numbers["leases"] == 2

    def test_a_worker_is_told_which_of_its_leases_nobody_holds(self, world):
        worker = world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.progress(frontend, lease, "accepted")
        strange = make_lease_id(router=3, incarnation=5, serial=1)
        foreign = make_lease_id(router=9, incarnation=5, serial=1)
        assert len(world.beat(worker, leases=[lease])) == 1
        world.beat(worker, leases=[lease, strange])
        answers = world.beat(worker, leases=[lease, strange])
        assert isinstance(answers[0], wire.LeaseListRequest)
        world.say(worker, wire.LeaseList(), ids(lease, strange, foreign))
        assert world.revoked(worker) == {}, "owners may still claim it from this young router"
        for _ in range(6):
            world.wait(1.0)
            beat_all(world, worker, frontend)
        world.say(worker, wire.LeaseList(), ids(lease, strange, foreign))
        assert world.revoked(worker) == {"unknown": [strange]}

    def test_a_lease_that_a_worker_lacks_twice_in_a_row_is_lost_and_its_owner_asks_anew(
        self, world
    ):
        worker = world.worker()
        frontend = world.frontend()
        lost, fresh = world.grant(frontend, "r1").lease, world.grant(frontend, "r2").lease
        world.progress(frontend, lost, "accepted")
        world.say(worker, wire.LeaseList(), ids())
        assert world.revoked(frontend) == {}, "it may have ended, with the word under way"
        world.progress(frontend, fresh, "accepted")
        world.say(worker, wire.LeaseList(), ids())
        assert world.revoked(frontend) == {"unknown": [lost]}
        assert world.revoked(worker) == {}
        world.say(worker, wire.LeaseList(), ids(fresh))
        world.say(worker, wire.LeaseList(), ids())
        assert world.revoked(frontend) == {}, "twice in a row"


class TestClaims:
    """A router that booted learns from owners what they hold from its earlier boot."""

    def claim(self, lease: int, *, worker: str = "w0", rank: int = 0, blocks: int = 2, **fields):
        settings = {
            "request": "r1",
            "attempt": 0,
            "input_tokens": 160,
            "output_tokens": 10,
            "accepted": True,
            "prefilled": True,
            "key": "k",
        }
        return wire.LeaseClaim(
            lease=lease, worker=worker, rank=rank, blocks=blocks, **(settings | fields)
        )

    def old(self, serial: int = 1) -> int:
        return make_lease_id(router=3, incarnation=5, serial=serial)

    def test_a_claimed_lease_lives_on(self, world):
        world.worker()
        frontend = world.frontend()
        claim = self.claim(self.old(), session="s")
        world.say(frontend, wire.LeaseClaims([claim]), ids(1, 2))
        world.say(frontend, wire.LeaseClaims([claim]), ids(1, 2))
        numbers = world.numbers
        assert (numbers["leases"], numbers["decode_blocks"], numbers["sessions"]) == (1, 3, 1)
        assert numbers["pending_prefill_tokens"] == 0
        assert world.grant(frontend, "r2", 1, 2, 3).matched == {"device": 2}
        assert len(world.beat(frontend, leases=[self.old()])) == 1
        world.progress(frontend, self.old(), "finished")
        assert world.numbers["leases_finished"] == 1

    def test_a_late_claim_does_not_bring_an_ended_lease_back(self, world):
        world.worker()
        frontend = world.frontend()
        claims = wire.LeaseClaims([self.claim(self.old())])
        world.say(frontend, claims, ids(1, 2))
        world.progress(frontend, self.old(), "cancelled")
        world.say(frontend, claims, ids(1, 2))
        assert world.numbers["leases"] == 0
        assert world.revoked(frontend) == {"unknown": [self.old()]}

    def test_what_can_not_be_right_is_revoked(self, world):
        world.worker()
        frontend, other = world.frontend(), world.frontend("f1")
        present = make_lease_id(router=3, incarnation=77, serial=50)
        foreign = make_lease_id(router=4, incarnation=5, serial=1)
        world.say(other, wire.LeaseClaims([self.claim(self.old(9))]), ids(1, 2))
        wrong = [
            self.claim(present),
            self.claim(foreign),
            self.claim(self.old(2), rank=1),
            self.claim(self.old(3), rank=-1),
            self.claim(self.old(9)),
        ]
        world.say(frontend, wire.LeaseClaims(wrong), ids(*range(10)))
        assert world.revoked(frontend) == {"unknown": [c.lease for c in wrong]}
        assert world.numbers["leases"] == 1

    def test_one_request_claims_one_lease(self, world):
        world.worker()
        frontend = world.frontend()
        claims = [self.claim(self.old(1)), self.claim(self.old(2))]
        world.say(frontend, wire.LeaseClaims(claims), ids(1, 2, 1, 2))
        assert world.revoked(frontend) == {"unknown": [self.old(2)]}

    def test_a_claimed_lease_that_is_not_accepted_may_still_time_out(self, world):
        worker = world.worker()
        frontend = world.frontend()
        claim = self.claim(self.old(), accepted=False, prefilled=False)
        world.say(frontend, wire.LeaseClaims([claim]), ids(1, 2))
        assert world.numbers["pending_prefill_tokens"] == 160
        for _ in range(6):
            world.wait(1.0)
            beat_all(world, worker, frontend)
        assert world.revoked(frontend) == {"dispatch_timeout": [self.old()]}

    def test_a_route_for_a_claimed_lease_starts_over(self, world):
        worker = world.worker()
        frontend = world.frontend()
        world.say(frontend, wire.LeaseClaims([self.claim(self.old())]), ids(1, 2))
        grant = world.grant(frontend, "r1", attempt=0)
        assert grant.lease != self.old()
        assert world.revoked(worker) == {"unknown": [self.old()]}

    def test_a_worker_that_has_not_said_hello_yet_is_expected(self, world):
        frontend = world.frontend()
        claims = [self.claim(self.old(1), rank=1), self.claim(self.old(2), rank=3, request="r2")]
        world.say(frontend, wire.LeaseClaims(claims), ids(1, 2, 1, 2))
        assert world.numbers["leases"] == 2
        assert world.numbers["workers_known"] == 0
        world.worker(ranks=2)
        assert world.revoked(frontend) == {"worker_lost": [self.old(2)]}, "it has no such rank now"
        assert world.numbers["leases"] == 1
        world.progress(frontend, self.old(1), "tokens", output_tokens=40)
        assert world.numbers["decode_blocks"] == 4

    @pytest.mark.parametrize("heard", [True, False])
    def test_one_that_never_comes_is_lost_and_the_owner_told(self, world, heard):
        frontend = world.frontend()
        world.say(frontend, wire.LeaseClaims([self.claim(self.old())]), ids(1, 2))
        if heard:
            world.progress(frontend, self.old(), "finished", event_sequence=3)
        for _ in range(6):
            world.wait(1.0)
            world.beat(frontend, leases=[] if heard else [self.old()])
        assert world.revoked(frontend) == ({} if heard else {"worker_lost": [self.old()]})
        assert world.router.state.seats.taken() == set()
