"""The small parts programs are made of: gaps, the mirror of an engine's evictions, windows, bounds, expiry's first."""

from __future__ import annotations

from array import array

import pytest

from fermata.core.spec import AimdSpec
from fermata.router.admission.aimd import Aimd
from fermata.router.chain_trie import ChainTrie
from fermata.router.eviction_order import EvictionOrder, IdleChain
from fermata.router.expiry import Expiry
from fermata.router.gap import GapHistogram, GapStatistics
from fermata.router.occupancy import REASONING, Occupancy
from fermata.router.program import extends
from fermata.router.program_table import ProgramTable
from fermata.wire.messages import SessionRecord


def chain(*names: int) -> memoryview:
    return memoryview(array("Q", names)).cast("B").cast("Q")


def make_table(**given) -> ProgramTable:
    table = ProgramTable(block_size=64, width_s=0.1, **given)
    table.open_slot(0, 1000, model="m")
    return table


def turn(table: ProgramTable, session: str, *names: int, now: float = 0.0, key: str = "") -> None:
    full = ("f0", key or f"{session}-{now}")
    table.begin(full, session=session, chain=chain(*names), tokens=len(names) * 64, now=now)  # type: ignore[arg-type]
    table.granted(full, 0)  # type: ignore[arg-type]
    table.end(full, "finished", now)  # type: ignore[arg-type]


def test_a_histogram_tells_mean_share_and_rate_of_return():
    gaps = GapHistogram(mean_s=7.0)
    assert (gaps.mean_s, gaps.share_within(5.0), gaps.rate(1.0)) == (7.0, 0.0, 1 / 7.0)
    for _ in range(90):
        gaps.add(1.0)
    for _ in range(10):
        gaps.add(600.0)
    assert gaps.mean_s == pytest.approx(60.9)
    assert gaps.share_within(2.0) == 0.9
    assert gaps.share_within(0.5) == 0.0
    assert gaps.rate(0.0) > 0.5, "most are back within a second or so"
    assert gaps.rate(30.0) < 0.01, "who is away for longer is away for long"
    assert gaps.rate(5000.0) > 0, "even beyond all that was seen"


def test_rates_are_fitted_anew_only_now_and_then_and_old_gaps_fade():
    gaps = GapHistogram(mean_s=7.0)
    gaps.add(1.0)
    before = gaps.rate(0.0)
    for _ in range(100):
        gaps.add(100.0)
    assert gaps.rate(0.0) == before
    for _ in range(100):
        gaps.add(100.0)
    assert gaps.rate(0.0) < before
    for _ in range(9000):
        gaps.add(0.01)
    assert gaps.mean_s < 3.0
    assert gaps.seen == 9201


def test_gaps_are_learned_by_class_as_programs_come_back():
    table = make_table()
    turn(table, "a", 1, now=0.0)
    turn(table, "a", 1, 2, now=4.0)
    assert table.gaps["tool"].seen == 1
    assert table.gaps["tool"].mean_s == 4.0
    assert GapStatistics()["human"].mean_s > GapStatistics()["tool"].mean_s


def test_the_mirror_orders_idle_chains_by_their_last_finish_and_forgets_what_is_evicted():
    order = EvictionOrder()
    for name, leaf in (("a", 10), ("b", 20), ("c", 20)):
        order.idle(0, IdleChain(name, leaf, 100, 0.0))  # type: ignore[arg-type]
    order.idle(0, IdleChain("a", 11, 120, 1.0))  # type: ignore[arg-type]
    assert [each.session for each in order.oldest(0)] == ["b", "c", "a"]
    order.busy(0, "b")  # type: ignore[arg-type]
    order.check_integrity()
    assert order.removed(0, [1, 10, 20]) == ["c"], "10 is no leaf any more"
    assert order.removed(1, [11]) == []
    assert len(order) == 1
    order.drop(0)
    assert list(order.oldest(0)) == []
    order.check_integrity()


def test_the_table_keeps_the_mirror():
    table = make_table()
    told: list[tuple[int, str]] = []

    class Watcher:
        def moved(self, program): ...
        def program_ended(self, program): ...
        def capacity_changed(self, slot): ...
        def chain_evicted(self, slot, session):
            told.append((slot, session))

    table.watcher = Watcher()
    turn(table, "a", 1, 2, now=0.0)
    turn(table, "b", 1, 3, now=1.0)
    assert [each.session for each in table.evictions.oldest(0)] == ["a", "b"]
    table.removed(0, chain(2))
    assert told == [(0, "a")]
    table.begin(("f0", "x"), session="b", chain=chain(1, 3, 4), tokens=192, now=2.0)  # type: ignore[arg-type]
    assert len(table.evictions) == 0, "a turn holds it"
    table.end(("f0", "x"), "cancelled", 3.0)  # type: ignore[arg-type]
    table.check_integrity()


