"""What `fermata programs` and `fermata explain` print."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from fermata.operator.explain import explanation, request_of
from fermata.operator.local.watching import watch
from fermata.operator.programs import LONGEST_NAME, seconds, shortened, summary, table
from fermata.wire.messages import Candidate, Decision, ProgramRow


def row(session: str, **fields: Any) -> ProgramRow:
    settings: dict[str, Any] = {
        "session": session, "parent": "", "phase": "acting", "state": "active", "worker": "sim-0", "rank": 0,
        "context_tokens": 700, "steps": 3, "turns": 0, "idle_s": 4.0, "waited_s": 0.0, "reason": "", "gap": "tool",
    }  # fmt: skip
    return ProgramRow(**(settings | fields))


def test_programs_are_a_table_with_those_that_wait_first() -> None:
    rows = [
        row("idle", idle_s=130.0),
        row("busy", phase="reasoning", turns=1, idle_s=0.0),
        row("new", phase="reasoning", state="new", worker="", waited_s=2.5, reason="admission", turns=1),
        row("old", phase="reasoning", state="paused", worker="", waited_s=70.0, reason="pressure", turns=1),
        row("going", is_marked=True, phase="reasoning", turns=2, is_final=True),
    ]  # fmt: skip
    lines = table(rows, limit=10).splitlines()
    assert [line.split()[0] for line in lines] == [
        "program", "old", "new", "busy", "going", "idle",
    ]  # fmt: skip
    assert lines[1].split() == [
        "old", "reasoning", "paused", "-", "700", "3", "1", "-", "70.0", "s", "pressure",
    ]  # fmt: skip
    assert "active (marked, final)" in lines[4]
    assert "sim-0/0" in lines[3]
    assert lines[5].split()[-4:] == ["2", "min", "-", "-"]
    assert summary(rows, routers=1) == (
        "5 programs on 1 router: 4 reasoning, 2 of them waiting; 1 paused"
    )
    assert summary([], routers=2).startswith("0 programs on 2 routers")


def test_a_long_table_says_how_much_it_left_out() -> None:
    text = table([row(f"s{i}") for i in range(5)], limit=3)
    assert len(text.splitlines()) == 5
    assert text.endswith("... and 2 programs more (--limit)")
    assert table([row("a"), row("b")], limit=1).endswith("1 program more (--limit)")


def test_a_client_s_id_can_neither_widen_the_table_nor_reach_the_terminal() -> None:
    assert shortened("a\x1b[31mb\n") == "a?[31mb?"
    long = shortened("x" * 200 + "end")
    assert len(long) == LONGEST_NAME
    assert long.endswith("end")
    assert shortened("y" * LONGEST_NAME) == "y" * LONGEST_NAME


def test_times_are_short() -> None:
    assert [seconds(s) for s in (0.04, 99.9, 600.0, 86_400.0)] == [
        "0.0 s", "99.9 s", "10 min", "24.0 h",
    ]  # fmt: skip


def decision(what: str, **fields: Any) -> Decision:
    settings: dict[str, Any] = {
        "age_s": 1.0, "request": "r1", "attempt": 0, "owner": "frontend-0", "session": "s", "what": what,
        "policy": "ThunderAgent", "policy_revision": 4, "input_tokens": 900,
    }  # fmt: skip
    return Decision(**(settings | fields))


def test_a_turn_s_decisions_are_told_in_their_order_with_candidates_and_reasons() -> None:
    candidates = [
        Candidate("sim-1", 0, True, 12.5, {"device": 9, "host": 2}, 3),  # type: ignore[arg-type]
        Candidate("sim-0", 1, False, None, {}, 0),  # type: ignore[arg-type]
    ]
    text = explanation(
        [
            decision("grant", reason="cost", worker="sim-1", waited_s=1.7, candidates=candidates),
            decision("hold", age_s=3.0, reason="pressure", waited_s=1800.0),
        ]
    )
    lines = text.splitlines()
    assert lines[0] == "request r1 of s, 900 tokens, asked by frontend-0"
    assert "held (pressure): its program is paused" in lines[1]
    assert "for 30 min at most" in lines[1]
    assert "granted to sim-1/0 after 1.7 s, it was the cheapest" in lines[2]
    assert "revision 4" in lines[2]
    assert lines[4].split() == [">", "sim-1/0", "yes", "12.50", "9", "device,", "2", "host", "3"]
    assert lines[5].split() == ["sim-0/1", "no", "-", "-", "0"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"what": "reject", "reason": "overloaded: full"}, "refused, overloaded: full"),
        ({"what": "moved"}, "sent on to the router"),
        ({"what": "hold", "reason": "queue", "waited_s": -1.0}, "for 0.0 s at most"),
        ({"what": "grant", "reason": "affinity", "worker": "w"}, "its session is bound there"),
    ],
)
def test_each_kind_of_decision_has_its_words(what: dict[str, Any], words: str) -> None:
    assert words in explanation([decision(**what)])


def test_decisions_of_several_turns_are_told_apart() -> None:
    text = explanation([decision("moved", request="a", session=""), decision("moved", request="b")])
    assert "request a, of no session" in text
    assert "request b of s" in text


def test_a_request_is_found_by_whatever_its_client_saw_of_it() -> None:
    assert request_of("chatcmpl-abc") == request_of("cmpl-abc") == request_of("abc") == "abc"


async def test_a_watch_draws_again_and_again() -> None:
    out, looks = io.StringIO(), iter(["one", "two"])

    async def draw() -> str:
        await asyncio.sleep(0)
        return next(looks)

    await watch(draw, out=out, every_s=0.001, times=2)
    assert out.getvalue() == "one\n\ntwo\n"


async def test_on_a_terminal_it_draws_in_place() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()

    async def draw() -> str:
        return "look"

    await watch(draw, out=out, every_s=0.001, times=2)
    assert out.getvalue() == "\x1b[H\x1b[2Jlook\n" * 2
