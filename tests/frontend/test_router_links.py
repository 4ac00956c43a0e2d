from __future__ import annotations

from typing import Any

from fermata.core.ids import LeaseId, RouterId
from fermata.frontend.router_links import RouterPeer
from fermata.wire.messages import LeaseProgress

NO_LINK: Any = None


def said(*entries: tuple[int, str]) -> list[tuple[int, str]]:
    peer = RouterPeer(RouterId("router-0"), NO_LINK)
    for lease, kind in entries:
        peer.gather(LeaseProgress(LeaseId(lease), kind))  # type: ignore[arg-type]
    taken = [(entry.lease, entry.kind) for entry in peer.take()]
    assert not peer.outbox
    assert not peer.latest
    return taken


def test_a_later_word_about_a_lease_says_the_earlier_ones() -> None:
    assert said((1, "accepted"), (1, "prefilled"), (1, "tokens"), (1, "finished")) == [
        (1, "finished")
    ]


def test_leases_do_not_speak_for_one_another() -> None:
    assert said((1, "accepted"), (2, "accepted"), (1, "prefilled")) == [
        (1, "prefilled"),
        (2, "accepted"),
    ]


def test_an_end_that_is_no_success_leaves_what_was_said_before_it() -> None:
    assert said((1, "accepted"), (1, "failed")) == [(1, "accepted"), (1, "failed")]
    assert said((1, "prefilled"), (1, "cancelled")) == [(1, "prefilled"), (1, "cancelled")]
