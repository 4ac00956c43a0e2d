"""What the worker asks of any engine.

One Engine object is one data-parallel rank. Token ids go in and come out as raw little-endian u32 bytes, so that
nothing is converted on the way. An engine says what it did through its sink: outputs, and KV events already in
sequence hashes of routing blocks; sequence numbers, leases' owners and wires are the worker's affair.

The Protocol is the least that vLLM's AsyncLLM, SGLang's Engine and the simulated engine have in common: `submit`
returns at once and may not block (an engine that streams by async generator starts its task there), and `abort` is
answered by a last output.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from fermata.core.errors import FermataError
from fermata.core.ids import LeaseId, SessionId
from fermata.wire.messages import KvAction, KvEvent, Sampling

Finish = Literal["", "stop", "length", "abort", "error"]
NO_SESSION = SessionId("")
RefusalCode = Literal["draining", "fenced", "invalid", "full", "failed"]


class EngineRefused(FermataError):
    """The engine will not run the request; nothing of it was kept."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code
        self.message = message


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What one rank can hold; `kv_blocks` per tier in pages of `block_size` tokens."""

    block_size: int
    kv_blocks: dict[str, int]
    max_sequences: int
    max_batched_tokens: int
    context_length: int
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt of a turn.

    `tokens` ends with the `resumed` output tokens of earlier attempts, and `sampling` counts from the first attempt.
    """

    lease: LeaseId
    tokens: bytes | memoryview
    sampling: Sampling
    resumed: int = 0
    priority: int = 0
    """Higher is sooner."""
    session: SessionId = NO_SESSION
    namespace: str = ""
    """The cache salt; part of the hash seed."""
    lora: str = ""
    script_inputs: Sequence[str] = ()
    transfer: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


class EngineOutput(msgspec.Struct, gc=False):
    """What one request made since its last output; exactly one of a request carries a finish."""

    lease: LeaseId
    tokens: bytes = b""
    """u32 ids. A stop token that ended the request is the last of them."""
    cached_tokens: int = -1
    finish: Finish = ""
    error: str = ""
    stop_token: int | None = None
    """The token, EOS or asked for, that `stop` is due to."""
    logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(slots=True)
class Tally:
    """Live requests of one router on one rank, and the tokens of their contexts."""

    active: int = 0
    waiting: int = 0
    charged_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    waiting: int
    kv_referenced: int
    """Pages some request holds."""
    kv_cached: int
    """Pages with reusable content, held or not."""
    steps: int
    output_tokens: int
    preemptions: int
    routers: dict[int, Tally] = field(default_factory=dict[int, Tally])


class EngineSink(Protocol):
    """Called in the loop's thread, in the order things happened: events of a step before its outputs."""

    def outputs(self, rank: int, outputs: Sequence[EngineOutput]) -> None: ...

    def kv_events(self, rank: int, events: Sequence[KvEvent], hashes: array[int]) -> None:
        """`hashes` are the sequence hashes the events name, event by event."""
        ...

    def failed(self, rank: int, error: Exception) -> None:
        """The engine is broken for good."""
        ...


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    async def start(self, sink: EngineSink) -> None:
        """Returns when the engine can take requests."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Raises EngineRefused. After it returns, the request ends with exactly one output that has a finish."""
        ...

    def abort(self, lease: LeaseId, *, error: str = "") -> None:
        """Ends the request and frees what it holds; its last output says `abort` and `error`. Unknown: nothing."""
        ...

    def apply_hint(self, action: KvAction) -> bool:
        """Advisory. False: this engine does not know the action or can not do it now."""
        ...

    def load(self) -> EngineLoad:
        """O(live requests). May be called from another thread, to be scraped."""
        ...

    def drain(self) -> None:
        """Take nothing new; finish what runs."""
        ...

    async def stop(self) -> None: ...
