"""Routers come and go: sessions, programs and waiting turns find their new router, and nothing else moves."""

from __future__ import annotations

import msgspec
import pytest

from fermata.core.ids import RouterId, RoutingKey, SessionId
from fermata.core.ring import Ring
from fermata.core.spec import OverloadSpec, RouterPolicySpec, SchedulerSpec
from fermata.router.shares import Shares
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

OPERATOR = Peer(wire.Role.OPERATOR, "operator", 1)

ONE = wire.Ring(1, [("router-0", "tcp://a")])
TWO = wire.Ring(2, [("router-0", "tcp://a"), ("router-1", "tcp://b")])
OTHER = Peer(wire.Role.ROUTER, "router-1", 5)
KEYS = [f"key-{i}" for i in range(40)]


def of(ring: wire.Ring, router: str) -> list[str]:
    members = {RouterId(name): at for name, at in ring.members}
    return [key for key in KEYS if Ring(1, members).router_for(RoutingKey(key)) == router]


HERE, THERE = of(TWO, "router-0"), of(TWO, "router-1")


def run(world, frontend, key: str, request: str) -> wire.Grant:
    grant = world.grant(frontend, request, 1, 2, key=key, session=SessionId(key), epoch=1)
    world.progress(frontend, grant.lease, "accepted")
    world.progress(frontend, grant.lease, "finished")
    return grant


@pytest.fixture
def ringed(world):
    world.set_policy(RouterPolicySpec(), revision=1, ring=ONE)
    return world


def handovers(world) -> dict[str, list[wire.Handover]]:
    found: dict[str, list[wire.Handover]] = {}
    for send in [s for s in world.sent if isinstance(s.message, wire.Handover)]:
        found.setdefault(send.to.id, []).append(send.message)
        world.sent.remove(send)
    return found


def test_sessions_whose_key_moved_go_to_their_router_and_no_others(ringed):
    world = ringed
    world.worker("w0")
    frontend = world.frontend()
    for i, key in enumerate(KEYS):
        run(world, frontend, key, f"r{i}")
    assert world.numbers["sessions"] == len(KEYS)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    ((router, (message,)),) = handovers(world).items()
    assert router == "router-1"
    assert {r.session for r in message.programs} == set(THERE)
    assert {(r.worker, r.rank) for r in message.programs} == {("w0", 0)}
    assert message.workers == ["w0"]
    assert world.numbers["sessions"] == len(HERE)


def test_everybody_hears_of_the_ring_at_once(ringed):
    world = ringed
    worker, frontend = world.worker("w0"), world.frontend()
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    for peer in (worker, frontend):
        (ack,) = world.take(wire.HeartbeatAck, peer)
        assert (ack.known, ack.ring_epoch) == (True, 2)


def test_a_waiting_turn_is_told_to_move_and_keeps_its_age(make_world):
    world = make_world()
    world.set_policy(RouterPolicySpec(), revision=1, ring=ONE)
    world.wait(6)
    frontend = world.frontend()
    key = THERE[0]
    assert world.route(frontend, "held", 1, key=key, epoch=1, waited_s=7.0).reason == "no_worker"
    stays = world.route(frontend, "stays", 1, key=HERE[0], epoch=1)
    assert stays.reason == "no_worker"
    world.beat(frontend)
    world.wait(2)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    (moved,) = world.take(wire.Moved, frontend)
    assert (moved.request, moved.ring.epoch) == ("held", 2)
    ((_, (message,)),) = handovers(world).items()
    (turn,) = message.turns
    assert (turn.owner, turn.request, turn.waited_s) == ("f0", "held", pytest.approx(9.0))
    assert world.numbers["turns_waiting"] == 1


def test_the_new_router_takes_the_turn_at_the_age_it_had(make_world):
    world = make_world(id=RouterId("router-1"), number=4)
    world.set_policy(
        RouterPolicySpec(overload=OverloadSpec(no_worker_wait_s=60.0)), revision=2, ring=TWO
    )
    world.wait(6)
    frontend = world.frontend()
    turn = wire.HeldTurn("f0", "held", 50.0)
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, [], [turn]))
    hold = world.route(frontend, "held", 1, key=THERE[0], epoch=2, waited_s=1.0)
    assert hold.deadline_s == pytest.approx(10.0, abs=0.5)


