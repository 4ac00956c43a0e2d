"""The queue and overload in the router: classes, tiers, jumps, limits, shedding, expected output, and a live switch."""

from __future__ import annotations

import pytest

from fermata.core.spec import (
    AffinitySpec,
    OverloadSpec,
    PolicyClassSpec,
    QueueSpec,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
)
from fermata.router.overload import DrainRate, Overload
from fermata.router.policy_class import ClassUse, PolicyClasses
from fermata.wire import messages as wire

TINY = 0.02
"""Of 8192 batched tokens: 163.84. One turn of 170 puts a slot above it."""


def granted(world, frontend) -> list[str]:
    return [grant.request for grant in world.take(wire.Grant, frontend)]


def alive(world, seconds: int, *peers) -> None:
    for _ in range(seconds):
        world.wait(1.0)
        for peer in peers:
            world.beat(peer)


def one_slot(make_world, queue: QueueSpec | None = None, **policy):
    """A world with one slot, and a turn on it that keeps it above the queue's threshold."""
    queue = queue or QueueSpec(threshold=TINY)
    world = make_world(policy=RouterPolicySpec(queue=queue, **policy))
    world.peer = world.worker()
    world.client = world.frontend()
    world.last = world.grant(world.client, "fill", input_tokens=170).lease
    world.sent.clear()
    return world


def drain(world) -> list[str]:
    """Finish what runs, turn by turn, until nobody waits: the order in which they go."""
    order: list[str] = []
    while world.numbers["turns_waiting"]:
        world.progress(world.client, world.last, "cancelled")
        grants = world.take(wire.Grant, world.client)
        assert len(grants) == 1, "a turn at a time: each keeps the slot above the threshold"
        world.last = grants[0].lease
        order.append(grants[0].request)
    return order


class TestOrder:
    def test_first_come_first_served_but_for_those_who_jump(self, make_world):
        world = one_slot(make_world)
        for name, hints in (
            ("a", wire.Hints()),
            ("b", wire.Hints(priority=-5)),
            ("c", wire.Hints(priority=10)),
            ("d", wire.Hints(latency_sensitivity=20.0)),
            ("e", wire.Hints(priority=20, latency_sensitivity=5.0)),
        ):
            world.route(world.client, name, input_tokens=170, hints=hints)
            world.wait(0.5)
        assert drain(world) == ["d", "e", "c", "a", "b"]

    def test_last_come_first_served(self, make_world):
        world = one_slot(make_world, QueueSpec(threshold=TINY, order="LCFS"))
        for name in "abc":
            world.route(world.client, name, input_tokens=170)
            world.wait(0.5)
        assert drain(world) == ["c", "b", "a"]

    def test_shortest_uncached_first(self, make_world):
        world = one_slot(make_world, QueueSpec(threshold=TINY, order="WSPT"))
        world.stored(world.peer, 0, *range(1, 31))
        world.route(world.client, "long", input_tokens=2000)
        world.route(world.client, "cached", *range(1, 31), input_tokens=30 * 64 + 168)
        world.route(world.client, "short", input_tokens=170)
        world.route(world.client, "hurried", input_tokens=2000, hints=wire.Hints(priority=20))
        assert drain(world) == ["hurried", "cached", "short", "long"]

    def test_a_higher_tier_goes_before_everything(self, make_world):
        world = one_slot(make_world)
        for name, strict in (("a", 0), ("b", 3), ("c", 1), ("d", 3)):
            hints = wire.Hints(strict_priority=strict, priority=50 - 50 * bool(strict))
            world.route(world.client, name, input_tokens=170, hints=hints)
        assert drain(world) == ["b", "d", "c", "a"]

    def test_who_has_waited_for_fair_wait_goes_first(self, make_world):
        world = one_slot(make_world, QueueSpec(threshold=TINY, fair_wait_s=10.0))
        world.progress(world.client, world.last, "accepted")
        world.route(world.client, "old", input_tokens=170, waited_s=6.0)
        alive(world, 5, world.client, world.peer)
        world.route(world.client, "young", input_tokens=170, hints=wire.Hints(strict_priority=9))
        world.sent.clear()
        assert drain(world) == ["old", "young"]

    def test_age_from_elsewhere_counts(self, make_world):
        world = one_slot(make_world)
        world.route(world.client, "here", input_tokens=170)
        world.route(world.client, "there", input_tokens=170, waited_s=20.0)
        assert drain(world) == ["there", "here"]

    def test_a_turn_bound_hard_and_one_that_is_not_go_by_age(self, make_world):
        """They stand in lines of their own, and neither line comes first."""
        world = one_slot(make_world, session_affinity=AffinitySpec(mode="Hard"))
        world.progress(world.client, world.last, "cancelled")
        bound = world.grant(world.client, "h0", session="h", input_tokens=170).lease
        world.progress(world.client, bound, "accepted")
        world.last = bound
        for name, fields in (
            ("a", {}),
            ("h1", {"session": "h"}),
            ("b", {}),
            ("h2", {"session": "h"}),
        ):
            world.route(world.client, name, input_tokens=170, **fields)
            world.wait(0.1)
        world.sent.clear()
        assert drain(world) == ["a", "h1", "b", "h2"]

    def test_room_that_a_turn_makes_by_coming_again_is_first_for_those_who_wait(self, make_world):
        world = one_slot(make_world)
        world.route(world.client, "waits", input_tokens=170)
        world.sent.clear()
        again = wire.Route("fill", 1, "k", 0, "m", 170, 100)  # type: ignore[arg-type]
        world.say(world.client, again)
        assert granted(world, world.client) == ["waits"]
        assert [hold.request for hold in world.take(wire.Hold, world.client)] == ["fill"]


