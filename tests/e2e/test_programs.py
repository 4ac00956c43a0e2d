"""Programs in real processes: held under pressure and let go again, seen by people, and switched under load."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

AGENTS, TURNS = 10, 4
MADE = 25
"""Tokens an answer: 24 of words, and the one that ends it."""
WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor " * 12


def manifest(policy: str, *, kv_blocks: int, extra: str = "", speedup: int = 10) -> str:
    return f"""
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {{name: programs}}
spec:
  model: {{name: tiny}}
  frontend: {{replicas: 2}}
  routerPolicyRef: p
  clock: {{speedup: {speedup}}}
  workers:
    - name: sim
      replicas: 2
      simulated: {{kvBlocks: {kv_blocks}, responder: {{type: Lorem, tokens: 24}}}}
---
apiVersion: fermata.dev/v1alpha1
kind: RouterPolicy
metadata: {{name: p}}
spec:
  scheduler: {{type: {policy}{extra}}}
"""


@dataclass
class Agent:
    """One program: turns one after another, each with the whole history, from whichever frontend is next."""

    name: str
    urls: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def turn(self, http: httpx.AsyncClient, **fields: Any) -> None:
        number = len(self.answers)
        self.messages.append({"role": "user", "content": f"{self.name}, step {number}: {WORDS}"})
        body = {
            "model": "tiny", "messages": self.messages, "stream": True, "program_id": self.name,
            "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        url = self.urls[number % len(self.urls)]
        text, usage, reasons = "", {}, []
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                self.problems.append(f"{reply.status_code}: {await reply.aread()!r}")
                return
            self.requests.append(reply.headers["x-request-id"])
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.problems.append(str(chunk["error"]))
                    return
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    reasons += [r for r in [choice["finish_reason"]] if r]
        if len(reasons) != 1 or usage.get("completion_tokens") != MADE:
            self.problems.append(f"turn {number}: {reasons} {usage}")
        self.answers.append(text)
        self.messages.append({"role": "assistant", "content": text})

    async def live(self, http: httpx.AsyncClient, turns: int, gap_s: float) -> None:
        for _ in range(turns):
            await self.turn(http)
            await asyncio.sleep(gap_s)

    async def end(self, http: httpx.AsyncClient) -> None:
        headers = {"x-dynamo-session-final": "true"}
        body = {
            "model": "tiny",
            "messages": self.messages,
            "max_tokens": 1,
            "program_id": self.name,
        }
        reply = await http.post(f"{self.urls[0]}/v1/chat/completions", json=body, headers=headers)
        if reply.status_code != 200 or reply.json()["usage"]["completion_tokens"]:
            self.problems.append(f"farewell: {reply.status_code} {reply.text}")


def fermata(stack: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fermata.core.cli", *words, "--run-dir", str(stack.run_folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


async def fermata_soon(stack: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(fermata, stack, *words)


async def eventually(check: Callable[[], Any], *, within_s: float = 30.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := await check()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {found}"
        await asyncio.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def crowded(stack_factory: Callable[..., Any]) -> Any:
    """Ten agents of up to two thousand tokens on twice 4,608: about twice what fits."""
    # Not faster than a person could look.
    return stack_factory(manifest("ThunderAgent", kv_blocks=72, speedup=2), replicas=2)


async def test_under_pressure_turns_are_held_and_resumed_and_people_see_it(crowded: Any) -> None:
    stack = crowded
    agents = [Agent(f"agent-{i}", stack.urls) for i in range(AGENTS)]
    seen: dict[str, str] = {}

    async def look() -> None:
        while True:
            shown = await fermata_soon(stack, "programs")
            assert shown.returncode == 0, shown.stderr
            for reason in ("pressure", "admission"):
                if f"  {reason}" in shown.stdout:
                    seen[reason] = shown.stdout
            listed = await http.get(f"{stack.urls[0]}/programs")
            for program in listed.json()["programs"]:
                seen.setdefault(f"state {program['state']}", str(program))

    async with httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(look())
        living = [tasks.create_task(a.live(http, TURNS, 0.02)) for a in agents]
        ends = [
            tasks.create_task(_then_end(one, a, http))
            for one, a in zip(living, agents, strict=True)
        ]
        await asyncio.wait(ends)
        looking.cancel()
    assert [a.problems for a in agents] == [[]] * AGENTS
    assert all(len(a.answers) == TURNS for a in agents)
    assert {"pressure", "admission"} & set(seen), seen.keys()
    table = seen.get("pressure") or seen["admission"]
    assert table.splitlines()[0].split(" on ")[1].startswith("1 router: ")
    assert "state active" in seen

    async def all_ended() -> bool:
        numbers = await stack.numbers("router-0")
        return numbers["programs"] == 0 and numbers["leases"] == 0

    await eventually(all_ended)
    numbers = await stack.numbers("router-0")
    assert numbers["programs_created"] == AGENTS
    assert numbers["programs_ended_final"] == AGENTS
    assert numbers["holds"] > 0
    assert numbers.get("rejects", 0) == numbers.get("overloaded", 0) == 0
    assert numbers["program_pauses"] > 0
    assert numbers["program_resumes"] > 0

    request = agents[-1].requests[-1]
    why = await fermata_soon(stack, "explain", f"chatcmpl-{request}")
    assert why.returncode == 0, why.stderr
    assert f"request {request} of agent-{AGENTS - 1}" in why.stdout
    assert "granted to sim-" in why.stdout
    assert "ThunderAgent" in why.stdout
    unknown = await fermata_soon(stack, "explain", "nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "no router remembers request nobody\n")
    async with httpx.AsyncClient() as http:
        pages = [(await http.get(f"{url}/metrics")).text for url in stack.urls]
    assert any("fermata_frontend_hold_seconds_count{" in page for page in pages)


async def _then_end(living: asyncio.Task[None], agent: Agent, http: httpx.AsyncClient) -> None:
    await living
    await agent.end(http)


def edit(stack: Any, text: str) -> None:
    """As a person would who runs without --watch."""
    (stack.folder / "stack.yaml").write_text(text)
    stack.process.send_signal(signal.SIGHUP)


async def test_switching_the_policy_under_load_loses_refuses_and_doubles_no_turn(
    stack_factory: Callable[..., Any],
) -> None:
    stack = stack_factory(manifest("KVAware", kv_blocks=160), replicas=2)
    agents = [Agent(f"agent-{i}", stack.urls) for i in range(AGENTS)]
    switched: list[str] = []
    before = await stack.numbers("router-0")

    async def in_force(policy: str, revision: float) -> bool:
        numbers = await stack.numbers("router-0")
        return bool(numbers["policy_revision"] > revision)

    async def switch() -> None:
        revision = before["policy_revision"]
        for policy in ("ThunderAgent", "RoundRobin", "KVAware", "ThunderAgent", "RoundRobin"):
            edit(stack, manifest(policy, kv_blocks=160))
            await eventually(lambda p=policy, r=revision: in_force(p, r))
            numbers = await stack.numbers("router-0")
            revision = numbers["policy_revision"]
            switched.append(policy)
            # Tables are kept under every policy.
            assert numbers["programs"] == numbers["programs_created"] - sum(
                count for name, count in numbers.items() if name.startswith("programs_ended_")
            )
            await asyncio.sleep(0.3)

    async with httpx.AsyncClient(timeout=120) as http:
        switching = asyncio.create_task(switch())
        rounds = 0
        while not switching.done() or rounds < 2:
            await asyncio.gather(*(a.live(http, 1, 0.0) for a in agents))
            rounds += 1
            if rounds % TURNS == 0:
                for agent in agents:
                    agent.messages.clear()
        await switching
    assert switched[-1] == "RoundRobin"
    assert [a.problems for a in agents] == [[]] * AGENTS
    assert [len(a.answers) for a in agents] == [rounds] * AGENTS

    async def at_rest() -> bool:
        numbers = await stack.numbers("router-0")
        return numbers["leases"] == 0 and numbers["turns_waiting"] == 0

    await eventually(at_rest)
    after = await stack.numbers("router-0")
    assert after["programs"] == AGENTS
    assert after["programs_created"] == AGENTS, "none was forgotten and made again"
    assert after["leases_begun"] == rounds * AGENTS, "none was run twice"
    worker_tokens = [(await stack.numbers(name))["output_tokens"] for name in stack.names("worker")]
    assert sum(worker_tokens) == MADE * rounds * AGENTS
    assert after.get("overloaded", 0) == after.get("rejects", 0) == 0

    edit(stack, manifest("ThunderAgent", kv_blocks=160, extra=", thunderAgent: {pauseTarget: 2}"))
    await asyncio.sleep(1.0)
    kept = await stack.numbers("router-0")
    assert kept["policy_revision"] == after["policy_revision"], "a bad policy changes nothing"
    assert "pauseTarget" in stack.output()
