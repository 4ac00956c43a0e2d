"""What people ask a router: its programs, page by page, and why a turn went where it did. Nothing is changed by it."""

from __future__ import annotations

from heapq import nsmallest

from fermata.core.ids import WorkerId
from fermata.router.program import Program
from fermata.router.state import RouterState
from fermata.wire.messages import (
    ExplainRequest,
    Explanation,
    ProgramRow,
    Programs,
    ProgramsRequest,
)

MOST_ROWS = 1000
MOST_DECISIONS = 100


def programs(state: RouterState, asked: ProgramsRequest, now: float) -> Programs:
    """One page, ordered by session, so that pages neither repeat nor skip while programs come and go. O(programs)."""
    limit = min(max(1, asked.limit), MOST_ROWS)
    wanted = (
        program
        for program in state.programs
        if program.session > asked.after and program.session.startswith(asked.prefix)
    )
    found = nsmallest(limit + 1, wanted, key=lambda program: program.session)
    return Programs(
        request=asked.request,
        programs=[_row(state, program, now) for program in found[:limit]],
        total=len(state.programs),
        paused=state.programs.paused,
        more=len(found) > limit,
    )


def explanation(state: RouterState, asked: ExplainRequest, now: float) -> Explanation:
    return Explanation(
        request=asked.request,
        decisions=state.decisions.explain(
            request=asked.request,
            prefix=asked.prefix,
            limit=min(max(1, asked.limit), MOST_DECISIONS),
            now=now,
        ),
        policy=state.policy.scheduler.type,
        policy_revision=state.policy_revision,
    )


def _row(state: RouterState, program: Program, now: float) -> ProgramRow:
    slot = program.slot
    place = None if slot is None else state.seats[slot]
    since, reason = _wait(state, program)
    return ProgramRow(
        session=program.session,
        parent=program.parent,
        phase="reasoning" if program.is_reasoning else "acting",
        state="paused" if program.is_paused else "new" if program.is_new else "active",
        worker=WorkerId("") if place is None else place.worker,
        rank=0 if place is None else place.rank,
        context_tokens=program.context_tokens,
        steps=program.steps,
        turns=len(program.turns),
        idle_s=0.0 if program.is_reasoning else max(0.0, now - program.acting_since),
        waited_s=0.0 if since is None else max(0.0, now - since),
        reason=reason,
        gap=program.gap,
        is_marked=program.is_marked,
        is_final=program.is_final,
        inferred=program.inferred,
    )


def _wait(state: RouterState, program: Program) -> tuple[float | None, str]:
    """Since when its first waiting turn waits, and for what."""
    keys = [turn.key for turn in program.turns.values() if not turn.is_running]
    waiting = [each for key in keys if (each := state.waiting.get(*key)) is not None]
    first = min(waiting, key=lambda each: each.turn.since, default=None)
    return (None, "") if first is None else (first.turn.since, first.reason)
