"""A stretch of text that many prompts share, with its tokens, its safe boundaries and its hashes.

A span begins at a safe boundary (or at the beginning of the text) and ends where one begins, so its ids do not depend
on what stands around it. Positions inside a span are relative to its start.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable

from fermata.core.hashing import TOKEN_BYTES

SEEDS_KEPT = 16
"""Namespaces and LoRAs whose hashes one span keeps: a system prompt that all tenants share must not grow for ever."""
_OVERHEAD_BYTES = 900


class Span:
    """Mutable node of a PrefixTree; only the tree changes it."""

    __slots__ = (
        "alive",
        "children",
        "cut_tokens",
        "cuts",
        "hashes",
        "last_used",
        "parent",
        "queued",
        "size_bytes",
        "start",
        "start_token",
        "text",
        "tokens",
    )

    def __init__(
        self,
        *,
        start: int,
        start_token: int,
        text: str,
        tokens: bytes,
        cuts: array[int],
        cut_tokens: array[int],
    ) -> None:
        self.start = start
        self.start_token = start_token
        self.text = text
        self.tokens = tokens
        """u32 frame."""
        self.cuts = cuts
        """Safe boundaries inside the span, its start not among them; sorted."""
        self.cut_tokens = cut_tokens
        """How many of the span's tokens stand before each cut."""
        self.hashes: dict[int, array[int]] = {}
        """By seed: sequence hashes of the first blocks that *end* inside this span, wherever they begin."""
        self.children: dict[int, Span] = {}
        """By hash of the child's first piece, the text up to its first cut."""
        self.parent: Span | None = None
        self.alive = True
        self.queued = False
        self.last_used = 0
        self.size_bytes = 0
        self.measure()

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def end_token(self) -> int:
        return self.start_token + len(self.tokens) // TOKEN_BYTES

    @property
    def first_piece(self) -> int:
        return hash(self.text[: self.cuts[0]] if self.cuts else self.text)

    def block_range(self, block_size: int) -> tuple[int, int]:
        """Numbers of the blocks that end inside this span."""
        return self.start_token // block_size, self.end_token // block_size

    def is_at(self, text: str, position: int) -> bool:
        """Whether `text` goes on with the whole span. One memory compare."""
        own = self.text
        if text.isascii() and own.isascii():
            return text.startswith(own, position)
        # Strings of different width are compared a character at a time by startswith; a slice is made as narrow as it
        # can be first, at a tenth of that.
        return text[position : position + len(own)] == own

    def shared_length(self, text: str, position: int) -> int:
        """How many characters `text` shares with the span from `position` on: by halving, so two memory compares."""
        own = self.text
        low = 0
        high = min(len(own), len(text) - position)
        while low < high:
            middle = (low + high + 1) // 2
            if text[position + low : position + middle] == own[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_before(self, cut: int) -> int:
        """Tokens of the span before one of its cuts; 0 for its start."""
        return self.cut_tokens[bisect_left(self.cuts, cut)] if cut else 0

    def remember_hashes(self, seed: int, hashes: array[int]) -> None:
        self.hashes.pop(seed, None)
        self.hashes[seed] = hashes
        if len(self.hashes) > SEEDS_KEPT:
            del self.hashes[next(iter(self.hashes))]
        self.measure()

    def measure(self) -> None:
        """Bytes held, as the allocator sees them, near enough for a budget."""
        self.size_bytes = (
            _OVERHEAD_BYTES
            + sys.getsizeof(self.text)
            + len(self.tokens)
            + 8 * len(self.cuts)
            + sum(map(len, self.hashes.values())) * 8
        )

    def split(self, cut: int, block_size: int) -> Span:
        """Gives what stands before `cut` to a new span, which becomes the parent; this one keeps the rest."""
        number = bisect_left(self.cuts, cut)
        tokens = self.cut_tokens[number]
        head = Span(
            start=self.start,
            start_token=self.start_token,
            text=self.text[:cut],
            tokens=self.tokens[: tokens * TOKEN_BYTES],
            cuts=self.cuts[:number],
            cut_tokens=self.cut_tokens[:number],
        )
        first, last = head.block_range(block_size)
        blocks = last - first
        head.hashes = {seed: known[:blocks] for seed, known in self.hashes.items() if blocks}
        self.hashes = {
            seed: known[blocks:] for seed, known in self.hashes.items() if known[blocks:]
        }
        self.text = self.text[cut:]
        self.tokens = self.tokens[tokens * TOKEN_BYTES :]
        self.cuts = array("I", [c - cut for c in self.cuts[number + 1 :]])
        self.cut_tokens = array("I", [t - tokens for t in self.cut_tokens[number + 1 :]])
        self.start += cut
        self.start_token += tokens
        head.last_used = self.last_used
        head.measure()
        self.measure()
        return head

    def extend(self, tail: Span, block_size: int) -> None:
        """Takes over text, tokens, cuts, hashes and children of a span that begins where this one ends."""
        first, last = self.block_range(block_size)
        chars = len(self.text)
        count = len(self.tokens) // TOKEN_BYTES
        self.cuts.append(chars)
        self.cut_tokens.append(count)
        self.cuts.extend([chars + c for c in tail.cuts])
        self.cut_tokens.extend([count + t for t in tail.cut_tokens])
        for seed, known in self.hashes.items():
            if len(known) == last - first and seed in tail.hashes:
                known.extend(tail.hashes[seed])
        if first == last:
            # No block ends here, so what the tail knows is what the whole knows.
            self.hashes = tail.hashes
        self.text += tail.text
        self.tokens += tail.tokens
        self.children = tail.children
        for child in self.children.values():
            child.parent = self
        self.last_used = max(self.last_used, tail.last_used)
        tail.alive = False
        # The queue may still hold the shell.
        tail.text, tail.tokens, tail.hashes, tail.children = "", b"", {}, {}
        self.measure()

    def check_integrity(self, is_boundary: Callable[[str, int], bool], block_size: int) -> None:
        """For tests."""
        assert self.alive
        assert self.text
        assert self.start == 0 or is_boundary(self.text, 0)
        assert all(is_boundary(self.text, cut) for cut in self.cuts)
        assert list(self.cuts) == sorted(set(self.cuts))
        assert list(self.cut_tokens) == sorted(self.cut_tokens)
        assert len(self.cuts) == len(self.cut_tokens)
        first, last = self.block_range(block_size)
        for known in self.hashes.values():
            assert 0 < len(known) <= last - first
        for key, child in self.children.items():
            assert child.parent is self
            assert child.start == self.end
            assert child.start_token == self.end_token
            assert child.first_piece == key
