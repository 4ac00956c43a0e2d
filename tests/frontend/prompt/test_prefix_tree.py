"""The tree by itself: one token a character, `|` begins a piece."""

from __future__ import annotations

from array import array

import pytest

from fermata.core.hashing import SEED, sequence_hashes, token_frame
from fermata.core.model_folder import AddedToken
from fermata.frontend.prompt.boundary import SafeBoundaries
from fermata.frontend.prompt.prefix_tree import Known, PrefixTree
from fermata.frontend.prompt.span import Span

BLOCK = 4
BOUNDARIES = SafeBoundaries([AddedToken(0, "|", normalized=False)])


def make(max_bytes: int = 1 << 20) -> PrefixTree:
    return PrefixTree(BOUNDARIES, block_size=BLOCK, max_bytes=max_bytes)


def add(
    tree: PrefixTree, text: str, *, known: Known | None = None, seed: int | None = SEED
) -> Known:
    known = known or tree.find(text)
    cuts = BOUNDARIES.starts(text, known.chars + 1)
    starts = array("Q", [edge - known.chars for edge in (known.chars, *cuts, len(text))])
    frame = token_frame([ord(c) for c in text[known.chars :]])
    leaf = tree.insert(known, text, frame=frame, starts=starts, cuts=cuts)
    if seed is not None:
        tree.remember_hashes(leaf, seed, hashes_of(text, seed))
    tree.trim()
    tree.check_integrity()
    return known


def hashes_of(text: str, seed: int = SEED) -> array[int]:
    return sequence_hashes(token_frame([ord(c) for c in text]), BLOCK, seed=seed)


def known_text(tree: PrefixTree, text: str) -> str:
    known = tree.find(text)
    tokens = array("I", b"".join(known.frames()))
    assert len(tokens) == known.tokens == known.chars
    assert (
        known.hashes(SEED, BLOCK)
        == hashes_of(text[: known.chars])[: len(known.hashes(SEED, BLOCK))]
    )
    return "".join(map(chr, tokens))


def test_nothing_is_known_at_first() -> None:
    tree = make()
    assert known_text(tree, "|abc|def") == ""
    assert tree.find("").chars == 0
    assert tree.spans == 0


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("|abc|def|", "|abc|def"),
        ("|abc|def|ghi", "|abc|def"),
        ("|abc|def", "|abc"),
        ("|abc|deX|ghi", "|abc"),
        ("|abc|def|XXX", "|abc|def"),
        ("|abc|defX|ghi", "|abc"),
        ("|abcdef|ghi", ""),
        ("|abc", ""),
        ("abc|def", ""),
        ("", ""),
    ],
)
def test_known_is_the_longest_shared_beginning_that_ends_at_a_boundary(
    text: str, known: str
) -> None:
    tree = make()
    add(tree, "|abc|def|ghi")
    assert known_text(tree, text) == known


def test_a_text_that_leaves_inside_a_span_splits_it_and_both_branches_are_found() -> None:
    tree = make()
    add(tree, "|abc|def|ghi|")
    add(tree, "|abc|xyz|uvw|")
    add(tree, "|abc|xyz|123|")
    assert known_text(tree, "|abc|def|ghi|") == "|abc|def|ghi"
    assert known_text(tree, "|abc|xyz|uvw|") == "|abc|xyz|uvw"
    assert known_text(tree, "|abc|xyz|123|") == "|abc|xyz|123"
    assert known_text(tree, "|abc|new|") == "|abc"
    assert known_text(tree, "|abc|new") == "|abc"
    assert tree.spans == 5


def test_where_the_text_goes_on_without_a_boundary_the_cut_is_one_piece_up() -> None:
    tree = make()
    add(tree, "|abc|def|")
    add(tree, "|abc|xyz|")
    assert known_text(tree, "|abcX|def") == ""
    assert known_text(tree, "|abc|defX") == "|abc"


def test_texts_with_another_beginning_frame_are_other_texts() -> None:
    tree = make()
    add(tree, "|abc|def|")
    known = tree.find("|abc|def|", leading=token_frame([7]))
    assert (known.chars, known.tokens) == (0, 1)
    assert array("I", b"".join(known.frames())).tolist() == [7]


