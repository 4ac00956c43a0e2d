"""One level-triggered step from what runs to what should run.

Pure: called again after every change, with everything that is known, until it returns nothing. So a step that
failed, an edit in the middle of a rollout and a process that died need no code of their own.

What it holds to: a worker of an old revision keeps serving until all of the new one are ready; nothing that serves
is stopped before what replaces it can; ids and ports of routers and frontends stay; a draining worker's id is
not given to another before it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from fermata.operator.plan import GroupPlan, Plan, worker_id

Kind = Literal["router", "worker", "frontend"]


class Phase(Enum):
    STARTING = "starting"
    """Started, or waiting to be started again after it died."""
    READY = "ready"
    LEAVING = "leaving"
    """Draining or stopping: never comes back."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process or pod as observed."""

    id: str
    kind: Kind
    revision: str
    shared: str
    phase: Phase
    served: bool
    """It has been ready since it started. That it is not now may be another's fault: a router that restarts makes
    every worker look unready."""
    group: str = ""
    """Of a worker."""


@dataclass(frozen=True, slots=True)
class Start:
    id: str
    kind: Kind
    revision: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let it finish what it has, then end it."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End it: it serves nothing that waits for it, or it can not be replaced while it runs."""

    id: str


Step = Start | Drain | Stop


def reconcile(plan: Plan, members: Sequence[Member], *, ring: Iterable[str]) -> list[Step]:
    """`ring` names the routers that every router has acknowledged as the ring; others own no key any more."""
    outdated = [m for m in members if m.shared != plan.shared]
    if outdated:
        # Old and new would disagree on tokens, hashes or time: nothing new starts before all of them are gone.
        return [_end(m) for m in outdated if m.phase is not Phase.LEAVING]
    steps: list[Step] = []
    steps += _routers(plan, [m for m in members if m.kind == "router"], set(ring))
    workers = [m for m in members if m.kind == "worker"]
    for name in {**plan.groups, **{m.group: None for m in workers}}:
        group = [m for m in workers if m.group == name]
        steps += _group(name, plan.groups.get(name), group, taken={m.id for m in workers})
    steps += _frontends(plan, [m for m in members if m.kind == "frontend"])
    return steps


def next_ring(plan: Plan, members: Sequence[Member], *, current: Sequence[str]) -> list[str]:
    """Routers that should own keys: all planned ones at first, later a new one only once it is ready."""
    ready = {m.id for m in members if m.kind == "router" and m.phase is Phase.READY}
    planned = plan.router_ids()
    return [name for name in planned if not current or name in current or name in ready]


def is_settled(plan: Plan, members: Sequence[Member], *, ring: Iterable[str]) -> bool:
    """All of the plan runs and is ready, and nothing else does."""
    everything_ready = all(m.phase is Phase.READY for m in members)
    return everything_ready and not reconcile(plan, members, ring=ring)


def _end(member: Member) -> Step:
    """A worker may have turns to finish or to hand back; so may one that is not ready any more."""
    return Drain(member.id) if member.kind == "worker" else Stop(member.id)


def _routers(plan: Plan, routers: list[Member], ring: set[str]) -> list[Step]:
    present = {m.id for m in routers}
    planned = plan.router_ids()
    steps: list[Step] = [
        Start(name, "router", plan.shared) for name in planned if name not in present
    ]
    for member in routers:
        surplus = member.id not in planned and member.id not in ring
        if surplus and member.phase is not Phase.LEAVING:
            steps.append(Drain(member.id))
    return steps


def _group(
    name: str, plan: GroupPlan | None, group: list[Member], *, taken: set[str]
) -> list[Step]:
    staying = [m for m in group if m.phase is not Phase.LEAVING]
    revision = plan.revision if plan else ""
    replicas = plan.replicas if plan else 0
    current = sorted((m for m in staying if m.revision == revision), key=_keep_first)
    stale = [m for m in staying if m.revision != revision]
    steps: list[Step] = [
        Start(worker, "worker", revision, name)
        for worker in _free_ids(name, replicas - len(current), taken)
    ]
    steps += [Drain(m.id) for m in current[replicas:]]
    replaced = len(current) >= replicas and all(m.phase is Phase.READY for m in current[:replicas])
    steps += [Drain(m.id) for m in stale if replaced or not m.served]
    return steps


def _keep_first(member: Member) -> tuple[bool, int]:
    """Of too many, one that is not ready goes before one that is, the youngest first."""
    return member.phase is not Phase.READY, int(member.id.rpartition("-")[2])


def _free_ids(group: str, count: int, taken: set[str]) -> list[str]:
    found: list[str] = []
    ordinal = 0
    while len(found) < count:
        candidate = worker_id(group, ordinal)
        if candidate not in taken:
            found.append(candidate)
        ordinal += 1
    return found


def _frontends(plan: Plan, frontends: list[Member]) -> list[Step]:
    planned = plan.frontend.ids()
    revision = plan.frontend.revision
    present = {m.id for m in frontends}
    steps: list[Step] = [
        Start(name, "frontend", revision) for name in planned if name not in present
    ]
    staying = [m for m in frontends if m.phase is not Phase.LEAVING]
    steps += [Stop(m.id) for m in staying if m.id not in planned]
    # A port has one owner, so a frontend is replaced in place, one at a time and only while the others serve.
    stale = [m for m in staying if m.id in planned and m.revision != revision]
    others_serve = len(staying) == len(frontends) and not steps
    for member in stale:
        if not member.served:
            steps.append(Stop(member.id))
        elif others_serve and all(m.phase is Phase.READY for m in staying):
            steps.append(Stop(member.id))
            break
    return steps
