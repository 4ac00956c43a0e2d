"""Steps from what runs to what should run: nothing that serves ends before what replaces it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fermata.core.spec import RouterPolicySpec
from fermata.operator.plan import FrontendPlan, GroupPlan, Plan
from fermata.operator.reconcile import (
    Drain,
    Kind,
    Member,
    Phase,
    Start,
    Step,
    Stop,
    is_settled,
    next_ring,
    reconcile,
)


def a_plan(
    *,
    shared: str = "s1",
    routers: int = 1,
    frontends: int = 1,
    processes: int = 1,
    frontend_revision: str = "f1",
    **groups: tuple[int, str],
) -> Plan:
    return Plan(
        shared=shared,
        routers=routers,
        frontend=FrontendPlan(frontends, processes, frontend_revision),
        groups={name: GroupPlan(*group) for name, group in groups.items()},
        policy=RouterPolicySpec(),
    )


def member(name: str, revision: str, phase: Phase = Phase.READY, **changes: Any) -> Member:
    kind: Kind = "worker"
    if name.startswith("router"):
        kind = "router"
    elif name.startswith("frontend"):
        kind = "frontend"
    base = Member(
        id=name,
        kind=kind,
        revision=revision,
        shared="s1",
        phase=phase,
        served=phase is Phase.READY,
        group=name.rpartition("-")[0] if kind == "worker" else "",
    )
    return replace(base, **changes)


ROUTER = member("router-0", "s1")
FRONTEND = member("frontend-0", "f1")


def steps(plan: Plan, *workers: Member, ring: tuple[str, ...] = ("router-0",)) -> list[Step]:
    return reconcile(plan, [ROUTER, FRONTEND, *workers], ring=ring)


def test_from_nothing_everything_starts() -> None:
    assert reconcile(a_plan(sim=(2, "r1")), [], ring=[]) == [
        Start("router-0", "router", "s1"),
        Start("sim-0", "worker", "r1", "sim"),
        Start("sim-1", "worker", "r1", "sim"),
        Start("frontend-0", "frontend", "f1"),
    ]


def test_what_is_as_planned_is_left_alone() -> None:
    assert steps(a_plan(sim=(1, "r1")), member("sim-0", "r1")) == []
    assert steps(a_plan(sim=(1, "r1")), member("sim-0", "r1", Phase.STARTING)) == []


def test_more_replicas_take_the_lowest_free_numbers() -> None:
    found = steps(
        a_plan(sim=(3, "r1")), member("sim-1", "r1"), member("sim-0", "r1", Phase.LEAVING)
    )

    assert found == [Start("sim-2", "worker", "r1", "sim"), Start("sim-3", "worker", "r1", "sim")]


def test_fewer_replicas_drain_those_not_ready_first_and_then_the_youngest() -> None:
    workers = (member("sim-0", "r1", Phase.STARTING), member("sim-1", "r1"), member("sim-2", "r1"))

    assert steps(a_plan(sim=(2, "r1")), *workers) == [Drain("sim-0")]
    assert steps(a_plan(sim=(1, "r1")), *workers) == [Drain("sim-2"), Drain("sim-0")]
    assert steps(a_plan(sim=(0, "r1")), *workers) == [
        Drain("sim-1"),
        Drain("sim-2"),
        Drain("sim-0"),
    ]


def test_an_old_revision_drains_only_when_all_of_the_new_one_are_ready() -> None:
    old = (member("sim-0", "r1"), member("sim-1", "r1"))
    plan = a_plan(sim=(2, "r2"))

    assert steps(plan, *old) == [
        Start("sim-2", "worker", "r2", "sim"),
        Start("sim-3", "worker", "r2", "sim"),
    ]
    half = (member("sim-2", "r2"), member("sim-3", "r2", Phase.STARTING))
    assert steps(plan, *old, *half) == []
    assert steps(plan, *old, member("sim-2", "r2"), member("sim-3", "r2")) == [
        Drain("sim-0"),
        Drain("sim-1"),
    ]


def test_an_old_revision_that_never_served_need_not_wait() -> None:
    plan = a_plan(sim=(1, "r2"))

    assert Drain("sim-0") in steps(plan, member("sim-0", "r1", Phase.STARTING))


def test_a_router_that_restarts_makes_no_old_worker_drain() -> None:
    unseen = member("sim-0", "r1", Phase.STARTING, served=True)

    assert steps(a_plan(sim=(1, "r2")), unseen) == [Start("sim-1", "worker", "r2", "sim")]


def test_an_edit_taken_back_keeps_what_served_all_along() -> None:
    workers = (member("sim-0", "r1"), member("sim-1", "r2", Phase.STARTING))

    assert steps(a_plan(sim=(1, "r1")), *workers) == [Drain("sim-1")]


def test_a_group_that_left_the_manifest_drains() -> None:
    assert steps(a_plan(), member("sim-0", "r1")) == [Drain("sim-0")]


def test_a_change_of_what_all_share_ends_everything_before_anything_starts() -> None:
    plan = a_plan(shared="s2", sim=(1, "r2"))

    assert steps(plan, member("sim-0", "r1")) == [
        Stop("router-0"),
        Stop("frontend-0"),
        Drain("sim-0"),
    ]
    leaving = [replace(m, phase=Phase.LEAVING) for m in (ROUTER, FRONTEND)]
    assert reconcile(plan, leaving, ring=[]) == []
    assert len(reconcile(plan, [], ring=[])) == 3


def test_a_surplus_router_drains_only_after_the_ring_without_it_is_agreed() -> None:
    plan = a_plan(routers=1)
    both = [ROUTER, member("router-1", "s1"), FRONTEND]

    assert next_ring(plan, both, current=["router-0", "router-1"]) == ["router-0"]
    assert reconcile(plan, both, ring=["router-0", "router-1"]) == []
    assert reconcile(plan, both, ring=["router-0"]) == [Drain("router-1")]


def test_a_new_router_joins_the_ring_when_it_is_ready() -> None:
    plan = a_plan(routers=2)
    starting = [ROUTER, member("router-1", "s1", Phase.STARTING)]

    assert next_ring(plan, [], current=[]) == ["router-0", "router-1"], "a first start needs all"
    assert next_ring(plan, starting, current=["router-0"]) == ["router-0"]
    ready = [ROUTER, member("router-1", "s1")]
    assert next_ring(plan, ready, current=["router-0"]) == ["router-0", "router-1"]
    died = [ROUTER, member("router-1", "s1", Phase.STARTING)]
    assert next_ring(plan, died, current=["router-0", "router-1"]) == ["router-0", "router-1"]


def test_frontends_are_replaced_one_at_a_time() -> None:
    plan = a_plan(frontends=2, frontend_revision="f2")
    old = [member("frontend-0", "f1"), member("frontend-1", "f1")]

    assert reconcile(plan, [ROUTER, *old], ring=[]) == [Stop("frontend-0")]
    going = [replace(old[0], phase=Phase.LEAVING), old[1]]
    assert reconcile(plan, [ROUTER, *going], ring=[]) == []
    assert reconcile(plan, [ROUTER, old[1]], ring=[]) == [Start("frontend-0", "frontend", "f2")]
    starting = [member("frontend-0", "f2", Phase.STARTING), old[1]]
    assert reconcile(plan, [ROUTER, *starting], ring=[]) == []
    assert reconcile(plan, [ROUTER, member("frontend-0", "f2"), old[1]], ring=[]) == [
        Stop("frontend-1")
    ]


def test_a_frontend_too_many_stops() -> None:
    frontends = [FRONTEND, member("frontend-0.1", "f1")]

    assert reconcile(a_plan(), [ROUTER, *frontends], ring=[]) == [Stop("frontend-0.1")]


@dataclass
class Seen:
    settled: int = 0
    surged: int = 0
    reverted: int = 0
    anew: int = 0
    crashed: int = 0


SEEN = Seen()


class Rollout(RuleBasedStateMachine):
    """Random edits, crashes and progress; the fleet obeys the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = a_plan(sim=(2, "r1s1"), frontend_revision="f1s1")
        self.members: dict[str, Member] = {}
        self.history = ["r1"]

    def set(self, name: str, **changes: Any) -> None:
        self.members[name] = replace(self.members[name], **changes)

    def ready_workers(self) -> int:
        return sum(m.kind == "worker" and m.phase is Phase.READY for m in self.members.values())

    def edit(self, **changes: Any) -> None:
        wanted = {
            "shared": self.plan.shared,
            "routers": self.plan.routers,
            "frontends": self.plan.frontend.replicas,
            "frontend_revision": self.plan.frontend.revision,
            "sim": (self.plan.groups["sim"].replicas, self.plan.groups["sim"].revision),
        }
        self.plan = a_plan(**(wanted | changes))

    @rule(revision=st.sampled_from(["r1", "r2", "r3"]))
    def edit_the_group(self, revision: str) -> None:
        SEEN.reverted += revision in self.history and revision != self.history[-1]
        self.history.append(revision)
        self.edit(sim=(self.plan.groups["sim"].replicas, revision + self.plan.shared))

    @rule(replicas=st.integers(0, 3), routers=st.integers(1, 2), frontends=st.integers(1, 2))
    def scale(self, replicas: int, routers: int, frontends: int) -> None:
        sim = (replicas, self.plan.groups["sim"].revision)
        self.edit(sim=sim, routers=routers, frontends=frontends)

    @rule(revision=st.sampled_from(["f1", "f2"]))
    def edit_the_frontend(self, revision: str) -> None:
        self.edit(frontend_revision=revision + self.plan.shared)

    @rule(shared=st.sampled_from(["s1", "s2"]))
    def edit_what_all_share(self, shared: str) -> None:
        """Every revision contains the shared one, as in make_plan."""
        sim = self.plan.groups["sim"]
        self.edit(
            shared=shared,
            sim=(sim.replicas, sim.revision[:2] + shared),
            frontend_revision=self.plan.frontend.revision[:2] + shared,
        )

    @rule()
    def step(self) -> None:
        before = self.ready_workers()
        same_shared = all(m.shared == self.plan.shared for m in self.members.values())
        SEEN.anew += not same_shared
        workers = [m for m in self.members.values() if m.kind == "worker"]
        SEEN.surged += (
            same_shared and len({m.revision for m in workers if m.phase is Phase.READY}) > 1
        )
        for taken in reconcile(self.plan, list(self.members.values()), ring=self.plan.router_ids()):
            match taken:
                case Start(name, kind, revision, group):
                    assert name not in self.members, "an id in use is given to nobody else"
                    assert same_shared
                    self.members[name] = Member(
                        name, kind, revision, self.plan.shared, Phase.STARTING, False, group
                    )
                case Drain(name) | Stop(name):
                    assert self.members[name].phase is not Phase.LEAVING, "told once"
                    self.set(name, phase=Phase.LEAVING)
        if same_shared:
            wanted = self.plan.groups["sim"].replicas
            assert self.ready_workers() >= min(before, wanted), "a step never costs what is needed"

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        if self.members[name].phase is Phase.LEAVING:
            del self.members[name]
        else:
            self.set(name, phase=Phase.READY, served=True)

    @rule()
    def time_passes(self) -> None:
        for _ in range(2):
            self.step()
            self.everything_progresses()

    @rule()
    def everything_progresses(self) -> None:
        for name in list(self.members):
            if self.members[name].phase is Phase.LEAVING:
                del self.members[name]
            else:
                self.set(name, phase=Phase.READY, served=True)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        if self.members[name].phase is Phase.LEAVING:
            del self.members[name]
        else:
            self.set(name, phase=Phase.STARTING, served=False)
            SEEN.crashed += 1

    @invariant()
    def one_member_a_name(self) -> None:
        assert all(name == m.id for name, m in self.members.items())

    def teardown(self) -> None:
        """Left alone, every fleet arrives at its plan and stays there."""
        for _ in range(12):
            self.step()
            self.everything_progresses()
        members = list(self.members.values())
        assert is_settled(self.plan, members, ring=self.plan.router_ids())
        count = sum(m.kind == "worker" for m in members)
        assert count == self.plan.groups["sim"].replicas
        assert {m.revision for m in members if m.kind == "worker"} <= {
            self.plan.groups["sim"].revision
        }
        SEEN.settled += 1


def test_every_rollout_settles_and_never_costs_what_is_needed() -> None:
    """Random walks meet a rollout in the middle more or less often: more of them until each event was seen."""
    bounds = settings(max_examples=100, stateful_step_count=30, deadline=None)
    for _ in range(5):
        run_state_machine_as_test(Rollout, settings=bounds)
        if min(SEEN.surged, SEEN.reverted, SEEN.anew, SEEN.crashed) >= 3:
            break
    assert SEEN.settled >= 90, SEEN
    assert min(SEEN.surged, SEEN.reverted, SEEN.anew, SEEN.crashed) >= 3, SEEN
