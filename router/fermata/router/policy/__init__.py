"""Placement policies: which of the eligible slots takes a turn. One Protocol, one registry by scheduler type."""

from __future__ import annotations

from fermata.router.policy.kv_aware import KvAware
from fermata.router.policy.least_loaded import LeastLoaded
from fermata.router.policy.placement_policy import PlacementPolicy, Question, Scored
from fermata.router.policy.registry import placement_policy
from fermata.router.policy.round_robin import RoundRobin

__all__ = [
    "KvAware",
    "LeastLoaded",
    "PlacementPolicy",
    "Question",
    "RoundRobin",
    "Scored",
    "placement_policy",
]
