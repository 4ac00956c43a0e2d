"""Block and sequence hashes: Dynamo's scheme, so that traces interchange (golden vectors in
tests/core).

A block hash is XXH3-64 over one full block of token ids, little-endian u32; the seed is 1337,
moved by the LoRA name and the namespace. A sequence hash names a block *and everything before it*:
`s[0] = h[0]`, `s[i] = XXH3-64(seed 1337, LE64(s[i-1]) || LE64(h[i]))`. The tail that fills no
block has no hash.

Cost: about 0.2 us a block; continuing from the last known sequence hash costs only the new blocks.
Router hashes are hints, 64 bits and not collision-resistant against an adversary who can choose the
seed: whatever evicts, pins or moves KV is checked by the worker against the engine's own hash.
"""

from __future__ import annotations

import sys
from array import array

from typing_extensions import Buffer
from xxhash import xxh3_64_digest, xxh3_64_intdigest

assert sys.byteorder == "little", "raw frames are little-endian and read in place"

SEED = 1337
TOKEN_BYTES = 4
HASH_BYTES = 8
_MASK = (1 << 64) - 1


def hash_seed(*, lora: str = "", namespace: str = "") -> int:
    """Seed of block hashes; empty is the same as absent."""
    seed = SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), seed=0)
    if namespace:
        seed += xxh3_64_intdigest(namespace.encode(), seed=1)
    return seed & _MASK


def token_frame(tokens: list[int] | array[int]) -> bytes:
    """Token ids as they travel: raw little-endian u32."""
    return (tokens if isinstance(tokens, array) else array("I", tokens)).tobytes()


def block_hashes(tokens: Buffer, block_size: int, *, seed: int = SEED) -> array[int]:
    """Hash of each full block; `tokens` is a u32 frame."""
    view = memoryview(tokens).cast("B")
    step = block_size * TOKEN_BYTES
    full = len(view) - len(view) % step
    return array(
        "Q", [xxh3_64_intdigest(view[i : i + step], seed=seed) for i in range(0, full, step)]
    )


def sequence_hashes(
    tokens: Buffer, block_size: int, *, seed: int = SEED, parent: int | None = None
) -> array[int]:
    """Sequence hash of each full block of a u32 frame.

    `parent` is the sequence hash of the block just before `tokens` (which then starts at a block
    boundary), so a turn hashes only what it adds.
    """
    view = memoryview(tokens).cast("B")
    step = block_size * TOKEN_BYTES
    full = len(view) - len(view) % step
    chain = array("Q")
    start = 0
    if parent is None:
        if not full:
            return chain
        first = xxh3_64_intdigest(view[:step], seed=seed)
        chain.append(first)
        link = first.to_bytes(8, "little")
        start = step
    else:
        link = parent.to_bytes(8, "little")
    # Digests are big-endian in the library's canonical form, hence the reversals instead of int
    # conversions.
    for i in range(start, full, step):
        block = xxh3_64_digest(view[i : i + step], seed=seed)[::-1]
        value = xxh3_64_intdigest(link + block, seed=SEED)
        chain.append(value)
        link = value.to_bytes(8, "little")
    return chain