def test_a_window_grows_by_steps_and_shrinks_by_a_factor():
    occupancy = Occupancy(block_size=64)
    room = occupancy.open(0, None, model="m")
    aimd = Aimd(occupancy, AimdSpec(initial=2, increase=1.0, decrease=0.5, turns=2))
    for _ in range(2):
        occupancy.charge(room, chain(), tokens=10, group=REASONING, stays=True)
    aimd.completed(0, found=90, expected=100)
    assert aimd.adapt() == [], "one turn tells nothing"
    aimd.completed(0, found=90, expected=100)
    assert aimd.adapt() == [0]
    assert aimd.budget.window(0) == 3.0
    for _ in range(2):
        aimd.completed(0, found=65, expected=100)
    assert aimd.adapt() == [], "neither good nor bad"
    for _ in range(2):
        aimd.completed(0, found=500, expected=100)
    aimd.adapt()
    assert aimd.budget.window(0) == 3.0, "it is not used, so nothing tells that more would do"
    for _ in range(2):
        aimd.completed(0, found=10, expected=100)
    assert aimd.adapt() == [0]
    assert aimd.budget.window(0) == 1.0
    aimd.forget(0)
    assert aimd.budget.window(0) == 2.0
    aimd.completed(7, found=1, expected=1)
    aimd.completed(7, found=1, expected=1)
    assert aimd.adapt() == [], "a slot that is closed"


def test_the_table_is_bounded_in_programs_and_in_blocks_and_forgets_the_idlest():
    table = make_table(most=3)
    for number, name in enumerate("abcd"):
        turn(table, name, number * 10 + 1, now=float(number))
    assert [table.get(name) is None for name in "abcd"] == [True, False, False, False]  # type: ignore[arg-type]
    assert table.ended["evicted"] == 1
    small = make_table(most_blocks=4)
    turn(small, "a", 1, 2, 3, now=0.0)
    turn(small, "b", 11, 12, now=1.0)
    turn(small, "c", 21, now=2.0)
    assert small.get("a") is None  # type: ignore[arg-type]
    assert small.blocks == 3
    small.check_integrity()


def test_what_has_a_turn_is_never_forgotten():
    table = make_table(most=1)
    table.begin(("f", "1"), session="a", chain=chain(1), tokens=64, now=0.0)  # type: ignore[arg-type]
    table.begin(("f", "2"), session="b", chain=chain(2), tokens=64, now=0.0)  # type: ignore[arg-type]
    assert len(table) == 2


def test_a_turn_without_a_session_is_no_programs():
    table = make_table()
    assert table.begin(("f", "1"), session="", chain=chain(1), tokens=64, now=0.0) is None  # type: ignore[arg-type]
    table.granted(("f", "1"), 0)  # type: ignore[arg-type]
    table.progress(("f", "1"), 5)  # type: ignore[arg-type]
    assert table.end(("f", "1"), "finished", 1.0) is None  # type: ignore[arg-type]
    assert not table.release("nobody")  # type: ignore[arg-type]


def test_a_record_is_charged_where_its_kv_is_unless_it_was_paused():
    table = make_table()
    table.remember(SessionRecord("a", "", "k", 500, 3.0), 0, 100.0)  # type: ignore[arg-type]
    table.remember(SessionRecord("b", "", "k", 300, 3.0, paused=True), 0, 100.0)  # type: ignore[arg-type]
    table.remember(SessionRecord("c", "", "k", 300, 4000.0), 0, 100.0)  # type: ignore[arg-type]
    assert [name for name in "abc" if table.get(name)] == ["a", "b"]  # type: ignore[arg-type]
    assert table.occupancy.use(0) == 500
    assert table.paused == 1
    table.check_integrity()


def test_prompts_go_on_from_one_another_or_do_not():
    assert extends(chain(1, 2), chain(1, 2, 3))
    assert extends(chain(1, 2, 3), chain(1, 2))
    assert not extends(chain(1, 2), chain(1, 3))
    assert not extends(chain(), chain(1)), "too short to tell"


def test_what_expires_first_can_be_seen():
    expiry: Expiry[str] = Expiry(width_s=1.0)
    assert expiry.first() is None
    expiry.set("late", 50.0)
    expiry.set("soon", 5.0)
    assert expiry.first() == "soon"
    expiry.cancel("soon")
    assert expiry.first() == "late"


def test_holding_after_equals_holding():
    for second in ((1, 2, 3), (1, 2, 3, 4), (1, 2), (1, 9), (7,), ()):
        after, plain = ChainTrie(), ChainTrie()
        for trie in (after, plain):
            trie.hold(chain(1, 2, 3, 4, 5), 8)
        one, other = (trie.hold(chain(1, 2, 3), 0) for trie in (after, plain))
        after.hold_after(one, chain(*second), 0)
        plain.hold(chain(*second), 0)
        after.release(one, 0)
        plain.release(other, 0)
        for trie in (after, plain):
            trie.check_integrity()
        assert after.size(0) == plain.size(0) == len(second)
        assert after.match(chain(1, 2, 3, 4)) == plain.match(chain(1, 2, 3, 4))
