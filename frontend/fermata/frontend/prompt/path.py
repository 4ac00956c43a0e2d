"""From text to frames, at the cost of what is new.

A turn resends its whole history and adds a little. The history is found in the prefix tree by one memory compare; from
the last safe boundary on the text is tokenised, from the last full block before it on the tokens are hashed, and the
frames are the known ones with the new ones joined on: one copy. Nothing else here grows with the history.

The result equals a fresh tokenisation of the whole text, whatever was asked before (see `boundary` for why): a stale or
foreign entry can only save less, and a miss costs a full pass, never a wrong token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fermata.core.errors import InvalidTurn
from fermata.core.hashing import TOKEN_BYTES, sequence_hashes
from fermata.core.model_folder import AddedToken
from fermata.frontend.prompt.boundary import SafeBoundaries
from fermata.frontend.prompt.boundary_encoder import BoundaryEncoder
from fermata.frontend.prompt.prefix_tree import Known, PrefixTree
from fermata.frontend.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: bytes
    """Raw u32 frame of the whole prompt."""
    hashes: array[int]
    """`array('Q')`: sequence hash of each full routing block; as a buffer it is the frame of Route."""
    text: str = ""
    """Rendered; empty for prompts given as ids."""
    cached_tokens: int = 0
    """Tokens taken from this process's cache (says nothing about KV)."""
    tokenised_tokens: int = 0
    hashed_blocks: int = 0

    @property
    def input_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class PromptCounters:
    prompts: int = 0
    cached_tokens: int = 0
    tokenised_tokens: int = 0
    hashed_blocks: int = 0
    full_passes: int = 0
    """Prompts of which nothing could be taken from the cache."""
    prefix_rewrites: int = 0
    """Turns of a known lineage whose blocks do not extend those of the turn before: template or client rewrote it."""


@dataclass(slots=True)
class PendingPrompt:
    """A prompt between lookup and insertion: `encode` may run in any thread while the loop goes on with other turns."""

    text: str
    seed: int
    lineage: str
    leading: bytes
    known: Known
    version: int
    """Of the tree, when `known` was found."""
    frames: list[memoryview]
    hashes: array[int]
    boundaries: SafeBoundaries
    encoder: BoundaryEncoder
    cuts: list[int] = field(default_factory=list[int])
    """Safe boundaries after the known beginning."""
    new_frame: bytes = b""
    starts: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def new_chars(self) -> int:
        """Characters to tokenise: tells a shell whether a thread is worth it."""
        return len(self.text) - self.known.chars

    @property
    def input_tokens(self) -> int:
        """Once it is encoded."""
        return self.known.tokens + len(self.new_frame) // TOKEN_BYTES

    def tokens(self) -> bytes:
        """The u32 frame of the whole prompt, once it is encoded."""
        return b"".join([*self.frames, self.new_frame])

    def encode(self) -> None:
        self.cuts = self.boundaries.starts(self.text, self.known.chars + 1)
        self.new_frame, self.starts = self.encoder.encode(self.text, self.known.chars, self.cuts)


