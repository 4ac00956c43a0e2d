"""Notices that a file was edited, by asking for its stamp: works on every file system and for every editor."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """`changed()` is true once after each edit, and only when the file was quiet between two calls.

    Editors truncate before they write, or replace the file by another; half a file would be reported as a mistake.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._stamp()
        self._last = self._known

    def changed(self) -> bool:
        stamp = self._stamp()
        quiet, self._last = stamp == self._last, stamp
        if stamp is None or not quiet or stamp == self._known:
            return False
        self._known = stamp
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None  # between removal and rename
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
