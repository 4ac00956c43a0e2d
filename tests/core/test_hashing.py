"""Golden vectors (Dynamo's scheme) and the suffix-only continuation."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fermata.core.hashing import SEED, block_hashes, hash_seed, sequence_hashes, token_frame

TOKENS = token_frame(list(range(1, 65)))
BLOCKS = [16863443419780771464, 2287610619914608821, 12129935312930971799, 5453111288643762282]
SEQUENCE = [16863443419780771464, 12466389667045779788, 960926348267535642, 4923844688253642376]


def test_block_hashes_equal_the_golden_vector():
    assert list(block_hashes(TOKENS, 16)) == BLOCKS


def test_sequence_hashes_equal_the_golden_vector():
    assert list(sequence_hashes(TOKENS, 16)) == SEQUENCE


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ({"lora": "my-lora"}, 4148081000444450790),
        ({"namespace": "tenant-a"}, 8175209796170318505),
        ({"lora": "", "namespace": ""}, BLOCKS[0]),
    ],
)
def test_lora_and_namespace_move_the_seed(names: dict[str, str], first: int):
    seed = hash_seed(**names)
    assert block_hashes(TOKENS, 16, seed=seed)[0] == first
    assert sequence_hashes(TOKENS, 16, seed=seed)[0] == first


def test_lora_and_namespace_together_differ_from_each_alone():
    seeds = {
        hash_seed(),
        hash_seed(lora="a"),
        hash_seed(namespace="a"),
        hash_seed(lora="a", namespace="a"),
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def naive_sequence(tokens: list[int], size: int, seed: int) -> list[int]:
    """The definition, word for word."""
    chain: list[int] = []
    for i in range(0, len(tokens) - size + 1, size):
        raw = struct.pack(f"<{size}I", *tokens[i : i + size])
        block = xxhash.xxh3_64_intdigest(raw, seed=seed)
        if chain:
            block = xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain[-1], block), seed=SEED)
        chain.append(block)
    return chain


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    size=st.sampled_from([1, 3, 16]),
    cut=st.integers(0, 80),
    seed=st.integers(0, 2**64 - 1),
)
def test_continuing_from_a_parent_equals_hashing_all(
    tokens: list[int], size: int, cut: int, seed: int
):
    whole = naive_sequence(tokens, size, seed)
    frame = token_frame(tokens)
    assert list(sequence_hashes(frame, size, seed=seed)) == whole
    done = min(cut, len(whole))
    if done:
        rest = frame[done * size * 4 :]
        more = sequence_hashes(rest, size, seed=seed, parent=whole[done - 1])
        assert whole[:done] + list(more) == whole


@pytest.mark.parametrize("tokens", [[], [1], list(range(15))])
def test_a_tail_that_fills_no_block_has_no_hash(tokens: list[int]):
    assert list(block_hashes(token_frame(tokens), 16)) == []
    assert list(sequence_hashes(token_frame(tokens), 16)) == []
    assert list(sequence_hashes(token_frame(tokens), 16, parent=7)) == []