def test_a_session_that_was_handed_over_stays_with_its_slot(make_world):
    world = make_world(id=RouterId("router-1"), number=4)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    key = THERE[0]
    records = [
        wire.SessionRecord(SessionId(key), SessionId(""), RoutingKey(key), 0, 1.0, worker="w1"),
        wire.SessionRecord(
            SessionId(HERE[0]), SessionId(""), RoutingKey(HERE[0]), 0, 1.0, worker="w1"
        ),
    ]
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, records, [], ["w0", "w1"]))
    world.worker("w0")
    frontend = world.frontend()
    hold = world.route(frontend, "r", key=key, session=SessionId(key), epoch=2)
    assert hold.reason == "booting", "w1 is known to exist"
    world.worker("w1")
    (grant,) = world.take(wire.Grant, frontend)
    assert grant.worker == "w1"
    assert world.numbers["sessions"] == 1, "the other one's key is not ours"


def test_a_new_router_waits_no_longer_than_a_boot_for_workers_it_was_told_of(make_world):
    world = make_world(id=RouterId("router-1"), number=4)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    world.wait(20)
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, [], [], ["w0", "gone"]))
    worker = world.worker("w0")
    frontend = world.frontend()
    assert world.route(frontend, "r", key=THERE[0], epoch=2).reason == "booting"
    for _ in range(6):
        world.wait(1)
        world.beat(worker)
        world.beat(frontend)
    (grant,) = world.take(wire.Grant, frontend)
    assert grant.worker == "w0"


def test_a_handover_that_comes_before_its_epoch_is_believed(make_world):
    world = make_world(id=RouterId("router-1"), number=4)
    world.worker("w0")
    record = wire.SessionRecord(
        SessionId("s"), SessionId(""), RoutingKey(THERE[0]), 0, 1.0, worker="w0"
    )
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, [record], []))
    assert world.numbers["sessions"] == 1
    assert world.numbers["handovers_taken"] == 1
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, [record], []))
    assert world.numbers["sessions"] == 1


def test_a_boots_first_ring_sends_nothing_and_forgets_what_is_not_its_own(make_world):
    world = make_world()
    worker = world.worker("w0", snapshot=False)
    (ask,) = world.take(wire.SnapshotRequest, worker)
    records = [
        wire.SessionRecord(SessionId(key), SessionId(""), RoutingKey(key), 640, 3.0) for key in KEYS
    ]
    world.say(worker, wire.SnapshotChunk(ask.rank, ask.request, 0, True, -1, [], records))
    assert world.numbers["sessions"] == len(KEYS)
    world.set_policy(RouterPolicySpec(), revision=9, ring=TWO)
    assert handovers(world) == {}
    assert world.numbers["sessions"] == len(HERE)


def test_a_booted_router_remembers_sessions_by_their_workers(make_world):
    world = make_world()
    for name, idle_s in (("w0", 30.0), ("w1", 3.0)):
        worker = world.worker(name, snapshot=False)
        (ask,) = world.take(wire.SnapshotRequest, worker)
        record = wire.SessionRecord(SessionId("s"), SessionId(""), RoutingKey("k"), 640, idle_s)
        world.say(worker, wire.SnapshotChunk(ask.rank, ask.request, 0, True, -1, [], [record]))
    frontend = world.frontend()
    assert world.grant(frontend, "r", session=SessionId("s")).worker == "w1", "the latest use"
    child = wire.SessionRecord(SessionId("c"), SessionId("p"), RoutingKey("p"), 640, 5000.0)
    world.say(
        Peer(wire.Role.ROUTER, "router-1", 1),
        wire.Handover(0, [msgspec.structs.replace(child, worker="w0")], []),
    )
    assert world.numbers["sessions"] == 1, "too old to bind anything"


