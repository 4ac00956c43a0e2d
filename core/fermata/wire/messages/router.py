"""Messages to a router."""

from __future__ import annotations

from typing import Literal

from fermata.core.ids import (
    LeaseId,
    OwnerId,
    RequestId,
    RoutingKey,
    SessionId,
    WorkerId,
)
from fermata.wire.messages.common import Hints, Message, Part, Ring, SessionRecord, Usage

Tier = Literal["device", "host", "disk", "shared"]
NO_EPOCH = (1 << 62) - 1
"""Of a Route that is not sent by the ring."""


class TimingProfile(Part, frozen=True):
    """How long a rank takes, for rules that weigh prefill against decoding: coefficients from the constant up."""

    prefill_ms: list[float]
    """Of a polynomial in the tokens of a prefill."""
    decode_ms: list[float]
    """Of one in the share of KV in use, for one step."""


class WorkerInfo(Part, frozen=True):
    """What a worker can do. Capacities are per rank."""

    endpoint: str
    """Where frontends send Generate."""
    model: str
    ranks: int
    block_size: int
    """Engine page; divides `routing_block_size`."""
    routing_block_size: int
    kv_blocks: dict[str, int]
    """Per tier, in pages of `block_size` tokens; always has `device`."""
    max_sequences: int
    max_batched_tokens: int
    context_length: int
    group: str = "default"
    revision: str = ""
    features: list[str] = []
    """`kv_events`, `priority`, `lora`, `hints`, `script_inputs` (wants Generate.script_inputs)."""
    timing: TimingProfile | None = None


class Hello(Message, frozen=True, tag=10):
    """First on every link to a router, and again after `HeartbeatAck.known` is false. Answered by
    Welcome.

    A frontend follows with LeaseClaims for the leases it owns, a worker with LeaseList and, when
    asked, snapshots.
    """

    role: Literal["frontend", "worker", "operator", "router"]
    id: str
    incarnation: int
    worker: WorkerInfo | None = None


class Heartbeat(Message, frozen=True, tag=11):
    """Each second. `count` and `xor` are the LeaseDigest of live leases of this router with an id
    <= `seen`.

    `seen` is the highest lease id of the router's present incarnation that arrived: leases granted
    later are still under way and compare as absent. Leases of the router's earlier incarnations
    count too. A worker, which learns of leases from frontends, sends `seen` = 0 and is reconciled
    by the list (`LeaseListRequest`).
    """

    incarnation: int
    seen: int
    count: int
    xor: int
    events: list[int] = []
    """Worker: last emitted KV event sequence of each rank (-1: none), so that a lost tail is found
    within a second."""


LEFT_RING = "left the ring"
"""Reason of a Bye to a router that owns no key any more, by a peer that has no lease of it: it lives on elsewhere."""


class Bye(Message, frozen=True, tag=12):
    incarnation: int
    reason: str = ""


class Route(Message, frozen=True, tag=13):
    """Place a turn. Frame: u64 sequence hashes of its full routing blocks. Idempotent by (owner,
    request, attempt).

    With `final` and no input it only ends its session's program: no engine is asked, and the answer
    is ProgramEnded. Such a one goes to every router, with an epoch above any (`NO_EPOCH`): who has
    the program ends it, whatever the ring.
    """

    request: RequestId
    attempt: int
    """0, then one more for each time the turn is routed again after its lease ended early."""
    key: RoutingKey
    epoch: int
    model: str
    input_tokens: int
    max_tokens: int
    session: SessionId = SessionId("")
    """Empty: anonymous and not even inferred."""
    parent: SessionId = SessionId("")
    inferred: bool = False
    """The session was inferred from its prompt: never bound Hard."""
    final: bool = False
    streaming: bool = True
    client_timeout_s: float = 0.0
    hints: Hints = Hints()
    namespace: str = ""
    lora: str = ""
    resumed: int = 0
    """Output tokens of earlier attempts, at the end of the input."""
    avoid: list[WorkerId] = []
    """Workers that failed this turn: taken only when no other is eligible."""
    policy_class: str = ""
    waited_s: float = 0.0
    """Already waited with another router or an earlier incarnation: kept as queue age."""


class LeaseProgress(Part, frozen=True):
    lease: LeaseId
    kind: Literal["accepted", "prefilled", "tokens", "finished", "cancelled", "failed"]
    """`finished`, `cancelled` and `failed` end the lease; anything after that is ignored."""
    output_tokens: int = 0
    """In total so far."""
    usage: Usage | None = None
    reason: str = ""
    """finished: stop, length, tool_calls...; failed: refused, worker_lost, gap..."""
    event_sequence: int = -1
    """finished: the rank's KV event sequence when the last token went out; the promise ends once
    it is applied."""
    request: RequestId = RequestId("")
    """With lease 0 and `cancelled` only: the client of this turn went away while its Route had no
    answer yet. A Grant that crosses it on the way is given back as any other."""
    gap: Literal["", "tool", "human"] = ""
    """finished: what its session waits for now, where the owner knows; else `reason` has to tell."""


