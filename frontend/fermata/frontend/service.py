"""The frontend's shell around its turn table: links, clock, ticks. All in one event loop, one writer of all state.

A message from a link meets the table and its effects are acted on at once; the table's answers to a client's
doings likewise. Each second: heartbeats, and one Progress a router for all long outputs together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import assert_never

from fermata.core.clock import Clock
from fermata.core.errors import InvalidTurn
from fermata.core.ids import LeaseId, OwnerId, RequestId, RouterId
from fermata.frontend.config import FrontendConfig
from fermata.frontend.generate import generate_of, route_of
from fermata.frontend.identity import ScopedIdentity
from fermata.frontend.router_links import RouterLinks
from fermata.frontend.router_questions import RouterQuestions
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import (
    Abort,
    Ask,
    Dispatch,
    Reader,
    Report,
    TurnLimits,
    TurnSpec,
    Withdraw,
)
from fermata.frontend.turn_table import GiveBack, TableEffect, TurnTable
from fermata.frontend.worker_links import WorkerLinks
from fermata.wire import messages as wire
from fermata.wire.socket import Context, NoEndpoint, Packet, Peer, Unsendable

log = logging.getLogger(__name__)

TICK_S = 0.25
REBIRTH_S = 1.0
"""Between two incarnations of one process."""
SECOND_S = 1.0 - TICK_S / 8
"""Between two heartbeats; a tick that comes a little early is in time."""
_LEASE_ENDS = frozenset({"finished", "cancelled", "failed"})


class FrontendService:
    """Make it inside the running loop; `run` keeps it alive until cancelled."""

    def __init__(self, config: FrontendConfig, *, clock: Clock, context: Context) -> None:
        self.config = config
        self.clock = clock
        self.table = TurnTable(_scaled(config.turn, clock.speedup))
        self.is_draining = False
        self.handler_errors = 0
        self._loop = asyncio.get_running_loop()
        self._me = Peer(wire.Role.FRONTEND, config.id, _new_incarnation(0))
        self._endpoints: dict[LeaseId, str] = {}
        self._reborn_at = -REBIRTH_S
        self.routers = RouterLinks(
            context=context,
            me=self._me,
            ring=config.ring,
            table=self.table,
            owner=self,
            loop=self._loop,
        )
        self.questions = RouterQuestions(self.routers)
        self.workers = WorkerLinks(
            context=context, me=self._me, receive=self._on_worker_packet, loop=self._loop
        )

    @property
    def id(self) -> OwnerId:
        return self.config.id

    @property
    def incarnation(self) -> int:
        return self._me.incarnation

    @property
    def is_ready(self) -> bool:
        """A router answers and knows a worker that takes turns."""
        return not self.is_draining and self.routers.workers_ready > 0

    def submit(self, spec: TurnSpec, *, reader: Reader) -> Turn:
        turn, effects = self.table.start(spec, reader=reader, now=self.clock.now())
        self._act(effects)
        return turn

    def cancel(self, turn: Turn) -> None:
        self._act(self.table.cancel(turn, self.clock.now()))

    def stop(self, turn: Turn) -> None:
        self._act(self.table.stop(turn, self.clock.now()))

    async def end_program(self, request: RequestId, who: ScopedIdentity) -> bool | None:
        """Was it known to any router? None when none of them answered."""
        farewell = wire.Route(
            request=request,
            attempt=0,
            key=who.key,
            epoch=wire.NO_EPOCH,
            model=self.config.model.name,
            input_tokens=0,
            max_tokens=0,
            session=who.session,
            parent=who.parent,
            final=True,
        )
        answers = await self.questions.ask(request, farewell, wire.ProgramEnded)
        return any(answer.was_known for answer in answers) if answers else None

    async def programs(self, asked: wire.ProgramsRequest) -> list[wire.Programs]:
        return await self.questions.ask(asked.request, asked, wire.Programs)

    async def explain(self, asked: wire.ExplainRequest) -> list[wire.Explanation]:
        return await self.questions.ask(asked.request, asked, wire.Explanation)

    async def run(self) -> None:
        """Ticks for ever; cancel it to end. A fault in one tick is logged and does not end the next."""
        self.routers.open()
        try:
            next_second = self._loop.time() + SECOND_S
            while True:
                await asyncio.sleep(TICK_S)
                # By the clock, not by ticks: those of a loop that is held up are few.
                now = self._loop.time()
                is_second = now >= next_second
                if is_second:
                    next_second = max(next_second + SECOND_S, now)
                try:
                    self._tick(is_second=is_second)
                except Exception:
                    self.handler_errors += 1
                    log.exception("tick failed")
        finally:
            self.routers.close()
            self.workers.close()

    def on_router_packet(self, router: RouterId, packet: Packet) -> None:
        now = self.clock.now()
        message = packet.message
        match message:
            case wire.Grant():
                self._act(self.table.grant(message, now))
            case wire.Hold():
                self._act(self.table.hold(message, now))
            case wire.Reject():
                self._act(self.table.reject(message, now))
            case wire.Revoke():
                leases = packet.frame.cast("B").cast("Q")
                self._act(self.table.revoke(leases, message.reason, now))
            case wire.Moved():
                self.routers.adopt(message.ring)
                self._act(self.table.moved(message.request, message.attempt, now))
            case wire.LeaseListRequest():
                self._send_lease_list(router)
            case wire.ProgramEnded() | wire.Programs() | wire.Explanation():
                self.questions.answered(router, message.request, message)
            case _:
                pass  # counted and logged where it matters: Fault by the link, the rest is not for us

    def on_welcome(self, router: RouterId) -> None:
        waiting = [
            t for t in self.table.routing if self.routers.ring.router_for(t.spec.key) == router
        ]
        self._act(self.table.ask_again(waiting, self.clock.now()))

    def on_ring(self) -> None:
        self._act(self.table.ask_again(self.table.routing, self.clock.now()))

    def on_fenced(self, fenced: int) -> bool:
        """No lease of this incarnation holds any more, anywhere: come back as another. False: not so soon again, or
        two of one name would do nothing else."""
        now = self._loop.time()
        if now < self._reborn_at + REBIRTH_S:
            return False
        self._reborn_at = now
        last = max(fenced, self._me.incarnation)
        self._me = Peer(self._me.role, self._me.id, _new_incarnation(last))
        log.warning("fenced, new incarnation=%d turns=%d", self.incarnation, len(self.table))
        self.routers.reopen(self._me)
        self.workers.reopen(self._me)
        self._act(self.table.disown_all(self.clock.now()))
        self._endpoints.clear()
        return True

    def _on_worker_packet(self, packet: Packet) -> None:
        message = packet.message
        match message:
            case wire.Output():
                self._act(self.table.output(message, packet.frame, self.clock.now()))
            case wire.Accepted():
                self._act(self.table.accepted(message))
            case wire.Refused():
                is_fenced = message.code == "fenced" and message.lease in self._endpoints
                if not (is_fenced and self.on_fenced(-1)):
                    self._act(self.table.refused(message, self.clock.now()))
            case _:
                pass

    def _tick(self, *, is_second: bool) -> None:
        self._act(self.table.tick(self.clock.now()))
        if is_second:
            for progress in self.table.progress():
                self.routers.report(progress)
            self.routers.tick()
            self.workers.tick()

    def _act(self, effects: Iterable[TableEffect]) -> None:
        for effect in effects:
            match effect:
                case Report(_, progress) | GiveBack(progress):
                    self.routers.report(progress)
                    if progress.kind in _LEASE_ENDS:
                        self._release(progress)
                case Ask(turn):
                    self._ask(turn)
                case Dispatch(turn):
                    self._dispatch(turn)
                case Abort(_, endpoint, lease):
                    self.workers.abort(endpoint, lease)
                case Withdraw(turn):
                    self._withdraw(turn)
                case _:
                    assert_never(effect)

    def _ask(self, turn: Turn) -> None:
        """Does nothing while the router is away: its Welcome brings the turn back here."""
        if turn.attempt:
            self.routers.flush()  # how the attempt before ended comes first
        router = self.routers.router_for(turn.spec.key)
        if router is None:
            return
        clock = self.clock
        route = route_of(
            turn, epoch=self.routers.ring.epoch, now=clock.now(), speedup=clock.speedup
        )
        try:
            router.link.send(route, turn.input_hashes())
        except Unsendable as error:
            self._act(self.table.fail(turn, InvalidTurn(str(error)), self.clock.now()))

    def _withdraw(self, turn: Turn) -> None:
        router = self.routers.router_for(turn.spec.key)
        if router is not None:
            taken_back = wire.LeaseProgress(
                LeaseId(0), "cancelled", request=turn.spec.request, reason="withdrawn"
            )
            router.link.send(wire.Progress([taken_back]))

    def _dispatch(self, turn: Turn) -> None:
        grant = turn.grant
        assert grant is not None
        generate = generate_of(turn, grant, owner=self.id, incarnation=self.incarnation)
        self._endpoints[grant.lease] = grant.endpoint
        now = self.clock.now()
        try:
            self.workers.dispatch(grant.endpoint, generate, turn.input_frame())
        except Unsendable as error:
            self._act(self.table.fail(turn, InvalidTurn(str(error)), now))
        except NoEndpoint as error:
            refused = wire.Refused(grant.lease, turn.attempt, "failed", str(error))
            self._act(self.table.refused(refused, now))

    def _release(self, progress: wire.LeaseProgress) -> None:
        endpoint = self._endpoints.pop(progress.lease, None)
        if endpoint is not None:
            self.workers.release(endpoint, progress.lease, lost=progress.reason == "worker_lost")

    def _send_lease_list(self, router: RouterId) -> None:
        self.routers.flush()  # a lease that ended must not look lost
        for peer in self.routers.peers:
            if peer.id == router and peer.welcome is not None:
                number = peer.welcome.number
                frame = b"".join(x.to_bytes(8, "little") for x in self.table.leases_of(number))
                seen = self.table.seen(number, peer.welcome.incarnation)
                peer.link.send(wire.LeaseList(seen), frame)


def _scaled(limits: TurnLimits, speedup: float) -> TurnLimits:
    return TurnLimits(
        ask_again_s=limits.ask_again_s * speedup,
        ask_again_held_s=limits.ask_again_held_s * speedup,
        silence_s=limits.silence_s * speedup,
        backoff_first_s=limits.backoff_first_s * speedup,
        backoff_most_s=limits.backoff_most_s * speedup,
    )


def _new_incarnation(last: int) -> int:
    """Grows with every boot on this machine and with every fence."""
    return max(last + 1, time.time_ns() // 1_000_000)
