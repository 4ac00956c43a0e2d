"""A turn that ended, as its one trace record. Names, counts, times and hashes; no text of prompt or answer."""

from __future__ import annotations

from array import array

from fermata.core.ids import OwnerId
from fermata.frontend.intake import Farewell, Intent
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import Cancelled, Failed, Finished
from fermata.trace import (
    AgentContext,
    FinishMetadata,
    Replay,
    RequestEnd,
    TraceRecord,
    WorkerRef,
    worker_number,
)


def record_of(
    intent: Intent,
    turn: Turn,
    *,
    owner: OwnerId,
    model: str,
    received: float,
    received_unix_ms: int,
    now_unix_ms: int,
    reason: str,
    stop: str | None,
) -> TraceRecord:
    """`received` is on the turn's own clock, `reason` and `stop` what the client was told."""
    return TraceRecord(
        event_time_unix_ms=now_unix_ms,
        agent_context=_context(
            intent, session=intent.spec.session, inferred=intent.spec.inferred
        ),
        request=_request(
            intent, turn, owner=owner, model=model, received=received, received_unix_ms=received_unix_ms,
            reason=reason, stop=stop,
        ),
    )  # fmt: skip


def farewell_record(
    farewell: Farewell,
    *,
    owner: OwnerId,
    received: float,
    ended: float,
    received_unix_ms: int,
    now_unix_ms: int,
) -> TraceRecord:
    """Of a request that only ended its session: no tokens, no attempts."""
    return TraceRecord(
        event_time_unix_ms=now_unix_ms,
        agent_context=_context(farewell, session=farewell.who.session),
        request=RequestEnd(
            request_id=farewell.request,
            x_request_id=farewell.client_request_id or None,
            model=farewell.model,
            request_received_ms=received_unix_ms,
            total_time_ms=_ms(received, ended),
            finish_reason_metadata=FinishMetadata(finish_reason="stop"),
            proxy_instance_id=owner,
            attempts=0,
            outcome="finished",
        ),
    )


def _context(
    intent: Intent | Farewell, *, session: str, inferred: bool = False
) -> AgentContext | None:
    identity = intent.identity
    session = identity.session or session
    if not session:
        return None
    return AgentContext(
        session_id=session,
        parent_session_id=identity.parent or None,
        session_final=identity.final,
        input_trigger=intent.trigger,
        inferred=inferred,
    )


def _request(
    intent: Intent,
    turn: Turn,
    *,
    owner: OwnerId,
    model: str,
    received: float,
    received_unix_ms: int,
    reason: str,
    stop: str | None,
) -> RequestEnd:
    usage, times, grant = turn.usage, turn.times, turn.grant
    made = usage.completion_tokens
    return RequestEnd(
        request_id=turn.spec.request,
        x_request_id=intent.client_request_id or None,
        model=model,
        input_tokens=usage.prompt_tokens,
        output_tokens=made,
        cached_tokens=None if turn.cached_tokens < 0 else usage.cached_tokens,
        request_received_ms=received_unix_ms,
        prefill_wait_time_ms=_ms(received, times.granted),
        prefill_time_ms=_ms(times.granted, times.first_token),
        ttft_ms=_ms(received, times.first_token),
        total_time_ms=_ms(received, times.ended),
        avg_itl_ms=(times.last_token - times.first_token) * 1000 / (made - 1) if made > 1 else None,
        kv_hit_rate=usage.cached_tokens / usage.prompt_tokens if turn.cached_tokens >= 0 else None,
        worker=None if grant is None else _worker(grant.worker, grant.rank),
        replay=Replay(
            trace_block_size=turn.spec.block_size,
            input_length=usage.prompt_tokens,
            input_sequence_hashes=array("Q", turn.spec.hashes).tolist(),
        ),
        finish_reason_metadata=FinishMetadata(
            finish_reason=reason or None,
            backend_finish_reason=_backend_reason(turn),
            stop_reason=stop,
        ),
        router_admission_wait_ms=times.held * 1000,
        router_hold_reason=turn.hold_reason or None,
        proxy_instance_id=owner,
        serving_worker_id=None if grant is None else grant.worker,
        lease=None if grant is None else grant.lease,
        policy_revision=None if grant is None else grant.policy_revision,
        attempts=turn.attempt + 1,
        migrations=turn.migrations,
        outcome=_outcome(turn),
    )


def _worker(worker: str, rank: int) -> WorkerRef:
    number = worker_number(worker)
    return WorkerRef(
        prefill_worker_id=number, prefill_dp_rank=rank, decode_worker_id=number, decode_dp_rank=rank
    )


def _backend_reason(turn: Turn) -> str | None:
    return turn.outcome.reason if isinstance(turn.outcome, Finished) else None


def _outcome(turn: Turn) -> str:
    match turn.outcome:
        case Failed(error):
            return error.code
        case Cancelled():
            return "cancelled"
        case _:
            return "finished"


def _ms(start: float, end: float) -> float | None:
    """None where either has not happened."""
    return round((end - start) * 1000, 3) if start and end >= start else None
