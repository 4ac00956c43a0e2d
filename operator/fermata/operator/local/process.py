"""One child process that can not outlive us.

Each child leads its own session, so that Ctrl-C in the terminal reaches us alone and we decide the order of the end,
and so that whatever it started itself dies with it. On Linux the kernel kills it when we die, even by SIGKILL. Its
output goes straight into its log file: a runner that is stopped or slow never blocks a child, and nothing is copied.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

LOG_BYTES = 32 << 20
"""A log beyond this is moved to `.1` and starts anew."""

_LAUNCHER = """\
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; kept over exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the runner died before this process started")
os.execv(sys.argv[2], sys.argv[2:])
"""
# In an interpreter of its own and not in `preexec_fn`: that would run Python between fork and exec of a process
# that has ZeroMQ's threads. It costs about 20 ms.


class Process:
    """Running, or exited with `returncode`."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self._inner = inner

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def returncode(self) -> int | None:
        return self._inner.returncode

    async def wait(self) -> int:
        """Its exit code; whatever it left behind in its group is gone too."""
        code = await self._inner.wait()
        self._signal_group(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """To the process alone: it decides what of its own to end first."""
        if self.returncode is None:
            self._inner.terminate()

    def kill(self) -> None:
        if self.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # nothing is left in it


async def spawn(argv: Sequence[str], *, log: Path) -> Process:
    with log.open("ab", buffering=0) as sink:
        inner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    return Process(inner)


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log, for a person to read; costs the same however long it is."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count * 400))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def roll(log: Path, *, limit: int = LOG_BYTES) -> None:
    """Bounds a log that its process holds open: copied and cut, since that process knows no other file."""
    try:
        if log.stat().st_size <= limit:
            return
        log.with_suffix(f"{log.suffix}.1").write_bytes(log.read_bytes())
        os.truncate(log, 0)
    except OSError:
        return  # a full disk must not end the runner; it will be tried again
