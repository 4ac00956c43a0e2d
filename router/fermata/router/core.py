"""The router, pure: messages and the time go in, messages come out.

`receive` takes what a peer sent, `tick` what time brings; both return what is to be sent, in order. `next_deadline`
says when `tick` has something to do. No I/O, no clock, no logging: the live service and the simulator drive the same
object.

Who does what: `fleet` workers, `ownership` frontends, `leasing` how leases end, `placement` where turns go. They act on
one `RouterState` and are called from here only, so every call ends with the same epilogue: a boot that is over, and
waiting turns that may go.
"""

from __future__ import annotations

import msgspec

from fermata.core.ids import RouterId
from fermata.core.ring import Ring
from fermata.core.spec import RouterPolicySpec
from fermata.router.fleet import Fleet
from fermata.router.handover import Handovers
from fermata.router.introspection import explanation, programs
from fermata.router.leasing import Leasing
from fermata.router.model import Send
from fermata.router.ownership import Ownership
from fermata.router.placement import Placement
from fermata.router.retirement import Retirement
from fermata.router.state import RouterConfig, RouterState
from fermata.router.status import numbers
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

__all__ = ["Router", "RouterConfig", "Send"]

_SWEEP_ENTRIES = 1024
_SWEEP_EVERY_S = 0.01


