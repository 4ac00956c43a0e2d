"""Every router is told the current policy and ring under one growing number, again after it booted."""

from __future__ import annotations

import msgspec

from fermata.core.spec import RouterPolicySpec, SchedulerSpec
from fermata.operator.policy_feed import PolicyFeed
from fermata.wire.messages import PolicyAck

KV_AWARE = RouterPolicySpec()
ROUND_ROBIN = RouterPolicySpec(scheduler=SchedulerSpec(type="RoundRobin"))
ONE = [("router-0", "tcp://127.0.0.1:1")]
TWO = [*ONE, ("router-1", "tcp://127.0.0.1:2")]


def ack(feed: PolicyFeed, *, applied: bool = True, reasons: list[str] | None = None) -> PolicyAck:
    message = feed.message()
    return PolicyAck(message.uid, message.generation, message.revision, applied, reasons or [])


def fed() -> PolicyFeed:
    feed = PolicyFeed(uid="u")
    assert feed.update(KV_AWARE, ONE)
    return feed


def test_each_change_gets_a_higher_revision_and_the_epoch_moves_with_the_ring_only() -> None:
    feed = fed()
    first = feed.message()
    assert (first.uid, first.generation, first.revision, first.ring.epoch) == ("u", 1, 1, 1)
    assert msgspec.json.decode(first.spec, type=RouterPolicySpec) == KV_AWARE

    assert not feed.update(KV_AWARE, ONE)
    assert feed.message() == first
    assert feed.update(ROUND_ROBIN, ONE)
    second = feed.message()
    assert (second.generation, second.revision, second.ring.epoch) == (2, 2, 1)
    assert feed.update(ROUND_ROBIN, TWO)
    third = feed.message()
    assert (third.generation, third.revision, third.ring.epoch) == (2, 3, 2)
    assert third.ring.members == TWO


def test_a_router_that_booted_needs_the_message_again() -> None:
    feed = fed()
    assert feed.take("router-0", ack(feed))
    assert not feed.needs("router-0", 1)
    assert feed.needs("router-0", 0), "whatever it once acknowledged, it says it has none"
    feed.forget("router-0")
    assert feed.acknowledged == set()
    assert feed.take("router-0", ack(feed)), "news again"


def test_an_answer_is_news_once_and_only_about_the_current_revision() -> None:
    feed = fed()
    late = ack(feed)
    feed.update(ROUND_ROBIN, ONE)
    assert not feed.take("router-0", late)
    assert feed.take("router-0", ack(feed))
    assert not feed.take("router-0", ack(feed))
    assert feed.acknowledged == {"router-0"}


def test_a_refusal_stands_until_the_policy_or_the_ring_changes() -> None:
    feed = fed()
    assert feed.take("router-0", ack(feed, applied=False, reasons=["odd"]))
    assert feed.refusals == {"router-0": ("odd",)}
    assert not feed.needs("router-0", 0), "asking again would get the same answer"
    assert not feed.take("router-0", ack(feed, applied=False, reasons=["odd"]))
    feed.update(KV_AWARE, TWO)
    assert feed.refusals == {}
    assert feed.needs("router-0", 0)
    assert feed.take("router-0", ack(feed, applied=False))
    assert feed.refusals == {"router-0": ("no reason given",)}
