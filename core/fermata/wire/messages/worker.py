"""Messages to a worker."""

from __future__ import annotations

from typing import Any

from fermata.core.ids import LeaseId, OwnerId, RequestId, RoutingKey, SessionId
from fermata.wire.messages.common import KvHints, Message, Part, Sampling


class Generate(Message, frozen=True, tag=50):
    """Run one attempt of a turn. Frame: u32 prompt tokens, the `resumed` output tokens of earlier
    attempts at its end.

    Answered by Accepted or Refused, then Output.
    """

    lease: LeaseId
    request: RequestId
    attempt: int
    owner: OwnerId
    incarnation: int
    """The owner's."""
    sampling: Sampling
    """`max_tokens` counts from the first attempt: `resumed` of them are already made."""
    rank: int = 0
    resumed: int = 0
    priority: int = 0
    """Higher is sooner."""
    session: SessionId = SessionId("")
    parent: SessionId = SessionId("")
    key: RoutingKey = RoutingKey("")
    final: bool = False
    namespace: str = ""
    """The engine's cache salt, and part of the hash seed."""
    lora: str = ""
    hints: KvHints | None = None
    transfer: dict[str, Any] | None = None
    """Prefill/decode transfer parameters, opaque to the frontend."""
    script_inputs: list[str] = []
    """Only for a worker with that feature (a simulated responder): text of the last user or tool
    message before each assistant turn of the history, oldest first, then that of this turn."""


class Abort(Message, frozen=True, tag=51):
    """Frame: u64 lease ids. Unknown ones are ignored; a last Output with finish `abort` follows
    for the others."""


class Fence(Message, frozen=True, tag=52):
    """The owner is dead up to this incarnation: its later Generates are refused, what it runs is
    aborted."""

    owner: OwnerId
    incarnation: int


class SnapshotRequest(Message, frozen=True, tag=53):
    rank: int
    request: int


class RankDemand(Part, frozen=True):
    """What one router asks of one rank, in tokens of KV."""

    rank: int
    charged_tokens: int
    """Of what it has placed there, shared blocks once."""
    waiting_tokens: int
    """This rank's part of what waits for room."""
    share_number: int = 0
    """Of the share that it acts on (`RankLoad.share_number`); 0 before it heard of one."""


class Demand(Message, frozen=True, tag=55):
    """Router -> worker, in answer to each LoadReport: what the shares of the KV budget are struck by."""

    ranks: list[RankDemand]


class HintPush(Message, frozen=True, tag=54):
    """A KV hint that goes with no Grant."""

    rank: int
    hints: KvHints