class TestClasses:
    classes = (
        PolicyClassSpec(name="batch", quantum=170, limit=50),
        PolicyClassSpec(name="chat", quantum=510, order="LCFS", limit=50),
    )

    def test_they_share_by_their_quanta(self, make_world):
        world = one_slot(make_world, QueueSpec(threshold=TINY, classes=list(self.classes)))
        for i in range(12):
            world.route(world.client, f"b{i}", input_tokens=170, policy_class="batch")
            world.route(world.client, f"c{i}", input_tokens=170, policy_class="chat")
            world.wait(0.1)
        order = drain(world)
        first = order[:8]
        assert [name[0] for name in first].count("c") == 6, "three quarters"
        assert [name for name in order if name[0] == "b"] == [f"b{i}" for i in range(12)]
        assert [name for name in order if name[0] == "c"] == [f"c{i}" for i in reversed(range(12))]

    def test_who_names_none_is_of_the_first_or_the_default_one(self):
        classes = PolicyClasses(QueueSpec(classes=list(self.classes)))
        assert [classes.of(name, int).name for name in ("chat", "", "nonsense")] == [
            "chat",
            "batch",
            "batch",
        ]
        classes = PolicyClasses(QueueSpec(classes=list(self.classes), default_class="chat"))
        assert classes.of("", int).name == "chat"
        assert [each.name for each in PolicyClasses(QueueSpec())] == ["default"]

    def test_a_family_has_classes_by_uncached_length(self, make_world):
        queue = QueueSpec(
            threshold=TINY,
            classes=[
                PolicyClassSpec(name="short", family="chat"),
                PolicyClassSpec(name="long", family="chat", min_uncached_tokens=3072),
            ],
        )
        world = one_slot(make_world, queue)
        world.stored(world.peer, 0, *range(1, 101))
        world.route(world.client, "a", input_tokens=3071, policy_class="chat")
        world.route(world.client, "b", input_tokens=3072, policy_class="chat")
        world.route(world.client, "c", *range(1, 101), input_tokens=6500, policy_class="chat")
        numbers = world.numbers
        assert (numbers["queue_short_turns"], numbers["queue_long_turns"]) == (2, 1)
        assert numbers["queue_short_uncached_tokens"] == 3071 + 100

    def test_a_class_with_a_threshold_of_its_own_waits_by_that(self, make_world):
        queue = QueueSpec(
            threshold=1.0,
            classes=[
                PolicyClassSpec(name="chat"),
                PolicyClassSpec(name="batch", threshold_tokens=100),
            ],
        )
        world = one_slot(make_world, queue)
        assert (
            world.route(world.client, "b", policy_class="batch", input_tokens=50).reason == "queue"
        )
        assert isinstance(world.route(world.client, "c", policy_class="chat"), wire.Grant)
        world.progress(world.client, world.last, "prefilled")
        assert granted(world, world.client) == ["c", "b"]

    def test_a_share_of_the_slots_above_the_threshold_can_be_enough(self, make_world):
        queue = QueueSpec(threshold=TINY, busy_share=0.5, limit=1)
        world = make_world(policy=RouterPolicySpec(queue=queue))
        for name in ("w0", "w1"):
            world.worker(name)
        frontend = world.frontend()
        world.grant(frontend, "fill", input_tokens=170)
        for name in ("a", "b"):
            assert world.route(frontend, name).reason == "queue"
        assert isinstance(world.route(frontend, "c"), wire.Grant), (
            "its queue is full, but one slot is not busy: nobody is refused"
        )

    def test_a_policy_that_makes_no_sense_is_refused_whole(self, world):
        before = world.router.state.policy
        good = QueueSpec(order="LCFS", classes=list(self.classes))
        world.set_policy(RouterPolicySpec(queue=good))
        for bad, field in (
            (QueueSpec(classes=[self.classes[0]] * 2), "queue.classes[1].name"),
            (
                QueueSpec(classes=[PolicyClassSpec(name="a", min_uncached_tokens=5)]),
                "queue.classes",
            ),
            (QueueSpec(default_class="x"), "queue.defaultClass"),
            (
                QueueSpec(
                    classes=[PolicyClassSpec(name=n, family="f") for n in ("a", "b")],
                ),
                "queue.classes[1].minUncachedTokens",
            ),
        ):
            ack = world.set_policy(RouterPolicySpec(queue=bad), revision=2)
            assert not ack.applied
            assert field in ack.reasons[0]
            assert world.router.state.policy == RouterPolicySpec(queue=good) != before
            assert world.router.state.policy_revision == 1


