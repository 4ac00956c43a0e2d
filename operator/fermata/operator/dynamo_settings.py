"""What Dynamo's router can be told, by name, and where that goes in a RouterPolicy; or why it goes nowhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    path: str
    """In the policy's spec."""
    kind: str = "number"


@dataclass(frozen=True, slots=True)
class Mode:
    scheduler: str
    why: str = ""
    """It is not quite the same."""


MODES = {
    "kv": Mode("KVAware"),
    "round-robin": Mode("RoundRobin"),
    "least-loaded": Mode("LeastLoaded"),
    "power-of-two": Mode("LeastLoaded", "all loads are known here, two need not be drawn"),
    "random": Mode("LeastLoaded", "it spreads the same, by load in place of chance"),
}

ORDERS = {"fcfs": "FCFS", "lcfs": "LCFS", "wspt": "WSPT"}

RENAMED = {
    "kv_overlap_score_credit": "overlap_score_credit",
    "kv_overlap_score_weight": "overlap_score_credit",
    "kv_overlap_score_credit_decay": "overlap_score_credit_decay",
    "prune_target_ratio": "prune_target",
}
"""After `router_` and dashes are gone: older and longer names of the same."""

_WEIGHTS = "scheduler.kvAware.tierWeights"
SETTINGS = {
    "overlap_score_credit": Setting(f"{_WEIGHTS}.device"),
    "host_cache_hit_weight": Setting(f"{_WEIGHTS}.host"),
    "disk_cache_hit_weight": Setting(f"{_WEIGHTS}.disk"),
    "shared_cache_multiplier": Setting(f"{_WEIGHTS}.shared"),
    "prefill_load_scale": Setting("scheduler.kvAware.prefillScale"),
    "decode_active_request_weight": Setting("scheduler.kvAware.decodeRequestWeight"),
    "temperature": Setting("scheduler.kvAware.temperature"),
    "kv_events": Setting("kv.events", "boolean"),
    "approximate_cache_policy": Setting("kv.approximate", "approximate"),
    "ttl_secs": Setting("kv.approximateTtl"),
    "queue_threshold": Setting("queue.threshold"),
    "queue_policy": Setting("queue.order", "order"),
    "session_affinity_ttl_secs": Setting("sessionAffinity.ttl"),
    "session_affinity_mode": Setting("sessionAffinity.mode", "affinity"),
    "active_decode_blocks_threshold": Setting("overload.decodeBlocks"),
    "active_prefill_tokens_threshold": Setting("overload.prefillTokenCount", "whole"),
    "active_prefill_tokens_threshold_frac": Setting("overload.prefillTokens"),
}

_AGENT = "scheduler.thunderAgent"
THUNDER_AGENT = {
    "pause_threshold": Setting(f"{_AGENT}.pauseThreshold"),
    "pause_target": Setting(f"{_AGENT}.pauseTarget"),
    "resume_hysteresis": Setting(f"{_AGENT}.resumeHysteresis"),
    "resume_timeout_seconds": Setting(f"{_AGENT}.resumeTimeout"),
    "scheduler_interval_seconds": Setting(f"{_AGENT}.tick"),
    "buffer_per_program": Setting(f"{_AGENT}.bufferTokens", "whole"),
    "session_retention_seconds": Setting("programs.idleTimeout"),
}

_ALWAYS = "that is always so here"
_SHARED = "routers share a ring: each session has one, and its state is in one place"
DROPPED = {
    # Parameters of its ThunderAgent.
    "acting_decay_tau_seconds": "idle programs count in full when one is resumed: decay overfills",
    "max_tracked_requests": "the table is bounded by itself, and forgets who was idle for longest",
    "shared_prefix_budget": "shared prefixes are always charged once a slot",
    "soft_demote_threshold": "a program is not slowed down before it is paused",
    "soft_demote_priority_jump": "a program is not slowed down before it is paused",
    "resume_priority_boost": "resumed turns come before new ones anyway",
    # Settings of its router.
    "overlap_score_credit_decay": "load counts on its own; the credit of a cached block stays",
    "track_active_blocks": _ALWAYS,
    "track_output_blocks": "expected output counts where a client says how long it will be (osl)",
    "track_prefill_tokens": _ALWAYS,
    "assume_kv_reuse": _ALWAYS,
    "replica_sync": _SHARED,
    "event_threads": "a router has one thread, and needs no other",
    "serve_indexer": _SHARED,
    "use_remote_indexer": _SHARED,
    "enable_session_prefix_index": "programs keep the chain of their last turn",
    "shared_cache_type": "workers say which tiers they have",
    "predicted_ttl_secs": "a grant promises its blocks until the worker's events have named them",
    "min_initial_workers": "turns wait for the first worker, 60 s at most",
    "reset_states": "a router that boots asks the workers what they hold",
    "policy_config": "give the file itself to be converted",
    "max_tree_size": "bounded by kv.indexBlocks, or by what a rank can hold",
    "prune_target": "bounded by kv.indexBlocks, or by what a rank can hold",
    "kv_cache_block_size": "routingBlockSize is a field of the AgentDeployment",
    # Sections of its policy file.
    "models": "one AgentDeployment serves one model; give each its own policy",
    "kv_hint_policy": "hints to engines are switched as a whole (kv.hints)",
}