class Progress(Message, frozen=True, tag=14):
    entries: list[LeaseProgress]


class LeaseClaim(Part, frozen=True):
    lease: LeaseId
    request: RequestId
    attempt: int
    worker: WorkerId
    rank: int
    input_tokens: int
    output_tokens: int
    blocks: int
    """How many hashes of the frame are its own."""
    accepted: bool
    prefilled: bool
    key: RoutingKey
    session: SessionId = SessionId("")
    parent: SessionId = SessionId("")


class LeaseClaims(Message, frozen=True, tag=15):
    """A frontend resends what it owns, to a router that booted. Frame: u64 sequence hashes, claim
    after claim."""

    claims: list[LeaseClaim]
    last: bool = True


class LeaseList(Message, frozen=True, tag=16):
    """All live leases of this router at its sender, up to `seen`. Frame: u64 lease ids.

    A frontend's list is final: what either side lacks ends. A worker's list names what its engine
    runs; the router revokes those it does not know (any more).
    """

    seen: int = 0


class KvStored(Part, frozen=True, tag=0):
    """A run of consecutive blocks that became visible on the rank. `parent`: sequence hash before
    the run, or None."""

    parent: int | None
    count: int
    tier: Tier = "device"


class KvRemoved(Part, frozen=True, tag=1):
    """The rank's last copy of each is gone."""

    count: int
    tier: Tier = "device"


class KvCleared(Part, frozen=True, tag=2):
    """Everything of the rank went; of one tier when named."""

    tier: Tier | None = None


KvEvent = KvStored | KvRemoved | KvCleared


class KvEvents(Message, frozen=True, tag=17):
    """Event i has sequence `first + i`; sequences of a rank have no gap. Frame: u64 sequence
    hashes, event by event."""

    rank: int
    first: int
    events: list[KvEvent]


class SnapshotChunk(Message, frozen=True, tag=18):
    """The worker's own index of one rank as of `sequence` (last emitted, -1: none), taken in one
    turn of its loop.

    Frame: u64 sequence hashes of `stored`, run after run. The router swaps the rank in with the
    last chunk.
    """

    rank: int
    request: int
    index: int
    last: bool
    sequence: int
    stored: list[KvStored]
    sessions: list[SessionRecord] = []


class RouterLoad(Part, frozen=True):
    """Load of one rank that came through one router, by that router's number."""

    router: int
    active: int
    waiting: int
    charged_tokens: int


class RankLoad(Part, frozen=True):
    rank: int
    running: int
    waiting: int
    kv_used: dict[str, int]
    """Pages in use (referenced) per tier."""
    steps: int
    """Engine steps so far; requests running and no step for `stallTimeout` means a stalled
    worker."""
    routers: list[RouterLoad] = []
    share_tokens: int = 0
    """The addressed router's share of the rank's KV budget."""
    share_number: int = 0
    """Names this share in the router's Demand. 0: the worker leases none, and all of it is the router's."""


class LoadReport(Message, frozen=True, tag=19):
    ranks: list[RankLoad]


class SetPolicy(Message, frozen=True, tag=20):
    """The whole policy. `revision` is the operator's own, growing number and the order; lower ones
    are refused."""

    uid: str
    generation: int
    revision: int
    spec: bytes
    """JSON of RouterPolicySpec."""
    ring: Ring


class HeldTurn(Part, frozen=True):
    owner: OwnerId
    request: RequestId
    waited_s: float


class Handover(Message, frozen=True, tag=21):
    """Router -> router: what moved with a ring epoch. Frame: u64, reserved for the turns'
    hashes."""

    epoch: int
    programs: list[SessionRecord]
    turns: list[HeldTurn]
    workers: list[WorkerId] = []
    """Those the sender knows: the receiver, if it is new, waits for them before it places turns."""


class ExplainRequest(Message, frozen=True, tag=22):
    """Operator, frontend -> router: what was decided lately, newest first. Answered by
    Explanation."""

    request: RequestId = RequestId("")
    """Of this turn alone, all its attempts. Empty: of any."""
    prefix: str = ""
    """Only of sessions whose name begins so: a tenant asks about its own."""
    limit: int = 10


class ProgramsRequest(Message, frozen=True, tag=23):
    """Operator, frontend -> router: a page of its programs, by session. Answered by Programs."""

    request: RequestId = RequestId("")
    """Comes back in the answer."""
    after: SessionId = SessionId("")
    """Last session of the page before."""
    prefix: str = ""
    """Only sessions whose name begins so."""
    limit: int = 1000
