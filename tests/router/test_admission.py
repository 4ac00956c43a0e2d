"""ThunderAgent one rule at a time, through the wire: who is held, who goes, who is paused and marked, and where."""

from __future__ import annotations

import pytest
from msgspec import structs

from fermata.core.ids import SessionId
from fermata.core.ring import Ring
from fermata.core.spec import (
    AffinitySpec,
    AimdSpec,
    KvSpec,
    LeasesSpec,
    LivenessSpec,
    ProgramsSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.wire import messages as wire

BLOCK = 64
# 100 blocks a worker: over at 95, safe at 80, resumed below 85.
PAGES = 400
PATIENT = LeasesSpec(
    dispatch_timeout_s=1e6, liveness=LivenessSpec(worker_timeout_s=1e6, owner_timeout_s=1e6)
)


def policy(kind: str = "ThunderAgent", **thunder: object) -> RouterPolicySpec:
    settings: dict[str, object] = {"buffer_tokens": 0, "human_gap_weight": 1.0}
    spec = ThunderAgentSpec(**(settings | thunder))  # type: ignore[arg-type]
    scheduler = SchedulerSpec(type=kind, thunder_agent=spec)  # type: ignore[arg-type]
    return RouterPolicySpec(scheduler=scheduler, leases=PATIENT)


class Agents:
    """Sessions by number; each has chains of its own."""

    def __init__(self, world, frontend):
        self.world = world
        self.frontend = frontend
        self.leases: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def chain(self, name: str, blocks: int) -> tuple[int, ...]:
        return tuple(range(ord(name) * 100_000, ord(name) * 100_000 + blocks))

    def ask(self, name: str, blocks: int, **fields):
        turn = self.turns[name] = self.turns.get(name, 0) + 1
        self.lengths[name] = blocks
        fields = {"session": name, "input_tokens": blocks * BLOCK} | fields
        answer = self.world.route(
            self.frontend, f"{name}{turn}", *self.chain(name, blocks), **fields
        )
        if isinstance(answer, wire.Grant):
            self.leases[name] = answer.lease
            self.world.take(wire.Grant)
        return answer

    def finish(self, name: str, *, reason: str = "tool_calls", output: int = 0, cached: int = 0):
        usage = wire.Usage(self.lengths[name] * BLOCK, output, cached)
        self.world.progress(
            self.frontend, self.leases.pop(name), "finished", usage=usage, reason=reason
        )
        for grant in self.world.take(wire.Grant):
            self.leases[grant.request[0]] = grant.lease

    def turn(self, name: str, blocks: int, **fields):
        assert isinstance(self.ask(name, blocks), wire.Grant)
        self.finish(name, **fields)

    def bye(self, name: str, request: str = "bye"):
        """Its client is done; returns all that was said to the frontend then."""
        route = wire.Route(request, 0, "k", 0, "m", 0, 1, session=name, final=True)
        return self.world.say(self.frontend, route)

    def program(self, name: str):
        return self.world.router.state.programs.get(SessionId(name))


@pytest.fixture
def agents(make_world):
    return _agents(make_world, policy())


def _agents(make_world, spec, *, workers: int = 1, **info):
    world = make_world(policy=spec)
    for number in range(workers):
        world.worker(f"w{number}", **({"kv_blocks": {"device": PAGES}} | info))
    return Agents(world, world.frontend())


def test_a_new_program_is_held_where_there_is_no_room_and_goes_when_there_is(agents):
    agents.turn("a", 60)
    held = agents.ask("b", 40)
    assert isinstance(held, wire.Hold)
    assert (held.reason, held.deadline_s) == ("admission", 1800.0)
    agents.turn("a", 61)
    assert "b" not in agents.leases
    agents.bye("a")
    assert [grant.hold_reason for grant in agents.world.take(wire.Grant)][-1] == "admission"


def test_over_the_threshold_idle_programs_are_paused_smallest_first_down_to_the_target(agents):
    for name, blocks in (("a", 20), ("b", 10), ("c", 30), ("d", 30)):
        agents.turn(name, blocks)
    agents.ask("d", 36)
    agents.world.wait(6.0)
    assert [agents.program(name).is_paused for name in "abcd"] == [True, True, False, False]
    assert agents.world.numbers["program_pauses"] == 2


def test_a_paused_program_waits_below_the_ceiling_and_comes_back_before_a_new_one(agents):
    for name, blocks in (("a", 20), ("c", 35), ("d", 35)):
        agents.turn(name, blocks)
    agents.ask("d", 41)
    agents.world.wait(6.0)
    assert agents.program("a").is_paused
    assert agents.ask("a", 21).reason == "pressure"
    assert agents.ask("n", 2).reason == "admission", "behind the paused one, though it would fit"
    agents.world.take(wire.Grant)
    agents.finish("d")
    assert "a" not in agents.leases
    agents.bye("c")
    grants = agents.world.take(wire.Grant)
    assert [grant.request for grant in grants] == ["a2", "n1"]


def test_only_as_many_running_programs_are_marked_as_the_target_needs(agents):
    for name, blocks in (("a", 10), ("b", 20), ("c", 30), ("d", 30)):
        assert isinstance(agents.ask(name, blocks), wire.Grant)
    lease = agents.leases["d"]
    agents.world.progress(agents.frontend, lease, "tokens", output_tokens=8 * BLOCK)
    agents.world.wait(6.0)
    assert [agents.program(name).is_marked for name in "abcd"] == [True, True, False, False]
    assert agents.world.router.state.programs.counters["pauses"] == 0, (
        "nothing that runs is interrupted"
    )
    agents.finish("a")
    assert agents.program("a").is_paused
    agents.bye("c")
    agents.finish("c")
    agents.finish("b")
    assert not agents.program("b").is_paused, "no longer needed"
    assert not agents.program("b").is_marked
    assert agents.world.router.state.programs.counters["pauses"] == 1, "not even for a moment"


def test_shared_prefixes_are_charged_once(agents):
    world, frontend = agents.world, agents.frontend
    for number in range(6):
        chain = (*range(1, 61), 1000 * number + 500)
        answer = world.route(
            frontend, f"r{number}", *chain, session=f"s{number}", input_tokens=61 * BLOCK
        )
        assert isinstance(answer, wire.Grant), "60 of its blocks are there"
    assert world.router.state.programs.occupancy.use(0) == (60 + 6) * BLOCK


def test_the_deadline_places_by_force_where_there_is_most_room(make_world):
    agents = _agents(make_world, policy(resume_timeout_s=60.0), workers=2)
    agents.turn("a", 70)
    agents.turn("b", 80)
    assert agents.ask("c", 60).reason == "admission"
    agents.world.wait(60.2)
    (grant,) = agents.world.take(wire.Grant)[-1:]
    assert grant.request == "c1"
    assert grant.held_s == pytest.approx(60.0, abs=0.3)
    assert grant.worker == agents.world.router.state.workers.of_slot(agents.program("c").slot).id
    rooms = agents.world.router.state.programs.occupancy
    assert rooms.programs(agents.program("c").slot) >= 1
    assert agents.world.numbers["program_forced"] == 1
    assert agents.program("a").slot == agents.program("c").slot or agents.program("a").is_paused


def test_a_turn_that_does_not_stream_waits_no_longer_than_its_client(agents):
    agents.turn("a", 80)
    held = agents.ask("b", 40, streaming=False, client_timeout_s=100.0)
    assert held.deadline_s == 70.0


def test_under_pressure_a_program_stays_where_its_kv_is(make_world):
    spec = structs.replace(policy(), session_affinity=AffinitySpec(mode="None"))
    agents = _agents(make_world, spec, workers=2, features=["kv_events"])
    agents.turn("a", 10)
    agents.turn("b", 10)
    slots = set()
    for blocks in range(11, 31):
        agents.turn("a", blocks)
        slots.add(agents.program("a").slot)
    assert slots == {0, 1}, "without affinity, and with room everywhere, it goes anywhere"
    slot = agents.program("a").slot
    assert agents.ask("n", 96).reason == "admission"
    for blocks in range(31, 51):
        agents.turn("a", blocks)
        assert agents.program("a").slot == slot


def test_a_program_that_is_too_large_alone_is_not_marked(agents):
    agents.ask("a", 90)
    agents.world.progress(agents.frontend, agents.leases["a"], "tokens", output_tokens=8 * BLOCK)
    agents.world.wait(6.0)
    assert not agents.program("a").is_marked, "its leaving would only bring it back"
    agents.finish("a")
    assert isinstance(agents.ask("a", 91), wire.Grant)


def test_a_migrated_turn_does_not_wait_for_admission_again(make_world):
    agents = _agents(make_world, policy(), workers=2)
    agents.turn("a", 90)
    agents.ask("b", 90)
    world = agents.world
    worker = next(w for w in world.router.state.workers if agents.program("b").slot in w.slots)
    world.say(worker.peer, wire.Bye(1))
    assert agents.program("b") is None, "its only turn came to nothing"
    answer = world.route(
        agents.frontend,
        "b1",
        *agents.chain("b", 90),
        session="b",
        attempt=1,
        input_tokens=90 * BLOCK,
    )
    assert isinstance(answer, wire.Grant)


def test_final_without_input_is_answered_without_an_engine(agents):
    agents.turn("a", 10)
    ask = {"session": "a", "final": True, "input_tokens": 0, "max_tokens": 1}
    answer = agents.world.route(agents.frontend, "f1", **ask)
    assert answer == wire.ProgramEnded("f1", 0, True)
    assert agents.program("a") is None
    assert agents.world.route(agents.frontend, "f2", **ask) == wire.ProgramEnded("f2", 0, False)
    agents.ask("b", 10)
    assert agents.world.route(agents.frontend, "f3", **(ask | {"session": "b"})).was_known
    assert agents.program("b") is not None, "until its turn is over"
    agents.finish("b")
    assert agents.program("b") is None
    assert agents.world.numbers["leases"] == 0


def test_the_end_of_a_program_is_a_hint_to_engines_that_take_hints(make_world):
    agents = _agents(make_world, policy(), features=["hints", "kv_events"])
    agents.turn("a", 10)
    agents.ask("a", 11, final=True)
    agents.finish("a", reason="stop")
    (hint,) = agents.world.take(wire.HintPush)
    (action,) = hint.hints.actions
    assert (action.action_type, action.payload["session_id"]) == ("kv.evict", "a")
    assert action.payload["block_hash"] == agents.chain("a", 11)[-1]


def test_no_hint_is_sent_where_the_policy_says_so(make_world):
    spec = RouterPolicySpec(kv=KvSpec(hints=False))
    agents = _agents(make_world, spec, features=["hints", "kv_events"])
    agents.ask("a", 11, final=True)
    agents.finish("a")
    assert agents.world.take(wire.HintPush) == []


def test_a_stop_means_a_person_only_where_tool_calls_were_seen(make_world):
    agents = _agents(make_world, policy(human_gap_weight=0.5))
    occupancy = agents.world.router.state.programs.occupancy
    agents.turn("a", 40, reason="stop")
    assert (agents.program("a").gap, occupancy.use(0)) == ("tool", 40 * BLOCK)
    agents.turn("a", 40, reason="tool_calls")
    agents.turn("a", 40, reason="stop")
    assert (agents.program("a").gap, occupancy.use(0)) == ("human", 20 * BLOCK)
    agents.ask("a", 40)
    assert occupancy.use(0) == 40 * BLOCK, "a turn weighs in full"
    agents.world.progress(
        agents.frontend, agents.leases.pop("a"), "finished", reason="stop", gap="tool"
    )
    assert agents.program("a").gap == "tool", "the owner knows better"


def test_idle_programs_expire_and_a_policy_may_say_sooner(make_world):
    agents = _agents(make_world, policy())
    agents.turn("a", 10)
    sooner = RouterPolicySpec(
        scheduler=policy().scheduler, leases=PATIENT, programs=ProgramsSpec(idle_timeout_s=3.0)
    )
    assert agents.world.set_policy(sooner).applied
    agents.world.wait(2.0)
    assert agents.program("a") is not None
    agents.world.wait(1.5)
    assert agents.program("a") is None
    assert agents.world.numbers["programs_ended_expired"] == 1


def test_programs_are_kept_under_every_policy_and_a_switch_frees_who_was_held(make_world):
    agents = _agents(make_world, policy("KVAware"))
    for name in "abc":
        agents.turn(name, 60)
    assert agents.world.numbers["programs"] == 3
    assert agents.world.numbers["occupancy_max"] == pytest.approx(1.8)
    agents.world.set_policy(policy(), revision=1)
    assert agents.world.numbers["programs_paused"] == 2, "down to what fits"
    assert agents.ask("n", 50).reason == "admission"
    agents.world.set_policy(policy("RoundRobin"), revision=2)
    (grant,) = agents.world.take(wire.Grant)[-1:]
    assert grant.request == "n1"
    assert agents.world.numbers["turns_waiting"] == 0
    assert agents.world.numbers["programs"] == 4


def test_an_other_weight_is_another_use_of_what_is_held(make_world):
    agents = _agents(make_world, policy(tool_gap_weight=1.0))
    agents.turn("a", 40)
    agents.ask("b", 30)
    occupancy = agents.world.router.state.programs.occupancy
    for weight, use in ((0.5, 50), (0.25, 40), (1.0, 70)):
        agents.world.set_policy(policy(tool_gap_weight=weight, human_gap_weight=0.1))
        assert occupancy.use(0) == use * BLOCK
        agents.world.router.check_integrity()


def test_a_worker_without_a_capacity_is_ruled_by_a_window(make_world):
    spec = policy(aimd=AimdSpec(initial=2, turns=2, increase=1.0))
    agents = _agents(make_world, spec, kv_blocks={"device": 0}, context_length=1 << 20)
    world = agents.world
    agents.turn("a", 10)
    agents.turn("b", 10)
    assert agents.ask("c", 10).reason == "admission"
    agents.turn("a", 11, cached=10 * BLOCK)
    agents.turn("b", 11, cached=10 * BLOCK)
    world.wait(6.0)
    assert agents.program("c").slot == 0, "what was left was found: the window is wider"
    assert world.numbers["program_admissions"] == 1


def test_a_window_shrinks_when_what_was_left_is_gone(make_world):
    spec = policy(admission="Aimd", aimd=AimdSpec(initial=4, turns=4, decrease=0.5))
    agents = _agents(make_world, spec, kv_blocks={"device": 40_000})
    for name in "abcd":
        agents.turn(name, 10)
    assert agents.ask("e", 10).reason == "admission"
    for name in "abcd":
        agents.turn(name, 11, cached=0)
    agents.world.wait(6.0)
    assert sum(agents.program(name).is_paused for name in "abcd") == 2


def test_a_program_with_another_prompt_is_served_beside_and_moves_nothing(agents):
    agents.turn("a", 90)
    agents.ask("a", 92)
    before = agents.program("a").context_tokens
    title = agents.world.route(
        agents.frontend, "title", 7, 8, 9, session="a", input_tokens=3 * BLOCK
    )
    assert isinstance(title, wire.Grant)
    assert agents.program("a").context_tokens == before
    agents.world.progress(agents.frontend, title.lease, "finished", reason="stop")
    assert agents.program("a").steps == 1
    agents.finish("a")
    assert agents.program("a").steps == 2


def test_parallel_samples_are_one_step(agents):
    grants = [
        agents.world.grant(agents.frontend, f"p{n}", *agents.chain("a", 9), session="a")
        for n in range(3)
    ]
    for grant in grants:
        agents.world.progress(agents.frontend, grant.lease, "finished", reason="stop")
    assert agents.program("a").steps == 1


def test_what_a_cancelled_turn_leaves_is_what_it_found(agents):
    agents.turn("a", 30, output=100)
    program = agents.program("a")
    was = (program.context_tokens, bytes(program.chain), program.acting_since, program.slot)
    use = agents.world.router.state.programs.occupancy.use(0)
    agents.world.wait(1.0)
    agents.ask("a", 34)
    agents.world.progress(agents.frontend, agents.leases["a"], "tokens", output_tokens=300)
    assert agents.world.router.state.programs.occupancy.use(0) > use
    agents.world.progress(agents.frontend, agents.leases["a"], "cancelled")
    assert was == (
        program.context_tokens,
        bytes(program.chain),
        program.acting_since,
        program.slot,
    )
    assert agents.world.router.state.programs.occupancy.use(0) == use


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("SmallestFirst", "c"),
        ("IdlestFirst", "a"),
        ("TokensPerIdleSecond", "b"),
        ("DeclaredPriority", "d"),
    ],
)
def test_the_pause_order_is_the_policys(make_world, order, first):
    agents = _agents(make_world, policy(pause_order=order))
    for name, blocks, priority, after in (
        ("a", 30, 5, 1.9),
        ("b", 16, 5, 0.9),
        ("c", 15, 5, 0.1),
        ("d", 17, 1, 0.1),
    ):
        agents.ask(name, blocks, hints=wire.Hints(priority=priority))
        agents.finish(name)
        agents.world.wait(after)
    agents.ask("x", 14)
    agents.world.progress(agents.frontend, agents.leases["x"], "tokens", output_tokens=4 * BLOCK)
    agents.world.wait(5.1)
    paused = [name for name in "abcd" if agents.program(name).is_paused]
    assert first in paused
    assert agents.world.router.state.programs.counters["pauses"] == len(paused) < 3


