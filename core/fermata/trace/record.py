"""`dynamo.request.trace.v1`: the public fields under their public names, so that traces interchange, then ours.

Times of day are Unix milliseconds of the wall; durations are milliseconds of the deployment's clock. A reader
ignores what it does not know, and every field but the schema has a default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from xxhash import xxh3_64_intdigest

SCHEMA = "dynamo.request.trace.v1"

EventType = Literal["request_end", "tool_start", "tool_end", "tool_error", "request_payload"]
InputTrigger = Literal["user_message", "tool_result", "other"]


class Part(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    pass


class AgentContext(Part, frozen=True):
    session_id: str
    parent_session_id: str | None = None
    session_final: bool = False
    input_trigger: InputTrigger = "other"
    inferred: bool = False
    """Ours: the session was recognised by its prompt, not named by the client."""


class WorkerRef(Part, frozen=True):
    """Numbers, as the public form has them; `serving_worker_id` has our name."""

    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    decode_worker_id: int | None = None
    decode_dp_rank: int | None = None


class Replay(Part, frozen=True):
    """What a simulation needs in the prompt's stead: the sequence hash of each full block."""

    trace_block_size: int = 0
    input_length: int = 0
    input_sequence_hashes: list[int] = []


class FinishMetadata(Part, frozen=True):
    finish_reason: str | None = None
    backend_finish_reason: str | None = None
    stop_reason: str | int | None = None
    tool_calls: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []


class RequestEnd(Part, frozen=True):
    request_id: str
    x_request_id: str | None = None
    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    request_received_ms: int = 0
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    avg_itl_ms: float | None = None
    kv_hit_rate: float | None = None
    kv_transfer_estimated_latency_ms: float | None = None
    queue_depth: int | None = None
    worker: WorkerRef | None = None
    replay: Replay | None = None
    finish_reason_metadata: FinishMetadata | None = None
    router_admission_wait_ms: float | None = None
    """Ours from here on, the first four under the names proposed upstream. How long routers held the turn."""
    router_hold_reason: str | None = None
    proxy_instance_id: str | None = None
    serving_worker_id: str | None = None
    lease: int | None = None
    policy_revision: int | None = None
    attempts: int = 1
    migrations: int = 0
    outcome: str = ""
    """`finished`, `cancelled`, or the code of the error the client got."""


class TraceRecord(Part, frozen=True):
    schema: str = SCHEMA
    event_type: EventType = "request_end"
    event_time_unix_ms: int = 0
    event_source: str = "dynamo"
    agent_context: AgentContext | None = None
    request: RequestEnd | None = None
    tool: dict[str, Any] | None = None
    payload: dict[str, Any] | None = None


class TraceLine(Part, frozen=True):
    timestamp: int
    """Milliseconds since the sink was opened."""
    event: TraceRecord


def worker_number(name: str) -> int:
    """The public form numbers workers; equal names get equal numbers, exact in a JSON reader's double."""
    return xxh3_64_intdigest(name.encode()) >> 11
