from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fermata.core.errors import (
    InvalidTurn,
    NotResumable,
    NoWorker,
    Overloaded,
    PoisonTurn,
    TurnFailed,
)
from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import (
    LeaseId,
    RequestId,
    RoutingKey,
    SessionId,
    WorkerId,
    make_lease_id,
)
from fermata.core.lease_digest import LeaseDigest
from fermata.frontend.turn import MAX_ATTEMPTS, Turn
from fermata.frontend.turn_model import (
    Abort,
    Cancelled,
    Failed,
    Finished,
    Report,
    Stage,
    TurnLimits,
    TurnSpec,
)
from fermata.frontend.turn_table import GiveBack, TableEffect, TurnTable
from fermata.wire.codec import encode
from fermata.wire.messages import (
    Accepted,
    Grant,
    Hold,
    LeaseClaims,
    LeaseProgress,
    Output,
    OutputEntry,
    Refused,
    Reject,
    Sampling,
    Usage,
)

PROMPT = token_frame(list(range(10)))


class Reader:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Desk:
    """One turn in a table, and short ways to say things to it."""

    def __init__(self, *, resumable: bool = True, max_tokens: int = 100, **fields: Any) -> None:
        self.now = 1000.0
        self.table = TurnTable(TurnLimits())
        self.reader = Reader()
        self.serial = 0
        spec = TurnSpec(
            request=RequestId("r"),
            key=RoutingKey("k"),
            model="m",
            prompt=PROMPT,
            hashes=sequence_hashes(PROMPT, 4).tobytes(),
            block_size=4,
            seed=1337,
            sampling=Sampling(max_tokens=max_tokens),
            resumable=resumable,
            **fields,
        )
        self.turn, effects = self.table.start(spec, reader=self.reader, now=self.now)
        assert self.kinds(effects) == ["Ask"]

    def kinds(self, effects: Iterable[TableEffect]) -> list[str]:
        self.table.check_integrity()
        return [
            f"{e.progress.kind}:{e.progress.reason}"
            if isinstance(e, Report | GiveBack)
            else type(e).__name__
            for e in effects
        ]

    def grant(self, *, worker: str = "w0", attempt: int | None = None) -> list[str]:
        self.serial += 1
        lease = make_lease_id(router=1, incarnation=2, serial=self.serial)
        number = self.turn.attempt if attempt is None else attempt
        grant = Grant(RequestId("r"), number, lease, WorkerId(worker), f"at-{worker}", 0, {}, 1)
        self.last_grant = grant
        return self.kinds(self.table.grant(grant, self.now))

    def hold(self, reason: str) -> list[str]:
        hold = Hold(RequestId("r"), self.turn.attempt, reason, 60.0)  # type: ignore[arg-type]
        return self.kinds(self.table.hold(hold, self.now))

    def accept(self) -> list[str]:
        assert self.turn.lease is not None
        return self.kinds(self.table.accepted(Accepted(self.turn.lease, self.turn.attempt)))

    def output(
        self,
        first: int,
        tokens: list[int],
        *,
        finish: str = "",
        lease: LeaseId | None = None,
        attempt: int | None = None,
        cached: int = -1,
        error: str = "",
    ) -> list[str]:
        live = self.turn.lease if lease is None else lease
        assert live is not None
        entry = OutputEntry(
            live, self.turn.attempt if attempt is None else attempt, first, len(tokens), cached, finish, error  # type: ignore[arg-type]
        )  # fmt: skip
        frame = memoryview(token_frame(tokens))
        return self.kinds(self.table.output(Output([entry]), frame, self.now))

    def revoke(self, reason: str) -> list[str]:
        assert self.turn.lease is not None
        return self.kinds(self.table.revoke([self.turn.lease], reason, self.now))  # type: ignore[arg-type]

    def later(self, seconds: float) -> list[str]:
        self.now += seconds
        return self.kinds(self.table.tick(self.now))

    @property
    def said(self) -> list[int]:
        return self.turn.tokens.tolist()


