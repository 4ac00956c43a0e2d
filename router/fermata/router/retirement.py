"""The end of a router that owns no key any more: it stays until the turns that it granted have ended.

A router that is still in the ring may go at any time, since all it knows is known elsewhere too: it is drained as soon
as it is asked.
"""

from __future__ import annotations

from fermata.router.state import RouterState
from fermata.wire.messages import DrainStatus
from fermata.wire.roles import Peer


class Retirement:
    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._askers: dict[Peer, None] = {}
        self.by: float | None = None
        """When it goes whatever still runs; None: nobody asked, or it is over."""
        self.is_over = False

    def ask(self, asker: Peer, deadline_s: float, now: float) -> None:
        """In real seconds. Asked again, the sooner deadline holds."""
        state = self._state
        if state.is_in_ring or self.is_over:
            state.effects.send(asker, DrainStatus("drained", len(state.leases)))
            return
        by = now + state.real(max(0.0, deadline_s))
        self.by = by if self.by is None else min(by, self.by)
        self._askers[asker] = None
        state.effects.send(asker, DrainStatus("draining", len(state.leases)))

    def check(self, now: float) -> None:
        if self.by is None:
            return
        state = self._state
        if state.is_in_ring:  # called back: it owns keys again
            self.by = None
            for asker in self._askers:
                state.effects.send(asker, DrainStatus("serving", len(state.leases)))
            self._askers.clear()
        elif now >= self.by or not (len(state.leases) or len(state.waiting)):
            self.by, self.is_over = None, True
            for asker in self._askers:
                state.effects.send(asker, DrainStatus("drained", len(state.leases)))
