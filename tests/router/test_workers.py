"""Life of a worker: registration, snapshots, gaps, stalls, drain, death."""

from __future__ import annotations

import pytest

from fermata.wire import messages as wire
from fermata.wire.roles import Peer


def hello(world, peer: Peer, **info):
    return world.worker(peer.id, incarnation=peer.incarnation, snapshot=False, **info)


class TestRegistration:
    def test_hello_is_answered_with_welcome_fences_and_requests_for_snapshots(self, world):
        f = world.frontend("dead", incarnation=4)
        world.say(f, wire.Bye(4))
        world.sent.clear()
        worker = world.worker("w0", ranks=2, snapshot=False)
        kinds = [send.message for send in world.sent if send.to == worker]
        assert [type(kind) for kind in kinds] == [
            wire.Welcome,
            wire.Fence,
            wire.SnapshotRequest,
            wire.SnapshotRequest,
        ]
        welcome, fence, *asks = kinds
        assert (welcome.router, welcome.number, welcome.incarnation) == ("router-0", 3, 77)
        assert (fence.owner, fence.incarnation) == ("dead", 4)
        assert [(ask.rank, ask.request) for ask in asks] == [(0, 1), (1, 1)]

    def test_it_takes_turns_once_all_its_ranks_snapshots_are_in(self, world):
        worker = world.worker("w0", ranks=2, snapshot=False)
        frontend = world.frontend()
        assert isinstance(world.route(frontend, "r1"), wire.Hold)
        first, second = world.take(wire.SnapshotRequest, worker)
        world.snapshot(worker, first, [[1, 2]], sequence=4)
        assert world.numbers["workers_ready"] == 0
        world.snapshot(worker, second)
        assert world.numbers["workers_ready"] == 1
        assert world.router.status(world.now).facts["workers"] == "w0"
        (grant,) = world.take(wire.Grant, frontend)
        assert grant.worker == "w0"
        assert world.grant(frontend, "r2", 1, 2).matched == {"device": 2}

    def test_it_takes_turns_without_snapshots_after_a_while(self, world):
        world.worker("ready")
        late = world.worker("late", snapshot=False)
        assert world.numbers["workers_ready"] == 1
        for _ in range(6):
            world.wait(1.0)
            world.beat(late)
        assert world.numbers["workers_ready"] == 1, "the other one fell silent"
        assert world.numbers["workers_known"] == 1

    def test_hello_again_is_idempotent_and_asks_again_for_what_is_missing(self, world):
        worker = world.worker(ranks=2, snapshot=False)
        world.snapshot(worker, world.take(wire.SnapshotRequest, worker)[0])
        world.worker(ranks=2, snapshot=False)
        (again,) = world.take(wire.SnapshotRequest, worker)
        assert (again.rank, again.request) == (1, 2)
        world.say(worker, wire.SnapshotChunk(1, 1, 0, True, -1, []))
        assert world.numbers["workers_ready"] == 0, "the first request is void"
        world.snapshot(worker, again)
        assert world.numbers["workers_ready"] == 1
        assert world.numbers["workers_registered"] == 1

    def test_another_boot_of_it_ends_what_its_predecessor_had(self, world):
        world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1", 1, 2).lease
        world.worker(incarnation=2)
        assert world.revoked(frontend) == {"worker_lost": [lease]}
        assert world.numbers["workers_known"] == 1
        assert world.grant(frontend, "r2", 1, 2).matched == {}

    def test_an_earlier_boot_of_it_is_refused_and_not_heard(self, world):
        world.worker(incarnation=2)
        old = world.worker(incarnation=1, snapshot=False)
        (fault,) = world.take(wire.Fault, old)
        assert fault.code == "unknown_peer"
        world.stored(old, 0, 1, 2)
        (ack,) = world.beat(old)
        assert not ack.known
        assert world.numbers["index_pairs"] == 0

    @pytest.mark.parametrize(
        "info",
        [
            {"routing_block_size": 32},
            {"block_size": 48},
            {"block_size": 0},
            {"ranks": 0},
            {"ranks": 10_000},
        ],
    )
    def test_one_that_does_not_fit_the_deployment_is_told_why(self, world, info):
        worker = world.worker(snapshot=False, **info)
        (fault,) = world.take(wire.Fault, worker)
        assert str(next(iter(info.values()))) in fault.message
        assert world.numbers["workers_known"] == 0
        assert world.numbers["workers_refused"] == 1

    def test_hello_without_what_it_can_do_or_under_another_name_is_refused(self, world):
        peer = Peer(wire.Role.WORKER, "w0", 1)
        (fault,) = world.say(peer, wire.Hello("worker", "w0", 1))
        assert isinstance(fault, wire.Fault)
        (fault,) = world.say(peer, wire.Hello("worker", "other", 1))
        assert isinstance(fault, wire.Fault)
        (fault,) = world.say(peer, wire.Hello("frontend", "w0", 1))
        assert isinstance(fault, wire.Fault)

    def test_strangers_are_asked_to_say_hello_and_otherwise_not_heard(self, world):
        peer = Peer(wire.Role.WORKER, "w9", 1)
        (ack,) = world.beat(peer)
        assert not ack.known
        assert world.say(peer, wire.LoadReport([])) == []
        assert world.say(peer, wire.Bye(1)) == []
        frontend = Peer(wire.Role.FRONTEND, "f9", 1)
        ack = world.route(frontend, "r1")
        assert isinstance(ack, wire.HeartbeatAck)
        assert not ack.known
        assert world.numbers["strangers"] == 4


