"""What should run, from the manifests: counts, and a revision of everything whose change needs a new process.

Pure. A revision is a hash of the fields the process reads; a count is never part of one, so scaling keeps what
runs. Three kinds of change follow: the policy alone (pushed live), a worker group (new revision beside the old one,
which drains), and what all parts share (everything starts anew).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from fermata.core.spec import Manifests, RouterPolicySpec, WorkerGroupSpec


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One worker group."""

    replicas: int
    revision: str


@dataclass(frozen=True, slots=True)
class FrontendPlan:
    replicas: int
    processes: int
    """Of each replica, sharing its port."""
    revision: str

    def ids(self) -> list[str]:
        """`frontend-1`, and `frontend-1.2` for the third process of that replica."""
        return [frontend_id(i, p) for i in range(self.replicas) for p in range(self.processes)]


@dataclass(frozen=True, slots=True)
class Plan:
    shared: str
    """Revision of what every process reads."""
    routers: int
    frontend: FrontendPlan
    groups: dict[str, GroupPlan]
    policy: RouterPolicySpec

    def router_ids(self) -> list[str]:
        return [router_id(number) for number in range(self.routers)]


def make_plan(manifests: Manifests) -> Plan:
    spec = manifests.deployment.spec
    shared = revision_of(spec.model, spec.routing_block_size, spec.clock, spec.security)
    # Counts live in the plan itself. The rest of a frontend's or group's spec is what its processes read.
    frontend = msgspec.structs.replace(spec.frontend, replicas=1, processes=1)
    return Plan(
        shared=shared,
        routers=spec.router.replicas,
        frontend=FrontendPlan(
            replicas=spec.frontend.replicas,
            processes=spec.frontend.processes,
            revision=revision_of(shared, frontend),
        ),
        groups={group.name: _group_plan(group, shared) for group in spec.workers},
        policy=manifests.policy.spec,
    )


def _group_plan(group: WorkerGroupSpec, shared: str) -> GroupPlan:
    return GroupPlan(
        # Without an autoscaler, which null leaves the count to, one is the least that serves.
        replicas=1 if group.replicas is None else group.replicas,
        revision=revision_of(shared, msgspec.structs.replace(group, replicas=1)),
    )


def revision_of(*parts: object) -> str:
    """Equal for equal specs whatever the order of their maps; 8 hexadecimal digits."""
    raw = msgspec.json.encode(parts, order="deterministic")
    return f"{xxh3_64_intdigest(raw) >> 32:08x}"


def router_id(number: int) -> str:
    return f"router-{number}"


def worker_id(group: str, ordinal: int) -> str:
    return f"{group}-{ordinal}"


def frontend_id(replica: int, process: int) -> str:
    return f"frontend-{replica}" + (f".{process}" if process else "")


def frontend_replica(name: str) -> int:
    """The replica a frontend id belongs to, which decides its port."""
    return int(name.removeprefix("frontend-").partition(".")[0])
