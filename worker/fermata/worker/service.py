"""The shell of one worker: frontends and the operator on its Listener, routers on Links, engines
behind their Protocol.

Everything happens in one event loop's thread. What became ready in one turn of the loop goes out
as one Output a frontend; a frontend that does not read keeps its tokens in the attempts' buffers
until it does.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fermata.core.clock import Clock
from fermata.core.ids import LeaseId, OwnerId, WorkerId
from fermata.core.lease_digest import LeaseDigest
from fermata.core.ring import Ring
from fermata.core.spec import AgentDeployment, WorkerGroupSpec
from fermata.wire import messages as wire
from fermata.wire.socket import Context, Listener, Packet, Peer
from fermata.worker.budget import Budget
from fermata.worker.engine.base import Engine, EngineOutput, EngineRefused, EngineRequest
from fermata.worker.fences import Fences
from fermata.worker.kv_events import RankEvents
from fermata.worker.leases import Attempt, Attempts
from fermata.worker.outputs import OutputBuffer, gather
from fermata.worker.routers import RouterLinks
from fermata.worker.sessions import Sessions

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SNAPSHOT_SESSIONS = 2048
"""Records a chunk: with the longest ids half of what a message's header may have."""
LEAVE_AFTER_S = 0.25
OWED_S = 2.0
"""Real seconds past a drain's deadline that a frontend which does not read is waited for."""
RETRY_S = 0.01
MAX_REVOKED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    id: WorkerId
    incarnation: int
    deployment: AgentDeployment
    group: WorkerGroupSpec
    ring: Ring
    listen: str
    revision: str = ""
    drain_s: float = 30.0
    """How long SIGTERM waits for running turns before it hands them back."""


State = Literal["serving", "draining", "drained"]


