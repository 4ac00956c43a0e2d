"""`security.curve: true`: everything still works, and who has no key is not heard."""

from __future__ import annotations

import asyncio
import stat
import time

import httpx

from fermata.wire.messages import Role, StatusRequest
from fermata.wire.socket import Link, Packet, Peer, new_context

MANIFEST = """
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {name: secure}
spec:
  model: {name: tiny}
  security: {curve: true}
  workers: [{name: sim}]
"""


async def test_turns_are_served_and_a_peer_without_a_key_is_not_heard(stack_factory):
    stack = stack_factory(MANIFEST)
    async with httpx.AsyncClient(base_url=stack.urls[0], timeout=30) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        reply = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"].endswith("hello")
    for file in (stack.run_folder / "keys").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (router,) = stack.names("router")
    assert (await stack.numbers(router))["leases"] == 0, "an operator with its key is answered"

    answers: list[Packet] = []
    context = new_context()
    stranger = Link(
        context,
        stack.endpoints.routers[router],
        me=Peer(Role.OPERATOR, "stranger", time.time_ns()),
        receive=answers.append,
    )
    stranger.send(StatusRequest())
    deadline = time.monotonic() + 10
    while not (await stack.numbers(router))["wire_handshake_failures"]:
        assert time.monotonic() < deadline, "the stranger was not counted"
        await asyncio.sleep(0.05)
    assert answers == []
    stranger.close()
    context.term()
