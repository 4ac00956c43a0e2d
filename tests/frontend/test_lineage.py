from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermata.core.hashing import sequence_hashes, token_frame
from fermata.core.ids import SessionId
from fermata.frontend.lineage import Lineages, depths

BLOCK = 4


class Chats:
    """Prompts as token lists; tells their sessions."""

    def __init__(self, limit: int = 1000) -> None:
        self.lineages = Lineages(name="frontend-0/1", limit=limit)

    def turn(self, tokens: list[int], *, messages: int = 0, scope: str = "") -> SessionId | None:
        frame = token_frame(tokens)
        hashes = sequence_hashes(frame, BLOCK)
        tail = frame[len(hashes) * BLOCK * 4 :]
        session = self.lineages.infer(scope=scope, hashes=hashes, tail=tail, messages=messages)
        self.lineages.check_integrity()
        return session


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_turn_that_extends_the_last_one_is_of_its_session() -> None:
    chats = Chats()
    prompt = words(1000, 50)
    first = chats.turn(prompt, messages=2)
    assert first is not None
    for turn in range(1, 30):
        prompt = prompt + words(2000 * turn, 7)
        assert chats.turn(prompt, messages=2 + 2 * turn) == first


def test_a_short_prompt_may_grow_manyfold_and_stay_in_its_session() -> None:
    chats = Chats()
    first = chats.turn(words(1, 8), messages=1)
    assert chats.turn(words(1, 8) + words(500, 400), messages=3) == first


def test_less_than_a_block_says_nothing() -> None:
    assert Chats().turn([1, 2, 3], messages=1) is None


def test_a_rewritten_end_within_a_tenth_of_the_last_turn_continues_it() -> None:
    chats = Chats()
    first = chats.turn(words(1, 20 * BLOCK), messages=2)
    kept = words(1, 18 * BLOCK)
    assert chats.turn(kept + words(9000, 6 * BLOCK), messages=4) == first


def test_a_rewrite_of_more_than_a_tenth_begins_another_session() -> None:
    chats = Chats()
    first = chats.turn(words(1, 20 * BLOCK), messages=2)
    kept = words(1, 17 * BLOCK + 3)
    assert chats.turn(kept + words(9000, 6 * BLOCK), messages=4) != first


def test_two_chats_under_one_large_system_prompt_stay_apart() -> None:
    chats = Chats()
    system = words(1, 100 * BLOCK)
    one, two = system + words(5000, 5), system + words(6000, 5)
    a, b = chats.turn(one, messages=2), chats.turn(two, messages=2)
    assert a != b
    for turn in range(1, 6):
        one, two = one + words(7000 + 50 * turn, 9), two + words(8000 + 50 * turn, 9)
        assert chats.turn(two, messages=2 + 2 * turn) == b
        assert chats.turn(one, messages=2 + 2 * turn) == a


def test_the_same_turn_again_is_of_the_same_session() -> None:
    chats = Chats()
    prompt = words(1, 30)
    assert chats.turn(prompt, messages=2) == chats.turn(prompt, messages=2)


def test_a_fork_of_the_same_history_is_another_session() -> None:
    chats = Chats()
    root = words(1, 40 * BLOCK)
    first = chats.turn(root, messages=2)
    assert chats.turn(root + words(3000, 10 * BLOCK), messages=4) == first
    assert chats.turn(root + words(4000, 10 * BLOCK), messages=4) != first


def test_completions_have_no_messages_and_must_grow() -> None:
    chats = Chats()
    first = chats.turn(words(1, 20 * BLOCK))
    assert chats.turn(words(1, 19 * BLOCK) + words(900, BLOCK)) != first
    assert chats.turn(words(1, 20 * BLOCK) + words(700, 2 * BLOCK)) == first


def test_other_holders_of_keys_never_share_a_session() -> None:
    chats = Chats()
    prompt = words(1, 30)
    mine = chats.turn(prompt, messages=2, scope="mine")
    assert chats.turn(prompt + words(90, 8), messages=4, scope="yours") != mine
    assert chats.turn(prompt + words(90, 8), messages=4, scope="mine") == mine


def test_the_table_is_bounded_and_forgets_the_least_recent() -> None:
    chats = Chats(limit=3)
    prompts = [words(1000 * i, 20) for i in range(4)]
    sessions = [chats.turn(p, messages=2) for p in prompts]
    assert len(chats.lineages) == 3
    assert chats.turn(prompts[3] + words(50, 8), messages=4) == sessions[3]
    assert chats.turn(prompts[0] + words(50, 8), messages=4) != sessions[0]


def test_two_frontends_never_invent_the_same_session() -> None:
    hashes = array("Q", [7])
    one, two = Lineages(name="frontend-0/1"), Lineages(name="frontend-1/1")
    assert one.infer(scope="", hashes=hashes, tail=b"", messages=2) != two.infer(
        scope="", hashes=hashes, tail=b"", messages=2
    )


@given(st.integers(1, 100_000))
def test_few_depths_are_kept_and_the_last_is_nine_tenths(blocks: int) -> None:
    kept = list(depths(blocks))
    assert kept == sorted(set(kept), reverse=True)
    assert kept[0] == blocks
    assert kept[-1] >= 0.9 * blocks > kept[-1] - 1
    assert len(kept) <= 2 + blocks.bit_length()


@pytest.mark.parametrize("history", [100, 3000])
def test_finding_a_session_costs_the_new_blocks_not_the_history(history: int) -> None:
    looked = 0

    class Counting(dict[int, object]):
        def get(self, key: int, default: object = None) -> object:
            nonlocal looked
            looked += 1
            return super().get(key, default)

    chats = Chats()
    prompt = words(1, history * BLOCK)
    first = chats.turn(prompt, messages=2)
    counting = Counting(chats.lineages._index)
    chats.lineages._index = counting  # type: ignore[assignment]
    frame = token_frame(prompt + words(10**6, 5 * BLOCK))
    hashes = sequence_hashes(frame, BLOCK)
    assert chats.lineages.infer(scope="", hashes=hashes, tail=b"", messages=4) == first
    assert looked <= 6 + 20
