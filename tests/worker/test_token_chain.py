from __future__ import annotations

import pytest

from fermata.core.hashing import hash_seed, sequence_hashes, token_frame
from fermata.worker.engine.token_chain import TokenChain

TOKENS = list(range(1, 65))
GOLDEN = [16863443419780771464, 12466389667045779788, 960926348267535642, 4923844688253642376]


@pytest.mark.parametrize("known", [0, 1, 15, 16, 17, 33, 64])
def test_a_chain_that_grows_token_by_token_equals_the_golden_vectors(known: int) -> None:
    chain = TokenChain(
        token_frame(TOKENS[:known]), page_tokens=16, block_tokens=16, seed=hash_seed()
    )
    for token in TOKENS[known:]:
        chain.append(token)
    assert list(chain.pages) == GOLDEN
    assert chain.blocks is chain.pages
    assert chain.length == 64


@pytest.mark.parametrize("known", [0, 3, 4, 15, 16, 21, 64])
def test_pages_and_blocks_are_chains_of_their_own(known: int) -> None:
    seed = hash_seed(namespace="tenant-a")
    chain = TokenChain(token_frame(TOKENS[:known]), page_tokens=4, block_tokens=16, seed=seed)
    for token in TOKENS[known:]:
        chain.append(token)
    assert chain.pages == sequence_hashes(token_frame(TOKENS), 4, seed=seed)
    assert chain.blocks == sequence_hashes(token_frame(TOKENS), 16, seed=seed)


def test_a_block_ends_at_its_last_page() -> None:
    chain = TokenChain(token_frame(TOKENS), page_tokens=4, block_tokens=16, seed=hash_seed())
    assert [chain.block_ending_at(page) for page in range(8)] == [
        None,
        None,
        None,
        0,
        None,
        None,
        None,
        1,
    ]
    assert chain.parent_of(0) is None
    assert chain.parent_of(2) == chain.blocks[1]


def test_only_the_tail_of_a_prompt_is_kept() -> None:
    chain = TokenChain(
        token_frame(list(range(1000))), page_tokens=4, block_tokens=16, seed=hash_seed()
    )
    assert list(chain.tail) == list(range(992, 1000))
