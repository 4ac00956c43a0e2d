"""From Route to Grant, and what an owner says of its lease afterwards."""

from __future__ import annotations

import pytest

from fermata.core.ids import lease_incarnation, lease_router, lease_serial
from fermata.core.spec import AffinitySpec, KvAwareSpec, RouterPolicySpec, SchedulerSpec
from fermata.wire import messages as wire


def test_a_route_is_granted_on_a_worker_that_is_in(world):
    worker = world.worker(features=["priority"])
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", 1, 2, 3, hints=wire.Hints(priority=4))
    assert (grant.request, grant.attempt, grant.worker, grant.rank) == ("r1", 0, worker.id, 0)
    assert (grant.endpoint, grant.priority, grant.features) == ("tcp://w0", 4, ["priority"])
    assert grant.matched == {}
    assert (lease_router(grant.lease), lease_incarnation(grant.lease)) == (3, 77)
    assert lease_serial(grant.lease) == 1
    assert world.numbers["leases"] == 1
    assert world.numbers["pending_prefill_tokens"] == 3 * 64 + 32
    assert world.numbers["decode_blocks"] == 4


def test_the_same_route_again_gets_the_same_grant(world):
    world.worker()
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", 1)
    assert world.route(frontend, "r1", 1) == grant
    assert world.numbers["leases"] == 1
    other = world.frontend("f1")
    assert world.grant(other, "r1", 1).lease != grant.lease, "another owner's request of that name"


def test_a_later_attempt_takes_the_place_of_an_earlier_one(world):
    worker = world.worker()
    frontend = world.frontend()
    first = world.grant(frontend, "r1")
    second = world.grant(frontend, "r1", attempt=1)
    assert second.lease != first.lease
    assert world.revoked(worker) == {"unknown": [first.lease]}
    assert world.route(frontend, "r1", attempt=0) is None, "an attempt that is over"
    world.progress(frontend, first.lease, "failed", reason="refused: full")
    assert world.numbers["leases"] == 1
    assert world.numbers["leases_superseded"] == 1
    assert world.numbers["late_progress"] == 1


def test_a_route_that_comes_late_after_its_turn_is_over_is_not_answered(world):
    world.worker()
    frontend = world.frontend()
    lease = world.grant(frontend, "r1").lease
    world.progress(frontend, lease, "finished")
    assert world.route(frontend, "r1") is None
    lease = world.grant(frontend, "r2").lease
    world.progress(frontend, lease, "failed")
    assert world.route(frontend, "r2", attempt=1) is not None


def test_a_turn_goes_where_its_prefix_is(world):
    world.worker("a")
    holder = world.worker("b")
    world.worker("c")
    frontend = world.frontend()
    world.stored(holder, 0, 1, 2, 3)
    grant = world.grant(frontend, "r1", 1, 2, 3, 4)
    assert (grant.worker, grant.matched) == ("b", {"device": 3})
    assert world.numbers["pending_prefill_tokens"] == 64 + 32
    host = wire.KvEvents(0, 1, [wire.KvStored(3, 1, "host")])
    world.say(holder, host, memoryview(b"\4" + b"\0" * 7))
    again = world.grant(frontend, "r2", 1, 2, 3, 4)
    assert again.matched == {"device": 4}, "promised counts as on the device"


def test_siblings_forked_within_a_prefill_find_its_promise(world):
    for name in "abc":
        world.worker(name)
    frontend = world.frontend()
    chain = list(range(1, 40))
    first = world.grant(frontend, "r1", *chain)
    others = [name for name in "abc" if name != first.worker]
    sibling = world.grant(frontend, "r2", *chain[:30], 99, avoid=others)
    assert sibling.matched == {"device": 30}
    assert world.numbers["decode_blocks"] == 39 + 1 + 1 + 1, "shared once; each has a tail"
    world.progress(frontend, first.lease, "prefilled")
    world.progress(frontend, sibling.lease, "prefilled")
    assert world.grant(frontend, "r3", *chain[:30], 98).worker == first.worker


