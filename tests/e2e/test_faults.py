"""Real processes, real deaths: every client that kept its connection gets its complete text, and nothing leaks.

Each fault hits at least eight streams of the victim, each with a token already sent and at least
twenty to come. The text must equal that of the same prompt served unbroken: the simulated engine is
deterministic in its prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable

import httpx
import pytest
import tokenizers

from fermata.core.model_folder import ModelFolder, default_model_folder

MANIFEST = """
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {name: faults}
spec:
  model: {name: tiny}
  frontend: {replicas: 2}
  workers:
    - name: sim
      replicas: 2
      simulated: {responder: {type: Lorem}}
"""
STREAMS = 24
MIN_ON_VICTIM = 8
TO_COME = 20
ORACLE = tokenizers.Tokenizer.from_file(
    str(ModelFolder.load(default_model_folder()).tokenizer_file)
)


class Stream:
    """One streamed turn and what its client saw."""

    def __init__(self, prompt: str, max_tokens: int) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.text = ""
        self.finish: str | None = None
        self.completion_tokens = 0
        self.broken = ""

    def body(self) -> dict[str, object]:
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def run(self, http: httpx.AsyncClient) -> None:
        try:
            async with http.stream("POST", "/v1/chat/completions", json=self.body()) as reply:
                if reply.status_code != 200:
                    self.broken = f"status {reply.status_code}: {await reply.aread()!r}"
                    return
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            self.broken = repr(error)

    def _take(self, chunk: dict) -> None:
        if "error" in chunk:
            self.broken = str(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish
        if chunk.get("usage"):
            self.completion_tokens = chunk["usage"]["completion_tokens"]

    @property
    def tokens_so_far(self) -> int:
        return len(ORACLE.encode(self.text, add_special_tokens=False).ids)


class Crowd:
    """Streams over all frontends in turn, and the clients that run them."""

    def __init__(self, stack, *, tag: str, count: int = STREAMS, max_tokens: int = 400) -> None:
        self.stack = stack
        self.clients = [httpx.AsyncClient(base_url=url, timeout=120) for url in stack.urls]
        self.streams = [Stream(f"{tag}: tell story number {i}", max_tokens) for i in range(count)]
        self.tasks: list[asyncio.Task[None]] = []

    def of_frontend(self, index: int) -> list[Stream]:
        return self.streams[index :: len(self.clients)]

    async def start(self) -> None:
        for i, stream in enumerate(self.streams):
            client = self.clients[i % len(self.clients)]
            self.tasks.append(asyncio.create_task(stream.run(client)))
        await until(lambda: all(s.text or s.broken for s in self.streams), within_s=30)

    def assert_midway(self) -> None:
        """At least a token out, at least twenty to come, on every stream: so on the victim's too."""
        for stream in self.streams:
            assert not stream.broken
            assert stream.finish is None
            assert 1 <= stream.tokens_so_far <= stream.max_tokens - TO_COME

    async def finish(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), 90)

    async def assert_unbroken(self, streams: list[Stream]) -> None:
        """Complete, and equal to the same prompts served again without a fault."""
        again = [Stream(s.prompt, s.max_tokens) for s in streams]
        await asyncio.gather(*(s.run(self.clients[self.alive(i)]) for i, s in enumerate(again)))
        for stream, calm in zip(streams, again, strict=True):
            assert not stream.broken, stream.broken
            assert not calm.broken, calm.broken
            assert stream.text == calm.text
            assert stream.finish == calm.finish == "length"
            assert stream.completion_tokens == calm.completion_tokens == stream.max_tokens

    def alive(self, i: int) -> int:
        return i % len(self.clients)

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()