class TestOverload:
    """Refused is only whom no slot has room for and whose class's queue is full."""

    def world(self, make_world, **queue):
        spec = QueueSpec(**({"threshold": TINY, "limit": 2} | queue))
        return one_slot(make_world, spec)

    def refused(self, world, name: str, *chain: int, **fields) -> bool:
        settings = {"input_tokens": 170} | fields
        answer = world.route(world.client, name, *chain, **settings)
        assert isinstance(answer, wire.Hold | wire.Reject)
        return isinstance(answer, wire.Reject)

    def test_limits_are_exact_and_of_each_class(self, make_world):
        classes = [PolicyClassSpec(name="a"), PolicyClassSpec(name="b", limit=1)]
        world = self.world(make_world, classes=classes)
        assert [self.refused(world, f"a{i}") for i in range(4)] == [False, False, True, True]
        assert [self.refused(world, f"b{i}", policy_class="b") for i in range(2)] == [False, True]
        assert world.numbers["overloaded"] == 3
        world.progress(world.client, 0, "cancelled", request="a0")
        assert [self.refused(world, f"c{i}") for i in range(2)] == [False, True]
        world.worker("another")
        world.take(wire.Grant)
        assert not self.refused(world, "d0"), "limits are per worker"

    def test_limits_by_tokens(self, make_world):
        world = self.world(make_world, limit=100, input_tokens_limit=400)
        assert [self.refused(world, f"r{i}") for i in range(4)] == [False, False, False, True]
        world = self.world(make_world, limit=100, cached_tokens_limit=64 * 3)
        world.stored(world.peer, 0, 1, 2)
        found = [self.refused(world, f"r{i}", 1, 2) for i in range(3)]
        assert found == [False, False, True]

    def test_a_program_that_has_had_a_turn_is_never_refused(self, make_world):
        world = self.world(make_world)
        world.progress(world.client, world.last, "cancelled")
        first = world.grant(world.client, "s0", session="s").lease
        world.progress(world.client, first, "finished", usage=wire.Usage(32, 5))
        cancelled = world.grant(world.client, "t0", session="t").lease
        world.progress(world.client, cancelled, "cancelled")
        world.grant(world.client, "again", input_tokens=170)
        found = [self.refused(world, f"r{i}") for i in range(3)]
        assert found == [False, False, True]
        assert not self.refused(world, "s1", session="s")
        assert self.refused(world, "t1", session="t"), "its only turn came to nothing"
        assert self.refused(world, "u0", session="u")

    def test_priorities_above_the_line_and_turns_that_waited_or_ran_are_never_refused(
        self, make_world
    ):
        world = self.world(make_world, limit=1, priority_line=5)
        assert not self.refused(world, "first")
        assert self.refused(world, "at", hints=wire.Hints(priority=5))
        assert not self.refused(world, "above", hints=wire.Hints(priority=6))
        assert not self.refused(world, "waited", waited_s=3.0)
        assert self.refused(world, "on its way", waited_s=0.02)
        assert not self.refused(world, "migrated", attempt=1)
        assert self.refused(world, "last")

    def test_turns_that_wait_for_something_else_fill_no_queue(self, make_world):
        world = make_world(policy=RouterPolicySpec(queue=QueueSpec(limit=1)))
        frontend = world.frontend()
        for i in range(5):
            assert world.route(frontend, f"r{i}").reason == "no_worker"
        assert world.numbers["queue_default_turns"] == 0

    def test_when_to_come_again_follows_the_rate_at_which_turns_went(self, make_world):
        world = self.world(make_world, limit=10)
        world.progress(world.client, world.last, "accepted")
        for i in range(10):
            assert not self.refused(world, f"r{i}")
        assert world.route(world.client, "x0").retry_after_s == 5.0, "nothing went yet"
        for i in range(8):
            alive(world, 2, world.client, world.peer)
            world.progress(world.client, world.last, "cancelled")
            (grant,) = world.take(wire.Grant, world.client)
            world.last = grant.lease
            world.progress(world.client, world.last, "accepted")
            world.route(world.client, f"more{i}", input_tokens=170)
        reject = world.route(world.client, "x1", input_tokens=170)
        assert reject.retry_after_s == pytest.approx(20.0, rel=0.35), "ten wait, one went each 2 s"
        assert world.numbers["queue_default_drained_a_second"] == pytest.approx(0.5, rel=0.35)

    def test_the_rate_is_right_soon_and_forgets(self):
        rate = DrainRate()
        assert rate.a_second(5.0) == 0.0
        for i in range(200):
            rate.drained(i * 0.5)
            if i in (20, 60, 199):
                assert rate.a_second(i * 0.5) == pytest.approx(2.0, rel=0.12)
        assert rate.a_second(400.0) < 0.01

    def test_a_longest_time_to_come_again_is_kept(self):
        class Nobody:
            def get(self, session: object) -> None:
                return None

        overload = Overload(Nobody(), waited_s=1.0)
        (policy_class,) = PolicyClasses(QueueSpec())
        use = ClassUse(turns=100)
        assert overload.retry_after_s(policy_class, use, 0.0, most=3.0) == 3.0
        overload.drained(policy_class, 0.0)
        assert overload.retry_after_s(policy_class, use, 100.0, most=120.0) == 120.0
        assert overload.retry_after_s(policy_class, ClassUse(turns=1), 0.0, most=120.0) == 1.0
        overload.keep(set())
        assert overload.drain_rate(policy_class, 0.0) == 0.0

    def test_a_slot_is_busy_above_either_limit_of_prefill(self, make_world):
        overload = OverloadSpec(prefill_token_count=100, prefill_tokens=0.5)
        world = make_world(policy=RouterPolicySpec(overload=overload))
        world.worker()
        frontend = world.frontend()
        world.grant(frontend, "a", input_tokens=101)
        assert world.route(frontend, "b").reason == "queue"