def test_a_promise_ends_when_the_events_that_prove_it_are_in(world):
    worker = world.worker()
    frontend = world.frontend()
    lease = world.grant(frontend, "r1", 1, 2).lease
    world.progress(frontend, lease, "accepted")
    world.progress(frontend, lease, "finished", event_sequence=1)
    assert world.numbers["promises"] == 1
    assert world.grant(frontend, "r2", 1, 2).matched == {"device": 2}
    world.progress(frontend, world.grant(frontend, "r2", 1, 2).lease, "cancelled")
    world.stored(worker, 0, 1)
    assert world.numbers["promises"] == 1
    world.stored(worker, 1, 2, parent=1)
    assert world.numbers["promises"] == 0
    lease = world.grant(frontend, "r3", 1, 2).lease
    world.progress(frontend, lease, "finished", event_sequence=1)
    assert world.numbers["promises"] == 0, "they were in already"


def test_a_match_counts_the_deeper_of_stored_and_promised(world):
    worker = world.worker()
    frontend = world.frontend()
    world.stored(worker, 0, 1, 2, 3, 4)
    assert world.grant(frontend, "r1", 1, 2).matched == {"device": 2}
    assert world.grant(frontend, "r2", 1, 2, 3, 4, 5, 6).matched == {"device": 4}
    assert world.grant(frontend, "r3", 1, 2, 3, 4, 5).matched == {"device": 5}


def test_progress_moves_the_sums(world):
    world.worker()
    frontend = world.frontend()
    lease = world.grant(frontend, "r1", 1, 2).lease
    world.progress(frontend, lease, "accepted")
    assert world.numbers["pending_prefill_tokens"] == 160
    world.progress(frontend, lease, "prefilled", output_tokens=1)
    assert world.numbers["pending_prefill_tokens"] == 0
    assert world.numbers["decode_blocks"] == 3
    world.progress(frontend, lease, "tokens", output_tokens=100)
    world.progress(frontend, lease, "tokens", output_tokens=50)
    assert world.numbers["decode_blocks"] == 5
    usage = wire.Usage(160, 130, 0)
    world.progress(frontend, lease, "finished", output_tokens=130, usage=usage, reason="stop")
    numbers = world.numbers
    assert (numbers["leases"], numbers["decode_blocks"], numbers["leases_finished"]) == (0, 0, 1)


@pytest.mark.parametrize("kind", ["prefilled", "tokens", "finished"])
def test_words_that_follow_accepted_stand_in_for_it(world, kind):
    world.worker()
    frontend = world.frontend()
    lease = world.grant(frontend, "r1", 1).lease
    world.progress(frontend, lease, kind)
    world.wait(8.0 if kind == "finished" else 2.0)
    assert world.numbers.get("leases_dispatch_timeout", 0) == 0
    assert world.numbers["pending_prefill_tokens"] == 0


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed"])
def test_a_lease_ends_once_whatever_is_said_afterwards(world, end):
    world.worker()
    frontend, other = world.frontend(), world.frontend("f1")
    lease = world.grant(frontend, "r1", 1).lease
    world.progress(other, lease, end)
    assert world.numbers["leases"] == 1, "not its lease"
    for kind in (end, "finished", "cancelled", "failed", "accepted", "tokens"):
        world.progress(frontend, lease, kind)
    assert world.numbers["leases"] == 0
    assert world.numbers[f"leases_{end}"] == 1
    assert world.numbers["late_progress"] == 6


