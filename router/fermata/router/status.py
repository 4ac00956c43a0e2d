"""The router in numbers: for Status, for metrics, for people. All are kept anyway, but for sums over slots."""

from __future__ import annotations

from fermata.router.state import RouterState


def numbers(state: RouterState, now: float) -> dict[str, float]:
    loads = list(state.loads.all())
    index = state.index
    found: dict[str, float] = {
        "leases": len(state.leases),
        "promises": len(state.leases) + state.leases.promises.lingering,
        "turns_waiting": len(state.waiting),
        "workers_ready": state.workers.ready_count,
        "workers_known": len(state.workers),
        "owners": len(state.owners),
        "fences": len(state.owners.fences),
        "index_blocks": index.blocks,
        "index_pairs": index.pairs,
        "index_refused_blocks": index.refused_blocks,
        "index_absent_removals": index.absent_removals,
        "index_contradictions": index.contradictions,
        "approximate_records": len(state.approximate),
        "approximate_aged_out": state.approximate.aged_out,
        "approximate_displaced": state.approximate.displaced,
        "workers_without_events": sum(not worker.sends_events for worker in state.workers),
        "sessions": len(state.affinity),
        "policy_revision": state.policy_revision,
        "ring_epoch": state.ring.epoch,
        "pending_prefill_tokens": sum(load.pending_tokens for load in loads),
        "decode_blocks": sum(state.leases.decode_blocks(load.slot) for load in loads),
        "slots_busy": (state.loads.busy | state.loads.above[0]).bit_count(),
        "uptime_s": now - state.booted_at,
        "leases_begun": state.leases.begun,
    }
    for how, count in state.leases.ended.items():
        found[f"leases_{how}"] = count
    for name, count in state.counters.items():
        found[name] = count
    return found