class WorkerService:
    """Make it inside the running loop. `engines[i]` is rank i."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        clock: Clock,
        context: Context,
        engines: Sequence[Engine],
    ) -> None:
        self._config = config
        self._clock = clock
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._attempts = Attempts()
        self._fences = Fences()
        self._revoked: OrderedDict[LeaseId, None] = OrderedDict()
        """Leases that ended before they came: their Generate may still be under way."""
        self.sessions = Sessions()
        self._events = [RankEvents(rank) for rank in range(len(engines))]
        self._budgets = [
            Budget(engine.info.kv_blocks["device"] * engine.info.block_size) for engine in engines
        ]
        self._dirty: dict[Peer, dict[LeaseId, Attempt]] = {}
        self._flushing = False
        self._drain_askers: list[Peer] = []
        self._drain_by: float | None = None
        self._state: State = "serving"
        self._is_over = False
        self._wake = asyncio.Event()
        self._broken: Exception | None = None
        self.refused = 0
        self.aborted = 0
        self._listener = Listener(
            context,
            config.listen,
            role=wire.Role.WORKER,
            receive=self._receive,
            writable=self._writable,
            unreachable=self._unreachable,
        )
        me = Peer(wire.Role.WORKER, config.id, config.incarnation)
        self._routers = RouterLinks(
            context=context, me=me, ring=config.ring, holder=self, loop=self._loop
        )

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    @property
    def state(self) -> State:
        return self._state

    async def run(self) -> None:
        """Serves until drained. Raises what broke an engine, after telling the routers."""
        for engine in self._engines:
            await engine.start(self)
        log.info(
            "ready id=%s endpoint=%s ranks=%d", self._config.id, self.endpoint, len(self._engines)
        )
        self._routers.open()
        try:
            while not self._is_over:
                self._routers.tick()
                self._hand_back_late()
                await self._pause()
        finally:
            # A connecting socket drops what it has not read when its peer hangs up: leave time.
            await asyncio.sleep(LEAVE_AFTER_S)
            self._routers.close(reason=self._state)
            self._listener.close(linger_s=0.5)
            for engine in self._engines:
                await engine.stop()
        if self._broken is not None:
            raise self._broken

    async def _pause(self) -> None:
        wait_s = HEARTBEAT_S
        if self._drain_by is not None:
            wait_s = min(wait_s, max(0.01, self._drain_by - self._loop.time()))
        try:
            await asyncio.wait_for(self._wake.wait(), wait_s)
        except TimeoutError:
            return
        self._wake.clear()

    def drain(self, deadline_s: float) -> None:
        """Real seconds until what still runs is handed back. Asked again, the sooner deadline
        holds."""
        by = self._loop.time() + deadline_s
        self._drain_by = by if self._drain_by is None else min(by, self._drain_by)
        if self._state == "serving":
            self._state = "draining"
            log.info("draining running=%d deadline_s=%.1f", self._attempts.running, deadline_s)
            for engine in self._engines:
                engine.drain()
            self._tell_state()
        self._wake.set()
        self._end_drain_if_done()

    def numbers(self) -> dict[str, float]:
        loads = [engine.load() for engine in self._engines]
        infos = [engine.info for engine in self._engines]
        return {
            "requests": float(len(self._attempts)),
            "running": float(sum(load.running for load in loads)),
            "waiting": float(sum(load.waiting for load in loads)),
            "kv_blocks_referenced": float(sum(load.kv_referenced for load in loads)),
            "kv_blocks_cached": float(sum(load.kv_cached for load in loads)),
            "kv_blocks_total": float(sum(info.kv_blocks["device"] for info in infos)),
            "steps": float(sum(load.steps for load in loads)),
            "output_tokens": float(sum(load.output_tokens for load in loads)),
            "preemptions": float(sum(load.preemptions for load in loads)),
            "sessions": float(len(self.sessions)),
            "owners": float(self._attempts.owner_count),
            "fenced": float(len(self._fences)),
            "refused": float(self.refused),
            "aborted": float(self.aborted),
            "routers_answering": float(self._routers.answering),
            **self._listener.counters.numbers(),
        }

    # What frontends and the operator say

    def _receive(self, peer: Peer, packet: Packet) -> None:
        match packet.message:
            case wire.Generate() as generate:
                self._generate(peer, generate, packet.frame)
            case wire.Abort():
                for lease in packet.frame.cast("Q"):
                    if self._attempts.is_of(peer, LeaseId(lease)):
                        self._abort(LeaseId(lease), "")
            case wire.StatusRequest():
                self._listener.send(peer, self.status())
            case wire.Drain(deadline_s):
                self._drain_askers.append(peer)
                self._listener.send(peer, self._drain_status())
                self.drain(deadline_s)
            case _:
                pass

    def _generate(self, peer: Peer, generate: wire.Generate, frame: memoryview) -> None:
        known = self._attempts.get(generate.lease)
        is_repeat = known is not None and known.generate.attempt == generate.attempt
        if is_repeat and self._attempts.is_of(peer, generate.lease):
            self._listener.send(peer, wire.Accepted(generate.lease, generate.attempt))
            return
        try:
            self._submit(peer, generate, frame)
        except EngineRefused as refusal:
            self._refuse(peer, generate, refusal)
            return
        except Exception as error:
            # Request boundary: one turn that an engine chokes on must not cost the others.
            log.exception("engine choked request=%s", generate.request)
            self._refuse(peer, generate, EngineRefused("failed", f"engine error: {error}"))
            return
        self._listener.send(peer, wire.Accepted(generate.lease, generate.attempt))

    def _refuse(self, peer: Peer, generate: wire.Generate, refusal: EngineRefused) -> None:
        self.refused += 1
        self._listener.send(
            peer, wire.Refused(generate.lease, generate.attempt, refusal.code, refusal.message)
        )

    def _submit(self, peer: Peer, generate: wire.Generate, frame: memoryview) -> None:
        if self._state != "serving":
            raise EngineRefused("draining", "the worker is draining")
        if (generate.owner, generate.incarnation) != (peer.id, peer.incarnation):
            raise EngineRefused("invalid", f"{peer.id} is not the {generate.owner} it speaks for")
        if self._fences.holds(generate.owner, generate.incarnation):
            raise EngineRefused("fenced", f"{generate.owner} was declared dead; say Hello anew")
        if generate.lease in self._revoked:
            raise EngineRefused("failed", "the lease was revoked")
        if not 0 <= generate.rank < len(self._engines):
            raise EngineRefused("invalid", f"rank {generate.rank} of {len(self._engines)}")
        if generate.lease in self._attempts:
            raise EngineRefused("invalid", f"lease {generate.lease} runs another attempt")
        request = EngineRequest(
            lease=generate.lease,
            tokens=frame,
            sampling=generate.sampling,
            resumed=generate.resumed,
            priority=generate.priority,
            session=generate.session,
            namespace=generate.namespace,
            lora=generate.lora,
            script_inputs=generate.script_inputs,
            transfer=generate.transfer,
        )
        self._engines[generate.rank].submit(request)
        self._attempts.add(
            Attempt(peer, generate, request.length, OutputBuffer(generate.lease, generate.attempt))
        )
        self.sessions.begin(
            generate.session,
            parent=generate.parent,
            key=generate.key,
            rank=generate.rank,
            tokens=request.length,
            now=self._clock.now(),
        )
        for action in generate.hints.actions if generate.hints else ():
            self._engines[generate.rank].apply_hint(action)

    def _abort(self, lease: LeaseId, error: str) -> None:
        attempt = self._attempts.get(lease)
        if attempt is not None and attempt.is_running:
            self.aborted += 1
            self._engines[attempt.generate.rank].abort(lease, error=error)

    def _revoke(self, lease: LeaseId, reason: str) -> None:
        self._revoked[lease] = None
        if len(self._revoked) > MAX_REVOKED:
            self._revoked.popitem(last=False)
        self._abort(lease, reason)

    # What routers say

    def on_router_packet(self, packet: Packet) -> None:
        match packet.message:
            case wire.Revoke(reason):
                for lease in packet.frame.cast("Q"):
                    self._revoke(LeaseId(lease), reason)
            case wire.Fence(owner, incarnation):
                self._fence(owner, incarnation)
            case wire.HintPush(rank, hints) if 0 <= rank < len(self._engines):
                for action in hints.actions:
                    self._engines[rank].apply_hint(action)
            case wire.Drain(deadline_s):
                self.drain(deadline_s)
            case _:
                pass

    def _fence(self, owner: OwnerId, incarnation: int) -> None:
        self._fences.add(owner, incarnation)
        for peer in self._attempts.owners():
            if peer.id == owner and peer.incarnation <= incarnation:
                log.warning("fenced owner=%s incarnation=%d", owner, peer.incarnation)
                for attempt in self._attempts.of_owner(peer):
                    self._abort(attempt.lease, "owner_lost")
                    self._forget(attempt)
                self._dirty.pop(peer, None)
        self._end_drain_if_done()

    def hello(self) -> wire.Hello:
        info, spec = self._engines[0].info, self._config.deployment.spec
        worker = wire.WorkerInfo(
            endpoint=self.endpoint,
            model=spec.model.name,
            ranks=len(self._engines),
            block_size=info.block_size,
            routing_block_size=spec.routing_block_size,
            kv_blocks=info.kv_blocks,
            max_sequences=info.max_sequences,
            max_batched_tokens=info.max_batched_tokens,
            context_length=info.context_length,
            group=self._config.group.name,
            revision=self._config.revision,
            features=list(info.features),
        )
        return wire.Hello("worker", self._config.id, self._config.incarnation, worker)

    def digest(self, router: int) -> LeaseDigest:
        return self._attempts.digest(router)

    def running(self, router: int) -> array[int]:
        return array("Q", self._attempts.of_router(router))

    def last_events(self) -> list[int]:
        return [events.last for events in self._events]

    def load_of(self, router: int) -> wire.LoadReport:
        ranks: list[wire.RankLoad] = []
        for rank, engine in enumerate(self._engines):
            load, share = engine.load(), self._budgets[rank].share(router)
            ranks.append(
                wire.RankLoad(
                    rank=rank,
                    running=load.running,
                    waiting=load.waiting,
                    kv_used={"device": load.kv_referenced},
                    steps=load.steps,
                    routers=[
                        wire.RouterLoad(number, row.active, row.waiting, row.charged_tokens)
                        for number, row in load.routers.items()
                    ],
                    share_tokens=share.tokens,
                    share_number=share.number,
                )
            )
        return wire.LoadReport(ranks)

    def router_booted(self, router: int) -> None:
        for budget in self._budgets:
            budget.joined(router, self._loop.time())

    def router_left(self, router: int) -> None:
        for budget in self._budgets:
            budget.left(router)

    def demand(self, router: int, demand: wire.Demand) -> None:
        for ask in demand.ranks:
            if 0 <= ask.rank < len(self._budgets):
                self._budgets[ask.rank].heard(
                    router,
                    charged=ask.charged_tokens,
                    waiting=ask.waiting_tokens,
                    number=ask.share_number,
                    now=self._loop.time(),
                )

    def rebalance(self) -> None:
        now = self._loop.time()
        for budget, engine in zip(self._budgets, self._engines, strict=True):
            tallies = engine.load().routers
            budget.rebalance({r: tally.charged_tokens for r, tally in tallies.items()}, now)

    def snapshot(
        self, request: wire.SnapshotRequest
    ) -> Sequence[tuple[wire.SnapshotChunk, array[int]]]:
        if not 0 <= request.rank < len(self._events):
            return []
        events = self._events[request.rank]
        parts = list(events.snapshot())
        sessions = list(self.sessions.records(request.rank, self._clock.now()))
        while len(parts) * SNAPSHOT_SESSIONS < len(sessions):
            parts.append(([], array("Q")))
        last = len(parts) - 1
        return [
            (
                wire.SnapshotChunk(
                    rank=request.rank,
                    request=request.request,
                    index=index,
                    last=index == last,
                    sequence=events.last,
                    stored=runs,
                    sessions=sessions[index * SNAPSHOT_SESSIONS :][:SNAPSHOT_SESSIONS],
                ),
                hashes,
            )
            for index, (runs, hashes) in enumerate(parts)
        ]

    # What engines say

    def kv_events(self, rank: int, events: Sequence[wire.KvEvent], hashes: array[int]) -> None:
        first = self._events[rank].add(events, hashes)
        self._routers.events(rank, wire.KvEvents(rank, first, list(events)), hashes)

    def outputs(self, rank: int, outputs: Sequence[EngineOutput]) -> None:
        sequence = self._events[rank].last
        for output in outputs:
            attempt = self._attempts.get(output.lease)
            if attempt is None:
                continue
            attempt.output.add(output, event_sequence=sequence)
            if output.finish:
                self._finished(attempt)
            self._dirty.setdefault(attempt.owner, {})[output.lease] = attempt
        if self._dirty and not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def failed(self, rank: int, error: Exception) -> None:
        log.error("engine failed rank=%d error=%r", rank, error)
        self._broken = error
        self._end()

    def _finished(self, attempt: Attempt) -> None:
        self._attempts.finish(attempt)
        generate = attempt.generate
        self.sessions.end(
            generate.session,
            tokens=attempt.input_tokens + attempt.output.made,
            final=generate.final and attempt.output.finish in ("stop", "length"),
            now=self._clock.now(),
        )

    def _flush(self) -> None:
        self._flushing = False
        for peer in list(self._dirty):
            self._flush_to(peer)
        self._end_drain_if_done()

    def _flush_to(self, peer: Peer) -> None:
        if self._listener.blocked(peer):
            return
        owed = self._dirty.pop(peer, {})
        entries, frame = gather(attempt.output for attempt in owed.values())
        if not self._listener.send(peer, wire.Output(entries), frame):
            self._dirty[peer] = owed
            if not self._listener.blocked(peer):  # nobody will say when there is room again
                self._loop.call_later(RETRY_S, self._flush)
            return
        for attempt in owed.values():
            attempt.output.taken()
            if not attempt.is_running:
                self._attempts.remove(attempt)

    def _writable(self, peer: Peer) -> None:
        if peer in self._dirty:
            self._flush_to(peer)
            self._end_drain_if_done()

    def _unreachable(self, peer: Peer) -> None:
        """Its connection is gone. What runs goes on, since only a router may call the owner dead;
        what is finished has nobody to go to."""
        self._dirty.pop(peer, None)
        for attempt in self._attempts.of_owner(peer):
            if not attempt.is_running:
                self._attempts.remove(attempt)

    def _forget(self, attempt: Attempt) -> None:
        if attempt.lease in self._attempts:
            self._attempts.remove(attempt)

    # Draining

    def _hand_back_late(self) -> None:
        if self._drain_by is None or self._loop.time() < self._drain_by:
            return
        late = [attempt for attempt in self._attempts.all() if attempt.is_running]
        if late:
            log.info("handing back turns=%d", len(late))
        for attempt in late:
            self._abort(attempt.lease, "draining")
        if self._loop.time() >= self._drain_by + OWED_S:
            self._give_up_owed()
        self._end_drain_if_done()

    def _give_up_owed(self) -> None:
        """To frontends that do not read. The router revokes the leases at our Bye, so they ask anew."""
        for attempt in self._attempts.all():
            log.warning("gives up owner=%s request=%s", attempt.owner.id, attempt.generate.request)
            self._attempts.remove(attempt)
        self._dirty.clear()

    def _end_drain_if_done(self) -> None:
        if self._state != "draining" or len(self._attempts):
            return
        self._state = "drained"
        log.info("drained")
        self._tell_state()
        # The state leaves before the Bye that follows: both are in the outboxes, in this order.
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._wake.set()

    def _tell_state(self) -> None:
        status = self._drain_status()
        self._routers.broadcast(status)
        for peer in self._drain_askers:
            self._listener.send(peer, status)

    def _drain_status(self) -> wire.DrainStatus:
        return wire.DrainStatus(self._state, self._attempts.running)

    def on_welcome(self, reply: Callable[[wire.Message], None]) -> None:
        """A router that booted does not know that we drain."""
        if self._state != "serving":
            reply(self._drain_status())

    def status(self) -> wire.Status:
        facts = {
            "role": "worker",
            "state": self._state,
            "incarnation": str(self._config.incarnation),
            "revision": self._config.revision,
            "group": self._config.group.name,
        }
        return wire.Status(self._config.id, self.numbers(), facts)
