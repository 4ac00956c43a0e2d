"""A turn is held: for what, until when, and its owner is told when that begins and when the reason changes."""

from __future__ import annotations

from typing import Literal

from fermata.router.decisions import Other
from fermata.router.model import Turn
from fermata.router.state import RouterState
from fermata.router.waiting import Reason, WaitingTurn
from fermata.wire.messages import Hold, Route

_NOT_STREAMING_S = 240.0
_CLIENT_MARGIN_S = 30.0


class Holding:
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def deadline(self, turn: Turn, reason: Reason) -> float:
        """Whatever it waits for, it is one wait, which began when the turn did."""
        state = self._state
        no_worker_s = state.policy.overload.no_worker_wait_s
        match reason:
            case "booting":
                return state.boot_ends_at
            case "no_worker":
                # A boot always gives workers the time to say Hello, however long the turn waited elsewhere.
                least = state.boot_ends_at if state.is_booting else 0.0
                return max(turn.since + no_worker_s, least)
            case _:
                return turn.since + self._longest_hold_s(turn.route)

    def _longest_hold_s(self, route: Route) -> float:
        """Then it is placed whatever the load. A client that hears nothing meanwhile gives up earlier, and lives in
        real seconds."""
        longest = self._state.policy.scheduler.thunder_agent.resume_timeout_s
        if route.streaming:
            return longest
        patience_s = _NOT_STREAMING_S
        if route.client_timeout_s > 0:
            patience_s = min(patience_s, max(0.0, route.client_timeout_s - _CLIENT_MARGIN_S))
        return min(longest, self._state.real(patience_s))

    def tell(self, waiting: WaitingTurn, now: float) -> None:
        left_s = max(0.0, waiting.deadline - now)
        if waiting.reason == "booting":
            # What it may have to wait for after the boot is not known yet.
            left_s += self._state.policy.overload.no_worker_wait_s
        route = waiting.turn.route
        self._state.effects.send(
            waiting.turn.owner, Hold(route.request, route.attempt, waiting.reason, left_s)
        )

    def hold_anew(self, waiting: WaitingTurn, reason: Reason, now: float) -> None:
        self._state.waiting.postpone(waiting, reason, self.deadline(waiting.turn, reason))
        self.begin(waiting, now)

    def begin(self, waiting: WaitingTurn, now: float) -> None:
        """Of its first wait, and again when what it waits for has changed."""
        self._state.waits.held(waiting.reason)
        self.remember(waiting.turn, "hold", waiting.reason, waiting.deadline - now, now)
        self.tell(waiting, now)

    def remember(
        self,
        turn: Turn,
        what: Literal["hold", "reject", "moved"],
        reason: str,
        left_s: float,
        now: float,
    ) -> None:
        state = self._state
        policy, revision = state.policy.scheduler.type, state.policy_revision
        state.decisions.other(
            Other(now, turn.owner.id, turn.route, what, reason, left_s, policy, revision)
        )
