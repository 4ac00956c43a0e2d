"""Turns that wait: for a boot, for a worker, for room; and what lets them go."""

from __future__ import annotations

import pytest

from fermata.core.spec import (
    AffinitySpec,
    OverloadSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.wire import messages as wire


def holds(world, frontend) -> list[tuple[str, str]]:
    return [(hold.request, hold.reason) for hold in world.take(wire.Hold, frontend)]


def granted(world, frontend) -> list[str]:
    return [grant.request for grant in world.take(wire.Grant, frontend)]


def alive(world, seconds: int, *peers) -> None:
    for _ in range(seconds):
        world.wait(1.0)
        for peer in peers:
            world.beat(peer)


class TestNoWorker:
    def test_a_turn_waits_for_a_worker_and_is_told_once(self, world):
        frontend = world.frontend()
        hold = world.route(frontend, "r1")
        assert (hold.request, hold.attempt, hold.reason, hold.deadline_s) == (
            "r1",
            0,
            "no_worker",
            60.0,
        )
        assert world.numbers["turns_waiting"] == 1
        world.sent.clear()
        alive(world, 3, frontend)
        assert holds(world, frontend) == []
        world.worker()
        (grant,) = world.take(wire.Grant, frontend)
        assert grant.held_s == pytest.approx(3.0)
        assert grant.hold_reason == "no_worker"
        assert world.numbers["turns_waiting"] == 0

    def test_asked_again_it_is_held_again_and_a_later_attempt_takes_its_place(self, world):
        frontend = world.frontend()
        world.route(frontend, "r1")
        world.wait(2.0)
        again = world.route(frontend, "r1")
        assert again.deadline_s == pytest.approx(58.0)
        assert world.route(frontend, "r1", attempt=1).attempt == 1
        assert world.route(frontend, "r1", attempt=0) is None
        assert world.numbers["turns_waiting"] == 1

    def test_after_the_policys_wait_it_is_rejected(self, make_world):
        world = make_world(policy=RouterPolicySpec(overload=OverloadSpec(no_worker_wait_s=7.0)))
        frontend = world.frontend()
        world.route(frontend, "r1")
        world.route(frontend, "r2", waited_s=4.0)
        alive(world, 4, frontend)
        assert [r.request for r in world.take(wire.Reject)] == []
        alive(world, 2, frontend)
        (reject,) = world.take(wire.Reject, frontend)
        assert (reject.request, reject.code) == ("r2", "no_worker")
        assert reject.retry_after_s > 0
        alive(world, 2, frontend)
        assert [r.request for r in world.take(wire.Reject)] == ["r1"]
        assert world.numbers["turns_waiting"] == 0

    def test_a_boot_gives_workers_time_however_long_the_turn_waited_elsewhere(self, world):
        frontend = world.frontend()
        hold = world.route(frontend, "r1", waited_s=300.0)
        assert hold.deadline_s == pytest.approx(5.0)

    def test_a_client_that_goes_away_takes_its_turn_along(self, world):
        frontend = world.frontend()
        world.route(frontend, "r1")
        world.progress(frontend, 0, "cancelled", request="r1")
        assert world.numbers["turns_waiting"] == 0
        world.progress(frontend, 0, "cancelled", request="r1")
        world.worker()
        assert granted(world, frontend) == []
        assert world.route(frontend, "r1") is None, "a Route that was under way"

    def test_a_withdrawal_that_crosses_the_grant_ends_the_lease(self, world):
        world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.progress(frontend, 0, "cancelled", request="r1")
        assert world.numbers["leases"] == 0
        world.progress(frontend, lease, "cancelled")
        assert world.numbers["leases_cancelled"] == 1

    def test_when_the_last_worker_dies_waiting_turns_wait_for_another(self, make_world):
        policy = RouterPolicySpec(overload=OverloadSpec(prefill_tokens=0.001))
        world = make_world(policy=policy)
        worker = world.worker()
        frontend = world.frontend()
        world.grant(frontend, "r1")
        world.route(frontend, "r2")
        assert holds(world, frontend) == [("r2", "queue")]
        world.say(worker, wire.Bye(1))
        assert holds(world, frontend) == [("r2", "no_worker")]


class TestBoot:
    def test_without_a_policy_turns_are_held_until_one_comes(self, make_world):
        world = make_world(policy=None)
        frontend = world.frontend()
        world.worker()
        hold = world.route(frontend, "r1")
        assert hold.reason == "booting"
        assert world.router.status(world.now).facts["state"] == "booting"
        world.set_policy(RouterPolicySpec())
        assert granted(world, frontend) == ["r1"]
        assert world.router.status(world.now).facts["state"] == "serving"

    def test_defaults_serve_when_none_comes_in_time(self, make_world):
        world = make_world(policy=None)
        frontend = world.frontend()
        worker = world.worker()
        world.route(frontend, "r1")
        alive(world, 4, frontend, worker)
        assert granted(world, frontend) == []
        alive(world, 1, frontend, worker)
        assert granted(world, frontend) == ["r1"]

    def test_turns_wait_for_the_snapshots_of_every_worker_that_is_known(self, world):
        frontend = world.frontend()
        late = world.worker("late", snapshot=False)
        (ask,) = world.take(wire.SnapshotRequest, late)
        world.worker("soon")
        assert world.route(frontend, "r1").reason == "booting"
        world.snapshot(late, ask)
        assert granted(world, frontend) == ["r1"]
        world.worker("later", snapshot=False)
        assert world.grant(frontend, "r2"), "the boot is over"

    def test_but_only_so_long(self, world):
        frontend = world.frontend()
        late = world.worker("late", snapshot=False)
        soon = world.worker("soon")
        world.route(frontend, "r1")
        for _ in range(5):
            world.wait(1.0)
            world.beat(frontend)
            world.beat(late)
            world.beat(soon)
        assert granted(world, frontend) == ["r1"]


class TestRoom:
    """Busy by the overload's limits, or above the queue's threshold: turns wait, and beyond the limit are refused."""

    def world(self, make_world, **policy):
        settings = {"overload": OverloadSpec(prefill_tokens=0.02), "queue": QueueSpec(limit=3)}
        world = make_world(policy=RouterPolicySpec(**(settings | policy)))
        world.peers = (world.worker("a"), world.worker("b"))
        return world

    def fill(self, world, frontend) -> list[int]:
        """163.84 tokens make a slot busy."""
        return [world.grant(frontend, f"fill{i}", input_tokens=170).lease for i in range(2)]

    def test_when_all_slots_are_busy_turns_wait_in_order(self, make_world):
        world = self.world(make_world)
        frontend = world.frontend()
        leases = self.fill(world, frontend)
        for name in ("r1", "r2"):
            assert world.route(frontend, name).reason == "queue"
        assert world.numbers["slots_busy"] == 2
        world.progress(frontend, leases[0], "prefilled")
        assert granted(world, frontend)[2:] == ["r1", "r2"], "short ones, so both fit in"

    def test_one_is_let_go_for_the_room_of_one(self, make_world):
        world = self.world(make_world)
        frontend = world.frontend()
        leases = self.fill(world, frontend)
        for name in ("r1", "r2", "r3"):
            world.route(frontend, name, input_tokens=170)
        world.sent.clear()
        world.progress(frontend, leases[0], "cancelled")
        assert granted(world, frontend) == ["r1"]
        world.progress(frontend, leases[1], "failed")
        assert granted(world, frontend) == ["r2"]
        assert world.numbers["turns_waiting"] == 1

    def test_those_who_fit_few_workers_do_not_stand_in_the_way_of_those_who_fit_many(
        self, make_world
    ):
        world = self.world(make_world, queue=QueueSpec(limit=100))
        world.worker("wide", context_length=200_000, kv_blocks={"device": 16_384})
        frontend = world.frontend()
        long = world.grant(frontend, "long", input_tokens=150_000).lease
        leases = self.fill(world, frontend)
        for i in range(20):
            assert world.route(frontend, f"long{i}", input_tokens=150_000).reason == "queue"
        for i in range(3):
            assert world.route(frontend, f"r{i}", input_tokens=170).reason == "queue"
        world.sent.clear()
        world.progress(frontend, leases[0], "cancelled")
        assert granted(world, frontend) == ["r0"]
        world.progress(frontend, long, "cancelled")
        assert granted(world, frontend) == ["long0"], "of two who could go, the older"
        world.progress(frontend, leases[1], "cancelled")
        assert granted(world, frontend) == ["r1"]

    def test_beyond_the_limit_it_is_529_with_a_time_to_retry(self, make_world):
        world = self.world(make_world)
        frontend = world.frontend()
        self.fill(world, frontend)
        for i in range(6):
            assert isinstance(world.route(frontend, f"r{i}"), wire.Hold)
        reject = world.route(frontend, "r6")
        assert isinstance(reject, wire.Reject)
        assert (reject.code, reject.retry_after_s > 0) == ("overloaded", True)
        assert world.numbers["overloaded"] == 1

    def test_decode_blocks_in_use_make_a_slot_busy_whoever_uses_them(self, make_world):
        world = self.world(make_world, overload=OverloadSpec(decode_blocks=0.5))
        frontend = world.frontend()
        a, b = world.peers
        world.load(a, kv_used={"device": 2049})
        assert {world.grant(frontend, f"r{i}").worker for i in range(3)} == {"b"}
        world.load(b, kv_used={"device": 4096})
        assert world.route(frontend, "r9").reason == "queue"
        world.load(a, kv_used={"device": 2048})
        assert world.take(wire.Grant, frontend)[-1].worker == "a"

    def test_the_queues_threshold_holds_too(self, make_world):
        world = self.world(make_world, overload=OverloadSpec(), queue=QueueSpec(threshold=0.02))
        frontend = world.frontend()
        leases = self.fill(world, frontend)
        assert world.route(frontend, "r1").reason == "queue"
        world.progress(frontend, leases[1], "prefilled")
        assert granted(world, frontend)[-1] == "r1"

    def test_at_its_deadline_a_turn_is_placed_whatever_the_load(self, make_world):
        thunder = ThunderAgentSpec(resume_timeout_s=20.0)
        world = self.world(make_world, scheduler=SchedulerSpec(thunder_agent=thunder))
        frontend = world.frontend()
        for lease in self.fill(world, frontend):
            world.progress(frontend, lease, "accepted")
        hold = world.route(frontend, "r1", input_tokens=170)
        assert hold.deadline_s == 20.0
        impatient = world.route(
            frontend, "r2", input_tokens=170, streaming=False, client_timeout_s=35.0
        )
        assert impatient.deadline_s == 5.0
        world.sent.clear()
        alive(world, 6, frontend, *world.peers)
        assert granted(world, frontend) == ["r2"]
        alive(world, 14, frontend, *world.peers)
        assert granted(world, frontend) == ["r1"]

    def test_a_turn_without_a_stream_waits_four_minutes_at_most(self, make_world):
        world = self.world(make_world)
        frontend = world.frontend()
        self.fill(world, frontend)
        assert world.route(frontend, "r1", streaming=False).deadline_s == 240.0
        assert world.route(frontend, "r2").deadline_s == 1800.0

    def test_forced_with_nobody_left_it_waits_for_a_worker(self, make_world):
        thunder = ThunderAgentSpec(resume_timeout_s=2.0)
        world = self.world(make_world, scheduler=SchedulerSpec(thunder_agent=thunder))
        frontend = world.frontend()
        self.fill(world, frontend)
        world.route(frontend, "r1", input_tokens=170)
        for peer in world.peers:
            world.say(peer, wire.DrainStatus("draining", 1))
        assert holds(world, frontend)[-1] == ("r1", "no_worker")

    def test_those_bound_hard_to_a_busy_slot_do_not_stand_in_others_way(self, make_world):
        world = self.world(
            make_world, session_affinity=AffinitySpec(mode="Hard"), queue=QueueSpec(limit=100)
        )
        frontend = world.frontend()
        first = world.grant(frontend, "h0", session="h")
        world.progress(frontend, first.lease, "accepted")
        others = [p.id for p in world.peers if p.id != first.worker]
        busy = world.grant(frontend, "fill", input_tokens=170, avoid=others).lease
        for i in range(12):
            assert world.route(frontend, f"h{i + 1}", session="h").reason == "queue"
        assert isinstance(world.route(frontend, "free"), wire.Grant)
        world.sent.clear()
        world.progress(frontend, busy, "cancelled")
        back = world.take(wire.Grant, frontend)
        assert back
        assert {grant.worker for grant in back} == {first.worker}
        assert [grant.request for grant in back] == [f"h{i + 1}" for i in range(len(back))]

    def test_a_lost_slot_frees_those_who_were_bound_hard_to_it(self, make_world):
        world = self.world(make_world, session_affinity=AffinitySpec(mode="Hard"))
        frontend = world.frontend()
        first = world.grant(frontend, "h0", session="h")
        world.progress(frontend, first.lease, "accepted")
        others = [p.id for p in world.peers if p.id != first.worker]
        world.grant(frontend, "fill", input_tokens=170, avoid=others)
        world.route(frontend, "h1", session="h")
        world.sent.clear()
        (dead,) = [p for p in world.peers if p.id == first.worker]
        world.say(dead, wire.Bye(1))
        (grant,) = world.take(wire.Grant, frontend)
        assert (grant.request, grant.worker) == ("h1", others[0])

    def test_a_turn_too_long_for_every_worker_that_ever_came_is_rejected_while_it_waits(
        self, world
    ):
        frontend = world.frontend()
        world.route(frontend, "long", input_tokens=150_000)
        narrow = world.worker("narrow")
        assert world.take(wire.Reject) == [], "others may still say Hello"
        alive(world, 5, frontend, narrow)
        (reject,) = world.take(wire.Reject, frontend)
        assert (reject.request, reject.code) == ("long", "context_length_exceeded")

    def test_a_turn_that_only_a_worker_now_gone_could_take_waits_for_it(self, world):
        frontend = world.frontend()
        narrow = world.worker("narrow")
        wide = world.worker("wide", context_length=200_000, kv_blocks={"device": 16_384})
        alive(world, 5, frontend, narrow, wide)
        world.say(wide, wire.Bye(1))
        assert world.route(frontend, "long", input_tokens=150_000).reason == "no_worker"

    def test_hard_bound_turns_go_anywhere_once_their_session_failed_there(self, make_world):
        world = self.world(make_world, session_affinity=AffinitySpec(mode="Hard"))
        frontend = world.frontend()
        first = world.grant(frontend, "h0", session="h")
        world.progress(frontend, first.lease, "accepted")
        others = [p.id for p in world.peers if p.id != first.worker]
        world.grant(frontend, "fill", input_tokens=170, avoid=others)
        assert world.route(frontend, "h1", session="h").reason == "queue"
        world.sent.clear()
        world.progress(frontend, first.lease, "failed")
        (grant,) = world.take(wire.Grant, frontend)
        assert (grant.request, grant.worker) == ("h1", others[0])
