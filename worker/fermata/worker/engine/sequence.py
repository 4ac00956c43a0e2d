"""One request inside the simulated engine: what it must say, how far its KV is computed, what it holds."""

from __future__ import annotations

from enum import Enum

from fermata.worker.engine.base import EngineOutput, EngineRequest, Finish
from fermata.worker.engine.block_pool import BlockLease
from fermata.worker.engine.speech import Speech
from fermata.worker.engine.token_chain import TokenChain


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Sequence:
    """`computed` tokens have KV; a sequence whose tokens are all computed says its next one.

    `scheduled` is its share of the step under way, so dropping out of that step is one assignment.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "lease",
        "limit",
        "made",
        "may_stop",
        "min_tokens",
        "order",
        "phase",
        "publish_at",
        "room",
        "scheduled",
        "speech",
        "stops",
        "wants_logprobs",
    )

    def __init__(
        self, request: EngineRequest, speech: Speech, chain: TokenChain, *, limit: int, arrival: int
    ) -> None:
        sampling = request.sampling
        self.lease = request.lease
        self.order = (-request.priority, arrival)
        self.chain = chain
        self.speech = speech
        self.made = request.resumed
        """Output tokens so far, from the turn's first attempt."""
        self.limit = limit
        self.min_tokens = sampling.min_tokens
        self.may_stop = not sampling.ignore_eos
        self.stops = frozenset(sampling.stop_token_ids)
        self.wants_logprobs = sampling.logprobs is not None
        self.phase = Phase.WAITING
        self.blocks: BlockLease | None = None
        self.computed = 0
        self.scheduled = 0
        self.room = 0
        """Tokens its pages can hold."""
        self.publish_at = 0
        """Computed tokens at which its next page is full."""
        self.cached_tokens = -1

    def start(self, blocks: BlockLease, *, cached: int, scheduled: int, page: int) -> None:
        """Leaves the queue with pages, the first `cached` tokens of which are computed already."""
        self.blocks = blocks
        self.phase = Phase.PREFILL
        self.computed = cached
        self.scheduled = scheduled
        self.room = len(blocks.pages) * page
        self.publish_at = cached + page
        if self.cached_tokens < 0:
            self.cached_tokens = cached

    def say(self) -> EngineOutput:
        """Its next token, and the finish when that is the last."""
        index = self.made
        finish: Finish = ""
        stop_token: int | None = None
        if index >= self.speech.length and self.may_stop and index >= self.min_tokens:
            token = stop_token = self.speech.eos
            finish = "stop"
        else:
            token = self.speech.token(index)
            if token in self.stops and index >= self.min_tokens:
                finish, stop_token = "stop", token
            elif index + 1 >= self.limit:
                finish = "length"
        self.made = index + 1
        self.chain.append(token)
        output = EngineOutput(
            lease=self.lease,
            tokens=token.to_bytes(4, "little"),
            cached_tokens=self.cached_tokens,
            finish=finish,
            stop_token=stop_token,
        )
        if self.wants_logprobs:
            output.logprobs = [[(token, 0.0)]]  # it could have said nothing else
        return output
