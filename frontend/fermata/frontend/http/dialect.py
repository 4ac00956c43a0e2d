"""What a dialect is to the turn path: how a body is read, and how an answer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from fermata.core.errors import TurnError
from fermata.frontend.output import Delta, TokenLogprobs
from fermata.wire.messages import Usage


class Writer(Protocol):
    """One answer's bytes, streamed or whole. A piece of stream is complete events, so pieces may be joined."""

    def opening(self) -> bytes:
        """First event of a stream; may be sent long before there is any text."""
        ...

    def deltas(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprobs]) -> bytes: ...

    def keep_alive(self) -> bytes:
        """An event that every client takes as a sign of life and as nothing else."""
        ...

    def closing(self, *, reason: str, usage: Usage) -> bytes: ...

    def failure(self, error: TurnError) -> bytes:
        """Last event of a stream that can not be finished."""
        ...

    def whole(
        self,
        deltas: Sequence[Delta],
        logprobs: Sequence[TokenLogprobs],
        *,
        reason: str,
        usage: Usage,
    ) -> bytes:
        """The answer of a request that is not streamed."""
        ...


class WriterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every writer needs to know of its request."""

    request: str
    model: str
    created: int
    streams: bool = True
    include_usage: bool = False
    wants_logprobs: bool = False
    token_bytes: Callable[[int], bytes] = bytes
    """What one token says, for logprobs; often a part of a character only."""
    echo: str = ""
    """Completions: the prompt's text goes in front of the answer."""
