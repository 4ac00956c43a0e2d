"""A frontend over real sockets: HTTP clients in front, a router and workers that do as told behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fermata.core.clock import SystemClock
from fermata.core.errors import NotFound
from fermata.core.hashing import hash_seed, sequence_hashes
from fermata.core.ids import (
    LeaseId,
    OwnerId,
    RequestId,
    RouterId,
    RoutingKey,
    WorkerId,
    make_lease_id,
)
from fermata.core.lease_digest import LeaseDigest
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.core.ring import Ring
from fermata.core.spec import AgentDeployment
from fermata.frontend.config import FrontendConfig, HttpLimits
from fermata.frontend.http.app import FrontendApp
from fermata.frontend.http.chat import ChatWriter
from fermata.frontend.http.exchange import KeepAlives, Waker
from fermata.frontend.http.server import HttpServer
from fermata.frontend.http.turns import TurnEndpoint, TurnRoom
from fermata.frontend.keys import ApiKeys
from fermata.frontend.metrics import FrontendMetrics
from fermata.frontend.prompt import PromptModel
from fermata.frontend.request import ChatBody
from fermata.frontend.router_questions import RouterQuestions
from fermata.frontend.service import FrontendService
from fermata.frontend.turn_model import Failed, TurnLimits, TurnSpec
from fermata.trace import TraceWriter, segments
from fermata.wire import messages as wire
from fermata.wire.socket import Context, Listener, Packet, Peer, new_context

BLOCK = 16
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3
HELLO = [{"role": "user", "content": "Hello there, how are you today?"}]
FAST = HttpLimits(keep_alive_s=0.15, patience_s=0.2, body_bytes=200_000, body_wait_s=0.3)


async def until(condition: Callable[[], Any], *, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.004)


@pytest.fixture(scope="module")
def model() -> PromptModel:
    folder = ModelFolder.load(default_model_folder())
    return PromptModel.load(folder, block_size=BLOCK, cache_bytes=1 << 24)


@dataclass
class FakeWorker:
    """Says `tokens`; by itself when `auto`, else as many as `say` tells it to."""

    context: Context
    name: str
    tokens: list[int]
    auto: bool = True
    accept: bool = True
    refuse: str = ""
    cached: int = 5
    generates: list[wire.Generate] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: dict[int, tuple[Peer, wire.Generate, int]] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = Listener(
            self.context, "tcp://127.0.0.1:*", role=wire.Role.WORKER, receive=self.receive
        )
        self.endpoint = self.listener.endpoint

    def receive(self, peer: Peer, packet: Packet) -> None:
        match packet.message:
            case wire.Generate() as generate:
                self.generates.append(generate)
                self.frames.append(bytes(packet.frame))
                self.start(peer, generate)
            case wire.Abort():
                for lease in packet.frame.cast("Q"):
                    self.aborted.append(lease)
                    self.running.pop(lease, None)
            case _:
                raise AssertionError(packet.message)

    def start(self, peer: Peer, generate: wire.Generate) -> None:
        if self.refuse:
            refused = wire.Refused(generate.lease, generate.attempt, self.refuse, "told to")  # type: ignore[arg-type]
            self.listener.send(peer, refused)
            return
        if self.accept:
            self.listener.send(peer, wire.Accepted(generate.lease, generate.attempt))
            self.running[generate.lease] = (peer, generate, 0)
            if self.auto:
                self.say(len(self.tokens))

    def say(self, count: int, *, first: int | None = None) -> None:
        """The next `count` tokens of everything that runs."""
        for lease, (peer, generate, said) in list(self.running.items()):
            start = generate.resumed + said
            limit = min(len(self.tokens), generate.sampling.max_tokens)
            tokens = self.tokens[start : min(start + count, limit)]
            end = start + len(tokens)
            finish = "stop" if end >= len(self.tokens) else "length" if end >= limit else ""
            entry = wire.OutputEntry(
                LeaseId(lease), generate.attempt, said if first is None else first, len(tokens),
                self.cached, finish, event_sequence=77 if finish else -1,
            )  # fmt: skip
            frame = b"".join(token.to_bytes(4, "little") for token in tokens)
            self.listener.send(peer, wire.Output([entry]), frame)
            if finish:
                del self.running[lease]
            else:
                self.running[lease] = (peer, generate, said + len(tokens))

    def end(self, finish: str, error: str) -> None:
        for lease, (peer, generate, said) in list(self.running.items()):
            entry = wire.OutputEntry(LeaseId(lease), generate.attempt, said, 0, -1, finish, error)  # type: ignore[arg-type]
            self.listener.send(peer, wire.Output([entry]))
        self.running.clear()

    def close(self) -> None:
        self.listener.close()


@dataclass
class FakeRouter:
    """Grants in turn to `workers`; keeps all it hears."""

    context: Context
    workers: list[FakeWorker]
    endpoint: str = "tcp://127.0.0.1:*"
    number: int = 7
    incarnation: int = 1
    mode: str = "grant"
    known: set[int] = field(default_factory=set)
    """Incarnations that said Hello to this boot and are not fenced."""
    epoch: int = 1
    serial: int = 0
    routes: list[tuple[wire.Route, bytes]] = field(default_factory=list)
    progress: list[wire.LeaseProgress] = field(default_factory=list)
    fenced: set[int] = field(default_factory=set)
    fenced_up_to: int = -1
    tells: bool = True
    """How far it has fenced."""
    hellos: list[wire.Hello] = field(default_factory=list)
    beats: list[wire.Heartbeat] = field(default_factory=list)
    claims: list[tuple[wire.LeaseClaims, bytes]] = field(default_factory=list)
    lists: list[tuple[wire.LeaseList, bytes]] = field(default_factory=list)
    byes: int = 0
    grants: dict[LeaseId, wire.Grant] = field(default_factory=dict)
    open_routes: dict[RequestId, wire.Route] = field(default_factory=dict)
    said: dict[tuple[RequestId, int], wire.Grant] = field(default_factory=dict)
    farewells: list[wire.Route] = field(default_factory=list)
    programs: dict[str, wire.ProgramRow] = field(default_factory=dict)
    decisions: list[wire.Decision] = field(default_factory=list)
    hold_reason: str = "queue"
    peer: Peer | None = None

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.listener = Listener(
            self.context, self.endpoint, role=wire.Role.ROUTER, receive=self.receive
        )
        self.endpoint = self.listener.endpoint

    def die(self) -> None:
        self.listener.close()

    def boot(self) -> None:
        self.known.clear()
        self.incarnation += 1
        self.serial = 0
        self.open_routes.clear()
        self.said.clear()
        self.open()

    def ring(self) -> wire.Ring:
        return wire.Ring(self.epoch, [("router-0", self.endpoint)])

    def receive(self, peer: Peer, packet: Packet) -> None:
        self.peer = peer
        match packet.message:
            case wire.Hello() as hello:
                self.hellos.append(hello)
                if hello.incarnation not in self.fenced and hello.incarnation > self.fenced_up_to:
                    self.known.add(hello.incarnation)
                self.send(
                    wire.Welcome(
                        RouterId("router-0"),
                        self.number,
                        self.incarnation,
                        self.ring(),
                        3,
                        len(self.workers),
                    )
                )
            case wire.Heartbeat() as beat:
                self.beats.append(beat)
                self.acknowledge(beat.incarnation in self.known)
            case wire.Progress() if peer.incarnation not in self.known:
                pass
            case wire.Route() if peer.incarnation not in self.known:
                self.acknowledge(False)
            case wire.Route(final=True, input_tokens=0) as route:
                self.farewells.append(route)
                if self.mode != "silent":
                    known = route.session in self.programs
                    self.programs.pop(route.session, None)
                    self.send(wire.ProgramEnded(route.request, route.attempt, known))
            case wire.ProgramsRequest() as asked:
                rows = [self.programs[s] for s in sorted(self.programs) if s > asked.after]
                rows = [row for row in rows if row.session.startswith(asked.prefix)]
                page, more = rows[: asked.limit], len(rows) > asked.limit
                self.send(wire.Programs(asked.request, page, len(self.programs), 0, more))
            case wire.ExplainRequest() as asked:
                found = [
                    d
                    for d in self.decisions
                    if d.request == asked.request and d.session.startswith(asked.prefix)
                ]
                self.send(wire.Explanation(asked.request, found, "KVAware", 3))
            case wire.Route() as route:
                self.routes.append((route, bytes(packet.frame)))
                self.open_routes[route.request] = route
                self.answer(route)
            case wire.Progress(entries=entries):
                self.progress.extend(entries)
            case wire.LeaseClaims() as claims:
                self.claims.append((claims, bytes(packet.frame)))
            case wire.LeaseList() as leases:
                self.lists.append((leases, bytes(packet.frame)))
            case wire.Bye():
                self.byes += 1
            case _:
                raise AssertionError(packet.message)

    def acknowledge(self, known: bool) -> None:
        fenced = self.fenced_up_to if self.tells else -1
        self.send(wire.HeartbeatAck(known, self.epoch, 3, len(self.workers), fenced))

    def send(self, message: wire.Message, frame: bytes = b"") -> None:
        assert self.peer is not None
        self.listener.send(self.peer, message, frame)

    def answer(self, route: wire.Route) -> None:
        match self.mode:
            case "grant":
                said = self.said.get((route.request, route.attempt))
                if said is not None:  # as a real one: asked again, it says again what it said
                    self.send(said)
                    return
                self.said[route.request, route.attempt] = self.grant(route)
            case "hold":
                self.send(wire.Hold(route.request, route.attempt, self.hold_reason, 60.0))  # type: ignore[arg-type]
            case "overloaded":
                del self.open_routes[route.request]
                self.send(wire.Reject(route.request, route.attempt, "overloaded", "too busy", 7.0))
            case _:
                assert self.mode == "silent"

    def grant(self, route: wire.Route) -> wire.Grant:
        self.open_routes.pop(route.request, None)
        fresh = [w for w in self.workers if w.name not in route.avoid] or self.workers
        worker = fresh[0]
        self.serial += 1
        lease = make_lease_id(router=self.number, incarnation=self.incarnation, serial=self.serial)
        grant = wire.Grant(
            route.request, route.attempt, lease, WorkerId(worker.name), worker.endpoint, 0, {"device": 1}, 3,
            priority=route.hints.priority, features=worker.features,
        )  # fmt: skip
        self.grants[lease] = grant
        self.send(grant)
        return grant

    def grant_all(self) -> None:
        for route in list(self.open_routes.values()):
            self.grant(route)

    def revoke(self, reason: str) -> None:
        """All leases that have not ended."""
        live = [lease for lease in self.grants if lease not in self.ended()]
        frame = b"".join(lease.to_bytes(8, "little") for lease in live)
        self.send(wire.Revoke(reason), frame)  # type: ignore[arg-type]

    def ended(self) -> dict[LeaseId, wire.LeaseProgress]:
        ends = [p for p in self.progress if p.kind in ("finished", "cancelled", "failed")]
        by_lease = {p.lease: p for p in ends}
        assert len(by_lease) == len(ends), f"a lease ended twice: {ends}"
        return by_lease

    def kinds(self) -> list[str]:
        return [p.kind for p in self.progress]


@dataclass
class Stack:
    router: FakeRouter
    workers: list[FakeWorker]
    service: FrontendService
    app: FrontendApp
    server: HttpServer
    client: httpx.AsyncClient
    url: str

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/chat/completions", json={"model": "m", "messages": HELLO, **fields}
        )

    @asynccontextmanager
    async def stream(self, **fields: Any) -> AsyncIterator[Reader]:
        reader = Reader(self.client, {"model": "m", "messages": HELLO, "stream": True, **fields})
        try:
            yield reader
        finally:
            reader.task.cancel()
            with suppress(asyncio.CancelledError):
                await reader.task

    async def quiet(self) -> None:
        """Nothing of any turn is left, here and at the router."""
        await until(lambda: not len(self.service.table) and not self.service.table.leases)
        await until(lambda: set(self.router.grants) <= set(self.router.ended()))
        self.service.table.check_integrity()


def deployment(**frontend: Any) -> AgentDeployment:
    return msgspec.convert(
        {
            "apiVersion": "fermata.dev/v1alpha1",
            "kind": "AgentDeployment",
            "metadata": {"name": "test"},
            "spec": {
                "model": {"name": "m", "aliases": ["alias"], "contextLength": 4096},
                "workers": [{"name": "sim", "blockSize": BLOCK}],
                "routingBlockSize": BLOCK,
                "frontend": frontend,
            },
        },
        AgentDeployment,
    )


@asynccontextmanager
async def running(
    model: PromptModel,
    *,
    workers: int = 1,
    auto: bool = True,
    http: HttpLimits = FAST,
    limits: TurnLimits | None = None,
    trace: TraceWriter | None = None,
    router_is_up: bool = True,
    **frontend: Any,
) -> AsyncIterator[Stack]:
    context = new_context()
    tokens = model.tokenizer.encode(TEXT).tolist()
    fakes = [FakeWorker(context, f"w{i}", tokens, auto=auto) for i in range(workers)]
    router = FakeRouter(context, fakes)
    config = FrontendConfig(
        id=OwnerId("frontend-0"),
        deployment=deployment(**frontend),
        ring=Ring(1, {RouterId("router-0"): router.endpoint}),
        port=0,
        http=http,
        turn=limits or TurnLimits(ask_again_s=1.0),
    )
    if not router_is_up:
        router.die()
    service = FrontendService(config, clock=SystemClock(), context=context)
    app = FrontendApp(config, service=service, model=model, trace=trace)
    server = HttpServer(app, host="127.0.0.1", port=0, head_wait_s=http.head_wait_s)
    url = f"http://127.0.0.1:{server.port}"
    tasks = [
        asyncio.ensure_future(one) for one in (service.run(), app.run(), server.serve_until_told())
    ]
    try:
        await server.listening.wait()
        async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
            if router_is_up:
                await until(lambda: service.is_ready)
            yield Stack(router, fakes, service, app, server, client, url)
    finally:
        server.stop()
        await tasks.pop()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result
        router.die()
        for fake in fakes:
            fake.close()
        context.destroy(linger=0)


def events(text: str) -> list[Any]:
    """Data of each event; every stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    return [json.loads(line) for line in lines[:-1]]


