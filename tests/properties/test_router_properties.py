"""The whole core among honest peers on a network that loses, repeats and delays.

Frontends, workers and the router each keep the protocol; any message between them and the router may be lost, come
twice or come late; processes die and come back, the router included. After each step its sums equal a recount. And
once the network is whole again, within seconds all sides agree: every turn was answered, every lease is held by
both its sides or by none, and the index is what the workers hold.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from fermata.core.ids import LeaseId, RouterId, RoutingKey, SessionId
from fermata.core.lease_digest import LeaseDigest
from fermata.core.spec import OverloadSpec, QueueSpec, RouterPolicySpec
from fermata.router.core import Router, RouterConfig
from fermata.wire import messages as wire
from fermata.wire.roles import Peer, allowed

pytestmark = pytest.mark.timeout(300)

BLOCK = 4
POLICY = RouterPolicySpec(overload=OverloadSpec(prefill_tokens=6.0), queue=QueueSpec(limit=50))
TURNS = [(1, 2, 3), (1, 2, 30, 40), (1, 20), (9, 8, 7, 6, 5), ()]
PATIENCE_S = 3.0
SETTLED_S = 25


def frame(numbers: Any) -> bytes:
    return array("Q", numbers).tobytes()


@dataclass(eq=False)
class Turn:
    request: str
    chain: tuple[int, ...]
    attempt: int = 0
    lease: int = 0
    worker: str = ""
    accepted: bool = False
    asked_at: float = 0.0
    over: bool = False


class Frontend:
    """Keeps turns; learns from the router's incarnation whether it booted or took us for dead."""

    def __init__(self, world: Machine, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 1
        self.turns: dict[str, Turn] = {}
        self.router_boot: int | None = None
        self.is_welcome = False
        self.forgot = False
        self.seen = 0
        self.given_back: set[int] = set()
        self.heard_at = 0.0
        self.beat_at = 0.0

    @property
    def peer(self) -> Peer:
        return Peer(wire.Role.FRONTEND, self.name, self.incarnation)

    @property
    def leases(self) -> dict[int, Turn]:
        return {turn.lease: turn for turn in self.turns.values() if turn.lease}

    def say(self, message: wire.Message, raw: bytes = b"") -> None:
        self.world.to_router(self.peer, message, raw)

    def hello(self) -> None:
        self.say(wire.Hello("frontend", self.name, self.incarnation))

    def start(self, turn: Turn) -> None:
        self.turns[turn.request] = turn
        self.ask(turn)

    def ask(self, turn: Turn) -> None:
        turn.asked_at = self.world.now
        route = wire.Route(
            request=turn.request,  # type: ignore[arg-type]
            attempt=turn.attempt,
            key=RoutingKey("k"),
            epoch=0,
            model="m",
            input_tokens=len(turn.chain) * BLOCK + 1,
            max_tokens=5,
            session=SessionId(f"s{len(turn.chain)}"),
        )
        self.say(route, frame(turn.chain))

    def report(self, lease: int, kind: Any, **fields: Any) -> None:
        self.say(wire.Progress([wire.LeaseProgress(LeaseId(lease), kind, **fields)]))

    def end(self, turn: Turn, kind: str, sequence: int = -1) -> None:
        lease, turn.lease = turn.lease, 0
        turn.over = True
        del self.turns[turn.request]
        if lease:
            self.report(lease, kind, event_sequence=sequence)
        else:
            self.say(
                wire.Progress([wire.LeaseProgress(LeaseId(0), "cancelled", request=turn.request)])
            )  # type: ignore[arg-type]

    def lose(self, turn: Turn) -> None:
        lease, turn.lease = turn.lease, 0
        turn.accepted = False
        turn.attempt += 1
        self.report(lease, "failed", reason="lost")
        self.ask(turn)

    def hear(self, message: wire.Message, raw: memoryview) -> None:
        self.heard_at = self.world.now
        match message:
            case wire.Welcome():
                self.welcomed(message)
            case wire.HeartbeatAck() if not message.known:
                self.is_welcome = False
                self.forgot = self.router_boot is not None
                self.hello()
            case wire.Grant():
                self.granted(message)
            case wire.Revoke():
                for lease in raw.cast("Q"):
                    if lease in self.leases:
                        self.world.seen[f"revoked {message.reason}"] += 1
                        self.lose(self.leases[lease])
            case wire.LeaseListRequest():
                self.world.seen["list asked"] += 1
                self.say(wire.LeaseList(seen=self.seen), frame(self.leases))
            case wire.Reject():
                turn = self.turns.get(message.request)
                if turn is not None and turn.attempt == message.attempt and not turn.lease:
                    self.world.seen["rejected"] += 1
                    self.turns.pop(message.request).over = True
            case _:
                pass

    def welcomed(self, message: wire.Welcome) -> None:
        if self.router_boot == message.incarnation and self.forgot:
            self.fenced()
            return
        if self.router_boot != message.incarnation:
            self.router_boot = message.incarnation
            self.seen = 0
            claims = [self.claim(turn) for turn in self.leases.values()]
            raw = frame([h for turn in self.leases.values() for h in turn.chain])
            self.say(wire.LeaseClaims(claims), raw)
        self.forgot = False
        self.is_welcome = True
        for turn in list(self.turns.values()):
            if not turn.lease:
                self.ask(turn)

    def fenced(self) -> None:
        """Taken for dead: back under a new incarnation, all turns routed again."""
        self.world.seen["fenced"] += 1
        self.incarnation += 1
        self.forgot = self.is_welcome = False
        self.router_boot = None
        self.seen = 0
        for turn in self.leases.values():
            turn.lease, turn.accepted, turn.attempt = 0, False, turn.attempt + 1
        self.hello()

    def claim(self, turn: Turn) -> wire.LeaseClaim:
        return wire.LeaseClaim(
            lease=LeaseId(turn.lease),
            request=turn.request,  # type: ignore[arg-type]
            attempt=turn.attempt,
            worker=turn.worker,  # type: ignore[arg-type]
            rank=0,
            input_tokens=len(turn.chain) * BLOCK + 1,
            output_tokens=0,
            blocks=len(turn.chain),
            accepted=turn.accepted,
            prefilled=turn.accepted,
            key=RoutingKey("k"),
        )

    def granted(self, grant: wire.Grant) -> None:
        self.seen = max(self.seen, grant.lease)
        turn = self.turns.get(grant.request)
        if turn is None or turn.attempt != grant.attempt or turn.lease:
            if (turn is None or turn.lease != grant.lease) and grant.lease not in self.given_back:
                self.given_back.add(grant.lease)
                self.world.seen["given back"] += 1
                self.report(grant.lease, "cancelled", reason="stale")
            return
        self.world.claim_ownership(grant.lease, turn)
        turn.lease, turn.worker = grant.lease, grant.worker
        self.world.workers[grant.worker].generate(self, turn)

    def tick(self) -> None:
        now = self.world.now
        if now - self.heard_at > PATIENCE_S:
            self.is_welcome = False
        if not self.is_welcome:
            self.hello()
        else:
            held = LeaseDigest(LeaseId(i) for i in self.leases if i <= self.seen or self.is_old(i))
            self.say(wire.Heartbeat(self.incarnation, self.seen, held.count, held.xor))
        for turn in list(self.turns.values()):
            if not turn.lease and now - turn.asked_at > PATIENCE_S:
                self.ask(turn)
            elif turn.lease and not self.world.workers[turn.worker].runs(turn.lease):
                # The engine lost it without a word: a real frontend finds the gap.
                self.lose(turn)

    def is_old(self, lease: int) -> bool:
        return lease >> 32 & 0xFFFFFF != (self.router_boot or 0)


class Worker:
    """An engine that accepts at once and stores a prompt's blocks when it is told to."""

    def __init__(self, world: Machine, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 1
        self.reset()

    def reset(self) -> None:
        self.running: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self.fences: dict[str, int] = {}
        self.blocks: dict[int, int | None] = {}
        self.sequence = -1
        self.steps = 0
        self.is_welcome = False
        self.is_up = True
        self.heard_at = self.world.now

    @property
    def peer(self) -> Peer:
        return Peer(wire.Role.WORKER, self.name, self.incarnation)

    def say(self, message: wire.Message, raw: bytes = b"") -> None:
        self.world.to_router(self.peer, message, raw)

    def hello(self) -> None:
        info = wire.WorkerInfo(
            endpoint=self.name,
            model="m",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks={"device": 1000},
            max_sequences=8,
            max_batched_tokens=8,
            context_length=10_000,
            features=["kv_events"],
        )
        self.say(wire.Hello("worker", self.name, self.incarnation, info))

    def runs(self, lease: int) -> bool:
        return lease in self.running

    def generate(self, frontend: Frontend, turn: Turn) -> None:
        """Frontend and worker talk without loss here: their link is another test's matter."""
        if not self.is_up:
            self.world.seen["not dispatched"] += 1
            return
        if frontend.incarnation <= self.fences.get(frontend.name, 0):
            self.world.seen["refused as fenced"] += 1
            frontend.fenced()
            return
        self.running[turn.lease] = (frontend.name, frontend.incarnation, turn.chain)
        if self.world.forget_accepted:
            self.world.forget_accepted = False
            return
        turn.accepted = True
        frontend.report(turn.lease, "accepted")

    def store(self, chain: tuple[int, ...]) -> None:
        parent: int | None = None
        for block in chain:
            if block not in self.blocks:
                self.blocks[block] = parent
                self.emit(wire.KvStored(parent, 1), block)
            parent = block

    def evict(self, pick: int) -> None:
        leaves = [b for b in self.blocks if b not in self.blocks.values()]
        if leaves:
            block = leaves[pick % len(leaves)]
            del self.blocks[block]
            self.emit(wire.KvRemoved(1), block)

    def emit(self, event: wire.KvEvent, block: int) -> None:
        self.sequence += 1
        self.say(wire.KvEvents(0, self.sequence, [event]), frame([block]))

    def hear(self, message: wire.Message, raw: memoryview) -> None:
        if not self.is_up:
            return
        self.heard_at = self.world.now
        match message:
            case wire.Welcome():
                self.is_welcome = True
                self.say(wire.LeaseList(), frame(self.running))
            case wire.HeartbeatAck() if not message.known:
                self.hello()
            case wire.SnapshotRequest():
                self.snapshot(message)
            case wire.LeaseListRequest():
                self.say(wire.LeaseList(), frame(self.running))
            case wire.Revoke():
                for lease in raw.cast("Q"):
                    self.running.pop(lease, None)
            case wire.Fence():
                self.fences[message.owner] = max(
                    message.incarnation, self.fences.get(message.owner, 0)
                )
                self.running = {
                    lease: run
                    for lease, run in self.running.items()
                    if run[0] != message.owner or run[1] > message.incarnation
                }
            case _:
                pass

    def snapshot(self, ask: wire.SnapshotRequest) -> None:
        """Two chunks, so that one of them can be lost."""
        items = list(self.blocks.items())
        half = len(items) // 2
        for index, part in enumerate((items[:half], items[half:])):
            stored = [wire.KvStored(parent, 1) for _, parent in part]
            chunk = wire.SnapshotChunk(0, ask.request, index, index == 1, self.sequence, stored)
            self.say(chunk, frame([block for block, _ in part]))

    def tick(self) -> None:
        if not self.is_up:
            return
        if self.world.now - self.heard_at > PATIENCE_S:
            self.is_welcome = False
        if not self.is_welcome:
            self.hello()
            return
        held = LeaseDigest(LeaseId(lease) for lease in self.running)
        self.say(wire.Heartbeat(self.incarnation, 0, held.count, held.xor, [self.sequence]))
        self.steps += 1
        self.say(wire.LoadReport([wire.RankLoad(0, len(self.running), 0, {}, self.steps)]))


@dataclass
class Faults:
    """What the network does to the next messages; one letter each."""

    plan: deque[str] = field(default_factory=deque[str])

    def next(self) -> str:
        return self.plan.popleft() if self.plan else "."


class Machine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.boot = 1
        self.requests = 0
        self.forget_accepted = False
        self.faults = Faults()
        self.late: list[tuple[Peer, wire.Message, bytes, bool]] = []
        self.owner_of: dict[int, Turn] = {}
        self.workers = {name: Worker(self, name) for name in ("w0", "w1")}
        self.frontends = [Frontend(self, name) for name in ("f0", "f1")]
        self.queue: deque[tuple[Peer, wire.Message, bytes]] = deque()
        self.start_router()
        for peer in (*self.frontends, *self.workers.values()):
            peer.hello()
        self.pump()

    def start_router(self) -> None:
        config = RouterConfig(
            id=RouterId("r"),
            number=1,
            incarnation=self.boot,
            endpoint="x",
            block_size=BLOCK,
            models={"m": "m"},
        )
        self.router = Router(config, now=self.now, policy=POLICY)

    def claim_ownership(self, lease: int, turn: Turn) -> None:
        assert self.owner_of.setdefault(lease, turn) is turn, "one lease, one turn"

    def to_router(self, peer: Peer, message: wire.Message, raw: bytes) -> None:
        assert type(message) in allowed(sender=peer.role, receiver=wire.Role.ROUTER)
        self.queue.append((peer, message, raw))

    def pump(self) -> None:
        """Deliver all that is under way, with what the network does to it."""
        while self.queue:
            peer, message, raw = self.queue.popleft()
            for _ in range(self.fate(peer, message, raw, to_router=True)):
                self.deliver(peer, message, raw)

    def fate(self, peer: Peer, message: wire.Message, raw: bytes, *, to_router: bool) -> int:
        """How many times it arrives now."""
        fault = self.faults.next()
        if fault == ".":
            return 1
        self.seen[f"{fault} {type(message).__name__}"] += 1
        self.seen[{"x": "lost", "2": "repeated", "~": "late"}[fault]] += 1
        if fault == "~":
            self.late.append((peer, message, raw, to_router))
        return 2 if fault == "2" else 0

    def deliver(self, peer: Peer, message: wire.Message, raw: bytes) -> None:
        sends = self.router.receive(peer, message, memoryview(raw), self.now)
        self.router.check_integrity()
        self.hand_out(sends)

    def hand_out(self, sends: Any) -> None:
        for send in sends:
            assert type(send.message) in allowed(sender=wire.Role.ROUTER, receiver=send.to.role)
            raw = bytes(send.frame)
            for _ in range(self.fate(send.to, send.message, raw, to_router=False)):
                self.arrive(send.to, send.message, raw)

    def arrive(self, peer: Peer, message: wire.Message, raw: bytes) -> None:
        for node in (*self.frontends, *self.workers.values()):
            if node.peer == peer:
                node.hear(message, memoryview(raw))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            beat_at = int(self.now) + 1.0
            due = self.router.next_deadline(self.now)
            step = min(end, beat_at, max(self.now, due) if due is not None else end)
            self.now = step
            if due is not None and due <= step:
                self.hand_out(self.router.tick(self.now))
                self.router.check_integrity()
            if step == beat_at:
                for node in (*self.frontends, *self.workers.values()):
                    node.tick()
            self.pump()
            if step >= end:
                return

    @rule(
        what=st.sampled_from(
            [
                *["turn"] * 6,
                *["store"] * 4,
                *["finish"] * 4,
                *["cancel", "cancel", "evict", "late", "late", "late"],
                *["time"] * 4,
                *["kill worker", "start worker", "freeze frontend", "reboot router", "refuse"],
            ]
        ),
        pick=st.integers(0, 30),
        faults=st.lists(st.sampled_from(".....x2~"), max_size=4),
    )
    def step(self, what: str, pick: int, faults: list[str]) -> None:
        self.faults.plan = deque(faults)
        frontend = self.frontends[pick % 2]
        turns = list(frontend.turns.values())
        turn = turns[pick % len(turns)] if turns else None
        worker = self.workers[f"w{pick // 2 % 2}"]
        match what:
            case "turn":
                self.requests += 1
                frontend.start(Turn(f"q{self.requests}", TURNS[pick % len(TURNS)]))
            case "store" if turn and turn.lease:
                self.workers[turn.worker].store(turn.chain)
                frontend.report(turn.lease, "prefilled")
            case "finish" if turn and turn.lease and self.workers[turn.worker].runs(turn.lease):
                self.finish(frontend, turn)
            case "cancel" if turn:
                self.seen["cancelled while waiting"] += not turn.lease
                if turn.lease:
                    self.workers[turn.worker].running.pop(turn.lease, None)
                frontend.end(turn, "cancelled")
            case "evict":
                worker.evict(pick)
            case "late" if self.late:
                peer, message, raw, to_router = self.late.pop(pick % len(self.late))
                if to_router:
                    self.queue.append((peer, message, raw))
                else:
                    self.arrive(peer, message, raw)
            case "time":
                self.pass_time(0.5 + pick / 10)
            case "kill worker" if worker.is_up and pick % 2:
                self.seen["worker killed"] += bool(worker.running)
                worker.is_up = False
                worker.running.clear()
            case "start worker" if not worker.is_up:
                worker.incarnation += 1
                worker.reset()
            case "freeze frontend" if pick % 3 == 0:
                self.freeze(frontend)
            case "reboot router" if pick % 3 == 0:
                self.reboot()
            case "refuse":
                self.forget_accepted = True
            case _:
                pass
        self.pump()
        self.faults.plan.clear()
        self.router.check_integrity()

    def finish(self, frontend: Frontend, turn: Turn) -> None:
        worker = self.workers[turn.worker]
        worker.store(turn.chain)
        del worker.running[turn.lease]
        frontend.end(turn, "finished", worker.sequence)

    def freeze(self, frontend: Frontend) -> None:
        """Silent for longer than the owner time-out, then alive again."""
        self.seen["owner frozen"] += bool(frontend.leases)
        tick, frontend.tick = frontend.tick, lambda: None  # type: ignore[method-assign]
        self.pass_time(7.0)
        frontend.tick = tick  # type: ignore[method-assign]

    def reboot(self) -> None:
        self.seen["router booted"] += bool(len(self.router.state.leases))
        self.boot += 1
        self.queue.clear()
        self.start_router()

    def teardown(self) -> None:
        """Nothing is lost any more: all sides come to agree, and everything can end."""
        self.late.clear()
        self.faults.plan.clear()
        self.forget_accepted = False
        for worker in self.workers.values():
            if not worker.is_up:
                worker.incarnation += 1
                worker.reset()
        for _ in range(6):
            self.pass_time(SETTLED_S / 6)
            # Turns that wait for room need others to end.
            for frontend in self.frontends:
                for turn in [t for t in frontend.turns.values() if t.lease and t.accepted][:2]:
                    self.finish(frontend, turn)
            self.pump()
        self.pass_time(SETTLED_S)
        self.agree()
        for frontend in self.frontends:
            for turn in list(frontend.turns.values()):
                self.workers[turn.worker].running.pop(turn.lease, None)
                frontend.end(turn, "cancelled")
        self.pump()
        self.pass_time(SETTLED_S)
        self.end_empty()

    def agree(self) -> None:
        held = {lease for frontend in self.frontends for lease in frontend.leases}
        mine = {lease.id for name in ("f0", "f1") for lease in self.leases_of(name)}
        assert mine == held, "router and owners hold the same leases"
        running = {lease for worker in self.workers.values() for lease in worker.running}
        assert running == held, "and the engines run them"
        waiting = [t for f in self.frontends for t in f.turns.values() if not t.lease]
        assert not waiting, f"a turn was never answered: {waiting}"
        state = self.router.state
        assert len(state.workers) == 2
        assert len(state.owners) == 2
        for worker in self.workers.values():
            known = state.workers.get(worker.peer)
            assert known is not None
            assert known.feeds[0].applied == worker.sequence
            assert state.index.held(known.slots[0], "device") == set(worker.blocks)

    def leases_of(self, owner: str) -> Any:
        found = self.router.state.owners.by_id(owner)
        return [] if found is None else self.router.state.leases.of_owner(found.peer)

    def end_empty(self) -> None:
        numbers = self.router.status(self.now).numbers
        for name in (
            "leases",
            "promises",
            "turns_waiting",
            "pending_prefill_tokens",
            "decode_blocks",
        ):
            assert numbers[name] == 0, name
        state = self.router.state
        assert state.leases.begun == state.leases.ended.total()
        self.router.check_integrity()


def test_all_sides_agree_again_whatever_was_lost_repeated_or_late() -> None:
    Machine.seen.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        "lost",
        "repeated",
        "late",
        "list asked",
        "fenced",
        "not dispatched",
        "cancelled while waiting",
        "worker killed",
        "owner frozen",
        "router booted",
        "revoked worker_lost",
        "revoked dispatch_timeout",
        *(f"x {kind}" for kind in ("Grant", "Route", "Progress", "KvEvents")),
        *(f"~ {kind}" for kind in ("Grant", "Progress", "KvEvents")),
    ):
        assert Machine.seen[event], f"never happened: {event} {Machine.seen}"
