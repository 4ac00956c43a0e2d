"""Texts already tokenised, as a tree of shared stretches.

A prompt is found by its content: walking down costs one memory compare of what is known, whoever sent it before. So a
session's next turn, a sibling forked from it and a stranger with the same system prompt are all the same case, a
prefix is kept once for all of them, and a rewritten history is a branch: both forms stay while both are used.

Only text up to a prompt's last safe boundary is kept; what follows it is tokenised each time, and is short.

Chains are merged as they grow (a span is joined to its only child unless it is four times as long), so the depth is
logarithmic in the length plus the number of real forks, at an amortised O(log) copies of a character.
Bounded in bytes: leaves go, the least recently used first.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from fermata.core.hashing import TOKEN_BYTES
from fermata.frontend.prompt.boundary import SafeBoundaries
from fermata.frontend.prompt.span import Span

_MERGE_RATIO = 4
_STALE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Known:
    """The longest known beginning of a text that ends at a safe boundary of it."""

    spans: list[Span]
    """From the root; all of them whole but the last one, of which `inner` characters count."""
    inner: int
    chars: int
    tokens: int

    def frames(self) -> list[memoryview]:
        """Token frames that make up the known beginning."""
        frames = [memoryview(span.tokens) for span in self.spans]
        last = self.spans[-1]
        frames[-1] = frames[-1][: (self.tokens - last.start_token) * TOKEN_BYTES]
        return frames

    def hashes(self, seed: int, block_size: int) -> array[int]:
        """Sequence hashes of the first blocks of the known beginning, as many as are known without a gap."""
        found = array("Q")
        for span in self.spans:
            known = span.hashes.get(seed)
            if known is not None:
                found.extend(known)
            if len(found) < span.end_token // block_size:
                break
        del found[self.tokens // block_size :]
        return found


class PrefixTree:
    """`version` changes with every change of shape: a `Known` is good for `insert` only while it stands."""

    def __init__(self, boundaries: SafeBoundaries, *, block_size: int, max_bytes: int) -> None:
        self._boundaries = boundaries
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._roots: dict[bytes, Span] = {}
        self._tick = 0
        self._pushed = 0
        # (last use when pushed, serial, leaf), one a span; renewed lazily, so that using a span costs nothing here.
        self._queue: list[tuple[int, int, Span]] = []
        self.version = 0
        self.size_bytes = 0
        self.spans = 0
        self.evicted_bytes = 0

    def find(self, text: str, *, leading: bytes = b"") -> Known:
        """`leading` is the token frame in front of the text (BOS), which makes it another text."""
        root = self._roots.get(leading)
        if root is None:
            root = self._roots[leading] = _empty_span(leading)
        self._tick += 1
        spans = [root]
        while True:
            span = spans[-1]
            span.last_used = self._tick
            child = self._child(span, text)
            if child is None:
                return self._cut_whole(spans, text)
            if not child.is_at(text, child.start):
                return self._cut_inside(spans, child, text)
            spans.append(child)

    def _child(self, span: Span, text: str) -> Span | None:
        """The only child that can share a piece with the rest of the text."""
        children = span.children
        if len(children) < 2:
            return next(iter(children.values()), None)
        end = self._boundaries.next(text, span.end + 1)
        return None if end is None else children.get(hash(text[span.end : end]))

    def _cut_inside(self, spans: list[Span], child: Span, text: str) -> Known:
        """The text leaves `child` somewhere inside: cut at the child's last cut before that."""
        shared = child.shared_length(text, child.start)
        for number in range(bisect_right(child.cuts, shared) - 1, -1, -1):
            cut = child.cuts[number]
            if self._boundaries.at(text, child.start + cut):
                child.last_used = self._tick
                return _known([*spans, child], cut)
        return self._cut_whole(spans, text)

    def _cut_whole(self, spans: list[Span], text: str) -> Known:
        """All spans are in the text. Where it goes on with no safe token, the cut is the last one that is in it."""
        last = spans[-1]
        if last.end == 0 or self._boundaries.at(text, last.end):
            return _known(spans, len(last.text))
        if last.cuts:
            return _known(spans, last.cuts[-1])
        # The last span is one piece, and its beginning is its parent's end.
        before = spans[:-1]
        return _known(before, len(before[-1].text))

    def insert(
        self, known: Known, text: str, *, frame: bytes, starts: array[int], cuts: list[int]
    ) -> Span:
        """Adds the text's pieces from `known.chars` up to its last safe boundary, `cuts[-1]`.

        `frame` holds the tokens of the pieces, which begin at the characters `[known.chars, *cuts]` of the text and
        at the tokens `starts` of the frame. Returns the span in which all that is kept of this text ends.
        """
        last = known.spans[-1]
        is_whole = known.inner == len(last.text)
        if not cuts:
            above = last if is_whole else last.parent
            assert above is not None, "a root is always whole"
            return above
        self.version += 1
        base = known.chars
        new = Span(
            start=base,
            start_token=known.tokens,
            text=text[base : cuts[-1]],
            tokens=frame[: starts[len(cuts)] * TOKEN_BYTES],
            cuts=array("I", [cut - base for cut in cuts[:-1]]),
            cut_tokens=array("I", starts[1 : len(cuts)]),
        )
        new.last_used = self._tick
        return self._attach(last if is_whole else self._split(last, known.inner), new)

    def _split(self, span: Span, inner: int) -> Span:
        above = span.parent
        assert above is not None, "a root has no text to split"
        key = span.first_piece
        self.size_bytes -= span.size_bytes
        head = span.split(inner, self._block_size)
        self.size_bytes += span.size_bytes + head.size_bytes
        self.spans += 1
        head.parent = above
        above.children[key] = head
        head.children = {span.first_piece: span}
        span.parent = head
        return head

    def _attach(self, parent: Span, new: Span) -> Span:
        key = new.first_piece
        if key in parent.children:
            # Another piece of the same 64-bit hash: that one stays, this text is tokenised each time.
            return parent
        new.parent = parent
        parent.children[key] = new
        self.size_bytes += new.size_bytes
        self.spans += 1
        span = new
        while (above := span.parent) is not None and self._is_mergeable(above, span):
            span = self._merge(above, span)
        if not span.children:
            self._push(span)
        return span

    def _is_mergeable(self, parent: Span, child: Span) -> bool:
        if parent.parent is None or len(parent.children) > 1:
            return False
        return len(parent.text) <= _MERGE_RATIO * len(child.text)

    def _merge(self, parent: Span, child: Span) -> Span:
        self.size_bytes -= parent.size_bytes + child.size_bytes
        self.spans -= 1
        parent.extend(child, self._block_size)
        self.size_bytes += parent.size_bytes
        return parent

    def remember_hashes(self, leaf: Span, seed: int, hashes: array[int]) -> None:
        """Hands the hashes of a text that goes through `leaf` out to the spans on its way that lack them."""
        span = leaf
        while span.parent is not None:
            first, last = span.block_range(self._block_size)
            known = span.hashes.get(seed)
            if last > first and (known is None or len(known) < last - first):
                self.size_bytes -= span.size_bytes
                span.remember_hashes(seed, hashes[first:last])
                self.size_bytes += span.size_bytes
            span = span.parent

    def trim(self) -> None:
        """Drops leaves until the tree is within its budget. Cost: what is dropped, and a queue entry renewed for each
        leaf used since it was last looked at.
        """
        while self.size_bytes > self._max_bytes and self._queue:
            used, _, span = heapq.heappop(self._queue)
            span.queued = False
            if span.alive and not span.children:
                if span.last_used > used:
                    self._push(span)
                else:
                    self._drop(span)
        self._clean_queue()

    def _push(self, leaf: Span) -> None:
        if not leaf.queued:
            leaf.queued = True
            self._pushed += 1
            heapq.heappush(self._queue, (leaf.last_used, self._pushed, leaf))

    def _clean_queue(self) -> None:
        """Entries of spans that have children again, or were merged away, go when they are the greater part."""
        if len(self._queue) <= 2 * self.spans + _STALE_ENTRIES:
            return
        keep = [entry for entry in self._queue if entry[2].alive and not entry[2].children]
        for _, _, span in self._queue:
            span.queued = False
        for _, _, span in keep:
            span.queued = True
        heapq.heapify(keep)
        self._queue = keep

    def _drop(self, leaf: Span) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is never queued"
        self.version += 1
        leaf.alive = False
        del parent.children[leaf.first_piece]
        self.spans -= 1
        self.size_bytes -= leaf.size_bytes
        self.evicted_bytes += leaf.size_bytes
        if not parent.children and parent.parent is not None:
            self._push(parent)

    def __iter__(self) -> Iterator[Span]:
        """Every span but the roots."""
        waiting = list(self._roots.values())
        while waiting:
            span = waiting.pop()
            waiting.extend(span.children.values())
            if span.parent is not None:
                yield span

    def check_integrity(self) -> None:
        """For tests: everything kept twice agrees."""
        spans = list(self)
        queued = {id(span) for _, _, span in self._queue}
        assert len(queued) == len(self._queue), "queued twice"
        assert len(queued) <= 2 * self.spans + _STALE_ENTRIES, "what is gone is not let go"
        assert len(spans) == self.spans, (len(spans), self.spans)
        assert sum(span.size_bytes for span in spans) == self.size_bytes
        for span in spans:
            span.check_integrity(self._boundaries.at, self._block_size)
            assert span.queued == (id(span) in queued)
            assert span.children or span.queued, "a leaf that can not be evicted"


def _empty_span(leading: bytes) -> Span:
    return Span(
        start=0,
        start_token=0,
        text="",
        tokens=leading,
        cuts=array("I"),
        cut_tokens=array("I"),
    )


def _known(spans: list[Span], inner: int) -> Known:
    last = spans[-1]
    tokens = (
        last.end_token if inner == len(last.text) else last.start_token + last.tokens_before(inner)
    )
    return Known(spans, inner, last.start + inner, tokens)
