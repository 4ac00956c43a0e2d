"""Block and sequence hashes are Dynamo's, to the bit, and a turn hashes only what it adds."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from fermata.core.hashing import SEED, block_hashes, hash_seed, sequence_hashes, token_frame

TOKENS = list(range(1, 65))
BLOCKS = [16863443419780771464, 2287610619914608821, 12129935312930971799, 5453111288643762282]
SEQUENCE = [16863443419780771464, 12466389667045779788, 960926348267535642, 4923844688253642376]


def test_the_golden_vectors_of_tokens_1_to_64_in_blocks_of_16() -> None:
    frame = token_frame(TOKENS)
    assert list(block_hashes(frame, 16)) == BLOCKS
    assert list(sequence_hashes(frame, 16)) == SEQUENCE


@pytest.mark.parametrize(
    ("seed", "first"),
    [
        (hash_seed(), BLOCKS[0]),
        (hash_seed(lora=""), BLOCKS[0]),
        (hash_seed(lora="my-lora"), 4148081000444450790),
        (hash_seed(namespace="tenant-a"), 8175209796170318505),
    ],
)
def test_a_lora_and_a_namespace_move_the_seed(seed: int, first: int) -> None:
    assert block_hashes(token_frame(TOKENS), 16, seed=seed)[0] == first
    assert sequence_hashes(token_frame(TOKENS), 16, seed=seed)[0] == first


def test_a_lora_and_a_namespace_together_differ_from_each_alone() -> None:
    seeds = {hash_seed(lora=x, namespace=y) for x in ("", "a", "b") for y in ("", "a", "b")}
    assert len(seeds) == 9
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_the_chain_seed_stays_1337_whatever_seeds_the_blocks() -> None:
    seed = hash_seed(lora="my-lora")
    blocks = block_hashes(token_frame(TOKENS), 16, seed=seed)
    chain = sequence_hashes(token_frame(TOKENS), 16, seed=seed)
    link = chain[0].to_bytes(8, "little") + blocks[1].to_bytes(8, "little")
    assert chain[1] == xxh3_64_intdigest(link, seed=SEED)


tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=100)


def naive(ids: list[int], size: int, seed: int) -> list[int]:
    """The definition, word for word."""
    chain: list[int] = []
    for at in range(0, len(ids) - size + 1, size):
        raw = b"".join(token.to_bytes(4, "little") for token in ids[at : at + size])
        block = xxh3_64_intdigest(raw, seed=seed)
        if chain:
            link = chain[-1].to_bytes(8, "little") + block.to_bytes(8, "little")
            block = xxh3_64_intdigest(link, seed=1337)
        chain.append(block)
    return chain


@given(tokens, st.sampled_from([1, 4, 16]), st.integers(0, (1 << 64) - 1))
def test_sequence_hashes_are_the_definition(ids: list[int], size: int, seed: int) -> None:
    assert list(sequence_hashes(token_frame(ids), size, seed=seed)) == naive(ids, size, seed)


@given(tokens, st.integers(0, 30), st.sampled_from([1, 4]))
def test_going_on_from_a_parent_equals_hashing_the_whole(
    ids: list[int], cut: int, size: int
) -> None:
    cut = min(cut, len(ids) // size) * size
    whole = sequence_hashes(token_frame(ids), size)
    head = sequence_hashes(token_frame(ids[:cut]), size)
    parent = head[-1] if head else None
    tail = sequence_hashes(token_frame(ids[cut:]), size, parent=parent)
    assert head + tail == whole


def test_the_tail_that_fills_no_block_has_no_hash() -> None:
    assert len(sequence_hashes(token_frame(TOKENS[:15]), 16)) == 0
    assert len(sequence_hashes(b"", 16)) == 0
    assert len(sequence_hashes(b"", 16, parent=SEQUENCE[0])) == 0
    assert list(sequence_hashes(token_frame(TOKENS[:31]), 16)) == SEQUENCE[:1]


def test_a_frame_is_raw_little_endian_and_read_in_place() -> None:
    assert token_frame([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert token_frame(array("I", TOKENS)) == token_frame(TOKENS)
    assert list(block_hashes(memoryview(token_frame(TOKENS)), 16)) == BLOCKS
    assert list(block_hashes(memoryview(token_frame(TOKENS)).cast("I"), 16)) == BLOCKS
