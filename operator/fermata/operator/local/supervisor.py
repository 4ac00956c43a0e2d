"""Keeps processes running: starts again what dies, ends what should leave, and leaves nothing behind.

One task a process, all of them inside the runner's task group. A process is `leaving` from the moment it is told to
end; until then every exit, clean or not, is a death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fermata.operator.local.backoff import Backoff
from fermata.operator.local.process import Process, spawn
from fermata.operator.reconcile import Kind


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """`command` gives the argument vector anew at each start, since addresses in it may have changed."""

    id: str
    kind: Kind
    revision: str
    shared: str
    command: Callable[[], list[str]]
    log: Path
    group: str = ""


@dataclass(frozen=True, slots=True)
class Death:
    """An exit that nobody asked for."""

    id: str
    code: int
    """Negative: the signal that ended it."""
    ran_s: float
    deaths: int
    """Since it last ran well, this one included."""
    again_in_s: float


class Child:
    """One process over all its starts."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.started_at = 0.0
        """Monotonic time of its last start; what it said before that is about another process."""
        self.starts = 0
        self.leaving = asyncio.Event()
        """From here on its exit is what was asked for. It still has to be told, by signal or by message."""
        self.doomed = False
        """To be killed, also when that is known before the process is."""
        self.gone = asyncio.Event()
        self.backoff = Backoff()

    @property
    def is_up(self) -> bool:
        return self.process is not None


class Supervisor:
    """Lives inside the task group given. `died` is told each death, `gone` each end; `changed` follows both."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        died: Callable[[Death], None],
        gone: Callable[[ProcessSpec], None],
        changed: Callable[[], None],
    ) -> None:
        self._tasks = tasks
        self._died = died
        self._gone = gone
        self._changed = changed
        self.children: dict[str, Child] = {}

    def start(self, spec: ProcessSpec) -> None:
        assert spec.id not in self.children, f"{spec.id} is still there"
        child = Child(spec)
        self.children[spec.id] = child
        self._tasks.create_task(self._keep(child), name=f"keep {spec.id}")

    async def stop(self, name: str, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole group once `grace_s` have passed. Returns when it is gone."""
        child = self.children.get(name)
        if child is None:
            return
        child.leaving.set()
        if child.process is not None:
            child.process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await child.gone.wait()
        except TimeoutError:
            if child.process is not None:
                child.process.kill()
            await child.gone.wait()

    def kill_all(self) -> None:
        """At once and whatever they are doing: the last thing a runner does, also when it fails itself."""
        for child in self.children.values():
            child.leaving.set()
            child.doomed = True
            if child.process is not None:
                child.process.kill()

    async def _keep(self, child: Child) -> None:
        try:
            while not child.leaving.is_set():
                code, ran_s = await self._run_once(child)
                if not child.leaving.is_set():
                    await self._wait_before_restart(child, code, ran_s)
        finally:
            if child.process is not None:  # cancelled while it ran
                child.process.kill()
                await child.process.wait()
            del self.children[child.spec.id]
            self._gone(child.spec)
            child.gone.set()
            self._changed()

    async def _run_once(self, child: Child) -> tuple[int, float]:
        child.starts += 1
        child.started_at = time.monotonic()
        child.process = await spawn(child.spec.command(), log=child.spec.log)
        if (
            child.leaving.is_set()
        ):  # told to leave while it was being started, when there was nothing to tell
            child.process.kill() if child.doomed else child.process.terminate()
        self._changed()
        code = await child.process.wait()
        child.process = None
        return code, time.monotonic() - child.started_at

    async def _wait_before_restart(self, child: Child, code: int, ran_s: float) -> None:
        wait_s = child.backoff.after(ran_s)
        self._died(
            Death(
                id=child.spec.id,
                code=code,
                ran_s=ran_s,
                deaths=child.backoff.failures,
                again_in_s=wait_s,
            )
        )
        self._changed()
        try:
            async with asyncio.timeout(wait_s):
                await child.leaving.wait()
        except TimeoutError:
            return
