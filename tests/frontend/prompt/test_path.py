from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors
from tokenizers import pre_tokenizers as pre

from fermata.core.errors import InvalidTurn
from fermata.core.hashing import hash_seed, sequence_hashes
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.frontend.prompt.path import Prompt, PromptPath
from fermata.frontend.prompt.span import SEEDS_KEPT
from fermata.frontend.prompt.tokenizer import Tokenizer as PromptTokenizer
from fermata.frontend.prompt.tokenizer import load_tokenizer

FOLDER = ModelFolder.load(default_model_folder())
SEED = hash_seed()
BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    found, _, _ = load_tokenizer(
        FOLDER.tokenizer_file, added_tokens=[t.content for t in FOLDER.added_tokens]
    )
    return found


@pytest.fixture
def path(tokenizer: PromptTokenizer) -> PromptPath:
    return make(tokenizer)


def make(
    tokenizer: PromptTokenizer, *, cache_bytes: int = 1 << 22, block_size: int = BLOCK
) -> PromptPath:
    return PromptPath(
        tokenizer, added_tokens=FOLDER.added_tokens, block_size=block_size, cache_bytes=cache_bytes
    )


def turn(number: int, words: int = 40) -> str:
    said = " ".join(f"word{number}x{i}" for i in range(words))
    return f"<|im_start|>user\n{said}<|im_end|>\n"


def session(turns: int, *, salt: int = 0) -> str:
    return "".join(turn(salt + i) for i in range(turns)) + "<|im_start|>assistant\n"


def assert_right(prompt: Prompt, text: str, tokenizer: PromptTokenizer, seed: int = SEED) -> None:
    ids = tokenizer.encode(text)
    assert array("I", prompt.tokens) == ids
    assert prompt.hashes == sequence_hashes(ids.tobytes(), BLOCK, seed=seed)
    assert prompt.input_tokens == len(ids)
    assert prompt.text == text


