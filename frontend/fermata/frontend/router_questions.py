"""Questions to all routers at once: who has a program, which programs there are, what was decided.

A session's program may be with any router while the ring moves, and a list is with all of them. So everyone is asked
and each answers for itself; one that is away is waited for only briefly, as what it knew it has lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeVar

from fermata.core.ids import RequestId, RouterId
from fermata.frontend.router_links import RouterLinks
from fermata.wire import messages as wire

WAIT_S = 5.0
AGAIN_S = 0.5

AnswerT = TypeVar("AnswerT", bound=wire.Message)


@dataclass(slots=True)
class _Question:
    news: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[RouterId, wire.Message] = field(default_factory=dict[RouterId, wire.Message])


class RouterQuestions:
    """Time here is the loop's own: it is about people and machines."""

    def __init__(self, links: RouterLinks, *, wait_s: float = WAIT_S) -> None:
        self._links = links
        self._wait_s = wait_s
        self._open: dict[RequestId, _Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def ask(
        self, request: RequestId, message: wire.Message, answer: type[AnswerT]
    ) -> list[AnswerT]:
        """Of the routers that answered in time; none when there was none. Asking twice must do no harm."""
        question = self._open[request] = _Question()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._until_answered(question, message)
        except TimeoutError:
            pass
        finally:
            del self._open[request]
        return [said for said in question.answers.values() if isinstance(said, answer)]

    def answered(self, router: RouterId, request: RequestId, message: wire.Message) -> None:
        """Answers that nobody waits for any more are dropped."""
        question = self._open.get(request)
        if question is not None:
            question.answers[router] = message
            question.news.set()

    async def _until_answered(self, question: _Question, message: wire.Message) -> None:
        """Asks at once, and again those that said nothing: a router may have booted meanwhile."""
        has_waited = False
        while True:
            self._send(question, message)
            has_waited = not await _news(question, AGAIN_S) or has_waited
            missing = [peer for peer in self._links.peers if peer.id not in question.answers]
            if question.answers and not any(peer.answers or not has_waited for peer in missing):
                return

    def _send(self, question: _Question, message: wire.Message) -> None:
        for peer in self._links.peers:
            if peer.answers and not peer.link.blocked and peer.id not in question.answers:
                peer.link.send(message)


async def _news(question: _Question, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await question.news.wait()
    except TimeoutError:
        return False
    question.news.clear()
    return True
