"""CURVE on real sockets: who is let in, as what, and who is counted at the door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fermata.core.errors import ConfigError
from fermata.wire.keyring import KeyPair, Keyring, load_keyring, make_keyrings
from fermata.wire.messages import Bye, Fault, Role, StatusRequest
from fermata.wire.socket import Context, Link, Listener, Packet, Peer, new_context, new_key_pair

FRONTEND = Peer(Role.FRONTEND, "frontend-0", 1)


def pairs() -> dict[tuple[Role, str], KeyPair]:
    return {(role, end): new_key_pair() for role in Role for end in ("server", "client")}


async def until(claim: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not claim():
        assert asyncio.get_running_loop().time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


class Door:
    def __init__(self, keyring: Keyring) -> None:
        self.contexts: list[Context] = []
        self.links: list[Link] = []
        self.got: list[tuple[Peer, Packet]] = []
        self.answers: list[Packet] = []
        self.listener = Listener(
            self.context(keyring),
            "tcp://127.0.0.1:*",
            role=Role.ROUTER,
            receive=lambda peer, packet: self.got.append((peer, packet)),
        )

    def context(self, keyring: Keyring | None) -> Context:
        context = new_context(keyring)
        self.contexts.append(context)
        return context

    def link(self, keyring: Keyring | None, me: Peer = FRONTEND) -> Link:
        link = Link(
            self.context(keyring), self.listener.endpoint, me=me, receive=self.answers.append
        )
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.listener.close()
        for context in self.contexts:
            context.term()


async def test_a_key_of_the_ring_is_let_in_and_answered():
    rings = make_keyrings(pairs())
    door = Door(rings[Role.ROUTER])
    door.link(rings[Role.FRONTEND]).send(StatusRequest())
    await until(lambda: door.got)
    door.listener.send(door.got[0][0], Fault("internal", "hello"))
    await until(lambda: door.answers)
    assert door.listener.counters.handshake_failures == 0
    door.close()


@pytest.mark.parametrize("stranger", ["plain", "unknown key"])
async def test_a_stranger_fails_at_the_door_and_is_counted(stranger: str):
    door = Door(make_keyrings(pairs())[Role.ROUTER])
    known = msgspec.structs.replace(
        make_keyrings(pairs())[Role.FRONTEND], servers=door.contexts[0].keyring.servers
    )
    door.link(None if stranger == "plain" else known).send(StatusRequest())
    await until(lambda: door.listener.counters.handshake_failures)
    assert door.got == []
    door.close()


async def test_a_worker_key_does_not_make_a_frontend():
    rings = make_keyrings(pairs())
    door = Door(rings[Role.ROUTER])
    door.link(rings[Role.WORKER], FRONTEND).send(Bye(1))
    await until(lambda: door.listener.counters.wrong_role)
    assert door.got == []
    door.close()


async def test_the_previous_key_is_let_in_while_keys_rotate():
    old = pairs()
    new = old | {(Role.FRONTEND, "client"): new_key_pair()}
    previous = {Role.FRONTEND: old[Role.FRONTEND, "client"].public}
    door = Door(make_keyrings(new, previous=previous)[Role.ROUTER])
    door.link(make_keyrings(old)[Role.FRONTEND]).send(StatusRequest())
    door.link(make_keyrings(new)[Role.FRONTEND], Peer(Role.FRONTEND, "f", 2)).send(StatusRequest())
    await until(lambda: len(door.got) == 2)
    door.close()


def test_a_keyring_file_is_read_back_and_a_bad_one_names_itself(tmp_path: Path):
    ring = make_keyrings(pairs())[Role.WORKER]
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(ring))
    assert load_keyring(path) == ring
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"keys\.json"):
        load_keyring(path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_keyring(tmp_path / "none.json")
