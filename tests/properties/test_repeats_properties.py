"""Turns that are asked for again, against a model that keeps every prompt whole and searches all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import RequestId, RoutingKey, SessionId
from fermata.frontend.repeats import Repeats
from fermata.frontend.turn_model import TurnSpec
from fermata.wire.messages import Sampling

BLOCK = 2
MEMORY_S = 50.0
MOST_LEFT = 3
PROMPTS = [[1], [1, 1], [1, 1, 2], [1, 1, 2, 2], [1, 1, 2, 2, 1], [2, 2], [2, 2, 1, 1]]
SEEN: Counter[str] = Counter()


@dataclass(eq=False)
class Known:
    """As the service has it: live until it ended or was left."""

    session: str
    tokens: list[int]
    sampling: Sampling
    since: float
    spec: TurnSpec
    is_held: bool = False
    granted_at: float | None = None
    left_at: float | None = None

    def queue_age_s(self, now: float) -> float:
        end = now if self.granted_at is None else self.granted_at
        if self.left_at is not None:
            end = min(end, self.left_at)
        return end - self.since


def extends(prompt: list[int], older: list[int]) -> bool:
    full = len(older) // BLOCK * BLOCK
    return full > 0 and prompt[:full] == older[:full] and len(prompt) // BLOCK * BLOCK >= full


class RepeatsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.repeats = Repeats(memory_s=MEMORY_S, most_left=MOST_LEFT)
        self.turns: list[Known] = []
        self.left: list[Known] = []
        self.serial = 0

    def forget(self) -> None:
        while self.left and (
            len(self.left) > MOST_LEFT or self.now - self.left[0].left_at >= MEMORY_S  # type: ignore[operator]
        ):
            SEEN["forgotten"] += 1
            self.left.pop(0)

    @rule(
        session=st.sampled_from(["a", "a", "a", "b", ""]),
        tokens=st.sampled_from(PROMPTS),
        max_tokens=st.sampled_from([5, 5, 6]),
    )
    def ask(self, session: str, tokens: list[int], max_tokens: int) -> None:
        self.forget()
        sampling = Sampling(max_tokens=max_tokens)
        self.serial += 1
        frame = token_frame(tokens)
        spec = TurnSpec(
            request=RequestId(f"r{self.serial}"),
            key=RoutingKey("k"),
            model="m",
            prompt=frame,
            hashes=sequence_hashes(frame, BLOCK).tobytes(),
            block_size=BLOCK,
            seed=1337,
            sampling=sampling,
            session=SessionId(session),
        )
        expected = 0.0
        for known in self.turns + self.left if session else []:
            if known.session != session:
                continue
            same = known.tokens == tokens and known.sampling == sampling
            goes_on = known.is_held and extends(tokens, known.tokens)
            if same or goes_on:
                SEEN["same" if same else "goes on"] += 1
                SEEN["of one that was left"] += known.left_at is not None
                expected = max(expected, known.queue_age_s(self.now))
        age_s = self.repeats.age_s(spec, self.now)
        assert abs(age_s - expected) < 1e-9
        known = Known(session, tokens, sampling, self.now - age_s, spec)
        self.repeats.began(spec, known)
        self.turns.append(known)

    @precondition(lambda self: any(t.granted_at is None for t in self.turns))
    @rule(data=st.data())
    def hold_or_grant(self, data: st.DataObject) -> None:
        waiting = [t for t in self.turns if t.granted_at is None]
        turn = data.draw(st.sampled_from(waiting))
        if data.draw(st.sampled_from([True, True, False])):
            turn.is_held = True
        else:
            turn.is_held = False
            turn.granted_at = self.now

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), leaves=st.booleans())
    def end(self, data: st.DataObject, leaves: bool) -> None:
        turn = data.draw(st.sampled_from(self.turns))
        self.turns.remove(turn)
        if not leaves:
            self.repeats.ended(turn.spec)
            return
        age_s = turn.queue_age_s(self.now)
        self.repeats.left(turn.spec, age_s=age_s, was_held=turn.is_held, now=self.now)
        turn.left_at = self.now
        if turn.session:
            self.left.append(turn)
        self.forget()

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_leaks(self) -> None:
        self.repeats.check_integrity()
        assert len(self.repeats) <= len([t for t in self.turns if t.session]) + MOST_LEFT


def test_a_repeat_keeps_its_age_and_every_case_was_met() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        RepeatsMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    for case in ("same", "goes on", "of one that was left", "forgotten"):
        assert SEEN[case] >= 20, (case, SEEN)