def content(chunks: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk.get("choices", [])
    )


def finish_reasons(chunks: list[Any]) -> list[str]:
    found = [c["finish_reason"] for chunk in chunks for c in chunk.get("choices", [])]
    return [reason for reason in found if reason]


@dataclass
class Client(asyncio.Protocol):
    """A bare socket that can leave, stall and send nonsense."""

    received: bytes = b""
    is_lost: bool = False
    transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, port: int) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def send(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.send(head.encode() + raw)

    async def close(self) -> None:
        assert self.transport is not None
        self.transport.close()
        await until(lambda: self.is_lost)


class Reader:
    """A streamed answer being read as it comes."""

    def __init__(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.response: httpx.Response | None = None
        self.text = ""
        self.task = asyncio.ensure_future(self._read(client, body))

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            self.response = response
            async for piece in response.aiter_text():
                self.text += piece

    @property
    def content(self) -> str:
        chunks = [json.loads(x.removeprefix("data: ")) for x in self.text.split("\n\n") if "{" in x]
        return content(chunks)

    async def end(self) -> list[Any]:
        async with asyncio.timeout(5):
            await self.task
        return events(self.text)


async def test_a_stream_is_the_text_with_role_reason_and_end(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        async with stack.stream(user="u") as reader:
            await until(lambda: stack.worker.running)
            for _ in range(len(stack.worker.tokens)):
                stack.worker.say(1)
                await asyncio.sleep(0)
            chunks = await reader.end()
        response = reader.response
        assert response is not None
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert content(chunks) == TEXT
        assert finish_reasons(chunks) == ["stop"]
        assert all("usage" not in chunk for chunk in chunks)
        (said,) = {(c["id"], c["object"], c["model"]) for c in chunks}
        assert said == (
            f"chatcmpl-{response.headers['x-request-id']}",
            "chat.completion.chunk",
            "m",
        )
        await stack.quiet()
        assert set(stack.router.kinds()) <= {"prefilled", "tokens", "finished"}
        (end,) = stack.router.ended().values()
        assert end.kind == "finished"
        assert end.event_sequence == 77
        assert end.usage == wire.Usage(
            len(stack.worker.frames[0]) // 4, len(stack.worker.tokens), 5
        )


async def test_what_is_routed_is_the_fresh_tokenisation_of_the_rendered_prompt(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        assert (await stack.chat(nvext={"cache_salt": "salt"})).status_code == 200
        text = model.render(HELLO)
        tokens = model.tokenizer.encode(text).tobytes()
        route, frame = stack.router.routes[0]
        assert stack.worker.frames[0] == tokens
        assert frame == sequence_hashes(tokens, BLOCK, seed=hash_seed(namespace="salt")).tobytes()
        assert route.input_tokens == len(tokens) // 4
        assert route.max_tokens == 4096 - route.input_tokens
        assert (route.model, route.attempt, route.epoch, route.streaming) == ("m", 0, 1, False)
        assert (route.namespace, stack.worker.generates[0].namespace) == ("salt", "salt")


async def test_a_whole_answer_has_usage_with_cached_tokens(model: PromptModel) -> None:
    async with running(model) as stack:
        response = await stack.chat(model="alias")
        said = response.json()
        assert said["choices"][0]["message"]["content"] == TEXT
        assert said["choices"][0]["finish_reason"] == "stop"
        assert said["model"] == "alias"
        prompt = len(stack.worker.frames[0]) // 4
        made = len(stack.worker.tokens)
        assert said["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": 5},
        }  # fmt: skip
        await stack.quiet()


async def test_usage_comes_at_the_end_of_a_stream_when_asked(model: PromptModel) -> None:
    async with running(model) as stack:
        async with stack.stream(stream_options={"include_usage": True}) as reader:
            chunks = await reader.end()
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(stack.worker.tokens)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_tokens_that_are_ready_together_go_out_in_one_event(model: PromptModel) -> None:
    async with running(model) as stack, stack.stream() as reader:
        chunks = await reader.end()
        assert len(chunks) == 3  # role, text, finish


async def test_completions_stream_whole_and_with_echo(model: PromptModel) -> None:
    async with running(model) as stack:
        body = {"model": "m", "prompt": "Once upon a time"}
        said = (await stack.client.post("/v1/completions", json=body)).json()
        assert said["object"] == "text_completion"
        assert said["choices"][0]["text"] == TEXT
        ids = model.tokenizer.encode("Once upon a time").tolist()
        echoed = await stack.client.post(
            "/v1/completions", json={**body, "echo": True, "stream": True}
        )
        chunks = events(echoed.text)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "Once upon a time" + TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        stack.worker.features = ["last_input"]
        by_ids = {**body, "prompt": ids, "echo": True}
        answer = (await stack.client.post("/v1/completions", json=by_ids)).json()
        assert answer["choices"][0]["text"] == "Once upon a time" + TEXT
        assert stack.worker.generates[-1].script_inputs == ["Once upon a time"]
        assert stack.worker.frames[0] == stack.worker.frames[1] == stack.worker.frames[2]
        await stack.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer_and_frees_the_engine(
    model: PromptModel, stream: bool
) -> None:
    async with running(model, auto=False) as stack:
        asked = asyncio.ensure_future(stack.chat(stop=["fox jumps"], stream=stream))
        await until(lambda: stack.worker.running)
        while not asked.done():
            stack.worker.say(1)
            await asyncio.sleep(0.002)
        response = await asked
        if stream:
            chunks = events(response.text)
            assert content(chunks) == "The quick brown "
            assert finish_reasons(chunks) == ["stop"]
        else:
            assert response.json()["choices"][0]["message"]["content"] == "The quick brown "
            assert response.json()["choices"][0]["finish_reason"] == "stop"
        await stack.quiet()
        await until(lambda: stack.worker.aborted)
        (end,) = stack.router.ended().values()
        assert (end.kind, end.reason) == ("finished", "stop")
        assert not stack.worker.running


async def test_max_tokens_ends_with_length(model: PromptModel) -> None:
    async with running(model) as stack:
        said = (await stack.chat(max_tokens=3)).json()
        assert said["choices"][0]["finish_reason"] == "length"
        assert said["usage"]["completion_tokens"] == 3


async def test_a_script_is_told_the_history_only_by_a_worker_that_wants_it(
    model: PromptModel,
) -> None:
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "two"},
    ]
    async with running(model) as stack:
        for features, told in (
            ([], []),
            (["script_inputs"], ["one", "two"]),
            (["last_input"], ["two"]),
        ):
            stack.worker.features = features
            await stack.chat(messages=history)
            assert stack.worker.generates[-1].script_inputs == told


STAGES = ["silent router", "held", "granted", "generating"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_frees_its_turn_at_every_stage(
    model: PromptModel, stage: str, stream: bool
) -> None:
    async with running(model, auto=False) as stack:
        stack.router.mode = {"silent router": "silent", "held": "hold"}.get(stage, "grant")
        stack.worker.accept = stage == "generating"
        client = await Client.connect(stack.server.port)
        client.post({"model": "m", "messages": HELLO, "stream": stream})
        await until(lambda: stack.router.routes)
        if stage in ("granted", "generating"):
            await until(lambda: stack.worker.generates)
        if stage == "generating":
            stack.worker.say(3)
            await until(lambda: "prefilled" in stack.router.kinds())
        await client.close()
        await stack.quiet()
        assert stack.service.table.counters.cancellations == 1
        request = stack.router.routes[0][0].request
        if stage in ("silent router", "held"):
            await until(lambda: stack.router.progress)
            (withdrawn,) = stack.router.progress
            assert (withdrawn.lease, withdrawn.kind, withdrawn.request) == (0, "cancelled", request)
            late = stack.router.grant(stack.router.open_routes[request])
            await until(lambda: late.lease in stack.router.ended())
            assert stack.router.ended()[late.lease].kind == "cancelled"
        else:
            (end,) = stack.router.ended().values()
            assert end.kind == "cancelled"
            await until(lambda: stack.worker.aborted == [end.lease])


async def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"
        )
        await asyncio.sleep(0.02)
        await client.close()
        await until(lambda: stack.app.metrics.disconnected == 1)
        assert not stack.router.routes


async def test_a_stream_survives_its_worker_unbroken(model: PromptModel) -> None:
    async with running(model, workers=2, auto=False) as stack:
        first, second = stack.workers
        async with stack.stream() as reader:
            await until(lambda: first.running)
            first.say(9)
            await until(lambda: reader.content)
            first.running.clear()
            stack.router.revoke("worker_lost")
            await until(lambda: second.running)
            second.auto = True
            second.say(len(second.tokens))
            chunks = await reader.end()
        assert content(chunks) == TEXT
        again, frame = second.generates[0], second.frames[0]
        assert (again.attempt, again.resumed) == (1, 9)
        said = b"".join(token.to_bytes(4, "little") for token in first.tokens[:9])
        assert frame == first.frames[0] + said
        route, hashes = stack.router.routes[1]
        assert (route.attempt, route.resumed, route.avoid) == (1, 9, ["w0"])
        assert hashes == sequence_hashes(frame, BLOCK).tobytes()
        await stack.quiet()
        assert stack.service.table.migrations == 1
        usages = [end.usage for end in stack.router.ended().values() if end.usage]
        assert usages == [wire.Usage(len(first.frames[0]) // 4, len(first.tokens), 5)]


@pytest.mark.parametrize("how", ["gap", "draining", "refused", "dispatch_timeout"])
async def test_a_stream_moves_on_from_a_worker_that_fails_it(model: PromptModel, how: str) -> None:
    async with running(model, workers=2, auto=False) as stack:
        first, second = stack.workers
        second.auto = True
        if how == "refused":
            first.refuse = "draining"
        first.accept = how in ("gap", "draining")
        async with stack.stream() as reader:
            await until(lambda: first.generates)
            if how == "dispatch_timeout":
                stack.router.revoke("dispatch_timeout")
            elif how == "draining":
                first.say(4)
                first.end("abort", "draining")
            elif how == "gap":
                first.say(4)
                await until(lambda: reader.content)
                first.say(4, first=6)
            chunks = await reader.end()
        assert content(chunks) == TEXT
        await stack.quiet()
        assert sorted(end.kind for end in stack.router.ended().values()) == ["failed", "finished"]
        assert stack.service.table.counters.poisons == 0


async def test_output_of_an_attempt_that_is_over_is_dropped(model: PromptModel) -> None:
    async with running(model, workers=2, auto=False) as stack:
        first, second = stack.workers
        async with stack.stream() as reader:
            await until(lambda: first.running)
            first.say(5)
            await until(lambda: reader.content)
            stack.router.revoke("worker_stalled")
            await until(lambda: second.running)
            await until(lambda: first.aborted)
            first.running = {
                lease: (peer, g, 5) for lease, (peer, g, _) in self_running(first, stack).items()
            }
            first.say(50)  # the stalled one wakes up
            await until(lambda: stack.service.table.counters.stale_outputs)
            second.say(len(second.tokens))
            assert content(await reader.end()) == TEXT
        await stack.quiet()


def self_running(worker: FakeWorker, stack: Stack) -> dict[int, tuple[Peer, wire.Generate, int]]:
    peer = Peer(wire.Role.FRONTEND, "frontend-0", stack.service.incarnation)
    return {g.lease: (peer, g, 0) for g in worker.generates}


async def test_two_deaths_make_a_poison_turn(model: PromptModel) -> None:
    async with running(model, workers=3, auto=False) as stack:
        async with stack.stream() as reader:
            for worker in stack.workers[:2]:
                await until(lambda worker=worker: worker.running)
                before = len(reader.content)
                worker.say(4)
                await until(lambda before=before: len(reader.content) > before)
                stack.router.revoke("worker_lost")
            chunks = await reader.end()
        assert chunks[-1]["error"]["code"] == "poison_request"
        assert not finish_reasons(chunks)
        await stack.quiet()
        assert stack.service.table.counters.poisons == 1
        assert stack.app.metrics.responses["chat", 500] == 1
        assert not stack.workers[2].generates


async def test_what_can_not_be_resumed_ends_with_its_own_error(model: PromptModel) -> None:
    async with running(model, workers=2, auto=False) as stack:
        asked = asyncio.ensure_future(stack.chat(response_format={"type": "json_object"}))
        await until(lambda: stack.worker.running)
        stack.worker.say(2)
        await until(lambda: "prefilled" in stack.router.kinds())
        stack.router.revoke("worker_lost")
        response = await asked
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "not_resumable"
        await stack.quiet()


async def test_an_engine_error_is_the_clients_error(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        asked = asyncio.ensure_future(stack.chat())
        await until(lambda: stack.worker.running)
        stack.worker.end("error", "out of paper")
        response = await asked
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "out of paper", "type": "server_error", "code": "turn_failed", "param": None,
        }  # fmt: skip
        await stack.quiet()


async def test_an_engine_that_says_more_than_it_was_asked_for_is_stopped(
    model: PromptModel,
) -> None:
    async with running(model, auto=False) as stack:
        asked = asyncio.ensure_future(stack.chat(max_tokens=5, logprobs=True))
        await until(lambda: stack.worker.running)
        (lease, (peer, generate, _)), *_ = stack.worker.running.items()
        assert generate.sampling.max_tokens == 5
        rows = [[(token, 0.0), (2**40, 0.0)] for token in stack.worker.tokens[:9]]
        entry = wire.OutputEntry(LeaseId(lease), 0, 0, 9, logprobs=rows)
        frame = b"".join(token.to_bytes(4, "little") for token in stack.worker.tokens[:9])
        stack.worker.listener.send(peer, wire.Output([entry]), frame)
        choice = (await asked).json()["choices"][0]
        assert choice["message"]["content"] == model.tokenizer.decode(stack.worker.tokens[:5])
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["content"]) == 5
        assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == ""
        await until(lambda: stack.worker.aborted == [lease])
        await stack.quiet()


async def test_a_worker_at_no_address_is_passed_over(model: PromptModel) -> None:
    async with running(model, workers=2) as stack:
        stack.worker.endpoint = "tcp://nowhere"
        assert (await stack.chat()).status_code == 200
        await stack.quiet()
        assert [end.reason for end in stack.router.ended().values()] == ["refused: failed", "stop"]
        assert stack.workers[1].generates


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_turn_that_no_message_can_hold_fails_at_once_and_blames_no_worker(
    model: PromptModel, is_read: bool
) -> None:
    """The header is bounded, and so is what a scripted worker can be told of a history."""
    async with running(model) as stack:
        stack.worker.features = ["script_inputs"]
        assert (await stack.chat()).status_code == 200
        await stack.quiet()
        if not is_read:  # its link is blocked: what waits there must have been looked at before
            endpoint = stack.worker.endpoint
            stack.worker.close()
            await until(lambda: is_blocked(stack.service, endpoint))
        spec = TurnSpec(
            request=RequestId("long"), key=RoutingKey("k"), model="m", prompt=bytes(8), hashes=b"", block_size=BLOCK,
            seed=0, sampling=wire.Sampling(max_tokens=3), inputs=lambda: ["x" * (5 << 20)],
        )  # fmt: skip
        turn = stack.service.submit(spec, reader=Waker(asyncio.get_running_loop(), due_at=0.0))
        await until(lambda: turn.ended)
        assert isinstance(turn.outcome, Failed)
        assert turn.outcome.error.status == 400
        assert "Generate" in turn.outcome.error.message
        await stack.quiet()
        assert stack.service.table.migrations == 0


def is_blocked(service: FrontendService, endpoint: str) -> bool:
    service.workers.abort(endpoint, LeaseId(1))
    return service.workers.counters()["wire_again"] > 0


async def test_a_full_worker_is_asked_again_after_a_moment(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.worker.refuse = "full"
        asked = asyncio.ensure_future(stack.chat())
        await until(lambda: len(stack.worker.generates) == 2)
        stack.worker.refuse = ""
        assert (await asked).status_code == 200
        await stack.quiet()


async def test_a_dead_router_holds_new_turns_and_breaks_no_running_stream(
    model: PromptModel,
) -> None:
    async with running(model, auto=False) as stack:
        async with stack.stream() as reader:
            await until(lambda: stack.worker.running)
            stack.worker.say(3)
            await until(lambda: "prefilled" in stack.router.kinds())
            old = set(stack.router.grants)
            stack.router.die()
            waiting = asyncio.ensure_future(
                stack.chat(messages=[{"role": "user", "content": "later"}])
            )
            stack.worker.say(3)
            await until(lambda: len(reader.content) > 10)
            assert not waiting.done()
            stack.router.boot()
            await until(lambda: len(stack.worker.running) == 2, timeout_s=15)
            (claims, frame) = stack.router.claims[-1]
            assert claims.last
            (claim,) = claims.claims
            assert {claim.lease} == old
            assert (claim.output_tokens, claim.accepted, claim.prefilled, claim.worker) == (
                6,
                True,
                True,
                "w0",
            )
            assert frame == stack.router.routes[0][1]
            assert claim.blocks == len(frame) // 8
            route = stack.router.routes[-1][0]
            assert route.attempt == 0
            assert route.waited_s > 0
            stack.worker.say(len(stack.worker.tokens))
            assert content(await reader.end()) == TEXT
            assert (await waiting).json()["choices"][0]["message"]["content"] == TEXT
        await stack.quiet()
        assert stack.service.table.migrations == 0


async def test_a_frontend_that_was_taken_for_dead_comes_back_as_another(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        before = stack.service.incarnation
        async with stack.stream() as reader:
            await until(lambda: stack.worker.running)
            stack.worker.say(5)
            await until(lambda: reader.content)
            stack.worker.running.clear()
            stack.router.known.clear()
            stack.router.fenced.add(before)
            await until(lambda: stack.service.incarnation > before)
            await until(lambda: stack.worker.running)
            assert stack.worker.generates[-1].incarnation == stack.service.incarnation
            stack.worker.say(len(stack.worker.tokens))
            assert content(await reader.end()) == TEXT
        assert stack.router.known == {stack.service.incarnation}
        assert stack.service.table.migrations == 0


async def test_a_clock_that_was_set_back_does_not_keep_a_frontend_out(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.router.fenced_up_to = stack.service.incarnation + 10**10
        stack.router.known.clear()
        response = await stack.chat()
        assert response.status_code == 200
        assert stack.service.incarnation == stack.router.fenced_up_to + 1
        assert len({hello.incarnation for hello in stack.router.hellos}) == 2


async def test_a_name_that_is_taken_is_not_fought_for_at_full_speed(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.router.fenced_up_to, stack.router.tells = 1 << 62, False
        stack.router.known.clear()
        started = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(stack.chat())
        await until(lambda: len({hello.incarnation for hello in stack.router.hellos}) >= 3)
        assert asyncio.get_running_loop().time() - started > 0.9, "one incarnation a second"
        stack.router.fenced_up_to = -1
        assert (await waiting).status_code == 200


async def test_a_worker_that_was_told_of_our_death_is_believed(model: PromptModel) -> None:
    async with running(model) as stack:
        before = stack.service.incarnation
        stack.worker.refuse = "fenced"
        asked = asyncio.ensure_future(stack.chat())
        await until(lambda: stack.service.incarnation > before)
        stack.worker.refuse = ""
        assert (await asked).status_code == 200


async def test_a_held_stream_is_kept_alive_in_its_own_protocol(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.router.mode = "hold"
        async with stack.stream() as reader:
            await until(lambda: reader.text.count('"delta":{}') >= 2)
            stack.router.grant_all()
            chunks = await reader.end()
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert chunks[1]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": None,
        }
        assert content(chunks) == TEXT


async def test_a_whole_answer_that_takes_long_begins_with_white_space(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.router.mode = "hold"
        client = await Client.connect(stack.server.port)
        client.post({"model": "m", "messages": HELLO})
        await until(lambda: client.received.count(b"1\r\n\n\r\n") >= 2)
        stack.router.grant_all()
        await until(lambda: client.received.endswith(b"0\r\n\r\n"))
        head, _, _ = client.received.partition(b"\r\n\r\n")
        assert b" 200 " in head
        response = await stack.chat() if stack.router.mode == "grant" else None
        assert response is None
        await client.close()
        again = asyncio.ensure_future(stack.chat())
        await asyncio.sleep(0.5)
        stack.router.grant_all()
        response = await again
        assert response.text.startswith("\n")
        assert response.json()["choices"][0]["message"]["content"] == TEXT


async def test_an_error_after_the_first_byte_is_an_event_and_before_it_a_status(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        stack.router.mode = "overloaded"
        response = await stack.chat(stream=True)
        assert response.status_code == 529
        assert response.headers["retry-after"] == "7"
        assert response.json()["error"]["type"] == "overloaded_error"
        stack.router.mode = "hold"
        async with stack.stream() as reader:
            await until(lambda: "role" in reader.text)
            route = next(iter(stack.router.open_routes.values()))
            stack.router.send(wire.Reject(route.request, 0, "no_worker", "none came", 0.0))
            chunks = await reader.end()
        assert chunks[-1]["error"]["code"] == "no_worker"
        await stack.quiet()


async def test_a_turn_that_no_router_answers_ends_at_a_deadline(model: PromptModel) -> None:
    async with running(
        model, http=HttpLimits(), limits=TurnLimits(silence_s=0.3), router_is_up=False
    ) as stack:
        ready = await stack.client.get("/ready")
        assert ready.status_code == 503
        assert (await stack.client.get("/live")).status_code == 200
        response = await stack.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"


@pytest.mark.parametrize(
    ("request_line", "headers", "body", "status", "code"),
    [
        ("POST /v1/chat/completions", "", b"{", 400, "invalid_request"),
        ("POST /v1/chat/completions", "", b"", 400, "invalid_request"),
        ("POST /v1/chat/completions", "", b"[]", 400, "invalid_request"),
        ("POST /v1/chat/completions", "", b"\xff\xfe\x00", 400, "invalid_request"),
        ("POST /v1/chat/completions", "", b'{"messages": []}', 400, "invalid_request"),
        ("POST /v1/chat/completions", "", b'{"messages": [3]}', 400, "invalid_request"),
        (
            "POST /v1/chat/completions",
            "",
            b'{"messages": [{"role": "user"}], "n": 2}',
            400,
            "invalid_request",
        ),
        ("POST /v1/completions", "", b'{"prompt": ["a", "b"]}', 400, "invalid_request"),
        ("POST /v1/completions", "", b'{"prompt": [999999999]}', 400, "invalid_request"),
        ("POST /v1/completions", "", b'{"prompt": "hi", "model": "other"}', 404, "not_found"),
        (
            "POST /v1/chat/completions",
            "content-type: text/plain\r\n",
            b"{}",
            415,
            "unsupported_media_type",
        ),
        (
            "POST /v1/chat/completions",
            "content-encoding: zstd\r\n",
            b"{}",
            415,
            "unsupported_media_type",
        ),
        ("POST /v1/chat/completions", "", b"x" * 200_001, 413, "request_too_large"),
        ("GET /v1/chat/completions", "", b"", 405, "method_not_allowed"),
        ("PUT /v1/models", "", b"", 405, "method_not_allowed"),
        ("GET /v1/models/other", "", b"", 404, "not_found"),
        ("POST /v1/nothing", "", b"", 404, "not_found"),
        ("POST /tokenize", "", b"{}", 400, "invalid_request"),
        ("POST /detokenize", "", b'{"tokens": [-1]}', 400, "invalid_request"),
    ],
)
async def test_what_is_wrong_is_answered_in_the_dialects_own_words(
    model: PromptModel, request_line: str, headers: str, body: bytes, status: int, code: str
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        head = f"{request_line} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n"
        client.send(head.encode() + body)
        await until(lambda: b"\r\n\r\n" in client.received and client.received.endswith(b"}"))
        first, _, said = client.received.partition(b"\r\n\r\n")
        assert int(first.split()[1]) == status
        error = json.loads(said)["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert error["code"] == code
        assert not stack.router.routes
        await client.close()
        assert (await stack.chat()).status_code == 200
        await stack.quiet()


async def test_a_prompt_beyond_the_window_is_refused_with_its_numbers(model: PromptModel) -> None:
    async with running(model) as stack:
        response = await stack.chat(messages=[{"role": "user", "content": "word " * 9000}])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]
        assert error["param"] == "messages"


@pytest.mark.parametrize("ids", [False, True])
async def test_a_prompt_beyond_the_window_pushes_nothing_out_of_the_cache(
    model: PromptModel, ids: bool
) -> None:
    async with running(model) as stack:
        await stack.chat()
        before = model.path.cache_bytes, model.path.counters.prompts
        said = {"prompt": [5] * 4096} if ids else {"messages": [*HELLO, *HELLO * 900]}
        path = "/v1/completions" if ids else "/v1/chat/completions"
        response = await stack.client.post(path, json=said)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (model.path.cache_bytes, model.path.counters.prompts) == before


async def test_one_clients_huge_history_does_not_stop_the_others(model: PromptModel) -> None:
    limits = HttpLimits(keep_alive_s=60.0)
    async with running(model, http=limits) as stack:
        gaps: list[float] = []
        asked = asyncio.ensure_future(
            stack.chat(messages=[{"role": "user", "content": ""}] * 100_000)
        )
        loop = asyncio.get_running_loop()
        started = before = loop.time()
        while not asked.done():
            await asyncio.sleep(0.001)
            now = loop.time()
            gaps.append(now - before)
            before = now
        assert (await asked).json()["error"]["code"] == "context_length_exceeded"
        # Rendering takes most of the time; in the loop it would be one gap.
        assert max(gaps) < (before - started) / 3


async def test_a_chunked_body_is_bounded_and_a_slow_one_is_not_waited_for(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.send((b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 5)
        await until(lambda: b"request_too_large" in client.received)
        await client.close()
        slow = await Client.connect(stack.server.port)
        slow.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        await until(lambda: b"request_timeout" in slow.received)
        assert slow.received.startswith(b"HTTP/1.1 408")
        await slow.close()


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /live HTTP/1.1\r\nx-endless: ",
        b"GET /live HTTP/1.1\r\n",
        b"GET /",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}GET /live HTTP/1.1\r\nx: ",
    ],
    ids=["value", "fields", "url", "pipelined"],
)
async def test_a_head_without_end_is_refused_before_it_costs_anything(
    model: PromptModel, request_head: bytes
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        client.send(request_head)
        piece = b"x-a: b\r\n" * 2048 if request_head.endswith(b"1.1\r\n") else b"a" * 16_384
        for _ in range(64):
            client.send(piece)
            await asyncio.sleep(0.002)
            if client.is_lost:
                break
        await until(lambda: client.is_lost)
        _, _, said = client.received.rpartition(b"\r\n\r\n")
        assert json.loads(said)["error"]["code"] == "request_header_fields_too_large"
        assert client.received.count(b"HTTP/1.1 431") == 1
        assert (await stack.client.get("/live")).status_code == 200


async def test_who_sends_no_request_is_not_waited_for_and_who_is_answered_is(
    model: PromptModel,
) -> None:
    limits = HttpLimits(head_wait_s=0.3, keep_alive_s=60.0)
    async with running(model, http=limits, auto=False) as stack:
        silent = await Client.connect(stack.server.port)
        half = await Client.connect(stack.server.port)
        half.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")
        answered = await Client.connect(stack.server.port)
        answered.post({"messages": HELLO, "stream": True})
        answered.send(b"GET /live HTTP/1.1\r\n")  # the next one, not yet whole
        await until(lambda: stack.worker.running)
        await until(lambda: silent.is_lost and half.is_lost)
        assert not answered.is_lost
        stack.worker.say(len(stack.worker.tokens))
        await until(lambda: b"[DONE]" in answered.received)
        await until(lambda: answered.is_lost)  # now it is late as well
        await stack.quiet()


@pytest.mark.parametrize(
    "body", [b"transfer-encoding: chunked\r\n\r\nZZ\r\n", b"content-length: 2\r\n\r\n{}{}"]
)
async def test_a_body_that_is_no_http_is_told_so_unless_an_answer_has_begun(
    model: PromptModel, body: bytes
) -> None:
    async with running(model, auto=False) as stack:
        client = await Client.connect(stack.server.port)
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + body)
        await until(lambda: client.is_lost)
        assert client.received.startswith(b"HTTP/1.1 400")
        assert client.received.count(b"\r\n\r\n") == 1
        streaming = await Client.connect(stack.server.port)
        streaming.post({"messages": HELLO, "stream": True})
        await until(lambda: b"role" in streaming.received)
        streaming.send(b"\x00\x00")
        await until(lambda: streaming.is_lost)
        assert b"no HTTP" not in streaming.received
        await stack.quiet()


async def test_what_a_client_sent_is_not_sent_back_whole(model: PromptModel) -> None:
    async with running(model) as stack:
        response = await stack.chat(model="m" * 100_000)
        assert response.status_code == 404
        assert len(response.content) < 2000


async def test_what_is_no_http_is_told_so_in_json(model: PromptModel) -> None:
    async with running(model) as stack:
        for nonsense in (
            b"\x16\x03\x01\x02",
            b"CONNECT x:443 HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
        ):
            client = await Client.connect(stack.server.port)
            client.send(nonsense)
            await until(lambda client=client: client.is_lost)
            head, _, said = client.received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert json.loads(said)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere"])
async def test_an_answer_to_head_has_no_body_for_the_next_answer_to_begin_with(
    model: PromptModel, path: str
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await until(lambda: client.received.endswith(b"\r\n\r\n"))
        assert client.received.split()[1] in (b"405", b"404")
        client.send(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: client.received.endswith(b"}"))
        answers = client.received.split(b"HTTP/1.1 ")
        assert [answer[:3] for answer in answers[2:]] == [b"200"]
        assert answers[1].endswith(b"\r\n\r\n")
        await client.close()


@pytest.mark.parametrize(
    "offer",
    [
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\n",
    ],
)
async def test_an_offer_of_another_protocol_is_a_request_like_any_other(
    model: PromptModel, offer: bytes
) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        body = json.dumps({"messages": HELLO}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
        for part in (head % (offer, len(body)), body[:20], body[20:]):
            client.send(part)
            await asyncio.sleep(0.01)
        await until(lambda: client.received.endswith(b"}"))
        said = json.loads(client.received.partition(b"\r\n\r\n")[2])
        assert said["choices"][0]["message"]["content"] == TEXT
        client.post({"messages": HELLO})  # and the connection goes on
        await until(lambda: client.received.count(b"HTTP/1.1 200") == 2)
        await client.close()


async def test_only_known_keys_are_served_and_tenants_share_nothing(model: PromptModel) -> None:
    async with running(model, apiKeys={"key-a": "acme", "key-b": "beta"}) as stack:
        assert (await stack.chat()).status_code == 401
        assert (await stack.client.get("/v1/models")).status_code == 401
        assert (await stack.client.get("/ready")).status_code == 200
        sessions = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}
        for key in ("key-a", "key-b"):
            headers = {"authorization": f"Bearer {key}", **sessions}
            body = {"messages": HELLO}
            response = await stack.client.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
        (a, hashes_a), (b, hashes_b) = stack.router.routes
        assert (a.session, a.parent, a.key, a.namespace) == ("acme/s", "acme/p", "acme/p", "acme")
        assert (b.session, b.parent, b.key, b.namespace) == ("beta/s", "beta/p", "beta/p", "beta")
        assert hashes_a != hashes_b


async def test_an_anonymous_conversation_is_one_session_and_another_is_another(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        one = [{"role": "user", "content": "The first conversation, about ships and the sea. " * 4}]
        two = [
            {"role": "user", "content": "The second conversation, about hills and the sky. " * 4}
        ]
        for turn in range(3):
            for history in (one, two):
                answer = (await stack.chat(messages=history)).json()["choices"][0]["message"]
                history += [answer, {"role": "user", "content": f"And then, {turn}?"}]
        routes = [route for route, _ in stack.router.routes]
        assert all(route.inferred and route.key == route.session for route in routes)
        assert routes[0].session == routes[2].session == routes[4].session
        assert routes[1].session == routes[3].session == routes[5].session
        assert routes[0].session != routes[1].session


async def test_models_are_named_with_their_window(model: PromptModel) -> None:
    async with running(model) as stack:
        cards = (await stack.client.get("/v1/models")).json()
        assert [card["id"] for card in cards["data"]] == ["m", "alias"]
        card = (await stack.client.get("/v1/models/alias")).json()
        assert (card["context_length"], card["max_model_len"], card["root"]) == (4096, 4096, "m")


async def test_text_goes_to_tokens_and_back(model: PromptModel) -> None:
    async with running(model) as stack:
        said = (await stack.client.post("/tokenize", json={"prompt": TEXT})).json()
        assert said["tokens"] == stack.worker.tokens
        assert (said["count"], said["max_model_len"]) == (len(stack.worker.tokens), 4096)
        back = await stack.client.post("/detokenize", json={"tokens": said["tokens"]})
        assert back.json() == {"prompt": TEXT}
        chat = (await stack.client.post("/tokenize", json={"messages": HELLO})).json()
        assert chat["tokens"] == model.tokenizer.encode(model.render(HELLO)).tolist()
        strings = {"prompt": "Hello!", "return_token_strs": True}
        said = (await stack.client.post("/tokenize", json=strings)).json()
        assert "".join(said["token_strs"]) == "Hello!"
        for path, body in (
            ("/detokenize", {"tokens": [5] * 4097}),
            ("/tokenize", {"prompt": "word " * 4097, "return_token_strs": True}),
        ):
            response = await stack.client.post(path, json=body)
            assert response.status_code == 400, path


async def test_counters_say_what_happened(model: PromptModel) -> None:
    async with running(model) as stack:
        passes = model.path.counters.full_passes
        await stack.chat()
        await stack.chat(n=3)
        await stack.quiet()
        text = (await stack.client.get("/metrics")).text
        made = len(stack.worker.tokens)
        for line in (
            'fermata_frontend_requests_total{endpoint="chat",status="200"} 1.0',
            'fermata_frontend_requests_total{endpoint="chat",status="400"} 1.0',
            f"fermata_frontend_output_tokens_total {float(made)}",
            "fermata_frontend_time_to_first_token_seconds_count 1.0",
            'fermata_frontend_output_sequence_tokens_bucket{le="+Inf"} 1.0',
            "fermata_frontend_leases 0.0",
            "fermata_frontend_workers_ready 1.0",
        ):
            assert line in text, line
        status = (await stack.client.get("/fermata/status")).json()
        assert status["id"] == "frontend-0"
        assert (status["turns"], status["leases"], status["links"], status["migrations"]) == (
            0,
            0,
            1,
            0,
        )
        assert status["prompts"]["full_passes"] == model.path.counters.full_passes >= passes
        assert status["router"]["connected"]
        assert status["router"]["workers_ready"] == 1


async def test_client_sockets_have_no_delay(model: PromptModel) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        await until(lambda: stack.server.server_state.connections)
        for connection in stack.server.server_state.connections:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        await client.close()


async def test_requests_on_one_connection_are_answered_in_their_order(model: PromptModel) -> None:
    async with running(model) as stack:
        client = await Client.connect(stack.server.port)
        client.post({"messages": HELLO, "max_tokens": 1})
        client.post({"messages": HELLO, "max_tokens": 2, "stream": True})
        client.post({"messages": HELLO, "max_tokens": 3})
        await until(
            lambda: client.received.count(b"HTTP/1.1 200") == 3 and client.received.endswith(b"}}}")
        )
        first, _, rest = client.received.partition(b"data: ")
        assert b'"completion_tokens":1' in first
        assert b"[DONE]" in rest
        assert b'"completion_tokens":3' in rest.partition(b"[DONE]")[2]
        await client.close()


async def test_a_connection_is_closed_when_the_client_wants_it(model: PromptModel) -> None:
    async with running(model) as stack:
        for version, header in (("1.1", "connection: close\r\n"), ("1.0", "")):
            client = await Client.connect(stack.server.port)
            body = json.dumps({"messages": HELLO}).encode()
            head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\n{header}content-length: {len(body)}\r\n\r\n"
            client.send(head.encode() + body)
            await until(lambda client=client: client.is_lost)
            assert b"connection: close" in client.received
            assert json.loads(client.received.partition(b"\r\n\r\n")[2])["choices"]


async def test_a_slow_client_holds_up_nobody_and_fills_no_memory(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        stack.worker.tokens = stack.worker.tokens * 40
        slow = await Client.connect(stack.server.port)
        assert slow.transport is not None
        slow.transport.pause_reading()
        await until(lambda: stack.server.server_state.connections)
        (connection,) = stack.server.server_state.connections
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 2048
        )
        slow.post({"model": "m", "messages": HELLO, "stream": True})
        await until(lambda: stack.worker.running)
        sent = 0
        while stack.worker.running:
            stack.worker.say(1)
            await asyncio.sleep(0)
            sent += 1
        await stack.quiet()
        assert sent > 2000
        assert connection.transport.get_write_buffer_size() < 200_000
        stack.worker.tokens = stack.worker.tokens[:5]
        stack.worker.auto = True
        assert (await stack.chat()).status_code == 200
        slow.transport.resume_reading()
        await until(lambda: slow.received.endswith(b"0\r\n\r\n"))
        assert content(events(dechunked(slow.received))) == TEXT * 40
        await slow.close()


def dechunked(raw: bytes) -> str:
    rest = raw.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


async def test_stopping_finishes_what_runs_and_takes_nothing_new(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        async with stack.stream() as reader:
            await until(lambda: stack.worker.running)
            stack.worker.say(3)
            await until(lambda: reader.content)
            stack.service.is_draining = True
            stack.server.stop()

            async def is_refused() -> bool:
                try:
                    client = await Client.connect(stack.server.port)
                except OSError:
                    return True
                await client.close()
                return False

            async with asyncio.timeout(5):
                while not await is_refused():
                    await asyncio.sleep(0.01)
            stack.worker.say(len(stack.worker.tokens))
            assert content(await reader.end()) == TEXT
        await stack.quiet()


async def test_digests_and_lists_say_which_leases_live(model: PromptModel) -> None:
    async with running(model, auto=False) as stack:
        async with stack.stream() as reader:
            await until(lambda: stack.worker.running)
            (lease,) = stack.router.grants
            await until(lambda: stack.router.beats and stack.router.beats[-1].count == 1)
            beat = stack.router.beats[-1]
            assert (beat.seen, beat.xor) == (lease, LeaseDigest([lease]).xor)
            stack.router.send(wire.LeaseListRequest())
            await until(lambda: stack.router.lists)
            leases, frame = stack.router.lists[0]
            assert (leases.seen, frame) == (lease, lease.to_bytes(8, "little"))
            stack.worker.say(len(stack.worker.tokens))
            await reader.end()
        await until(lambda: stack.router.beats[-1].count == 0)
        assert stack.router.beats[-1].xor == 0


async def test_each_turn_leaves_one_trace_record_without_its_words(
    model: PromptModel, tmp_path: Path
) -> None:
    prefix = tmp_path / "fermata"
    with TraceWriter(prefix) as trace:
        async with running(model, workers=2, auto=False, trace=trace) as stack:
            first, second = stack.workers
            stack.router.mode = "hold"
            headers = {"x-dynamo-session-id": "s-1", "x-request-id": "mine"}
            body = {"messages": [*HELLO, {"role": "tool", "content": "secret"}], "stream": True}
            asked = asyncio.ensure_future(
                stack.client.post("/v1/chat/completions", json=body, headers=headers)
            )
            await until(lambda: stack.router.open_routes)
            stack.router.grant_all()
            await until(lambda: first.running)
            first.say(4)
            await until(lambda: "prefilled" in stack.router.kinds())
            stack.router.mode = "grant"
            second.auto = True
            stack.router.revoke("worker_lost")
            await asked
    ((_, path),) = segments(prefix)
    raw = gzip.decompress(path.read_bytes())
    assert b"secret" not in raw
    assert b"quick brown" not in raw
    (line,) = raw.splitlines()
    event = json.loads(line)["event"]
    assert event["agent_context"] == {
        "session_id": "s-1", "parent_session_id": None, "session_final": False, "input_trigger": "tool_result",
        "inferred": False,
    }  # fmt: skip
    request = event["request"]
    assert request["x_request_id"] == "mine"
    assert (request["attempts"], request["migrations"], request["outcome"]) == (2, 1, "finished")
    assert request["router_hold_reason"] == "queue"
    assert request["router_admission_wait_ms"] > 0
    assert (request["serving_worker_id"], request["policy_revision"]) == ("w1", 3)
    assert request["lease"] in stack.router.grants
    assert request["cached_tokens"] == 5
    assert request["finish_reason_metadata"]["finish_reason"] == "stop"
    hashes = request["replay"]["input_sequence_hashes"]
    assert b"".join(h.to_bytes(8, "little") for h in hashes) == stack.router.routes[0][1]
    assert 0 < request["ttft_ms"] <= request["total_time_ms"]


async def test_a_fault_of_ours_is_one_clients_error_and_is_counted(
    model: PromptModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(model) as stack:
        metrics = FrontendMetrics()
        keep_alives = KeepAlives(period_s=1.0)
        room = TurnRoom(stack.service, model, ApiKeys({}), FAST, metrics, keep_alives, None)

        async def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        endpoint = TurnEndpoint(
            "chat", room, decoder=msgspec.json.Decoder(ChatBody), accept=broken, writer=ChatWriter
        )
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps({"messages": HELLO}).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        await endpoint(scope, receive, send)
        assert sent[0]["status"] == 500
        assert json.loads(sent[1]["body"])["error"]["message"] == "internal error"
        assert metrics.internal_errors == 1
        assert metrics.responses["chat", 500] == 1
        assert "ZeroDivisionError" in caplog.text


class _Choking(ChatWriter):
    def deltas(self, deltas: Any, logprobs: Any) -> bytes:
        raise (ZeroDivisionError if self.choke_on is None else self.choke_on)

    choke_on: Exception | None = None


@pytest.mark.parametrize("error", [None, NotFound("what?")])
async def test_a_fault_in_the_middle_of_an_answer_ends_it_in_the_dialects_words(
    model: PromptModel, error: Exception | None
) -> None:
    async with running(model, auto=False) as stack:
        endpoint = stack.app._turns["/v1/chat/completions"]
        assert isinstance(endpoint, TurnEndpoint)
        endpoint._writer = type("Broken", (_Choking,), {"choke_on": error})
        async with stack.stream() as reader:
            await until(lambda: stack.worker.running)
            await until(lambda: "role" in reader.text)  # kept alive: the first byte is out
            stack.worker.say(3)
            chunks = await reader.end()
        assert chunks[-1]["error"]["code"] == ("turn_failed" if error is None else "not_found")
        await until(lambda: stack.worker.aborted)
        await stack.quiet()
        assert stack.app.metrics.responses["chat", 500 if error is None else 404] == 1


async def test_a_fault_of_ours_off_the_turn_path_is_json_too(model: PromptModel) -> None:
    async with running(model) as stack:
        transport = httpx.ASGITransport(stack.app, raise_app_exceptions=False)
        routers, stack.service.routers = stack.service.routers, None  # type: ignore[assignment]
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                response = await client.get("/health")
        finally:
            stack.service.routers = routers
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error"


async def test_a_moved_key_is_asked_where_the_new_ring_says(model: PromptModel) -> None:
    async with running(model) as stack:
        other = FakeRouter(stack.router.context, stack.workers, number=8)
        stack.router.mode = "silent"
        asked = asyncio.ensure_future(stack.chat())
        await until(lambda: stack.router.open_routes)
        ring = wire.Ring(2, [("router-1", other.endpoint)])
        other.epoch = stack.router.epoch = 2
        (route,) = stack.router.open_routes.values()
        stack.router.send(wire.Moved(route.request, 0, ring))
        assert (await asked).status_code == 200
        assert other.routes[0][0].epoch == 2
        await until(lambda: set(other.grants) == set(other.ended()))
        other.die()


FINAL = {"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}


def program(session: str, **fields: Any) -> wire.ProgramRow:
    settings: dict[str, Any] = {
        "session": session, "parent": "", "phase": "acting", "state": "paused", "worker": "", "rank": 0,
        "context_tokens": 700, "steps": 3, "turns": 0, "idle_s": 4.0, "waited_s": 0.0, "reason": "", "gap": "tool",
    }  # fmt: skip
    return wire.ProgramRow(**(settings | fields))


@pytest.mark.parametrize("ask", [{"max_tokens": 1}, {"max_completion_tokens": 0}, {"messages": []}])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_final_request_that_wants_nothing_ends_its_session_without_an_engine(
    model: PromptModel, ask: dict[str, Any], streams: bool
) -> None:
    async with running(model) as stack:
        stack.router.programs["s"] = program("s")
        body = {"model": "m", "messages": HELLO, "stream": streams, **ask}
        if streams:
            body["stream_options"] = {"include_usage": True}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=FINAL)
        assert answer.status_code == 200
        if streams:
            chunks = events(answer.text)
            assert content(chunks) == ""
            assert finish_reasons(chunks) == ["stop"]
            usage = chunks[-1]["usage"]
        else:
            (choice,) = answer.json()["choices"]
            assert choice["message"]["content"] == ""
            assert choice["finish_reason"] == "stop"
            usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 0)
        (farewell,) = stack.router.farewells
        assert (farewell.session, farewell.key, farewell.epoch) == ("s", "s", wire.NO_EPOCH)
        assert not stack.router.programs
        assert not stack.router.routes
        assert not stack.worker.generates
        assert len(stack.service.table) == 0


async def test_a_final_request_of_a_nameless_client_is_answered_and_asks_nobody(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        headers = {"x-dynamo-session-final": "true"}
        body = {"model": "m", "messages": HELLO, "max_tokens": 1}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 0
        assert stack.router.farewells == []
        prompt = {"prompt": "good-bye", "max_tokens": 1}
        answer = await stack.client.post("/v1/completions", json=prompt, headers=FINAL)
        assert answer.json()["choices"][0] == {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "stop",
        }  # fmt: skip
        assert len(stack.router.farewells) == 1


async def test_a_final_turn_with_something_to_say_is_served_and_says_that_it_is_the_last(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        body = {"model": "m", "messages": HELLO}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=FINAL)
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        ((route, _),) = stack.router.routes
        assert route.final
        assert route.input_tokens > 0
        assert stack.worker.generates[0].final
        assert stack.router.farewells == []


async def test_no_messages_without_a_farewell_is_an_error(model: PromptModel) -> None:
    async with running(model) as stack:
        for body in ({"model": "m"}, {"model": "m", "messages": []}):
            answer = await stack.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages"


async def test_a_farewell_that_no_router_hears_is_answered_all_the_same(model: PromptModel) -> None:
    async with running(model) as stack:
        stack.service.questions = RouterQuestions(stack.service.routers, wait_s=0.2)
        stack.router.mode = "silent"
        body = {"model": "m", "messages": HELLO, "max_tokens": 1}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=FINAL)
        assert answer.status_code == 200
        assert (
            "fermata_frontend_unheard_farewells_total 1.0"
            in (await stack.client.get("/metrics")).text
        )
        released = await stack.client.post("/programs/release", json={"program_id": "s"})
        assert released.status_code == 503
        assert len(stack.service.questions) == 0


async def test_a_program_id_in_the_body_is_the_session_where_no_header_names_one(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        await stack.chat(program_id="top", nvext={"agent_hints": {"program_id": "hinted"}})
        await stack.chat(program_id="top")
        body = {"model": "m", "messages": HELLO, "program_id": "top"}
        await stack.client.post(
            "/v1/chat/completions", json=body, headers={"x-dynamo-session-id": "header"}
        )
        sessions = [(route.session, route.key) for route, _ in stack.router.routes]
        assert sessions == [("hinted", "hinted"), ("top", "top"), ("header", "header")]
        assert not any(route.inferred for route, _ in stack.router.routes)


async def test_programs_are_listed_by_page_and_released_by_name(model: PromptModel) -> None:
    async with running(model) as stack:
        for name in ("c", "a", "b"):
            stack.router.programs[name] = program(name, worker="w0", state="active")
        first = (await stack.client.get("/programs", params={"limit": 2})).json()
        assert [p["program_id"] for p in first["programs"]] == ["a", "b"]
        assert first["next"] == "b"
        assert first["programs"][0]["worker"] == "w0"
        rest = (await stack.client.get("/programs", params={"after": first["next"]})).json()
        assert [p["program_id"] for p in rest["programs"]] == ["c"]
        assert rest["next"] is None
        for expected in (True, False):
            answer = await stack.client.post("/programs/release", json={"program_id": "b"})
            assert answer.json() == {"program_id": "b", "released": expected}
        for params in ({"limit": "0"}, {"limit": "many"}, {"limit": "1001"}):
            assert (await stack.client.get("/programs", params=params)).status_code == 400
        for wrong in ({}, {"program_id": " "}, {"program_id": 3}):
            answer = await stack.client.post("/programs/release", json=wrong)
            assert answer.status_code == 400, wrong


async def test_a_tenant_sees_and_ends_only_its_own_programs(model: PromptModel) -> None:
    async with running(model, apiKeys={"k1": "me", "k2": "you"}) as stack:
        stack.router.programs |= {name: program(name) for name in ("me/s", "you/s", "you/t")}
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        listed = (await stack.client.get("/programs", headers=mine)).json()
        assert [p["program_id"] for p in listed["programs"]] == ["s"]
        answer = await stack.client.post(
            "/programs/release", json={"program_id": "you/t"}, headers=mine
        )
        assert answer.json()["released"] is False
        answer = await stack.client.post(
            "/programs/release", json={"program_id": "t"}, headers=yours
        )
        assert answer.json()["released"] is True
        assert set(stack.router.programs) == {"me/s", "you/s"}
        assert (await stack.client.get("/programs")).status_code == 401
        assert (await stack.client.post("/programs/release", json={})).status_code == 401


async def test_a_turn_is_explained_to_who_asked_for_it(model: PromptModel) -> None:
    async with running(model, apiKeys={"k1": "me", "k2": "you"}) as stack:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        body = {"model": "m", "messages": HELLO, "program_id": "s"}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=mine)
        request = answer.headers["x-request-id"]
        candidate = wire.Candidate(WorkerId("w0"), 0, True, 1.5, {"device": 3}, 1)
        for what, age_s in (("grant", 1.0), ("hold", 3.0)):
            decision = wire.Decision(
                age_s, RequestId(request), 0, OwnerId("f"), "me/s", what, candidates=[candidate]  # type: ignore[arg-type]
            )  # fmt: skip
            stack.router.decisions.append(decision)
        said = (await stack.client.get(f"/programs/explain/{request}", headers=mine)).json()
        assert [d["what"] for d in said["decisions"]] == ["grant", "hold"]
        assert said["decisions"][0]["session"] == "s"
        assert said["decisions"][0]["candidates"][0]["matched"] == {"device": 3}
        other = await stack.client.get(f"/programs/explain/{request}", headers=yours)
        assert other.status_code == 404


@pytest.mark.parametrize("reason", ["pressure", "admission", "queue", "policy"])
async def test_whatever_a_stream_is_held_for_its_client_hears_of_it_and_the_metrics_too(
    model: PromptModel, reason: str
) -> None:
    async with running(model) as stack:
        stack.router.mode, stack.router.hold_reason = "hold", reason
        async with stack.stream() as reader:
            await until(lambda: reader.text.count('"delta":{}') >= 3)
            assert reader.content == ""
            stack.router.grant_all()
            chunks = await reader.end()
            assert content(chunks).startswith("The quick")
        text = (await stack.client.get("/metrics")).text
        assert f'fermata_frontend_hold_seconds_count{{reason="{reason}"}} 1.0' in text


async def test_a_turn_asked_for_again_keeps_the_age_of_the_one_its_client_left(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        stack.router.mode = "hold"
        client = await Client.connect(stack.server.port)
        client.post({"model": "m", "messages": HELLO, "program_id": "s", "stream": True})
        await until(lambda: any(turn.is_held for turn in stack.service.table))
        await asyncio.sleep(0.15)
        await client.close()
        await until(lambda: not len(stack.service.table))
        stack.router.mode = "grant"
        await stack.chat(program_id="s")
        await stack.chat(program_id="other")
        again, other = (route for route, _ in stack.router.routes[1:])
        assert 0.15 <= again.waited_s < 5.0
        assert other.waited_s < 0.1


async def test_while_both_are_open_a_repeat_cancels_nothing_and_both_are_served(
    model: PromptModel,
) -> None:
    async with running(model) as stack:
        stack.router.mode = "hold"
        async with stack.stream(program_id="s") as older:
            await until(lambda: any(turn.is_held for turn in stack.service.table))
            async with stack.stream(program_id="s") as newer:
                await until(lambda: len(stack.router.open_routes) == 2)
                stack.router.grant_all()
                answers = [content(await reader.end()) for reader in (older, newer)]
        assert answers[0] == answers[1] != ""
        assert stack.service.table.counters.cancellations == 0
        assert stack.service.table.repeats.found == 1
        await stack.quiet()


async def test_a_finish_says_whether_a_tool_or_a_person_is_waited_for(model: PromptModel) -> None:
    call = "I will look. <tool_call>\n{}\n</tool_call>"
    async with running(model) as stack:
        await stack.chat(program_id="s")
        stack.worker.tokens = model.tokenizer.encode(call).tolist()
        await stack.chat(program_id="s")
        await stack.chat(program_id="s", max_tokens=2)
        await stack.quiet()
        ends = [p for p in stack.router.progress if p.kind == "finished"]
        assert [(p.reason, p.gap) for p in ends] == [
            ("stop", "human"),
            ("stop", "tool"),
            ("length", ""),
        ]


async def test_a_farewell_leaves_a_trace_record_without_tokens_or_attempts(
    model: PromptModel, tmp_path: Path
) -> None:
    prefix = tmp_path / "trace"
    with TraceWriter(prefix) as trace:
        async with running(model, trace=trace) as stack:
            body = {"model": "m", "messages": HELLO, "max_tokens": 1}
            await stack.client.post("/v1/chat/completions", json=body, headers=FINAL)
    ((_, segment),) = segments(prefix)
    (line,) = gzip.decompress(segment.read_bytes()).decode().splitlines()
    record = json.loads(line)["event"]
    assert record["agent_context"]["session_id"] == "s"
    assert record["agent_context"]["session_final"] is True
    assert record["agent_context"]["input_trigger"] == "user_message"
    request = record["request"]
    assert (request["attempts"], request["outcome"]) == (0, "finished")
    assert request.get("output_tokens", 0) == 0
    assert request["finish_reason_metadata"]["finish_reason"] == "stop"


async def test_a_turn_held_for_two_reasons_has_both_in_its_record_and_metrics(
    model: PromptModel, tmp_path: Path
) -> None:
    prefix = tmp_path / "trace"
    with TraceWriter(prefix) as trace:
        async with running(model, trace=trace) as stack:
            stack.router.mode, stack.router.hold_reason = "hold", "admission"
            asking = asyncio.ensure_future(stack.chat(program_id="s"))
            await until(lambda: any(turn.is_held for turn in stack.service.table))
            await asyncio.sleep(0.05)
            ((route, _),) = stack.router.routes
            stack.router.send(wire.Hold(route.request, route.attempt, "pressure", 60.0))
            await until(lambda: next(iter(stack.service.table)).hold_reason == "pressure")
            await asyncio.sleep(0.05)
            stack.router.grant_all()
            assert (await asking).status_code == 200
            text = (await stack.client.get("/metrics")).text
    for reason in ("admission", "pressure"):
        assert f'fermata_frontend_hold_seconds_count{{reason="{reason}"}} 1.0' in text
    ((_, segment),) = segments(prefix)
    (line,) = gzip.decompress(segment.read_bytes()).decode().splitlines()
    request = json.loads(line)["event"]["request"]
    assert request["router_hold_reason"] == "pressure"
    assert request["router_admission_wait_ms"] >= 100