class TestEvents:
    def test_events_are_applied_in_order(self, world):
        worker = world.worker()
        frontend = world.frontend()
        world.stored(worker, 0, 1, 2)
        events = [
            wire.KvStored(2, 2),
            wire.KvRemoved(1),
            wire.KvStored(3, 1, "host"),
            wire.KvStored(2, 0),
        ]
        frame = memoryview(b"".join(n.to_bytes(8, "little") for n in (3, 4, 4, 4)))
        world.say(worker, wire.KvEvents(0, 1, events), frame)
        assert world.grant(frontend, "r1", 1, 2, 3, 4).matched == {"device": 3}
        assert world.numbers["index_pairs"] == 4
        world.say(worker, wire.KvEvents(0, 5, [wire.KvCleared("host")]))
        assert world.numbers["index_pairs"] == 3
        world.say(worker, wire.KvEvents(0, 6, [wire.KvCleared()]))
        assert world.numbers["index_pairs"] == 0

    def test_repeats_are_applied_once_and_overlaps_from_where_they_are_new(self, world):
        worker = world.worker()
        world.stored(worker, 0, 1, 2)
        world.say(worker, wire.KvEvents(0, 1, [wire.KvRemoved(1)]), b"\2" + b"\0" * 7)
        world.stored(worker, 0, 1, 2)
        assert world.numbers["index_pairs"] == 1
        assert world.numbers["kv_ignored"] == 1
        both = [wire.KvRemoved(1), wire.KvStored(1, 1)]
        world.say(worker, wire.KvEvents(0, 1, both), b"\2" + b"\0" * 7 + b"\7" + b"\0" * 7)
        assert world.numbers["index_pairs"] == 2
        assert world.numbers.get("kv_gaps", 0) == 0

    def test_a_gap_drops_the_rank_and_asks_for_a_snapshot(self, world):
        worker = world.worker()
        frontend = world.frontend()
        world.stored(worker, 0, 1, 2)
        world.wait(1.5)
        world.stored(worker, 2, 5)
        (ask,) = world.take(wire.SnapshotRequest, worker)[1:]
        assert ask.request == 2
        assert world.numbers["kv_gaps"] == 1
        assert world.grant(frontend, "r1", 1, 2).matched == {}, "nothing counts as cached meanwhile"
        assert world.numbers["workers_ready"] == 1, "it goes on taking turns"
        world.snapshot(worker, ask, [[1, 2], [5]], sequence=2)
        assert world.numbers["index_pairs"] == 3
        world.stored(worker, 3, 6, parent=5)
        assert world.numbers["index_pairs"] == 4

    def test_a_lost_tail_is_found_by_the_next_heartbeat(self, world):
        worker = world.worker()
        world.stored(worker, 0, 1, 2)
        world.wait(1.0)
        world.beat(worker, events=[0])
        assert world.take(wire.SnapshotRequest, worker)[1:] == []
        world.beat(worker, events=[3])
        (ask,) = world.take(wire.SnapshotRequest, worker)
        world.snapshot(worker, ask, [[1, 2]], sequence=3)
        world.wait(1.0)
        world.beat(worker, events=[3])
        assert world.take(wire.SnapshotRequest, worker) == []

    def test_a_rank_that_counts_anew_is_asked_for_a_snapshot(self, world):
        worker = world.worker()
        world.stored(worker, 0, 1, 2)
        world.wait(1.0)
        world.beat(worker, events=[-1])
        assert len(world.take(wire.SnapshotRequest, worker)) == 2

    @pytest.mark.parametrize(
        "event",
        [wire.KvStored(None, 3), wire.KvStored(None, -1), wire.KvRemoved(1), wire.KvStored(-1, 2)],
    )
    def test_senseless_events_are_a_gap(self, world, event):
        worker = world.worker()
        world.wait(1.5)
        world.take(wire.SnapshotRequest)
        frame = b"\1" + b"\0" * 7 + b"\2" + b"\0" * 7
        world.say(worker, wire.KvEvents(0, 0, [event]), frame)
        assert world.numbers["kv_gaps"] == 1
        assert len(world.take(wire.SnapshotRequest, worker)) == 1

    def test_a_rank_that_breaks_again_and_again_is_asked_once_a_second(self, world):
        worker = world.worker()
        world.wait(1.5)
        world.take(wire.SnapshotRequest)
        for first in (5, 9, 13):
            world.stored(worker, first, 1)
            for ask in world.take(wire.SnapshotRequest, worker):
                world.snapshot(worker, ask, sequence=0)
        assert world.numbers["kv_gaps"] == 2, "the last message came while it waited to be asked"
        assert world.take(wire.SnapshotRequest, worker) == []
        world.wait(1.0)
        world.beat(worker, events=[13])
        (ask,) = world.take(wire.SnapshotRequest, worker)
        world.snapshot(worker, ask, [[1]], sequence=13)
        assert world.numbers["index_pairs"] == 1

    def test_events_of_a_rank_it_does_not_have_are_counted(self, world):
        worker = world.worker()
        world.stored(worker, 0, 1, rank=1)
        world.say(worker, wire.SnapshotChunk(-1, 1, 0, True, -1, []))
        world.load(worker, rank=7)
        assert world.numbers["unknown_ranks"] == 3


