"""Who is really ready, by what each process and the routers say: a process that runs may still serve nobody.

router     answers, and has applied the current policy and ring
worker     answers that it serves, and every router of the ring has admitted it
frontend   GET /ready is 200, which it says once a router welcomed it and a worker is admitted
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from fermata.operator.link import OperatorLink
from fermata.operator.local.http_probe import get
from fermata.operator.reconcile import Kind
from fermata.wire.messages import Role, Status
from fermata.wire.socket import Context, Peer

ASK_S = 0.1
FRONTEND_AGE_S = 5.0
MAX_ASKS = 16
"""Of one port a round: the kernel spreads connections over the processes that share it."""


class _FrontendStatus(msgspec.Struct):
    """The part we read."""

    id: str


def admitted(status: Status, workers: Iterable[str]) -> set[str]:
    """Of `workers`, those a router can place turns on.

    A router that does not name them is believed by count alone: all of them, or none.
    """
    names = set(workers)
    if "workers" in status.facts:
        return names & set(status.facts["workers"].split(","))
    return names if status.numbers.get("workers_ready", 0) >= len(names) else set()


class Observer:
    """Holds a line to every process. `changed` is called when one may have become ready or ceased to be."""

    def __init__(
        self, context: Context, *, me: Peer, host: str, changed: Callable[[], None]
    ) -> None:
        self._context = context
        self._me = me
        self._host = host
        self._changed = changed
        self._frontends: dict[str, int] = {}
        self._answered: dict[str, float] = {}
        self._asked_at = 0.0
        self.links: dict[str, OperatorLink] = {}

    def follow(self, name: str, *, kind: Kind, endpoint: str = "", port: int = 0) -> None:
        if kind == "frontend":
            self._frontends[name] = port
            return
        listens = Role.ROUTER if kind == "router" else Role.WORKER
        self.links[name] = OperatorLink(
            self._context, endpoint, me=self._me, listens=listens, heard=self._changed
        )

    def forget(self, name: str) -> None:
        self._frontends.pop(name, None)
        self._answered.pop(name, None)
        link = self.links.pop(name, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for name in [*self.links, *self._frontends]:
            self.forget(name)

    def status(self, name: str, *, since: float) -> Status | None:
        """What a router or worker says of itself, if the process started at `since` said it."""
        link = self.links.get(name)
        return link.fresh_status(since=since, now=time.monotonic()) if link else None

    def frontend_is_ready(self, name: str, *, since: float) -> bool:
        at = self._answered.get(name, 0.0)
        return at >= since and time.monotonic() - at <= FRONTEND_AGE_S

    def ask(self) -> None:
        """Each answer leads to a look and each look asks: so not more often than `ASK_S`."""
        now = time.monotonic()
        if now - self._asked_at >= ASK_S:
            self._asked_at = now
            for link in self.links.values():
                link.ask_status()

    async def probe_frontends(self) -> None:
        """One round over all ports; at most a few seconds."""
        by_port: dict[int, set[str]] = {}
        for name, port in self._frontends.items():
            by_port.setdefault(port, set()).add(name)
        await asyncio.gather(*(self._probe(port, names) for port, names in by_port.items()))

    async def _probe(self, port: int, names: set[str]) -> None:
        asked_at = time.monotonic()
        answer = await get(self._host, port, "/ready")
        if answer is None or answer[0] != 200:
            return
        seen = names if len(names) == 1 else await self._who_answers(port, names)
        for name in seen & self._frontends.keys():
            self._answered[name] = asked_at
        self._changed()

    async def _who_answers(self, port: int, names: set[str]) -> set[str]:
        seen: set[str] = set()
        for _ in range(MAX_ASKS):
            answer = await get(self._host, port, "/fermata/status")
            if answer is not None and answer[0] == 200:
                with suppress(msgspec.MsgspecError):
                    seen.add(msgspec.json.decode(answer[1], type=_FrontendStatus).id)
            if seen >= names:
                break
        return seen & names
