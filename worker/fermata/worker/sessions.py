"""What the worker remembers of the sessions whose KV it has, so that routers may forget them.

A bounded LRU by last finish: context tokens, parent, routing key, whether a turn runs. O(1) a turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from fermata.core.ids import RoutingKey, SessionId
from fermata.wire.messages import SessionRecord


@dataclass(slots=True)
class Session:
    parent: SessionId
    key: RoutingKey
    rank: int
    context_tokens: int
    finished_at: float
    running: int


class Sessions:
    def __init__(self, *, limit: int = 16_384) -> None:
        self._limit = limit
        self._sessions: OrderedDict[SessionId, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self,
        session: SessionId,
        *,
        parent: SessionId,
        key: RoutingKey,
        rank: int,
        tokens: int,
        now: float,
    ) -> None:
        """A turn of the session starts here."""
        if not session:
            return
        known = self._sessions.pop(session, None)
        running = known.running if known is not None else 0
        self._sessions[session] = Session(parent, key, rank, tokens, now, running + 1)
        self._forget_oldest()

    def end(self, session: SessionId, *, tokens: int, final: bool, now: float) -> None:
        """Its turn ended with a context of `tokens`; `final` forgets it. Unknown sessions are
        ignored."""
        known = self._sessions.get(session)
        if known is None:
            return
        known.running = max(0, known.running - 1)
        if final and not known.running:
            del self._sessions[session]
            return
        known.context_tokens, known.finished_at = tokens, now
        self._sessions.move_to_end(session)

    def records(self, rank: int, now: float) -> Iterator[SessionRecord]:
        for name, session in self._sessions.items():
            if session.rank == rank:
                yield SessionRecord(
                    session=name,
                    parent=session.parent,
                    key=session.key,
                    context_tokens=session.context_tokens,
                    idle_s=0.0 if session.running else max(0.0, now - session.finished_at),
                    reasoning=session.running > 0,
                )

    def _forget_oldest(self) -> None:
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