def test_a_turn_runs_from_grant_to_finish() -> None:
    desk = Desk()
    assert desk.grant() == ["Dispatch"]
    assert desk.accept() == ["accepted:"]
    assert desk.output(0, [7], cached=8) == ["prefilled:"]
    assert desk.output(1, [8, 9]) == []
    assert desk.output(3, [10], finish="stop") == ["finished:stop"]
    assert desk.turn.outcome == Finished("stop")
    assert desk.turn.usage == Usage(10, 4, 8)
    assert desk.said == [7, 8, 9, 10]
    assert len(desk.table) == 0
    assert desk.table.leases == 0


def test_tokens_that_come_again_are_dropped_and_of_a_mixed_entry_the_new_ones_stay() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [1, 2, 3])
    assert desk.output(0, [1, 2, 3]) == []
    assert desk.output(1, [2, 3, 4]) == []
    assert desk.said == [1, 2, 3, 4]


def test_output_says_as_much_as_a_lost_accepted() -> None:
    desk = Desk()
    desk.grant()
    assert desk.output(0, [1]) == ["accepted:", "prefilled:"]


def test_a_gap_is_a_lost_worker() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [1])
    assert desk.output(2, [3]) == ["Abort", "failed:gap", "Ask"]
    assert (desk.turn.deaths, desk.turn.migrations, desk.turn.attempt) == (1, 1, 1)
    assert desk.turn.avoid == ["w0"]
    assert desk.said == [1]


def test_the_next_attempt_carries_what_was_said() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [11, 12, 13])
    assert desk.revoke("worker_lost") == ["failed:worker_lost", "Ask"]
    turn = desk.turn
    assert (turn.resumed, turn.input_tokens) == (3, 13)
    assert turn.input_frame() == PROMPT + token_frame([11, 12, 13])
    assert turn.input_hashes() == sequence_hashes(turn.input_frame(), 4).tobytes()
    old = desk.last_grant.lease
    desk.grant(worker="w1")
    assert desk.output(3, [99], lease=old, attempt=0) == []
    assert desk.table.counters.stale_outputs == 1
    desk.output(0, [14])
    assert desk.said == [11, 12, 13, 14]
    assert turn.usage.prompt_tokens == 10


def test_a_worker_that_never_had_the_turn_was_not_killed_by_it() -> None:
    desk = Desk()
    desk.grant()
    desk.revoke("worker_lost")
    assert (desk.turn.deaths, desk.turn.migrations) == (0, 1)


def test_the_second_death_refuses_the_turn_as_poison() -> None:
    desk = Desk()
    for worker in ("w0", "w1"):
        desk.grant(worker=worker)
        desk.accept()
        said = desk.revoke("worker_lost")
    assert said == ["failed:worker_lost"]
    assert isinstance(desk.turn.outcome, Failed)
    assert isinstance(desk.turn.outcome.error, PoisonTurn)
    assert desk.table.counters.poisons == 1
    assert desk.table.migrations == 1


def test_a_turn_that_a_worker_drains_or_aborts_moves_at_most_twice() -> None:
    desk = Desk()
    for worker in ("w0", "w1"):
        desk.grant(worker=worker)
        desk.accept()
        assert desk.output(0, [], finish="abort", error="draining") == ["failed:draining", "Ask"]
    desk.grant(worker="w2")
    assert desk.output(0, [], finish="abort") == ["accepted:", "failed:aborted"]
    assert isinstance(desk.turn.outcome, Failed)
    assert isinstance(desk.turn.outcome.error, TurnFailed)
    assert desk.turn.deaths == 0