class Router:
    def __init__(
        self, config: RouterConfig, *, now: float, policy: RouterPolicySpec | None = None
    ) -> None:
        """Without a policy it holds turns until SetPolicy, and serves with the defaults after `BOOT_WAIT_S`."""
        self.state = RouterState(config, policy=policy, now=now)
        self._leasing = Leasing(self.state)
        self._retirement = Retirement(self.state)
        self._handovers = Handovers(self.state)
        self._fleet = Fleet(self.state, self._leasing, self._handovers)
        self._ownership = Ownership(self.state, self._leasing)
        self._placement = Placement(self.state, self._leasing)

    def receive(
        self, sender: Peer, message: wire.Message, frame: memoryview, now: float
    ) -> list[Send]:
        """What a peer sent; the wire layer has checked that its role may. Frames are kept while they are needed."""
        match message:
            case wire.Hello():
                self._hello(sender, message, now)
            case wire.SetPolicy():
                self._set_policy(sender, message, now)
            case wire.StatusRequest():
                self.state.effects.send(sender, self.status(now))
            case wire.ProgramsRequest():
                self.state.effects.send(sender, programs(self.state, message, now))
            case wire.ExplainRequest():
                self.state.effects.send(sender, explanation(self.state, message, now))
            case wire.Drain():
                self._retirement.ask(sender, message.deadline_s, now)
            case _ if sender.role is wire.Role.FRONTEND:
                self._from_frontend(sender, message, frame, now)
            case _ if sender.role is wire.Role.WORKER:
                self._from_worker(sender, message, frame, now)
            case wire.Heartbeat():
                self._acknowledge(sender, known=True)
            case wire.Handover() if sender.role is wire.Role.ROUTER:
                self._handovers.take(message, now)
            case _:
                self.state.counters["unexpected_messages"] += 1
        return self._finish(now)

    def tick(self, now: float) -> list[Send]:
        """What time brings. Late on silence means this process did not run: then nobody is taken for dead for it."""
        self._forgive(now)
        state = self.state
        self._ownership.tick(now)
        self._fleet.tick(now)
        self._leasing.dispatch_timeouts(now)
        state.affinity.expire(now, state.policy.session_affinity.ttl_s)
        state.approximate.expire(now)
        state.programs.expire(now)
        if state.admission is not None:
            due = state.admission.next_round()
            state.admission.is_due |= due is not None and due <= now
        self._epilogue(now)
        self._placement.tick(now)
        state.index.sweep(_SWEEP_ENTRIES)
        return self._finish(now)

    def next_deadline(self, now: float) -> float | None:
        """When `tick` is due; None while nothing will ever be without a message."""
        state = self.state
        deadlines = [
            state.owners.silence.next(),
            state.workers.silence.next(),
            state.workers.snapshots.next(),
            state.workers.stalls.next(),
            state.workers.arrivals.next(),
            state.leases.dispatches.next(),
            state.waiting.deadlines.next(),
            state.affinity.next_expiry(state.policy.session_affinity.ttl_s),
            state.approximate.next_expiry(),
            self._retirement.by,
            state.programs.idle.next(),
            self._next_round(),
            state.boot_ends_at if not state.is_settled else None,
            now + state.real(_SWEEP_EVERY_S) if not state.index.is_swept else None,
        ]
        return min((at for at in deadlines if at is not None), default=None)

    def _next_round(self) -> float | None:
        state = self.state
        return None if state.admission is None or state.is_booting else state.admission.next_round()

    def status(self, now: float) -> wire.Status:
        state = self.state
        return wire.Status(
            state.config.id,
            numbers(state, now),
            {
                "role": "router",
                "state": "booting" if state.is_booting else "serving",
                "incarnation": str(state.incarnation),
                "policy": state.policy.scheduler.type,
                "workers": ",".join(state.workers.admitted_ids()),
                "workers_without_events": ",".join(
                    worker.id for worker in state.workers if not worker.sends_events
                ),
            },
        )

    @property
    def is_drained(self) -> bool:
        """It was asked to go, and nobody needs it any more."""
        return self._retirement.is_over

    def take_warnings(self) -> list[str]:
        """What people should read, since last asked."""
        warnings, self.state.warnings = self.state.warnings, []
        return warnings

    def check_integrity(self) -> None:
        """O(everything): what is kept incrementally equals a recount."""
        state = self.state
        state.index.check_integrity()
        state.leases.check_integrity()
        state.loads.check_integrity()
        state.affinity.check_integrity()
        state.approximate.check_integrity()
        state.shares.check_integrity({slot for worker in state.workers for slot in worker.slots})
        state.workers.check_integrity()
        state.owners.check_integrity()
        state.waiting.check_integrity()
        state.programs.check_integrity()
        if state.admission is not None:
            state.admission.check_integrity()
        held = {slot for worker in state.workers for slot in worker.slots}
        held |= {slot for w in state.workers.expected.values() for slot in w.slots.values()}
        assert held == state.seats.taken()

    def _finish(self, now: float) -> list[Send]:
        self._epilogue(now)
        if self.state.over:
            self._handovers.follow_turns(now)
        self._retirement.check(now)
        return self.state.effects.take()

    def _epilogue(self, now: float) -> None:
        state = self.state
        if state.is_booting and (
            now >= state.boot_ends_at or (state.has_policy and state.has_all_workers)
        ):
            state.is_booting = False
            state.awaited.clear()
            state.must_judge_all = True
        if not state.is_settled and now >= state.boot_ends_at:
            state.is_settled = True
            state.must_judge_all = True
        if state.admission is not None and not state.is_booting:
            # Other slots may take turns now, so other programs may have a place.
            state.admission.is_due |= state.must_judge_all
            if state.admission.is_due:
                self._placement.admit(now)
        if state.must_judge or state.must_judge_all:
            self._placement.judge(now)
        self._hint_released()

    def _hint_released(self) -> None:
        """Programs that ended left KV which nobody will ask for: engines that take hints may drop it first."""
        state = self.state
        for released in state.programs.take_released():
            worker = state.workers.of_slot(released.slot)
            if worker is None or not state.policy.kv.hints or "hints" not in worker.info.features:
                continue
            state.counters["evict_hints"] += 1
            payload = {"session_id": released.session, "block_hash": released.leaf}
            action = wire.KvAction(f"evict-{released.session}", "kv.evict", "1.0", payload)
            rank = state.seats[released.slot].rank
            state.effects.send(
                worker.peer, wire.HintPush(rank, wire.KvHints([action], action.action_id))
            )

    def _forgive(self, now: float) -> None:
        state = self.state
        due = [at for at in (state.owners.silence.next(), state.workers.silence.next()) if at]
        patience_s = state.real(state.liveness.heartbeat_s)
        if due and now - min(due) > patience_s:
            state.counters["late_ticks"] += 1
            state.owners.forgive(now + 2 * patience_s)
            state.workers.forgive(now + 2 * patience_s)

    def _hello(self, sender: Peer, message: wire.Hello, now: float) -> None:
        if message.role != sender.role.value or message.id != sender.id:
            self.state.effects.send(
                sender, wire.Fault("unknown_peer", "Hello does not say what the link says")
            )
            return
        if sender.role is wire.Role.WORKER and not self._fleet.hello(sender, message, now):
            return
        if sender.role is wire.Role.FRONTEND:
            self._ownership.hello(sender, now)
        state = self.state
        state.effects.send(
            sender,
            wire.Welcome(
                router=state.config.id,
                number=state.config.number,
                incarnation=state.incarnation,
                ring=self._placement.wire_ring(),
                policy_revision=state.policy_revision,
                workers_ready=state.workers.ready_count,
            ),
        )
        if sender.role is wire.Role.WORKER:
            self._fleet.introduce(sender, now)

    def _acknowledge(self, sender: Peer, *, known: bool) -> None:
        state = self.state
        fenced = -1 if known else state.owners.fenced_up_to(sender)
        state.effects.send(
            sender,
            wire.HeartbeatAck(
                known, state.ring.epoch, state.policy_revision, state.workers.ready_count, fenced
            ),
        )

    def _from_frontend(
        self, sender: Peer, message: wire.Message, frame: memoryview, now: float
    ) -> None:
        owner = self.state.owners.get(sender)
        if owner is None:
            self._stranger(sender, message)
            return
        match message:
            case wire.Route():
                self._placement.route(owner, message, frame, now)
            case wire.Progress():
                self._leasing.progress(owner, message, now)
            case wire.Heartbeat():
                self._ownership.heartbeat(owner, message, now)
                self._acknowledge(sender, known=True)
            case wire.LeaseClaims():
                self._leasing.claims(owner, message, frame.cast("Q"), now)
            case wire.LeaseList():
                self._leasing.owner_list(owner, message, frame.cast("Q"), now)
            case wire.Bye():
                self._ownership.bye(owner, message, now)
            case _:
                self.state.counters["unexpected_messages"] += 1

    def _from_worker(
        self, sender: Peer, message: wire.Message, frame: memoryview, now: float
    ) -> None:
        worker = self.state.workers.get(sender)
        if worker is None:
            self._stranger(sender, message)
            return
        match message:
            case wire.KvEvents():
                self._fleet.events(worker, message, frame.cast("Q"), now)
            case wire.Heartbeat():
                self._fleet.heartbeat(worker, message, now)
                self._acknowledge(sender, known=True)
            case wire.LoadReport():
                self._fleet.load(worker, message, now)
                if message.ranks:
                    self.state.effects.send(sender, self._fleet.demand(worker, now))
            case wire.SnapshotChunk():
                self._fleet.chunk(worker, message, frame.cast("Q"), now)
            case wire.LeaseList():
                self._leasing.worker_list(worker, frame.cast("Q"), now)
            case wire.DrainStatus():
                self._fleet.drain_status(worker, message)
            case wire.Bye():
                self._fleet.bye(worker, message, now)
            case _:
                self.state.counters["unexpected_messages"] += 1

    def _stranger(self, sender: Peer, message: wire.Message) -> None:
        """It has not said Hello to this boot, or was taken for dead: asked to, where it waits for an answer."""
        self.state.counters["strangers"] += 1
        if isinstance(message, wire.Heartbeat | wire.Route):
            self._acknowledge(sender, known=False)

    def _set_policy(self, sender: Peer, message: wire.SetPolicy, now: float) -> None:
        reasons = self._apply_policy(message, now)
        self.state.counters["policies_refused"] += bool(reasons)
        self.state.effects.send(
            sender,
            wire.PolicyAck(message.uid, message.generation, message.revision, not reasons, reasons),
        )

    def _apply_policy(self, message: wire.SetPolicy, now: float) -> list[str]:
        """Why not; nothing when it is applied."""
        state = self.state
        if message.revision < state.policy_revision:
            return [f"revision {message.revision} is older than {state.policy_revision}, in force"]
        try:
            policy = msgspec.json.decode(message.spec, type=RouterPolicySpec)
        except (msgspec.MsgspecError, RecursionError) as error:
            return [str(error)]
        problems = [f"{field}: {what} ({fix})" for field, what, fix in policy.problems()]
        if problems:
            return problems
        state.policy_revision = message.revision
        state.apply(policy)
        self._fleet.policy_changed(now)
        self._apply_ring(message.ring, now)
        return []

    def _apply_ring(self, ring: wire.Ring, now: float) -> None:
        """A later epoch. Waiting turns whose key moved are sent on; granted leases stay until they end."""
        state = self.state
        if ring.epoch <= state.ring.epoch or not ring.members:
            return
        before = state.ring
        state.ring = Ring(ring.epoch, {RouterId(name): at for name, at in ring.members})
        held = self._handovers.held_turns(now)
        self._placement.send_on(now)
        self._handovers.ring_moved(before, held, now)
        for peer in (*state.owners.peers, *(worker.peer for worker in state.workers)):
            self._acknowledge(peer, known=True)
