"""Two router cores and two simulated engines in virtual time, at twice the KV they hold: as good as one router.

Workers lease their KV budget in shares, with the budgets and the messages of the live service. What both routers have
charged on a rank is added up after every event.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec
import pytest

from fermata.core.hashing import sequence_hashes
from fermata.core.ids import LeaseId, RequestId, RouterId, RoutingKey, SessionId, lease_router
from fermata.core.ring import Ring
from fermata.core.spec import (
    LeasesSpec,
    LivenessSpec,
    RouterPolicySpec,
    SchedulerSpec,
    SimulatedSpec,
    ThunderAgentSpec,
    TimingSpec,
)
from fermata.router.core import Router, RouterConfig, Send
from fermata.wire import messages as wire
from fermata.wire.roles import Peer
from fermata.worker.budget import Budget
from fermata.worker.engine.base import EngineOutput, EngineRequest
from fermata.worker.engine.simulated import SimulatedEngine
from fermata.worker.engine.speech import Speech
from fermata.worker.sessions import Sessions

BLOCK = 64
AGENTS = 24
TURNS = 12
SYSTEM_TOKENS = 512
FIRST_TOKENS = 5632
TOOL_TOKENS = 192
OUTPUT_TOKENS = 48
GAP_S = 4.0
FINAL_TOKENS = SYSTEM_TOKENS + FIRST_TOKENS + TURNS * (TOOL_TOKENS + OUTPUT_TOKENS)
WORKERS = 2
KV_BLOCKS = AGENTS * FINAL_TOKENS // BLOCK // 2 // WORKERS
CAPACITY = KV_BLOCKS * BLOCK
TIMING = TimingSpec(prefill_linear=4 * 0.01518)
OWNER = Peer(wire.Role.FRONTEND, "f0", 1)
OPERATOR = Peer(wire.Role.OPERATOR, "up", 1)
ROUTER = Peer(wire.Role.ROUTER, "router-9", 1)
"""Whichever hands over."""
POLICY = RouterPolicySpec(
    scheduler=SchedulerSpec(
        type="ThunderAgent", thunder_agent=ThunderAgentSpec(resume_timeout_s=1800.0)
    ),
    leases=LeasesSpec(
        liveness=LivenessSpec(worker_timeout_s=1e6, owner_timeout_s=1e6, stall_timeout_s=1e6)
    ),
)


def ring_of(routers: int, *, epoch: int) -> Ring:
    return Ring(
        epoch, {RouterId(f"router-{i}"): f"tcp://127.0.0.1:{i + 1}" for i in range(routers)}
    )


@dataclass
class Agent:
    number: int
    tokens: array[int]
    turns: int = 0

    @property
    def session(self) -> SessionId:
        return SessionId(f"agent-{self.number}")


@dataclass
class Worker:
    peer: Peer
    engine: SimulatedEngine
    budget: Budget = field(default_factory=lambda: Budget(CAPACITY))
    sessions: Sessions = field(default_factory=Sessions)
    next_event: int = 0
    events: list[tuple[wire.KvEvents, bytes]] = field(default_factory=list)


@dataclass
class Running:
    request: RequestId
    agent: Agent
    worker: Worker
    said: array[int] = field(default_factory=lambda: array("I"))


class Cluster:
    def __init__(self, *, routers: int, seed: int = 7) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.ring = ring_of(routers, epoch=1)
        self.boots = count(1)
        self.routers: list[Router] = []
        self.workers = [self.worker(f"w{i}") for i in range(WORKERS)]
        self.calendar: list[tuple[float, int, Agent]] = []
        self.ties = count()
        self.waiting: dict[RequestId, Agent] = {}
        self.running: dict[LeaseId, Running] = {}
        self.completed = self.turns = 0
        self.most_charged = 0.0
        """Of a rank's KV, by all routers together."""
        self.handovers = self.moved = 0
        for number in range(routers):
            self.routers.append(self.boot(number))
        for number in range(routers):
            self.introduce(number)
        self.next_second = 1.0
        system = array("I", range(SYSTEM_TOKENS))
        for number in range(AGENTS):
            agent = Agent(number, system + self.words(FIRST_TOKENS))
            self.plan(agent, self.random.uniform(0, 5))

    # Setting up

    def boot(self, number: int) -> Router:
        config = RouterConfig(
            id=RouterId(f"router-{number}"),
            number=number,
            incarnation=next(self.boots),
            endpoint="tcp://127.0.0.1:1",
            block_size=BLOCK,
            models={"m": "m"},
        )
        return Router(config, now=self.now, policy=None)

    def introduce(self, number: int) -> None:
        """A router that booted hears from everybody."""
        self.push(number)
        self.say(number, OWNER, wire.Hello("frontend", OWNER.id, 1))
        self.claim(number)
        for worker in self.workers:
            info = wire.WorkerInfo(
                endpoint=f"tcp://{worker.peer.id}",
                model="m",
                ranks=1,
                block_size=BLOCK,
                routing_block_size=BLOCK,
                kv_blocks=worker.engine.info.kv_blocks,
                max_sequences=worker.engine.info.max_sequences,
                max_batched_tokens=worker.engine.info.max_batched_tokens,
                context_length=worker.engine.info.context_length,
                features=list(worker.engine.info.features),
            )
            asks = self.say(number, worker.peer, wire.Hello("worker", worker.peer.id, 1, info))
            worker.budget.joined(number, self.now)
            worker.budget.rebalance(self.tokens_running(worker), self.now)
            self.report_load(worker, number)
            for send in asks:
                if isinstance(send.message, wire.SnapshotRequest):
                    self.snapshot(number, worker, send.message)

    def push(self, number: int) -> None:
        ring = wire.Ring(self.ring.epoch, [(str(n), at) for n, at in self.ring.members.items()])
        spec = msgspec.json.encode(POLICY)
        self.say(number, OPERATOR, wire.SetPolicy("p", 1, self.ring.epoch, spec, ring))

    def claim(self, number: int) -> None:
        claims: list[wire.LeaseClaim] = []
        frame = b""
        for lease, run in self.running.items():
            if lease_router(lease) != number:
                continue
            hashes = sequence_hashes(run.agent.tokens.tobytes(), BLOCK)
            frame += hashes.tobytes()
            claims.append(
                wire.LeaseClaim(
                    lease=lease,
                    request=run.request,
                    attempt=0,
                    worker=run.worker.peer.id,  # type: ignore[arg-type]
                    rank=0,
                    input_tokens=len(run.agent.tokens),
                    output_tokens=len(run.said),
                    blocks=len(hashes),
                    accepted=True,
                    prefilled=bool(run.said),
                    key=RoutingKey(run.agent.session),
                    session=run.agent.session,
                )
            )
        self.say(number, OWNER, wire.LeaseClaims(claims), frame)

    def snapshot(self, number: int, worker: Worker, ask: wire.SnapshotRequest) -> None:
        """Its index is left empty: what is asked here is about programs."""
        sequence = worker.next_event - 1
        records = list(worker.sessions.records(0, self.now))
        chunk = wire.SnapshotChunk(0, ask.request, 0, True, sequence, [], records)
        self.say(number, worker.peer, chunk)

    def worker(self, name: str) -> Worker:
        engine = SimulatedEngine(
            SimulatedSpec(
                kv_blocks=KV_BLOCKS, max_sequences=32, max_batched_tokens=8192, timing=TIMING
            ),
            block_size=BLOCK,
            routing_block_size=BLOCK,
            context_length=1 << 20,
        )
        return Worker(Peer(wire.Role.WORKER, name, 1), engine)

    # Running

    def run(self, *, until: float = 1e9, turns: int = AGENTS * TURNS) -> None:
        while (self.calendar or self.waiting or self.running) and self.turns < turns:
            at = self.next_at()
            if at > until:
                return
            self.now = max(self.now, at)
            while self.calendar and self.calendar[0][0] <= self.now:
                self.ask(heappop(self.calendar)[2])
            for worker in self.workers:
                while (due := worker.engine.next_step_at(self.now)) is not None and due <= self.now:
                    self.step(worker)
            for router in self.routers:
                due = router.next_deadline(self.now)
                if due is not None and due <= self.now:
                    self.take(router.tick(self.now))
            if self.now >= self.next_second:
                self.next_second += 1.0
                self.second()
            self.add_up()
        for router in self.routers:
            router.check_integrity()

    def next_at(self) -> float:
        times = [self.next_second]
        times += [self.calendar[0][0]] if self.calendar else []
        times += [at for w in self.workers if (at := w.engine.next_step_at(self.now)) is not None]
        times += [at for r in self.routers if (at := r.next_deadline(self.now)) is not None]
        return min(times)

    def second(self) -> None:
        for worker in self.workers:
            worker.budget.rebalance(self.tokens_running(worker), self.now)
            worker.budget.check_integrity()
            for number in range(len(self.routers)):
                self.report_load(worker, number)

    def report_load(self, worker: Worker, number: int) -> None:
        load, share = worker.engine.load(), worker.budget.share(number)
        rank = wire.RankLoad(
            rank=0,
            running=load.running,
            waiting=load.waiting,
            kv_used={"device": load.kv_referenced},
            steps=load.steps,
            routers=[
                wire.RouterLoad(n, t.active, t.waiting, t.charged_tokens)
                for n, t in load.routers.items()
            ],
            share_tokens=share.tokens,
            share_number=share.number,
        )
        for send in self.say(number, worker.peer, wire.LoadReport([rank])):
            if isinstance(send.message, wire.Demand):
                (ask,) = send.message.ranks
                worker.budget.heard(
                    number,
                    charged=ask.charged_tokens,
                    waiting=ask.waiting_tokens,
                    number=ask.share_number,
                    now=self.now,
                )

    def tokens_running(self, worker: Worker) -> dict[int, int]:
        return {n: t.charged_tokens for n, t in worker.engine.load().routers.items()}

    def charged(self, worker: Worker) -> float:
        """By all routers, as a share of the rank's KV."""
        total = 0.0
        for router in self.routers:
            known = router.state.workers.by_id(worker.peer.id)  # type: ignore[arg-type]
            if known is not None:
                total += router.state.programs.occupancy.use(known.slots[0])
        return total / CAPACITY

    def add_up(self) -> None:
        self.most_charged = max(self.most_charged, *map(self.charged, self.workers))

    def ask(self, agent: Agent) -> None:
        self.waiting[self.request(agent)] = agent
        self.route(agent)

    def request(self, agent: Agent) -> RequestId:
        return RequestId(f"{agent.session}/{agent.turns}")

    def route(self, agent: Agent) -> None:
        key = RoutingKey(agent.session)
        route = wire.Route(
            request=self.request(agent),
            attempt=0,
            key=key,
            epoch=self.ring.epoch,
            model="m",
            input_tokens=len(agent.tokens),
            max_tokens=OUTPUT_TOKENS,
            session=agent.session,
            final=agent.turns == TURNS - 1,
        )
        hashes = sequence_hashes(agent.tokens.tobytes(), BLOCK)
        self.say(self.number_for(key), OWNER, route, hashes.tobytes())

    def number_for(self, key: RoutingKey) -> int:
        return int(self.ring.router_for(key).rpartition("-")[2])

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, wire.Grant):
                self.generate(send.message)
            elif isinstance(send.message, wire.Handover):
                self.handovers += 1
                self.say(int(send.to.id.rpartition("-")[2]), ROUTER, send.message)
            elif isinstance(send.message, wire.Moved):
                self.moved += 1
                self.route(self.waiting[send.message.request])
            assert not isinstance(send.message, wire.Reject | wire.Revoke), send

    def generate(self, grant: wire.Grant) -> None:
        agent = self.waiting.pop(grant.request)
        (worker,) = [w for w in self.workers if w.peer.id == grant.worker]
        request = EngineRequest(
            lease=grant.lease,
            tokens=agent.tokens.tobytes(),
            sampling=wire.Sampling(max_tokens=OUTPUT_TOKENS),
        )
        worker.engine.submit(request, Speech(self.words(OUTPUT_TOKENS), eos=0), self.now)
        worker.sessions.begin(
            agent.session,
            parent=SessionId(""),
            key=RoutingKey(agent.session),
            rank=0,
            tokens=len(agent.tokens),
            now=self.now,
        )
        self.running[grant.lease] = Running(grant.request, agent, worker)
        self.progress(grant.lease, "accepted")

    def step(self, worker: Worker) -> None:
        result = worker.engine.step(self.now)
        if result.events:
            message = wire.KvEvents(0, worker.next_event, result.events)
            worker.next_event += len(result.events)
            for number in range(len(self.routers)):
                self.say(number, worker.peer, message, result.hashes.tobytes())
        for output in result.outputs:
            self.hear(worker, output)

    def hear(self, worker: Worker, output: EngineOutput) -> None:
        run = self.running[output.lease]
        agent = run.agent
        if output.cached_tokens >= 0 and not run.said:
            self.progress(output.lease, "prefilled")
        run.said.frombytes(output.tokens)
        if not output.finish:
            return
        assert output.finish in ("stop", "length"), output
        agent.turns += 1
        self.turns += 1
        done = agent.turns == TURNS
        worker.sessions.end(
            agent.session, tokens=len(agent.tokens) + len(run.said), final=done, now=self.now
        )
        usage = wire.Usage(len(agent.tokens), len(run.said), max(0, output.cached_tokens))
        del self.running[output.lease]
        self.progress(
            output.lease,
            "finished",
            output_tokens=len(run.said),
            usage=usage,
            reason="stop" if done else "tool_calls",
            event_sequence=worker.next_event - 1,
        )
        self.completed += done
        if not done:
            agent.tokens += run.said + self.words(TOOL_TOKENS)
            self.plan(agent, self.now + self.random.uniform(0.5, 1.5) * GAP_S)

    def progress(self, lease: LeaseId, kind: str, **fields: object) -> None:
        entry = wire.LeaseProgress(lease, kind, **fields)  # type: ignore[arg-type]
        self.say(lease_router(lease), OWNER, wire.Progress([entry]))

    def plan(self, agent: Agent, at: float) -> None:
        heappush(self.calendar, (at, next(self.ties), agent))

    def words(self, number: int) -> array[int]:
        return array("I", [self.random.randrange(1000, 1 << 20) for _ in range(number)])

    def say(self, number: int, peer: Peer, message: wire.Message, frame: bytes = b"") -> list[Send]:
        sends = self.routers[number].receive(peer, message, memoryview(frame), self.now)
        self.take(sends)
        return sends

    def total(self, number: str) -> float:
        return sum(router.status(self.now).numbers.get(number, 0) for router in self.routers)

    # Faults

    def kill(self, number: int) -> None:
        """It is gone and comes back at once, knowing nothing; owners ask again for what had no answer."""
        self.routers[number] = self.boot(number)
        self.introduce(number)
        for agent in list(self.waiting.values()):
            if self.number_for(RoutingKey(agent.session)) == number:
                self.route(agent)

    def rescale(self, routers: int) -> None:
        """Another ring. A router that is not in it stays, for the turns that it granted."""
        self.ring = ring_of(routers, epoch=self.ring.epoch + 1)
        before = len(self.routers)
        for number in range(before, routers):
            self.routers.append(self.boot(number))
            self.introduce(number)
        for number in range(before):
            self.push(number)
        for agent in list(self.waiting.values()):  # owners hear of the ring, and ask anew
            self.route(agent)


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_two_routers_at_twice_the_capacity_are_as_good_as_one_and_never_fill_more(seed: int):
    one, two = Cluster(routers=1, seed=seed), Cluster(routers=2, seed=seed)
    for cluster in (one, two):
        cluster.run()
        assert cluster.completed == AGENTS
        assert cluster.total("program_pauses") > 0
    assert all(router.status(two.now).numbers["routes"] > 0 for router in two.routers)
    assert 0.8 < two.most_charged <= 0.95, "at every moment"
    assert one.now / two.now >= 0.9, "turns a minute"


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_router_killed_at_twice_the_capacity_fills_no_more_after_it(seed: int):
    cluster = Cluster(routers=2, seed=seed)
    cluster.run(turns=AGENTS * TURNS // 3)
    before = [cluster.charged(worker) for worker in cluster.workers]
    cluster.kill(0)
    after = [cluster.charged(worker) for worker in cluster.workers]
    assert cluster.routers[0].status(cluster.now).numbers["program_remembered"] > 0
    assert min(after) > 0.5, "what was in place has its place again"
    for was, now in zip(before, after, strict=True):
        assert now <= was
    cluster.most_charged = 0.0
    cluster.run()
    assert cluster.completed == AGENTS
    assert cluster.most_charged <= 0.95


@pytest.mark.parametrize("seed", [7, 8])
def test_routers_join_and_leave_at_twice_the_capacity_and_no_waiting_turn_is_lost(seed: int):
    cluster = Cluster(routers=2, seed=seed)
    for third, routers in enumerate((3, 1, 2), start=1):
        cluster.run(turns=AGENTS * TURNS * third // 4)
        while not cluster.waiting:  # some soon do
            cluster.run(turns=cluster.turns + 1)
        cluster.rescale(routers)
    cluster.run()
    assert cluster.completed == AGENTS
    assert cluster.handovers >= 3
    assert cluster.moved > 0
    assert cluster.total("programs") == 0
    assert cluster.most_charged <= 1.0
