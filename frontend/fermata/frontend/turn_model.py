"""The values of a turn: what was asked for, how it ends, what the state machine wants done.

Structs, not dataclasses: each turn makes about ten of them, and a frozen dataclass takes 0.1 us a field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from fermata.core.errors import (
    ContextTooLong,
    InvalidTurn,
    NotFound,
    NoWorker,
    Overloaded,
    TurnError,
)
from fermata.core.ids import LeaseId, RequestId, RoutingKey, SessionId
from fermata.wire.messages import Hints, LeaseProgress, Sampling

if TYPE_CHECKING:
    from fermata.frontend.turn import Turn

_NO_SESSION = SessionId("")
_UNSAID = Hints()

RevokeReason = Literal[
    "worker_lost", "worker_stalled", "worker_draining", "owner_lost", "dispatch_timeout", "unknown"
]


REJECTIONS: dict[str, type[TurnError]] = {
    error.code: error for error in (Overloaded, NoWorker, InvalidTurn, ContextTooLong, NotFound)
}
"""What a Reject's code is to the client."""


class Stage(Enum):
    ROUTING = "routing"
    GRANTED = "granted"
    GENERATING = "generating"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """In deployment seconds: a shell multiplies what is meant on real machines by the speedup."""

    ask_again_s: float = 5.0
    """A Route that got no answer is sent again; it is idempotent."""
    ask_again_held_s: float = 30.0
    silence_s: float = 120.0
    """No word from a router for so long, and no Hold that still runs: the turn fails."""
    backoff_first_s: float = 0.1
    backoff_most_s: float = 2.0
    """Between attempts that a worker refused."""


class TurnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt` is a u32 frame, `hashes` the u64 frame of its full routing blocks."""

    request: RequestId
    key: RoutingKey
    model: str
    prompt: bytes
    hashes: bytes
    block_size: int
    """Tokens a routing block."""
    seed: int
    """Of block hashes."""
    sampling: Sampling
    session: SessionId = _NO_SESSION
    parent: SessionId = _NO_SESSION
    inferred: bool = False
    final: bool = False
    streaming: bool = True
    resumable: bool = True
    """May go on at another worker after its first token: no grammar, no required tool choice, no
    prompt logprobs, n = 1."""
    namespace: str = ""
    lora: str = ""
    hints: Hints = _UNSAID
    policy_class: str = ""
    client_timeout_s: float = 0.0
    tool_call_tokens: tuple[int, ...] = ()
    """Output with one of them calls a tool; empty: there is no telling."""
    inputs: Callable[[], list[str]] = list
    """For simulated responders (`Generate.script_inputs`); called only if the worker wants them."""

    @property
    def input_tokens(self) -> int:
        return len(self.prompt) // 4


class Finished(msgspec.Struct, frozen=True, gc=False):
    reason: Literal["stop", "length"]
    stop_token: int | None = None


class Failed(msgspec.Struct, frozen=True, gc=False):
    error: TurnError


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    pass


Outcome = Finished | Failed | Cancelled


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Send Route for the turn's present attempt."""

    turn: Turn


class Withdraw(msgspec.Struct, frozen=True, gc=False):
    """The Route of the present attempt, not granted yet, is no longer wanted."""

    turn: Turn


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send Generate to the worker of the turn's grant."""

    turn: Turn


class Abort(msgspec.Struct, frozen=True, gc=False):
    turn: Turn
    endpoint: str
    lease: LeaseId


class Report(msgspec.Struct, frozen=True, gc=False):
    """Tell the lease's router."""

    turn: Turn
    progress: LeaseProgress


Effect = Ask | Withdraw | Dispatch | Abort | Report
Effects = Sequence[Effect]


class Reader(Protocol):
    """Who waits for the turn: told that there are tokens, a hold or an end to look at."""

    def wake(self) -> None: ...


@dataclass(slots=True)
class Times:
    """Deployment seconds at which it happened; 0 while it has not."""

    received: float
    granted: float = 0.0
    """Of the attempt that made the first token, or of the last one so far."""
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    held: float = 0.0
    """A duration: held by routers, over all attempts."""
    holds: dict[str, float] | None = None
    """The same by reason; None while there was no hold."""
