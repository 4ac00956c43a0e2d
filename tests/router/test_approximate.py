"""Workers without KV events: what they hold is learned from grants, and people are told."""

from __future__ import annotations

from array import array

import pytest

from fermata.core.spec import KvSpec, RouterPolicySpec
from fermata.router.approximate import ApproximateIndex
from fermata.wire import messages as wire

EVENTS = ["kv_events"]


def run(world, frontend, request: str, *chain: int, **fields) -> wire.Grant:
    """A turn from Route to its end."""
    grant = world.grant(frontend, request, *chain, **fields)
    world.progress(frontend, grant.lease, "accepted")
    world.progress(frontend, grant.lease, "prefilled")
    world.progress(frontend, grant.lease, "finished", event_sequence=-1)
    return grant


def test_a_worker_without_events_is_known_by_what_was_sent_there(world):
    world.worker("w0", features=[])
    world.worker("w1", features=[])
    frontend = world.frontend()
    first = run(world, frontend, "r1", 1, 2, 3)
    assert first.matched == {}
    again = run(world, frontend, "r2", 1, 2, 3, 4)
    assert (again.worker, again.matched) == (first.worker, {"device": 3})
    assert world.numbers["approximate_records"] == 1, "the longer one covers the shorter"


def test_its_name_is_told_once_and_stays_in_the_facts(world):
    world.worker("mute", features=[])
    world.worker("w1", features=EVENTS)
    world.worker("mute", incarnation=2, features=[])
    (warning,) = world.router.take_warnings()
    assert "worker=mute" in warning
    assert world.router.take_warnings() == []
    status = world.router.status(world.now)
    assert status.facts["workers_without_events"] == "mute"
    assert status.numbers["workers_without_events"] == 1


def test_a_worker_that_sends_events_unannounced_is_believed(world):
    worker = world.worker("w0", features=[])
    frontend = world.frontend()
    run(world, frontend, "r1", 1, 2, 3)
    world.stored(worker, 0, 9)
    assert run(world, frontend, "r2", 1, 2, 3).matched == {}
    assert run(world, frontend, "r3", 9).matched == {"device": 1}
    assert world.numbers["workers_without_events"] == 0


def test_what_was_never_prefilled_is_not_learned(world):
    world.worker("w0", features=[])
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", 1, 2)
    world.progress(frontend, grant.lease, "accepted")
    world.progress(frontend, grant.lease, "cancelled")
    assert world.grant(frontend, "r2", 1, 2).matched == {}


def test_events_are_switched_off_and_on_live(world):
    worker = world.worker("w0", features=EVENTS)
    frontend = world.frontend()
    world.stored(worker, 0, 1, 2)
    assert run(world, frontend, "r1", 1, 2).matched == {"device": 2}
    assert world.set_policy(RouterPolicySpec(kv=KvSpec(events=False)), revision=1).applied
    assert run(world, frontend, "r2", 1, 2).matched == {}
    assert run(world, frontend, "r3", 1, 2).matched == {"device": 2}
    world.stored(worker, 2, 7)
    world.beat(worker, events=[2])
    assert world.numbers["kv_unwanted"] == 1
    assert world.numbers.get("kv_gaps", 0) == 0, "nobody counts what nobody wants"
    world.take(wire.SnapshotRequest)
    assert world.set_policy(RouterPolicySpec(), revision=2).applied
    world.wait(2)
    world.beat(worker, events=[2])
    (ask,) = world.take(wire.SnapshotRequest, worker)[-1:]
    world.snapshot(worker, ask, [(1, 2), (7,)], sequence=2)
    assert run(world, frontend, "r4", 7).matched == {"device": 1}
    assert world.numbers["approximate_records"] == 0


def test_a_snapshot_is_not_indexed_while_events_are_off(make_world):
    world = make_world(policy=RouterPolicySpec(kv=KvSpec(events=False)))
    worker = world.worker("w0", features=EVENTS, snapshot=False)
    (ask,) = world.take(wire.SnapshotRequest, worker)
    world.snapshot(worker, ask, [(1, 2)], sequence=5)
    assert world.numbers["workers_ready"] == 1
    assert run(world, world.frontend(), "r1", 1, 2).matched == {}


def test_no_more_is_remembered_than_the_rank_holds(world):
    world.worker("w0", features=[], kv_blocks={"device": 16})  # four routing blocks
    frontend = world.frontend()
    run(world, frontend, "r1", 1, 2)
    run(world, frontend, "r2", 3, 4)
    run(world, frontend, "r3", 1, 2)
    run(world, frontend, "r4", 5)
    assert run(world, frontend, "r5", 1, 2).matched == {"device": 2}
    assert run(world, frontend, "r6", 3, 4).matched == {}, "used longest ago"
    assert world.numbers["approximate_displaced"] >= 1


def test_with_ttl_a_prefix_is_forgotten_some_time_after_its_last_use(make_world):
    spec = KvSpec(approximate="Ttl", approximate_ttl_s=100.0)
    world = make_world(policy=RouterPolicySpec(kv=spec))
    worker = world.worker("w0", features=[])
    frontend = world.frontend()

    def alive_for(seconds: float) -> None:
        for _ in range(int(seconds)):
            world.wait(1)
            world.beat(worker, events=[-1])
            world.beat(frontend)

    run(world, frontend, "r1", 1, 2)
    alive_for(90)
    assert run(world, frontend, "r2", 1, 2).matched == {"device": 2}
    alive_for(90)
    assert run(world, frontend, "r3", 1, 2).matched == {"device": 2}, "use keeps it"
    alive_for(102)
    assert run(world, frontend, "r4", 1, 2).matched == {}
    assert world.numbers["approximate_aged_out"] == 1


@pytest.mark.parametrize("rule", ["Ttl", "Lru"])
def test_a_worker_that_goes_takes_what_was_learned_of_it_along(make_world, rule):
    world = make_world(policy=RouterPolicySpec(kv=KvSpec(approximate=rule)))
    worker = world.worker("w0", features=[])
    frontend = world.frontend()
    run(world, frontend, "r1", 1, 2)
    world.say(worker, wire.Bye(1))
    assert world.numbers["approximate_records"] == 0


def test_an_age_counts_from_the_switch_to_ttl_and_stops_counting_at_the_switch_back():
    index = ApproximateIndex(KvSpec(), width_s=1.0)
    index.open(0, capacity_blocks=100)
    index.learn(0, array("Q", [1, 2]), 0.0)
    assert index.next_expiry() is None
    index.apply(KvSpec(approximate="Ttl", approximate_ttl_s=10.0), 50.0)
    assert index.next_expiry() == 60.0
    index.apply(KvSpec(), 55.0)
    index.expire(1000.0)
    assert len(index) == 1
