"""`fermata up` with the real services, as a user runs it: serve, survive, follow edits, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from fermata.operator.local.ports import is_free
from fermata.operator.local.run_folder import read_endpoints

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = """\
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {name: up}
spec:
  model: {name: tiny}
  routerPolicyRef: live
  workers:
    - name: sim
      replicas: 2
      simulated: {responder: {type: Lorem}}
---
apiVersion: fermata.dev/v1alpha1
kind: RouterPolicy
metadata: {name: live}
spec:
  scheduler: {type: KVAware}
"""
READY_S = 60.0
STEP_S = 40.0


def free_port() -> int:
    return next(port for port in range(22_000, 30_000, 7) if is_free(port))


class Up:
    """One `fermata up` in a session of its own."""

    def __init__(self, folder: Path, *flags: str, manifest: str = MANIFEST) -> None:
        self.manifest = folder / "fleet.yaml"
        self.manifest.write_text(manifest)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_folder = folder / "run"
        self._out = folder / "up.log"
        command = (sys.executable, "-P", "-m", "fermata.core.cli", "up", "-f", str(self.manifest))
        with self._out.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--run-dir", str(self.run_folder), *flags],
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )

    @property
    def text(self) -> str:
        return self._out.read_text()

    def until(self, claim: Callable[[], bool], what: str, timeout_s: float = STEP_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not claim():
            assert self.process.poll() is None or claim(), f"it ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s:\n{self.text}"
            time.sleep(0.05)

    def says(self, words: str, *, times: int = 1, timeout_s: float = STEP_S) -> None:
        self.until(lambda: self.text.count(words) >= times, f"{words!r} x {times}", timeout_s)

    def pids(self) -> dict[str, int]:
        """Of the services, by id: the children of the runner."""
        found: dict[str, int] = {}
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in path.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--id" in words:
                found[words[words.index("--id") + 1]] = int(pid)
        return found

    def edit(self, old: str, new: str) -> None:
        text = self.manifest.read_text()
        assert text.count(old) == 1
        self.manifest.write_text(text.replace(old, new))

    def chat(self, prompt: str, **changes: object) -> dict[str, object]:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 16,
        }
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body | changes, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self) -> str:
        command = (sys.executable, "-P", "-m", "fermata.core.cli", "status")
        done = subprocess.run(
            [*command, "--run-dir", str(self.run_folder)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(15)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def run(*flags: str, manifest: str = MANIFEST) -> Up:
        started.append(Up(tmp_path, *flags, manifest=manifest))
        started[-1].says("Ready in", timeout_s=READY_S)
        return started[-1]

    yield run
    for up in started:
        if up.process.poll() is None:
            os.killpg(up.process.pid, signal.SIGKILL)
            up.process.wait()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_quickstart_serves_what_its_banner_says_and_ctrl_c_leaves_nothing(
    start: Callable[..., Up],
) -> None:
    up = start(manifest=(ROOT / "examples" / "01-quickstart.yaml").read_text())
    pids = up.pids()
    assert pids.keys() == {"router-0", "sim-0", "sim-1", "frontend-0"}

    # The request of the banner, as a shell reads it when a person pastes it.
    pasted = re.search(r"^  curl .*?(?=\n\n)", up.text, re.MULTILINE | re.DOTALL)
    assert pasted is not None
    echo = "curl() { printf '%s\\n' \"$@\"; }\n"
    words = subprocess.run(
        ["sh", "-c", echo + pasted[0]], capture_output=True, text=True, timeout=10, check=True
    ).stdout.splitlines()
    flag, url, _, header, _, body = words
    assert (flag, header) == ("-N", "content-type: application/json")
    said = httpx.post(
        url, content=body, headers={"content-type": "application/json"}, timeout=60
    ).text
    events = [
        line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")
    ]
    assert events[-1:] == ["[DONE]"], said
    pieces = [json.loads(event)["choices"] for event in events[:-1]]
    text = "".join(c[0]["delta"].get("content") or "" for c in pieces if c)
    assert len(text.split()) > 5

    for name, url in read_endpoints(up.run_folder).metrics.items():
        assert "# TYPE" in httpx.get(url).text, f"{name} shows no metrics"
    status = up.status()
    assert "quickstart from" in status
    for name in pids:
        assert re.search(rf"^{name} +(serving|ready) ", status, re.MULTILINE), status

    started = time.monotonic()
    assert up.stop() == 0
    assert time.monotonic() - started < 10
    assert up.text.endswith("stopped\n")
    assert not [name for name, pid in pids.items() if runs(pid)]
    assert is_free(up.port)


def test_a_killed_process_of_each_kind_comes_back_and_serves(start: Callable[..., Up]) -> None:
    up = start()
    before = up.pids()
    first = up.chat("what holds a note?")

    for name in ("sim-0", "sim-1", "router-0", "frontend-0"):
        os.kill(before[name], signal.SIGKILL)
        up.says(f"{name:<12} was ended by SIGKILL")
        up.says(f"{name:<12} ready", times=2)
        again = up.chat("what holds a note?")
        assert again["choices"] == first["choices"], f"another answer after {name} came back"

    after = up.pids()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert up.stop() == 0


def test_edits_apply_live_and_a_bad_one_changes_nothing(start: Callable[..., Up]) -> None:
    up = start("--watch")
    before = up.pids()
    up.chat("one")

    up.edit("type: KVAware", "type: RoundRobin")
    up.says("router-0     applied policy revision 2 (RoundRobin)")
    up.edit("type: RoundRobin", "type: RoundRobbin")
    up.says(
        "fleet.yaml:16: RouterPolicy live: spec.scheduler.type: the text 'RoundRobbin' is no choice"
    )
    assert up.pids() == before
    up.edit("type: RoundRobbin", "type: LeastLoaded")
    up.says("applied policy revision 3 (LeastLoaded)")
    assert up.pids() == before, "a policy restarts nothing"

    up.edit("replicas: 2", "replicas: 3")
    up.says("sim-2        ready")
    up.edit("replicas: 3", "replicas: 1")
    up.says("sim-1        is gone")
    up.says("sim-2        is gone")
    assert up.pids() == {name: pid for name, pid in before.items() if name != "sim-1"}
    up.chat("two")

    up.edit("type: Lorem", "type: Echo")
    up.says("sim-0        is gone")
    new = up.pids()
    assert new["router-0"] == before["router-0"]
    assert new["frontend-0"] == before["frontend-0"]
    assert "sim-0" not in new
    echoed = up.chat("three")
    assert "three" in json.dumps(echoed["choices"])
    assert "ended by" not in up.text
    assert up.stop() == 0


@pytest.mark.parametrize(
    ("drain_s", "migrations"), [("30", 0), ("0.5", 1)], ids=["finished", "handed over"]
)
def test_a_rollout_under_load_breaks_no_stream(
    drain_s: str, migrations: int, start: Callable[..., Up]
) -> None:
    """A long turn is finished by the worker that drains, or carried on by its successor."""
    up = start("--watch", "--drain-timeout", drain_s)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "play on"}],
        "max_tokens": 1000,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        up.edit("replicas: 2", "replicas: 2\n      blockSize: 32")
        up.says("sim-0        drains")
        drained_at = len([line for _, line in zip(range(4), lines, strict=False)])
        assert drained_at == 4, "the drain must meet a running stream"
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])["usage"]
    assert usage["completion_tokens"] == 1000
    up.says("sim-0        is gone")
    up.says("sim-1        is gone")
    assert {"sim-2", "sim-3"} <= up.pids().keys()
    status = httpx.get(f"{up.url}/fermata/status").json()
    assert status["migrations"] == migrations
    assert status["turns"] == status["leases"] == 0
    assert up.stop() == 0


def test_routers_join_and_leave_the_ring_while_a_stream_runs(start: Callable[..., Up]) -> None:
    ring = "  router: {replicas: 1}\n  routerPolicyRef: live"
    up = start("--watch", manifest=MANIFEST.replace("  routerPolicyRef: live", ring))
    before = up.pids()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "play on"}],
        "max_tokens": 1500,
        "stream": True,
    }
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        up.edit("router: {replicas: 1}", "router: {replicas: 3}")
        up.says("applied policy revision 2", times=3)
        # Keys of all sorts, so that each router answers for some.
        for number in range(12):
            up.chat(f"turn {number}", max_tokens=2)
        up.edit("router: {replicas: 3}", "router: {replicas: 1}")
        up.says("router-1     drains")
        up.chat("and now?", max_tokens=2)
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    up.says("router-1     is gone")
    up.says("router-2     is gone")
    assert up.pids() == before
    up.chat("once more", max_tokens=2)
    assert up.stop() == 0


def test_a_group_that_can_not_start_ends_up_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{when: '(', say: x}]\n")
    manifest = MANIFEST.replace("{type: Lorem}", "{type: Script, path: rules.yaml}")
    up = Up(tmp_path, manifest=manifest)
    try:
        assert up.process.wait(READY_S) == 1
        assert (
            "sim-0 exited with 2; it said:" in up.text or "sim-1 exited with 2; it said:" in up.text
        )
        assert "rules.yaml" in up.text
    finally:
        if up.process.poll() is None:
            os.killpg(up.process.pid, signal.SIGKILL)


def test_a_busy_port_is_told_before_anything_starts(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    other = tmp_path / "other"
    other.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "fermata.core.cli", "up", "-f", str(up.manifest)),
            *("--port", str(up.port), "--run-dir", str(other / "run")),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"fermata up: port {up.port} of frontend-0 is in use"
        " (stop what listens there, or pass another --port)\n"
    )
    assert not (other / "run").exists()
    assert up.stop() == 0


def test_the_chat_example_finds_its_history_cached(start: Callable[..., Up]) -> None:
    up = start(manifest=(ROOT / "examples" / "01-quickstart.yaml").read_text())
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "chat.py"), "--url", f"{up.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = [int(share) for share in re.findall(r"(\d+)% cached", done.stdout)]
    assert len(shares) == 6, done.stdout
    assert min(shares[1:3] + shares[4:6]) >= 80
    assert up.stop() == 0
