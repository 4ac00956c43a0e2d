"""The processes of one deployment, brought to the plan one step at a time.

Holds the supervisor (what runs), the observer (what is ready) and the policy feed (what routers know), and executes the
steps of the pure core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import assert_never

from fermata.core.spec import Manifests
from fermata.operator.local.layout import Layout
from fermata.operator.local.observer import Observer, admitted
from fermata.operator.local.process import roll
from fermata.operator.local.run_folder import RunFolder
from fermata.operator.local.supervisor import Child, Death, ProcessSpec, Supervisor
from fermata.operator.plan import Plan
from fermata.operator.policy_feed import PolicyFeed
from fermata.operator.reconcile import (
    Drain,
    Member,
    Phase,
    Start,
    Step,
    Stop,
    is_settled,
    next_ring,
    reconcile,
)
from fermata.wire.keyring import Keyring
from fermata.wire.messages import Role
from fermata.wire.socket import Peer, new_context

RESEND_S = 0.5
DRAIN_LOOK_S = 0.1
BYE_S = 1.0
PROBE_BUSY_S = 0.1
PROBE_IDLE_S = 1.0
ROUTER_DRAIN_S = 120.0
"""What a router that left the ring gets until the turns it granted have ended: nobody else watches over these."""
STOP_FRONTENDS_S = 5.0
STOP_WORKERS_S = 3.0
STOP_ROUTERS_S = 1.0
"""Together below the 10 s in which a stop is over."""


class Fleet:
    """Lives inside the task group given. Nothing runs any more once `close` returned and the group ended."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        layout: Layout,
        folder: RunFolder,
        keyring: Keyring | None,
        name: str,
        drain_s: float,
        died: Callable[[Death], None],
        changed: Callable[[], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._tasks = tasks
        self._layout = layout
        self._folder = folder
        self._drain_s = drain_s
        self._died = died
        self._say = say
        self._plan: Plan | None = None
        self._context = new_context(keyring)
        self._feed = PolicyFeed(uid=f"local/{name}")
        self._sent_at: dict[str, float] = {}
        self._served: dict[str, float] = {}
        """When the process that was ready last had started."""
        self.name = name
        self._supervisor = Supervisor(
            tasks, died=self._on_death, gone=self._on_gone, changed=changed
        )
        # One boot of one operator: the wire wants no more of it than to differ from its predecessor.
        me = Peer(Role.OPERATOR, "up", time.time_ns() // 1_000_000)
        self._observer = Observer(self._context, me=me, host=layout.reachable_host, changed=changed)
        self._probing = tasks.create_task(self._probe_frontends(), name="probe frontends")

    def want(self, manifests: Manifests, plan: Plan) -> None:
        """From now on `step` works towards this."""
        self._folder.write_deployment(manifests.deployment)
        self._folder.write_policy(manifests.policy.spec)
        self._plan = plan

    def differs(self, plan: Plan) -> bool:
        return plan != self._plan

    @property
    def frontend_replicas(self) -> int:
        return self._plan.frontend.replicas if self._plan else 0

    def step(self) -> None:
        plan = self._wanted()
        self._observer.ask()
        members = self.members()
        ring = next_ring(plan, members, current=[name for name, _ in self._feed.ring.members])
        if self._feed.update(plan.policy, [(name, self._layout.endpoint(name)) for name in ring]):
            self._sent_at.clear()
        self._push_policy()
        for step in reconcile(plan, members, ring=self._agreed_ring()):
            self._take(step)
        for name in self._supervisor.children:
            roll(self._folder.log(name))

    def members(self) -> list[Member]:
        ready = self.ready()
        return [
            self._member(child, is_ready=name in ready)
            for name, child in self._supervisor.children.items()
        ]

    def is_settled(self) -> bool:
        return is_settled(self._wanted(), self.members(), ring=self._agreed_ring())

    def ready(self) -> set[str]:
        up = {
            n: c for n, c in self._supervisor.children.items() if c.is_up and not c.leaving.is_set()
        }
        routers = {
            n for n, c in up.items() if c.spec.kind == "router" and self._router_is_ready(n, c)
        }
        serving = {
            n for n, c in up.items() if c.spec.kind == "worker" and self._says_it_serves(n, c)
        }
        for router in routers:
            status = self._observer.status(router, since=up[router].started_at)
            serving = admitted(status, serving) if status else serving
        frontends = {
            n
            for n, c in up.items()
            if c.spec.kind == "frontend" and self._observer.frontend_is_ready(n, since=c.started_at)
        }
        return routers | frontends | (serving if routers else set())

    def waiting(self) -> list[str]:
        return sorted(self._supervisor.children.keys() - self.ready())

    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        return self._feed.refusals

    def started_at(self, name: str) -> float:
        return self._supervisor.children[name].started_at

    def endpoints(self) -> dict[str, dict[str, str]]:
        """By kind, as the endpoints file names them."""
        kinds = ("routers", "workers", "frontends", "metrics")
        found: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
        for name, child in self._supervisor.children.items():
            url = child.spec.kind == "frontend"
            where = self._layout.url(name) if url else self._layout.endpoint(name)
            found[f"{child.spec.kind}s"][name] = where
            if not url:
                found["metrics"][name] = self._layout.metrics(name)
        return found

    async def stop(self, *, kill: asyncio.Event) -> bool:
        """Frontends finish, then workers drain, then routers end; True when `kill` cut that short."""
        stopping = asyncio.create_task(self._stop_in_order())
        killing = asyncio.create_task(kill.wait())
        await asyncio.wait({stopping, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not stopping.done():
            self._supervisor.kill_all()
            await stopping
            return True
        return False

    def close(self) -> None:
        self._probing.cancel()
        self._supervisor.kill_all()
        self._observer.close()
        self._context.destroy(linger=0)

    def _member(self, child: Child, *, is_ready: bool) -> Member:
        name = child.spec.id
        if is_ready:
            self._served[name] = child.started_at
        return Member(
            id=name,
            kind=child.spec.kind,
            revision=child.spec.revision,
            shared=child.spec.shared,
            phase=_phase(child, is_ready=is_ready),
            served=child.is_up and self._served.get(name) == child.started_at,
            group=child.spec.group,
        )

    def _wanted(self) -> Plan:
        assert self._plan is not None, "want() comes first"
        return self._plan

    def _agreed_ring(self) -> list[str]:
        """Members of the ring once all of them know it; until then every router may still own keys."""
        members = [name for name, _ in self._feed.ring.members]
        if self._feed.acknowledged >= set(members):
            return members
        return [n for n, c in self._supervisor.children.items() if c.spec.kind == "router"]

    def _router_is_ready(self, name: str, child: Child) -> bool:
        status = self._observer.status(name, since=child.started_at)
        # One that refused a policy goes on with the one it had.
        return status is not None and not self._feed.needs(
            name, status.numbers.get("policy_revision", -1)
        )

    def _says_it_serves(self, name: str, child: Child) -> bool:
        status = self._observer.status(name, since=child.started_at)
        return status is not None and status.facts.get("state", "serving") == "serving"

    def _push_policy(self) -> None:
        now = time.monotonic()
        for name, child in self._supervisor.children.items():
            link = self._observer.links.get(name)
            if child.spec.kind != "router" or link is None:
                continue
            if link.policy_ack is not None and self._feed.take(name, link.policy_ack):
                self._tell_ack(name)
            status = self._observer.status(name, since=child.started_at)
            due = now - self._sent_at.get(name, 0.0) >= RESEND_S
            if status is None or not due:
                continue
            if self._feed.needs(name, status.numbers.get("policy_revision", -1)):
                link.set_policy(self._feed.message())
                self._sent_at[name] = now

    def _tell_ack(self, router: str) -> None:
        reasons = self._feed.refusals.get(router)
        if reasons is not None:
            self._say(router, f"refused the policy: {'; '.join(reasons)}")
        elif self._feed.revision > 1:
            scheduler = self._wanted().policy.scheduler.type
            self._say(router, f"applied policy revision {self._feed.revision} ({scheduler})")

    def _on_death(self, death: Death) -> None:
        self._feed.forget(death.id)
        link = self._observer.links.get(death.id)
        if link is not None:
            link.policy_ack = None
        self._died(death)

    def _on_gone(self, spec: ProcessSpec) -> None:
        self._feed.forget(spec.id)
        self._observer.forget(spec.id)
        self._served.pop(spec.id, None)
        if spec.kind == "worker":
            self._layout.ports.forget(spec.id)
            self._layout.ports.forget(f"{spec.id}/metrics")

    def _take(self, step: Step) -> None:
        match step:
            case Start():
                self._start(step)
            case Drain(name):
                self._say(name, "drains")
                self._leave(name, drains=True)
            case Stop(name):
                self._say(name, "stops")
                self._leave(name, drains=False)
            case _:
                assert_never(step)

    def _start(self, step: Start) -> None:
        layout, name = self._layout, step.id

        def command() -> list[str]:
            ring = self._feed.ring
            if step.kind == "router":
                return layout.router(name)
            if step.kind == "frontend":
                return layout.frontend(name, ring=ring)
            return layout.worker(name, group=step.group, revision=step.revision, ring=ring)

        if step.kind == "frontend":
            self._observer.follow(name, kind="frontend", port=layout.frontend_port(name))
        else:
            self._observer.follow(name, kind=step.kind, endpoint=layout.endpoint(name))
        self._supervisor.start(
            ProcessSpec(
                id=name,
                kind=step.kind,
                revision=step.revision,
                shared=self._wanted().shared,
                command=command,
                log=self._folder.log(name),
                group=step.group,
            )
        )

    def _leave(self, name: str, *, drains: bool) -> None:
        child = self._supervisor.children[name]
        child.leaving.set()
        self._tasks.create_task(self._end(child, drains=drains), name=f"end {name}")

    async def _end(self, child: Child, *, drains: bool) -> None:
        name = child.spec.id
        drain_s = ROUTER_DRAIN_S if child.spec.kind == "router" else self._drain_s
        if drains and self._asked_to_drain(name, drain_s):
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s + 1.0):
                    while not (child.gone.is_set() or self._is_drained(child)):
                        await asyncio.sleep(DRAIN_LOOK_S)
            # A drained worker says Bye and exits by itself.
            if child.spec.kind == "worker":
                with suppress(TimeoutError):
                    async with asyncio.timeout(BYE_S):
                        await child.gone.wait()
            await self._supervisor.stop(name, grace_s=STOP_WORKERS_S)
        else:
            # SIGTERM is a request to drain as well, and a frontend knows no other.
            await self._supervisor.stop(name, grace_s=self._drain_s)
        self._say(name, "is gone")

    def _asked_to_drain(self, name: str, drain_s: float) -> bool:
        """False when it does not read: then a signal has to do."""
        link = self._observer.links.get(name)
        return link is not None and link.status is not None and link.drain(drain_s)

    def _is_drained(self, child: Child) -> bool:
        link = self._observer.links.get(child.spec.id)
        said = link.drain_status if link else None
        if said is None or said.state != "drained":
            return False
        if child.spec.kind == "worker":
            return True
        # A router takes nothing new once it owns no key, but its leases end when their turns do.
        status = self._observer.status(child.spec.id, since=child.started_at)
        return status is None or not status.numbers.get("leases", 0)

    async def _probe_frontends(self) -> None:
        while True:
            await self._observer.probe_frontends()
            settled = self._plan is not None and self.is_settled()
            await asyncio.sleep(PROBE_IDLE_S if settled else PROBE_BUSY_S)

    async def _stop_in_order(self) -> None:
        children = self._supervisor.children
        for child in children.values():
            child.leaving.set()  # from here on nothing is started again
        for kind, grace_s in (
            ("frontend", STOP_FRONTENDS_S),
            ("worker", STOP_WORKERS_S),
            ("router", STOP_ROUTERS_S),
        ):
            names = [name for name, child in children.items() if child.spec.kind == kind]
            if kind == "worker":
                for name in names:
                    self._asked_to_drain(name, grace_s / 2)
            await asyncio.gather(*(self._supervisor.stop(n, grace_s=grace_s) for n in names))


def _phase(child: Child, *, is_ready: bool) -> Phase:
    if child.leaving.is_set():
        return Phase.LEAVING
    return Phase.READY if is_ready else Phase.STARTING
