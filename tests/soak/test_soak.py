"""Many programs at twice the KV there is, with everything going wrong that does: aborts, repeats, workers that die.

Whole deployment, real processes, sped up. What must hold (a peer at this scale finished 4 of 256 groups): programs
that the test does not abort complete, nothing hangs, no turn is answered twice or short, the tables end as they
began, and memory does not grow with what has passed.

Size by environment: FERMATA_SOAK_PROGRAMS (256) and FERMATA_SOAK_WORKERS (4); `make soak` runs 2,048 and 16.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

PROGRAMS = int(os.environ.get("FERMATA_SOAK_PROGRAMS", "256"))
WORKERS = int(os.environ.get("FERMATA_SOAK_WORKERS", "4"))
AT_ONCE = min(PROGRAMS, 64 * WORKERS)
SPEEDUP = 10
TURNS = (4, 12)
ABORTED_PROGRAMS = 0.05
ABORTED_TURNS = 0.05
REPEATED_TURNS = 0.03
FINAL = 0.10
CHURN_S = 3.0
HANG_S = 240.0
KV_BLOCKS = 420
"""A worker: 64 programs of about 900 tokens are twice what 420 pages of 64 tokens hold."""

MANIFEST = f"""
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {{name: soak}}
spec:
  model: {{name: tiny}}
  clock: {{speedup: {SPEEDUP}}}
  frontend: {{replicas: 2}}
  routerPolicyRef: thunder
  workers:
    - name: sim
      replicas: {WORKERS}
      simulated: {{kvBlocks: {KV_BLOCKS}, responder: {{type: Lorem}}}}
---
apiVersion: fermata.dev/v1alpha1
kind: RouterPolicy
metadata: {{name: thunder}}
spec:
  scheduler: {{type: ThunderAgent}}
"""


class Answer(msgspec.Struct):
    choices: list[dict[str, object]]
    usage: dict[str, object]


class Failed(Exception):
    """A turn did not get its whole answer."""


@dataclass
class Tally:
    completed: int = 0
    aborted: int = 0
    turns: int = 0
    aborted_turns: int = 0
    repeats: int = 0
    finals: int = 0
    kills: int = 0
    failures: Counter[str] = field(default_factory=Counter)


async def send(url: str, body: dict[str, object], headers: dict[str, str]):
    """A connection of its own for each turn, as many agents do."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    raw = msgspec.json.encode(body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n{lines}\r\n".encode()
        + raw
    )
    await writer.drain()
    return reader, writer


async def ask(url: str, body: dict[str, object], headers: dict[str, str]) -> str:
    reader, writer = await send(url, body, headers)
    try:
        raw = await reader.read()
    finally:
        writer.close()
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head[9:12] or 0)
    if b"transfer-encoding: chunked" in head.lower():
        rest = unchunked(rest)
    if status != 200:
        raise Failed(f"status {status}: {rest[:200]!r}")
    answer = msgspec.json.decode(rest.strip(), type=Answer)
    if answer.usage["completion_tokens"] != body["max_tokens"]:
        raise Failed(f"{answer.usage['completion_tokens']} of {body['max_tokens']} tokens")
    message = answer.choices[0]["message"]
    assert isinstance(message, dict)
    return str(message["content"])


def unchunked(raw: bytes) -> bytes:
    parts: list[bytes] = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return b"".join(parts)


async def abandon(
    url: str, body: dict[str, object], headers: dict[str, str], after_s: float
) -> None:
    """Asks and goes away."""
    _, writer = await send(url, body | {"stream": True}, headers)
    await asyncio.sleep(after_s)
    writer.close()


async def run_program(stack, number: int, dice: random.Random, tally: Tally) -> None:
    session = f"soak-{number}"
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You mend tests. " * 12},
        {"role": "user", "content": f"program {number}: " + "mend the next test " * 20},
    ]
    turns = dice.randint(*TURNS)
    doomed = dice.randrange(turns) if dice.random() < ABORTED_PROGRAMS else -1
    for turn in range(turns):
        url = dice.choice(stack.urls)
        body: dict[str, object] = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": dice.randint(8, 40),
        }
        headers = {"x-dynamo-session-id": session}
        if turn == turns - 1 and dice.random() < FINAL:
            headers["x-dynamo-session-final"] = "true"
            tally.finals += 1
        if turn == doomed:
            await abandon(url, body, headers, dice.uniform(0, 0.1))
            tally.aborted += 1
            return
        if dice.random() < ABORTED_TURNS:  # the client's own time-out: it asks again
            await abandon(url, body, headers, dice.uniform(0, 0.05))
            tally.aborted_turns += 1
        if dice.random() < REPEATED_TURNS:  # the same turn twice at once, both sockets open
            tally.repeats += 1
            text, again = await asyncio.gather(
                ask(url, body, headers), ask(dice.choice(stack.urls), body, headers)
            )
            if text != again:
                raise Failed("the same turn was answered in two ways")
        else:
            text = await ask(url, body, headers)
        tally.turns += 1
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "tool said: " + "ok " * dice.randint(5, 40)})
        await asyncio.sleep(dice.expovariate(1.0) * 2.0 / SPEEDUP)
    tally.completed += 1


