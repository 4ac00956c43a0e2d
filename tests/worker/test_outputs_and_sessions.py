from __future__ import annotations

from fermata.core.hashing import token_frame
from fermata.core.ids import LeaseId, RoutingKey, SessionId
from fermata.wire.messages import OutputEntry, SessionRecord
from fermata.worker.engine.base import EngineOutput
from fermata.worker.outputs import OutputBuffer, gather
from fermata.worker.sessions import Sessions

ROOT, CHILD = SessionId("root"), SessionId("child")


def output(lease: int, *tokens: int, **extra: object) -> EngineOutput:
    return EngineOutput(lease=LeaseId(lease), tokens=token_frame(list(tokens)), **extra)  # type: ignore[arg-type]


def test_what_is_not_sent_coalesces_and_what_was_sent_is_not_sent_again() -> None:
    buffer = OutputBuffer(LeaseId(1), attempt=2)
    buffer.add(output(1, 5, cached_tokens=64), event_sequence=0)
    buffer.add(output(1, 6, 7, cached_tokens=64), event_sequence=0)
    entry, frame = buffer.entry()
    assert entry == OutputEntry(LeaseId(1), attempt=2, first=0, count=3, cached_tokens=64)
    assert frame == token_frame([5, 6, 7])
    assert buffer.entry() == (entry, frame)
    buffer.taken()
    buffer.add(output(1, 8, finish="stop", stop_token=8), event_sequence=17)
    entry, frame = buffer.entry()
    assert entry == OutputEntry(
        LeaseId(1),
        2,
        first=3,
        count=1,
        cached_tokens=64,
        finish="stop",
        stop_token=8,
        event_sequence=17,
    )
    assert frame == token_frame([8])
    assert (buffer.made, buffer.finish) == (4, "stop")


def test_logprobs_go_out_once_with_their_tokens() -> None:
    buffer = OutputBuffer(LeaseId(1), attempt=0)
    buffer.add(output(1, 5, logprobs=[[(5, 0.0)]]), event_sequence=0)
    buffer.add(output(1, 6, logprobs=[[(6, 0.0)]]), event_sequence=0)
    assert buffer.entry()[0].logprobs == [[(5, 0.0)], [(6, 0.0)]]
    buffer.taken()
    assert buffer.entry()[0].logprobs is None


def test_entries_and_their_tokens_are_gathered_in_one_order() -> None:
    buffers = [OutputBuffer(LeaseId(n), attempt=0) for n in (1, 2, 3)]
    buffers[0].add(output(1, 10, 11), event_sequence=0)
    buffers[1].add(output(2, finish="abort", error="draining"), event_sequence=3)
    buffers[2].add(output(3, 30), event_sequence=0)
    entries, frame = gather(buffers)
    assert [(e.lease, e.count, e.finish, e.error) for e in entries] == [
        (1, 2, "", ""),
        (2, 0, "abort", "draining"),
        (3, 1, "", ""),
    ]
    assert frame == token_frame([10, 11, 30])


def begin(
    sessions: Sessions, session: SessionId, *, now: float, rank: int = 0, tokens: int = 10
) -> None:
    sessions.begin(
        session, parent=SessionId(""), key=RoutingKey("key"), rank=rank, tokens=tokens, now=now
    )


def test_a_session_is_reasoning_while_a_turn_runs_and_idle_after_it() -> None:
    sessions = Sessions()
    sessions.begin(CHILD, parent=ROOT, key=RoutingKey("k"), rank=1, tokens=10, now=1.0)
    assert list(sessions.records(1, 5.0)) == [
        SessionRecord(CHILD, ROOT, RoutingKey("k"), context_tokens=10, idle_s=0.0, reasoning=True)
    ]
    assert list(sessions.records(0, 5.0)) == []
    sessions.end(CHILD, tokens=25, final=False, now=6.0)
    assert list(sessions.records(1, 9.5)) == [
        SessionRecord(CHILD, ROOT, RoutingKey("k"), context_tokens=25, idle_s=3.5)
    ]


def test_a_session_with_two_turns_is_idle_only_after_both() -> None:
    sessions = Sessions()
    begin(sessions, ROOT, now=0.0)
    begin(sessions, ROOT, now=1.0)
    sessions.end(ROOT, tokens=20, final=True, now=2.0)
    assert [r.reasoning for r in sessions.records(0, 3.0)] == [True]
    sessions.end(ROOT, tokens=30, final=False, now=3.0)
    assert [(r.reasoning, r.context_tokens) for r in sessions.records(0, 3.0)] == [(False, 30)]


def test_a_final_turn_forgets_its_session() -> None:
    sessions = Sessions()
    begin(sessions, ROOT, now=0.0)
    sessions.end(ROOT, tokens=20, final=True, now=2.0)
    assert len(sessions) == 0


def test_turns_without_a_session_leave_no_record() -> None:
    sessions = Sessions()
    begin(sessions, SessionId(""), now=0.0)
    sessions.end(SessionId(""), tokens=1, final=False, now=0.0)
    assert len(sessions) == 0


def test_sessions_are_bounded_and_the_one_used_longest_ago_is_forgotten() -> None:
    sessions = Sessions(limit=2)
    for number, name in enumerate(("a", "b")):
        begin(sessions, SessionId(name), now=float(number))
    sessions.end(SessionId("a"), tokens=1, final=False, now=5.0)
    begin(sessions, SessionId("c"), now=6.0)
    assert [r.session for r in sessions.records(0, 7.0)] == ["a", "c"]