class TestSnapshots:
    def chunk(self, ask, index: int, *run: int, last: bool = False, sequence: int = 5, parent=None):
        frame = b"".join(n.to_bytes(8, "little") for n in run)
        stored = [wire.KvStored(parent, len(run))]
        return (
            wire.SnapshotChunk(ask.rank, ask.request, index, last, sequence, stored),
            frame,
        )

    def start(self, world):
        worker = world.worker(snapshot=False)
        world.wait(1.5)
        (ask,) = world.take(wire.SnapshotRequest, worker)
        return worker, ask

    def test_chunks_are_swapped_in_with_the_last_and_events_between_them_join(self, world):
        worker, ask = self.start(world)
        world.say(worker, *self.chunk(ask, 0, 1, 2))
        world.stored(worker, 5, 2, parent=1)
        world.say(worker, wire.KvEvents(0, 6, [wire.KvRemoved(1)]), (2).to_bytes(8, "little"))
        assert world.router.state.index.match(memoryview(b"\1" + b"\0" * 7).cast("Q")) == {}
        world.say(worker, *self.chunk(ask, 1, 3, last=True, parent=2))
        assert world.numbers["workers_ready"] == 1
        feed = next(iter(world.router.state.workers)).feeds[0]
        assert (feed.is_live, feed.applied) == (True, 6)
        assert world.router.state.index.held(0, "device") == {1, 3}

    def test_a_gap_in_what_was_kept_asks_again(self, world):
        worker, ask = self.start(world)
        world.stored(worker, 7, 9)
        world.say(worker, *self.chunk(ask, 0, 1, 2, last=True))
        (again,) = world.take(wire.SnapshotRequest, worker)
        assert again.request == 2
        assert world.numbers["index_pairs"] == 0

    def test_a_lost_chunk_or_one_of_another_moment_asks_again(self, world):
        worker, ask = self.start(world)
        world.say(worker, *self.chunk(ask, 1, 3, last=True))
        (again,) = world.take(wire.SnapshotRequest, worker)
        world.beat(worker)
        world.wait(1.5)
        world.say(worker, *self.chunk(again, 0, 1))
        world.say(worker, *self.chunk(again, 1, 2, parent=1, sequence=6))
        (third,) = world.take(wire.SnapshotRequest, worker)
        world.say(worker, *self.chunk(again, 2, 4, last=True))
        assert world.numbers["index_pairs"] == 0
        world.snapshot(worker, third, [[1]])
        assert world.numbers["index_pairs"] == 1

    def test_a_chunk_whose_frame_does_not_fit_asks_again(self, world):
        worker, ask = self.start(world)
        message, _ = self.chunk(ask, 0, 1, 2, last=True)
        world.say(worker, message, b"")
        assert len(world.take(wire.SnapshotRequest, worker)) == 1
        assert world.numbers["kv_broken"] == 1

    def test_what_does_not_arrive_is_asked_for_again_by_and_by(self, world):
        worker, _ask = self.start(world)
        world.beat(worker, events=[0])
        assert world.take(wire.SnapshotRequest, worker) == []
        for _ in range(4):
            world.wait(1.0)
            world.beat(worker, events=[0])
        (again,) = world.take(wire.SnapshotRequest, worker)
        assert again.request == 2

    def test_kept_events_are_bounded_and_the_loss_is_found(self, world):
        worker, ask = self.start(world)
        from fermata.router import kv_feed

        most = kv_feed._MOST_KEPT_MESSAGES
        for i in range(most + 1):
            world.router.receive(
                worker,
                wire.KvEvents(0, 6 + i, [wire.KvCleared()]),
                memoryview(b""),
                world.now,
            )
        feed = next(iter(world.router.state.workers)).feeds[0]
        assert len(feed._kept) == 1
        world.say(worker, *self.chunk(ask, 0, 1, 2, last=True))
        assert len(world.take(wire.SnapshotRequest, worker)) == 1


