"""A worker over real sockets: registered, snapshotted, generating, aborted, fenced, drained, and not read from."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
import zmq

from fermata.core.clock import SystemClock
from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import (
    LeaseId,
    OwnerId,
    RequestId,
    RouterId,
    RoutingKey,
    SessionId,
    WorkerId,
    make_lease_id,
)
from fermata.core.lease_digest import LeaseDigest
from fermata.core.model_folder import default_model_folder
from fermata.core.ring import Ring
from fermata.core.spec import (
    AgentDeployment,
    AgentDeploymentSpec,
    Lorem,
    Metadata,
    ModelSpec,
    SimulatedSpec,
    WorkerGroupSpec,
)
from fermata.wire import messages as wire
from fermata.wire.codec import decode, encode
from fermata.wire.socket import Link, Listener, Packet, Peer, new_context
from fermata.worker.engine.paced import SimulatedRank
from fermata.worker.engine.responder import make_responder
from fermata.worker.service import WorkerConfig, WorkerService

BLOCK = 16
M = TypeVar("M", bound=wire.Message)


async def until(claim: Callable[[], object], *, within_s: float = 10.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not claim():
        assert loop.time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


class Mail(list[Packet]):
    def of(self, kind: type[M]) -> list[M]:
        return [p.message for p in self if isinstance(p.message, kind)]


class Bench:
    """The worker under test, a router played by the test, and frontends played by the test."""

    def __init__(self, *, speedup: float = 5.0, ranks: int = 1) -> None:
        self.context = new_context()
        self.router_mail: dict[Peer, Mail] = {}
        self.is_known = True
        self.router = self._listen("tcp://127.0.0.1:*")
        group = WorkerGroupSpec(
            name="sim",
            block_size=BLOCK,
            data_parallel=ranks,
            simulated=SimulatedSpec(kv_blocks=512, responder=Lorem()),
        )
        deployment = AgentDeployment(
            api_version="fermata.dev/v1alpha1",
            kind="AgentDeployment",
            metadata=Metadata(name="t"),
            spec=AgentDeploymentSpec(
                model=ModelSpec(name="tiny"), workers=[group], routing_block_size=BLOCK
            ),
        )
        clock = SystemClock(speedup)
        responder = make_responder(group.simulated.responder, folder=default_model_folder())
        engines = [
            SimulatedRank(
                group,
                rank=rank,
                routing_block_size=BLOCK,
                context_length=100_000,
                clock=clock,
                responder=responder,
            )
            for rank in range(ranks)
        ]
        self.service = WorkerService(
            WorkerConfig(
                id=WorkerId("sim-0"),
                incarnation=5,
                deployment=deployment,
                group=group,
                ring=Ring(1, {RouterId("router-0"): self.router.endpoint}),
                listen="tcp://127.0.0.1:*",
                revision="r1",
            ),
            clock=clock,
            context=self.context,
            engines=engines,
        )
        self.links: list[Link] = []
        self.task = asyncio.create_task(self.service.run())

    def _listen(self, endpoint: str) -> Listener:
        return Listener(
            self.context,
            endpoint,
            role=wire.Role.ROUTER,
            receive=self._routed,
        )

    async def listen_again(self, endpoint: str) -> Listener:
        """The socket that was closed frees its port a moment later."""
        for _ in range(500):
            try:
                return self._listen(endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)
        raise AssertionError(f"{endpoint} did not become free")

    def _routed(self, peer: Peer, packet: Packet) -> None:
        self.router_mail.setdefault(peer, Mail()).append(packet)
        if isinstance(packet.message, wire.Heartbeat) and self.is_known:
            self.router.send(peer, wire.HeartbeatAck(True, 1, 0, 0))

    @property
    def mail(self) -> Mail:
        return self.router_mail.setdefault(Peer(wire.Role.WORKER, "sim-0", 5), Mail())

    def to_worker(self, message: wire.Message, frame: bytes | array[int] = b"") -> None:
        assert self.router.send(Peer(wire.Role.WORKER, "sim-0", 5), message, frame)

    def welcome(self, incarnation: int = 1) -> None:
        ring = wire.Ring(1, [("router-0", self.router.endpoint)])
        self.to_worker(wire.Welcome(RouterId("router-0"), 0, incarnation, ring, 0, 0))

    async def registered(self) -> wire.Hello:
        await until(lambda: self.mail.of(wire.Hello))
        self.welcome()
        self.to_worker(wire.SnapshotRequest(0, 1))
        await until(lambda: self.mail.of(wire.SnapshotChunk))
        return self.mail.of(wire.Hello)[0]

    def frontend(self, name: str = "f", incarnation: int = 1) -> tuple[Link, Mail]:
        mail = Mail()
        me = Peer(wire.Role.FRONTEND, name, incarnation)
        link = Link(self.context, self.service.endpoint, me=me, receive=mail.append)
        self.links.append(link)
        return link, mail

    async def close(self) -> None:
        self.service.drain(0.0)
        await asyncio.wait_for(self.task, 10)
        for link in self.links:
            link.close()
        self.router.close()
        self.context.term()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


def lease(serial: int) -> LeaseId:
    return make_lease_id(router=0, incarnation=1, serial=serial)


def generate(
    serial: int, *, max_tokens: int = 8, owner: str = "f", incarnation: int = 1, session: str = ""
) -> wire.Generate:
    return wire.Generate(
        lease=lease(serial),
        request=RequestId(f"r{serial}"),
        attempt=0,
        owner=OwnerId(owner),
        incarnation=incarnation,
        sampling=wire.Sampling(max_tokens),
        session=SessionId(session),
    )


PROMPT = token_frame(list(range(300, 300 + 5 * BLOCK)))


def tokens_of(mail: Mail, serial: int) -> list[int]:
    """In order, checked for repeats and gaps by the index each entry carries."""
    tokens: list[int] = []
    for packet in mail:
        if not isinstance(packet.message, wire.Output):
            continue
        start = 0
        for entry in packet.message.entries:
            part = packet.frame.cast("I")[start : start + entry.count]
            start += entry.count
            if entry.lease == lease(serial):
                assert entry.first == len(tokens)
                tokens.extend(part)
    return tokens


def finishes(mail: Mail) -> dict[int, str]:
    ended = [e for o in mail.of(wire.Output) for e in o.entries if e.finish]
    assert len({e.lease for e in ended}) == len(ended), "a lease ends once"
    return {e.lease: e.finish for e in ended}


async def test_it_registers_with_what_it_can_do_and_an_empty_snapshot(bench: Bench):
    hello = await bench.registered()
    assert (hello.role, hello.id, hello.incarnation) == ("worker", "sim-0", 5)
    info = hello.worker
    assert info is not None
    assert info.endpoint == bench.service.endpoint
    assert (info.block_size, info.routing_block_size, info.kv_blocks) == (
        BLOCK,
        BLOCK,
        {"device": 512},
    )
    assert (info.group, info.revision, info.ranks) == ("sim", "r1", 1)
    (chunk,) = bench.mail.of(wire.SnapshotChunk)
    assert (chunk.request, chunk.index, chunk.last, chunk.sequence) == (1, 0, True, -1)
    assert chunk.stored == []


async def test_a_turn_is_accepted_streams_ends_and_its_events_precede_its_end(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=40, session="s"), PROMPT)
    await until(lambda: finishes(mail))
    assert mail.of(wire.Accepted) == [wire.Accepted(lease(1), 0)]
    assert len(tokens_of(mail, 1)) == 40
    assert finishes(mail) == {lease(1): "length"}
    last = [e for o in mail.of(wire.Output) for e in o.entries][-1]
    assert last.cached_tokens == 0
    hashes = sequence_hashes(PROMPT, BLOCK)
    await until(lambda: bench.mail.of(wire.KvEvents))
    events = [p for p in bench.mail if isinstance(p.message, wire.KvEvents)]
    stored = [h for p in events for h in p.frame.cast("Q")]
    assert stored[: len(hashes)] == list(hashes)
    count = sum(len(p.message.events) for p in events)  # type: ignore[attr-defined]
    assert last.event_sequence == count - 1
    await until(lambda: any(h.events == [count - 1] for h in bench.mail.of(wire.Heartbeat)))
    bench.mail.clear()
    bench.to_worker(wire.SnapshotRequest(0, 2))
    await until(lambda: bench.mail.of(wire.SnapshotChunk))
    (packet,) = [p for p in bench.mail if isinstance(p.message, wire.SnapshotChunk)]
    assert set(packet.frame.cast("Q")) == set(stored)
    (record,) = packet.message.sessions  # type: ignore[attr-defined]
    assert (record.session, record.context_tokens, record.reasoning) == ("s", 5 * BLOCK + 40, False)


async def test_the_digest_covers_what_runs_and_the_list_names_it(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=7_000), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    digest = LeaseDigest([lease(1)])
    await until(
        lambda: any((h.count, h.xor) == (1, digest.xor) for h in bench.mail.of(wire.Heartbeat))
    )
    report = bench.mail.of(wire.LoadReport)[-1].ranks[0]
    assert report.running == 1
    assert [(r.router, r.active) for r in report.routers] == [(0, 1)]
    bench.to_worker(wire.LeaseListRequest())
    await until(lambda: bench.mail.of(wire.LeaseList))
    (packet,) = [p for p in bench.mail if isinstance(p.message, wire.LeaseList)]
    assert list(packet.frame.cast("Q")) == [lease(1)]


@pytest.mark.parametrize("by", ["abort", "revoke"])
async def test_an_abort_and_a_revocation_end_a_turn_and_free_its_blocks(bench: Bench, by: str):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=7_000), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    if by == "abort":
        link.send(wire.Abort(), array("Q", [lease(1), lease(99)]))
    else:
        bench.to_worker(wire.Revoke("dispatch_timeout"), array("Q", [lease(1), lease(99)]))
    await until(lambda: finishes(mail) == {lease(1): "abort"})
    numbers = bench.service.numbers()
    assert (numbers["requests"], numbers["kv_blocks_referenced"]) == (0, 0)
    assert numbers["kv_blocks_cached"] > 0


async def test_a_fenced_owner_is_aborted_and_refused_and_its_next_boot_is_not(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=7_000), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    bench.to_worker(wire.Fence(OwnerId("f"), 1))
    await until(lambda: bench.service.numbers()["requests"] == 0)
    assert bench.service.numbers()["kv_blocks_referenced"] == 0
    link.send(generate(2), PROMPT)
    await until(lambda: mail.of(wire.Refused))
    assert mail.of(wire.Refused)[0].code == "fenced"
    again, mail2 = bench.frontend(incarnation=2)
    again.send(generate(3, incarnation=2), PROMPT)
    await until(lambda: finishes(mail2) == {lease(3): "length"})


async def test_generate_is_idempotent_and_bad_ones_are_refused_by_code(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=5000), PROMPT)
    link.send(generate(1, max_tokens=5000), PROMPT)
    await until(lambda: len(mail.of(wire.Accepted)) == 2)
    assert bench.service.numbers()["requests"] == 1
    link.send(generate(2), b"")
    link.send(generate(3), token_frame([1] * 200_000))
    await until(lambda: len(mail.of(wire.Refused)) == 2)
    assert [(r.lease, r.code) for r in mail.of(wire.Refused)] == [
        (lease(2), "invalid"),
        (lease(3), "invalid"),
    ]


async def test_what_is_another_frontends_is_not_to_be_had_by_naming_it(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=200), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    thief, loot = bench.frontend("thief")
    thief.send(wire.Abort(), array("Q", [lease(1)]))
    thief.send(generate(1, max_tokens=200), PROMPT)  # in the owner's name
    thief.send(generate(1, max_tokens=200, owner="thief"), PROMPT)
    thief.send(generate(2, owner="f"), PROMPT)
    thief.send(generate(3, owner="thief", incarnation=2), PROMPT)
    await until(lambda: len(loot.of(wire.Refused)) == 4)
    assert {refused.code for refused in loot.of(wire.Refused)} == {"invalid"}
    await until(lambda: finishes(mail))
    assert finishes(mail) == {lease(1): "length"}
    assert len(tokens_of(mail, 1)) == 200
    assert not loot.of(wire.Output)


async def test_a_snapshot_with_very_many_sessions_still_fits_its_messages(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    names = [f"{i:05d}" + "x" * 251 for i in range(5000)]
    link.send(generate(1, session=names[0]), PROMPT)
    await until(lambda: finishes(mail))
    for name in names[1:]:  # as after so many turns
        bench.service.sessions.begin(
            SessionId(name), parent=SessionId(name), key=RoutingKey(name), rank=0, tokens=1, now=0.0
        )
    bench.mail.clear()
    bench.to_worker(wire.SnapshotRequest(0, 2))
    await until(lambda: any(chunk.last for chunk in bench.mail.of(wire.SnapshotChunk)))
    chunks = bench.mail.of(wire.SnapshotChunk)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [record.session for chunk in chunks for record in chunk.sessions] == names
    stored = [p.frame.nbytes for p in bench.mail if isinstance(p.message, wire.SnapshotChunk)]
    assert stored[0] >= 5 * 8


async def test_a_drained_worker_finishes_its_turns_and_only_then_says_drained(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    operator_mail = Mail()
    operator = Link(
        bench.context,
        bench.service.endpoint,
        me=Peer(wire.Role.OPERATOR, "op", 1),
        receive=operator_mail.append,
    )
    bench.links.append(operator)
    link.send(generate(1, max_tokens=600), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    operator.send(wire.Drain(30.0))
    await until(lambda: bench.mail.of(wire.DrainStatus))
    assert bench.mail.of(wire.DrainStatus)[0] == wire.DrainStatus("draining", 1)
    link.send(generate(2), PROMPT)
    await until(lambda: mail.of(wire.Refused))
    assert mail.of(wire.Refused)[0].code == "draining"
    await until(lambda: operator_mail.of(wire.DrainStatus)[-1].state == "drained")
    assert finishes(mail) == {lease(1): "length"}
    assert len(tokens_of(mail, 1)) == 600
    await until(lambda: bench.mail.of(wire.Bye))
    states = [m.state for m in bench.mail.of(wire.DrainStatus)]
    assert states == ["draining", "drained"]


async def test_what_a_drain_can_not_wait_for_is_handed_back(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=7_000), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    bench.service.drain(0.05)
    await until(lambda: finishes(mail))
    (last,) = [e for o in mail.of(wire.Output) for e in o.entries if e.finish]
    assert (last.finish, last.error) == ("abort", "draining")
    await until(lambda: bench.service.state == "drained")


async def test_a_router_that_boots_again_is_told_all_and_what_runs_goes_on():
    bench = Bench()
    await bench.registered()
    link, mail = bench.frontend()
    link.send(generate(1, max_tokens=4000), PROMPT)
    await until(lambda: tokens_of(mail, 1))
    endpoint = bench.router.endpoint
    bench.router.close()
    before = len(tokens_of(mail, 1))
    bench.router_mail.clear()
    bench.is_known = False
    bench.router = await bench.listen_again(endpoint)
    await until(lambda: bench.mail)
    bench.to_worker(
        wire.HeartbeatAck(known=False, ring_epoch=1, policy_revision=0, workers_ready=0)
    )
    await until(lambda: bench.mail.of(wire.Hello))
    bench.welcome(incarnation=2)
    bench.to_worker(wire.SnapshotRequest(0, 1))
    await until(lambda: bench.mail.of(wire.SnapshotChunk))
    assert any(chunk.stored for chunk in bench.mail.of(wire.SnapshotChunk))
    await until(lambda: len(tokens_of(mail, 1)) > before)
    await bench.close()


async def test_tokens_that_were_not_read_for_long_all_come_in_order_and_others_do_not_wait():
    """The reader is a bare socket that stops: what its pipe can not take waits in the worker."""
    bench = Bench(speedup=2000.0)
    await bench.registered()
    me = Peer(wire.Role.FRONTEND, "slow", 1)
    slow = bench.context.socket(zmq.DEALER)
    for option, value in ((zmq.IDENTITY, me.identity), (zmq.RCVHWM, 1), (zmq.RCVBUF, 2048)):
        slow.setsockopt(option, value)
    slow.connect(bench.service.endpoint)
    slow.send_multipart(encode(generate(1, max_tokens=7_000, owner="slow"), PROMPT))
    other, other_mail = bench.frontend("other")
    other.send(generate(2, max_tokens=200, owner="other"), PROMPT)
    await until(lambda: finishes(other_mail) == {lease(2): "length"})
    await until(lambda: bench.service.numbers()["output_tokens"] == 7_200, within_s=30)
    mail = Mail()
    while not finishes(mail):
        await until(lambda: slow.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        mail.extend(decode(slow.recv_multipart()))
    assert len(tokens_of(mail, 1)) == 7_000
    await until(lambda: bench.service.numbers()["requests"] == 0)
    slow.close(linger=0)
    await bench.close()


async def test_a_revoked_lease_is_refused_when_its_generate_comes_late(bench: Bench):
    await bench.registered()
    link, mail = bench.frontend()
    bench.to_worker(wire.Revoke("dispatch_timeout"), array("Q", [lease(1)]))
    bench.to_worker(wire.SnapshotRequest(0, 9))
    await until(lambda: [c for c in bench.mail.of(wire.SnapshotChunk) if c.request == 9])
    link.send(generate(1), PROMPT)
    await until(lambda: mail.of(wire.Refused))
    assert mail.of(wire.Refused)[0].code == "failed"
    assert bench.service.numbers()["requests"] == 0
