"""SetPolicy replaces the whole; the ring says whose a key is; and what a router says of itself."""

from __future__ import annotations

import msgspec
import pytest

from fermata.core.ids import RouterId, RoutingKey
from fermata.core.ring import Ring
from fermata.core.spec import (
    AffinitySpec,
    KvSpec,
    OverloadSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.router.state import _MOST_SERIALS
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

OPERATOR = Peer(wire.Role.OPERATOR, "operator", 1)
ROUND_ROBIN = RouterPolicySpec(scheduler=SchedulerSpec(type="RoundRobin"))


class TestPolicy:
    def test_a_later_revision_is_applied_live_and_grants_name_it(self, world):
        for name in "abc":
            world.worker(name)
        frontend = world.frontend()
        lease = world.grant(frontend, "r0", session="s").lease
        world.progress(frontend, lease, "accepted")
        ack = world.set_policy(ROUND_ROBIN, revision=4)
        assert (ack.applied, ack.revision, ack.reasons) == (True, 4, [])
        grants = [world.grant(frontend, f"r{i}") for i in range(1, 5)]
        assert [g.worker for g in grants] == ["a", "b", "c", "a"]
        assert {g.policy_revision for g in grants} == {4}
        assert world.numbers["leases"] == 5
        assert world.numbers["sessions"] == 1
        assert world.router.status(world.now).facts["policy"] == "RoundRobin"
        (ack,) = world.beat(frontend)
        assert ack.policy_revision == 4

    def test_an_earlier_revision_is_refused_and_the_same_one_is_no_news(self, world):
        world.set_policy(ROUND_ROBIN, revision=4)
        ack = world.set_policy(RouterPolicySpec(), revision=3)
        assert not ack.applied
        assert "older than 4" in ack.reasons[0]
        assert world.set_policy(ROUND_ROBIN, revision=4).applied
        assert world.router.state.policy == ROUND_ROBIN
        assert world.numbers["policies_refused"] == 1

    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            (b"{", "truncated"),
            (b'{"scheduler": {"type": "Magic"}}', "Magic"),
            (b'{"unheard": 1}', "unheard"),
            (b'{"\xff": 1}', "utf-8"),
            (b"[" * 5000, "array"),
            (
                msgspec.json.encode(
                    RouterPolicySpec(
                        scheduler=SchedulerSpec(
                            type="ThunderAgent", thunder_agent=ThunderAgentSpec(pause_target=0.99)
                        )
                    )
                ),
                "scheduler.thunderAgent.pauseTarget",
            ),
        ],
    )
    def test_what_is_no_policy_is_refused_with_reasons_and_changes_nothing(
        self, world, spec, reason
    ):
        before = world.router.state.policy
        (ack,) = world.say(OPERATOR, wire.SetPolicy("u", 1, 9, spec, wire.Ring(0, [])))
        assert not ack.applied
        assert reason.lower() in ack.reasons[0].lower()
        assert world.router.state.policy is before
        assert world.numbers["policy_revision"] == 0

    def test_a_switch_judges_waiting_turns_anew_and_tells_those_who_go_on_waiting(self, make_world):
        tight = RouterPolicySpec(
            overload=OverloadSpec(prefill_tokens=0.02), queue=QueueSpec(limit=9)
        )
        world = make_world(policy=tight)
        world.worker()
        frontend = world.frontend()
        world.grant(frontend, "fill", input_tokens=170)
        for i in range(3):
            world.route(frontend, f"r{i}", input_tokens=170)
        world.sent.clear()
        loose = RouterPolicySpec(overload=OverloadSpec(prefill_tokens=0.05))
        world.set_policy(loose)
        assert [g.request for g in world.take(wire.Grant, frontend)] == ["r0", "r1"]
        world.set_policy(RouterPolicySpec(), revision=2)
        assert [g.request for g in world.take(wire.Grant, frontend)] == ["r2"]

    def test_the_index_takes_the_new_bound(self, world):
        world.set_policy(RouterPolicySpec(kv=KvSpec(index_blocks=2)))
        worker = world.worker()
        world.stored(worker, 0, 1, 2, 3)
        assert world.numbers["index_pairs"] == 2
        assert world.numbers["index_refused_blocks"] == 1

    def test_affinity_switched_off_binds_no_more_and_keeps_what_is_bound(self, world):
        world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1", session="s").lease
        world.progress(frontend, lease, "accepted")
        world.set_policy(RouterPolicySpec(session_affinity=AffinitySpec(mode="None")))
        lease = world.grant(frontend, "r2", session="t").lease
        world.progress(frontend, lease, "accepted")
        assert world.numbers["sessions"] == 1


