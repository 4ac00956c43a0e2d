"""The real router core and two real simulated engines, in virtual time, at twice the KV they hold.

Agents in tool loops: each turn resends the history and adds a tool result. Plain KV routing admits every turn, so that
each program evicts another between its turns; ThunderAgent holds some between turns instead. Gaps spread around their
mean: where they are memoryless, LRU keeps those who come back at once, and it is 0.57 against 0.90 of the tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Literal

from fermata.core.hashing import sequence_hashes
from fermata.core.ids import LeaseId, RequestId, RouterId, RoutingKey, SessionId
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
from fermata.worker.engine.base import EngineOutput, EngineRequest
from fermata.worker.engine.simulated import SimulatedEngine
from fermata.worker.engine.speech import Speech

BLOCK = 64
AGENTS = 32
TURNS = 20
SYSTEM_TOKENS = 512
FIRST_TOKENS = 6144
TOOL_TOKENS = 192
OUTPUT_TOKENS = 48
GAP_S = 4.0
RESUME_TIMEOUT_S = 1800.0
FINAL_TOKENS = FIRST_TOKENS + SYSTEM_TOKENS + TURNS * (TOOL_TOKENS + OUTPUT_TOKENS)
KV_BLOCKS = AGENTS * FINAL_TOKENS // BLOCK // 2 // 2
"""A worker: both together hold half of what all programs are in the end."""
TIMING = TimingSpec(prefill_linear=4 * 0.01518)
"""Prefill at four times the default's price, as it is for large models."""
OWNER = Peer(wire.Role.FRONTEND, "f0", 1)
SILENT = LivenessSpec(worker_timeout_s=1e6, owner_timeout_s=1e6, stall_timeout_s=1e6)


@dataclass
class Agent:
    number: int
    tokens: array[int]
    turns: int = 0
    ready_at: float = 0.0

    @property
    def session(self) -> SessionId:
        return SessionId(f"agent-{self.number}")


@dataclass
class Worker:
    peer: Peer
    engine: SimulatedEngine
    next_event: int = 0
    due: float | None = None


