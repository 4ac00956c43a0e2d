"""A whole stack, started the way a user starts it: `fermata up -f FILE`, real processes, free ports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fermata.operator.local.run_folder import Endpoints, read_endpoints
from fermata.wire.keyring import load_keyring
from fermata.wire.messages import Role, Status, StatusRequest
from fermata.wire.socket import Link, Packet, Peer, new_context

UP_WITHIN_S = 60
DOWN_WITHIN_S = 30


class Stack:
    """One `fermata up` of ours. Its processes are found below its own pid, never by name alone."""

    def __init__(self, folder: Path, manifest: str, *, replicas: int) -> None:
        self.folder = folder
        self.port = free_ports(replicas)
        self.urls = [f"http://127.0.0.1:{self.port + i}" for i in range(replicas)]
        self.run_folder = folder / "run"
        path = folder / "stack.yaml"
        path.write_text(manifest)
        self._log = (folder / "up.log").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "fermata.core.cli", "up", "-f", str(path)),
                *("--port", str(self.port), "--run-dir", str(self.run_folder)),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        while "curl" not in self.output():
            assert self.process.poll() is None, f"fermata up ended:\n{self.output()}"
            assert time.monotonic() < deadline, f"not up in {UP_WITHIN_S} s:\n{self.output()}"
            time.sleep(0.05)

    def output(self) -> str:
        return (self.folder / "up.log").read_text()

    @property
    def endpoints(self) -> Endpoints:
        return read_endpoints(self.run_folder)

    def names(self, role: str) -> list[str]:
        return sorted(getattr(self.endpoints, f"{role}s"))

    def pid(self, name: str) -> int:
        for pid in descendants(self.process.pid):
            words = command_line(pid)
            if "--id" in words and words[words.index("--id") + 1] == name:
                return pid
        raise LookupError(f"no process of {name}")

    async def numbers(self, name: str) -> dict[str, float]:
        """What a router or worker says of itself. TimeoutError when it does not answer."""
        endpoints = self.endpoints
        listens = Role.ROUTER if name in endpoints.routers else Role.WORKER
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()

        def receive(packet: Packet) -> None:
            if isinstance(packet.message, Status) and not answer.done():
                answer.set_result(packet.message.numbers)

        context = new_context(load_keyring(Path(endpoints.keyring)) if endpoints.keyring else None)
        me = Peer(Role.OPERATOR, f"test-{name}", time.time_ns())
        link = Link(
            context,
            (endpoints.routers | endpoints.workers)[name],
            me=me,
            receive=receive,
            listens=listens,
        )
        try:
            link.send(StatusRequest())
            return await asyncio.wait_for(answer, 10)
        finally:
            link.close()
            context.term()

    def stop(self) -> None:
        """Ctrl-C, as a user would; what is left after that is a fault."""
        started = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(DOWN_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()
        left = [pid for pid in started if "fermata" in " ".join(command_line(pid))]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"outlived fermata up: {left}\n{self.output()}"


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return found
    for child in map(int, children):
        found.append(child)
        found.extend(descendants(child))
    return found


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except FileNotFoundError:
        return []


def free_ports(count: int) -> int:
    """First of `count` free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


@pytest.fixture(scope="module")
def stack_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def start(manifest: str, *, replicas: int = 1) -> Stack:
        stack = Stack(tmp_path_factory.mktemp("stack"), manifest, replicas=replicas)
        stacks.append(stack)
        stack.wait_ready()
        return stack

    yield start
    for stack in stacks:
        stack.stop()