def test_a_chain_is_merged_unless_its_head_is_much_longer() -> None:
    tree = make()
    add(tree, "|" + "a" * 100 + "|")
    add(tree, "|" + "a" * 100 + "|b|")
    assert tree.spans == 2
    add(tree, "|" + "a" * 100 + "|b|" + "c" * 40 + "|")
    assert tree.spans == 1
    assert (
        known_text(tree, "|" + "a" * 100 + "|b|" + "c" * 40 + "|d")
        == "|" + "a" * 100 + "|b|" + "c" * 40
    )


def test_merged_spans_keep_the_hashes_that_are_whole() -> None:
    other = SEED + 1
    tree = make()
    text = "|a"
    for size in (3, 1, 50, 2, 1, 1, 9, 30, 100, 2):
        text += "|" + "x" * size
        add(tree, text + "|", seed=SEED if size % 3 else other)
        for seed in (SEED, other):
            found = tree.find(text + "|").hashes(seed, BLOCK)
            assert found == hashes_of(text, seed)[: len(found)]
    add(tree, text + "|", seed=SEED)
    assert tree.find(text + "|").hashes(SEED, BLOCK) == hashes_of(text)


def test_a_thousand_small_turns_leave_no_litter() -> None:
    tree = make()
    text = "|start"
    for i in range(1000):
        text += f"|turn {i}"
        known = add(tree, text + "|")
        assert known.chars > len(text) - 30 or i == 0
    assert tree.spans < 8


def test_leaves_go_by_their_last_use_and_parents_after_them() -> None:
    tree = make()
    head = "|" + "h" * 200
    for name in "abc":
        add(tree, f"{head}|{name * 300}|")
    add(tree, f"{head}|{'a' * 300}|")
    size = tree.size_bytes
    small = make(size - 1)
    for name in "abca":
        add(small, f"{head}|{name * 300}|")
    assert small.evicted_bytes > 0
    assert known_text(small, f"{head}|{'a' * 300}|") == f"{head}|{'a' * 300}"
    assert known_text(small, f"{head}|{'b' * 300}|") == head
    assert known_text(small, f"{head}|{'c' * 300}|") == f"{head}|{'c' * 300}"


def test_a_piece_that_is_there_already_is_not_added_again() -> None:
    tree = make()
    stale = tree.find("|abc|def|")
    add(tree, "|abc|def|")
    before = (tree.spans, tree.size_bytes)
    leaf = tree.insert(
        stale,
        "|abc|def|",
        frame=token_frame([ord(c) for c in "|abc|def|"]),
        starts=array("Q", [0, 4, 8, 9]),
        cuts=[4, 8],
    )
    assert leaf.text == ""
    assert (tree.spans, tree.size_bytes) == before
    tree.check_integrity()


def test_integrity_finds_what_is_wrong() -> None:
    tree = make()
    add(tree, "|abc|def|ghi|")
    span = next(iter(tree))
    span.cuts[0] += 1
    with pytest.raises(AssertionError):
        tree.check_integrity()


def test_a_span_is_compared_whatever_the_width_of_its_characters() -> None:
    for own in ("abc", "ab\u00e9", "ab\u2014", "ab\U0001f642"):
        span = Span(
            start=0, start_token=0, text=own, tokens=b"", cuts=array("I"), cut_tokens=array("I")
        )
        for after in ("", "x", "\u2014", "\U0001f642"):
            assert span.is_at("12" + own + after, 2)
            assert not span.is_at("12" + own[:2] + "z" + after, 2)
            assert not span.is_at("12" + own[:2], 2)
            assert span.shared_length("12" + own[:2] + "z" + after, 2) == 2
            assert span.shared_length("12" + own + after, 2) == 3


def test_joining_spans_never_joins_hashes_over_a_gap() -> None:
    def span(start: int, known: dict[int, list[int]]) -> Span:
        made = Span(
            start=start,
            start_token=start,
            text="|" + "x" * 7,
            tokens=token_frame([0] * 8),
            cuts=array("I"),
            cut_tokens=array("I"),
        )
        for seed, hashes in known.items():
            made.remember_hashes(seed, array("Q", hashes))
        return made

    head = span(0, {1: [11, 12], 2: [21], 3: [31, 32]})
    head.extend(span(8, {1: [13, 14], 2: [23, 24], 4: [43, 44]}), BLOCK)
    known = {seed: hashes.tolist() for seed, hashes in head.hashes.items()}
    assert known == {1: [11, 12, 13, 14], 2: [21], 3: [31, 32]}
