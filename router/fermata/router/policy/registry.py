"""Scheduler type -> placement policy: the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from fermata.core.spec import SchedulerSpec
from fermata.router.policy.kv_aware import KvAware
from fermata.router.policy.least_loaded import LeastLoaded
from fermata.router.policy.placement_policy import PlacementPolicy
from fermata.router.policy.round_robin import RoundRobin


def _kv_aware(spec: SchedulerSpec, block_size: int, generator: Random) -> PlacementPolicy:
    return KvAware(spec.kv_aware, block_size=block_size, generator=generator)


_MAKERS: dict[str, Callable[[SchedulerSpec, int, Random], PlacementPolicy]] = {
    "RoundRobin": lambda spec, block_size, generator: RoundRobin(),
    "LeastLoaded": lambda spec, block_size, generator: LeastLoaded(generator),
    "KVAware": _kv_aware,
    # It decides when a program's turn may run; where, below its pause threshold, is KVAware's business.
    "ThunderAgent": _kv_aware,
}


def placement_policy(spec: SchedulerSpec, *, block_size: int, generator: Random) -> PlacementPolicy:
    """Policies that draw share the caller's generator, so that a switch leaves its sequence alone."""
    return _MAKERS[spec.type](spec, block_size, generator)