def test_a_share_is_what_the_worker_leases_and_all_of_it_where_it_leases_none():
    shares = Shares()
    shares.open(3, capacity=1000)
    assert shares.tokens(3) == 1000
    assert shares.told(3, tokens=400, number=7)
    assert (shares.tokens(3), shares.number(3)) == (400, 7)
    assert not shares.told(3, tokens=400, number=8)
    assert shares.told(3, tokens=5000, number=9)
    assert shares.tokens(3) == 1000
    assert not shares.told(3, tokens=0, number=0), "it leases none"
    shares.close(3)
    assert shares.tokens(3) == 0


def test_each_load_report_is_answered_with_what_we_ask_of_the_rank(world):
    worker = world.worker("w0")
    frontend = world.frontend()
    world.grant(frontend, "r", 1, 2)
    world.load(worker, share_tokens=900, share_number=5)
    (demand,) = world.take(wire.Demand, worker)
    assert demand.ranks == [wire.RankDemand(0, 3 * 64, 0, 5)]
    world.say(worker, wire.DrainStatus("draining", 1))
    world.route(frontend, "waits", 1)
    world.wait(1)
    world.load(worker, share_tokens=900, share_number=5)
    (demand,) = world.take(wire.Demand, worker)
    assert demand.ranks[0].waiting_tokens == 64 + 32


def test_a_router_out_of_the_ring_goes_when_its_turns_have_ended(ringed):
    world = ringed
    world.worker("w0")
    frontend = world.frontend()
    grant = world.grant(frontend, "r", 1, epoch=1)
    assert world.say(OPERATOR, wire.Drain(30.0)) == [wire.DrainStatus("drained", 1)]
    assert not world.router.is_drained, "it is in the ring: whoever asked may end it, it will not"
    away = wire.Ring(2, [("router-1", "tcp://b")])
    world.set_policy(RouterPolicySpec(), revision=2, ring=away)
    assert world.say(OPERATOR, wire.Drain(30.0)) == [wire.DrainStatus("draining", 1)]
    assert not world.router.is_drained
    world.progress(frontend, grant.lease, "finished")
    assert world.take(wire.DrainStatus, OPERATOR)[-1] == wire.DrainStatus("drained", 0)
    assert world.router.is_drained


def test_it_goes_at_the_deadline_at_the_latest(ringed):
    world = ringed
    worker, frontend = world.worker("w0"), world.frontend()
    grant = world.grant(frontend, "r", 1, epoch=1)
    world.progress(frontend, grant.lease, "accepted")
    world.set_policy(RouterPolicySpec(), revision=2, ring=wire.Ring(2, [("router-1", "tcp://b")]))
    world.say(OPERATOR, wire.Drain(9.0))
    world.say(OPERATOR, wire.Drain(2.0))
    for _ in range(2):
        world.wait(1)
        world.beat(worker)
        world.beat(frontend, leases=[grant.lease], seen=grant.lease)
    assert world.router.is_drained


def test_a_router_called_back_into_the_ring_serves_again(ringed):
    world = ringed
    world.worker("w0")
    frontend = world.frontend()
    world.grant(frontend, "r", 1, epoch=1)
    world.set_policy(RouterPolicySpec(), revision=2, ring=wire.Ring(2, [("router-1", "tcp://b")]))
    world.say(OPERATOR, wire.Drain(30.0))
    ring = wire.Ring(3, TWO.members)
    back = wire.SetPolicy("u", 1, 3, msgspec.json.encode(RouterPolicySpec()), ring)
    assert wire.DrainStatus("serving", 1) in world.say(OPERATOR, back)
    world.wait(40)
    assert not world.router.is_drained


def test_an_owner_that_leaves_with_the_ring_is_not_called_dead(ringed):
    world = ringed
    worker, frontend = world.worker("w0"), world.frontend()
    world.set_policy(RouterPolicySpec(), revision=2, ring=wire.Ring(2, [("router-1", "tcp://b")]))
    world.say(frontend, wire.Bye(1, wire.LEFT_RING))
    world.frontend("silent")
    for _ in range(7):
        world.wait(1)
        world.beat(worker)
    assert world.numbers["owners"] == 0
    assert world.take(wire.Fence, worker) == []


