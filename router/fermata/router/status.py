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
        "expected_blocks": sum(load.expected_blocks for load in loads),
        "slots_busy": (state.loads.busy | state.loads.above[0]).bit_count(),
        "uptime_s": now - state.booted_at,
        "leases_begun": state.leases.begun,
    }
    found.update(_programs(state))
    found.update(_classes(state, now))
    for how, count in state.leases.ended.items():
        found[f"leases_{how}"] = count
    for name, count in state.counters.items():
        found[name] = count
    return found


def _classes(state: RouterState, now: float) -> dict[str, float]:
    """What waits for room, and how fast it went lately. Class names have no underscore, names of metrics no hyphen."""
    found: dict[str, float] = {}
    for each in state.waiting.classes:
        use, name = state.waiting.queue.use(each), each.name.replace("-", "_")
        found[f"queue_{name}_turns"] = use.turns
        found[f"queue_{name}_uncached_tokens"] = use.uncached_tokens
        found[f"queue_{name}_drained_a_second"] = state.overload.drain_rate(each, now)
    return found


def _programs(state: RouterState) -> dict[str, float]:
    table, occupancy = state.programs, state.programs.occupancy
    shares = [occupancy.use(s) / r.capacity for s, r in occupancy.rooms.items() if r.capacity]
    found: dict[str, float] = {
        "programs": len(table),
        "programs_created": table.created,
        "programs_paused": table.paused,
        "program_blocks": table.blocks,
        "charged_tokens": sum(occupancy.use(slot) for slot in occupancy.rooms),
        "share_tokens": state.shares.total,
        "occupancy_max": max(shares, default=0.0),
        "occupancy_mean": sum(shares) / len(shares) if shares else 0.0,
    }
    for why, count in table.ended.items():
        found[f"programs_ended_{why}"] = count
    for name, count in table.counters.items():
        found[f"program_{name}"] = count
    return found
