"""Our own walk over the specs and msgspec's conversion give one verdict; ours adds the fix."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from fermata.core.spec import AgentDeployment, RouterPolicy
from fermata.core.spec.check import MAX_INTEGER, check, nearest
from fermata.core.spec.document import dotted, parse_path

DEPLOYMENT = {
    "apiVersion": "fermata.dev/v1alpha1",
    "kind": "AgentDeployment",
    "metadata": {"name": "demo", "labels": {"a": "b"}},
    "spec": {
        "model": {"name": "m", "aliases": ["x"], "contextLength": 10},
        "routingBlockSize": 64,
        "frontend": {"apiKeys": {"k": "t"}, "trace": {"enabled": True}},
        "clock": {"speedup": 2.0},
        "workers": [
            {
                "name": "sim",
                "role": "Aggregated",
                "replicas": None,
                "engineArgs": {"x": [1, {"y": None}]},
                "simulated": {"watermark": 0.5, "responder": {"type": "Lorem", "tokens": 3}},
            }
        ],
    },
}
POLICY = {
    "apiVersion": "fermata.dev/v1alpha1",
    "kind": "RouterPolicy",
    "metadata": {"name": "p"},
    "spec": {
        "scheduler": {
            "type": "KVAware",
            "kvAware": {"balance": 0.2, "tierWeights": {"host": 0.5}},
            "thunderAgent": {"pauseOrder": "IdlestFirst", "bufferTokens": 5},
        },
        "queue": {"threshold": 1.5, "limit": 3, "fairWait": 10},
        "leases": {"liveness": {"heartbeat": 1}},
        "kv": {"events": False},
    },
}

VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.integers(MAX_INTEGER - 1, MAX_INTEGER),
    st.floats(-2.0, 2000.0, allow_nan=False),
    st.sampled_from(
        ["", "a", "sim", "-a", "a-", "A", "a" * 64, "KVAware", "Echo", "Lorem", "Script"]
    ),
    st.just([]),
    st.just({}),
    st.sampled_from([{"type": "Echo"}, {"type": "Script"}, {"type": "Lorem", "tokens": 0}]),
)
KEYS = ["name", "type", "replicas", "ttl", "spec", "tokens", "path", "workers", "x"]


def spots(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path]
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        found += spots(item, (*path, key))
    return found


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def without(value: Any, path: tuple[str | int, ...]) -> Any:
    parent = changed(value, (), value)
    for part in path[:-1]:
        parent = parent[part]
    kept = (
        {k: v for k, v in parent.items() if k != path[-1]}
        if isinstance(parent, dict)
        else parent[:-1]
    )
    return changed(value, path[:-1], kept)


@st.composite
def edits(draw: st.DrawFn, base: dict[str, Any]) -> Any:
    """A good resource with a few places overwritten, dropped or added."""
    value: Any = base
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(spots(value)))
        match draw(st.sampled_from(["overwrite", "drop", "add"])):
            case "overwrite":
                value = changed(value, path, draw(VALUES))
            case "drop" if path:
                value = without(value, path)
            case _:
                target = value
                for part in path:
                    target = target[part]
                if isinstance(target, dict):
                    key = draw(st.sampled_from(KEYS))
                    value = changed(value, path, {**target, key: draw(VALUES)})
    return value


def verdicts(value: Any, kind: type[Any]) -> tuple[bool, bool]:
    problems = list(check(value, inspect.type_info(kind)))
    assert all(problem.what and problem.fix for problem in problems)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return not problems, False
    return not problems, True


@pytest.mark.parametrize(("kind", "base"), [(AgentDeployment, DEPLOYMENT), (RouterPolicy, POLICY)])
def test_the_walk_and_the_conversion_give_one_verdict(
    kind: type[Any], base: dict[str, Any]
) -> None:
    seen = {True: 0, False: 0}

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(edits(base))
    def run(value: Any) -> None:
        ours, theirs = verdicts(value, kind)
        assert ours == theirs
        seen[ours] += 1

    run()
    assert min(seen.values()) >= 40, f"the edits must make good and bad resources, made {seen}"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1 << 70])
def test_numbers_that_no_json_can_carry_are_refused(value: float) -> None:
    timing = {"prefillLinear": value} if isinstance(value, float) else {}
    simulated = {"timing": timing, "kvBlocks": 1 if timing else value}
    bad = changed(DEPLOYMENT, ("spec", "workers", 0, "simulated"), simulated)

    (problem,) = check(bad, inspect.type_info(AgentDeployment))

    assert problem.path[-1] in {"prefillLinear", "kvBlocks"}


def test_a_type_without_a_rule_is_noticed_rather_than_taken() -> None:
    with pytest.raises(NotImplementedError, match="no check for"):
        list(check(b"", inspect.type_info(bytes)))


def test_the_nearest_word_ignores_case_underscores_and_units() -> None:
    known = ["resumeTimeout", "pauseThreshold", "tick"]
    assert nearest("resume_timeout_s", known) == "resumeTimeout"
    assert nearest("PAUSETHRESHOLD", known) == "pauseThreshold"
    assert nearest("pausTreshold", known) == "pauseThreshold"
    assert nearest("completelyDifferent", known) is None


def test_a_path_reads_back_as_it_was_written() -> None:
    path = ("spec", "workers", 0, "simulated", "kvBlocks")
    assert dotted(path) == "spec.workers[0].simulated.kvBlocks"
    assert parse_path(dotted(path)) == path