def test_refusals_and_boots_are_neither_deaths_nor_migrations() -> None:
    desk = Desk()
    for reason in ("unknown", "owner_lost", "unknown"):
        desk.grant()
        desk.accept()
        assert desk.revoke(reason) == ["Abort", f"failed:{reason}", "Ask"]
    assert (desk.turn.deaths, desk.turn.migrations, desk.turn.avoid) == (0, 0, [])
    desk.grant()
    assert desk.turn.lease is not None
    refused = Refused(desk.turn.lease, desk.turn.attempt, "draining", "")
    assert desk.kinds(desk.table.refused(refused, desk.now)) == ["failed:refused: draining", "Ask"]
    assert desk.turn.migrations == 0
    assert desk.turn.avoid == ["w0"]


def test_a_full_worker_is_given_time_and_more_each_time() -> None:
    desk = Desk()
    waits: list[float] = []
    for _ in range(7):
        desk.grant()
        assert desk.turn.lease is not None
        refused = Refused(desk.turn.lease, desk.turn.attempt, "full", "")
        assert desk.kinds(desk.table.refused(refused, desk.now)) == ["failed:refused: full"]
        waited = 0.0
        while not desk.later(0.05):
            waited += 0.05
        waits.append(waited)
    assert waits[0] < 0.15
    assert waits == sorted(waits)
    assert 1.9 < waits[-1] < 2.1


def test_attempts_of_any_kind_end_somewhere() -> None:
    desk = Desk()
    for _ in range(MAX_ATTEMPTS):
        desk.grant()
        desk.revoke("unknown")
    assert isinstance(desk.turn.outcome, Failed)
    assert isinstance(desk.turn.outcome.error, TurnFailed)


def test_what_a_worker_calls_invalid_is_the_clients_error() -> None:
    desk = Desk()
    desk.grant()
    assert desk.turn.lease is not None
    refused = Refused(desk.turn.lease, 0, "invalid", "no such rank")
    assert desk.kinds(desk.table.refused(refused, desk.now)) == ["failed:refused: invalid"]
    assert isinstance(desk.turn.outcome, Failed)
    assert isinstance(desk.turn.outcome.error, InvalidTurn)


@pytest.mark.parametrize("tokens", [0, 2])
def test_state_beyond_tokens_can_not_be_resumed_once_there_are_some(tokens: int) -> None:
    desk = Desk(resumable=False)
    desk.grant()
    desk.accept()
    if tokens:
        desk.output(0, list(range(tokens)))
    desk.revoke("worker_lost")
    if tokens:
        assert isinstance(desk.turn.outcome, Failed)
        assert isinstance(desk.turn.outcome.error, NotResumable)
    else:
        assert desk.turn.stage is Stage.ROUTING


def test_a_turn_whose_last_word_was_lost_is_finished_all_the_same() -> None:
    desk = Desk(max_tokens=3)
    desk.grant()
    desk.output(0, [1, 2, 3])
    assert desk.revoke("worker_lost") == ["failed:worker_lost"]
    assert desk.turn.outcome == Finished("length")


def test_an_engine_that_fails_ends_the_turn() -> None:
    desk = Desk()
    desk.grant()
    desk.accept()
    assert desk.output(0, [], finish="error", error="broken") == ["failed:error"]
    assert isinstance(desk.turn.outcome, Failed)
    assert desk.turn.outcome.error.message == "broken"


def test_cancelling_gives_the_lease_back_or_takes_the_question_back() -> None:
    desk = Desk()
    assert desk.kinds(desk.table.cancel(desk.turn, desk.now)) == ["Withdraw"]
    assert desk.turn.outcome == Cancelled()
    desk = Desk()
    desk.grant()
    effects = desk.table.cancel(desk.turn, desk.now)
    assert desk.kinds(effects) == ["cancelled:", "Abort"]
    abort = effects[1]
    assert isinstance(abort, Abort)
    assert abort.endpoint == "at-w0"
    assert desk.kinds(desk.table.cancel(desk.turn, desk.now)) == []
    assert desk.table.counters.cancellations == 1


