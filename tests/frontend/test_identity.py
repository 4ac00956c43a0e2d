from __future__ import annotations

import pytest

from fermata.core.ids import RequestId
from fermata.frontend.hints import said_program_ids
from fermata.frontend.identity import (
    ANONYMOUS,
    Identity,
    IdentityRow,
    identify,
    inferred,
    scoped,
    unknown,
)


def test_the_dynamo_headers_name_session_parent_and_end() -> None:
    headers = {
        "x-dynamo-session-id": " s-1:agent ",
        "x-dynamo-parent-session-id": "s-0",
        "x-dynamo-session-final": "True",
    }
    assert identify(headers) == Identity("s-1:agent", "s-0", "", True, "dynamo")


def test_blank_is_absent_and_a_parent_without_a_session_says_nothing() -> None:
    assert identify({"x-dynamo-session-id": "  "}) == ANONYMOUS
    assert identify({"x-dynamo-parent-session-id": "p"}) == ANONYMOUS


def test_a_session_is_not_its_own_parent() -> None:
    headers = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": " s "}
    assert identify(headers).parent == ""


@pytest.mark.parametrize("value", ["0", "false", "no", "", "maybe"])
def test_only_a_clear_yes_ends_a_session(value: str) -> None:
    headers = {"x-dynamo-session-id": "s", "x-dynamo-session-final": value}
    assert not identify(headers).final


def test_ids_are_cut_at_256_bytes_between_characters() -> None:
    long = identify({"x-dynamo-session-id": "é" * 300}).session
    assert long == "é" * 128
    assert identify({"x-dynamo-session-id": "é" * 127 + "x€"}).session == "é" * 127 + "x"


def test_another_client_is_another_row_and_the_first_row_wins() -> None:
    rows = (
        IdentityRow(client="a", session=("x-a", "x-a-old"), parent=("x-a-parent",)),
        IdentityRow(client="b", session=("x-b",), tree=("x-b-tree",)),
    )
    assert identify({"x-b": "b", "x-a-old": "old"}, rows=rows).session == "old"
    assert identify({"x-b": "b", "x-a-old": "old", "x-a": "new"}, rows=rows).session == "new"
    assert identify({"x-b": "b", "x-b-tree": "t"}, rows=rows).tree == "t"


def test_the_key_is_the_tree_else_the_parent_else_the_session() -> None:
    assert scoped(Identity("s", "p", "t"), tenant="").key == "t"
    assert scoped(Identity("s", "p"), tenant="").key == "p"
    assert scoped(Identity("s"), tenant="").key == "s"


def test_tenants_never_share_a_session() -> None:
    mine, yours = scoped(Identity("s", "p"), tenant="me"), scoped(Identity("s", "p"), tenant="you")
    assert mine.session == "me/s"
    assert mine.parent == "me/p"
    assert {mine.session, mine.parent, mine.key}.isdisjoint(
        {yours.session, yours.parent, yours.key}
    )


def test_anonymous_turns_have_a_key_all_the_same() -> None:
    known = inferred(scoped(Identity("anon-1"), tenant="").session)
    assert known.inferred
    assert known.key == "anon-1"
    nobody = unknown(RequestId("r-1"))
    assert nobody.session == ""
    assert nobody.key == "r-1"


def test_a_program_id_in_the_body_is_the_last_resort_and_the_hint_wins_over_the_top_level() -> None:
    said = said_program_ids({"agent_hints": {"program_id": " hinted "}}, "top")
    assert identify({}, said) == Identity("hinted", client="program_id")
    assert identify({}, said_program_ids(None, "top")).session == "top"
    assert identify({"x-dynamo-session-id": "header"}, said).session == "header"
    assert (
        identify({}, said_program_ids({"agent_hints": {"program_id": 3}}, "top")).session == "top"
    )
    for nonsense in (None, 3, " ", ["s"]):
        assert identify({}, said_program_ids(nonsense, nonsense)) == ANONYMOUS
    assert identify({}, said_program_ids(None, "é" * 300)).session == "é" * 128


def test_whoever_says_the_last_word_says_it_under_any_name_or_none() -> None:
    final = {"x-dynamo-session-final": "yes"}
    assert identify(final) == Identity(final=True)
    assert identify(final, {"program_id": "p"}) == Identity("p", final=True, client="program_id")