@dataclass
class Report:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waits: list[float] = field(default_factory=list)
    completed: int = 0
    ended_at: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Simulation:
    def __init__(self, kind: Literal["KVAware", "ThunderAgent"], *, agents: int = AGENTS) -> None:
        self.now = 0.0
        self.random = Random(7)
        policy = RouterPolicySpec(
            scheduler=SchedulerSpec(
                type=kind, thunder_agent=ThunderAgentSpec(resume_timeout_s=RESUME_TIMEOUT_S)
            ),
            leases=LeasesSpec(liveness=SILENT),
        )
        config = RouterConfig(
            id=RouterId("router-0"),
            number=1,
            incarnation=3,
            endpoint="tcp://127.0.0.1:1",
            block_size=BLOCK,
            models={"m": "m"},
        )
        self.router = Router(config, now=0.0, policy=policy)
        self.report = Report()
        self.calendar: list[tuple[float, int, Agent]] = []
        self.ties = count()
        self.turns: dict[RequestId, Agent] = {}
        self.leases: dict[LeaseId, tuple[RequestId, Worker, array[int]]] = {}
        self.workers: dict[str, Worker] = {}
        self.say(OWNER, wire.Hello("frontend", OWNER.id, 1))
        self.say(OWNER, wire.LeaseClaims([]))
        for number in range(2):
            self.join(f"w{number}")
        system = array("I", range(SYSTEM_TOKENS))
        for number in range(agents):
            agent = Agent(number, system + self.words(FIRST_TOKENS))
            self.plan(agent, self.random.uniform(0, 5))

    def run(self) -> Report:
        while self.calendar or self.turns:
            self.now = max(self.now, self.next_at())
            while self.calendar and self.calendar[0][0] <= self.now:
                self.begin(heappop(self.calendar)[2])
            for worker in self.workers.values():
                while (at := worker.engine.next_step_at(self.now)) is not None and at <= self.now:
                    self.step(worker)
            due = self.router.next_deadline(self.now)
            if due is not None and due <= self.now:
                self.take(self.router.tick(self.now))
        self.router.check_integrity()
        self.report.ended_at = self.now
        self.report.numbers = self.router.status(self.now).numbers
        return self.report

    def next_at(self) -> float:
        times = [self.calendar[0][0]] if self.calendar else []
        for worker in self.workers.values():
            at = worker.engine.next_step_at(self.now)
            times += [] if at is None else [at]
        due = self.router.next_deadline(self.now)
        times += [] if due is None else [due]
        return min(times)

    def begin(self, agent: Agent) -> None:
        request = RequestId(f"{agent.session}/{agent.turns}")
        agent.ready_at = self.now
        self.turns[request] = agent
        frame = sequence_hashes(agent.tokens.tobytes(), BLOCK)
        route = wire.Route(
            request=request,
            attempt=0,
            key=RoutingKey(agent.session),
            epoch=0,
            model="m",
            input_tokens=len(agent.tokens),
            max_tokens=OUTPUT_TOKENS,
            session=agent.session,
            final=agent.turns == TURNS - 1,
        )
        self.say(OWNER, route, frame.tobytes())

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, wire.Grant):
                self.generate(send.message)
            assert not isinstance(send.message, wire.Reject | wire.Revoke), send.message

    def generate(self, grant: wire.Grant) -> None:
        agent = self.turns[grant.request]
        self.report.waits.append(self.now - agent.ready_at)
        worker = self.workers[grant.worker]
        words = self.words(OUTPUT_TOKENS)
        worker.engine.submit(
            EngineRequest(
                lease=grant.lease,
                tokens=agent.tokens.tobytes(),
                sampling=wire.Sampling(max_tokens=OUTPUT_TOKENS),
            ),
            Speech(words, eos=0),
            self.now,
        )
        self.leases[grant.lease] = (grant.request, worker, array("I"))
        self.progress(grant.lease, "accepted")

    def step(self, worker: Worker) -> None:
        result = worker.engine.step(self.now)
        if result.events:
            message = wire.KvEvents(0, worker.next_event, result.events)
            worker.next_event += len(result.events)
            self.say(worker.peer, message, result.hashes.tobytes())
        for output in result.outputs:
            self.hear(worker, output)

    def hear(self, worker: Worker, output: EngineOutput) -> None:
        request, _, said = self.leases[output.lease]
        agent = self.turns[request]
        if output.cached_tokens >= 0 and not said:
            self.report.prompt_tokens += len(agent.tokens)
            self.report.cached_tokens += output.cached_tokens
            self.progress(output.lease, "prefilled")
        said.frombytes(output.tokens)
        if not output.finish:
            return
        assert output.finish in ("stop", "length"), output
        del self.turns[request], self.leases[output.lease]
        agent.turns += 1
        done = agent.turns == TURNS
        usage = wire.Usage(len(agent.tokens), len(said), max(0, output.cached_tokens))
        self.progress(
            output.lease,
            "finished",
            output_tokens=len(said),
            usage=usage,
            reason="stop" if done else "tool_calls",
            event_sequence=worker.next_event - 1,
        )
        self.report.completed += done
        if not done:
            agent.tokens += said + self.words(TOOL_TOKENS)
            self.plan(agent, self.now + self.random.uniform(0.5, 1.5) * GAP_S)

    def progress(self, lease: LeaseId, kind: str, **fields: object) -> None:
        self.say(OWNER, wire.Progress([wire.LeaseProgress(lease, kind, **fields)]))  # type: ignore[arg-type]

    def plan(self, agent: Agent, at: float) -> None:
        heappush(self.calendar, (at, next(self.ties), agent))

    def words(self, number: int) -> array[int]:
        return array("I", [self.random.randrange(1000, 1 << 20) for _ in range(number)])

    def say(self, peer: Peer, message: wire.Message, frame: bytes = b"") -> list[Send]:
        sends = self.router.receive(peer, message, memoryview(frame), self.now)
        self.take(sends)
        return sends

    def join(self, name: str) -> None:
        engine = SimulatedEngine(
            SimulatedSpec(
                kv_blocks=KV_BLOCKS, max_sequences=32, max_batched_tokens=8192, timing=TIMING
            ),
            block_size=BLOCK,
            routing_block_size=BLOCK,
            context_length=1 << 20,
        )
        peer = Peer(wire.Role.WORKER, name, 1)
        self.workers[name] = Worker(peer, engine)
        info = wire.WorkerInfo(
            endpoint=f"tcp://{name}",
            model="m",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks=engine.info.kv_blocks,
            max_sequences=engine.info.max_sequences,
            max_batched_tokens=engine.info.max_batched_tokens,
            context_length=engine.info.context_length,
            features=list(engine.info.features),
        )
        for send in self.say(peer, wire.Hello("worker", name, 1, info)):
            if isinstance(send.message, wire.SnapshotRequest):
                ask = send.message
                self.say(peer, wire.SnapshotChunk(ask.rank, ask.request, 0, True, -1, []))


def test_at_twice_the_capacity_thunder_agent_finds_twice_as_much_in_cache() -> None:
    plain = Simulation("KVAware").run()
    thunder = Simulation("ThunderAgent").run()
    for report in (plain, thunder):
        assert report.completed == AGENTS
        assert len(report.waits) == AGENTS * TURNS
    assert thunder.numbers["program_pauses"] > 0
    assert thunder.numbers["program_resumes"] > 0
    assert thunder.cached_share >= 2 * plain.cached_share, (
        thunder.cached_share,
        plain.cached_share,
    )
    assert thunder.ended_at < plain.ended_at, "and what is not computed twice is time gained"
    assert max(thunder.waits) <= RESUME_TIMEOUT_S
    assert thunder.numbers["programs"] == 0
    assert thunder.numbers["programs_created"] == AGENTS


def test_below_capacity_nobody_waits_and_nothing_differs() -> None:
    plain = Simulation("KVAware", agents=6).run()
    thunder = Simulation("ThunderAgent", agents=6).run()
    assert thunder.numbers.get("program_pauses", 0) == 0
    assert thunder.waits == plain.waits == [0.0] * len(plain.waits)
    assert (thunder.cached_tokens, thunder.ended_at) == (plain.cached_tokens, plain.ended_at)