class TestExpectedOutput:
    def world(self, make_world):
        world = make_world()
        world.peer = world.worker(kv_blocks={"device": 4096})
        world.client = world.frontend()
        return world

    def test_it_is_charged_at_the_grant_and_decays_as_tokens_arrive(self, make_world):
        world = self.world(make_world)
        lease = world.grant(
            world.client, "r", 1, 2, hints=wire.Hints(osl=320), max_tokens=4000
        ).lease
        # 160 tokens of input are 3 blocks; 480 in all are 8.
        assert (world.numbers["decode_blocks"], world.numbers["expected_blocks"]) == (8, 5)
        world.progress(world.client, lease, "tokens", output_tokens=100)
        assert (world.numbers["decode_blocks"], world.numbers["expected_blocks"]) == (8, 3)
        world.progress(world.client, lease, "tokens", output_tokens=320)
        assert (world.numbers["decode_blocks"], world.numbers["expected_blocks"]) == (8, 0)
        world.progress(world.client, lease, "tokens", output_tokens=500)
        assert (world.numbers["decode_blocks"], world.numbers["expected_blocks"]) == (11, 0)
        world.progress(world.client, lease, "finished", output_tokens=500)
        assert world.numbers["decode_blocks"] == 0

    @pytest.mark.parametrize(
        ("fields", "blocks"),
        [
            ({"hints": wire.Hints(osl=1_000_000), "max_tokens": 64}, 1),
            ({"hints": wire.Hints(osl=4_000_000_000), "max_tokens": 2**40}, 1023),
            ({"hints": wire.Hints(osl=100), "resumed": 100, "max_tokens": 900}, 0),
            ({"hints": wire.Hints(osl=164), "resumed": 100, "max_tokens": 900}, 1),
        ],
    )
    def test_it_is_never_more_than_there_can_be(self, make_world, fields, blocks):
        world = self.world(make_world)
        world.grant(world.client, "r", 1, input_tokens=64, **fields)
        assert world.numbers["expected_blocks"] == blocks

    def test_turns_go_where_less_is_expected(self, make_world):
        world = self.world(make_world)
        world.worker("w1")
        first = world.grant(world.client, "r0", hints=wire.Hints(osl=64 * 50), max_tokens=64 * 100)
        world.progress(world.client, first.lease, "prefilled")
        others = {world.grant(world.client, f"r{i}").worker for i in range(1, 6)}
        assert first.worker not in others

    def test_a_slot_is_not_busy_with_what_may_never_come(self, make_world):
        policy = RouterPolicySpec(overload=OverloadSpec(decode_blocks=0.5))
        world = make_world(policy=policy)
        world.worker(kv_blocks={"device": 40})
        frontend = world.frontend()
        world.grant(frontend, "r0", hints=wire.Hints(osl=500), max_tokens=1000)
        assert isinstance(world.route(frontend, "r1"), wire.Grant)

    def test_the_engine_is_told_the_priority_as_it_was_said(self, make_world):
        world = self.world(make_world)
        assert world.grant(world.client, "r", hints=wire.Hints(priority=-7)).priority == -7


