"""A router over real sockets, with workers and frontends played by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from fermata.core.clock import SystemClock
from fermata.core.ids import RequestId, RouterId, RoutingKey
from fermata.core.lease_digest import LeaseDigest
from fermata.core.spec import (
    AgentDeployment,
    AgentDeploymentSpec,
    LeasesSpec,
    LivenessSpec,
    Metadata,
    ModelSpec,
    RouterPolicySpec,
    WorkerGroupSpec,
)
from fermata.router.core import RouterConfig
from fermata.router.metrics import serve_metrics
from fermata.router.service import RouterService
from fermata.wire import messages as wire
from fermata.wire.socket import Link, Packet, Peer, new_context

BLOCK = 64
M = TypeVar("M", bound=wire.Message)
# Real seconds, short enough to see peers die in a test.
LIMITS = LivenessSpec(heartbeat_s=0.1, worker_timeout_s=0.6, owner_timeout_s=0.8)
POLICY = RouterPolicySpec(leases=LeasesSpec(dispatch_timeout_s=0.5, liveness=LIMITS))


async def until(claim: Callable[[], Any], *, within_s: float = 10.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not claim():
        assert loop.time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


def hashes(*names: int) -> bytes:
    return array("Q", names).tobytes()


class Node:
    """One peer: a Link, and all it was sent."""

    def __init__(self, bench: Bench, role: wire.Role, name: str, incarnation: int) -> None:
        self.me = Peer(role, name, incarnation)
        self.mail: list[Packet] = []
        self.link = Link(bench.context, bench.endpoint, me=self.me, receive=self._hear)

    def _hear(self, packet: Packet) -> None:
        self.mail.append(Packet(packet.message, memoryview(bytes(packet.frame))))
        self.heard(packet.message)

    def heard(self, message: wire.Message) -> None:
        pass

    def say(self, message: wire.Message, frame: bytes = b"") -> None:
        assert self.link.send(message, frame)

    def of(self, kind: type[M]) -> list[M]:
        return [p.message for p in self.mail if isinstance(p.message, kind)]

    def revoked(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for message, frame in self.mail:
            if isinstance(message, wire.Revoke):
                found.setdefault(message.reason, []).extend(frame.cast("Q"))
        return found

    async def get(self, kind: type[M], count: int = 1) -> M:
        """The `count`-th of a kind."""
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]


class FakeWorker(Node):
    """Answers SnapshotRequests with the chains it holds."""

    def __init__(self, bench: Bench, name: str, incarnation: int = 1) -> None:
        self.chains: list[list[int]] = []
        self.sequence = -1
        super().__init__(bench, wire.Role.WORKER, name, incarnation)
        info = wire.WorkerInfo(
            endpoint=f"tcp://{name}",
            model="tiny",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks={"device": 1000},
            max_sequences=8,
            max_batched_tokens=8192,
            context_length=100_000,
            features=["kv_events"],
        )
        self.say(wire.Hello("worker", name, incarnation, info))

    def heard(self, message: wire.Message) -> None:
        if isinstance(message, wire.SnapshotRequest):
            stored = [wire.KvStored(None, len(chain)) for chain in self.chains]
            flat = [block for chain in self.chains for block in chain]
            chunk = wire.SnapshotChunk(0, message.request, 0, True, self.sequence, stored)
            self.say(chunk, hashes(*flat))

    def store(self, *chain: int, lose: bool = False) -> None:
        self.chains.append(list(chain))
        self.sequence += 1
        if not lose:
            event = wire.KvEvents(0, self.sequence, [wire.KvStored(None, len(chain))])
            self.say(event, hashes(*chain))

    def beat(self) -> None:
        self.say(wire.Heartbeat(self.me.incarnation, 0, 0, 0, [self.sequence]))


class FakeFrontend(Node):
    def __init__(self, bench: Bench, name: str, incarnation: int = 1) -> None:
        super().__init__(bench, wire.Role.FRONTEND, name, incarnation)
        self.held: list[int] = []
        self.say(wire.Hello("frontend", name, incarnation))
        self.say(wire.LeaseClaims([]))

    def route(self, request: str, *chain: int, **fields: Any) -> None:
        route = wire.Route(
            request=RequestId(request),
            attempt=fields.pop("attempt", 0),
            key=RoutingKey("k"),
            epoch=0,
            model="tiny",
            input_tokens=len(chain) * BLOCK + 10,
            max_tokens=10,
            **fields,
        )
        self.say(route, hashes(*chain))

    async def granted(self, request: str, *chain: int, **fields: Any) -> wire.Grant:
        before = len(self.of(wire.Grant))
        self.route(request, *chain, **fields)
        grant = await self.get(wire.Grant, before + 1)
        self.held.append(grant.lease)
        return grant

    def report(self, lease: int, kind: Any) -> None:
        self.say(wire.Progress([wire.LeaseProgress(lease, kind)]))  # type: ignore[arg-type]

    def beat(self) -> None:
        digest = LeaseDigest(self.held)  # type: ignore[arg-type]
        seen = max(self.held, default=0)
        self.say(wire.Heartbeat(self.me.incarnation, seen, digest.count, digest.xor))


class Bench:
    def __init__(self, *, speedup: float = 1.0, policy: RouterPolicySpec | None = POLICY) -> None:
        self.context = new_context()
        config = RouterConfig(
            id=RouterId("router-0"),
            number=0,
            incarnation=5,
            endpoint="tcp://127.0.0.1:1",
            block_size=BLOCK,
            models={"tiny": "tiny"},
            speedup=speedup,
        )
        self.service = RouterService(
            config,
            clock=SystemClock(speedup),
            context=self.context,
            listen="tcp://127.0.0.1:*",
            policy=policy,
        )
        self.endpoint = self.service.endpoint
        self.nodes: list[Node] = []
        self.silent: set[Node] = set()
        self.task = asyncio.create_task(self.service.run())
        self.heart = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for node in self.nodes:
                if node not in self.silent and isinstance(node, FakeWorker | FakeFrontend):
                    node.beat()

    async def worker(self, name: str, *chains: list[int], incarnation: int = 1) -> FakeWorker:
        worker = FakeWorker(self, name, incarnation)
        worker.chains = list(chains)
        worker.sequence = len(chains) - 1
        self.nodes.append(worker)
        await until(lambda: name in self.facts["workers"].split(","))
        return worker

    async def frontend(self, name: str, *, incarnation: int = 1) -> FakeFrontend:
        frontend = FakeFrontend(self, name, incarnation)
        self.nodes.append(frontend)
        await frontend.get(wire.Welcome)
        return frontend

    @property
    def facts(self) -> dict[str, str]:
        return self.service.status().facts

    @property
    def numbers(self) -> dict[str, float]:
        return self.service.numbers()

    async def close(self) -> None:
        self.heart.cancel()
        self.service.stop()
        await self.task
        self.service.core.check_integrity()
        for node in self.nodes:
            node.link.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


async def test_a_turn_goes_where_its_prefix_is_and_its_lease_ends_with_it(bench: Bench) -> None:
    await bench.worker("a")
    await bench.worker("b", [1, 2, 3, 4])
    frontend = await bench.frontend("f")
    grant = await frontend.granted("r1", 1, 2, 3, 4, 5)
    assert (grant.worker, grant.endpoint) == ("b", "tcp://b")
    assert grant.matched == {"device": 4}
    frontend.report(grant.lease, "accepted")
    frontend.report(grant.lease, "finished")
    frontend.held.clear()
    await until(lambda: bench.numbers["leases"] == 0)
    assert bench.numbers["leases_finished"] == 1


async def test_events_reach_the_index_and_a_lost_one_is_found_and_mended(bench: Bench) -> None:
    worker = await bench.worker("a")
    frontend = await bench.frontend("f")
    worker.store(1, 2, 3)
    await until(lambda: bench.numbers["index_pairs"] == 3)
    worker.store(7, 8, lose=True)
    worker.store(9)
    await until(lambda: bench.numbers["index_pairs"] == 6)
    assert bench.numbers["kv_gaps"] >= 1
    worker.store(20, lose=True)
    await until(lambda: bench.numbers["index_pairs"] == 7)
    assert (await frontend.granted("r1", 7, 8)).matched == {"device": 2}
    assert len(worker.of(wire.SnapshotRequest)) == 3


async def test_a_turn_without_a_worker_is_held_and_let_go_when_one_comes(bench: Bench) -> None:
    frontend = await bench.frontend("f")
    frontend.route("r1")
    assert (await frontend.get(wire.Hold)).reason == "no_worker"
    await bench.worker("a")
    assert (await frontend.get(wire.Grant)).hold_reason == "no_worker"


async def test_a_silent_worker_loses_its_leases(bench: Bench) -> None:
    dead = await bench.worker("a", [1, 2])
    await bench.worker("b")
    frontend = await bench.frontend("f")
    grant = await frontend.granted("r1", 1, 2)
    frontend.report(grant.lease, "accepted")
    bench.silent.add(dead)
    await until(lambda: frontend.revoked() == {"worker_lost": [grant.lease]})
    frontend.held.clear()
    again = await frontend.granted("r1", 1, 2, attempt=1, avoid=["a"])
    assert (again.worker, again.matched) == ("b", {})
    assert bench.facts["workers"] == "b"
    dead.beat()
    await until(lambda: dead.of(wire.HeartbeatAck) and not dead.of(wire.HeartbeatAck)[-1].known)


async def test_an_engine_that_never_accepts_loses_the_lease(bench: Bench) -> None:
    worker = await bench.worker("a")
    frontend = await bench.frontend("f")
    grant = await frontend.granted("r1")
    await until(lambda: frontend.revoked() == {"dispatch_timeout": [grant.lease]})
    await until(lambda: worker.revoked() == {"dispatch_timeout": [grant.lease]})


async def test_a_silent_owner_is_fenced_and_its_leases_are_aborted(bench: Bench) -> None:
    worker = await bench.worker("a")
    dead, alive = await bench.frontend("dead", incarnation=4), await bench.frontend("alive")
    grant = await dead.granted("r1")
    kept = await alive.granted("r1")
    dead.report(grant.lease, "accepted")
    alive.report(kept.lease, "accepted")
    bench.silent.add(dead)
    await until(lambda: worker.revoked() == {"owner_lost": [grant.lease]})
    fence = await worker.get(wire.Fence)
    assert (fence.owner, fence.incarnation) == ("dead", 4)
    late = await bench.worker("late")
    assert (await late.get(wire.Fence)).owner == "dead"
    assert bench.numbers["leases"] == 1
    dead.route("r2")
    assert not (await dead.get(wire.HeartbeatAck, len(dead.of(wire.HeartbeatAck)) + 1)).known
    back = await bench.frontend("dead", incarnation=5)
    assert (await back.granted("r1", attempt=1)).worker in {"a", "late"}


async def test_the_operators_policy_is_applied_live(bench: Bench) -> None:
    await bench.worker("a")
    operator = Node(bench, wire.Role.OPERATOR, "operator", 1)
    bench.nodes.append(operator)
    ring = wire.Ring(2, [("router-0", bench.endpoint)])
    spec = msgspec.json.encode(POLICY)
    operator.say(wire.SetPolicy("uid", 3, 7, spec, ring))
    ack = await operator.get(wire.PolicyAck)
    assert (ack.applied, ack.revision, ack.generation) == (True, 7, 3)
    operator.say(wire.SetPolicy("uid", 4, 8, b"{", ring))
    assert not (await operator.get(wire.PolicyAck, 2)).applied
    operator.say(wire.StatusRequest())
    status = await operator.get(wire.Status)
    assert status.numbers["policy_revision"] == 7
    assert (status.facts["state"], status.facts["workers"]) == ("serving", "a")
    operator.say(wire.Drain(1.0))
    assert (await operator.get(wire.DrainStatus)).state == "drained"


async def test_a_router_without_a_policy_waits_for_one(bench: Bench) -> None:
    other = Bench(policy=None)
    try:
        await other.frontend("f")
        worker = FakeWorker(other, "a")
        other.nodes.append(worker)
        frontend = other.nodes[0]
        assert isinstance(frontend, FakeFrontend)
        await worker.get(wire.Welcome)
        frontend.route("r1")
        assert (await frontend.get(wire.Hold)).reason == "booting"
        operator = Node(other, wire.Role.OPERATOR, "operator", 1)
        other.nodes.append(operator)
        operator.say(wire.SetPolicy("u", 1, 1, b"{}", wire.Ring(0, [])))
        await frontend.get(wire.Grant)
    finally:
        await other.close()


async def test_garbage_is_counted_and_ends_nothing(bench: Bench) -> None:
    await bench.worker("a")
    frontend = await bench.frontend("f")
    raw = bench.context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.IDENTITY, b"frontend/bad/1")
    raw.connect(bench.endpoint)
    hello = b"\x01" + msgspec.msgpack.encode([10, "frontend", "bad", 1, None])
    hostile = [
        [os.urandom(200)],
        [b""],
        [b"\x01"],
        [b"\x01" + os.urandom(64)],
        [b"\x07" + hello[1:]],
        [hello, b"too many", b"frames"],
        [b"\x01" + msgspec.msgpack.encode([13, 1, 2, 3]), b""],
        [b"\x01" + msgspec.msgpack.encode([20, "u", 1, 1, b"{}", [0, []]])],
        [hello],
    ]
    for frames in hostile * 20:
        raw.send_multipart(frames)
    await until(lambda: bench.numbers["wire_malformed"] >= 100)
    raw.close()
    grant = await frontend.granted("r1")
    assert grant.worker == "a"
    numbers = bench.numbers
    assert numbers["wire_unknown_version"] >= 20
    assert numbers["wire_wrong_role"] >= 20
    assert numbers["wire_handler_errors"] == 0


async def test_nonsense_in_typed_messages_ends_nothing(bench: Bench) -> None:
    worker = await bench.worker("a")
    frontend = await bench.frontend("f")
    worker.say(wire.KvEvents(99, -5, [wire.KvStored(-3, -1)]), b"")
    worker.say(wire.KvEvents(0, 1 << 60, [wire.KvRemoved(1 << 40)]), b"")
    worker.say(wire.SnapshotChunk(0, -1, 5, True, -9, []), b"")
    worker.say(wire.LoadReport([wire.RankLoad(-1, -1, -1, {"x": -1}, -1)]))
    worker.say(wire.LeaseList(seen=-1), hashes(1, 2))
    frontend.route("r1", *[7] * 50)
    frontend.route("r2", *[7] * 50, attempt=-4)
    frontend.say(wire.LeaseList(seen=1 << 62), hashes(5, 5, 5))
    claim = wire.LeaseClaim(
        lease=-1, request="x", attempt=0, worker="nobody", rank=-7, input_tokens=-5,  # type: ignore[arg-type]
        output_tokens=-1, blocks=-9, accepted=True, prefilled=False, key="k",  # type: ignore[arg-type]
    )  # fmt: skip
    frontend.say(wire.LeaseClaims([claim]), b"")
    frontend.report(-5, "finished")
    grant = await frontend.granted("good")
    assert grant.worker == "a"
    bench.service.core.check_integrity()
    assert bench.numbers["wire_handler_errors"] == 0


async def test_metrics_are_read_at_scrape_time(bench: Bench) -> None:
    await bench.worker("a")
    port = _free_port()
    stop = serve_metrics(bench.service.scrape, host="127.0.0.1", port=port)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        assert "fermata_router_workers_ready 1.0" in text
    finally:
        await asyncio.to_thread(stop)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_the_process_stops_cleanly_on_a_signal(tmp_path: Path) -> None:
    deployment = AgentDeployment(
        api_version="fermata.dev/v1alpha1",
        kind="AgentDeployment",
        metadata=Metadata(name="t"),
        spec=AgentDeploymentSpec(
            model=ModelSpec(name="tiny", aliases=["small"]), workers=[WorkerGroupSpec(name="sim")]
        ),
    )
    (tmp_path / "deployment.json").write_bytes(msgspec.json.encode(deployment))
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(POLICY))
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "fermata.router.cli", "--id", "router-0", "--number", "0"],
        *["--deployment", str(tmp_path / "deployment.json")],
        *["--policy", str(tmp_path / "policy.json")],
        *["--listen", f"tcp://127.0.0.1:{port}"],
        stderr=asyncio.subprocess.PIPE,
    )
    context = new_context()
    mail: list[Packet] = []
    me = Peer(wire.Role.OPERATOR, "operator", 1)
    link = Link(context, f"tcp://127.0.0.1:{port}", me=me, receive=mail.append)
    try:
        for _ in range(200):
            link.send(wire.StatusRequest())
            await asyncio.sleep(0.05)
            if mail:
                break
        assert isinstance(mail[0].message, wire.Status)
        assert mail[0].message.facts["policy"] == "KVAware"
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert b"starting id=router-0" in log
        assert b"stopped id=router-0" in log
    finally:
        link.close()
        context.destroy(linger=0)
        if process.returncode is None:
            process.kill()
            await process.wait()