async def until(claim: Callable[[], object], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def migrations(stack) -> int:
    return sum([(await frontend_status(url))["migrations"] for url in stack.urls])


async def frontend_status(url: str) -> dict:
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        return (await http.get("/fermata/status")).raise_for_status().json()


async def leftovers(stack) -> dict[str, float]:
    """What must be zero once no turn runs: leases, KV references and request tables, everywhere."""
    left: dict[str, float] = {}
    for name in stack.names("router"):
        numbers = await stack.numbers(name)
        for key in ("leases", "turns_waiting", "pending_prefill_tokens", "decode_blocks"):
            left[f"{name}.{key}"] = numbers[key]
    for name in stack.names("worker"):
        numbers = await stack.numbers(name)
        for key in ("requests", "kv_blocks_referenced"):
            left[f"{name}.{key}"] = numbers[key]
    for url in stack.urls:
        status = await frontend_status(url)
        left[f"{url}.turns"] = status["turns"]
        left[f"{url}.leases"] = status["leases"]
    return left


async def assert_nothing_left(stack, *, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while any((left := await leftovers(stack)).values()):
        assert time.monotonic() < deadline, {k: v for k, v in left.items() if v}
        await asyncio.sleep(0.1)


async def ready(stack, *, workers: int = 2) -> None:
    """Every part answers and both workers are admitted again."""

    async def admitted() -> bool:
        try:
            for name in stack.names("router"):
                if (await stack.numbers(name))["workers_ready"] != workers:
                    return False
            for url in stack.urls:
                async with httpx.AsyncClient(base_url=url, timeout=5) as http:
                    if (await http.get("/ready")).status_code != 200:
                        return False
        except (httpx.TransportError, TimeoutError):
            return False
        return True

    deadline = time.monotonic() + 40
    while not await admitted():
        assert time.monotonic() < deadline, "the stack did not become ready again"
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def stack(stack_factory):
    return stack_factory(MANIFEST, replicas=2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_of_a_lost_worker_go_on_elsewhere_unbroken(stack, blow: signal.Signals):
    await ready(stack)
    before = await migrations(stack)
    crowd = Crowd(stack, tag=f"worker {blow.name}")
    await crowd.start()
    (victim, *_) = stack.names("worker")
    pid = stack.pid(victim)
    crowd.assert_midway()
    os.kill(pid, blow)
    await crowd.finish()
    moved = await migrations(stack) - before
    if blow is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    await ready(stack)
    assert moved >= MIN_ON_VICTIM, f"only {moved} streams were on the victim"
    assert moved < STREAMS, "both workers had streams"
    await crowd.assert_unbroken(crowd.streams)
    await assert_nothing_left(stack)
    await crowd.close()


@pytest.mark.timeout(180)
async def test_a_killed_router_stops_no_stream_and_loses_no_new_turn(stack):
    await ready(stack)
    before = await migrations(stack)
    crowd = Crowd(stack, tag="router", max_tokens=600)
    await crowd.start()
    (victim,) = stack.names("router")
    crowd.assert_midway()
    os.kill(stack.pid(victim), signal.SIGKILL)
    late = Crowd(stack, tag="after the router", count=8, max_tokens=40)
    await late.start()
    await asyncio.gather(crowd.finish(), late.finish())
    assert await migrations(stack) == before, "no stream depends on the router"
    await ready(stack)
    await crowd.assert_unbroken(crowd.streams)
    await late.assert_unbroken(late.streams)
    await assert_nothing_left(stack)
    await crowd.close()
    await late.close()


@pytest.mark.timeout(180)
async def test_a_killed_frontend_takes_only_its_own_clients_along(stack):
    await ready(stack)
    tokens = 1800  # about 12 s of decoding: far beyond the owner time-out, so only an abort ends it early
    crowd = Crowd(stack, tag="frontend", max_tokens=tokens)
    await crowd.start()
    dead, alive = crowd.of_frontend(1), crowd.of_frontend(0)
    assert len(dead) >= MIN_ON_VICTIM
    assert len(alive) >= MIN_ON_VICTIM
    crowd.assert_midway()
    killed_at = time.monotonic()
    os.kill(stack.pid(stack.names("frontend")[1]), signal.SIGKILL)
    await until(lambda: all(s.broken for s in dead), within_s=5)
    while True:
        running = sum([(await stack.numbers(w))["requests"] for w in stack.names("worker")])
        if running == len(alive):
            break
        assert time.monotonic() < killed_at + 9, f"{running} run: the dead owner's were not aborted"
        await asyncio.sleep(0.1)
    assert all(s.finish is None for s in alive), "they ended by themselves, not by an abort"
    await crowd.finish()
    await ready(stack)
    await crowd.assert_unbroken(alive)
    await assert_nothing_left(stack)
    await crowd.close()


@pytest.mark.timeout(180)
async def test_a_client_that_leaves_frees_its_turn_at_every_stage(stack):
    await ready(stack)
    async with httpx.AsyncClient(base_url=stack.urls[0], timeout=60) as http:
        long = "word " * 40_000  # seconds of prefill: these leave before their first token
        early = [asyncio.create_task(Stream(f"{i} {long}", 50).run(http)) for i in range(4)]
        streaming = [Stream(f"leave {i}", 3000) for i in range(8)]
        late = [asyncio.create_task(s.run(http)) for s in streaming]
        await until(lambda: all(s.text for s in streaming), within_s=60)
        for task in [*early, *late]:
            task.cancel()
        await asyncio.gather(*early, *late, return_exceptions=True)
    await assert_nothing_left(stack, within_s=6)
    assert (await frontend_status(stack.urls[0]))["cancellations"] >= 8
