"""One question to every router of a running `fermata up`, and each one's answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from fermata.core.ids import RequestId, SessionId, new_request_id
from fermata.operator.local.run_folder import Endpoints
from fermata.wire.keyring import load_keyring
from fermata.wire.messages import (
    ExplainRequest,
    Explanation,
    Message,
    ProgramRow,
    Programs,
    ProgramsRequest,
    Role,
)
from fermata.wire.socket import Link, Packet, Peer, new_context

WAIT_S = 3.0
AGAIN_S = 0.2
PAGE = 1000

AnswerT = TypeVar("AnswerT", bound=Message)


class Routers:
    """Links that stay open between questions; make it inside the running loop."""

    def __init__(self, endpoints: Endpoints, *, page: int = PAGE, wait_s: float = WAIT_S) -> None:
        # Only a deployment that encrypts has one.
        keyring: str = endpoints.keyring
        self._context = new_context(load_keyring(Path(keyring)) if keyring else None)
        me = Peer(Role.OPERATOR, f"asking-{os.getpid()}", time.time_ns() // 1_000_000)
        self._page, self._wait_s = page, wait_s
        self._news = asyncio.Event()
        self._answers: dict[str, Programs | Explanation] = {}
        self._request = RequestId("")
        """Of the question that is open: late answers to an earlier one are not for it."""
        self._links = {
            name: Link(self._context, at, me=me, receive=self._receiver(name), listens=Role.ROUTER)
            for name, at in endpoints.routers.items()
        }

    def __enter__(self) -> Routers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in self._links.values():
            link.close()
        self._context.destroy(linger=0)

    async def programs(self) -> dict[str, list[ProgramRow]]:
        """All of them, by router; one that does not answer is left out."""
        found: dict[str, list[ProgramRow]] = {}
        after = SessionId("")
        while True:
            asked = ProgramsRequest(new_request_id(), after=after, limit=self._page)
            pages = await self._ask(asked, Programs, asked.request)
            for name, page in pages.items():
                found.setdefault(name, []).extend(page.programs)
            # Every router has shown all up to the least of the last ones on a page that goes on.
            lasts = [p.programs[-1].session for p in pages.values() if p.more and p.programs]
            if not lasts:
                return {name: _once(rows) for name, rows in found.items()}
            after = min(lasts)

    async def explain(self, request: RequestId, *, limit: int) -> dict[str, Explanation]:
        return await self._ask(ExplainRequest(request, limit=limit), Explanation, request)

    async def _ask(
        self, question: Message, kind: type[AnswerT], request: RequestId
    ) -> dict[str, AnswerT]:
        """Asked again until all have answered or it took too long: a link takes a moment to connect."""
        self._answers.clear()
        self._request = request
        deadline = time.monotonic() + self._wait_s
        while len(self._answers) < len(self._links) and time.monotonic() < deadline:
            for name, link in self._links.items():
                if name not in self._answers and not link.blocked:
                    link.send(question)
            self._news.clear()
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._news.wait()
            except TimeoutError:
                continue
        return {name: said for name, said in self._answers.items() if isinstance(said, kind)}

    def _receiver(self, name: str) -> Callable[[Packet], None]:
        def receive(packet: Packet) -> None:
            answer = packet.message
            if isinstance(answer, Programs | Explanation) and answer.request == self._request:
                self._answers[name] = answer
                self._news.set()

        return receive


def _once(rows: list[ProgramRow]) -> list[ProgramRow]:
    """Pages overlap where one router's went further than another's."""
    return list({row.session: row for row in rows}.values())