class TestRing:
    def ring(self, epoch: int = 2) -> wire.Ring:
        return wire.Ring(epoch, [("router-0", "tcp://a"), ("router-1", "tcp://b")])

    def keys(self) -> tuple[RoutingKey, RoutingKey]:
        """(mine, the other's)."""
        ring = Ring(2, {RouterId("router-0"): "tcp://a", RouterId("router-1"): "tcp://b"})
        by_owner = {ring.router_for(RoutingKey(f"k{i}")): RoutingKey(f"k{i}") for i in range(50)}
        return by_owner[RouterId("router-0")], by_owner[RouterId("router-1")]

    def test_a_booting_router_is_its_own_ring(self, world):
        frontend = Peer(wire.Role.FRONTEND, "f", 1)
        (welcome,) = world.say(frontend, wire.Hello("frontend", "f", 1))
        assert welcome.ring == wire.Ring(0, [("router-0", "tcp://127.0.0.1:1")])

    def test_a_key_of_another_router_is_answered_with_the_ring(self, world):
        world.worker()
        frontend = world.frontend()
        mine, others = self.keys()
        world.set_policy(RouterPolicySpec(), ring=self.ring())
        moved = world.route(frontend, "r1", key=others, epoch=0)
        assert (moved.request, moved.ring) == ("r1", self.ring())
        assert isinstance(world.route(frontend, "r2", key=mine, epoch=2), wire.Grant)
        (ack,) = world.beat(frontend)
        assert ack.ring_epoch == 2

    def test_an_owner_that_knows_a_later_ring_is_believed(self, world):
        world.worker()
        frontend = world.frontend()
        _, others = self.keys()
        world.set_policy(RouterPolicySpec(), ring=self.ring())
        assert isinstance(world.route(frontend, "r1", key=others, epoch=3), wire.Grant)

    def test_waiting_turns_whose_key_moved_are_sent_on_and_leases_stay(self, world):
        frontend = world.frontend()
        mine, others = self.keys()
        for name, key in (("r1", mine), ("r2", others)):
            world.route(frontend, name, key=key)
        world.set_policy(RouterPolicySpec(), ring=self.ring())
        (moved,) = world.take(wire.Moved, frontend)
        assert moved.request == "r2"
        assert world.numbers["turns_waiting"] == 1
        world.worker()
        assert world.numbers["leases"] == 1
        world.set_policy(
            RouterPolicySpec(), revision=2, ring=wire.Ring(3, [("router-1", "tcp://b")])
        )
        assert world.numbers["leases"] == 1

    def test_an_older_epoch_or_an_empty_ring_changes_nothing(self, world):
        world.set_policy(RouterPolicySpec(), ring=self.ring(5))
        world.set_policy(RouterPolicySpec(), revision=2, ring=self.ring(4))
        world.set_policy(RouterPolicySpec(), revision=3, ring=wire.Ring(9, []))
        assert world.router.state.ring.epoch == 5

    def test_a_granted_turn_asked_again_gets_its_grant_though_its_key_moved(self, world):
        world.worker()
        frontend = world.frontend()
        _, others = self.keys()
        grant = world.grant(frontend, "r1", key=others)
        world.set_policy(RouterPolicySpec(), ring=self.ring())
        assert world.route(frontend, "r1", key=others) == grant


class TestStatus:
    def test_anyone_may_ask(self, world):
        for peer in (OPERATOR, world.frontend(), world.worker()):
            (status,) = world.say(peer, wire.StatusRequest())
            assert status.id == "router-0"
        assert status.facts["role"] == "router"
        assert status.facts["incarnation"] == "77"
        expected = {
            "leases", "promises", "turns_waiting", "workers_ready", "workers_known", "owners",
            "index_blocks", "sessions", "policy_revision", "pending_prefill_tokens", "decode_blocks",
        }  # fmt: skip
        assert expected <= status.numbers.keys()

    def test_the_operator_may_say_hello_and_be_heard(self, world):
        (welcome,) = world.say(OPERATOR, wire.Hello("operator", "operator", 1))
        assert isinstance(welcome, wire.Welcome)
        (ack,) = world.beat(OPERATOR)
        assert ack.known

    def test_drained_is_what_a_router_always_is(self, world):
        (status,) = world.say(OPERATOR, wire.Drain(5.0))
        assert status == wire.DrainStatus("drained", 0)

    def test_messages_that_mean_nothing_here_are_counted(self, world):
        world.say(OPERATOR, wire.Fault("internal", "x"))
        world.say(world.frontend(), wire.Fault("internal", "x"))
        world.say(world.worker(), wire.Fault("internal", "x"))
        assert world.numbers["unexpected_messages"] == 3

    def test_other_routers_load_counts_and_ones_own_row_does_not(self, world):
        worker = world.worker()
        rows = [wire.RouterLoad(3, 50, 5, 64_000), wire.RouterLoad(4, 2, 1, 100)]
        world.load(worker, running=3, steps=1, kv_used={"device": 40, "host": 3}, routers=rows)
        load = world.router.state.loads[0]
        assert (load.foreign_active, load.foreign_blocks, load.used_blocks) == (3, 2, 10.0)
        assert (load.active, load.decode_blocks) == (3, 2)


def test_after_four_billion_leases_ids_go_on_growing(world):
    world.worker()
    frontend = world.frontend()
    state = world.router.state
    state._serial = _MOST_SERIALS - 1
    first, second = world.grant(frontend, "r1").lease, world.grant(frontend, "r2").lease
    assert second > first
    assert len({first, second}) == 2
    assert state.incarnation == 78


def test_sweeping_a_dropped_worker_gets_time_until_it_is_done(world):
    big = world.worker("big")
    world.worker("other")
    chain = list(range(1, 6001))
    world.stored(big, 0, *chain)
    world.say(big, wire.Bye(1))
    assert world.numbers["index_blocks"] == 6000
    world.wait(0.5)
    assert world.numbers["index_blocks"] == 0
    deadline = world.router.next_deadline(world.now)
    assert deadline is not None
    assert deadline > world.now + 0.05