def test_a_grant_that_nobody_waits_for_is_given_back_once() -> None:
    desk = Desk()
    desk.table.cancel(desk.turn, desk.now)
    assert desk.grant() == ["cancelled:stale"]
    again = desk.kinds(desk.table.grant(desk.last_grant, desk.now))
    assert again == []
    assert desk.table.counters.stale_grants == 1


def test_a_second_lease_for_the_same_attempt_is_given_back() -> None:
    desk = Desk()
    desk.grant()
    assert desk.kinds(desk.table.grant(desk.last_grant, desk.now)) == []
    first = desk.turn.lease
    assert desk.grant() == ["cancelled:stale"]
    assert desk.turn.lease == first


def test_silence_is_asked_again_and_at_last_an_error() -> None:
    desk = Desk()
    assert desk.later(4.9) == []
    assert desk.later(0.2) == ["Ask"]
    desk.now += 100
    assert "Ask" in desk.later(0)
    assert desk.later(20) == ["Withdraw"]
    assert isinstance(desk.turn.outcome, Failed)
    assert isinstance(desk.turn.outcome.error, NoWorker)


def test_a_hold_is_waited_for_to_its_own_deadline() -> None:
    desk = Desk()
    woken = desk.reader.woken
    desk.table.hold(Hold(RequestId("r"), 0, "queue", 1800.0), desk.now)
    assert desk.reader.woken > woken
    assert desk.turn.is_held
    for _ in range(30):
        desk.later(60.0)
    assert not desk.turn.ended
    desk.grant()
    assert desk.turn.times.held == 1800.0
    assert desk.turn.hold_reason == "queue"
    assert not desk.turn.is_held


def test_a_reject_is_the_clients_error_with_its_retry_after() -> None:
    desk = Desk()
    desk.table.reject(Reject(RequestId("r"), 0, "overloaded", "busy", 3.0), desk.now)
    assert isinstance(desk.turn.outcome, Failed)
    error = desk.turn.outcome.error
    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_s) == ("busy", 3.0)


def test_progress_of_long_outputs_is_told_only_when_there_is_some() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [1])
    assert desk.table.progress() == []
    desk.output(1, [2, 3])
    assert desk.turn.lease is not None
    assert desk.table.progress() == [LeaseProgress(desk.turn.lease, "tokens", 3)]
    assert desk.table.progress() == []


def test_a_frame_that_is_not_as_long_as_it_says_is_dropped_whole() -> None:
    desk = Desk()
    desk.grant()
    assert desk.turn.lease is not None
    entry = OutputEntry(desk.turn.lease, 0, 0, 5)
    assert desk.table.output(Output([entry]), memoryview(token_frame([1])), desk.now) == []
    assert desk.table.counters.ragged_outputs == 1
    assert desk.said == []


def test_digest_and_seen_are_of_one_router_and_one_boot() -> None:
    desk = Desk()
    assert desk.table.seen(1, 2) == 0
    desk.grant()
    lease = desk.turn.lease
    assert lease is not None
    assert desk.table.digest(1) == LeaseDigest([lease])
    assert desk.table.digest(9) == LeaseDigest()
    assert desk.table.seen(1, 2) == lease
    assert desk.table.seen(1, 3) == 0
    assert desk.table.leases_of(1) == [lease]
    ((said, frame),) = desk.table.claims(1)
    claims = said.claims
    assert said.last
    assert [claim.lease for claim in claims] == [lease]
    assert frame == desk.turn.spec.hashes
    assert list(desk.table.claims(9)) == [(LeaseClaims([]), b"")]


