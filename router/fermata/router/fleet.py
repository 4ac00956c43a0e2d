"""Life of the workers: registration with snapshots, heartbeats, events, load, drain, stall and death."""

from __future__ import annotations

from math import inf

import msgspec

from fermata.core.ids import OwnerId, Slot, WorkerId
from fermata.router.handover import Handovers
from fermata.router.kv_feed import Heard, RankFeed
from fermata.router.leasing import Leasing, RevokeReason
from fermata.router.model import NO_HASHES
from fermata.router.state import RouterState
from fermata.router.worker import Steps, Worker
from fermata.wire.messages import (
    Bye,
    Demand,
    DrainStatus,
    Fault,
    Fence,
    Heartbeat,
    Hello,
    KvEvents,
    KvRemoved,
    KvStored,
    LeaseListRequest,
    LoadReport,
    RankDemand,
    RankLoad,
    SnapshotChunk,
    SnapshotRequest,
    WorkerInfo,
)
from fermata.wire.roles import Peer

_MOST_RANKS = 256


class Fleet:
    def __init__(self, state: RouterState, leasing: Leasing, handovers: Handovers) -> None:
        self._state = state
        self._leasing = leasing
        self._handovers = handovers
        self._waiting_tokens = 0
        self._waiting_counted_at = -inf

    def hello(self, peer: Peer, message: Hello, now: float) -> bool:
        """False: it can not be taken, and was told why."""
        state = self._state
        known = state.workers.by_id(WorkerId(peer.id))
        problem = self._problem(message.worker, known, peer)
        if problem:
            state.counters["workers_refused"] += 1
            state.effects.send(peer, Fault("unknown_peer", problem))
            return False
        assert message.worker is not None
        if known is not None and known.peer != peer:
            self.lose(known, "worker_lost", now)
            known = None
        if known is None:
            known = self._register(peer, message.worker, now)
        state.workers.silence.set(known.id, now + self._timeout_s)
        return True

    def introduce(self, peer: Peer, now: float) -> None:
        """What follows the Welcome: who is fenced, and the snapshots that are not in."""
        state = self._state
        worker = state.workers.get(peer)
        assert worker is not None
        for owner, incarnation in state.owners.fences:
            state.effects.send(peer, Fence(OwnerId(owner), incarnation))
        for feed in worker.feeds:
            if not feed.is_live:
                self._ask(worker, feed, now)

    def _problem(self, info: WorkerInfo | None, known: Worker | None, peer: Peer) -> str:
        if info is None:
            return "a worker's Hello says what it can do"
        if known is not None and known.peer.incarnation > peer.incarnation:
            return f"a later boot of {peer.id} is registered"
        if not 1 <= info.ranks <= _MOST_RANKS:
            return f"{info.ranks} ranks, expected 1 to {_MOST_RANKS}"
        size = self._state.config.block_size
        if info.routing_block_size != size:
            return f"routing block size {info.routing_block_size}, this deployment's is {size}"
        if info.block_size < 1 or size % info.block_size:
            return f"block size {info.block_size} does not divide the routing block size {size}"
        return ""

    def _register(self, peer: Peer, info: WorkerInfo, now: float) -> Worker:
        state = self._state
        name = WorkerId(peer.id)
        slots = self._slots(name, info.ranks, now)
        worker = Worker(
            id=name,
            peer=peer,
            info=info,
            slots=slots,
            feeds=[
                RankFeed(slot=slot, rank=rank, index=state.index) for rank, slot in enumerate(slots)
            ],
            steps=[Steps() for _ in slots],
        )
        state.workers.add(worker)
        for slot in slots:
            state.loads.open(slot, info)
            capacity = state.loads[slot].capacity_blocks * self._block_size
            state.shares.open(slot, capacity=capacity)
            state.programs.resize_slot(slot, capacity or None, model=info.model)
        worker.sends_events = "kv_events" in info.features
        if not worker.sends_events:
            state.warn_once(
                f"worker sends no KV events, its prefixes are learned from own grants worker={name}"
            )
        self._choose_index(worker, now)
        self._handovers.registered(worker, now)
        wait_s = state.real(state.liveness.snapshot_wait_s)
        state.workers.snapshots.set(name, now + wait_s)
        state.counters["workers_registered"] += 1
        return worker

    def _slots(self, worker: WorkerId, ranks: int, now: float) -> list[int]:
        """Those that were kept for its claimed leases, and new ones."""
        state = self._state
        expected = state.workers.expected.pop(worker, None)
        state.workers.arrivals.cancel(worker)
        kept = {} if expected is None else expected.slots
        for rank in [rank for rank in kept if rank >= ranks]:
            self._close(kept.pop(rank), "worker_lost", now)
        return [
            kept[rank] if rank in kept else state.open_slot(Slot(worker, rank))
            for rank in range(ranks)
        ]

    def policy_changed(self, now: float) -> None:
        """O(workers), and what of the index has to be built anew."""
        self._state.approximate.apply(self._state.policy.kv, now)
        for worker in self._state.workers:
            self._choose_index(worker, now)

    def _choose_index(self, worker: Worker, now: float) -> None:
        """What its ranks hold is known from their events, or learned where there are none."""
        state = self._state
        knows = state.policy.kv.events and worker.sends_events
        for feed in worker.feeds:
            learns = feed.slot in state.approximate
            if knows and learns:
                state.approximate.close(feed.slot)
                if feed.is_live:
                    self._restart(worker, feed, now)
            elif not knows and not learns:
                state.index.drop(feed.slot)
                state.leases.promises.drop(feed.slot)  # they wait for events
                state.approximate.open(
                    feed.slot, capacity_blocks=state.loads[feed.slot].capacity_blocks
                )

    def _has_events(self, worker: Worker) -> None:
        """It is believed by what it does, whatever it said that it can."""
        if not worker.sends_events:
            worker.sends_events = True
            self._state.counters["workers_with_unannounced_events"] += 1
            for slot in worker.slots:  # its feeds missed nothing: these are the first
                self._state.approximate.close(slot)

    def heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        state = self._state
        state.workers.silence.set(worker.id, now + self._timeout_s)
        for feed, sequence in zip(worker.feeds, message.events, strict=False):
            if state.policy.kv.events and not feed.last_emitted(sequence):
                state.counters["kv_gaps"] += 1
                self._restart(worker, feed, now)
            elif feed.must_ask or (
                not feed.is_live
                and now - feed.asked_at >= state.real(state.liveness.snapshot_wait_s)
            ):
                self._ask(worker, feed, now)
        ledger = state.leases.worker_ledger(worker.id)
        agrees = ledger.agrees(count=message.count, xor=message.xor)
        if worker.doubt.heard(agrees=agrees):
            state.effects.send(worker.peer, LeaseListRequest())

    def bye(self, worker: Worker, message: Bye, now: float) -> None:
        self.lose(worker, "worker_draining" if worker.is_draining else "worker_lost", now)

    def lose(self, worker: Worker, reason: RevokeReason, now: float) -> None:
        """It is gone: so are its leases, its slots and all that was known of them."""
        state = self._state
        state.counters["workers_lost"] += 1
        state.workers.remove(worker)
        for slot in worker.slots:
            self._close(slot, reason, now)

    def _close(self, slot: int, reason: RevokeReason, now: float) -> None:
        state = self._state
        self._leasing.revoke(state.leases.of_slot(slot), reason, now, workers=False)
        state.close_slot(slot)
        # Sessions bound to it wait for any slot now, and perhaps everybody for any worker.
        state.must_judge_all = True

    def drain_status(self, worker: Worker, message: DrainStatus) -> None:
        worker.is_draining = message.state != "serving"
        self._renew(worker)

    def events(self, worker: Worker, message: KvEvents, hashes: memoryview, now: float) -> None:
        feed = self._feed(worker, message.rank)
        if feed is None:
            return
        if not self._state.policy.kv.events:
            self._state.counters["kv_unwanted"] += 1
            return
        if message.events:
            self._has_events(worker)
        heard = feed.events(message, hashes)
        if heard is Heard.APPLIED:
            self._evicted(feed.slot, message, hashes)
        self._heard(worker, feed, heard, now)

    def _evicted(self, slot: int, message: KvEvents, hashes: memoryview) -> None:
        """Idle chains whose eviction began. O(blocks removed)."""
        at = 0
        for event in message.events:
            if isinstance(event, KvRemoved) and event.tier == "device":
                self._state.programs.removed(slot, hashes[at : at + event.count])
            at += event.count if isinstance(event, KvStored | KvRemoved) else 0

    def chunk(self, worker: Worker, message: SnapshotChunk, hashes: memoryview, now: float) -> None:
        feed = self._feed(worker, message.rank)
        if feed is None:
            return
        if not self._state.policy.kv.events:
            message, hashes = msgspec.structs.replace(message, stored=[]), NO_HASHES
        elif message.stored:
            self._has_events(worker)
        self._heard(worker, feed, feed.chunk(message, hashes), now)
        self._handovers.remember(message.sessions, feed.slot, now)
        if not worker.is_admitted and worker.has_snapshots:
            self._admit(worker)

    def _feed(self, worker: Worker, rank: int) -> RankFeed | None:
        if 0 <= rank < len(worker.feeds):
            return worker.feeds[rank]
        self._state.counters["unknown_ranks"] += 1
        return None

    def _heard(self, worker: Worker, feed: RankFeed, heard: Heard, now: float) -> None:
        state = self._state
        state.counters[f"kv_{heard.value}"] += 1
        if heard is Heard.BROKEN:
            state.counters["kv_gaps"] += 1
            self._restart(worker, feed, now)
        elif feed.is_live:
            state.leases.promises.settle(feed.slot, feed.applied)

    def _restart(self, worker: Worker, feed: RankFeed, now: float) -> None:
        """A rank that breaks again at once is asked with its next heartbeat: its mistake shall not keep us busy."""
        feed.restart()
        if now - feed.asked_at >= self._state.real(self._state.liveness.heartbeat_s):
            self._ask(worker, feed, now)

    def _ask(self, worker: Worker, feed: RankFeed, now: float) -> None:
        self._state.effects.send(worker.peer, SnapshotRequest(feed.rank, feed.ask(now)))

    def _admit(self, worker: Worker) -> None:
        worker.is_admitted = True
        self._state.workers.snapshots.cancel(worker.id)
        self._renew(worker)

    def _renew(self, worker: Worker) -> None:
        if self._state.workers.renew(worker):
            self._state.must_judge_all = True

    def load(self, worker: Worker, message: LoadReport, now: float) -> None:
        for rank in message.ranks:
            if self._feed(worker, rank.rank) is not None:
                self._take_load(worker, rank, now)

    def _take_load(self, worker: Worker, rank: RankLoad, now: float) -> None:
        state = self._state
        slot = worker.slots[rank.rank]
        if state.loads.report(slot, rank):
            state.must_judge = True
        if state.shares.told(slot, tokens=rank.share_tokens, number=rank.share_number):
            state.must_judge = True
            if worker.info.kv_blocks.get("device"):
                state.programs.resize_slot(slot, state.shares.tokens(slot), model=worker.info.model)
        if worker.steps_seen(rank.rank, rank, now) and slot in worker.stalled:
            worker.stalled.discard(slot)
            self._renew(worker)
        if rank.running and slot not in worker.stalled:
            since = worker.steps[rank.rank].since
            state.workers.stalls.set(slot, since + state.real(state.liveness.stall_timeout_s))
        else:
            state.workers.stalls.cancel(slot)

    def demand(self, worker: Worker, now: float) -> Demand:
        """What the shares of its ranks are struck by."""
        state = self._state
        waiting = self._waiting_a_slot(now)
        return Demand(
            [
                RankDemand(
                    rank=rank,
                    charged_tokens=state.charged_tokens(slot),
                    waiting_tokens=waiting,
                    share_number=state.shares.number(slot),
                )
                for rank, slot in enumerate(worker.slots)
            ]
        )

    def _waiting_a_slot(self, now: float) -> int:
        """Tokens that wait for room, spread over the slots. Counted once for all workers that ask at about one time."""
        state = self._state
        if now - self._waiting_counted_at >= state.real(state.liveness.heartbeat_s) / 2:
            self._waiting_counted_at = now
            self._waiting_tokens = state.waiting_tokens()
        return -(-self._waiting_tokens // max(1, state.workers.ready.bit_count()))

    def tick(self, now: float) -> None:
        workers = self._state.workers
        for name in workers.silence.due(now):
            worker = workers.by_id(name)
            if worker is not None:
                self.lose(worker, "worker_lost", now)
        for name in workers.snapshots.due(now):
            worker = workers.by_id(name)
            if worker is not None:
                self._admit(worker)
        for slot in workers.stalls.due(now):
            self._stalled(slot, now)
        for name in workers.arrivals.due(now):
            for slot in workers.expected.pop(name).slots.values():
                self._close(slot, "worker_lost", now)

    def _stalled(self, slot: int, now: float) -> None:
        worker = self._state.workers.of_slot(slot)
        if worker is None or slot in worker.stalled:
            return
        self._state.counters["stalls"] += 1
        worker.stalled.add(slot)
        self._renew(worker)
        self._leasing.revoke(self._state.leases.of_slot(slot), "worker_stalled", now)
        self._state.affinity.lose_slot(slot)

    @property
    def _block_size(self) -> int:
        return self._state.config.block_size

    @property
    def _timeout_s(self) -> float:
        return self._state.real(self._state.liveness.worker_timeout_s)