def test_a_claimed_lease_brings_its_program_back(make_world):
    agents = _agents(make_world, policy())
    claim = wire.LeaseClaim(
        lease=3 << 54 | 5 << 32 | 9,
        request="old",
        attempt=0,
        worker="w0",
        rank=0,
        input_tokens=600,
        output_tokens=50,
        blocks=3,
        accepted=True,
        prefilled=True,
        key="k",
        session="a",
    )
    from array import array

    agents.world.say(agents.frontend, wire.LeaseClaims([claim]), array("Q", [1, 2, 3]))
    program = agents.program("a")
    assert (program.context_tokens, program.slot, program.is_reasoning) == (650, 0, True)
    agents.world.progress(agents.frontend, claim.lease, "finished", output_tokens=60, reason="stop")
    assert (program.context_tokens, program.is_reasoning) == (660, False)


def test_a_held_program_goes_as_soon_as_another_worker_can_take_it(agents):
    agents.turn("a", 90)
    assert agents.ask("b", 60).reason == "admission"
    agents.world.worker("w1", kv_blocks={"device": PAGES})
    (grant,) = agents.world.take(wire.Grant)
    assert (grant.request, grant.worker, grant.hold_reason) == ("b1", "w1", "admission")


def test_a_later_attempt_takes_the_place_of_one_that_is_held(agents):
    agents.turn("a", 90)
    assert agents.ask("b", 60).reason == "admission"
    again = {"session": "b", "input_tokens": 60 * BLOCK, "attempt": 1}
    answer = agents.world.route(agents.frontend, "b1", *agents.chain("b", 60), **again)
    assert isinstance(answer, wire.Grant)
    assert len(agents.program("b").turns) == 1
    agents.world.progress(agents.frontend, answer.lease, "cancelled")
    assert agents.program("b") is None