def snapshot_of(world, worker, records) -> None:
    (ask,) = world.take(wire.SnapshotRequest, worker)
    world.say(worker, wire.SnapshotChunk(ask.rank, ask.request, 0, True, -1, [], records))


def record(name: str, *, tokens: int, idle_s: float, **fields) -> wire.SessionRecord:
    return wire.SessionRecord(
        SessionId(name), SessionId(""), RoutingKey(name), tokens, idle_s, **fields
    )


def test_programs_are_rebuilt_after_a_boot_and_fill_no_more_than_pausing_would_leave(make_world):
    scheduler = SchedulerSpec(type="ThunderAgent")
    world = make_world(policy=RouterPolicySpec(scheduler=scheduler))
    worker = world.worker("w0", snapshot=False)  # 65,536 tokens
    records = [record(f"p{i}", tokens=8000, idle_s=100.0 - i) for i in range(16)]  # twice as much
    snapshot_of(world, worker, records)
    numbers = world.numbers
    assert (numbers["programs"], numbers["programs_paused"]) == (16, 10)
    assert 0.7 < numbers["occupancy_max"] <= 0.8
    places = {p.session for p in world.router.state.programs if not p.is_paused}
    assert places == {f"p{i}" for i in range(10, 16)}, "those used last"


def test_of_two_workers_the_one_that_had_the_session_last_is_believed(make_world):
    world = make_world()
    for name, idle_s in (("w0", 50.0), ("w1", 5.0), ("w2", 90.0)):
        worker = world.worker(name, snapshot=False)
        snapshot_of(world, worker, [record("s", tokens=640, idle_s=idle_s)])
    (program,) = world.router.state.programs
    assert world.router.state.seats[program.slot].worker == "w1"
    frontend = world.frontend()
    world.grant(frontend, "r", 1, session=SessionId("s"))
    worker = world.worker("w3", snapshot=False)
    snapshot_of(world, worker, [record("s", tokens=640, idle_s=0.0)])
    assert world.router.state.seats[program.slot].worker == "w1", "its own turn says more"


def test_programs_move_with_their_keys_and_those_with_turns_when_these_have_ended(ringed):
    world = ringed
    world.worker("w0")
    frontend = world.frontend()
    idle, busy = THERE[:2]
    run(world, frontend, idle, "r1")
    grant = world.grant(frontend, "r2", 1, 2, key=busy, session=SessionId(busy), epoch=1)
    world.progress(frontend, grant.lease, "accepted")
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    ((_, (message,)),) = handovers(world).items()
    assert [r.session for r in message.programs if r.context_tokens] == [idle]
    assert world.numbers["programs"] == 1
    world.progress(frontend, grant.lease, "finished", usage=wire.Usage(160, 9))
    ((_, (late,)),) = handovers(world).items()
    (told,) = late.programs
    assert (told.session, told.context_tokens, told.worker) == (busy, 169, "w0")
    assert world.numbers["programs"] == 0
    assert world.numbers["leases"] == 0


def test_a_program_whose_last_turn_was_final_is_nobodys_any_more(ringed):
    world = ringed
    world.worker("w0")
    frontend = world.frontend()
    key = THERE[0]
    grant = world.grant(frontend, "r", 1, key=key, session=SessionId(key), epoch=1, final=True)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    handovers(world)
    world.progress(frontend, grant.lease, "finished")
    assert handovers(world) == {}
    assert world.numbers["programs"] == 0


def test_a_paused_program_is_handed_over_as_that(make_world):
    world = make_world(id=RouterId("router-1"), number=4)
    world.set_policy(RouterPolicySpec(), revision=2, ring=TWO)
    world.worker("w0")
    paused = record(THERE[0], tokens=900, idle_s=4.0, paused=True, finish_class="human")
    world.say(Peer(wire.Role.ROUTER, "router-0", 1), wire.Handover(2, [paused], []))
    (program,) = world.router.state.programs
    assert (program.is_paused, program.gap, program.context_tokens) == (True, "human", 900)