def test_a_first_prompt_is_a_full_pass_and_the_next_turn_costs_what_it_adds(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    first = path.prepare(session(10), seed=SEED)
    assert_right(first, session(10), tokenizer)
    assert (first.cached_tokens, first.tokenised_tokens) == (0, first.input_tokens)
    assert first.hashed_blocks == len(first.hashes)
    second = path.prepare(session(11), seed=SEED)
    assert_right(second, session(11), tokenizer)
    # Again from the last turn's `<|im_start|>` on: the generation prompt and the turn that is new.
    assert second.tokenised_tokens == len(tokenizer.encode(turn(10) + "<|im_start|>assistant\n"))
    assert second.cached_tokens + second.tokenised_tokens == second.input_tokens
    assert second.hashed_blocks == len(second.hashes) - second.cached_tokens // BLOCK
    assert path.counters.full_passes == 1
    assert path.counters.prompts == 2


def test_tokens_and_blocks_touched_do_not_depend_on_the_length_of_the_history(
    tokenizer: PromptTokenizer,
) -> None:
    touched = set()
    for turns in (15, 15 * 16):
        path = make(tokenizer, cache_bytes=1 << 26)
        # Filled up to a block boundary, so that the same tokens fall into the same number of blocks.
        text = session(turns)
        known = text.rindex("<|im_start|>")
        while len(tokenizer.encode(text[:known])) % BLOCK:
            text = text[: known - 11] + " a" + text[known - 11 :]
            known += 2
        path.prepare(text, seed=SEED)
        more = path.prepare(text[:known] + turn(9999, 120) + "<|im_start|>assistant\n", seed=SEED)
        touched.add((more.tokenised_tokens, more.hashed_blocks))
        assert more.cached_tokens > 200 * turns
    assert len(touched) == 1


def test_the_same_prompt_again_costs_its_last_piece(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    path.prepare(session(10), seed=SEED)
    again = path.prepare(session(10), seed=SEED)
    assert_right(again, session(10), tokenizer)
    assert again.tokenised_tokens == len(tokenizer.encode("<|im_start|>assistant\n"))
    assert again.hashed_blocks <= 1


def test_a_strangers_longer_prefix_serves_too(path: PromptPath, tokenizer: PromptTokenizer) -> None:
    path.prepare(session(10), seed=SEED)
    other = "".join(turn(i) for i in range(7)) + turn(77) + "<|im_start|>assistant\n"
    prompt = path.prepare(other, seed=SEED)
    assert_right(prompt, other, tokenizer)
    assert prompt.cached_tokens >= len(tokenizer.encode("".join(turn(i) for i in range(7))))


def test_a_rewritten_history_keeps_both_forms(path: PromptPath, tokenizer: PromptTokenizer) -> None:
    head = "".join(turn(i) for i in range(5))
    one = head + "<|im_start|>assistant\n<think>\nhm\n</think>a<|im_end|>\n" + turn(5)
    other = head + "<|im_start|>assistant\na<|im_end|>\n" + turn(5) + turn(6)
    path.prepare(one, seed=SEED)
    rewritten = path.prepare(other, seed=SEED)
    assert_right(rewritten, other, tokenizer)
    assert rewritten.cached_tokens >= len(tokenizer.encode(head))
    for text in (one, other):
        again = path.prepare(text + turn(8), seed=SEED)
        assert_right(again, text + turn(8), tokenizer)
        assert again.tokenised_tokens < len(tokenizer.encode(turn(8))) * 3


def test_namespaces_share_text_and_tokens_but_no_hash(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    other = hash_seed(namespace="tenant-a")
    ours = path.prepare(session(10), seed=SEED)
    theirs = path.prepare(session(10), seed=other)
    assert_right(theirs, session(10), tokenizer, other)
    assert theirs.tokens == ours.tokens
    assert theirs.cached_tokens > 0.9 * theirs.input_tokens
    assert theirs.hashed_blocks == len(theirs.hashes)
    assert not set(theirs.hashes) & set(ours.hashes)
    again = path.prepare(session(11), seed=other)
    assert again.hashed_blocks < len(theirs.hashes) / 5
    path.check_integrity()


def test_hashes_of_many_namespaces_do_not_pile_up(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    path.prepare(session(10), seed=SEED)
    sizes = set()
    for i in range(SEEDS_KEPT * 3):
        path.prepare(session(10), seed=hash_seed(namespace=str(i)))
        if i > SEEDS_KEPT:
            sizes.add(path.cache_bytes)
    assert len(sizes) == 1
    path.check_integrity()


def test_text_that_leaves_the_known_one_inside_an_added_token_is_cut_before_it(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    path.prepare(turn(0) + turn(1) + turn(2), seed=SEED)
    for broken in ("<|im_sta", "<|im_start", "<|im_end", ""):
        text = turn(0) + broken + "rt of nothing " + turn(5)
        assert_right(path.prepare(text, seed=SEED), text, tokenizer)


def test_a_text_without_boundaries_takes_the_full_pass(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    for text in ("", "plain text", "plain text and more", "plain text"):
        prompt = path.prepare(text, seed=SEED)
        assert_right(prompt, text, tokenizer)
        assert prompt.cached_tokens == 0
    assert path.counters.full_passes == 4
    assert path.cache_spans == 0


def test_a_prompt_wider_than_its_history_is_still_found(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    path.prepare(session(10), seed=SEED)
    for emoji in ("\u2014", "\U0001f642"):
        text = (
            session(10)[: -len("<|im_start|>assistant\n")]
            + f"<|im_start|>user\n{emoji}<|im_end|>\n"
        )
        prompt = path.prepare(text + "<|im_start|>assistant\n", seed=SEED)
        assert_right(prompt, text + "<|im_start|>assistant\n", tokenizer)
        assert prompt.tokenised_tokens < 40


def test_the_cache_is_bounded_and_the_least_recently_used_goes_first(
    tokenizer: PromptTokenizer,
) -> None:
    one = make(tokenizer)
    one.prepare(session(10), seed=SEED)
    limit = 4 * one.cache_bytes
    path = make(tokenizer, cache_bytes=limit)
    kept = session(10)
    for i in range(30):
        path.prepare(kept, seed=SEED)
        path.prepare(session(10, salt=1000 * (i + 1)), seed=SEED)
        assert path.cache_bytes <= limit
        path.check_integrity()
    assert path.evicted_bytes > 20 * one.cache_bytes
    assert path.prepare(kept, seed=SEED).cached_tokens > 0
    assert path.prepare(session(10, salt=1000), seed=SEED).cached_tokens == 0


def test_a_shared_beginning_outlives_the_sessions_that_go(tokenizer: PromptTokenizer) -> None:
    prompt = turn(0, words=400)
    one = make(tokenizer)
    one.prepare(prompt + turn(1), seed=SEED)
    path = make(tokenizer, cache_bytes=2 * one.cache_bytes)
    whole = len(tokenizer.encode(prompt))
    for i in range(1, 100):
        found = path.prepare(prompt + turn(i) + turn(i + 1) + "<|im_start|>assistant\n", seed=SEED)
        assert found.cached_tokens >= whole or i == 1
    assert path.evicted_bytes > 0
    path.check_integrity()


def test_a_prompt_larger_than_the_cache_is_right_and_not_kept(tokenizer: PromptTokenizer) -> None:
    path = make(tokenizer, cache_bytes=3000)
    for _ in range(2):
        assert_right(path.prepare(session(10), seed=SEED), session(10), tokenizer)
    assert path.cache_bytes == 0
    assert path.counters.full_passes == 2
    path.check_integrity()


def test_a_long_session_does_not_become_a_long_chain(path: PromptPath) -> None:
    for turns in range(1, 150):
        path.prepare(session(turns), seed=SEED)
    assert path.cache_spans <= 8
    path.check_integrity()


def test_rewrites_are_counted_per_lineage_in_whole_blocks(path: PromptPath) -> None:
    rewrites = []
    for lineage, text in (
        ("a", session(3)),
        ("a", session(4)),
        ("b", session(2)),
        ("", session(1)),
        ("a", turn(50) + session(4)),
        ("a", turn(50) + session(5)),
        ("a", turn(50) + session(1)),
        ("b", "short"),
        ("b", session(2)),
    ):
        path.prepare(text, seed=SEED, lineage=lineage)
        rewrites.append(path.counters.prefix_rewrites)
    assert rewrites == [0, 0, 0, 0, 1, 1, 2, 3, 3]


def test_lineages_are_bounded(tokenizer: PromptTokenizer) -> None:
    path = PromptPath(
        tokenizer,
        added_tokens=FOLDER.added_tokens,
        block_size=BLOCK,
        cache_bytes=1 << 20,
        lineages_kept=3,
    )
    for i in range(5):
        path.prepare(session(2, salt=i), seed=SEED, lineage=str(i))
    path.prepare(turn(90), seed=SEED, lineage="0")
    assert path.counters.prefix_rewrites == 0, "forgotten"
    path.prepare(turn(90), seed=SEED, lineage="4")
    assert path.counters.prefix_rewrites == 1


def test_ids_are_hashed_as_they_are(path: PromptPath, tokenizer: PromptTokenizer) -> None:
    ids = tokenizer.encode(session(3)).tolist()
    prompt = path.prepare_ids(ids, seed=SEED, lineage="a")
    text = path.prepare(session(3), seed=SEED)
    assert (prompt.tokens, prompt.hashes) == (text.tokens, text.hashes)
    assert (prompt.cached_tokens, prompt.tokenised_tokens) == (0, 0)
    assert prompt.hashed_blocks == len(prompt.hashes)
    assert path.prepare_ids([], seed=SEED).input_tokens == 0


@pytest.mark.parametrize("wrong", [-1, 4009, 1 << 40])
def test_an_id_outside_the_vocabulary_is_named(path: PromptPath, wrong: int) -> None:
    with pytest.raises(InvalidTurn, match=str(wrong)):
        path.prepare_ids([1, wrong, 2], seed=SEED)


def test_half_a_surrogate_pair_leaves_no_trace(
    path: PromptPath, tokenizer: PromptTokenizer
) -> None:
    with pytest.raises(InvalidTurn, match="surrogate"):
        path.prepare(session(2) + "\ud800", seed=SEED)
    assert path.counters.prompts == 0
    assert_right(path.prepare(session(2), seed=SEED), session(2), tokenizer)
    path.check_integrity()


def test_a_prompt_that_others_overtook_is_right_and_kept_where_it_can(
    tokenizer: PromptTokenizer,
) -> None:
    path = make(tokenizer)
    path.prepare(session(4), seed=SEED)
    pending = path.begin(session(8), seed=SEED)
    assert pending.new_chars < len(session(8)) - len(session(3))
    path.prepare(session(6), seed=SEED)
    pending.encode()
    assert_right(path.finish(pending), session(8), tokenizer)
    assert path.prepare(session(8), seed=SEED).tokenised_tokens < 10
    path.check_integrity()


def test_a_prompt_whose_beginning_went_meanwhile_is_right_and_not_kept(
    tokenizer: PromptTokenizer,
) -> None:
    one = make(tokenizer)
    one.prepare(session(4), seed=SEED)
    path = make(tokenizer, cache_bytes=2 * one.cache_bytes)
    path.prepare(session(4), seed=SEED)
    pending = path.begin(session(5), seed=SEED)
    for i in range(1, 9):
        path.prepare(session(4, salt=100 * i), seed=SEED)
    pending.encode()
    assert_right(path.finish(pending), session(5), tokenizer)
    assert path.prepare(session(5), seed=SEED).cached_tokens == 0
    path.check_integrity()


def test_plain_completions_begin_with_what_the_post_processor_puts_in_front(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    alphabet = {token: i for i, token in enumerate(sorted(pre.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<s>", "<e>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    inner.save(str(file))
    folder = ModelFolder.load(tmp_path)
    loaded, _, _ = load_tokenizer(file, added_tokens=["<s>", "<e>"])
    path = PromptPath(loaded, added_tokens=folder.added_tokens, block_size=4, cache_bytes=1 << 20)
    for text in ("abc<e>def<e>g", "abc<e>def<e>more", "abc<e>def"):
        for add in (True, False):
            prompt = path.prepare(text, seed=SEED, add_special_tokens=add)
            ids = inner.encode(text, add_special_tokens=add).ids
            assert array("I", prompt.tokens).tolist() == ids
            assert prompt.hashes == sequence_hashes(prompt.tokens, 4, seed=SEED)
    assert path.counters.full_passes == 2
    path.check_integrity()
