"""Every message of the wire, one file per receiver. `ANY` is the closed set the codec knows."""

from __future__ import annotations

from fermata.wire.messages.common import (
    Batch,
    Drain,
    DrainStatus,
    Fault,
    Hints,
    KvAction,
    KvHints,
    Message,
    Ring,
    Role,
    Sampling,
    SessionRecord,
    Status,
    StatusRequest,
    Usage,
)
from fermata.wire.messages.frontend import (
    Accepted,
    Grant,
    HeartbeatAck,
    Hold,
    LeaseListRequest,
    Moved,
    Output,
    OutputEntry,
    Refused,
    Reject,
    Revoke,
    Welcome,
)
from fermata.wire.messages.operator import PolicyAck
from fermata.wire.messages.router import (
    Bye,
    Handover,
    Heartbeat,
    HeldTurn,
    Hello,
    KvCleared,
    KvEvent,
    KvEvents,
    KvRemoved,
    KvStored,
    LeaseClaim,
    LeaseClaims,
    LeaseList,
    LeaseProgress,
    LoadReport,
    Progress,
    RankLoad,
    Route,
    RouterLoad,
    SetPolicy,
    SnapshotChunk,
    WorkerInfo,
)
from fermata.wire.messages.worker import (
    Abort,
    Fence,
    Generate,
    HintPush,
    SnapshotRequest,
)

__all__ = [
    "ANY",
    "FRAME_ITEM_BYTES",
    "Abort",
    "Accepted",
    "Batch",
    "Bye",
    "Drain",
    "DrainStatus",
    "Fault",
    "Fence",
    "Generate",
    "Grant",
    "Handover",
    "Heartbeat",
    "HeartbeatAck",
    "HeldTurn",
    "Hello",
    "HintPush",
    "Hints",
    "Hold",
    "KvAction",
    "KvCleared",
    "KvEvent",
    "KvEvents",
    "KvHints",
    "KvRemoved",
    "KvStored",
    "LeaseClaim",
    "LeaseClaims",
    "LeaseList",
    "LeaseListRequest",
    "LeaseProgress",
    "LoadReport",
    "Message",
    "Moved",
    "Output",
    "OutputEntry",
    "PolicyAck",
    "Progress",
    "RankLoad",
    "Refused",
    "Reject",
    "Revoke",
    "Ring",
    "Role",
    "Route",
    "RouterLoad",
    "Sampling",
    "SessionRecord",
    "SetPolicy",
    "SnapshotChunk",
    "SnapshotRequest",
    "Status",
    "StatusRequest",
    "Usage",
    "Welcome",
    "WorkerInfo",
]

ANY: tuple[type[Message], ...] = (
    # Shared
    Batch, Fault, Drain, DrainStatus, StatusRequest, Status,
    # To a router
    Hello, Heartbeat, Bye, Route, Progress, LeaseClaims, LeaseList, KvEvents, SnapshotChunk,
    LoadReport, SetPolicy, Handover,
    # To a frontend (Welcome, HeartbeatAck, LeaseListRequest and Revoke go to workers too)
    Welcome, HeartbeatAck, LeaseListRequest, Revoke, Grant, Hold, Reject, Moved, Accepted, Refused, Output,
    # To a worker
    Generate, Abort, Fence, SnapshotRequest, HintPush,
    # To the operator
    PolicyAck,
)  # fmt: skip

FRAME_ITEM_BYTES: dict[type[Message], int] = {
    # u32 token ids
    Generate: 4, Output: 4,
    # u64 hashes or lease ids
    Route: 8, LeaseClaims: 8, LeaseList: 8, KvEvents: 8, SnapshotChunk: 8, Revoke: 8, Abort: 8, Handover: 8,
}  # fmt: skip
