"""The plan says what must be started anew when a manifest changes, and what must not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fermata.core.spec import AgentDeployment, Manifests, RouterPolicy
from fermata.operator.plan import Plan, frontend_replica, make_plan, revision_of


def manifests(policy: dict[str, Any] | None = None, **spec: Any) -> Manifests:
    base = {"model": {"name": "tiny"}, "workers": [{"name": "sim", "replicas": 2}, {"name": "big"}]}
    head = {"apiVersion": "fermata.dev/v1alpha1", "metadata": {"name": "demo"}}
    return Manifests(
        deployment=msgspec.convert(
            head | {"kind": "AgentDeployment", "spec": base | spec}, AgentDeployment
        ),
        policy=msgspec.convert(head | {"kind": "RouterPolicy", "spec": policy or {}}, RouterPolicy),
    )


def plan(policy: dict[str, Any] | None = None, **spec: Any) -> Plan:
    return make_plan(manifests(policy, **spec))


def test_the_plan_counts_what_the_manifest_asks_for() -> None:
    wanted = plan(router={"replicas": 2}, frontend={"replicas": 2, "processes": 2})

    assert wanted.router_ids() == ["router-0", "router-1"]
    assert wanted.frontend.ids() == ["frontend-0", "frontend-0.1", "frontend-1", "frontend-1.1"]
    assert [frontend_replica(name) for name in wanted.frontend.ids()] == [0, 0, 1, 1]
    assert {name: group.replicas for name, group in wanted.groups.items()} == {"sim": 2, "big": 1}


def test_a_group_left_to_an_autoscaler_gets_the_least_that_serves() -> None:
    assert plan(workers=[{"name": "sim", "replicas": None}]).groups["sim"].replicas == 1
    assert plan(workers=[{"name": "sim", "replicas": 0}]).groups["sim"].replicas == 0


def test_counts_and_the_policy_are_part_of_no_revision() -> None:
    before = plan()
    after = plan(
        policy={"scheduler": {"type": "RoundRobin"}},
        workers=[{"name": "sim", "replicas": 7}, {"name": "big", "replicas": 0}],
        frontend={"replicas": 3, "processes": 2},
        router={"replicas": 2},
    )

    assert after.shared == before.shared
    assert after.frontend.revision == before.frontend.revision
    assert {n: g.revision for n, g in after.groups.items()} == {
        n: g.revision for n, g in before.groups.items()
    }
    assert after.policy != before.policy


def test_a_change_of_one_group_moves_that_revision_only() -> None:
    before = plan()
    after = plan(workers=[{"name": "sim", "simulated": {"kvBlocks": 9}}, {"name": "big"}])

    assert after.groups["sim"].revision != before.groups["sim"].revision
    assert after.groups["big"].revision == before.groups["big"].revision
    assert (after.shared, after.frontend.revision) == (before.shared, before.frontend.revision)


def test_a_change_of_the_frontend_moves_no_worker() -> None:
    before, after = plan(), plan(frontend={"trace": {"enabled": True}})

    assert after.frontend.revision != before.frontend.revision
    assert (after.shared, after.groups) == (before.shared, before.groups)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "other"}},
        {"routingBlockSize": 128},
        {"clock": {"speedup": 10}},
        {"security": {"curve": True}},
    ],
)
def test_a_change_of_what_all_read_moves_every_revision(change: dict[str, Any]) -> None:
    before, after = plan(), plan(**change)

    assert after.shared != before.shared
    assert after.frontend.revision != before.frontend.revision
    assert all(after.groups[n].revision != before.groups[n].revision for n in before.groups)


def test_a_revision_does_not_depend_on_the_order_of_a_map() -> None:
    assert revision_of({"a": 1, "b": 2}) == revision_of({"b": 2, "a": 1}) != revision_of({"a": 1})
    assert len(revision_of("x")) == 8