@pytest.mark.parametrize(("turns", "blocks"), [(2500, 0), (20, 1 << 17)])
def test_claims_of_any_number_and_length_come_in_messages_that_a_router_takes(
    turns: int, blocks: int
) -> None:
    table = TurnTable(TurnLimits())
    longest = "x" * 256
    for serial in range(1, turns + 1):
        spec = TurnSpec(
            request=RequestId(f"r{serial}"),
            key=RoutingKey(longest),
            model="m",
            prompt=PROMPT,
            hashes=bytes(8 * blocks),
            block_size=4,
            seed=1,
            sampling=Sampling(max_tokens=9),
            session=SessionId(longest),
            parent=SessionId(longest),
        )
        table.start(spec, reader=Reader(), now=0.0)
        lease = make_lease_id(router=1, incarnation=2, serial=serial)
        table.grant(Grant(spec.request, 0, lease, WorkerId("w"), "at-w", 0, {}, 1), 0.0)
    messages = list(table.claims(1))
    assert len(messages) == 2
    assert [said.last for said, _ in messages] == [False, True]
    for said, frame in messages:
        assert sum(claim.blocks for claim in said.claims) * 8 == len(frame)
        assert encode(said, frame), "else it raises"
    assert len({claim.lease for said, _ in messages for claim in said.claims}) == turns


def test_a_router_that_booted_is_asked_with_the_time_already_waited() -> None:
    desk = Desk()
    desk.now += 42.0
    effects = desk.table.ask_again(desk.table.routing, desk.now)
    assert desk.kinds(effects) == ["Ask"]
    assert desk.turn.waited_s(desk.now) == 42.0


def test_holds_are_timed_by_reason_over_all_attempts() -> None:
    desk = Desk()
    desk.hold("booting")
    desk.now += 1
    desk.hold("pressure")
    desk.now += 2
    desk.hold("pressure")  # said again
    desk.now += 3
    desk.grant()
    assert desk.turn.times.holds == {"booting": 1.0, "pressure": 5.0}
    assert desk.turn.times.held == 6.0
    assert desk.turn.hold_reason == "pressure"
    desk.accept()
    assert desk.turn.lease is not None
    desk.kinds(desk.table.revoke([desk.turn.lease], "worker_lost", desk.now))
    desk.hold("pressure")
    desk.now += 4
    desk.kinds(desk.table.cancel(desk.turn, desk.now))
    assert desk.turn.times.holds == {"booting": 1.0, "pressure": 9.0}
    assert Desk().turn.times.holds is None


def test_a_turn_that_was_asked_for_before_has_its_age() -> None:
    desk = Desk()
    spec = desk.turn.spec
    turn = Turn(spec, reader=desk.reader, now=desk.now, limits=TurnLimits(), waited_s=40.0)
    assert turn.waited_s(desk.now + 2) == turn.queue_age_s(desk.now + 2) == 42.0


def test_the_age_of_a_turn_stops_with_its_grant() -> None:
    desk = Desk()
    desk.now += 7
    desk.grant()
    desk.now += 100
    assert desk.turn.queue_age_s(desk.now) == 7.0


@pytest.mark.parametrize(
    ("marks", "tokens", "finish", "gap"),
    [
        ((), [1, 2, 3], "stop", ""),
        ((9,), [1, 2, 3], "stop", "human"),
        ((9,), [1, 9, 3], "stop", "tool"),
        ((8, 9), [1, 9, 3], "length", "tool"),
        ((9,), [1, 2, 3], "length", ""),
    ],
)
def test_a_finish_tells_what_its_session_waits_for_as_far_as_tokens_do(
    marks: tuple[int, ...], tokens: list[int], finish: str, gap: str
) -> None:
    desk = Desk(tool_call_tokens=marks)
    desk.grant()
    desk.accept()
    assert desk.turn.lease is not None
    entry = OutputEntry(desk.turn.lease, 0, 0, len(tokens), finish=finish)  # type: ignore[arg-type]
    effects = desk.table.output(Output([entry]), memoryview(token_frame(tokens)), desk.now)
    (end,) = [
        e.progress for e in effects if isinstance(e, Report) and e.progress.kind == "finished"
    ]
    assert end.gap == gap


