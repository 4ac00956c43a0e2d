"""`fermata up` itself: a loop that observes, takes one step towards the plan, and tells what changed.

Level-triggered like the operator's: start, edit, crash and stop all go through the same few lines. Every process is a
child of ours, so whatever ends the loop ends them too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fermata.core.errors import ConfigError
from fermata.core.spec import Manifests, load_manifests
from fermata.operator.local.console import Console, banner, death_line, describe_exit, headline
from fermata.operator.local.fleet import Fleet
from fermata.operator.local.layout import FERMATA, Layout
from fermata.operator.local.ports import PortBook, is_free
from fermata.operator.local.process import last_lines
from fermata.operator.local.run_folder import Endpoints, RunFolder
from fermata.operator.local.signals import Signals
from fermata.operator.local.supervisor import Death
from fermata.operator.local.watch import FileWatch
from fermata.operator.plan import Plan, make_plan
from fermata.wire.keyring import Keyring, make_keyrings
from fermata.wire.messages import Role
from fermata.wire.socket import new_key_pair

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_KILLED = 130

BUSY_TICK_S = 0.1
IDLE_TICK_S = 0.5
START_DEATHS = 4
"""Deaths of one process during the first start that end it: it will not get better by itself."""
CONFIG_EXIT = 2
"""What a service exits with for a bad flag or file; starting it again would say the same."""


@dataclass(frozen=True, slots=True)
class Options:
    manifest: Path
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    watch: bool = False
    ready_timeout_s: float = 120.0
    drain_s: float = 30.0
    """What a worker that leaves a running deployment gets to finish its turns."""
    executable: tuple[str, ...] = FERMATA


class Runner:
    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._folder = RunFolder(options.folder)
        self._layout = Layout(
            host=options.host,
            port=options.port,
            deployment=self._folder.deployment.resolve(),
            policy=self._folder.policy.resolve(),
            ports=PortBook(),
            executable=options.executable,
        )
        self._wake = asyncio.Event()
        self._failed: Death | None = None
        self._settled_once = False
        self._ready: dict[str, float] = {}
        """When the process started that was last told as ready: each start is told once."""
        self._endpoints: Endpoints | None = None

    async def run(self) -> int:
        """Raises ConfigError when nothing was started: manifest, port or folder."""
        manifests = load_manifests(self._options.manifest)
        plan = make_plan(manifests)
        self._require_ports(plan, known=0)
        with self._folder_held(), Signals(self._wake.set) as signals:
            keyring = self._make_keys() if _is_secure(manifests) else None
            async with asyncio.TaskGroup() as tasks:
                fleet = Fleet(
                    tasks,
                    layout=self._layout,
                    folder=self._folder,
                    keyring=keyring,
                    name=manifests.deployment.metadata.name,
                    drain_s=self._options.drain_s,
                    died=self._on_death,
                    changed=self._wake.set,
                    say=self._console.progress,
                )
                try:
                    return await self._operate(fleet, manifests, plan, signals)
                finally:
                    fleet.close()

    def _make_keys(self) -> Keyring:
        """New keys at each start, since all that use them start with us. Returns the operator's own."""
        pairs = {(role, end): new_key_pair() for role in Role for end in ("server", "client")}
        keyrings = make_keyrings(pairs)
        self._folder.write_keys(keyrings)
        self._layout = replace(self._layout, keys=self._folder.keys.resolve())
        return keyrings[Role.OPERATOR]

    @contextmanager
    def _folder_held(self) -> Generator[None]:
        self._folder.open()
        self._folder.forget_keys()
        try:
            yield
        finally:
            self._folder.forget_keys()
            self._folder.close()

    async def _operate(
        self, fleet: Fleet, manifests: Manifests, plan: Plan, signals: Signals
    ) -> int:
        self._console.say(headline(manifests, self._options.manifest))
        for name in manifests.unused_policies:
            self._console.say(
                f"  note: RouterPolicy {name} is in the file, but no routerPolicyRef names it"
            )
        fleet.want(manifests, plan)
        started_at = time.monotonic()
        watch = FileWatch(self._options.manifest)
        while not signals.stop:
            self._wake.clear()
            self._report(fleet)
            fleet.step()
            if not self._settled_once:
                if self._cannot_start(fleet, started_at):
                    return await self._give_up(fleet, signals)
                if fleet.is_settled():
                    self._settled_once = True
                    self._greet(manifests, time.monotonic() - started_at)
            elif signals.take_reload() | (self._options.watch and watch.changed()):
                self._reload(fleet)
            await self._pause(IDLE_TICK_S if fleet.is_settled() else BUSY_TICK_S)
        return await self._shut_down(fleet, signals)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(0.01)  # what comes in a burst is looked at once

    def _reload(self, fleet: Fleet) -> None:
        """A bad edit changes nothing."""
        manifest = self._options.manifest
        try:
            manifests = load_manifests(manifest)
            plan = make_plan(manifests)
            self._require_same_security(manifests)
            self._require_ports(plan, known=fleet.frontend_replicas)
        except ConfigError as error:
            self._console.say(f"{error}; what runs stays as it is")
            return
        self._console.say(
            f"{manifest} was edited" if fleet.differs(plan) else f"{manifest}: nothing changed"
        )
        fleet.want(manifests, plan)

    def _require_same_security(self, manifests: Manifests) -> None:
        if _is_secure(manifests) != (self._layout.keys is not None):
            raise ConfigError(
                "spec.security.curve can not change while it runs",
                where=str(self._options.manifest),
                fix="stop fermata up and start it again",
            )

    def _require_ports(self, plan: Plan, *, known: int) -> None:
        """`known` replicas are ours already."""
        for replica in range(known, plan.frontend.replicas):
            port = self._options.port + replica
            try:
                free = is_free(port, host=self._options.host)
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"frontend-{replica} can not listen on {self._options.host}:{port}: {error}",
                    fix="pass another --host or --port",
                ) from None
            if not free:
                raise ConfigError(
                    f"port {port} of frontend-{replica} is in use",
                    fix="stop what listens there, or pass another --port",
                )

    def _report(self, fleet: Fleet) -> None:
        """Who became ready since the last look, and the endpoints when they changed."""
        ready = {name: fleet.started_at(name) for name in sorted(fleet.ready())}
        for name, started_at in ready.items():
            if self._ready.get(name) != started_at:
                self._console.progress(name, f"ready   {time.monotonic() - started_at:.1f} s")
        self._ready |= ready
        endpoints = Endpoints(
            pid=os.getpid(),
            deployment=fleet.name,
            manifest=str(self._options.manifest),
            url=self._layout.url("frontend-0"),
            keyring=str(self._layout.keys / "operator.json") if self._layout.keys else "",
            **fleet.endpoints(),
        )
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._folder.write_endpoints(endpoints)

    def _greet(self, manifests: Manifests, took_s: float) -> None:
        self._console.say(
            banner(
                manifests,
                url=self._layout.url("frontend-0"),
                manifest=self._options.manifest,
                logs=self._folder.log("*").parent,
                port=self._options.port,
                watching=self._options.watch,
                took_s=took_s,
            )
        )

    def _on_death(self, death: Death) -> None:
        hopeless = death.code == CONFIG_EXIT or death.deaths >= START_DEATHS
        if hopeless and not self._settled_once:
            self._failed = self._failed or death
            return
        self._console.progress(death.id, death_line(death))
        if death.code > 0 and death.deaths == 1:  # the next ones will have the same to say
            self._console.quote(death.id, last_lines(self._folder.log(death.id), 5))

    def _cannot_start(self, fleet: Fleet, started_at: float) -> bool:
        late = time.monotonic() - started_at > self._options.ready_timeout_s
        return self._failed is not None or bool(fleet.refusals()) or late

    async def _give_up(self, fleet: Fleet, signals: Signals) -> int:
        say = self._console
        if self._failed is not None:
            blamed = [self._failed.id]
            say.say(f"fermata up: {self._failed.id} {describe_exit(self._failed.code)}; it said:")
        elif fleet.refusals():
            router, reasons = next(iter(fleet.refusals().items()))
            blamed = []
            say.say(f"fermata up: {router} refused the policy: {'; '.join(reasons)}")
        else:
            blamed = fleet.waiting()
            waited_s = self._options.ready_timeout_s
            say.say(f"fermata up: not ready within {waited_s:g} s: {', '.join(blamed)}; they said:")
        for name in blamed:
            say.quote(name, last_lines(self._folder.log(name), 12))
        say.say(f"all of it: {self._folder.log('*').parent}")
        await fleet.stop(kill=signals.kill)
        return EXIT_FAILED

    async def _shut_down(self, fleet: Fleet, signals: Signals) -> int:
        self._console.say("\nstopping: turns finish, workers drain (Ctrl-C again kills)")
        killed = await fleet.stop(kill=signals.kill)
        self._console.say("killed" if killed else "stopped")
        return EXIT_KILLED if killed else EXIT_OK


def _is_secure(manifests: Manifests) -> bool:
    return manifests.deployment.spec.security.curve
