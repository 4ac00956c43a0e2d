"""The links to the other routers of the ring: what moves with an epoch goes over them, and nothing comes back.

Each router opens its own to every other member; one that has left the ring itself still has something to hand over.
What a router does not take at once waits in the link, since it may just be starting.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import Buffer

from fermata.core.ids import RouterId
from fermata.wire.messages import Hello, Message
from fermata.wire.socket import Context, Link, Packet, Peer


class RouterLinks:
    def __init__(self, context: Context, *, me: Peer) -> None:
        self._context = context
        self._me = me
        self._endpoints: dict[str, str] = {}
        self._links: dict[str, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def follow(self, members: Mapping[RouterId, str]) -> None:
        """These are the ring now. Links to others are closed when what they were given is out."""
        wanted = {str(name): at for name, at in members.items() if name != self._me.id}
        if wanted == self._endpoints:
            return
        for name in [n for n, at in self._endpoints.items() if wanted.get(n) != at]:
            self._links.pop(name).close(linger_s=1.0)
        for name, endpoint in wanted.items():
            if name not in self._links:
                self._links[name] = Link(
                    self._context, endpoint, me=self._me, receive=_nothing_to_hear
                )
                self._links[name].send(Hello("router", self._me.id, self._me.incarnation))
        self._endpoints = wanted

    def send(self, to: str, message: Message, frame: Buffer = b"") -> bool:
        """Whichever boot of it is there. False: it is not in the ring, or takes no more."""
        link = self._links.get(to)
        return link is not None and link.send(message, frame)

    def close(self) -> None:
        for link in self._links.values():
            link.close(linger_s=1.0)
        self._links.clear()
        self._endpoints.clear()


def _nothing_to_hear(packet: Packet) -> None:
    """A Welcome; and faults, which the link logs."""
