"""Parts shared by messages, and the messages that any role may get.

All structs are `array_like`: a later version appends fields with defaults, and an older peer
ignores the tail. Integers that come in thousands are never fields: they travel in the raw frame
after the header.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec

from fermata.core.ids import OwnerId, RequestId, RoutingKey, SessionId, WorkerId


class Role(Enum):
    FRONTEND = "frontend"
    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of everything that is sent on its own."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of everything that is sent inside a message."""


class Hints(Part, frozen=True):
    """What the client says about its turn (`nvext.agent_hints`, `cache_control`). Zero and empty
    mean unsaid."""

    priority: int = 0
    strict_priority: int = 0
    osl: int = 0
    latency_sensitivity: float = 0.0
    speculative_prefill: bool = False
    program_id: str = ""
    context_type: str = ""
    cache_ttl_s: float = 0.0


class KvAction(Part, frozen=True):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHints(Part, frozen=True):
    """The public KvHint envelope 0.1 (vLLM RFC 53421, SGLang RFC 36224); advisory, unknown actions
    are forwarded."""

    actions: list[KvAction]
    message_id: str
    protocol_version: str = "0.1"


class Usage(Part, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


class Sampling(Part, frozen=True):
    """How the engine picks tokens. Stop *strings* stay in the frontend; token ids to stop at come
    here."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    structured: dict[str, Any] | None = None
    """Grammar for structured output, in the engine's own terms."""


class Ring(Part, frozen=True):
    """`members` are (router id, endpoint); see `fermata.core.ring`."""

    epoch: int
    members: list[tuple[str, str]]


class SessionRecord(Part, frozen=True):
    """What a worker remembers of a session whose KV it has, so that routers may forget."""

    session: SessionId
    parent: SessionId
    key: RoutingKey
    context_tokens: int
    idle_s: float
    """Since the last turn's finish; 0 with a turn in flight."""
    finish_class: Literal["tool", "human"] = "tool"
    reasoning: bool = False
    paused: bool = False
    worker: WorkerId = WorkerId("")
    """In a Handover: the slot it is bound to. A worker's own records are of the rank they come with."""
    rank: int = 0


class Batch(Message, frozen=True, tag=1):
    """What became ready for one destination in one loop turn: the inner messages' frames follow,
    `sizes[i]` each."""

    sizes: list[int]


class Fault(Message, frozen=True, tag=2):
    """Typed answer to a message that could not be taken."""

    code: Literal[
        "malformed",
        "unknown_version",
        "oversized",
        "wrong_role",
        "wrong_type",
        "unknown_peer",
        "internal",
    ]
    message: str


class Drain(Message, frozen=True, tag=3):
    """Operator -> worker, router: take nothing new, finish or hand back what runs, then say
    drained."""

    deadline_s: float


class DrainStatus(Message, frozen=True, tag=4):
    """Worker, router -> operator and routers. Safe to delete only when drained."""

    state: Literal["serving", "draining", "drained"]
    running: int


class StatusRequest(Message, frozen=True, tag=5):
    """Anyone with a link -> router, worker."""


class Status(Message, frozen=True, tag=6):
    """Counters and gauges by name, and facts that are no numbers (`policy`, `state`)."""

    id: str
    numbers: dict[str, float]
    facts: dict[str, str]


class ProgramRow(Part, frozen=True):
    """One program, as people look at it."""

    session: SessionId
    parent: SessionId
    phase: Literal["reasoning", "acting"]
    state: Literal["new", "active", "paused"]
    worker: WorkerId
    """Empty: it holds no slot."""
    rank: int
    context_tokens: int
    steps: int
    turns: int
    """In flight, waiting ones included."""
    idle_s: float
    """Since its last turn's finish; 0 with a turn in flight."""
    waited_s: float
    """Of its waiting turn that came first; 0 without one."""
    reason: str
    """What that turn waits for, as in a Hold."""
    gap: Literal["tool", "human"]
    is_marked: bool = False
    """To be paused when its turn ends."""
    is_final: bool = False
    """Ends with its turn."""
    inferred: bool = False


class Programs(Message, frozen=True, tag=7):
    """Router -> operator, frontend: a page of programs in order of their session."""

    request: RequestId
    programs: list[ProgramRow]
    total: int
    """In the router's table, those on other pages and of other prefixes included."""
    paused: int
    """Of `total`."""
    more: bool
    """Ask again, after the last one here."""


class Candidate(Part, frozen=True):
    """A slot that could take the turn, as it was scored."""

    worker: WorkerId
    rank: int
    has_room: bool
    score: float | None
    """Cost, the lowest wins; None where the policy scored none."""
    matched: dict[str, int]
    """Routing blocks of the prompt per tier, promised ones as on the device."""
    shared_blocks: int
    """Of the prompt, those that running turns hold there anyway."""


class Decision(Part, frozen=True):
    """What became of a turn, or of its wait, at one moment."""

    age_s: float
    """Since then."""
    request: RequestId
    attempt: int
    owner: OwnerId
    session: SessionId
    what: Literal["grant", "hold", "reject", "moved"]
    reason: str = ""
    """Of a hold or a rejection; of a grant why this slot: `cost`, `affinity`, `program`, `only`."""
    policy: str = ""
    policy_revision: int = 0
    input_tokens: int = 0
    worker: WorkerId = WorkerId("")
    rank: int = 0
    waited_s: float = 0.0
    """Of a hold: until its deadline."""
    candidates: list[Candidate] = []


class Explanation(Message, frozen=True, tag=8):
    """Router -> operator, frontend. Newest first; only what its bounded memory still has."""

    request: RequestId
    decisions: list[Decision]
    policy: str
    policy_revision: int
