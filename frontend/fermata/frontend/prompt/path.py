"""From text to frames, at the cost of what is new."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from fermata.frontend.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: bytes
    """Raw u32 frame of the whole prompt."""
    hashes: array[int]
    """Sequence hash of each full routing block (`array('Q')`): the Route frame is `hashes.tobytes()` or the buffer itself."""
    text: str = ""
    """Rendered; empty for prompts given as ids."""
    cached_tokens: int = 0
    """Tokens taken from the cache of this process (says nothing about KV)."""
    tokenised_tokens: int = 0
    hashed_blocks: int = 0

    @property
    def input_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclass(slots=True)
class PromptCounters:
    prompts: int = 0
    cached_tokens: int = 0
    tokenised_tokens: int = 0
    hashed_blocks: int = 0
    full_passes: int = 0
    """Prompts of which nothing could be taken from the cache."""
    prefix_rewrites: int = 0
    """Turns of a known lineage whose blocks did not extend the turn before: the template (or the client) rewrote history."""
    evicted_bytes: int = 0


class PendingPrompt:
    """A prompt between lookup and insertion: `encode` may run in any thread while the loop goes on."""

    new_chars: int
    """Characters that have to be tokenised: tells a shell whether a thread is worth it."""

    def encode(self) -> None:
        raise NotImplementedError


class PromptPath:
    """Prompts of one model folder; single-threaded but for `PendingPrompt.encode`."""

    counters: PromptCounters

    def __init__(self, tokenizer: Tokenizer, *, block_size: int, cache_bytes: int) -> None:
        raise NotImplementedError

    def prepare(
        self, text: str, *, seed: int, lineage: str = "", add_special_tokens: bool = False
    ) -> Prompt:
        """`seed` is `core.hashing.hash_seed(lora=, namespace=)`.

        `lineage` (session id, or empty) only counts prefix rewrites: lookup is by content. `add_special_tokens` puts the
        post-processor's leading ids (BOS) in front, as completions of plain text want; templates bring their own.
        """
        raise NotImplementedError

    def begin(
        self, text: str, *, seed: int, lineage: str = "", add_special_tokens: bool = False
    ) -> PendingPrompt:
        """First step of `prepare`, for shells that encode long texts in a thread."""
        raise NotImplementedError

    def finish(self, pending: PendingPrompt) -> Prompt:
        """Last step of `prepare`, back in the loop's thread."""
        raise NotImplementedError

    def prepare_ids(self, ids: Sequence[int], *, seed: int, lineage: str = "") -> Prompt:
        """A prompt that came as token ids. InvalidTurn for an id outside the vocabulary."""
        raise NotImplementedError

    @property
    def cache_bytes(self) -> int:
        raise NotImplementedError

    @property
    def cache_entries(self) -> int:
        raise NotImplementedError
