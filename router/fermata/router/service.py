"""The shell of one router: a Listener, a timer and the pure core between them.

Everything happens in one event loop's thread; each message is one call into the core, whose
effects go out at the end of the loop's turn, one multipart message a destination. A peer that does
not read is not waited for: a frontend asks again, a worker finds that its digest differs, so a
message that could not be taken is counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from msgspec.structs import replace

from fermata.core.clock import Clock
from fermata.core.spec import RouterPolicySpec
from fermata.router.core import Router, RouterConfig, Send
from fermata.router.families import Family, families
from fermata.router.router_links import RouterLinks
from fermata.wire.messages import Handover, PolicyAck, Role, Status, StatusRequest
from fermata.wire.socket import Context, Listener, Packet, Peer, Unsendable

log = logging.getLogger(__name__)

IDLE_TICK_S = 1.0
SCRAPE_TIMEOUT_S = 2.0


class RouterService:
    """Make it inside the running loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock,
        context: Context,
        listen: str,
        policy: RouterPolicySpec | None,
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = float("inf")
        self.core = Router(config, now=clock.now(), policy=policy)
        self.dropped = 0
        """Messages that a peer which does not read could not be given."""
        self._listener = Listener(context, listen, role=Role.ROUTER, receive=self._receive)
        self._ring = self.core.state.ring
        me = Peer(Role.ROUTER, config.id, config.incarnation)
        self._routers = RouterLinks(context, me=me)

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    async def run(self) -> None:
        """Serves until told to stop."""
        log.info("ready endpoint=%s", self.endpoint)
        self._tick()
        try:
            await self._over.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._routers.close()
            self._listener.close(linger_s=0.2)

    def stop(self) -> None:
        """All a router knows is known elsewhere too: it may go at any time."""
        self._over.set()

    def status(self) -> Status:
        """The core's, and what only the socket knows."""
        status = self.core.status(self._clock.now())
        wire = self._listener.counters.numbers() | {"sends_dropped": float(self.dropped)}
        return replace(status, numbers=status.numbers | wire)

    def numbers(self) -> dict[str, float]:
        return self.status().numbers

    def scrape(self) -> tuple[dict[str, float], list[Family]]:
        """For another thread, which waits: the core is read in its own, where nothing moves meanwhile.
        Numbers, and the families with labels."""
        answer: Future[tuple[dict[str, float], list[Family]]] = Future()
        self._loop.call_soon_threadsafe(
            lambda: answer.set_result((self.numbers(), list(families(self.core.state))))
        )
        return answer.result(SCRAPE_TIMEOUT_S)

    def _receive(self, peer: Peer, packet: Packet) -> None:
        if isinstance(packet.message, StatusRequest):
            self._listener.send(peer, self.status())
            return
        self._send(self.core.receive(peer, packet.message, packet.frame, self._clock.now()))
        self._arm()

    def _tick(self) -> None:
        self._timer = None
        self._send(self.core.tick(self._clock.now()))
        self._arm()

    def _arm(self) -> None:
        """The timer stands at the next deadline; it is moved only to come sooner, since a late one
        is merely early."""
        now = self._clock.now()
        due = self.core.next_deadline(now)
        wait_s = IDLE_TICK_S if due is None else self._clock.real_delay(due - now)
        at = self._loop.time() + min(wait_s, IDLE_TICK_S)
        if self._timer is not None:
            if self._due_at <= at:
                return
            self._timer.cancel()
        self._due_at = at
        self._timer = self._loop.call_at(at, self._tick)

    def _send(self, effects: list[Send]) -> None:
        for warning in self.core.take_warnings():
            log.warning("%s", warning)
        ring = self.core.state.ring
        if ring is not self._ring:
            self._ring = ring
            self._routers.follow(ring.members)
            log.info("ring epoch=%d routers=%s", ring.epoch, ",".join(ring.members))
        for effect in effects:
            if isinstance(effect.message, PolicyAck):
                _log_policy(effect.message)
            try:
                self.dropped += not self._send_one(effect)
            except Unsendable:
                # One answer that repeats nonsense must not cost the others theirs.
                self.dropped += 1
                log.exception("dropped an answer to=%s", effect.to.identity)
        if self.core.is_drained:
            self.stop()

    def _send_one(self, effect: Send) -> bool:
        if isinstance(effect.message, Handover):
            return self._routers.send(effect.to.id, effect.message, effect.frame)
        return self._listener.send(effect.to, effect.message, effect.frame)


def _log_policy(ack: PolicyAck) -> None:
    if ack.applied:
        log.info("policy applied revision=%d generation=%d", ack.revision, ack.generation)
    else:
        log.warning("policy refused revision=%d reasons=%s", ack.revision, "; ".join(ack.reasons))
