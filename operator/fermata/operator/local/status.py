"""`fermata status`: one look at each process of a running `fermata up`, as a table."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fermata.operator.columns import aligned
from fermata.operator.link import OperatorLink
from fermata.operator.local.http_probe import get
from fermata.operator.local.run_folder import Endpoints
from fermata.wire.keyring import Keyring, load_keyring
from fermata.wire.messages import Role
from fermata.wire.socket import Peer, new_context

WAIT_S = 2.0
ASK_AGAIN_S = 0.1

COLUMNS: dict[str, tuple[str, ...]] = {
    "router": (
        "workers_ready",
        "workers_known",
        "owners",
        "leases",
        "turns_waiting",
        "sessions",
        "index_blocks",
        "policy_revision",
    ),
    "worker": (
        "requests",
        "kv_blocks_referenced",
        "kv_blocks_cached",
        "kv_blocks_total",
        "output_tokens",
        "steps",
    ),
    "frontend": ("turns", "leases", "migrations", "cancellations", "poisons", "cached_share"),
}


@dataclass(slots=True)
class Look:
    """What one process said of itself."""

    name: str
    state: str = "no answer"
    numbers: dict[str, float] = field(default_factory=dict[str, float])


async def look_around(endpoints: Endpoints) -> dict[str, list[Look]]:
    """By kind; a process that does not answer within `WAIT_S` says so."""
    keyring = load_keyring(Path(endpoints.keyring)) if endpoints.keyring else None
    wire = [("router", n, e) for n, e in endpoints.routers.items()]
    wire += [("worker", n, e) for n, e in endpoints.workers.items()]
    looks, frontends = await asyncio.gather(
        _ask_all(wire, keyring),
        asyncio.gather(*(_ask_frontend(n, u) for n, u in endpoints.frontends.items())),
    )
    return {**looks, "frontend": list(frontends)}


def table(looks: dict[str, list[Look]]) -> str:
    blocks: list[str] = []
    for kind, columns in COLUMNS.items():
        header = [kind, "state", *(column.replace("_", " ") for column in columns)]
        rows = [
            [look.name, look.state, *(_number(look.numbers.get(column)) for column in columns)]
            for look in looks.get(kind, [])
        ]
        blocks.append(aligned([header, *rows], left=2))
    return "\n\n".join(blocks)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


async def _ask_all(
    wire: list[tuple[str, str, str]], keyring: Keyring | None
) -> dict[str, list[Look]]:
    context = new_context(keyring)
    answered = asyncio.Event()
    me = Peer(Role.OPERATOR, f"status-{os.getpid()}", time.time_ns() // 1_000_000)
    links = [
        (kind, name, OperatorLink(context, endpoint, me=me, listens=Role(kind), heard=answered.set))
        for kind, name, endpoint in wire
    ]
    try:
        await _until_answered([link for _, _, link in links], answered)
        looks: dict[str, list[Look]] = {"router": [], "worker": []}
        for kind, name, link in links:
            looks[kind].append(_look(name, link))
        return looks
    finally:
        for _, _, link in links:
            link.close()
        context.destroy(linger=0)


async def _until_answered(links: list[OperatorLink], answered: asyncio.Event) -> None:
    deadline = time.monotonic() + WAIT_S
    while waiting := [link for link in links if link.status is None]:
        if time.monotonic() > deadline:
            return
        for link in waiting:
            link.ask_status()
        answered.clear()
        try:
            async with asyncio.timeout(ASK_AGAIN_S):
                await answered.wait()
        except TimeoutError:
            continue


def _look(name: str, link: OperatorLink) -> Look:
    if link.status is None:
        return Look(name)
    return Look(name, link.status.facts.get("state", "serving"), link.status.numbers)


async def _ask_frontend(name: str, url: str) -> Look:
    """Of processes that share a port, whichever the kernel picks may answer; a few tries find the one meant."""
    where = urlsplit(url)
    assert where.hostname is not None, url
    assert where.port is not None, url
    for _ in range(16):
        answer = await get(where.hostname, where.port, "/fermata/status", timeout_s=WAIT_S)
        if answer is None or answer[0] != 200:
            return Look(name)
        try:
            said: dict[str, Any] = msgspec.json.decode(answer[1], type=dict[str, Any])
        except msgspec.MsgspecError:
            return Look(name, "said no JSON")
        if said.get("id") == name:
            numbers = {key: float(v) for key, v in said.items() if isinstance(v, (int, float))}
            return Look(name, str(said.get("state", "serving")), numbers | _cached_share(said))
    return Look(name)


def _cached_share(said: dict[str, Any]) -> dict[str, float]:
    """Share of prompt tokens whose tokenisation was remembered."""
    prompts = said.get("prompts", {})
    cached, fresh = prompts.get("cached_tokens", 0), prompts.get("tokenised_tokens", 0)
    return {"cached_share": cached / (cached + fresh)} if cached + fresh else {}
