"""What an attempt has made and its frontend has not been sent: one buffer an attempt, coalescing
while the peer does not read.

Nothing is dropped and nothing is kept twice; the most a buffer can hold is its turn's max_tokens.
Each entry carries the index of its first token, so that a frontend can drop repeats and see gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fermata.core.ids import LeaseId
from fermata.wire.messages import OutputEntry
from fermata.worker.engine.base import EngineOutput

Finish = Literal["", "stop", "length", "abort", "error"]


class OutputBuffer:
    __slots__ = (
        "_cached_tokens",
        "_chunks",
        "_count",
        "_error",
        "_event_sequence",
        "_first",
        "_logprobs",
        "_stop_token",
        "attempt",
        "finish",
        "lease",
    )

    def __init__(self, lease: LeaseId, attempt: int) -> None:
        self.lease = lease
        self.attempt = attempt
        self.finish: Finish = ""
        self._first = 0
        self._chunks: list[bytes] = []
        self._count = 0
        self._cached_tokens = -1
        self._error = ""
        self._stop_token: int | None = None
        self._event_sequence = -1
        self._logprobs: list[list[tuple[int, float]]] | None = None

    @property
    def made(self) -> int:
        """Output tokens of the attempt so far, sent or not."""
        return self._first + self._count

    def add(self, output: EngineOutput, *, event_sequence: int) -> None:
        """`event_sequence`: of the rank's last KV event, which a finish carries."""
        if output.tokens:
            self._chunks.append(output.tokens)
            self._count += len(output.tokens) // 4
        if output.cached_tokens >= 0:
            self._cached_tokens = output.cached_tokens
        if output.logprobs is not None:
            self._logprobs = (self._logprobs or []) + output.logprobs
        if output.finish:
            self.finish = output.finish
            self._error = output.error
            self._stop_token = output.stop_token
            self._event_sequence = event_sequence

    def entry(self) -> tuple[OutputEntry, bytes]:
        """What is owed; call `taken` once the socket has it."""
        entry = OutputEntry(
            lease=self.lease,
            attempt=self.attempt,
            first=self._first,
            count=self._count,
            cached_tokens=self._cached_tokens,
            finish=self.finish,
            error=self._error,
            stop_token=self._stop_token,
            event_sequence=self._event_sequence,
            logprobs=self._logprobs,
        )
        return entry, b"".join(self._chunks)

    def taken(self) -> None:
        self._first += self._count
        self._chunks.clear()
        self._count = 0
        self._logprobs = None


def gather(buffers: Iterable[OutputBuffer]) -> tuple[list[OutputEntry], bytes]:
    """One Output's entries and its token frame."""
    entries: list[OutputEntry] = []
    frames: list[bytes] = []
    for buffer in buffers:
        entry, frame = buffer.entry()
        entries.append(entry)
        frames.append(frame)
    return entries, b"".join(frames)