def test_a_held_turn_whose_key_moves_leaves_no_program(agents):
    agents.turn("a", 90)
    assert agents.ask("b", 60).reason == "admission"
    members = [("router-0", "tcp://127.0.0.1:1"), ("router-1", "tcp://127.0.0.1:2")]
    key = next(k for k in "klmnopq" if Ring(1, dict(members)).router_for(k) == "router-1")
    assert agents.ask("c", 60, key=key).reason == "admission"
    agents.world.set_policy(policy(), ring=wire.Ring(1, members))
    assert [moved.request for moved in agents.world.take(wire.Moved)][-1] == "c1"
    assert agents.program("c") is None


def test_a_lost_owner_leaves_nothing_of_its_turns(agents):
    agents.turn("a", 90)
    agents.ask("b", 60)
    agents.ask("a", 91)
    agents.world.say(agents.frontend, wire.Bye(1))
    assert agents.program("b") is None
    assert not agents.program("a").is_reasoning
    assert agents.world.numbers["turns_waiting"] == 0


def test_who_is_let_go_takes_the_room_of_who_follows(agents):
    agents.turn("a", 90)
    assert agents.ask("b", 50).reason == "admission"
    assert agents.ask("c", 48).reason == "admission"
    agents.bye("a")
    assert [grant.request for grant in agents.world.take(wire.Grant)] == ["b1"]
    assert agents.program("c").is_new, "both fit the empty slot, and not each other's threshold"
