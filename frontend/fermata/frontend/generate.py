"""A turn as the router and the worker are told it: Route and Generate of its present attempt."""

from __future__ import annotations

from fermata.core.ids import OwnerId
from fermata.frontend.turn import Turn
from fermata.wire.messages import Generate, Grant, Route


def route_of(turn: Turn, *, epoch: int, now: float, speedup: float) -> Route:
    """A client's patience is in its own seconds, everything else here in the deployment's."""
    spec = turn.spec
    return Route(
        request=spec.request,
        attempt=turn.attempt,
        key=spec.key,
        epoch=epoch,
        model=spec.model,
        input_tokens=turn.input_tokens,
        max_tokens=spec.sampling.max_tokens - turn.resumed,
        session=spec.session,
        parent=spec.parent,
        inferred=spec.inferred,
        final=spec.final,
        streaming=spec.streaming,
        client_timeout_s=spec.client_timeout_s * speedup,
        hints=spec.hints,
        namespace=spec.namespace,
        lora=spec.lora,
        resumed=turn.resumed,
        avoid=turn.avoid,
        policy_class=spec.policy_class,
        waited_s=turn.waited_s(now),
    )


def generate_of(turn: Turn, grant: Grant, *, owner: OwnerId, incarnation: int) -> Generate:
    spec = turn.spec
    inputs: list[str] = []
    if "script_inputs" in grant.features:
        inputs = spec.inputs()
    elif "last_input" in grant.features:
        inputs = spec.inputs()[-1:]
    return Generate(
        lease=grant.lease,
        request=spec.request,
        attempt=turn.attempt,
        owner=owner,
        incarnation=incarnation,
        sampling=spec.sampling,
        rank=grant.rank,
        resumed=turn.resumed,
        priority=grant.priority,
        session=spec.session,
        parent=spec.parent,
        key=spec.key,
        final=spec.final,
        namespace=spec.namespace,
        lora=spec.lora,
        hints=grant.hints,
        script_inputs=inputs,
    )