async def guarded(gate: asyncio.Semaphore, stack, number: int, seed: int, tally: Tally) -> None:
    async with gate:
        try:
            await asyncio.wait_for(run_program(stack, number, random.Random(seed), tally), HANG_S)
        except TimeoutError:
            tally.failures["hang"] += 1
        except (Failed, OSError, msgspec.MsgspecError) as error:
            tally.failures[str(error)[:120]] += 1


async def churn(stack, dice: random.Random, tally: Tally) -> None:
    """A worker dies every few seconds; `fermata up` starts it again."""
    while True:
        await asyncio.sleep(CHURN_S)
        victim = dice.choice(stack.names("worker"))
        try:
            os.kill(stack.pid(victim), signal.SIGKILL)
            tally.kills += 1
        except (LookupError, ProcessLookupError):
            continue


def resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise LookupError(pid)


def lasting(stack) -> list[str]:
    """Processes that the churn leaves alone."""
    return [*stack.names("router"), *stack.names("frontend")]


@pytest.mark.timeout(1800)
async def test_programs_complete_whatever_dies_and_nothing_is_left(stack_factory):
    stack = stack_factory(MANIFEST, replicas=2)
    tally = Tally()
    gate = asyncio.Semaphore(AT_ONCE)
    dice = random.Random(20261129)
    began = time.monotonic()
    killer = asyncio.create_task(churn(stack, random.Random(7), tally))
    programs = [
        asyncio.create_task(guarded(gate, stack, i, dice.getrandbits(32), tally))
        for i in range(PROGRAMS)
    ]
    while sum(task.done() for task in programs) < PROGRAMS // 2:
        await asyncio.sleep(0.2)
    half = {name: resident_kb(stack.pid(name)) for name in lasting(stack)}
    await asyncio.gather(*programs)
    killer.cancel()
    took_s = time.monotonic() - began
    end = {name: resident_kb(stack.pid(name)) for name in lasting(stack)}
    (router,) = stack.names("router")
    numbers = await settled(stack, router)
    kept = PROGRAMS - tally.aborted
    print(
        f"{PROGRAMS} programs on {WORKERS} workers in {took_s:.0f} s: {tally.completed} of {kept} completed, "
        f"{tally.turns} turns ({tally.turns / took_s * 60:.0f} a minute), {tally.aborted} programs and "
        f"{tally.aborted_turns} turns aborted, {tally.repeats} repeated, {tally.finals} final, {tally.kills} kills"
    )
    print({k: v for k, v in sorted(numbers.items()) if k.startswith("program") or "force" in k})
    print("failures", dict(tally.failures))
    print("KB at half time", half, "at the end", end)
    assert tally.kills >= 1
    assert tally.aborted >= PROGRAMS * ABORTED_PROGRAMS / 3
    assert not tally.failures["hang"]
    assert tally.completed >= 0.999 * kept, tally.failures
    assert numbers["programs_created"] - ended(numbers) == numbers["programs"]
    assert numbers["programs_paused"] + numbers["program_pauses"] > 0, "there was no pressure"
    for name, kilobytes in end.items():
        assert kilobytes <= 1.05 * half[name] + 4096, (
            f"{name} grew from {half[name]} KB to {kilobytes}"
        )


def ended(numbers: dict[str, float]) -> float:
    return sum(value for name, value in numbers.items() if name.startswith("programs_ended_"))


async def settled(stack, router: str) -> dict[str, float]:
    """Numbers once no lease and no waiting turn is left."""
    deadline = time.monotonic() + 30
    while True:
        try:
            numbers = await stack.numbers(router)
        except TimeoutError:
            numbers = {"leases": -1.0}
        if not numbers["leases"] and not numbers.get("turns_waiting"):
            break
        assert time.monotonic() < deadline, numbers
        await asyncio.sleep(0.2)
    for worker in stack.names("worker"):
        while (left := await stack.numbers(worker))["requests"] or left["kv_blocks_referenced"]:
            assert time.monotonic() < deadline, (worker, left)
            await asyncio.sleep(0.2)
    return numbers
