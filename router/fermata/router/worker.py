"""Workers as a router knows them, and which of their slots may take a turn.

    joining -> serving -> draining -> gone
                  |  ^
               stalled (by rank)

A worker joins with Hello and serves once the snapshots of all its ranks are in, or were waited for long enough. It is
gone when it says Bye, when it is silent, or when another boot of it says Hello. A rank that has requests and makes no
step is stalled: registered, and not eligible until it steps again.

A router that booted may hear of a worker from its leases' owners first; such a worker is *expected*: it has slots for
them and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fermata.core.ids import LeaseId, WorkerId
from fermata.router.expiry import Expiry
from fermata.router.kv_feed import RankFeed
from fermata.router.reconcile import Doubt
from fermata.wire.messages import RankLoad, WorkerInfo
from fermata.wire.roles import Peer


@dataclass(slots=True)
class Steps:
    """Of a rank's engine: how many, since when that many, and whether it has anything to step for."""

    count: int = -1
    since: float = 0.0
    is_running: bool = False


@dataclass(slots=True, eq=False)
class Worker:
    id: WorkerId
    peer: Peer
    info: WorkerInfo
    slots: list[int]
    feeds: list[RankFeed]
    steps: list[Steps]
    is_admitted: bool = False
    is_draining: bool = False
    stalled: set[int] = field(default_factory=set[int])
    """Slots."""
    sends_events: bool = False
    """It says so, or did. Else what its ranks have is learned from grants."""
    doubt: Doubt = field(default_factory=Doubt)
    lacking: set[LeaseId] = field(default_factory=set[LeaseId])
    """Accepted leases that its last list did not name."""

    @property
    def has_snapshots(self) -> bool:
        return all(feed.is_live for feed in self.feeds)

    def steps_seen(self, rank: int, load: RankLoad, now: float) -> bool:
        """True when the rank made a step, or has nothing to do."""
        steps = self.steps[rank]
        moved = load.steps != steps.count or not load.running
        if moved:
            steps.count, steps.since = load.steps, now
        steps.is_running = load.running > 0
        return moved


@dataclass(slots=True, eq=False)
class ExpectedWorker:
    id: WorkerId
    slots: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> slot."""


class Workers:
    """`ready` and `of_model` are masks over slots: those that may take a turn now, and all of a model's."""

    def __init__(self, *, width_s: float) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self.expected: dict[WorkerId, ExpectedWorker] = {}
        self._by_slot: dict[int, Worker] = {}
        self.ready = 0
        self.ready_count = 0
        self._models: dict[str, int] = {}
        self.silence: Expiry[WorkerId] = Expiry(width_s=width_s)
        self.snapshots: Expiry[WorkerId] = Expiry(width_s=width_s)
        self.stalls: Expiry[int] = Expiry(width_s=width_s)
        """By slot."""
        self.arrivals: Expiry[WorkerId] = Expiry(width_s=width_s)
        """Until when an expected worker may still say Hello."""

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def by_id(self, worker: WorkerId) -> Worker | None:
        return self._workers.get(worker)

    def get(self, peer: Peer) -> Worker | None:
        """None unless exactly this boot is registered."""
        worker = self._workers.get(WorkerId(peer.id))
        return worker if worker is not None and worker.peer == peer else None

    def of_slot(self, slot: int) -> Worker | None:
        return self._by_slot.get(slot)

    def of_model(self, model: str) -> int:
        return self._models.get(model, 0)

    def slots_of(self, workers: Iterable[WorkerId]) -> int:
        found = (self._workers.get(worker) for worker in workers)
        return _mask(slot for worker in found if worker is not None for slot in worker.slots)

    @property
    def all_admitted(self) -> bool:
        return bool(self._workers) and all(w.is_admitted for w in self._workers.values())

    def admitted_ids(self) -> list[WorkerId]:
        return [w.id for w in self._workers.values() if self.ready & _mask(w.slots)]

    def add(self, worker: Worker) -> None:
        self._workers[worker.id] = worker
        for slot in worker.slots:
            self._by_slot[slot] = worker
        model = worker.info.model
        self._models[model] = self._models.get(model, 0) | _mask(worker.slots)

    def remove(self, worker: Worker) -> None:
        del self._workers[worker.id]
        model = worker.info.model
        self._models[model] &= ~_mask(worker.slots)
        if not self._models[model]:
            del self._models[model]
        self.ready &= ~_mask(worker.slots)
        for slot in worker.slots:
            del self._by_slot[slot]
            self.stalls.cancel(slot)
        self.silence.cancel(worker.id)
        self.snapshots.cancel(worker.id)
        self._count_ready()

    def renew(self, worker: Worker) -> bool:
        """After its state changed. True when that changed which slots are ready."""
        before = self.ready
        self.ready &= ~_mask(worker.slots)
        if worker.is_admitted and not worker.is_draining:
            self.ready |= _mask(slot for slot in worker.slots if slot not in worker.stalled)
        self._count_ready()
        return self.ready != before

    def _count_ready(self) -> None:
        self.ready_count = sum(
            bool(self.ready & _mask(worker.slots)) for worker in self._workers.values()
        )

    def forgive(self, until: float) -> None:
        """We were not listening ourselves: silence so far proves nothing. O(workers)."""
        for name in self._workers:
            self.silence.set(name, until)

    def check_integrity(self) -> None:
        ready = 0
        models: dict[str, int] = {}
        for worker in self._workers.values():
            assert worker.id in self.silence
            assert all(self._by_slot[slot] is worker for slot in worker.slots)
            assert len(worker.slots) == len(worker.feeds) == worker.info.ranks
            models[worker.info.model] = models.get(worker.info.model, 0) | _mask(worker.slots)
            if worker.is_admitted and not worker.is_draining:
                ready |= _mask(worker.slots) & ~_mask(worker.stalled)
            else:
                assert worker.is_admitted or worker.id in self.snapshots
        assert (ready, models) == (self.ready, self._models)
        assert self.ready_count == len(self.admitted_ids())
        assert len(self._by_slot) == sum(len(worker.slots) for worker in self)
        assert not self.expected.keys() & self._workers.keys()
        assert len(self.arrivals) == len(self.expected)


def _mask(slots: Iterable[int]) -> int:
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask
