"""`fermata up` with tiny services on the real wire: what it starts, keeps up, rolls over and ends."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fermata.core.errors import ConfigError
from fermata.operator.local.console import Console
from fermata.operator.local.run_folder import Endpoints, read_endpoints
from fermata.operator.local.runner import Options, Runner
from fermata.operator.local.status import look_around, table

SERVICE = Path(__file__).parent / "stand_ins" / "service.py"

MANIFEST = """\
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata:
  name: demo
  annotations: {NOTES}
spec:
  model: {name: tiny}
  routerPolicyRef: fast
  router: {replicas: ROUTERS}
  frontend: {replicas: FRONTENDS, processes: PROCESSES}
  workers:
    - name: sim
      replicas: REPLICAS
      simulated: {kvBlocks: BLOCKS}
---
apiVersion: fermata.dev/v1alpha1
kind: RouterPolicy
metadata: {name: fast}
spec:
  scheduler: {type: SCHEDULER}
"""
DEFAULTS: dict[str, Any] = {
    "NOTES": "",
    "ROUTERS": 1,
    "FRONTENDS": 1,
    "PROCESSES": 1,
    "REPLICAS": 2,
    "BLOCKS": 64,
    "SCHEDULER": "KVAware",
}


def free_port(span: int = 2) -> int:
    for port in range(21_000, 29_000, span):
        with closing(socket.socket()) as probe:
            if all(probe.connect_ex(("127.0.0.1", port + i)) for i in range(span)):
                return port
    raise AssertionError("no free port")


class Up:
    """One runner in this process's loop, and what can be seen of it from outside."""

    def __init__(
        self, folder: Path, *, watch: bool = True, ready_timeout_s: float = 20.0, **values: Any
    ) -> None:
        self.manifest = folder / "fleet.yaml"
        self.run_folder = folder / "run"
        self.out = io.StringIO()
        self.values = DEFAULTS | values
        self.write()
        self.options = Options(
            manifest=self.manifest,
            folder=self.run_folder,
            port=free_port(),
            watch=watch,
            ready_timeout_s=ready_timeout_s,
            drain_s=5.0,
            executable=(sys.executable, str(SERVICE)),
        )
        self.task: asyncio.Task[int] | None = None

    def write(self, **values: Any) -> None:
        self.values |= values
        text = MANIFEST
        for name, value in self.values.items():
            text = text.replace(name, str(value))
        self.manifest.write_text(text)

    def run(self) -> asyncio.Task[int]:
        self.task = asyncio.create_task(Runner(self.options, Console(self.out)).run())
        return self.task

    @property
    def text(self) -> str:
        return self.out.getvalue()

    @property
    def endpoints(self) -> Endpoints:
        return read_endpoints(self.run_folder)

    def log(self, name: str) -> str:
        return (self.run_folder / "logs" / f"{name}.log").read_text()

    async def says(self, words: str, *, times: int = 1) -> None:
        await self.until(lambda: self.text.count(words) >= times, f"{words!r} x {times}")

    async def until(self, claim: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not claim():
            assert self.task is not None
            assert not self.task.done() or claim(), f"it ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} in time:\n{self.text}"
            await asyncio.sleep(0.02)

    async def stop(self) -> int:
        assert self.task is not None
        os.kill(os.getpid(), signal.SIGINT)
        return await asyncio.wait_for(self.task, 12)


def pids() -> dict[str, int]:
    """Stand-in processes of this test process, by their id."""
    found: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_text().split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and str(SERVICE) in words:
            found[words[words.index("--id") + 1]] = int(folder.name)
    return found


MakeUp = Callable[..., Up]


@pytest.fixture
async def make_up(tmp_path: Path) -> AsyncIterator[MakeUp]:
    """A test that failed half way ends its runner by cancellation; that, too, must leave nothing behind."""
    made: list[Up] = []

    def make(**values: Any) -> Up:
        made.append(Up(tmp_path, **values))
        return made[-1]

    yield make
    for up in made:
        if up.task is not None and not up.task.done():
            up.task.cancel()
            await asyncio.wait({up.task})
    assert pids() == {}, "a process outlived its runner"


async def test_it_starts_everything_says_ready_and_stops_on_ctrl_c(make_up: MakeUp) -> None:
    up = make_up(watch=False)
    up.run()
    await up.says("Ready in")

    assert set(pids()) == {"router-0", "sim-0", "sim-1", "frontend-0"}
    for name in pids():
        assert f"{name:<12} ready" in up.text
    assert f"curl -N http://127.0.0.1:{up.options.port}/v1/chat/completions" in up.text
    assert up.endpoints.url == f"http://127.0.0.1:{up.options.port}"
    assert "level=INFO id=sim-0" in up.log("sim-0")

    started = time.monotonic()
    assert await up.stop() == 0
    assert time.monotonic() - started < 10
    assert not (up.run_folder / "endpoints.json").exists()


async def test_what_dies_starts_again_under_its_name_and_port(make_up: MakeUp) -> None:
    up = make_up(watch=False)
    up.run()
    await up.says("Ready in")
    before, endpoints = pids(), up.endpoints

    for name in ("sim-1", "router-0", "frontend-0"):
        os.kill(before[name], signal.SIGKILL)
        await up.says(f"{name:<12} was ended by SIGKILL")
        await up.says(f"{name:<12} ready", times=2)

    after = pids()
    assert after.keys() == before.keys()
    assert after["sim-0"] == before["sim-0"], "the others are left alone"
    assert all(after[name] != before[name] for name in ("sim-1", "router-0", "frontend-0"))
    assert up.endpoints == endpoints
    # The router that came back knew no policy and was told.
    assert up.log("router-0").count("policy revision=1 epoch=1") == 2
    assert await up.stop() == 0


async def test_an_edited_policy_is_pushed_and_nothing_restarts(make_up: MakeUp) -> None:
    up = make_up(ROUTERS=2)
    up.run()
    await up.says("Ready in")
    before = pids()

    up.write(SCHEDULER="RoundRobin")

    await up.says("router-0     applied policy revision 2 (RoundRobin)")
    await up.says("router-1     applied policy revision 2 (RoundRobin)")
    assert '"type":"RoundRobin"' in up.log("router-1")
    assert pids() == before
    assert await up.stop() == 0


async def test_replicas_are_added_and_drained(make_up: MakeUp) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")
    before = pids()

    up.write(REPLICAS=3, FRONTENDS=2)
    await up.says("sim-2        ready")
    await up.says("frontend-1   ready")
    assert up.endpoints.frontends["frontend-1"] == f"http://127.0.0.1:{up.options.port + 1}"
    up.write(REPLICAS=1, FRONTENDS=1)
    for name in ("sim-1", "sim-2", "frontend-1"):
        await up.says(f"{name:<12} is gone")

    assert pids() == {n: pid for n, pid in before.items() if n != "sim-1"}
    assert "drain deadline_s=5.0" in up.log("sim-2"), "asked, not shot"
    assert "ended by" not in up.text, "leaving is no death"
    assert await up.stop() == 0


async def test_a_changed_group_is_started_anew_before_the_old_one_drains(make_up: MakeUp) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")

    up.write(BLOCKS=128)
    await up.says("sim-1        is gone")
    await up.says("sim-0        is gone")

    lines = up.text.splitlines()
    ready = max(
        i
        for i, line in enumerate(lines)
        if line.startswith(("  sim-2        ready", "  sim-3        ready"))
    )
    drained = min(i for i, line in enumerate(lines) if line.endswith("drains"))
    assert ready < drained
    assert pids().keys() == {"router-0", "frontend-0", "sim-2", "sim-3"}
    assert await up.stop() == 0


async def test_a_new_revision_that_can_not_start_leaves_the_old_one_serving(
    make_up: MakeUp,
) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")
    before = pids()

    up.write(BLOCKS=128, NOTES="stand-in/sim: exit-2")
    await up.says("sim-2        exited with 2")
    await up.says("sim-2 | fermata: the flag is wrong (put it right)")
    assert {n: pids().get(n) for n in before} == before
    up.write(BLOCKS=64, NOTES="")
    await up.says("sim-2        is gone")
    await up.says("sim-3        is gone")

    assert pids() == before
    assert await up.stop() == 0


async def test_a_bad_edit_is_told_and_changes_nothing(make_up: MakeUp) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")
    before = pids()

    up.write(SCHEDULER="Kvaware2")
    await up.says("spec.scheduler.type: the text 'Kvaware2' is no choice")
    await up.says("what runs stays as it is")
    up.manifest.unlink()
    await asyncio.sleep(1.2)
    assert pids() == before
    up.write(SCHEDULER="LeastLoaded")
    await up.says("applied policy revision 2 (LeastLoaded)")
    assert await up.stop() == 0


async def test_a_hangup_reads_the_file_again_without_watch(make_up: MakeUp) -> None:
    up = make_up(watch=False)
    up.run()
    await up.says("Ready in")

    up.write(SCHEDULER="LeastLoaded")
    await asyncio.sleep(1.2)
    assert "was edited" not in up.text
    os.kill(os.getpid(), signal.SIGHUP)
    await up.says("applied policy revision 2 (LeastLoaded)")
    os.kill(os.getpid(), signal.SIGHUP)
    await up.says("nothing changed")
    assert await up.stop() == 0


async def test_routers_join_and_leave_the_ring_under_a_new_epoch(make_up: MakeUp) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")

    up.write(ROUTERS=2)
    await up.says("router-1     applied policy revision 2")
    assert "epoch=2" in up.log("router-0")
    up.write(ROUTERS=1)
    await up.says("router-1     is gone")
    assert "epoch=3" in up.log("router-0")
    await up.until(lambda: up.endpoints.routers.keys() == {"router-0"}, "one router")
    assert await up.stop() == 0


async def test_a_change_of_what_all_share_starts_everything_anew_on_the_same_ports(
    make_up: MakeUp,
) -> None:
    up = make_up()
    up.run()
    await up.says("Ready in")
    before, endpoints = pids(), up.endpoints

    up.write()
    up.manifest.write_text(
        up.manifest.read_text().replace("name: tiny}", "name: tiny, aliases: [t]}")
    )
    await up.says("frontend-0   ready", times=2)
    await up.says("sim-1        ready", times=2)

    assert pids().keys() == before.keys()
    assert not set(pids().values()) & set(before.values())
    assert up.endpoints.routers == endpoints.routers
    assert await up.stop() == 0


async def test_processes_of_a_frontend_share_its_port_and_are_each_waited_for(
    make_up: MakeUp,
) -> None:
    up = make_up(PROCESSES=2)
    up.run()
    await up.says("Ready in")

    assert {"frontend-0", "frontend-0.1"} <= pids().keys()
    assert "frontend-0.1 ready" in up.text
    assert set(up.endpoints.frontends.values()) == {f"http://127.0.0.1:{up.options.port}"}
    assert await up.stop() == 0


async def test_status_shows_a_table_of_every_process(make_up: MakeUp) -> None:
    up = make_up(REPLICAS=1)
    up.run()
    await up.says("Ready in")

    text = table(await look_around(up.endpoints))

    lines = [line.split() for line in text.splitlines()]
    assert ["router-0", "serving", "1", "-", "-", "-", "-", "-", "-", "1"] in lines
    assert ["sim-0", "serving", "0", "-", "-", "-", "-", "-"] in lines
    assert ["frontend-0", "serving", "0", "-", "-", "-", "-", "0.9"] in lines
    assert await up.stop() == 0


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ("stand-in/sim-1: exit-2", "sim-1 exited with 2; it said:"),
        ("stand-in/frontend: crash", "frontend-0 exited with 1; it said:"),
        ("stand-in/router: refuse-policy", "router-0 refused the policy: too odd"),
    ],
)
async def test_a_start_that_can_not_work_ends_with_the_reason(
    notes: str, words: str, make_up: MakeUp
) -> None:
    up = make_up(NOTES=notes)

    assert await asyncio.wait_for(up.run(), 20) == 1

    assert words in up.text
    if "said" in words:
        name = words.split()[0]
        assert f"    {name} | " in up.text


