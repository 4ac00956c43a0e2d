"""What a request and a streamed token cost a frontend and its router: real processes, real sockets, on loopback.

CPU of the processes from /proc, so other load on the machine shows less than it does in rates. The engines are
simulated a thousand times as fast as life: they are never what is waited for, and their tokens come bunched, as they
do under load.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

CLIENTS = 32
TOKENS = 128
REPEATS = 3
SHORT_REQUESTS = 6000
STREAMS = 1200
WARM_UP = 500
START_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")
DEPLOYMENT = {
    "apiVersion": "fermata.dev/v1alpha1",
    "kind": "AgentDeployment",
    "metadata": {"name": "bench"},
    "spec": {
        "model": {"name": "bench"},
        "workers": [
            {"name": "sim", "simulated": {"responder": {"type": "Lorem", "tokens": TOKENS}}}
        ],
        "clock": {"speedup": 1000},
    },
}


BARE = """
import sys, uvicorn
async def app(scope, receive, send):
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"300")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * 300})
uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", ws="none", lifespan="off", log_level="error",
            proxy_headers=False)
"""
"""The same server with nothing behind it: what this machine, with its load of the moment, makes of the least."""


def measurements() -> list[dict[str, Any]]:
    with stack() as running:
        bare = bare_ms()
        short = load(running, tokens=1, stream=False)
        streamed = load(running, tokens=TOKENS, stream=True)
    return [
        _lower("CPU of a bare uvicorn answer at the same time, for scale", bare, "ms", None),
        _lower("CPU of frontend + router, a short request", short.both_ms, "ms", 0.3),
        _lower("CPU of the frontend alone, a short request", short.frontend_ms, "ms", None),
        _lower("CPU of the router alone, a short request", short.router_ms, "ms", None),
        _lower(
            f"CPU of frontend + router, a token streamed bunched ({TOKENS} an answer)",
            streamed.both_ms * 1000 / TOKENS,
            "us",
            8.0,
        ),
        _lower("latency of a short request, 32 clients, median", short.latency_ms, "ms", None),
        {
            "name": "short requests, 32 clients",
            "value": short.rate,
            "unit": "1/s",
            "target": None,
            "better": "higher",
        },
    ]


def _lower(name: str, value: float, unit: str, target: float | None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": "lower"}


@dataclass(frozen=True)
class Running:
    port: int
    frontend: int
    router: int


@dataclass(frozen=True)
class Load:
    """Of one request, medians of the repeats."""

    frontend_ms: float
    router_ms: float
    latency_ms: float
    rate: float

    @property
    def both_ms(self) -> float:
        return self.frontend_ms + self.router_ms


@contextmanager
def stack() -> Iterator[Running]:
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.json"
        file.write_text(json.dumps(DEPLOYMENT))
        routing, http = free_port(), free_port()
        ring = f"router-0=tcp://127.0.0.1:{routing}"

        def start(*words: str) -> int:
            command = [
                sys.executable,
                "-P",
                "-m",
                "fermata.core.cli",
                *words,
                "--deployment",
                str(file),
            ]
            with (Path(folder) / f"{len(processes)}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
            return processes[-1].pid

        try:
            router = start(
                "router",
                "--id",
                "router-0",
                "--number",
                "0",
                "--listen",
                f"tcp://127.0.0.1:{routing}",
            )
            for name in ("sim-0", "sim-1"):
                start("worker", "--id", name, "--group", "sim", "--routers", ring)
            frontend = start(
                "frontend", "--id", "frontend-0", "--routers", ring, "--port", str(http)
            )
            wait_ready(http)
            yield Running(http, frontend, router)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"not ready in {START_S:g} s")
        time.sleep(0.05)


def bare_ms() -> float:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", BARE, str(port)])
    try:
        wait_ready(port)
        raw = request_bytes(1, stream=False)
        uvloop.run(drive(port, raw, WARM_UP))
        before = cpu_s(process.pid)
        uvloop.run(drive(port, raw, 3 * SHORT_REQUESTS))
        return (cpu_s(process.pid) - before) * 1000 / (3 * SHORT_REQUESTS)
    finally:
        process.terminate()
        process.wait()


def load(running: Running, *, tokens: int, stream: bool) -> Load:
    requests = STREAMS if stream else SHORT_REQUESTS
    raw = request_bytes(tokens, stream=stream)
    uvloop.run(drive(running.port, raw, WARM_UP))
    seen: list[Load] = []
    for _ in range(REPEATS):
        before = cpu_s(running.frontend), cpu_s(running.router)
        started = time.perf_counter()
        latencies = uvloop.run(drive(running.port, raw, requests))
        elapsed = time.perf_counter() - started
        seen.append(
            Load(
                frontend_ms=(cpu_s(running.frontend) - before[0]) * 1000 / requests,
                router_ms=(cpu_s(running.router) - before[1]) * 1000 / requests,
                latency_ms=statistics.median(latencies) * 1000,
                rate=requests / elapsed,
            )
        )
    return sorted(seen, key=lambda one: one.both_ms)[len(seen) // 2]


def request_bytes(tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "Say something short, please."}]
    body = json.dumps(
        {"model": "bench", "messages": messages, "max_tokens": tokens, "stream": stream}
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer sk-local\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


class Client(asyncio.Protocol):
    """Just enough HTTP to know when an answer is whole."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        is_whole = len(body) >= int(length) if length else self._received.endswith(b"\r\n0\r\n\r\n")
        if is_whole and self.done is not None and not self.done.done():
            if not head.startswith(b"HTTP/1.1 200"):
                self.done.set_exception(RuntimeError(self._received.decode()[:500]))
            else:
                self.done.set_result(None)

    async def ask(self, raw: bytes) -> float:
        assert self.transport is not None
        self._received = b""
        self.done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self.transport.write(raw)
        await self.done
        return time.perf_counter() - started


async def drive(port: int, raw: bytes, requests: int) -> list[float]:
    """A closed loop of `CLIENTS` connections; latency of each request in seconds."""
    latencies: list[float] = []
    left = requests

    async def one() -> None:
        nonlocal left
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        while left > 0:
            left -= 1
            latencies.append(await client.ask(raw))
        assert client.transport is not None
        client.transport.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(one())
    return latencies


def cpu_s(pid: int) -> float:
    """All threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    for one in measurements():
        print(f"{one['name']:75s} {one['value']:10.3f} {one['unit']}  target {one['target']}")
