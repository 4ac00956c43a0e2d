"""A policy is switched again and again, under load: every turn is answered once, whatever it waited for at the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fermata.core.spec import (
    OverloadSpec,
    PolicyClassSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.wire import messages as wire

BLOCK = 64
LONGEST_S = 60.0
WIDTH_S = 0.2
THUNDER = ThunderAgentSpec(resume_timeout_s=LONGEST_S, tick_s=2.0)
QUEUES = (
    QueueSpec(),
    QueueSpec(threshold=0.5, limit=2, fair_wait_s=10.0),
    QueueSpec(
        threshold_tokens=600,
        order="WSPT",
        limit=3,
        classes=[
            PolicyClassSpec(name="chat", order="LCFS", quantum=4096, priority_line=3),
            PolicyClassSpec(name="batch", quantum=512, limit=1),
        ],
    ),
)
policies = st.builds(
    lambda kind, queue, overload: RouterPolicySpec(
        scheduler=SchedulerSpec(type=kind, thunder_agent=THUNDER),
        queue=queue,
        overload=OverloadSpec(decode_blocks=overload),
    ),
    st.sampled_from(["KVAware", "RoundRobin", "ThunderAgent", "ThunderAgent"]),
    st.sampled_from(QUEUES),
    st.sampled_from([None, None, 0.8]),
)

turns = st.tuples(
    st.integers(0, 11),
    st.integers(4, 18),
    st.sampled_from(["", "chat", "batch"]),
    st.sampled_from([0, 0, 5]),
    st.sampled_from([0, 0, 0, 2]),
    st.sampled_from([0, 200]),
)
"""Session, blocks, class, priority, strict priority, expected output."""


@dataclass
class Request:
    name: str
    session: str
    chain: list[int]
    fields: dict[str, Any]
    asked_at: float
    attempt: int = 0
    lease: int = 0
    held_for: list[str] = field(default_factory=list[str])

    @property
    def is_held(self) -> bool:
        return not self.lease


class SwitchMachine(RuleBasedStateMachine):
    make: ClassVar[Callable[..., Any]]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(policy=policies)
    def start(self, policy: RouterPolicySpec) -> None:
        self.world = type(self).make(policy=policy)
        self.frontend = self.world.frontend()
        self.workers = [self.join("w0"), self.join("w1")]
        self.revision = 0
        self.names = 0
        self.requests: dict[str, Request] = {}
        self.over: set[str] = set()
        self.lengths: dict[str, int] = {}

    def join(self, name: str) -> Any:
        """64 routing blocks of KV and batches of 2048 tokens: four programs fill it."""
        return self.world.worker(
            name,
            incarnation=len(getattr(self, "over", ())) + 1,
            kv_blocks={"device": 256},
            max_batched_tokens=2048,
            context_length=4096,
        )

    @rule(turns=st.lists(turns, min_size=2, max_size=6))
    def ask(self, turns: list[tuple[int, int, str, int, int, int]]) -> None:
        for turn in turns:
            self.ask_one(*turn)

    def ask_one(
        self, session: int, blocks: int, policy_class: str, priority: int, strict: int, osl: int
    ) -> None:
        self.names += 1
        length = max(blocks, self.lengths.get(f"s{session}", 0))
        request = Request(
            f"r{self.names}",
            f"s{session}" if session else "",
            [session * 1000 + i + 1 for i in range(length)],
            {
                "policy_class": policy_class,
                "hints": wire.Hints(priority=priority, strict_priority=strict, osl=osl),
            },
            self.world.now,
        )
        self.requests[request.name] = request
        self.route(request)

    def route(self, request: Request) -> None:
        may_refuse = self.may_refuse(request)
        self.world.route(
            self.frontend,
            request.name,
            *request.chain,
            session=request.session,
            attempt=request.attempt,
            **request.fields,
        )
        self.take(may_refuse=may_refuse and request.name)

    def may_refuse(self, request: Request) -> bool:
        """Every slot busy, the class's queue full, and no reason to spare it."""
        state = self.world.router.state
        policy_class = state.waiting.classes.of(request.fields["policy_class"], lambda: 1)
        slots = state.workers.ready
        use, workers = state.waiting.queue.use(policy_class), state.workers.ready_count
        line = policy_class.priority_line
        program = state.programs.get(request.session)
        return (
            not state.loads.room(slots, policy_class.level, 1.0)
            and use.turns >= policy_class.limits.turns * max(1, workers)
            and not (line is not None and request.fields["hints"].priority > line)
            and request.attempt == 0
            and not (program is not None and program.steps)
        )

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["prefilled", "finished", "finished", "cancelled"]))
    def progress(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.running()))
        if how == "prefilled":
            self.world.progress(self.frontend, request.lease, "prefilled", output_tokens=1)
        else:
            self.end(request, how)
        self.take()

    def end(self, request: Request, how: str) -> None:
        self.forget(request)
        if how == "finished":
            self.lengths[request.session] = len(request.chain) + 1
            usage = wire.Usage(len(request.chain) * BLOCK + 32, 60)
            self.world.progress(self.frontend, request.lease, "finished", usage=usage)
        else:
            self.seen["cancelled while it ran"] += 1
            self.world.progress(self.frontend, request.lease, "cancelled")

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def cancel_held(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held()))
        self.seen["cancelled while it waited"] += 1
        self.forget(request)
        self.world.progress(self.frontend, 0, "cancelled", request=request.name)
        self.take()

    @rule(policy=policies)
    def switch(self, policy: RouterPolicySpec) -> None:
        self.try_nonsense()
        held = self.held()
        before = self.world.router.state.policy.scheduler.type
        self.revision += 1
        assert self.world.set_policy(policy, revision=self.revision).applied
        if held and before != policy.scheduler.type:
            self.seen[f"{before} -> {policy.scheduler.type} with turns waiting"] += 1
        self.take()

    def try_nonsense(self) -> None:
        before = self.world.router.state.policy
        worse = ThunderAgentSpec(pause_target=0.99, pause_threshold=0.5)
        bad = RouterPolicySpec(scheduler=SchedulerSpec(thunder_agent=worse))
        ack = self.world.set_policy(bad, revision=self.revision + 1)
        assert (ack.applied, bool(ack.reasons)) == (False, True)
        assert self.world.router.state.policy is before
        self.take()

    @rule(seconds=st.sampled_from([1, 3, 15, 40]))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.wait(1.0)
            for peer in (self.frontend, *self.workers):
                self.world.beat(peer)
            self.take()

    @precondition(lambda self: len(getattr(self, "requests", ())) > 5)
    @rule()
    def lose_a_worker(self) -> None:
        """Its turns are asked for again, under the next attempt; another boot of it joins."""
        lost = self.workers.pop(0)
        self.over.add(lost.id + str(lost.incarnation))
        self.world.say(lost, wire.Bye(lost.incarnation))
        revoked = {i for ids in self.world.revoked(self.frontend).values() for i in ids}
        self.take()
        for request in self.running():
            if request.lease in revoked:
                self.seen["migrated"] += 1
                request.attempt, request.lease = request.attempt + 1, 0
                request.asked_at, request.held_for = self.world.now, []
                self.route(request)
        self.workers.append(self.join(lost.id))
        self.take()

    def take(self, *, may_refuse: str | bool = False) -> None:
        """What the frontend was told since. A grant is accepted at once."""
        while sends := [s for s in self.world.sent if s.to == self.frontend]:
            self.world.sent = []
            for send in sends:
                self.hear(send.message, may_refuse)
        self.world.sent = []

    def hear(self, message: wire.Message, may_refuse: str | bool) -> None:
        match message:
            case wire.Grant():
                request = self.requests[message.request]
                assert not request.lease, "granted once"
                assert message.attempt == request.attempt
                assert message.policy_revision == self.revision
                request.lease = message.lease
                self.seen["granted after " + (message.hold_reason or "nothing")] += 1
                self.world.progress(self.frontend, message.lease, "accepted")
            case wire.Hold():
                request = self.requests[message.request]
                assert request.is_held
                request.held_for.append(message.reason)
                left = LONGEST_S - (self.world.now - request.asked_at)
                assert message.deadline_s <= max(0.0, left) + 1e-6
            case wire.Reject():
                request = self.requests[message.request]
                assert message.code == "overloaded", message
                assert message.request == may_refuse, "only a newcomer, and only when it has to be"
                assert not request.held_for, "never one that waits"
                assert message.retry_after_s > 0
                self.seen["refused"] += 1
                self.forget(request)
            case _:
                pass

    def forget(self, request: Request) -> None:
        del self.requests[request.name]

    def running(self) -> list[Request]:
        return [r for r in getattr(self, "requests", {}).values() if not r.is_held]

    def held(self) -> list[Request]:
        return [r for r in getattr(self, "requests", {}).values() if r.is_held]

    @invariant()
    def nobody_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "requests"):
            return
        state = self.world.router.state
        waiting = {w.turn.route.request: w for w in state.waiting}
        assert waiting.keys() == {r.name for r in self.held()}
        assert len(state.leases) == len(self.running())
        for request in self.running():
            lease = state.leases.get(request.lease)
            assert lease is not None
            assert (lease.request, lease.attempt) == (request.name, request.attempt)
        for request in self.held():
            assert self.world.now - request.asked_at <= LONGEST_S + WIDTH_S
            assert waiting[request.name].reason == request.held_for[-1], "it is told what it is"

    def teardown(self) -> None:
        """What runs ends, and what waits is let go by that or by its deadline: every turn is served."""
        if not hasattr(self, "requests") or any(r.is_held and not r.held_for for r in self.held()):
            return  # a step failed half-way, and says so better
        for _ in range(200):
            for request in self.running():
                self.end(request, "finished")
                self.take()
            if not self.requests:
                break
            self.wait(1)
        assert not self.requests
        state = self.world.router.state
        assert (len(state.waiting), len(state.leases)) == (0, 0)
        self.seen["forced"] += state.counters["forced"]
        state.programs.check_integrity()


@pytest.mark.timeout(240)
def test_no_turn_is_lost_doubled_or_refused_by_switches(make_world: Callable[..., Any]) -> None:
    SwitchMachine.make = staticmethod(make_world)
    SwitchMachine.seen.clear()
    run_state_machine_as_test(
        SwitchMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seen = SwitchMachine.seen
    kinds = ("KVAware", "RoundRobin", "ThunderAgent")
    events = [f"{a} -> {b} with turns waiting" for a in kinds for b in kinds if a != b]
    events += ["granted after nothing", "granted after queue", "granted after policy"]
    events += ["granted after pressure", "cancelled while it waited", "cancelled while it ran"]
    events += ["migrated", "refused", "forced"]
    assert not [event for event in events if seen[event] < 3], seen
