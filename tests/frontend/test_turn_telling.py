"""What routers, workers and the trace are told of a turn."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest

from fermata.core.errors import TurnFailed
from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import LeaseId, OwnerId, RequestId, RoutingKey, SessionId, WorkerId
from fermata.frontend.generate import generate_of, route_of
from fermata.frontend.identity import ANONYMOUS, Identity
from fermata.frontend.intake import Intent
from fermata.frontend.prompt import Prompt
from fermata.frontend.trace_record import record_of
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import TurnLimits, TurnSpec
from fermata.trace import TraceRecord, worker_number
from fermata.wire.messages import Grant, Hints, Hold, OutputEntry, Sampling

FRAME = token_frame(list(range(9)))
HASHES = sequence_hashes(FRAME, 4)


class Nobody:
    def wake(self) -> None:
        pass


def spec(**changes: object) -> TurnSpec:
    said = {
        "request": RequestId("r"), "key": RoutingKey("k"), "model": "m", "prompt": FRAME, "hashes": HASHES.tobytes(),
        "block_size": 4, "seed": 1337, "sampling": Sampling(max_tokens=50, temperature=0.5),
        "session": SessionId("t/s"), "parent": SessionId("t/p"), "namespace": "t", "hints": Hints(priority=4),
        "client_timeout_s": 60.0, "inputs": lambda: ["one", "two"],
    }  # fmt: skip
    return TurnSpec(**(said | changes))  # type: ignore[arg-type]


def turn_of(one: TurnSpec) -> Turn:
    return Turn(one, reader=Nobody(), now=100.0, limits=TurnLimits())


def grant(attempt: int = 0, features: list[str] | None = None, worker: str = "w0") -> Grant:
    return Grant(
        RequestId("r"), attempt, LeaseId(7 + attempt), WorkerId(worker), "at", 3, {}, 9, priority=2,
        features=features or [],
    )  # fmt: skip


def say(turn: Turn, *tokens: int, finish: str = "", cached: int = -1, now: float = 101.0) -> None:
    assert turn.lease is not None
    entry = OutputEntry(
        turn.lease, turn.attempt, turn.attempt_tokens, len(tokens), cached, finish  # type: ignore[arg-type]
    )  # fmt: skip
    turn.output(entry, memoryview(token_frame(list(tokens))), now)


def test_a_later_attempt_is_routed_with_what_is_left_to_do() -> None:
    turn = turn_of(spec())
    first = route_of(turn, epoch=2, now=130.0, speedup=10.0)
    assert (first.attempt, first.input_tokens, first.max_tokens, first.resumed) == (0, 9, 50, 0)
    assert (first.waited_s, first.client_timeout_s, first.epoch) == (30.0, 600.0, 2)
    assert (first.session, first.parent, first.hints.priority) == ("t/s", "t/p", 4)
    turn.granted(grant(), 130.0)
    say(turn, 5, 6, 7)
    turn.revoked(LeaseId(7), "worker_lost", 131.0)
    again = route_of(turn, epoch=2, now=131.0, speedup=1.0)
    assert (again.attempt, again.input_tokens, again.max_tokens, again.resumed) == (1, 12, 47, 3)
    assert (again.avoid, again.waited_s) == (["w0"], 0.0)


@pytest.mark.parametrize(
    ("features", "inputs"),
    [([], []), (["kv_events", "script_inputs"], ["one", "two"]), (["last_input"], ["two"])],
)
def test_a_worker_is_told_what_it_wants_to_know(features: list[str], inputs: list[str]) -> None:
    turn = turn_of(spec())
    turn.granted(grant(features=features), 101.0)
    assert turn.grant is not None
    generate = generate_of(turn, turn.grant, owner=OwnerId("f"), incarnation=5)
    assert generate.script_inputs == inputs
    assert (generate.lease, generate.rank, generate.priority, generate.incarnation) == (7, 3, 2, 5)
    assert (generate.sampling.max_tokens, generate.namespace, generate.key) == (50, "t", "k")


def record(turn: Turn, identity: Identity = ANONYMOUS, **told: str) -> TraceRecord:
    intent = Intent(turn.spec, identity, Prompt(FRAME, HASHES), "user_message", "x-1")
    return record_of(
        intent, turn, owner=OwnerId("frontend-0"), model="m", received=99.0, received_unix_ms=1000,
        now_unix_ms=4000, reason=told.get("reason", ""), stop=told.get("stop"),
    )  # fmt: skip


def test_a_finished_turn_leaves_its_times_and_hashes_and_no_words() -> None:
    turn = turn_of(spec())
    turn.held(Hold(RequestId("r"), 0, "pressure", 60.0), 100.0)
    turn.granted(grant(), 100.5)
    say(turn, 1, cached=8, now=101.0)
    say(turn, 2, 3, finish="stop", now=102.0)
    left = record(turn, Identity("s", "p", "", True, "dynamo"), reason="stop", stop="END")
    assert left.agent_context is not None
    assert (left.agent_context.session_id, left.agent_context.parent_session_id) == ("s", "p")
    assert left.agent_context.session_final
    request = left.request
    assert request is not None
    assert (request.input_tokens, request.output_tokens, request.cached_tokens) == (9, 3, 8)
    assert (request.prefill_wait_time_ms, request.prefill_time_ms, request.ttft_ms) == (
        1500.0,
        500.0,
        2000.0,
    )
    assert (request.total_time_ms, request.avg_itl_ms) == (3000.0, 500.0)
    assert request.kv_hit_rate == pytest.approx(8 / 9)
    assert (request.router_admission_wait_ms, request.router_hold_reason) == (500.0, "pressure")
    assert (request.serving_worker_id, request.lease, request.policy_revision) == ("w0", 7, 9)
    assert request.worker is not None
    assert (request.worker.decode_worker_id, request.worker.decode_dp_rank) == (
        worker_number("w0"),
        3,
    )
    assert request.replay is not None
    assert array("Q", request.replay.input_sequence_hashes) == HASHES
    assert request.finish_reason_metadata is not None
    assert request.finish_reason_metadata.stop_reason == "END"
    assert request.outcome == "finished"
    assert json.loads(msgspec.json.encode(left))["schema"] == "dynamo.request.trace.v1"


def test_a_turn_that_never_ran_leaves_what_there_is() -> None:
    turn = turn_of(spec(session=SessionId(""), parent=SessionId("")))
    turn.cancel(101.0)
    left = record(turn)
    assert left.agent_context is None
    request = left.request
    assert request is not None
    assert (request.outcome, request.attempts) == ("cancelled", 1)
    assert request.worker is request.lease is request.ttft_ms is request.cached_tokens is None


def test_an_inferred_session_is_marked_and_an_error_named() -> None:
    turn = turn_of(spec(session=SessionId("anon-1"), parent=SessionId(""), inferred=True))
    turn.fail(TurnFailed("broken"), 101.0)
    left = record(turn)
    assert left.agent_context is not None
    assert (left.agent_context.session_id, left.agent_context.inferred) == ("anon-1", True)
    assert left.request is not None
    assert left.request.outcome == "turn_failed"
