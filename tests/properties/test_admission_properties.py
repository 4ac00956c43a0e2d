"""Below the pause threshold ThunderAgent is KVAware, message for message; and what the books of admission cost."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fermata.core.ids import LeaseId, RequestId, RouterId, RoutingKey, SessionId
from fermata.core.spec import (
    AffinitySpec,
    KvAwareSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.router.core import Router, RouterConfig, Send
from fermata.router.expiry import Expiry
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

BLOCK = 64
OWNER = Peer(wire.Role.FRONTEND, "f0", 1)


class Pair:
    """Two routers that are told the same."""

    def __init__(self, policies: list[RouterPolicySpec], *, workers: int, blocks: int) -> None:
        self.now = 1000.0
        self.routers = [
            Router(
                RouterConfig(
                    id=RouterId("router-0"),
                    number=1,
                    incarnation=5,
                    endpoint="tcp://127.0.0.1:1",
                    block_size=BLOCK,
                    models={"m": "m"},
                    seed=11,
                ),
                now=self.now,
                policy=policy,
            )
            for policy in policies
        ]
        self.say(OWNER, wire.Hello("frontend", OWNER.id, 1))
        self.say(OWNER, wire.LeaseClaims([]))
        for number in range(workers):
            peer = Peer(wire.Role.WORKER, f"w{number}", 1)
            info = wire.WorkerInfo(
                endpoint="tcp://w",
                model="m",
                ranks=1,
                block_size=BLOCK,
                routing_block_size=BLOCK,
                kv_blocks={"device": blocks},
                max_sequences=8,
                max_batched_tokens=2048,
                context_length=1 << 30,
                features=["kv_events"],
            )
            self.say(peer, wire.Hello("worker", peer.id, 1, info))
            self.say(peer, wire.SnapshotChunk(0, 1, 0, True, -1, []))

    def say(self, peer: Peer, message: wire.Message, frame: bytes = b"") -> list[list[Send]]:
        return [
            router.receive(peer, message, memoryview(frame), self.now) for router in self.routers
        ]

    def route(self, request: str, session: str, chain: tuple[int, ...]) -> list[list[Send]]:
        route = wire.Route(
            request=RequestId(request),
            attempt=0,
            key=RoutingKey(session),
            epoch=0,
            model="m",
            input_tokens=len(chain) * BLOCK + 5,
            max_tokens=100,
            session=SessionId(session),
        )
        return self.say(OWNER, route, array("Q", chain).tobytes())


turns = st.tuples(
    st.sampled_from(["route", "route", "route", "finish", "finish", "cancel", "time"]),
    st.integers(0, 11),
    st.integers(0, 6),
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    ops=st.lists(turns, min_size=10, max_size=60),
    temperature=st.sampled_from([0.0, 0.0, 0.5]),
    balance=st.sampled_from([None, 0.25]),
    mode=st.sampled_from(["None", "Soft"]),
    threshold=st.sampled_from([None, 0.5]),
)
def check_equal(
    ops: list[tuple[str, int, int]],
    temperature: float,
    balance: float | None,
    mode: Any,
    threshold: float | None,
) -> None:
    policies = [
        RouterPolicySpec(
            scheduler=SchedulerSpec(
                type=kind,
                kv_aware=KvAwareSpec(temperature=temperature, balance=balance),
            ),
            session_affinity=AffinitySpec(mode=mode),
            queue=QueueSpec(threshold=threshold),
        )
        for kind in ("KVAware", "ThunderAgent")
    ]
    pair = Pair(policies, workers=3, blocks=4000)
    chains: dict[str, tuple[int, ...]] = {}
    leases: list[LeaseId] = []
    for number, (what, which, size) in enumerate(ops):
        both: list[list[Send]] = [[], []]
        if what == "route":
            session = f"s{which}" if which < 9 else ""
            at = 1000 + number * 10
            chain = chains[session] = (*chains.get(session, (1, 2)), *range(at, at + size))
            both = pair.route(f"r{number}", session, chain)
        elif what == "time":
            pair.now += 0.5
            both = [router.tick(pair.now) for router in pair.routers]
        elif leases:
            lease = leases.pop(which % len(leases))
            kind: Any = "finished" if what == "finish" else "cancelled"
            usage = wire.Usage(50, 10 * size, 0)
            entry = wire.LeaseProgress(lease, kind, 10 * size, usage, "tool_calls")
            both = pair.say(OWNER, wire.Progress([entry]))
        assert both[0] == both[1]
        leases += [s.message.lease for s in both[1] if isinstance(s.message, wire.Grant)]
        SEEN[what] += 1
        SEEN["held"] += sum(isinstance(s.message, wire.Hold) for s in both[1])
    for router in pair.routers:
        router.check_integrity()
    assert pair.routers[0].state.generator.getstate() == pair.routers[1].state.generator.getstate()
    SEEN["drawn"] += temperature > 0


SEEN: Counter[str] = Counter()


def test_below_the_threshold_the_decisions_are_those_of_kv_aware() -> None:
    SEEN.clear()
    check_equal()
    assert min(SEEN[what] for what in ("route", "finish", "cancel", "time", "held", "drawn")) > 20


def operations(act: Any) -> int:
    """Byte codes executed by `act`, in whatever it calls. What C does in one of them counts once."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def world_with(programs: int) -> Pair:
    """So many programs on 8 workers that hold two thirds of them: resident, paused, or waiting to be admitted."""
    policy = RouterPolicySpec(
        scheduler=SchedulerSpec(type="ThunderAgent", thunder_agent=ThunderAgentSpec())
    )
    pair = Pair([policy], workers=8, blocks=programs)
    for number in range(programs):
        chain = tuple(range(number * 8 + 10, number * 8 + 18))
        (sends,) = pair.route(f"r{number}", f"s{number}", chain)
        grants = [s.message for s in sends if isinstance(s.message, wire.Grant)]
        for grant in grants:
            usage = wire.Usage(517, 300 + 400 * (number % 3), 0)
            entry = wire.LeaseProgress(grant.lease, "finished", 300, usage, "stop")
            pair.say(OWNER, wire.Progress([entry]))
    return pair


