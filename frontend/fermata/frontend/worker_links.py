"""The links to workers: opened when a Grant names an endpoint, closed when no lease has used it for a while.

A Generate that a busy worker's link does not take waits here, by lease, and is dropped when its lease ends: the router
times the dispatch, so nothing waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fermata.core.ids import LeaseId
from fermata.wire import messages as wire
from fermata.wire.codec import encode
from fermata.wire.socket import Context, Link, Packet, Peer

IDLE_S = 60.0


@dataclass(slots=True)
class _Worker:
    link: Link
    leases: set[LeaseId] = field(default_factory=set[LeaseId])
    waiting: dict[LeaseId, tuple[wire.Generate, bytes]] = field(
        default_factory=dict[LeaseId, tuple[wire.Generate, bytes]]
    )
    aborts: list[LeaseId] = field(default_factory=list[LeaseId])
    idle_since: float = 0.0
    is_lost: bool = False


class WorkerLinks:
    def __init__(
        self,
        *,
        context: Context,
        me: Peer,
        receive: Callable[[Packet], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._context = context
        self._me = me
        self._receive = receive
        self._loop = loop
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def dispatch(self, endpoint: str, generate: wire.Generate, frame: bytes) -> None:
        """Raises Unsendable for what this worker would refuse, NoEndpoint where there can be no worker."""
        worker = self._workers.get(endpoint)
        if worker is None or worker.is_lost:
            worker = self._open(endpoint)
        worker.leases.add(generate.lease)
        if worker.link.blocked:
            encode(generate, frame)  # what can not be sent is to be known now
        elif worker.link.send(generate, frame):
            return
        worker.waiting[generate.lease] = (generate, frame)

    def abort(self, endpoint: str, lease: LeaseId) -> None:
        worker = self._workers.get(endpoint)
        if worker is None or worker.waiting.pop(lease, None) is not None:
            return
        worker.aborts.append(lease)
        self._send_aborts(worker)

    def release(self, endpoint: str, lease: LeaseId, *, lost: bool = False) -> None:
        """The lease ended. `lost`: its worker is dead, so the link goes as soon as nothing else waits on it."""
        worker = self._workers.get(endpoint)
        if worker is None:
            return
        worker.waiting.pop(lease, None)
        worker.leases.discard(lease)
        worker.is_lost = worker.is_lost or lost
        if not worker.leases:
            worker.idle_since = self._loop.time()
            if worker.is_lost:
                self._close(endpoint)

    def tick(self) -> None:
        before = self._loop.time() - IDLE_S
        for endpoint, worker in list(self._workers.items()):
            if not worker.leases and worker.idle_since < before:
                self._close(endpoint)

    def reopen(self, me: Peer) -> None:
        """Under another incarnation of ours: what workers still run for the old one is theirs to abort."""
        self._me = me
        self.close()

    def close(self) -> None:
        for endpoint in list(self._workers):
            self._close(endpoint)

    def counters(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for worker in self._workers.values():
            for name, value in worker.link.counters.numbers().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _open(self, endpoint: str) -> _Worker:
        if endpoint in self._workers:
            self._close(endpoint)
        link = Link(
            self._context,
            endpoint,
            me=self._me,
            receive=self._receive,
            writable=lambda: self._writable(endpoint),
            listens=wire.Role.WORKER,
        )
        worker = self._workers[endpoint] = _Worker(link)
        return worker

    def _close(self, endpoint: str) -> None:
        self._workers.pop(endpoint).link.close()

    def _writable(self, endpoint: str) -> None:
        worker = self._workers.get(endpoint)
        if worker is None:
            return
        for lease, (generate, frame) in list(worker.waiting.items()):
            if worker.link.blocked or not worker.link.send(generate, frame):
                return
            del worker.waiting[lease]
        self._send_aborts(worker)

    def _send_aborts(self, worker: _Worker) -> None:
        frame = b"".join([lease.to_bytes(8, "little") for lease in worker.aborts])
        if frame and not worker.link.blocked and worker.link.send(wire.Abort(), frame):
            worker.aborts = []
