"""Turns against a network that loses, repeats and delays, workers that die, and routers that boot.

The model engine says token `speech(turn, k)` at index k, whatever attempt runs it. So whatever happened, the tokens
of a turn must be a prefix of its speech, the whole of it where it finished, and every lease that reached the table
must have been ended exactly once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fermata.core.errors import NotResumable, NoWorker, Overloaded, PoisonTurn, TurnFailed
from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import LeaseId, RequestId, RoutingKey, WorkerId, make_lease_id
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import (
    Abort,
    Ask,
    Cancelled,
    Dispatch,
    Failed,
    Finished,
    Outcome,
    Report,
    Stage,
    TurnLimits,
    TurnSpec,
    Withdraw,
)
from fermata.frontend.turn_table import GiveBack, TableEffect, TurnTable
from fermata.wire.messages import (
    Accepted,
    Grant,
    Hold,
    Message,
    Output,
    OutputEntry,
    Refused,
    Reject,
    Revoke,
    Sampling,
)

DISTURBANCES = [
    "lose", "repeat", "refuse", "give_up", "give_up", "kill_worker", "kill_worker", "revoke_one",
    "boot_router", "fence", "client_ends", "client_ends",
]  # fmt: skip
ENDS = {"finished", "cancelled", "failed"}
BLOCK = 4


def speech(turn: int, index: int) -> int:
    return turn * 1000 + index


@dataclass
class Running:
    """One attempt at one worker."""

    turn: int
    lease: LeaseId
    attempt: int
    start: int
    """Tokens of earlier attempts."""
    said: int = 0


@dataclass
class Reader:
    turn: Turn | None = None
    seen: int = 0
    outcome: Outcome | None = None

    def wake(self) -> None:
        if self.turn is None:
            return
        assert len(self.turn.tokens) >= self.seen
        self.seen = len(self.turn.tokens)
        assert self.outcome in (None, self.turn.outcome), "ended twice"
        self.outcome = self.turn.outcome


@dataclass
class Wire:
    """One ordered stream to the frontend."""

    queue: deque[tuple[Message, bytes]] = field(default_factory=deque)

    def put(self, message: Message, frame: bytes = b"") -> None:
        self.queue.append((message, frame))


class Network(RuleBasedStateMachine):
    happened: Counter[str] = Counter()

    @initialize()
    def boot(self) -> None:
        self.now = 1000.0
        self.table = TurnTable(TurnLimits())
        self.turns: list[Turn] = []
        self.readers: list[Reader] = []
        self.lengths: list[int] = []
        self.router = Wire()
        self.incarnation = 1
        self.serial = 0
        self.asked: dict[tuple[RequestId, int], Turn] = {}
        self.leases: dict[LeaseId, tuple[RequestId, int, WorkerId]] = {}
        """Live at the router."""
        self.granted: dict[tuple[RequestId, int], Grant] = {}
        self.delivered: set[LeaseId] = set()
        self.ended: Counter[LeaseId] = Counter()
        self.wires: dict[WorkerId, Wire] = {}
        self.running: dict[WorkerId, dict[LeaseId, Running]] = {}
        self.names = 0
        self.add_worker()
        self.add_worker()

    def count(self, what: str) -> None:
        type(self).happened[what] += 1

    def add_worker(self) -> None:
        name = WorkerId(f"w{self.names}")
        self.names += 1
        self.wires[name] = Wire()
        self.running[name] = {}

    def act(self, effects: Iterable[TableEffect]) -> None:
        for effect in effects:
            match effect:
                case Ask(turn):
                    self.asked[turn.spec.request, turn.attempt] = turn
                case Withdraw(turn):
                    self.asked.pop((turn.spec.request, turn.attempt), None)
                case Dispatch(turn):
                    self.dispatch(turn)
                case Abort(_, endpoint, lease):
                    self.running.get(WorkerId(endpoint), {}).pop(lease, None)
                case Report(_, progress) | GiveBack(progress):
                    if progress.kind in ENDS:
                        self.ended[progress.lease] += 1
                        self.leases.pop(progress.lease, None)

    def dispatch(self, turn: Turn) -> None:
        grant = turn.grant
        assert grant is not None
        assert turn.lease is not None
        number = self.turns.index(turn)
        frame = turn.input_frame()
        assert frame == turn.spec.prompt + token_frame(
            [speech(number, k) for k in range(turn.resumed)]
        )
        assert turn.input_hashes() == sequence_hashes(frame, BLOCK).tobytes()
        jobs = self.running.get(grant.worker)
        if jobs is not None:
            jobs[turn.lease] = Running(number, turn.lease, turn.attempt, turn.resumed)

    @rule(length=st.integers(1, 30), resumable=st.sampled_from([True, True, False]))
    def start(self, length: int, resumable: bool) -> None:
        if len(self.table) >= 6:
            return
        number = len(self.turns)
        prompt = token_frame([1, 2, 3, 4, 5, number])
        spec = TurnSpec(
            request=RequestId(f"r{number}"),
            key=RoutingKey("k"),
            model="m",
            prompt=prompt,
            hashes=sequence_hashes(prompt, BLOCK).tobytes(),
            block_size=BLOCK,
            seed=1337,
            sampling=Sampling(max_tokens=length),
            resumable=resumable,
        )
        reader = Reader()
        turn, effects = self.table.start(spec, reader=reader, now=self.now)
        reader.turn = turn
        self.turns.append(turn)
        self.readers.append(reader)
        self.lengths.append(length)
        self.act(effects)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), answer=st.sampled_from(["grant", "grant", "grant", "hold", "reject"]))
    def answer(self, data: st.DataObject, answer: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.asked)))
        request, attempt = key
        if answer == "hold":
            self.count("hold")
            self.router.put(Hold(request, attempt, "queue", 10.0))
        elif answer == "reject" and key not in self.granted:
            self.count("reject")
            del self.asked[key]
            self.router.put(Reject(request, attempt, "overloaded", "full", 1.0))
        else:
            self.give(key)

    def give(self, key: tuple[RequestId, int]) -> None:
        """Idempotent: asked again it is the same lease, unless that ended."""
        turn = self.asked.pop(key)
        request, attempt = key
        before = self.granted.get(key)
        if before is not None and before.lease in self.leases:
            self.router.put(before)
            return
        if not self.wires:
            return
        worker = next((w for w in self.wires if w not in turn.avoid), None) or next(
            iter(self.wires)
        )
        self.serial += 1
        lease = make_lease_id(router=3, incarnation=self.incarnation, serial=self.serial)
        grant = Grant(request, attempt, lease, worker, worker, 0, {}, 1)
        self.granted[key] = grant
        self.leases[lease] = (request, attempt, worker)
        self.router.put(grant)

    def wires_with_mail(self) -> list[Wire]:
        return [w for w in (self.router, *self.wires.values()) if w.queue]

    @precondition(lambda self: self.wires_with_mail())
    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver(self, data: st.DataObject, count: int) -> None:
        wire = data.draw(st.sampled_from(self.wires_with_mail()))
        for _ in range(min(count, len(wire.queue))):
            self.take(*wire.queue.popleft())

    def lose(self, data: st.DataObject) -> None:
        if not self.wires_with_mail():
            return
        self.count("lost")
        data.draw(st.sampled_from(self.wires_with_mail())).queue.popleft()

    def repeat(self, data: st.DataObject) -> None:
        """Now and once more, later."""
        if not self.wires_with_mail():
            return
        self.count("repeated")
        wire = data.draw(st.sampled_from(self.wires_with_mail()))
        wire.put(*wire.queue[0])

    def take(self, message: Message, frame: bytes) -> None:
        match message:
            case Grant():
                self.delivered.add(message.lease)
                self.act(self.table.grant(message, self.now))
            case Hold():
                self.act(self.table.hold(message, self.now))
            case Reject():
                self.act(self.table.reject(message, self.now))
            case Revoke():
                leases = memoryview(frame).cast("Q")
                self.act(self.table.revoke(leases, message.reason, self.now))
            case Accepted():
                self.act(self.table.accepted(message))
            case Refused():
                self.act(self.table.refused(message, self.now))
            case Output():
                self.act(self.table.output(message, memoryview(frame), self.now))
            case _:
                raise AssertionError(message)

    def jobs(self) -> list[tuple[WorkerId, Running]]:
        return [(w, job) for w, jobs in self.running.items() for job in jobs.values()]

    @precondition(lambda self: self.jobs())
    @rule(data=st.data(), count=st.integers(1, 5), accept=st.booleans())
    def step(self, data: st.DataObject, count: int, accept: bool) -> None:
        worker, job = data.draw(st.sampled_from(self.jobs()))
        if accept and not job.said:
            self.wires[worker].put(Accepted(job.lease, job.attempt))
        self.speak(worker, job, count)

    def speak(self, worker: WorkerId, job: Running, count: int) -> None:
        left = self.lengths[job.turn] - job.start - job.said
        count = min(count, left)
        finish = "stop" if count == left else ""
        tokens = [speech(job.turn, job.start + job.said + k) for k in range(count)]
        entry = OutputEntry(job.lease, job.attempt, job.said, count, 2, finish)
        job.said += count
        self.wires[worker].put(Output([entry]), token_frame(tokens))
        if finish:
            del self.running[worker][job.lease]

    def refuse(self, data: st.DataObject) -> None:
        code = data.draw(st.sampled_from(["full", "draining", "failed"]))
        fresh = [(worker, job) for worker, job in self.jobs() if not job.said]
        if fresh:
            worker, job = data.draw(st.sampled_from(fresh))
            self.count("refused")
            del self.running[worker][job.lease]
            self.wires[worker].put(Refused(job.lease, job.attempt, code, "no"))  # type: ignore[arg-type]

    def give_up(self, data: st.DataObject) -> None:
        if not self.jobs():
            return
        finish = data.draw(st.sampled_from(["abort", "error"]))
        worker, job = data.draw(st.sampled_from(self.jobs()))
        self.count(finish)
        del self.running[worker][job.lease]
        entry = OutputEntry(job.lease, job.attempt, job.said, 0, -1, finish, "draining")  # type: ignore[arg-type]
        self.wires[worker].put(Output([entry]))

    def kill_worker(self, data: st.DataObject) -> None:
        self.count("killed")
        busy = [worker for worker, jobs in self.running.items() if jobs]
        self.lose_worker(data.draw(st.sampled_from(sorted(busy or self.wires))))
        self.add_worker()

    def lose_worker(self, worker: WorkerId) -> None:
        del self.wires[worker], self.running[worker]
        self.revoke([x for x, (_, _, at) in self.leases.items() if at == worker], "worker_lost")

    def revoke_one(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        reason = data.draw(st.sampled_from(["dispatch_timeout", "unknown", "worker_stalled"]))
        self.count(reason)
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.running.get(self.leases[lease][2], {}).pop(lease, None)
        self.revoke([lease], reason)

    def revoke(self, leases: list[LeaseId], reason: str) -> None:
        for lease in leases:
            del self.leases[lease]
        frame = b"".join(x.to_bytes(8, "little") for x in leases)
        self.router.put(Revoke(reason), frame)  # type: ignore[arg-type]

    def boot_router(self, data: st.DataObject) -> None:
        """It forgets all, learns the claims, and is asked again what it had not answered."""
        self.count("router_boot")
        self.router.queue.clear()
        self.incarnation += 1
        self.serial = 0
        self.asked.clear()
        self.granted.clear()
        self.leases = {}
        ((said, frame),) = self.table.claims(3)
        claims = said.claims
        assert sum(claim.blocks for claim in claims) * 8 == len(frame)
        for claim in claims:
            self.leases[claim.lease] = (claim.request, claim.attempt, claim.worker)
        self.act(self.table.ask_again(self.table.routing, self.now))

    def fence(self, data: st.DataObject) -> None:
        self.count("fenced")
        self.router.queue.clear()
        self.leases.clear()
        self.granted.clear()
        self.asked.clear()
        for jobs in self.running.values():
            jobs.clear()
        self.act(self.table.disown_all(self.now))

    def client_ends(self, data: st.DataObject) -> None:
        if not len(self.table):
            return
        how = data.draw(st.sampled_from(["cancel", "stop"]))
        turn = data.draw(st.sampled_from(list(self.table)))
        self.count(f"{how} while {turn.stage.value}")
        act = self.table.cancel if how == "cancel" else self.table.stop
        self.act(act(turn, self.now))

    @rule(data=st.data(), kind=st.sampled_from(DISTURBANCES))
    def disturb(self, data: st.DataObject, kind: str) -> None:
        getattr(self, kind)(data)

    @rule(count=st.integers(0, 2))
    def flow(self, count: int) -> None:
        """All goes well for a moment."""
        for key in sorted(self.asked):
            self.give(key)
        self.take_all()
        if count:
            for worker, job in self.jobs():
                self.wires[worker].put(Accepted(job.lease, job.attempt))
                self.speak(worker, job, count)
            self.take_all()

    def take_all(self) -> None:
        while mail := self.wires_with_mail():
            self.take(*mail[0].queue.popleft())

    @rule(seconds=st.sampled_from([0.2, 6.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.table.tick(self.now))

    @invariant()
    def every_index_agrees_and_no_lease_ends_twice(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        assert all(count == 1 for count in self.ended.values()), self.ended
        for number, turn in enumerate(self.turns):
            expected = [speech(number, k) for k in range(len(turn.tokens))]
            assert turn.tokens.tolist() == expected
            assert self.readers[number].outcome in (None, turn.outcome)
        assert self.table.leases == sum(t.lease is not None for t in self.turns)

    def teardown(self) -> None:
        """A calm network from here on: all must come to their ends, and nothing may be left."""
        if not hasattr(self, "table"):
            return
        for _ in range(400):
            if not len(self.table):
                break
            self.now += 1.0
            self.act(self.table.tick(self.now))
            for key in sorted(self.asked):
                self.give(key)
            self.reconcile()
            self.take_all()
            for worker, job in self.jobs():
                self.speak(worker, job, 3)
        assert not len(self.table), [(t.stage, t.attempt, t.lease) for t in self.table]
        self.table.check_integrity()
        assert self.table.leases == 0
        assert self.delivered == set(self.ended)
        for number, turn in enumerate(self.turns):
            self.judge(number, turn)

    def reconcile(self) -> None:
        """What the router does about leases that no worker runs: lost Generate, lost last Output."""
        run = {job.lease for _, job in self.jobs()}
        mail = {
            entry.lease
            for wire in self.wires.values()
            for message, _ in wire.queue
            if isinstance(message, Output)
            for entry in message.entries
        }
        held = set(self.table.leases_of(3))
        lost = [x for x in self.leases if x not in run | mail and (x in held)]
        if lost:
            self.revoke(lost, "worker_lost")
        unknown = sorted(held - set(self.leases))  # a Revoke was lost: the digests say so
        self.router.put(Revoke("unknown"), b"".join(x.to_bytes(8, "little") for x in unknown))

    def judge(self, number: int, turn: Turn) -> None:
        assert self.readers[number].outcome is turn.outcome, "the client was not told"
        match turn.outcome:
            case Finished():
                assert turn.stage is Stage.ENDED
                self.count("finished")
                self.count(f"finished after {min(turn.migrations, 2)} migrations")
                whole = len(turn.tokens) == self.lengths[number]
                assert whole or turn.outcome.reason == "stop"
            case Cancelled():
                self.count("cancelled")
            case Failed(error):
                self.count(type(error).__name__)
                assert isinstance(
                    error, PoisonTurn | NotResumable | NoWorker | Overloaded | TurnFailed
                )
                if isinstance(error, PoisonTurn):
                    assert turn.deaths == 2
                if isinstance(error, NotResumable):
                    assert not turn.spec.resumable
                    assert turn.tokens
            case None:
                raise AssertionError("a turn without an end")


EVENTS = {
    "hold", "reject", "lost", "repeated", "refused", "abort", "error", "killed", "dispatch_timeout",
    "unknown", "worker_stalled", "router_boot", "fenced", "finished", "cancelled", "PoisonTurn",
    "NotResumable", "Overloaded", "TurnFailed", "finished after 1 migrations",
    "cancel while routing", "cancel while granted", "cancel while generating",
    "stop while routing", "stop while generating",
}  # fmt: skip


def test_every_turn_ends_once_with_its_whole_text_or_one_error_and_no_lease_leaks() -> None:
    Network.happened.clear()
    # What is rare may need a longer round; what is impossible never comes. Longer, not again: where runs are
    # derandomized every round begins like the one before.
    for examples in (150, 600, 2000):
        calm = settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        run_state_machine_as_test(Network, settings=calm)
        missing = EVENTS - set(Network.happened)
        if not missing:
            return
    raise AssertionError(f"never happened: {missing}")