def test_an_engine_that_does_not_accept_in_time_loses_the_lease(world):
    worker = world.worker()
    frontend = world.frontend()
    lease = world.grant(frontend, "r1").lease
    accepted = world.grant(frontend, "r2").lease
    world.progress(frontend, accepted, "accepted")
    world.wait(2.0)
    world.beat(worker)
    world.beat(frontend)
    world.wait(2.5)
    world.beat(worker)
    world.beat(frontend)
    assert world.numbers["leases"] == 2
    world.wait(1.0)
    assert world.revoked(frontend) == {"dispatch_timeout": [lease]}
    assert world.revoked(worker) == {"dispatch_timeout": [lease]}
    again = world.grant(frontend, "r1", attempt=1, avoid=["w0"])
    assert again.worker == "w0", "there is no other"


def test_workers_that_failed_the_turn_are_taken_only_when_no_other_is_eligible(world):
    world.worker("a")
    holder = world.worker("b")
    frontend = world.frontend()
    world.stored(holder, 0, 1, 2, 3)
    assert world.grant(frontend, "r1", 1, 2, 3).worker == "b"
    assert world.grant(frontend, "r1", 1, 2, 3, attempt=1, avoid=["b"]).worker == "a"
    assert world.grant(frontend, "r1", 1, 2, 3, attempt=2, avoid=["a", "b", "gone"]).worker == "b"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, "not_found"),
        ({"input_tokens": 0}, "invalid_request"),
        ({"input_tokens": 64}, "invalid_request"),
        ({"input_tokens": 131_072}, "context_length_exceeded"),
    ],
)
def test_what_can_never_be_served_is_rejected_at_once(world, fields, code):
    world.wait(5.0)
    world.worker()
    frontend = world.frontend()
    answer = world.route(frontend, "r1", 1, 2, **fields)
    assert isinstance(answer, wire.Reject)
    assert answer.code == code
    assert world.numbers["turns_waiting"] == 0


def test_an_alias_is_as_good_as_the_name(world):
    world.worker()
    assert world.grant(world.frontend(), "r1", model="alias")


def test_a_long_turn_goes_to_the_worker_it_fits(world):
    world.worker("short", context_length=1000)
    world.worker("small", kv_blocks={"device": 16})
    world.worker("wide")
    frontend = world.frontend()
    workers = {world.grant(frontend, f"r{i}", input_tokens=1000).worker for i in range(6)}
    assert workers == {"wide"}
    short = {world.grant(frontend, f"s{i}", input_tokens=200).worker for i in range(12)}
    assert short >= {"short", "small"}


def test_ranks_are_slots_of_their_own(world):
    world.worker(ranks=3)
    frontend = world.frontend()
    ranks = {world.grant(frontend, f"r{i}", *range(i * 10 + 1, i * 10 + 5)).rank for i in range(3)}
    assert ranks == {0, 1, 2}


