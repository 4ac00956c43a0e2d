"""From Route to Grant, and what an owner says of its lease afterwards."""

from __future__ import annotations

from fermata.core.ids import lease_incarnation, lease_router, lease_serial
from fermata.wire import messages as wire


def test_a_route_is_granted_on_a_worker_that_is_in(world):
    worker = world.worker(features=["priority"])
    frontend = world.frontend()
    grant = world.grant(frontend, "r1", 1, 2, 3, hints=wire.Hints(priority=4))
    assert (grant.request, grant.attempt, grant.worker, grant.rank) == ("r1", 0, worker.id, 0)
    assert (grant.endpoint, grant.priority, grant.features) == ("tcp://w0", 4, ["priority"])
    assert grant.matched == {}
    assert (lease_router(grant.lease), lease_incarnation(grant.lease)) == (3, 77)
    assert lease_serial(grant.lease) == 1
    assert world.numbers["leases"] == 1
    assert world.numbers["pending_prefill_tokens"] == 3 * 64 + 32
    assert world.numbers["decode_blocks"] == 4
