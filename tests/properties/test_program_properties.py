"""The router under ThunderAgent against whatever agents, clients, workers and time do to it, in any order.

The whole core is driven through its wire messages with an injected clock, and after every step everything that is kept
incrementally equals a recount (`check_integrity`: use from distinct blocks, no slot for a paused program, created minus
ended is live). On top of that: nobody waits beyond the deadline, nobody is forgotten, `final` always removes. The run
as a whole has to have seen what it claims to test.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

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

from fermata.core.ids import LeaseId, RequestId, RouterId, RoutingKey, SessionId
from fermata.core.spec import (
    AimdSpec,
    ProgramsSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.router.core import Router, RouterConfig, Send
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

BLOCK = 64
CAPACITY_BLOCKS = 28
RESUME_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 300.0
WIDTH_S = 0.1
OWNER = Peer(wire.Role.FRONTEND, "f0", 1)
SYSTEM_PROMPT = (7, 8, 9)

SEEN: Counter[str] = Counter()

policies = st.builds(
    ThunderAgentSpec,
    admission=st.sampled_from(["Watermark", "Watermark", "Watermark", "Aimd"]),
    pause_order=st.sampled_from(
        ["SmallestFirst", "IdlestFirst", "TokensPerIdleSecond", "DeclaredPriority"]
    ),
    resume_timeout_s=st.just(RESUME_TIMEOUT_S),
    buffer_tokens=st.sampled_from([0, 100]),
    human_gap_weight=st.sampled_from([0.5, 1.0]),
    new_programs=st.sampled_from(["BehindPaused", "WhereRoom"]),
    aimd=st.just(AimdSpec(initial=2.0, turns=2)),
)


@dataclass
class Turn:
    """As its client sees it."""

    request: RequestId
    session: SessionId
    chain: tuple[int, ...]
    input_tokens: int
    final: bool
    began: float
    attempt: int = 0
    lease: LeaseId | None = None
    stage: str = "waiting"
    """waiting, granted, accepted, prefilled"""


@dataclass
class Session:
    name: SessionId
    chain: tuple[int, ...] = SYSTEM_PROMPT
    turns: list[Turn] = field(default_factory=list)


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.sessions: dict[SessionId, Session] = {}
        self.turns: dict[RequestId, Turn] = {}
        self.workers: dict[str, Peer] = {}
        self.requests = 0
        self.boots = 0
        self.blocks = 100
        self.names = 0

    @initialize(spec=policies, threshold=st.sampled_from([None, None, 0.25]))
    def boot(self, spec: ThunderAgentSpec, threshold: float | None) -> None:
        self.spec = spec
        policy = RouterPolicySpec(
            scheduler=SchedulerSpec(type="ThunderAgent", thunder_agent=spec),
            programs=ProgramsSpec(idle_timeout_s=IDLE_TIMEOUT_S),
            queue=QueueSpec(threshold=threshold),
        )
        config = RouterConfig(
            id=RouterId("router-0"),
            number=1,
            incarnation=5,
            endpoint="tcp://127.0.0.1:1",
            block_size=BLOCK,
            models={"m": "m"},
        )
        self.router = Router(config, now=self.now, policy=policy)
        self.say(OWNER, wire.Hello("frontend", OWNER.id, 1))
        self.say(OWNER, wire.LeaseClaims([]))
        self.join("w0")
        self.join("w1")

    # What the machine does.

    @rule(
        sessions=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
        grow=st.integers(0, 9),
        final=st.integers(0, 9),
    )
    def next_turns(self, sessions: list[int], grow: int, final: int) -> None:
        for session in sessions:
            self.next_turn(session, grow, final if session == sessions[0] else 9)

    def next_turn(self, session: int, grow: int, final: int) -> None:
        """Of a new program, of one that is known, or of an id that is used again."""
        name = SessionId(f"s{session}")
        known = self.sessions.setdefault(name, Session(name))
        if known.turns:
            return
        if len(known.chain) > 18:  # compaction, as agents do
            known.chain = SYSTEM_PROMPT
        known.chain = (*known.chain, *self.fresh(grow))
        self.route(known, known.chain, final=final == 0)

    @rule(session=st.integers(0, 9), same=st.booleans())
    @precondition(lambda self: any(s.turns for s in self.sessions.values()))
    def second_turn(self, session: int, same: bool) -> None:
        """While one is there: a parallel sample, or a title generator with another prompt."""
        known = self.sessions.get(SessionId(f"s{session}"))
        if known is not None and 0 < len(known.turns) < 3:
            SEEN["parallel" if same else "beside"] += 1
            self.route(known, known.chain if same else self.fresh(2), final=False)

    @rule(session=st.integers(0, 9))
    def release(self, session: int) -> None:
        name = SessionId(f"s{session}")
        self.requests += 1
        request = RequestId(f"r{self.requests}")
        route = wire.Route(request, 0, RoutingKey(name), 0, "m", 0, 1, session=name, final=True)
        answers = [s.message for s in self.say(OWNER, route)]
        assert any(isinstance(each, wire.ProgramEnded) for each in answers)
        program = self.router.state.programs.get(name)
        assert program is None or program.is_reasoning
        SEEN["released"] += 1

    @rule(many=st.booleans(), data=st.data())
    @precondition(lambda self: any(t.lease is not None for t in self.turns.values()))
    def go_on(self, many: bool, data: st.DataObject) -> None:
        chosen = self.pick(data, lambda t: t.lease is not None)
        for turn in [t for t in self.turns.values() if t.lease is not None]:
            if many or turn is chosen:
                self.advance(turn)

    def advance(self, turn: Turn) -> None:
        stage = {"granted": "accepted", "accepted": "prefilled"}.get(turn.stage, "tokens")
        self.progress(turn, stage, output_tokens=30 if stage == "tokens" else 0)
        if stage != "tokens":
            turn.stage = stage

    @rule(output=st.sampled_from([1, 200, 400]), reason=st.sampled_from(["stop", "tool_calls"]))
    def finish_all(self, output: int, reason: str) -> None:
        for turn in [t for t in self.turns.values() if t.lease is not None]:
            self.finish_turn(turn, output, reason, output != 1)

    @rule(
        data=st.data(),
        output=st.sampled_from([1, 60, 200]),
        reason=st.sampled_from(["stop", "tool_calls", "length"]),
        cached=st.booleans(),
    )
    @precondition(lambda self: any(t.lease is not None for t in self.turns.values()))
    def finish(self, data: st.DataObject, output: int, reason: str, cached: bool) -> None:
        self.finish_turn(self.pick(data, lambda t: t.lease is not None), output, reason, cached)

    @rule(data=st.data())
    @precondition(lambda self: self.turns)
    def cancel(self, data: st.DataObject) -> None:
        """At whatever stage the turn is."""
        turn = self.pick(data, lambda t: True)
        held = self.router.state.waiting.get(OWNER.id, turn.request)
        SEEN[f"cancelled_{held.reason if held is not None else turn.stage}"] += 1
        before = self.standing_before(turn)
        if turn.lease is None:
            entry = wire.LeaseProgress(LeaseId(0), "cancelled", request=turn.request)
            self.forget(turn)
            self.say(OWNER, wire.Progress([entry]))
        else:
            self.end(turn, "cancelled")
        self.check_rolled_back(turn, before)

    @rule(data=st.data())
    @precondition(lambda self: any(t.lease is not None for t in self.turns.values()))
    def fail(self, data: st.DataObject) -> None:
        """The engine refused it, say: its owner asks again, and is not made to wait for admission a second time."""
        turn = self.pick(data, lambda t: t.lease is not None)
        SEEN["failed"] += 1
        entry = wire.LeaseProgress(turn.lease or LeaseId(0), "failed")
        turn.lease, turn.stage, turn.attempt = None, "waiting", turn.attempt + 1
        self.say(OWNER, wire.Progress([entry]))
        self.ask(turn)

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def worker_comes(self, name: str) -> None:
        if name not in self.workers:
            SEEN["worker_came"] += 1
            self.join(name)

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    @precondition(lambda self: len(self.workers) > 1)
    def worker_goes(self, name: str) -> None:
        if name in self.workers and len(self.workers) > 1:
            SEEN["worker_went"] += 1
            self.say(self.workers.pop(name), wire.Bye(1))

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(sleeps=st.integers(0, 5))
    def sleep_long(self, sleeps: int) -> None:
        if sleeps == 0:
            self.pass_time(IDLE_TIMEOUT_S + 1)

    # What must hold.

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "router"):
            return
        self.router.check_integrity()
        table = self.router.state.programs
        for slot in table.occupancy.rooms:
            assert table.occupancy.use(slot) >= 0
        for program in table:
            assert not (program.is_paused and program.slot is not None)
            if program.is_reasoning:
                mine = self.sessions[program.session].turns
                assert {t.request for t in mine} >= {key[1] for key in program.turns}

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        late = RESUME_TIMEOUT_S + 2 * WIDTH_S
        for turn in self.turns.values():
            if turn.lease is None:
                assert self.now - turn.began <= late, (turn, self.router.state.programs.counters)
                assert self.router.state.waiting.get(OWNER.id, turn.request) is not None, "lost"

    def teardown(self) -> None:
        """Everybody comes to an end, and nothing is left behind."""
        if not hasattr(self, "router"):
            return
        for _ in range(100):
            for turn in list(self.turns.values()):
                if turn.lease is not None:
                    self.finish_turn(turn, 10, "stop", True)
            if not self.turns:
                break
            self.pass_time(5.0)
        assert not self.turns, "no waiter is lost"
        table = self.router.state.programs
        for session in list(self.sessions):
            self.release(int(session[1:]))
        assert len(table) == 0
        assert table.created == table.ended.total()
        assert all(table.occupancy.use(slot) == 0 for slot in table.occupancy.rooms)
        SEEN.update(table.counters)
        SEEN.update({f"ended_{why}": count for why, count in table.ended.items()})
        SEEN.update({f"order_{self.spec.pause_order}": table.counters["pauses"]})
        SEEN.update({f"rule_{self.spec.admission}": table.counters["pauses"]})

    # Hands.

    def fresh(self, count: int) -> tuple[int, ...]:
        self.blocks += count
        return tuple(range(self.blocks - count + 1, self.blocks + 1))

    def pick(self, data: st.DataObject, which: object) -> Turn:
        assert callable(which)
        names = sorted(t.request for t in self.turns.values() if which(t))
        return self.turns[data.draw(st.sampled_from(names))]

    def route(self, session: Session, chain: tuple[int, ...], *, final: bool) -> None:
        self.requests += 1
        request = RequestId(f"r{self.requests}")
        tokens = len(chain) * BLOCK + 32
        turn = Turn(request, session.name, chain, tokens, final, self.now)
        session.turns.append(turn)
        self.turns[request] = turn
        SEEN["turns"] += 1
        SEEN["final_turns"] += final
        self.ask(turn)

    def ask(self, turn: Turn) -> None:
        route = wire.Route(
            request=turn.request,
            attempt=turn.attempt,
            key=RoutingKey(turn.session),
            epoch=0,
            model="m",
            input_tokens=turn.input_tokens,
            max_tokens=500,
            session=turn.session,
            final=turn.final,
            hints=wire.Hints(priority=len(turn.session)),
        )
        if turn.attempt:
            turn.began = self.now
        self.say(OWNER, route, array("Q", turn.chain).tobytes())
        if turn.attempt and turn.request in self.turns and turn.lease is None:
            held = self.router.state.waiting.get(OWNER.id, turn.request)
            assert held is not None
            assert held.reason not in ("pressure", "admission")

    def progress(self, turn: Turn, kind: str, **fields: object) -> None:
        assert turn.lease is not None
        self.say(OWNER, wire.Progress([wire.LeaseProgress(turn.lease, kind, **fields)]))  # type: ignore[arg-type]

    def finish_turn(self, turn: Turn, output: int, reason: str, cached: bool) -> None:
        usage = wire.Usage(turn.input_tokens, output, turn.input_tokens if cached else 0)
        SEEN["finished"] += 1
        self.end(turn, "finished", output_tokens=output, usage=usage, reason=reason)
        program = self.router.state.programs.get(turn.session)
        if turn.final and not self.sessions[turn.session].turns:
            assert program is None, "final removes"

    def end(self, turn: Turn, kind: str, **fields: object) -> None:
        lease = turn.lease
        self.forget(turn)
        entry = wire.LeaseProgress(lease, kind, **fields)  # type: ignore[arg-type]
        self.say(OWNER, wire.Progress([entry]))

    def forget(self, turn: Turn) -> None:
        del self.turns[turn.request]
        self.sessions[turn.session].turns.remove(turn)

    def standing_before(self, turn: Turn) -> tuple[object, ...] | None:
        """What its program goes back to if this turn comes to nothing; None where that can not be told."""
        program = self.router.state.programs.get(turn.session)
        if program is None or program.is_final or len(program.turns) != 1 or program.has_finished:
            return None
        (own,) = program.turns.values()
        if own.key != (OWNER.id, turn.request):
            return None
        standing = program.standing
        if standing is None:
            return ("removed",)
        is_open = standing.room is not None and standing.room.is_open
        slot = standing.room.slot if is_open and standing.room is not None else None
        was = (standing.context_tokens, standing.acting_since, tuple(standing.chain))
        return (slot, program.is_marked, was)

    def check_rolled_back(self, turn: Turn, before: tuple[object, ...] | None) -> None:
        if before is None:
            return
        program = self.router.state.programs.get(turn.session)
        if before == ("removed",):
            assert program is None
            return
        assert program is not None
        slot, was_marked, was = before
        assert (program.context_tokens, program.acting_since, tuple(program.chain)) == was
        # A round that follows at once may have paused or resumed it; else it is where it was.
        if program.slot != slot:
            assert was_marked or program.is_paused or slot is None

    def join(self, name: str) -> None:
        self.boots += 1
        peer = self.workers[name] = Peer(wire.Role.WORKER, name, self.boots)
        info = wire.WorkerInfo(
            endpoint=f"tcp://{name}",
            model="m",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks={"device": CAPACITY_BLOCKS},
            max_sequences=8,
            max_batched_tokens=1024,
            context_length=131_072,
            features=["kv_events"],
        )
        sends = self.say(peer, wire.Hello("worker", name, self.boots, info))
        asks = [s.message for s in sends if isinstance(s.message, wire.SnapshotRequest)]
        for ask in asks:
            self.say(peer, wire.SnapshotChunk(ask.rank, ask.request, 0, True, -1, []))

    def say(self, peer: Peer, message: wire.Message, frame: bytes = b"") -> list[Send]:
        sends = self.router.receive(peer, message, memoryview(frame), self.now)
        self.take(sends)
        return sends

    def take(self, sends: list[Send]) -> None:
        again: list[Turn] = []
        for send in sends:
            message = send.message
            assert not isinstance(message, wire.Reject), message
            if isinstance(message, wire.Grant):
                turn = self.turns.get(message.request)
                if turn is not None and message.attempt == turn.attempt:
                    turn.lease, turn.stage = message.lease, "granted"
                    SEEN[f"granted_after_{message.hold_reason or 'nothing'}"] += 1
            elif isinstance(message, wire.Hold):
                SEEN[f"held_{message.reason}"] += 1
            elif isinstance(message, wire.Revoke) and send.to == OWNER:
                lost = set(memoryview(send.frame).cast("Q"))
                again += [t for t in self.turns.values() if t.lease in lost]
        for turn in again:
            turn.lease, turn.stage, turn.attempt = None, "waiting", turn.attempt + 1
            SEEN["migrated"] += 1
            self.ask(turn)

    def pass_time(self, seconds: float) -> None:
        """As a shell would: a tick at each deadline, and everybody's heartbeats meanwhile."""
        end = self.now + seconds
        while self.now < end:
            step = min(end, self.now + 1.0)
            while (at := self.router.next_deadline(self.now)) is not None and at <= step:
                assert at >= self.now - WIDTH_S or at <= self.now
                self.now = max(self.now, at)
                self.take(self.router.tick(self.now))
                if at <= self.now - 1:
                    break
            self.now = step
            for peer in (OWNER, *self.workers.values()):
                owned = [t.lease for t in self.turns.values() if t.lease is not None]
                self.beat(peer, owned)
            for turn in [t for t in self.turns.values() if t.stage == "granted"]:
                self.progress(turn, "accepted")
                turn.stage = "accepted"

    def beat(self, peer: Peer, owned: list[LeaseId]) -> None:
        xor = 0
        if peer is OWNER:
            for lease in owned:
                xor ^= lease
            beat = wire.Heartbeat(1, max(owned, default=0), len(owned), xor)
        else:
            beat = wire.Heartbeat(1, 0, 0, 0, [-1])
        self.say(peer, beat)


EXPECTED = (
    "pauses",
    "resumes",
    "admissions",
    "marks",
    "forced",
    "rollbacks",
    "displaced",
    "turns_beside",
    "parallel",
    "released",
    "failed",
    "migrated",
    "held_pressure",
    "held_admission",
    "held_queue",
    "granted_after_pressure",
    "granted_after_admission",
    "cancelled_pressure",
    "cancelled_admission",
    "cancelled_queue",
    "cancelled_granted",
    "cancelled_accepted",
    "cancelled_prefilled",
    "ended_final",
    "ended_cancelled",
    "ended_expired",
    "worker_came",
    "worker_went",
    "order_SmallestFirst",
    "order_IdlestFirst",
    "order_TokensPerIdleSecond",
    "order_DeclaredPriority",
    "rule_Watermark",
    "rule_Aimd",
)


def test_programs_survive_whatever_clients_workers_and_time_do() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        Programs,
        settings=settings(
            max_examples=150,
            stateful_step_count=80,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    missing = [what for what in EXPECTED if SEEN[what] < 3]
    assert not missing, (missing, sorted(SEEN.items()))


if __name__ == "__main__":
    pytest.main([__file__])
