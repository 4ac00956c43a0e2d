from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermata.frontend.hints import cache_salt, namespace_of, parse_hints
from fermata.wire.codec import decode, encode
from fermata.wire.messages import Hints, Route

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
FIELDS = ["priority", "strict_priority", "osl", "latency_sensitivity", "speculative_prefill",
          "program_id", "context_type", "prefix_id", "iat"]  # fmt: skip


def test_every_hint_is_read() -> None:
    nvext = {
        "agent_hints": {
            "priority": -3,
            "strict_priority": 2,
            "osl": 512,
            "latency_sensitivity": 0.5,
            "speculative_prefill": True,
            "program_id": " p ",
            "context_type": "tool",
            "prefix_id": "ignored",
        },
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "annotations": ["ignored"],
    }
    assert parse_hints(nvext, {}) == Hints(-3, 2, 512, 0.5, True, "p", "tool", 3600.0)


def test_headers_win_over_the_body() -> None:
    headers = {"x-dynamo-request-priority": "7", "x-dynamo-request-strict-priority": "1"}
    hints = parse_hints({"agent_hints": {"priority": 1}}, headers)
    assert (hints.priority, hints.strict_priority) == (7, 1)


@pytest.mark.parametrize("said", [10**400, "9" * 5000, 1e300])
def test_hints_beyond_all_range_are_clamped(said: object) -> None:
    hints = parse_hints({"agent_hints": {"osl": said}, "cache_control": {"ttl": 10**400}}, {})
    assert hints.osl == (0 if isinstance(said, str) else (1 << 32) - 1)
    assert hints.cache_ttl_s == 86_400.0


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        ("5m", 300),
        ("90", 90),
        ("90s", 90),
        (60, 60),
        (None, 300),
        ("soon", 0),
        ("9999h", 86_400),
        (-1, 0),
    ],
)
def test_cache_ttls_come_in_several_forms(ttl: object, seconds: float) -> None:
    control = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    assert parse_hints({"cache_control": control}, {}).cache_ttl_s == seconds


@given(
    nvext=JSON
    | st.fixed_dictionaries(
        {
            "agent_hints": JSON | st.dictionaries(st.sampled_from(FIELDS), JSON),
            "cache_control": JSON,
        }
    )
)
def test_no_hint_is_ever_refused_and_all_fit_the_wire(nvext: object) -> None:
    hints = parse_hints(nvext, {})
    route = Route("r", 0, "k", 0, "m", 1, 1, hints=hints)  # type: ignore[arg-type]
    (packet,) = decode(encode(route))
    assert packet.message == route


def test_a_client_narrows_its_namespace_and_never_names_another() -> None:
    assert namespace_of("", "") == ""
    assert namespace_of("acme", "") == "acme"
    assert namespace_of("", "salt") == "salt"
    assert namespace_of("acme", "salt") not in {"acme", "salt", namespace_of("acme/salt", "")}


def test_the_salt_comes_from_the_header_else_nvext_else_the_body() -> None:
    nvext = {"cache_salt": "b"}
    assert cache_salt(nvext, "c", {"x-tenant-id": "a"}) == "a"
    assert cache_salt(nvext, "c", {}) == "b"
    assert cache_salt(None, "c", {}) == "c"
    assert cache_salt({"cache_salt": 4}, 3, {}) == ""


def test_numbers_come_as_text_from_gateways_and_as_nonsense_from_anyone() -> None:
    said = {"priority": "soon", "osl": "12", "latency_sensitivity": "nan", "strict_priority": True}
    hints = parse_hints({"agent_hints": said}, {})
    assert (hints.priority, hints.osl, hints.latency_sensitivity, hints.strict_priority) == (
        0,
        12,
        0.0,
        0,
    )