class TestLiveSwitch:
    """Waiting turns are judged anew at once and go at the queue's rate; none is lost, doubled or refused."""

    def test_turns_that_a_switch_frees_do_not_all_go_at_once(self, make_world):
        world = one_slot(make_world, QueueSpec(threshold=TINY, limit=100))
        for i in range(20):
            world.route(world.client, f"r{i}", input_tokens=3000)
        policy = RouterPolicySpec(scheduler=SchedulerSpec(type="RoundRobin"))
        world.sent.clear()
        assert world.set_policy(policy).applied
        grants = world.take(wire.Grant, world.client)
        assert [grant.request for grant in grants] == ["r0", "r1", "r2"], (
            "a batch of 8192 tokens, and one behind"
        )
        assert {grant.policy_revision for grant in grants} == {1}
        holds = world.take(wire.Hold, world.client)
        assert [hold.request for hold in holds] == [f"r{i}" for i in range(3, 20)]
        assert {hold.reason for hold in holds} == {"policy"}
        late = world.route(world.client, "late", input_tokens=3000)
        assert (late.reason, late.request) == ("policy", "late"), "nobody overtakes them"
        order: list[str] = []
        open_leases = [world.last] + [grant.lease for grant in grants]
        while open_leases:
            world.progress(world.client, open_leases.pop(0), "cancelled")
            more = world.take(wire.Grant, world.client)
            assert len(more) <= 2
            order += [grant.request for grant in more]
            open_leases += [grant.lease for grant in more]
        assert order == [f"r{i}" for i in range(3, 20)] + ["late"]
        assert world.numbers.get("rejects", 0) == 0
        assert isinstance(world.route(world.client, "then", input_tokens=3000), wire.Grant)
        assert isinstance(world.route(world.client, "free", input_tokens=3000), wire.Grant), (
            "the new policy has no threshold"
        )

    def test_the_same_policy_again_changes_nothing(self, make_world):
        world = one_slot(make_world)
        world.route(world.client, "r0", input_tokens=170)
        world.sent.clear()
        assert world.set_policy(world.router.state.policy).applied
        assert world.take(wire.Hold, world.client) == []
        assert drain(world) == ["r0"]

    def test_a_turn_keeps_its_deadline_through_any_number_of_switches(self, make_world):
        thunder = ThunderAgentSpec(resume_timeout_s=30.0)
        scheduler = SchedulerSpec(type="RoundRobin", thunder_agent=thunder)
        world = one_slot(make_world, scheduler=scheduler)
        world.progress(world.client, world.last, "accepted")
        assert world.route(world.client, "r0", input_tokens=170).deadline_s == 30.0
        for revision in range(1, 6):
            alive(world, 5, world.client, world.peer)
            kind = "KVAware" if revision % 2 else "RoundRobin"
            policy = RouterPolicySpec(
                queue=QueueSpec(threshold=TINY, fair_wait_s=60.0 + revision),
                scheduler=SchedulerSpec(type=kind, thunder_agent=thunder),
            )
            assert world.set_policy(policy, revision=revision).applied
        assert granted(world, world.client) == []
        alive(world, 5, world.client, world.peer)
        assert granted(world, world.client) == ["r0"]
        assert world.numbers["forced"] == 1


def test_turns_that_waited_go_with_their_owner_and_leave_no_program_behind(world):
    frontend = world.frontend()
    assert world.route(frontend, "r", session="s").reason == "no_worker"
    assert world.numbers["programs"] == 1
    world.say(frontend, wire.Bye(1))
    assert (world.numbers["programs"], world.numbers["turns_waiting"]) == (0, 0)
    again = world.frontend(incarnation=2)
    assert world.route(again, "r", session="s").reason == "no_worker"


@pytest.mark.parametrize("waited_s", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_a_wait_that_makes_no_sense_is_taken_for_a_long_one_or_for_none(world, waited_s):
    frontend = world.frontend()
    hold = world.route(frontend, "r", waited_s=waited_s)
    assert 0 <= hold.deadline_s <= 60
