"""Signals as flags: the first SIGINT or SIGTERM asks to stop, the second to kill; SIGHUP asks to read the file again.

SIGHUP has two meanings. When it comes because the terminal went away, it stops: nobody would see or end what runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Installed while entered. `woken` is called after each signal."""

    def __init__(self, woken: Callable[[], None]) -> None:
        self._woken = woken
        self._reload = False
        self._had_terminal = _has_terminal()
        self.stop = False
        self.kill = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (*_STOPPING, signal.SIGHUP):
            loop.remove_signal_handler(number)

    def take_reload(self) -> bool:
        """True once after a SIGHUP."""
        asked, self._reload = self._reload, False
        return asked

    def _on_stop(self) -> None:
        if self.stop:
            self.kill.set()
        self.stop = True
        self._woken()

    def _on_hangup(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._on_stop()
            return
        self._reload = True
        self._woken()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
