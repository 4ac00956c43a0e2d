"""What people can ask a router: its programs, and why a turn went where it did."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fermata.core.ids import RequestId, SessionId, Slot, WorkerId
from fermata.core.spec import (
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
)
from fermata.router.decisions import MOST, MOST_OTHERS, Decisions, Granted, Other
from fermata.router.families import families
from fermata.router.load import SlotLoad
from fermata.router.metrics import RouterCollector
from fermata.router.wait_statistics import WaitStatistics
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

OPERATOR = Peer(wire.Role.OPERATOR, "operator", 1)
THUNDER = RouterPolicySpec(scheduler=SchedulerSpec(type="ThunderAgent"))
SMALL = {"kv_blocks": {"device": 80}}
"""1,280 tokens: 20 routing blocks."""


def programs(world: Any, **asked: Any) -> wire.Programs:
    (answer,) = world.say(OPERATOR, wire.ProgramsRequest(**asked))
    assert isinstance(answer, wire.Programs)
    return answer


def explain(world: Any, request: str = "", **asked: Any) -> wire.Explanation:
    (answer,) = world.say(OPERATOR, wire.ExplainRequest(RequestId(request), **asked))
    assert isinstance(answer, wire.Explanation)
    return answer


def finish(world: Any, frontend: Peer, grant: wire.Grant, prompt: int, output: int = 10) -> None:
    world.progress(frontend, grant.lease, "accepted")
    usage = wire.Usage(prompt, output)
    world.progress(frontend, grant.lease, "finished", usage=usage, output_tokens=output, gap="tool")


def test_a_program_is_listed_with_its_phase_its_place_and_its_steps(world: Any) -> None:
    world.worker("w0")
    frontend = world.frontend()
    grant = world.grant(frontend, "r", 1, 2, session=SessionId("s"), parent=SessionId("p"))
    (row,) = programs(world).programs
    assert (row.session, row.parent, row.phase, row.state) == ("s", "p", "reasoning", "active")
    assert (row.worker, row.rank, row.context_tokens, row.steps, row.turns) == ("w0", 0, 160, 0, 1)
    finish(world, frontend, grant, 160)
    world.now += 7
    (row,) = programs(world).programs
    assert (row.phase, row.context_tokens, row.steps, row.idle_s) == ("acting", 170, 1, 7.0)
    assert row.gap == "tool"


def test_pages_are_in_order_and_neither_repeat_nor_skip_while_programs_come_and_go(
    world: Any,
) -> None:
    world.worker("w0")
    frontend = world.frontend()
    for name in ["a/3", "a/1", "b/1", "a/2", "a/5"]:
        world.grant(frontend, name, session=SessionId(name))
    first = programs(world, request=RequestId("q"), prefix="a/", limit=2)
    assert [row.session for row in first.programs] == ["a/1", "a/2"]
    assert (first.request, first.total, first.more) == ("q", 5, True)
    world.grant(frontend, "new", session=SessionId("a/4"))
    world.say(
        frontend,
        wire.Progress([wire.LeaseProgress(0, "cancelled", request=RequestId("gone"))]),  # type: ignore[arg-type]
    )
    rest = programs(world, prefix="a/", after=first.programs[-1].session)
    assert [row.session for row in rest.programs] == ["a/3", "a/4", "a/5"]
    assert not rest.more
    assert programs(world, limit=0).more, "at least one"


def test_a_held_program_says_what_it_waits_for_and_since_when(make_world: Any) -> None:
    world = make_world(policy=THUNDER)
    world.worker("w0", **SMALL)
    frontend = world.frontend()
    world.grant(frontend, "r1", *range(1, 16), session=SessionId("big"))
    answer = world.route(frontend, "r2", *range(101, 110), session=SessionId("late"))
    assert isinstance(answer, wire.Hold)
    assert answer.reason == "admission"
    world.now += 3
    row = next(r for r in programs(world).programs if r.session == "late")
    assert (row.phase, row.state, row.worker) == ("reasoning", "new", "")
    assert (row.reason, row.waited_s) == ("admission", 3.0)


def test_a_turn_is_explained_by_its_candidates_their_scores_and_what_they_had_cached(
    world: Any,
) -> None:
    w0, _ = world.worker("w0"), world.worker("w1")
    world.stored(w0, 0, 1, 2, 3)
    frontend = world.frontend()
    world.grant(frontend, "r", 1, 2, 3, 4, session=SessionId("s"))
    said = explain(world, "r")
    assert (said.request, said.policy, said.policy_revision) == ("r", "KVAware", 0)
    (decision,) = said.decisions
    assert (decision.what, decision.reason, decision.worker) == ("grant", "cost", "w0")
    assert (decision.input_tokens, decision.session, decision.owner) == (288, "s", "f0")
    best, other = decision.candidates
    assert (best.worker, best.matched, best.has_room) == ("w0", {"device": 3}, True)
    # 4.5 blocks of input less 3 that are there, and 5 to decode on; or all of it.
    assert (best.score, other.score) == (1.5 + 5, 4.5 + 5)
    assert (other.worker, other.matched) == ("w1", {})


def test_affinity_and_a_single_candidate_are_named_as_the_reason(world: Any) -> None:
    world.worker("w0")
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", 1, session=SessionId("s"))
    assert explain(world, "r1").decisions[0].reason == "only"
    finish(world, frontend, grant, 96)
    world.worker("w1")
    world.grant(frontend, "r2", 1, session=SessionId("s"))
    (decision,) = explain(world, "r2").decisions
    assert (decision.reason, decision.worker) == ("affinity", "w0")
    assert [c.score for c in decision.candidates] == [None, None]


def test_a_wait_shows_each_reason_and_then_the_grant_with_the_time_it_took(make_world: Any) -> None:
    world = make_world(policy=RouterPolicySpec(queue=QueueSpec(threshold_tokens=100)))
    frontend = world.frontend()
    assert isinstance(world.route(frontend, "r", *range(20)), wire.Hold)
    world.now += 2
    world.worker("w0")
    world.worker("w1", incarnation=2)
    busy = [world.route(frontend, f"b{i}", *range(100 * i, 100 * i + 20)) for i in (1, 2)]
    assert [type(b) for b in busy].count(wire.Hold) >= 1
    decisions = explain(world, "r").decisions
    assert [d.what for d in decisions] == ["grant", "hold"]
    assert decisions[0].waited_s == 2.0
    assert decisions[1].reason == "no_worker"
    assert decisions[1].age_s == 2.0
    last = explain(world, limit=1).decisions
    assert len(last) == 1
    assert last[0].what == "hold"
    assert last[0].reason == "queue"


def test_a_refusal_and_a_move_are_remembered(make_world: Any) -> None:
    world = make_world()
    world.worker("w0")
    frontend = world.frontend()
    world.route(frontend, "r", model="nobody")
    (decision,) = explain(world, "r").decisions
    assert (decision.what, decision.reason) == ("reject", "not_found: no model 'nobody' here")
    ring = wire.Ring(2, [("router-1", "tcp://b")])
    world.set_policy(RouterPolicySpec(), ring=ring)
    assert isinstance(world.route(frontend, "m"), wire.Moved)
    assert explain(world, "m").decisions[0].what == "moved"


def test_a_tenant_sees_its_own_and_nothing_else(world: Any) -> None:
    world.worker("w0")
    frontend = world.frontend()
    world.grant(frontend, "r1", session=SessionId("a/s"))
    world.grant(frontend, "r2", session=SessionId("b/s"))
    assert [d.request for d in explain(world, prefix="a/").decisions] == ["r1"]
    assert explain(world, "r2", prefix="a/").decisions == []
    assert [row.session for row in programs(world, prefix="b/").programs] == ["b/s"]


def test_a_decision_keeps_the_names_that_slots_had(world: Any) -> None:
    w0 = world.worker("w0")
    frontend = world.frontend()
    world.grant(frontend, "r")
    world.say(w0, wire.Bye(1))
    world.worker("w9")
    assert [c.worker for c in explain(world, "r").decisions[0].candidates] == ["w0"]


def test_thunder_agent_names_the_program_where_its_admission_left_one_slot(
    make_world: Any,
) -> None:
    world = make_world(policy=THUNDER)
    world.worker("w0", **SMALL)
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", *range(1, 14), session=SessionId("s"))
    finish(world, frontend, grant, 13 * 64 + 32)
    world.worker("w1", **SMALL)
    held = world.grant(frontend, "r2", *range(201, 215), session=SessionId("t"))
    assert held.worker == "w1"
    assert explain(world, "r2").decisions[0].reason == "program"


def route(request: str, session: str = "") -> wire.Route:
    return wire.Route(RequestId(request), 0, "k", 0, "m", 10, 10, session=SessionId(session))  # type: ignore[arg-type]


def granted(request: str, at: float, **fields: Any) -> Granted:
    settings: dict[str, Any] = {
        "at": at, "owner": "f", "route": route(request), "slot": 0, "waited_s": 0.0, "eligible": 1, "free": 1,
        "preferred": None, "admitted": False, "match": {}, "shared": {}, "scored": (), "costs": (),
        "names": {0: Slot(WorkerId("w"), 0)}, "policy": "KVAware", "revision": 1,
    }  # fmt: skip
    return Granted(**(settings | fields))


def test_the_memory_is_bounded_and_holds_do_not_push_out_grants() -> None:
    decisions = Decisions()
    for at in range(MOST + 10):
        decisions.granted(granted(f"g{at}", float(at)))
    for at in range(MOST_OTHERS + 10):
        decisions.other(Other(1e6 + at, "f", route(f"h{at}"), "hold", "queue", 60.0, "KVAware", 1))
    assert len(decisions) == MOST + MOST_OTHERS
    kept = decisions.explain(request=RequestId("g10"), prefix="", limit=10, now=1e7)
    assert [d.what for d in kept] == ["grant"]
    assert decisions.explain(request=RequestId("g9"), prefix="", limit=10, now=1e7) == []
    newest = decisions.explain(request=RequestId(""), prefix="", limit=2, now=1e7)
    assert [d.request for d in newest] == [f"h{MOST_OTHERS + 9}", f"h{MOST_OTHERS + 8}"]


def test_what_was_decided_in_one_moment_keeps_its_order() -> None:
    decisions = Decisions()
    decisions.other(Other(5.0, "f", route("r"), "hold", "queue", 60.0, "KVAware", 1))
    decisions.granted(granted("r", 5.0))
    found = decisions.explain(request=RequestId("r"), prefix="", limit=10, now=6.0)
    assert [d.what for d in found] == ["grant", "hold"]


def test_a_policy_that_weighs_nothing_is_the_reason_itself() -> None:
    decisions = Decisions()
    names = {i: Slot(WorkerId(f"w{i}"), 0) for i in range(2)}
    decisions.granted(granted("r", 1.0, eligible=7, free=3, names=names, policy="RoundRobin"))
    (found,) = decisions.explain(request=RequestId("r"), prefix="", limit=1, now=1.0)
    assert found.reason == "policy"
    assert [(c.worker, c.has_room) for c in found.candidates] == [
        ("?", False),
        ("w0", True),
        ("w1", True),
    ]


def test_remembering_a_decision_formats_nothing_and_copies_nothing() -> None:
    """Counted, not timed: all that is kept is what the decision had in hand."""
    decisions = Decisions()
    loads = [SlotLoad(slot, 1, 1, 1, 1.0) for slot in range(64)]
    costs = [float(slot) for slot in range(64)]
    match, names = {"device": {0: 3}}, {slot: Slot(WorkerId("w"), slot) for slot in range(64)}
    one = granted("r", 1.0, scored=loads, costs=costs, match=match, names=names)
    decisions.granted(one)
    ((_, kept),) = decisions._grants
    assert kept is one
    for field, given in (("scored", loads), ("costs", costs), ("match", match), ("names", names)):
        assert getattr(kept, field) is given


def test_waits_are_counted_by_reason_and_by_length() -> None:
    waits = WaitStatistics()
    waits.held("queue")
    for seconds in (0.05, 0.1, 3.0, 1e6):
        waits.granted("queue", seconds)
    assert waits.holds["queue"] == 1
    assert waits.sums_s["queue"] == pytest.approx(1_000_003.15)
    assert [i for i, n in enumerate(waits.counts["queue"]) for _ in range(n)] == [0, 0, 4, 12]


def scrape(world: Any) -> str:
    registry = CollectorRegistry()
    collector = RouterCollector(lambda: (world.numbers, list(families(world.router.state))))
    registry.register(collector)
    return generate_latest(registry).decode()


def test_a_scrape_shows_waits_by_reason_and_each_slot_s_occupancy(make_world: Any) -> None:
    world = make_world(policy=THUNDER)
    frontend = world.frontend()
    world.route(frontend, "r", *range(1, 5), session=SessionId("s"))
    world.now += 3
    world.worker("w0", **SMALL)
    text = scrape(world)
    assert 'fermata_router_turns_held_total{reason="no_worker"} 1.0' in text
    assert 'fermata_router_wait_seconds_bucket{le="2.0",reason="no_worker"} 0.0' in text
    assert 'fermata_router_wait_seconds_bucket{le="5.0",reason="no_worker"} 1.0' in text
    assert 'fermata_router_wait_seconds_count{reason="no_worker"} 1.0' in text
    assert 'fermata_router_wait_seconds_sum{reason="no_worker"} 3.0' in text
    assert 'fermata_router_slot_capacity_tokens{rank="0",worker="w0"} 1280.0' in text
    assert 'fermata_router_slot_programs{rank="0",worker="w0"} 1.0' in text
    use = world.router.state.programs.occupancy.use(0)
    assert use == 4 * 64 + 32 + 100
    assert f'fermata_router_slot_occupancy{{rank="0",worker="w0"}} {use / 1280!r}' in text


def test_asking_changes_nothing(make_world: Any) -> None:
    world = make_world(policy=THUNDER)
    world.worker("w0", **SMALL)
    frontend = world.frontend()
    world.grant(frontend, "r1", *range(1, 10), session=SessionId("s"))
    before = (world.numbers, world.router.state.generator.getstate())
    programs(world)
    explain(world)
    assert (world.numbers, world.router.state.generator.getstate()) == before
