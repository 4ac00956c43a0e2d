"""Several routers are asked, pages are put together, and one that is silent is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fermata.core.ids import RequestId
from fermata.operator.local.asking import Routers
from fermata.operator.local.run_folder import Endpoints
from fermata.wire import messages as wire
from fermata.wire.socket import Context, Listener, Packet, Peer, new_context


def row(session: str) -> wire.ProgramRow:
    return wire.ProgramRow(session, "", "acting", "active", "w", 0, 1, 1, 0, 0.0, 0.0, "", "tool")  # type: ignore[arg-type]


class Router:
    def __init__(self, context: Context, names: list[str], *, silent: bool = False) -> None:
        self.names = names
        self.silent = silent
        self.asked = 0
        self.listener = Listener(
            context, "tcp://127.0.0.1:*", role=wire.Role.ROUTER, receive=self.receive
        )

    def receive(self, peer: Peer, packet: Packet) -> None:
        match packet.message:
            case wire.ProgramsRequest() as asked if not self.silent:
                self.asked += 1
                rows = [row(name) for name in sorted(self.names) if name > asked.after]
                page, more = rows[: asked.limit], len(rows) > asked.limit
                stale = wire.Programs(RequestId("earlier"), [row("ghost")], 1, 0, False)
                self.listener.send(peer, stale)
                self.listener.send(peer, wire.Programs(asked.request, page, len(rows), 0, more))
            case wire.ExplainRequest() as asked if not self.silent:
                self.listener.send(peer, wire.Explanation(asked.request, [], "KVAware", 1))
            case _:
                pass


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


def endpoints(*routers: Router) -> Endpoints:
    at = {f"router-{i}": router.listener.endpoint for i, router in enumerate(routers)}
    fields: dict[str, Any] = {"workers": {}, "frontends": {}}
    return Endpoints(pid=1, deployment="d", manifest="m", url="u", routers=at, **fields)


async def test_all_pages_of_all_routers_come_together_once(context: Context) -> None:
    many = Router(context, [f"a{i:02}" for i in range(17)])
    few = Router(context, ["a03x", "b", "c"])
    with Routers(endpoints(many, few), page=4) as routers:
        for _ in range(2):  # links stay open between questions
            found = await routers.programs()
            assert [r.session for r in found["router-0"]] == many.names
            assert [r.session for r in found["router-1"]] == few.names
    assert many.asked >= 10
    for router in (many, few):
        router.listener.close()


async def test_a_router_that_says_nothing_is_left_out(context: Context) -> None:
    good, bad = Router(context, ["a"]), Router(context, ["b"], silent=True)
    with Routers(endpoints(good, bad), wait_s=0.6) as routers:
        assert set(await routers.programs()) == {"router-0"}
        assert set(await routers.explain(RequestId("r"), limit=5)) == {"router-0"}
    for router in (good, bad):
        router.listener.close()