class TestDeath:
    def test_a_silent_worker_is_dead_after_its_timeout(self, world):
        worker = world.worker("a")
        alive = world.worker("b")
        frontend = world.frontend()
        world.stored(worker, 0, 1, 2, 3, 4, 5)
        lease = world.grant(frontend, "r1", 1, 2, 3, 4, 5, session="s").lease
        world.progress(frontend, lease, "accepted")
        for _ in range(2):
            world.wait(1.4)
            world.beat(alive)
            world.beat(frontend, seen=lease, leases=[lease])
        assert world.numbers["workers_known"] == 2
        world.wait(0.4)
        assert world.revoked(frontend) == {"worker_lost": [lease]}
        numbers = world.numbers
        assert (numbers["workers_known"], numbers["leases"], numbers["index_pairs"]) == (1, 0, 0)
        assert numbers["sessions"] == 0
        assert world.grant(frontend, "r1", 1, 2, 3, 4, 5, attempt=1, avoid=["a"]).worker == "b"
        (ack,) = world.beat(worker)
        assert not ack.known

    def test_bye_of_a_draining_worker_is_not_a_death(self, world):
        worker = world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.say(worker, wire.DrainStatus("draining", 1))
        world.say(worker, wire.Bye(1))
        assert world.revoked(frontend) == {"worker_draining": [lease]}
        lease = None
        world.worker(incarnation=2)
        lease = world.grant(frontend, "r2").lease
        world.say(Peer(wire.Role.WORKER, "w0", 2), wire.Bye(2))
        assert world.revoked(frontend) == {"worker_lost": [lease]}

    def test_a_router_that_did_not_run_takes_nobody_for_dead(self, world):
        world.worker()
        world.frontend()
        world.now += 60.0
        world._keep(world.router.tick(world.now))
        assert world.numbers["workers_known"] == 1
        assert world.numbers["owners"] == 1
        assert world.numbers["late_ticks"] == 1
        world.wait(3.0)
        assert world.numbers["workers_known"] == 0

    def test_limits_are_real_seconds_whatever_the_speedup(self, make_world):
        world = make_world(speedup=10.0)
        world.worker()
        world.wait(29.0)
        assert world.numbers["workers_known"] == 1
        world.wait(2.0)
        assert world.numbers["workers_known"] == 0


