"""The operator's line to one router or worker: policy, drain, and what it says of itself.

Answers are kept with the time they came, so that readiness can be about the process that runs now and not about
its predecessor on the same port.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fermata.wire.messages import (
    Drain,
    DrainStatus,
    PolicyAck,
    Role,
    SetPolicy,
    Status,
    StatusRequest,
)
from fermata.wire.socket import Context, Link, Packet, Peer

ASK_EVERY_S = 0.2


class OperatorLink:
    """`heard` is called after an answer that says something new: what only counts on is no news, or an
    answer would be reason to ask again. Nothing is asked of a peer that does not read."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        me: Peer,
        listens: Role,
        heard: Callable[[], None],
    ) -> None:
        assert me.role is Role.OPERATOR
        assert listens in {Role.ROUTER, Role.WORKER}
        self._heard = heard
        self.endpoint = endpoint
        self.status: Status | None = None
        self.status_at = 0.0
        self._asked_at = 0.0
        self.policy_ack: PolicyAck | None = None
        self.drain_status: DrainStatus | None = None
        self._link = Link(context, endpoint, me=me, receive=self._receive, listens=listens)

    def ask_status(self) -> None:
        """At most each `ASK_EVERY_S`; call at will."""
        now = time.monotonic()
        if not self._link.blocked and now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            self._link.send(StatusRequest())

    def set_policy(self, message: SetPolicy) -> bool:
        """False: it does not read now; ask again later."""
        return not self._link.blocked and self._link.send(message)

    def drain(self, deadline_s: float) -> bool:
        return not self._link.blocked and self._link.send(Drain(deadline_s=deadline_s))

    def fresh_status(self, *, since: float, now: float, age_s: float = 3.0) -> Status | None:
        """What it last said, if it said so after `since` and not long ago (monotonic seconds)."""
        if self.status is None or self.status_at < since or now - self.status_at > age_s:
            return None
        return self.status

    def close(self) -> None:
        self._link.close()

    def _receive(self, packet: Packet) -> None:
        match packet.message:
            case Status() as status:
                is_news = self.status is None or _standing(status) != _standing(self.status)
                self.status = status
                self.status_at = time.monotonic()
                if not is_news:
                    return
            case PolicyAck() as ack:
                self.policy_ack = ack
            case DrainStatus() as drain_status:
                self.drain_status = drain_status
            case _:
                return  # a Fault is logged by the link; nothing else is for an operator
        self._heard()


def _standing(status: Status) -> tuple[object, ...]:
    """What decides about readiness."""
    numbers = status.numbers
    return status.facts, numbers.get("workers_ready"), numbers.get("policy_revision")
