"""Records to `PREFIX.NNNNNN.jsonl.gz`, from a thread of its own.

`put` costs an append to a bounded queue: a slow disk drops records (counted) and never delays a token. Once a second
what there is gets compressed and flushed to a byte border, so a killed process leaves a readable segment
that lacks at most its last second.

A segment is created exclusively under the next free number: several processes may share one prefix.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from fermata.trace.reader import segment_path, segments
from fermata.trace.record import TraceLine, TraceRecord

log = logging.getLogger(__name__)

CAPACITY = 8192
ROLL_BYTES = 256 << 20
FLUSH_S = 1.0
_GZIP = 31  # zlib's window bits that mean a gzip header and trailer


class TraceWriter:
    """Any thread may `put`. `close` writes what is queued; a closed writer takes and counts nothing."""

    def __init__(
        self,
        prefix: Path,
        *,
        roll_bytes: int = ROLL_BYTES,
        capacity: int = CAPACITY,
        flush_s: float = FLUSH_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.written = 0
        self.dropped = 0
        """Records refused because the queue was full, or lost to a disk that failed."""
        self._prefix = prefix
        self._roll_bytes = roll_bytes
        self._capacity = capacity
        self._flush_s = flush_s
        self._monotonic = monotonic
        self._started = monotonic()
        self._queue: deque[tuple[int, TraceRecord]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._encoder = msgspec.json.Encoder()
        self._segment: _Segment | None = None
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def put(self, record: TraceRecord) -> None:
        if self._closing:
            return
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        self._queue.append((round((self._monotonic() - self._started) * 1000), record))
        if len(self._queue) * 2 >= self._capacity:
            self._wake.set()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Returns when all is on disk, or after the time-out where the disk hangs. Twice is fine."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            closing = self._closing
            try:
                self._write_queued()
                if closing and self._segment is not None:
                    self._segment.close()
            except OSError as error:
                log.error("trace segment failed prefix=%s error=%s", self._prefix, error)  # noqa: TRY400  # no traceback: a full disk is no bug
                self._abandon_segment()
            if closing:
                return

    def _write_queued(self) -> None:
        queue = self._queue
        while queue:
            timestamp, record = queue.popleft()
            line = self._encoder.encode(TraceLine(timestamp=timestamp, event=record)) + b"\n"
            try:
                self._open_segment().write(line)
            except OSError:
                self.dropped += 1
                raise
            self.written += 1
        if self._segment is not None:
            self._segment.flush()

    def _abandon_segment(self) -> None:
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.abandon()
            self._segment = None

    def _open_segment(self) -> _Segment:
        segment = self._segment
        if segment is not None and segment.size >= self._roll_bytes:
            segment.close()
            segment = None
        if segment is None:
            segment = self._segment = _Segment(_create_next(self._prefix))
        return segment


class _Segment:
    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        """Uncompressed."""
        self._file = file
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._flushed = True

    def write(self, line: bytes) -> None:
        self._file.write(self._gzip.compress(line))
        self.size += len(line)
        self._flushed = False

    def flush(self) -> None:
        """To the file, at a byte border: everything so far can be read, whatever happens next."""
        if not self._flushed:
            self._file.write(self._gzip.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()
            self._flushed = True

    def close(self) -> None:
        with self._file:
            self._file.write(self._gzip.flush(zlib.Z_FINISH))

    def abandon(self) -> None:
        self._file.close()


def _create_next(prefix: Path) -> BinaryIO:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    number = max((known for known, _ in segments(prefix)), default=-1) + 1
    while True:
        try:
            return segment_path(prefix, number).open("xb")
        except FileExistsError:
            number += 1