async def test_a_start_that_takes_too_long_ends_with_who_is_late(make_up: MakeUp) -> None:
    up = make_up(NOTES="stand-in/sim-0: never-ready", ready_timeout_s=2.0)

    assert await asyncio.wait_for(up.run(), 20) == 1

    assert "not ready within 2 s: sim-0; they said:" in up.text


async def test_a_process_that_dies_once_while_starting_gets_another_try(make_up: MakeUp) -> None:
    up = make_up(NOTES="stand-in/sim-0: crash-once")
    up.run()
    await up.says("sim-0        exited with 1")
    await up.says("sim-0 | Traceback: it broke")
    await up.says("Ready in")
    assert await up.stop() == 0


async def test_the_second_ctrl_c_kills_what_does_not_listen(make_up: MakeUp) -> None:
    up = make_up(NOTES="stand-in/frontend: deaf")
    up.run()
    await up.says("Ready in")
    os.kill(os.getpid(), signal.SIGINT)
    await up.says("stopping")

    started = time.monotonic()
    assert await up.stop() == 130
    assert time.monotonic() - started < 3
    assert up.text.endswith("killed\n")


async def test_one_ctrl_c_ends_what_does_not_listen_within_ten_seconds(make_up: MakeUp) -> None:
    up = make_up(NOTES="stand-in/frontend: deaf, stand-in/sim: grandchild")
    up.run()
    await up.says("Ready in")
    started = time.monotonic()

    assert await up.stop() == 0
    assert time.monotonic() - started < 10
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _ends_with(p, "grandchild")]
    assert left == [], "what a service started itself went with it"


def _ends_with(path: Path, word: str) -> bool:
    try:
        return path.read_text().rstrip("\0").endswith(word)
    except OSError:
        return False


async def test_a_busy_port_or_folder_stops_before_anything_starts(make_up: MakeUp) -> None:
    up = make_up(FRONTENDS=2)
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", up.options.port + 1))
        other.listen()
        with pytest.raises(
            ConfigError, match=rf"port {up.options.port + 1} of frontend-1 is in use \(stop what"
        ):
            await Runner(up.options, Console(up.out)).run()
    assert not up.run_folder.exists()

    up.run()
    await up.says("Ready in")
    again = Options(manifest=up.manifest, folder=up.run_folder, port=free_port())
    with pytest.raises(ConfigError, match="another fermata up uses this folder"):
        await Runner(again, Console(up.out)).run()
    up.write(FRONTENDS=1)
    await up.says("frontend-1   is gone")
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", up.options.port + 1))
        other.listen()
        up.write(FRONTENDS=2)
        await up.says(
            "of frontend-1 is in use (stop what listens there, or pass another --port); what runs"
        )
    assert await up.stop() == 0


async def test_children_die_with_a_runner_that_is_killed(make_up: MakeUp) -> None:
    up = make_up()
    code = (
        "import asyncio, sys; from pathlib import Path;"
        "from fermata.operator.local.runner import Options, Runner;"
        "from fermata.operator.local.console import Console;"
        f"o = Options(manifest=Path({str(up.manifest)!r}), folder=Path({str(up.run_folder)!r}), port={up.options.port},"
        f" executable=(sys.executable, {str(SERVICE)!r}));"
        "asyncio.run(Runner(o, Console()).run())"
    )
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert runner.stdout is not None
    async with asyncio.timeout(20):
        while b"Ready in" not in await runner.stdout.readline():
            pass
    folder = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
    children = [int(pid) for pid in folder.read_text().split()]
    assert len(children) == 4

    runner.kill()
    await runner.wait()

    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < deadline, "a child outlived its runner"
        await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
