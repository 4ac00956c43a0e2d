"""Messages to the operator (and to `fermata up`, which is the operator on one machine)."""

from __future__ import annotations

from fermata.wire.messages.common import Message


class PolicyAck(Message, frozen=True, tag=60):
    uid: str
    generation: int
    revision: int
    applied: bool
    reasons: list[str] = []
