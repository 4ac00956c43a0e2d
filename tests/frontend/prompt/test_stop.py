from __future__ import annotations

import tracemalloc

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fermata.frontend.prompt.stop import StopStrings


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Character by character: the first stop that the text so far ends with, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def run(stop: StopStrings, chunks: list[str]) -> str:
    return "".join(map(stop.push, chunks)) + stop.flush()


words = st.text(alphabet="ab\n\u00e9", max_size=4)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.lists(words, max_size=12), st.lists(words, max_size=4), st.booleans())
@example(["a", "b", "a", "a"], ["ab", "b", "aba"], False)
def test_any_chunking_ends_at_the_same_stop(
    chunks: list[str], stops: list[str], include_stop: bool
) -> None:
    stop = StopStrings(stops, include_stop=include_stop)
    text, found = naive("".join(chunks), stops, include_stop)
    assert run(stop, chunks) == text
    assert stop.matched == found


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(words, max_size=12), st.lists(words.filter(bool), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_is_held_back(chunks: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    sent = whole = ""
    for chunk in chunks:
        sent += stop.push(chunk)
        whole += chunk
        if stop.matched is not None:
            return
        held = whole[len(sent) :]
        assert whole.startswith(sent)
        assert held == "" or any(one.startswith(held) for one in stops)
        longer = [whole[i:] for i in range(len(sent))]
        assert not any(one.startswith(end) for one in stops for end in longer), (
            "could still become one"
        )


def test_the_properties_see_texts_that_end_and_texts_that_do_not() -> None:
    assert run(StopStrings(["END"]), ["one EN", "D two"]) == "one "
    assert run(StopStrings(["END"]), ["one EN", "d two"]) == "one ENd two"
    assert run(StopStrings(["END"], include_stop=True), ["one E", "ND two"]) == "one END"


def test_without_stops_text_passes_at_once() -> None:
    stop = StopStrings(["", ""])
    assert stop.push("anything") == "anything"
    assert stop.flush() == ""


def test_nothing_follows_a_stop() -> None:
    stop = StopStrings(["x"])
    assert stop.push("axb") == "a"
    assert stop.matched == "x"
    assert stop.push("more") == ""
    assert stop.flush() == ""


def test_long_stops_cost_what_they_are_long() -> None:
    tracemalloc.start()
    stop = StopStrings(["a" * 4096 + str(i) for i in range(64)])
    sent = "".join(stop.push("a") for _ in range(300))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent == ""
    assert stop.flush() == "a" * 300
    assert peak < 1 << 20, "their beginnings together would be half a gigabyte"