class TestDrain:
    def test_a_draining_worker_gets_no_more_and_keeps_what_it_has(self, world):
        worker = world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1").lease
        world.progress(frontend, lease, "accepted")
        world.say(worker, wire.DrainStatus("draining", 1))
        assert world.numbers["leases"] == 1
        assert isinstance(world.route(frontend, "r2"), wire.Hold)
        world.progress(frontend, lease, "finished")
        world.say(worker, wire.DrainStatus("serving", 0))
        (grant,) = world.take(wire.Grant, frontend)[1:]
        assert grant.request == "r2"


class TestStall:
    def test_requests_and_no_step_for_the_timeout_is_a_stall(self, world):
        worker = world.worker()
        frontend = world.frontend()
        lease = world.grant(frontend, "r1", session="s").lease
        world.progress(frontend, lease, "accepted")
        for second in range(31):
            assert world.numbers["leases"] == (second < 30)
            world.beat(worker)
            world.beat(frontend, seen=lease, leases=[lease])
            world.load(worker, running=1, steps=7)
            world.wait(1.0)
        assert world.revoked(frontend) == {"worker_stalled": [lease]}
        assert world.revoked(worker) == {"worker_stalled": [lease]}
        numbers = world.numbers
        assert (numbers["workers_known"], numbers["workers_ready"], numbers["stalls"]) == (1, 0, 1)
        assert numbers["sessions"] == 0
        world.load(worker, running=1, steps=7)
        world.beat(worker)
        assert isinstance(world.route(frontend, "r1", attempt=1, avoid=["w0"]), wire.Hold)
        world.load(worker, running=1, steps=8)
        (grant,) = world.take(wire.Grant, frontend)[1:]
        assert (grant.request, grant.attempt) == ("r1", 1)

    def test_steps_or_idleness_are_no_stall(self, world):
        worker = world.worker()
        for second in range(65):
            world.beat(worker)
            world.load(worker, running=1 if second < 33 else 0, steps=min(second, 33) // 8)
            world.wait(1.0)
        assert world.numbers["workers_ready"] == 1

    def test_one_rank_of_two_may_stall(self, world):
        worker = world.worker(ranks=2)
        frontend = world.frontend()
        for _ in range(31):
            world.beat(worker)
            world.beat(frontend)
            world.load(worker, rank=1, running=1, steps=7)
            world.wait(1.0)
        assert world.numbers["workers_ready"] == 1
        assert {world.grant(frontend, f"r{i}").rank for i in range(4)} == {0}
