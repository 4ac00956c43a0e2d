"""Real sockets: batching, role rules, garbage, a peer that stops reading, reconnects."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from fermata.wire.codec import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    decode,
    encode,
    encode_batch,
)
from fermata.wire.messages import (
    Bye,
    Drain,
    Fault,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Output,
    OutputEntry,
    PolicyAck,
    Ring,
    Role,
    Route,
    Sampling,
    SetPolicy,
    StatusRequest,
    Welcome,
)
from fermata.wire.socket import (
    DRAIN_LIMIT,
    HIGH_WATER_MARK,
    OUTBOX_BYTES,
    Link,
    Listener,
    Packet,
    Peer,
    Unsendable,
    new_context,
)

FRONTEND = Peer(Role.FRONTEND, "frontend-0", 1)
WORKER = Peer(Role.WORKER, "sim-0", 7)


class Ends:
    """One Listener and any number of Links, with what each got."""

    def __init__(self, role: Role = Role.ROUTER) -> None:
        self.context = new_context()
        self.got: list[tuple[Peer, Packet]] = []
        self.writable: list[Peer] = []
        self.gone: list[Peer] = []
        self.answers: dict[Peer, list[Packet]] = {}
        self.links: list[Link] = []
        self.listener = self.listen(role)

    def listen(self, role: Role, endpoint: str = "tcp://127.0.0.1:*") -> Listener:
        return Listener(
            self.context,
            endpoint,
            role=role,
            receive=lambda peer, packet: self.got.append((peer, packet)),
            writable=self.writable.append,
            unreachable=self.gone.append,
        )

    def link(self, me: Peer, endpoint: str | None = None) -> Link:
        answers = self.answers.setdefault(me, [])
        link = Link(self.context, endpoint or self.listener.endpoint, me=me, receive=answers.append)
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.listener.close()
        self.context.term()


async def until(claim: Callable[[], object], *, within_s: float = 10.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not claim():
        assert loop.time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def route(number: int) -> Route:
    return Route(
        request=f"r{number}", attempt=0, key="k", epoch=1, model="m", input_tokens=1, max_tokens=1
    )


async def test_messages_arrive_in_order_with_their_frames_and_answers_come_back(ends: Ends):
    link = ends.link(FRONTEND)
    for i in range(500):
        assert link.send(route(i), array("Q", [i, i + 1]))
    await until(lambda: len(ends.got) == 500)
    assert [p.message.request for _, p in ends.got] == [f"r{i}" for i in range(500)]  # type: ignore[attr-defined]
    assert list(ends.got[7][1].frame.cast("Q")) == [7, 8]
    peer = ends.got[0][0]
    assert peer == FRONTEND
    welcome = Welcome("router-0", 0, 1, Ring(1, []), 0, 0)
    assert ends.listener.send(peer, welcome)
    await until(lambda: ends.answers[FRONTEND])
    assert ends.answers[FRONTEND][0].message == welcome


async def test_what_is_sent_in_one_turn_of_the_loop_leaves_as_one_message(ends: Ends):
    raw = ends.context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, FRONTEND.identity)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(ends.listener.endpoint)
    raw.send(b"\x01\x91\x05")  # StatusRequest
    await until(lambda: ends.got)
    for _ in range(3):
        ends.listener.send(FRONTEND, Bye(1))
    await until(lambda: raw.getsockopt(zmq.EVENTS) & zmq.POLLIN)
    assert len(raw.recv_multipart()) == 4
    assert not raw.poll(50)
    raw.close()


@pytest.mark.parametrize(
    ("frames", "counter"),
    [
        ([b"\xff\xfe\xfd random bytes"], "unknown_version"),
        ([b"\x01\xc1\xc1"], "malformed"),
        ([b""], "malformed"),
        ([b"\x01" + b"\x94\x0d\xa1r"], "malformed"),  # truncated
        ([b"\x02\x91\x05"], "unknown_version"),
        ([b"\x01\x91\x05" + b"\0" * (5 << 20)], "oversized"),
        ([b"\x01\x91\xcd\x03\xe7"], "malformed"),  # no such tag
        ([b"\x01\x93\x0b\xa1x\x00"], "malformed"),  # Heartbeat with a string where an integer goes
        ([b"\x01\x91\x05", b"a frame too many"], "malformed"),
        ([b"\x01\x93\x15\x01\x90\x90"], "malformed"),  # Handover without its frame
        ([b"\x01\x93\x15\x01\x90\x90", b"123"], "malformed"),  # ragged frame
        ([b"\x01\x92\x01\x92\x01\x01", b"\x01\x91\x05"], "malformed"),  # batch of two with one
        ([b"\x01" + b"\x91" * 5000], "malformed"),  # nested without end
    ],
)
async def test_garbage_is_counted_and_answered_and_the_socket_lives_on(
    ends: Ends, frames: list[bytes], counter: str
):
    raw = ends.context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, FRONTEND.identity)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(ends.listener.endpoint)
    raw.send_multipart(frames)
    await until(lambda: getattr(ends.listener.counters, counter) == 1)
    await until(lambda: raw.getsockopt(zmq.EVENTS) & zmq.POLLIN)
    answer = raw.recv()
    assert answer[0] == 1
    assert counter.encode() in answer
    raw.send(b"\x01\x91\x05")
    await until(lambda: ends.got)
    assert isinstance(ends.got[0][1].message, StatusRequest)
    raw.close()


@pytest.mark.parametrize(
    "identity",
    [
        b"",  # one that ZeroMQ makes up
        b"frontend/frontend-0",
        b"frontend//1",
        b"captain/frontend-0/1",
        b"frontend/frontend-0/x",
        b"frontend/frontend-0/-1",
        b"frontend/frontend-0/ 1",  # answers to it would go to another
        b"frontend/frontend-0/01",
        b"frontend/frontend-0/1_0",
        "frontend/frontend-0/\u0661".encode(),
        b"frontend/frontend-0/9223372036854775808",  # no message could name it
        b"frontend/\xff/1",
    ],
)
async def test_an_identity_that_is_not_ours_is_refused(ends: Ends, identity: bytes):
    raw = ends.context.socket(zmq.DEALER)
    if identity:
        raw.setsockopt(zmq.IDENTITY, identity)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(ends.listener.endpoint)
    raw.send(b"\x01\x91\x05")
    await until(lambda: ends.listener.counters.malformed == 1)
    assert ends.got == []
    raw.close()


@pytest.mark.parametrize(
    ("sender", "message", "frame"),
    [
        (WORKER, SetPolicy("u", 1, 1, b"{}", Ring(1, [])), b""),
        (WORKER, route(1), b""),
        (FRONTEND, Drain(1.0), b""),
        (FRONTEND, PolicyAck("u", 1, 1, applied=True), b""),
        (WORKER, Output([]), b""),
        (
            FRONTEND,
            Generate(
                lease=1, request="r", attempt=0, owner="o", incarnation=1, sampling=Sampling(1)
            ),
            b"",
        ),
    ],
)
async def test_a_message_its_sender_may_not_send_is_refused(
    ends: Ends, sender: Peer, message: Message, frame: bytes
):
    link = ends.link(sender)
    link.send(message, frame)
    await until(lambda: ends.listener.counters.wrong_role == 1)
    await until(lambda: ends.answers[sender])
    fault = ends.answers[sender][0].message
    assert isinstance(fault, Fault)
    assert fault.code == "wrong_role"
    assert ends.got == []


async def test_a_peer_that_stops_reading_loses_nothing_and_memory_stays_bounded():
    ends = Ends(Role.WORKER)
    raw = ends.context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, FRONTEND.identity)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.RCVHWM, 1)
    raw.connect(ends.listener.endpoint)
    raw.send(b"\x01\x91\x05")
    await until(lambda: ends.got)
    payload = bytes(4 * 4096)
    sent = 0
    while True:  # each turn of the loop is one multipart message
        entry = OutputEntry(lease=1, attempt=0, first=sent, count=4096)
        if not ends.listener.send(FRONTEND, Output([entry]), payload):
            break
        sent += 1
        assert sent < 200_000, "nothing ever pushed back"
        if sent % 8 == 0:
            await asyncio.sleep(0)
    assert ends.listener.blocked(FRONTEND)
    assert ends.listener.counters.refused == 1
    box_bytes = OUTBOX_BYTES
    assert sent * len(payload) <= box_bytes + (HIGH_WATER_MARK + 64) * 8 * len(payload) + (64 << 20)
    seen: list[int] = []
    while len(seen) < sent:  # it reads again: all comes, in order
        await until(lambda: raw.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        for packet in decode(raw.recv_multipart()):
            assert isinstance(packet.message, Output)
            seen.append(packet.message.entries[0].first)
    assert seen == list(range(sent))
    await until(lambda: ends.writable)
    assert ends.writable == [FRONTEND]
    assert not ends.listener.blocked(FRONTEND)
    raw.close()
    ends.close()


async def test_a_peer_that_went_away_is_reported_unreachable(ends: Ends):
    link = ends.link(FRONTEND)
    link.send(Hello("frontend", "frontend-0", 1))
    await until(lambda: ends.got)
    link.close()

    def told() -> bool:
        ends.listener.send(FRONTEND, Bye(1))
        return bool(ends.gone)

    await until(told)
    assert ends.gone[0] == FRONTEND
    assert ends.listener.counters.unreachable >= 1


async def test_a_link_finds_its_listener_again_and_says_when_it_can_send():
    ends = Ends()
    endpoint = ends.listener.endpoint
    link = ends.link(FRONTEND)
    link.send(Heartbeat(1, 0, 0, 0))
    await until(lambda: ends.got)
    ends.listener.close()

    def noticed() -> bool:
        link.send(Heartbeat(1, 0, 0, 0))
        return link.blocked

    await until(noticed)
    ends.got.clear()
    ends.listener = ends.listen(Role.ROUTER, endpoint)
    await until(lambda: ends.got)
    await until(lambda: not link.blocked)
    ends.close()


async def test_a_flood_of_batches_leaves_turns_of_the_loop_to_others():
    context = new_context()
    loop = asyncio.get_running_loop()
    turns: list[int] = [0]
    listener = Listener(
        context, "tcp://127.0.0.1:*", role=Role.ROUTER, receive=lambda *_: count(turns)
    )

    def count(turns: list[int]) -> None:
        turns[-1] += 1

    def next_turn() -> None:
        turns.append(0)
        if sum(turns) < 64 * 1000:
            loop.call_soon(next_turn)

    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, FRONTEND.identity)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(listener.endpoint)
    batch = encode_batch([encode(Bye(1))] * 1000)
    for _ in range(64):
        raw.send_multipart(batch)
    loop.call_soon(next_turn)
    await until(lambda: sum(turns) == 64 * 1000, within_s=30)
    assert max(turns) <= DRAIN_LIMIT + 1000
    raw.close()
    listener.close()
    context.term()


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Bye(2**64), b""),
        (Bye(1, "\ud800"), b""),
        (Bye(1, "x" * MAX_HEADER_BYTES), b""),
        (Output([]), bytes(MAX_FRAME_BYTES + 4)),
    ],
    ids=["integer", "half a character", "long", "long frame"],
)
async def test_what_no_peer_would_take_is_not_sent_and_its_maker_is_told(
    ends: Ends, message: Message, frame: bytes
):
    link = ends.link(FRONTEND)
    with pytest.raises(Unsendable):
        link.send(message, frame)
    link.send(StatusRequest())
    await until(lambda: ends.got)
    assert [packet.message for _, packet in ends.got] == [StatusRequest()]


async def test_a_handler_that_fails_does_not_stop_the_socket():
    context = new_context()
    seen: list[Message] = []

    def receive(_: Peer, packet: Packet) -> None:
        seen.append(packet.message)
        if len(seen) == 1:
            raise RuntimeError("handler bug")

    listener = Listener(context, "tcp://127.0.0.1:*", role=Role.ROUTER, receive=receive)
    link = Link(context, listener.endpoint, me=FRONTEND, receive=lambda _: None)
    link.send(Bye(1))
    link.send(Bye(2))
    await until(lambda: len(seen) == 2)
    assert listener.counters.handler_errors == 1
    link.close()
    listener.close()
    context.term()
