"""How long a turn may be held: as its client can bear it."""

from __future__ import annotations

from typing import Any

import pytest

from fermata.core.ids import SessionId
from fermata.core.spec import RouterPolicySpec, SchedulerSpec, ThunderAgentSpec
from fermata.wire import messages as wire

THUNDER = RouterPolicySpec(
    scheduler=SchedulerSpec(
        type="ThunderAgent", thunder_agent=ThunderAgentSpec(resume_timeout_s=1800.0)
    )
)


@pytest.mark.parametrize(
    ("speedup", "fields", "deadline_s"),
    [
        (1.0, {}, 1800.0),
        (1.0, {"streaming": False}, 240.0),
        (1.0, {"streaming": False, "client_timeout_s": 600.0}, 240.0),
        (1.0, {"streaming": False, "client_timeout_s": 100.0}, 70.0),
        (1.0, {"streaming": False, "client_timeout_s": 10.0}, 0.0),
        (1.0, {"streaming": True, "client_timeout_s": 100.0}, 1800.0),
        (1.0, {"waited_s": 300.0}, 1500.0),
        (5.0, {"streaming": False}, 1200.0),
        (5.0, {"streaming": False, "client_timeout_s": 100.0}, 350.0),
        (50.0, {"streaming": False}, 1800.0),
    ],
)
def test_a_hold_ends_before_its_client_gives_up(
    make_world: Any, speedup: float, fields: dict[str, Any], deadline_s: float
) -> None:
    """Clients live in real seconds, whatever the deployment's speedup; the policy's time-out does not."""
    world = make_world(policy=THUNDER, speedup=speedup)
    world.worker("w0", kv_blocks={"device": 80})
    frontend = world.frontend()
    world.grant(frontend, "big", *range(1, 16), session=SessionId("big"))
    hold = world.route(frontend, "r", *range(101, 110), session=SessionId("s"), **fields)
    assert isinstance(hold, wire.Hold)
    assert (hold.reason, hold.deadline_s) == ("admission", pytest.approx(deadline_s))