class TestAffinity:
    def policy(self, mode: str, **fields: object) -> RouterPolicySpec:
        return RouterPolicySpec(session_affinity=AffinitySpec(mode=mode, **fields))

    def finish(self, world, frontend, grant) -> None:
        world.progress(frontend, grant.lease, "accepted")
        world.progress(frontend, grant.lease, "finished")

    def load(self, world, frontend, worker: str) -> None:
        """Make a slot expensive, by turns of another session that stay."""
        others = [w.id for w in world.router.state.workers if w.id != worker]
        for i in range(4):
            grant = world.grant(frontend, f"load{worker}{i}", input_tokens=6400, avoid=others)
            world.progress(frontend, grant.lease, "accepted")

    @pytest.mark.parametrize("mode", ["Soft", "Hard"])
    def test_a_session_returns_to_its_slot_though_others_are_cheaper(self, make_world, mode):
        world = make_world(policy=self.policy(mode))
        world.worker("a")
        world.worker("b")
        frontend = world.frontend()
        first = world.grant(frontend, "r1", session="s")
        self.finish(world, frontend, first)
        self.load(world, frontend, first.worker)
        assert world.grant(frontend, "r2", session="s").worker == first.worker
        assert world.grant(frontend, "r3", session="other").worker != first.worker

    def test_without_affinity_cost_decides(self, make_world):
        world = make_world(policy=self.policy("None"))
        world.worker("a")
        world.worker("b")
        frontend = world.frontend()
        first = world.grant(frontend, "r1", session="s")
        self.finish(world, frontend, first)
        assert world.numbers["sessions"] == 0
        self.load(world, frontend, first.worker)
        assert world.grant(frontend, "r2", session="s").worker != first.worker

    def test_a_cancelled_turn_leaves_the_binding_a_failed_one_breaks_it(self, make_world):
        world = make_world(policy=self.policy("Soft"))
        world.worker("a")
        frontend = world.frontend()
        lease = world.grant(frontend, "r1", session="s").lease
        world.progress(frontend, lease, "accepted")
        world.progress(frontend, lease, "cancelled")
        assert world.numbers["sessions"] == 1
        lease = world.grant(frontend, "r2", session="s").lease
        world.progress(frontend, lease, "failed")
        assert world.numbers["sessions"] == 0

    def test_it_expires_by_the_policys_ttl(self, make_world):
        world = make_world(policy=self.policy("Soft", ttl_s=2.0))
        world.worker("a")
        frontend = world.frontend()
        self.finish(world, frontend, world.grant(frontend, "r1", session="s"))
        world.wait(1.9)
        assert world.numbers["sessions"] == 1
        world.wait(0.2)
        assert world.numbers["sessions"] == 0

    def test_siblings_of_one_parent_share_a_slot(self, make_world):
        world = make_world(policy=self.policy("Soft"))
        world.worker("a")
        world.worker("b")
        frontend = world.frontend()
        first = world.grant(frontend, "r1", session="c1", parent="p")
        self.finish(world, frontend, first)
        self.load(world, frontend, first.worker)
        assert world.grant(frontend, "r2", session="c2", parent="p").worker == first.worker
        assert world.grant(frontend, "r3", session="p").worker != first.worker

    def test_soft_gives_way_to_a_worker_to_avoid_and_moves_the_session(self, make_world):
        world = make_world(policy=self.policy("Soft"))
        world.worker("a")
        world.worker("b")
        frontend = world.frontend()
        first = world.grant(frontend, "r1", session="s")
        self.finish(world, frontend, first)
        moved = world.grant(frontend, "r2", session="s", avoid=[first.worker])
        assert moved.worker != first.worker
        self.finish(world, frontend, moved)
        self.load(world, frontend, moved.worker)
        assert world.grant(frontend, "r3", session="s").worker == moved.worker

    def test_hard_gives_up_a_slot_that_can_not_take_it(self, make_world):
        world = make_world(policy=self.policy("Hard"))
        a = world.worker("a")
        frontend = world.frontend()
        self.finish(world, frontend, world.grant(frontend, "r1", session="s"))
        world.worker("b")
        world.say(a, wire.DrainStatus("draining", 0))
        assert world.grant(frontend, "r2", session="s").worker == "b"

    def test_an_inferred_session_is_never_bound_hard(self, make_world):
        policy = RouterPolicySpec(
            session_affinity=AffinitySpec(mode="Hard"),
            scheduler=SchedulerSpec(kv_aware=KvAwareSpec(balance=0.0)),
        )
        world = make_world(policy=policy)
        world.worker("a")
        world.worker("b")
        frontend = world.frontend()
        grants = [
            world.grant(frontend, "r1", session="s", inferred=True),
            world.grant(frontend, "h1", session="h"),
        ]
        for grant in grants:
            world.progress(frontend, grant.lease, "accepted")
        for i in range(3):
            world.grant(frontend, f"h{i + 2}", session="h")
        soft = world.grant(frontend, "r2", session="s", inferred=True)
        hard = world.grant(frontend, "h9", session="h")
        assert hard.worker == grants[1].worker
        assert soft.worker == grants[0].worker
        crowd = [
            world.grant(frontend, f"c{i}", session="s", inferred=True).worker for i in range(9)
        ]
        assert len(set(crowd)) == 2, "the bound on load goes before soft affinity"
