"""Who may send what to whom. Anything else is counted, answered with a Fault and dropped."""

from __future__ import annotations

from dataclasses import dataclass

from fermata.wire.messages import (
    Abort,
    Accepted,
    Bye,
    Demand,
    Drain,
    DrainStatus,
    ExplainRequest,
    Explanation,
    Fault,
    Fence,
    Generate,
    Grant,
    Handover,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HintPush,
    Hold,
    KvEvents,
    LeaseClaims,
    LeaseList,
    LeaseListRequest,
    LoadReport,
    Message,
    Moved,
    Output,
    PolicyAck,
    ProgramEnded,
    Programs,
    ProgramsRequest,
    Progress,
    Refused,
    Reject,
    Revoke,
    Role,
    Route,
    SetPolicy,
    SnapshotChunk,
    SnapshotRequest,
    Status,
    StatusRequest,
    Welcome,
)

Kinds = frozenset[type[Message]]
MAX_INCARNATION = 1 << 63

_COMMON: Kinds = frozenset({Fault, StatusRequest, Status})
_PEER: Kinds = _COMMON | {Hello, Heartbeat, Bye}
_ANSWERS: Kinds = _COMMON | {Welcome, HeartbeatAck}
_QUESTIONS: Kinds = frozenset({ExplainRequest, ProgramsRequest})

_ALLOWED: dict[tuple[Role, Role], Kinds] = {
    (Role.FRONTEND, Role.ROUTER): _PEER | _QUESTIONS | {Route, Progress, LeaseClaims, LeaseList},
    (Role.WORKER, Role.ROUTER): _PEER
    | {LeaseList, KvEvents, SnapshotChunk, LoadReport, DrainStatus},
    (Role.OPERATOR, Role.ROUTER): _PEER | _QUESTIONS | {SetPolicy, Drain},
    (Role.ROUTER, Role.ROUTER): _PEER | {Handover, Welcome, HeartbeatAck},
    (Role.FRONTEND, Role.WORKER): _COMMON | {Generate, Abort},
    (Role.OPERATOR, Role.WORKER): _COMMON | {Drain},
    (Role.ROUTER, Role.FRONTEND): _ANSWERS
    | {LeaseListRequest, Revoke, Grant, Hold, Reject, Moved, ProgramEnded, Programs, Explanation},
    (Role.ROUTER, Role.WORKER): _ANSWERS
    | {LeaseListRequest, Revoke, Fence, SnapshotRequest, HintPush, Drain, Demand},
    (Role.ROUTER, Role.OPERATOR): _ANSWERS | {PolicyAck, DrainStatus, Programs, Explanation},
    (Role.WORKER, Role.FRONTEND): _COMMON | {Accepted, Refused, Output},
    (Role.WORKER, Role.OPERATOR): _COMMON | {DrainStatus},
}


def allowed(*, sender: Role, receiver: Role) -> Kinds:
    return _ALLOWED.get((sender, receiver), frozenset())


def allowed_to(receiver: Role) -> Kinds:
    """What any sender may send to `receiver`: for the end that chose whom it talks to."""
    return frozenset[type[Message]]().union(
        *(kinds for (_, to), kinds in _ALLOWED.items() if to is receiver)
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """One boot of one process. Its ZeroMQ identity says so, so a restarted peer is never taken for
    its predecessor."""

    role: Role
    id: str
    incarnation: int

    @property
    def identity(self) -> bytes:
        return f"{self.role.value}/{self.id}/{self.incarnation}".encode()

    @classmethod
    def parse(cls, identity: bytes) -> Peer:
        """Raises ValueError for an identity that is not ours, to the letter: answers go to `identity` as it is
        written here, and messages name the incarnation."""
        role, _, rest = identity.decode().partition("/")
        name, _, incarnation = rest.rpartition("/")
        if not name:
            raise ValueError("identity is not role/id/incarnation")
        peer = cls(Role(role), name, int(incarnation))
        if not 0 <= peer.incarnation < MAX_INCARNATION or peer.identity != identity:
            raise ValueError("incarnation is no plain number of 63 bits")
        return peer