def test_ends_that_are_no_finish_say_nothing_about_what_is_waited_for() -> None:
    desk = Desk(tool_call_tokens=(9,))
    desk.grant()
    effects = desk.table.cancel(desk.turn, desk.now)
    (end,) = [e.progress for e in effects if isinstance(e, Report)]
    assert (end.kind, end.gap) == ("cancelled", "")


def test_words_about_another_attempt_or_another_turn_change_nothing() -> None:
    desk = Desk()
    desk.grant()
    desk.accept()
    turn, table = desk.turn, desk.table
    table.hold(Hold(RequestId("r"), 0, "queue", 9.0), desk.now)
    table.reject(Reject(RequestId("r"), 0, "overloaded", "busy"), desk.now)
    table.moved(RequestId("r"), 3, desk.now)
    table.moved(RequestId("r"), 0, desk.now)
    table.accepted(Accepted(LeaseId(99), 0))
    table.refused(Refused(LeaseId(99), 0, "failed", ""), desk.now)
    table.hold(Hold(RequestId("other"), 0, "queue", 9.0), desk.now)
    table.reject(Reject(RequestId("other"), 0, "overloaded", "busy"), desk.now)
    table.moved(RequestId("other"), 0, desk.now)
    table.revoke([12345], "unknown", desk.now)
    assert turn.stage is Stage.GENERATING
    assert not turn.is_held
    assert desk.kinds(table.tick(desk.now + 1e6)) == []
    assert desk.kinds(table.ask_again([turn], desk.now)) == []
    assert desk.accept() == []


def test_a_turn_that_ended_stays_as_it_ended() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [1], finish="stop")
    turn, ended = desk.turn, desk.turn.outcome
    lease = desk.last_grant.lease
    assert desk.kinds(turn.revoked(lease, "worker_lost", desk.now)) == []
    assert desk.kinds(turn.stop(desk.now)) == []
    assert desk.kinds(turn.cancel(desk.now)) == []
    assert desk.kinds(turn.fail(TurnFailed("late"), desk.now)) == []
    assert desk.kinds(turn.output(OutputEntry(lease, 0, 1, 0), memoryview(b""), desk.now)) == []
    assert turn.outcome is ended


def test_a_failure_of_ours_gives_back_what_the_turn_holds() -> None:
    desk = Desk()
    assert desk.kinds(desk.table.fail(desk.turn, TurnFailed("x"), desk.now)) == ["Withdraw"]
    desk = Desk()
    desk.grant()
    effects = desk.kinds(desk.table.fail(desk.turn, TurnFailed("x"), desk.now))
    assert effects == ["failed:turn_failed", "Abort"]


def test_a_stop_string_ends_a_turn_between_two_workers_too() -> None:
    desk = Desk()
    desk.grant()
    desk.output(0, [1, 2])
    desk.revoke("worker_lost")
    assert desk.kinds(desk.table.stop(desk.turn, desk.now)) == ["Withdraw"]
    assert desk.turn.outcome == Finished("stop")
    assert desk.turn.usage.completion_tokens == 2


def test_an_engine_that_says_too_much_is_cut_off() -> None:
    desk = Desk(max_tokens=3)
    desk.grant()
    assert desk.output(0, [1, 2, 3, 4, 5])[-2:] == ["finished:length", "Abort"]
    assert desk.said == [1, 2, 3]
    assert desk.turn.outcome == Finished("length")


def test_a_new_incarnation_asks_for_all_anew_and_blames_nobody() -> None:
    desk = Desk()
    assert desk.kinds(desk.table.disown_all(desk.now)) == ["Ask"]
    desk.grant()
    desk.accept()
    assert desk.kinds(desk.table.disown_all(desk.now)) == ["failed:owner_lost", "Ask"]
    assert (desk.turn.deaths, desk.turn.migrations, desk.turn.avoid) == (0, 0, [])
    assert desk.table.seen(1, 2) == 0
