"""Messages to a frontend. Welcome, HeartbeatAck, LeaseListRequest and Revoke go to workers as
well."""

from __future__ import annotations

from typing import Literal

from fermata.core.ids import LeaseId, RequestId, RouterId, WorkerId
from fermata.wire.messages.common import KvHints, Message, Part, Ring


class Welcome(Message, frozen=True, tag=30):
    """Answer to Hello."""

    router: RouterId
    number: int
    """Router part of its lease ids."""
    incarnation: int
    """Incarnation part of its lease ids (22 bits)."""
    ring: Ring
    policy_revision: int
    workers_ready: int
    """Admitted workers that can take a turn now."""


class HeartbeatAck(Message, frozen=True, tag=31):
    known: bool
    """False: say Hello again (the router booted, or took the sender for dead)."""
    ring_epoch: int
    policy_revision: int
    workers_ready: int
    fenced: int = -1
    """With `known` false: incarnations of the sender up to this one were taken for dead, so only a
    later one is let in. Its clock alone does not say so: clocks are set back."""


class LeaseListRequest(Message, frozen=True, tag=32):
    """The digests differed twice: send LeaseList."""


class Revoke(Message, frozen=True, tag=33):
    """These leases no longer hold. Frame: u64 lease ids.

    To a frontend: route the turns again. To a worker: abort them.
    """

    reason: Literal[
        "worker_lost",
        "worker_stalled",
        "worker_draining",
        "owner_lost",
        "dispatch_timeout",
        "unknown",
    ]


class Grant(Message, frozen=True, tag=34):
    request: RequestId
    attempt: int
    lease: LeaseId
    worker: WorkerId
    endpoint: str
    rank: int
    matched: dict[str, int]
    """Routing blocks found per tier."""
    policy_revision: int
    priority: int = 0
    """For the engine; higher is sooner."""
    features: list[str] = []
    hints: KvHints | None = None
    held_s: float = 0.0
    hold_reason: str = ""


class Hold(Message, frozen=True, tag=35):
    """The turn waits; the client must be kept alive. Sent once when the wait begins, again when
    its reason changes."""

    request: RequestId
    attempt: int
    reason: Literal["no_worker", "booting", "queue", "pressure", "admission", "policy"]
    deadline_s: float
    """From now: then it is placed by force, or rejected."""


class Reject(Message, frozen=True, tag=36):
    request: RequestId
    attempt: int
    code: Literal[
        "overloaded", "no_worker", "invalid_request", "context_length_exceeded", "not_found"
    ]
    message: str
    retry_after_s: float = 0.0


class Moved(Message, frozen=True, tag=37):
    """This router does not answer for the key: ask the one the ring names."""

    request: RequestId
    attempt: int
    ring: Ring


class Accepted(Message, frozen=True, tag=38):
    """The engine has the request."""

    lease: LeaseId
    attempt: int


class Refused(Message, frozen=True, tag=39):
    """The worker will not run it. `fenced`: the owner was declared dead and must say Hello anew."""

    lease: LeaseId
    attempt: int
    code: Literal["draining", "fenced", "invalid", "full", "failed"]
    message: str


class OutputEntry(Part, frozen=True):
    lease: LeaseId
    attempt: int
    first: int
    """Index of its first token within the attempt; repeats are dropped, a gap means a lost
    worker."""
    count: int
    cached_tokens: int = -1
    """Prompt tokens found in cache; -1 until known."""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    error: str = ""
    stop_token: int | None = None
    event_sequence: int = -1
    logprobs: list[list[tuple[int, float]]] | None = None
    """Per token: (token, logprob), the sampled one first."""


class Output(Message, frozen=True, tag=40):
    """What the engine made since the last one. Frame: u32 token ids, entry after entry."""

    entries: list[OutputEntry]


class ProgramEnded(Message, frozen=True, tag=42):
    """Answer to a final Route without input: the session's program is over, or is with its last
    turn. No lease was granted."""

    request: RequestId
    attempt: int
    was_known: bool
    """False: there was no such program here (any more)."""