def tick_operations(programs: int) -> tuple[int, Pair]:
    pair = world_with(programs)
    router = pair.routers[0]
    table = router.state.programs
    assert len(table) >= programs * 0.9
    assert table.counters["pauses"] > 0
    resident = [program for program in table if program.slot is not None and not program.turns]
    for number, program in enumerate(resident[:10]):  # ten changed: their next turns
        more = range(10**9 + 8 * number, 10**9 + 8 * number + 3)
        pair.route(f"next-{program.session}", program.session, (*program.chain, *more))
    rule = router.state.admission
    assert rule is not None
    assert table.occupancy.has_changed
    spent = operations(lambda: rule.round(pair.now))
    router.check_integrity()
    return spent, pair


def test_a_round_costs_what_changed_and_not_the_table() -> None:
    small, _ = tick_operations(200)
    large, _ = tick_operations(3200)
    assert large < 1.5 * small, (small, large)


class Counted:
    """A key that counts how often a dict looks at it."""

    looks = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        Counted.looks += 1
        return self.name

    def __eq__(self, other: object) -> bool:
        return self is other


def test_expiry_of_one_percent_of_a_million_costs_what_expires() -> None:
    expiry: Expiry[Counted] = Expiry(width_s=0.1)
    total, expiring = 1_000_000, 10_000
    for number in range(total):
        expiry.set(Counted(number), 10.0 if number % 100 == 0 else 2000.0 + number % 1000)
    Counted.looks = 0
    gone: list[Counted] = []
    spent = operations(lambda: gone.extend(expiry.due(20.0)))
    assert len(gone) == expiring
    assert Counted.looks <= 3 * expiring
    assert spent <= 20 * expiring
    assert len(expiry) == total - expiring