class PromptPath:
    """Prompts of one model folder, bounded in bytes. One thread, but for `PendingPrompt.encode`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        added_tokens: Sequence[AddedToken],
        block_size: int,
        cache_bytes: int,
        lineages_kept: int = 16_384,
    ) -> None:
        self._lineages_kept = lineages_kept
        self.counters = PromptCounters()
        self.boundaries = SafeBoundaries(added_tokens)
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._encoder = BoundaryEncoder(tokenizer, self.boundaries)
        self._tree = PrefixTree(self.boundaries, block_size=block_size, max_bytes=cache_bytes)
        self._lineages: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def prepare(
        self, text: str, *, seed: int, lineage: str = "", add_special_tokens: bool = False
    ) -> Prompt:
        """`seed` is `core.hashing.hash_seed(lora=, namespace=)`: seeds share text and tokens, not hashes.

        `lineage` (a session id, or empty) only serves to count prefix rewrites: lookup is by content.
        `add_special_tokens` puts the post-processor's leading ids (BOS) in front, as completions of plain text want it;
        templates bring their own.
        """
        pending = self.begin(
            text, seed=seed, lineage=lineage, add_special_tokens=add_special_tokens
        )
        pending.encode()
        return self.finish(pending)

    def begin(
        self, text: str, *, seed: int, lineage: str = "", add_special_tokens: bool = False
    ) -> PendingPrompt:
        """First step of `prepare`, for shells that encode long texts in a thread."""
        leading = self._tokenizer.leading_ids.tobytes() if add_special_tokens else b""
        known = self._tree.find(text, leading=leading)
        return PendingPrompt(
            text=text,
            seed=seed,
            lineage=lineage,
            leading=leading,
            known=known,
            version=self._tree.version,
            frames=known.frames(),
            hashes=known.hashes(seed, self._block_size),
            boundaries=self.boundaries,
            encoder=self._encoder,
        )

    def finish(self, pending: PendingPrompt) -> Prompt:
        """Last step of `prepare`, in the loop's thread again."""
        tokens = pending.tokens()
        hashes = pending.hashes
        new_hashes = self._continue_hashes(tokens, hashes, pending.seed)
        hashes.extend(new_hashes)
        self._insert(pending, hashes)
        cached = pending.known.tokens
        if not pending.known.chars:
            self.counters.full_passes += 1
            cached = 0
        return self._count(
            Prompt(
                tokens=tokens,
                hashes=hashes,
                text=pending.text,
                cached_tokens=cached,
                tokenised_tokens=len(pending.new_frame) // TOKEN_BYTES,
                hashed_blocks=len(new_hashes),
            ),
            pending.lineage,
        )

    def prepare_ids(self, ids: Sequence[int], *, seed: int, lineage: str = "") -> Prompt:
        """A prompt that came as token ids: hashed whole. InvalidTurn for an id outside the vocabulary."""
        size = self._tokenizer.vocab_size
        wrong = min(ids, default=0) if min(ids, default=0) < 0 else max(ids, default=0)
        if not 0 <= wrong < size:
            raise InvalidTurn(
                f"token id {wrong} is not in the vocabulary of {size}", param="prompt"
            )
        tokens = array("I", ids).tobytes()
        hashes = sequence_hashes(tokens, self._block_size, seed=seed)
        return self._count(Prompt(tokens, hashes, hashed_blocks=len(hashes)), lineage)

    def _continue_hashes(self, tokens: bytes, known: array[int], seed: int) -> array[int]:
        rest = memoryview(tokens)[len(known) * self._block_size * TOKEN_BYTES :]
        parent = known[-1] if known else None
        return sequence_hashes(rest, self._block_size, seed=seed, parent=parent)

    def _insert(self, pending: PendingPrompt, hashes: array[int]) -> None:
        known, cuts, starts, frame = pending.known, pending.cuts, pending.starts, pending.new_frame
        if self._tree.version != pending.version:
            # Other turns came in between. What they added is found again; where something went, this text is not kept.
            known = self._tree.find(pending.text, leading=pending.leading)
            if known.chars < pending.known.chars:
                return
            edges = [pending.known.chars, *cuts]
            skipped = edges.index(known.chars)
            cuts = cuts[skipped:]
            offset = starts[skipped]
            frame = frame[offset * TOKEN_BYTES :]
            starts = array("Q", [start - offset for start in starts[skipped:]])
        leaf = self._tree.insert(known, pending.text, frame=frame, starts=starts, cuts=cuts)
        self._tree.remember_hashes(leaf, pending.seed, hashes)
        self._tree.trim()

    def _count(self, prompt: Prompt, lineage: str) -> Prompt:
        counters = self.counters
        counters.prompts += 1
        counters.cached_tokens += prompt.cached_tokens
        counters.tokenised_tokens += prompt.tokenised_tokens
        counters.hashed_blocks += prompt.hashed_blocks
        if lineage:
            counters.prefix_rewrites += self._is_rewrite(lineage, prompt.hashes)
        return prompt

    def _is_rewrite(self, lineage: str, hashes: array[int]) -> bool:
        """A sequence hash names all that is before it, so one compare tells; in whole blocks, as KV caches go by."""
        before = self._lineages.get(lineage)
        if hashes:
            self._lineages[lineage] = (len(hashes), hashes[-1])
            self._lineages.move_to_end(lineage)
            if len(self._lineages) > self._lineages_kept:
                self._lineages.popitem(last=False)
        if before is None:
            return False
        count, last = before
        return len(hashes) < count or hashes[count - 1] != last

    @property
    def cache_bytes(self) -> int:
        return self._tree.size_bytes

    @property
    def cache_spans(self) -> int:
        return self._tree.spans

    @property
    def evicted_bytes(self) -> int:
        return self._tree.evicted_bytes

    def check_integrity(self) -> None:
        self._tree.check_integrity()
