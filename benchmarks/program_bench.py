"""What programs cost the router: a decision among many live programs, a round in which ten changed, an expiry.

A decision is everything from Route to Grant inside the core, the match of an 8k-block prompt included. All in this
process, no sockets.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from typing import Any

from fermata.core.ids import LeaseId, RequestId, RouterId, RoutingKey, SessionId
from fermata.core.spec import LeasesSpec, LivenessSpec, RouterPolicySpec, SchedulerSpec
from fermata.router.core import Router, RouterConfig, Send
from fermata.router.expiry import Expiry
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

BLOCK = 64
WORKERS = 64
PROMPT_BLOCKS = 8192
PROGRAM_BLOCKS = 24
ROUNDS = 400
OWNER = Peer(wire.Role.FRONTEND, "f0", 1)
SILENT = LivenessSpec(worker_timeout_s=1e6, owner_timeout_s=1e6, stall_timeout_s=1e6)


class World:
    """64 workers and so many programs between turns, all resident."""

    def __init__(self, kind: Any, programs: int) -> None:
        self.now = 1000.0
        self.random = Random(3)
        policy = RouterPolicySpec(
            scheduler=SchedulerSpec(type=kind), leases=LeasesSpec(liveness=SILENT)
        )
        config = RouterConfig(
            id=RouterId("router-0"),
            number=1,
            incarnation=3,
            endpoint="tcp://127.0.0.1:1",
            block_size=BLOCK,
            models={"m": "m"},
        )
        self.router = Router(config, now=self.now, policy=policy)
        self.workers = [Peer(wire.Role.WORKER, f"w{i}", 1) for i in range(WORKERS)]
        self.events = [0] * WORKERS
        self.say(OWNER, wire.Hello("frontend", OWNER.id, 1))
        self.say(OWNER, wire.LeaseClaims([]))
        for peer in self.workers:
            self.join(peer)
        self.chains: list[array[int]] = []
        for number in range(programs):
            chain = self.fresh(PROGRAM_BLOCKS)
            self.chains.append(chain)
            self.finish(self.grant(f"s{number}", chain, f"first-{number}"))

    def join(self, peer: Peer) -> None:
        info = wire.WorkerInfo(
            endpoint="tcp://w",
            model="m",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks={"device": 40_000},
            max_sequences=256,
            max_batched_tokens=8192,
            context_length=1 << 30,
            features=["kv_events"],
        )
        self.say(peer, wire.Hello("worker", peer.id, 1, info))
        self.say(peer, wire.SnapshotChunk(0, 1, 0, True, -1, []))

    def fresh(self, blocks: int) -> array[int]:
        return array("Q", [self.random.getrandbits(64) for _ in range(blocks)])

    def store(self, worker: int, chain: array[int]) -> None:
        event = wire.KvEvents(0, self.events[worker], [wire.KvStored(None, len(chain))])
        self.events[worker] += 1
        self.say(self.workers[worker], event, chain.tobytes())

    def route(self, session: str, chain: array[int], request: str) -> tuple[wire.Route, bytes]:
        route = wire.Route(
            request=RequestId(request),
            attempt=0,
            key=RoutingKey(session),
            epoch=0,
            model="m",
            input_tokens=len(chain) * BLOCK + 5,
            max_tokens=100,
            session=SessionId(session),
        )
        return route, chain.tobytes()

    def grant(self, session: str, chain: array[int], request: str) -> LeaseId:
        sends = self.say(OWNER, *self.route(session, chain, request))
        (grant,) = [send.message for send in sends if isinstance(send.message, wire.Grant)]
        return grant.lease

    def finish(self, lease: LeaseId) -> None:
        usage = wire.Usage(PROGRAM_BLOCKS * BLOCK, 20, 0)
        entry = wire.LeaseProgress(lease, "finished", 20, usage, "tool_calls")
        self.say(OWNER, wire.Progress([entry]))

    def say(self, peer: Peer, message: wire.Message, frame: bytes = b"") -> list[Send]:
        return self.router.receive(peer, message, memoryview(frame), self.now)


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e6


def decision_us(kind: str, programs: int) -> tuple[float, float]:
    """p50 and p99 of Route to Grant, for turns of live programs whose prompt has 8k blocks."""
    world = World(kind, programs)
    prompts: list[array[int]] = []
    for number in range(16):
        prompt = world.fresh(PROMPT_BLOCKS)
        prompts.append(prompt)
        for worker in (number, number + 16, number + 32):  # of several depths
            world.store(worker, prompt[: PROMPT_BLOCKS - 512 * (worker // 16)])
    for number, prompt in enumerate(prompts):  # their programs are known with that context
        world.finish(world.grant(f"s{number}", prompt, f"known-{number}"))
    taken: list[float] = []
    gc.collect()
    for turn in range(ROUNDS):
        number = turn % 16
        message, frame = world.route(f"s{number}", prompts[number], f"turn-{turn}")
        view = memoryview(frame)
        sends: list[Send] = []
        taken.append(
            timed(lambda: sends.extend(world.router.receive(OWNER, message, view, world.now)))  # noqa: B023
        )
        (grant,) = [send.message for send in sends if isinstance(send.message, wire.Grant)]
        world.finish(grant.lease)
    taken.sort()
    return median(taken), taken[int(0.99 * len(taken))]


def tick_us(programs: int) -> float:
    """A round after ten programs began a turn and ten others ended one."""
    world = World("ThunderAgent", programs)
    rule = world.router.state.admission
    assert rule is not None
    taken: list[float] = []
    for turn in range(ROUNDS // 4):
        leases = []
        for each in range(10):
            number = (turn * 10 + each) % programs
            chain = world.chains[number] + world.fresh(2)
            message, frame = world.route(f"s{number}", chain, f"t{turn}-{each}")
            sends = world.say(OWNER, message, frame)
            leases += [s.message.lease for s in sends if isinstance(s.message, wire.Grant)]
        taken.append(timed(lambda: rule.round(world.now)))
        for lease in leases:
            world.finish(lease)
    return median(taken)


def expiry_us() -> float:
    """One percent of a million entries, an entry."""
    expiry: Expiry[int] = Expiry(width_s=0.1)
    for number in range(1_000_000):
        expiry.set(number, 10.0 if number % 100 == 0 else 2000.0 + number % 1000)
    return timed(lambda: expiry.due(20.0)) / 10_000


def measurements() -> Iterator[dict[str, object]]:
    def row(name: str, value: float, unit: str, target: float | None) -> dict[str, object]:
        return {"name": name, "value": value, "unit": unit, "target": target, "better": "lower"}

    few, _ = decision_us("ThunderAgent", 100)
    many, tail = decision_us("ThunderAgent", 10_000)
    plain, _ = decision_us("KVAware", 10_000)
    yield row("programs: decision, 8k blocks, 64 workers, 10,000 programs, p50", many, "us", 100)
    yield row("programs: the same, p99", tail, "us", None)
    yield row("programs: the same, over 100 programs", many / few, "x", 1.25)
    yield row("programs: the same, over KVAware", many / plain, "x", 1.25)
    yield row("programs: round, 10,000 programs, 10 changed", tick_us(10_000), "us", 200)
    yield row("programs: expiry of 1 % of 1 M, an entry", expiry_us(), "us", None)


if __name__ == "__main__":
    for each in measurements():
        print(each)
