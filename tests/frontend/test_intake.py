"""From a body to a turn, or to a farewell; and the trace record of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from fermata.core.errors import InvalidTurn, NotFound
from fermata.core.ids import OwnerId, RouterId
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.core.ring import Ring
from fermata.core.spec import AgentDeployment
from fermata.frontend.config import FrontendConfig, HttpLimits
from fermata.frontend.intake import Farewell, Intake, Intent
from fermata.frontend.keys import Caller
from fermata.frontend.lineage import Lineages
from fermata.frontend.prompt import PromptModel
from fermata.frontend.request import ChatBody, CompletionBody, decode_body
from fermata.frontend.trace_record import farewell_record, record_of
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import TurnLimits

HELLO = [{"role": "user", "content": "Hello there, how are you today? " * 4}]
FINAL = {"x-dynamo-session-final": "true"}
ME = Caller(tenant="", scope="me")


@pytest.fixture(scope="module")
def model() -> PromptModel:
    folder = ModelFolder.load(default_model_folder())
    return PromptModel.load(folder, block_size=16, cache_bytes=1 << 24)


@pytest.fixture
def intake(model: PromptModel) -> Iterator[Intake]:
    deployment = msgspec.convert(
        {
            "apiVersion": "fermata.dev/v1alpha1",
            "kind": "AgentDeployment",
            "metadata": {"name": "test"},
            "spec": {
                "model": {"name": "m", "contextLength": 4096},
                "workers": [{"name": "sim", "blockSize": 16}],
                "routingBlockSize": 16,
            },
        },
        AgentDeployment,
    )
    config = FrontendConfig(
        id=OwnerId("f"),
        deployment=deployment,
        ring=Ring(1, {RouterId("router-0"): "tcp://127.0.0.1:1"}),
        http=HttpLimits(thread_chars=2000),
    )
    with ThreadPoolExecutor(1) as threads:
        yield Intake(
            config, model=model, lineages=Lineages(name="f"), context_length=4096, threads=threads
        )


CHAT = msgspec.json.Decoder(ChatBody)
TEXT = msgspec.json.Decoder(CompletionBody)


async def chat(
    intake: Intake, headers: dict[str, str] | None = None, *, caller: Caller = ME, **body: Any
) -> Intent | Farewell:
    raw = msgspec.json.encode({"messages": HELLO, **body})
    return await intake.chat(decode_body(raw, CHAT), caller, headers or {})


async def text(intake: Intake, headers: dict[str, str], **body: Any) -> Intent | Farewell:
    return await intake.completion(decode_body(msgspec.json.encode(body), TEXT), ME, headers)


@pytest.mark.parametrize(
    "body", [{"max_tokens": 1}, {"max_completion_tokens": 0}, {"messages": []}]
)
async def test_a_final_request_that_wants_nothing_is_a_farewell(
    intake: Intake, body: dict[str, Any]
) -> None:
    headers = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p", **FINAL}
    farewell = await chat(intake, headers, caller=Caller("t", "me"), **body)
    assert isinstance(farewell, Farewell)
    assert (farewell.who.session, farewell.who.key) == ("t/s", "t/p")
    assert farewell.trigger == ("user_message" if "messages" not in body else "other")


async def test_a_nameless_one_has_nobody_to_say_good_bye_to(intake: Intake) -> None:
    farewell = await chat(intake, FINAL, max_tokens=1)
    assert isinstance(farewell, Farewell)
    assert farewell.who.session == ""
    again = await text(intake, FINAL, prompt="x", max_tokens=1, program_id="p")
    assert isinstance(again, Farewell)
    assert again.who.session == "p"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (FINAL, {"max_tokens": 2}),
        (FINAL, {}),
        ({}, {"max_tokens": 1}),
        (FINAL, {"max_tokens": 1, "max_completion_tokens": 5}),
    ],
)
async def test_whoever_wants_an_answer_gets_one(
    intake: Intake, headers: dict[str, str], body: dict[str, Any]
) -> None:
    turn = await chat(intake, headers, program_id="p", **body)
    assert isinstance(turn, Intent)
    assert turn.spec.final is bool(headers)
    assert turn.spec.session == "p"


async def test_an_inferred_session_may_be_told_to_end_too(intake: Intake) -> None:
    turn = await chat(intake, FINAL)
    assert isinstance(turn, Intent)
    assert turn.spec.inferred
    assert turn.spec.final


async def test_a_turn_has_what_a_router_and_a_worker_have_to_know(intake: Intake) -> None:
    headers = {
        "x-dynamo-meta-policy-class": "batch",
        "x-stainless-timeout": "90",
        "x-request-id": "mine",
        "x-dynamo-session-id": "s",
    }
    turn = await chat(intake, headers, stream=True, nvext={"agent_hints": {"osl": 40}})
    assert isinstance(turn, Intent)
    spec = turn.spec
    assert (spec.policy_class, spec.client_timeout_s, spec.streaming) == ("batch", 90.0, True)
    assert (spec.session, spec.hints.osl, turn.client_request_id) == ("s", 40, "mine")
    assert spec.tool_call_tokens == intake._model.tool_call_tokens != ()
    assert spec.inputs() == [HELLO[0]["content"]]
    for odd in ("soon", "-1", "1e9"):
        other = await chat(intake, {"x-stainless-timeout": odd})
        assert isinstance(other, Intent)
        assert other.spec.client_timeout_s == 0.0


async def test_prompts_come_as_text_or_tokens_long_ones_by_a_thread(intake: Intake) -> None:
    words = await text(intake, {}, prompt="word " * 1000, max_tokens=4)
    tokens = await text(intake, {}, prompt=[5, 6, 7], max_tokens=4)
    assert isinstance(words, Intent)
    assert isinstance(tokens, Intent)
    assert words.spec.input_tokens > 900
    assert tokens.spec.input_tokens == 3
    assert tokens.spec.session == "", "too short to be recognised"
    assert words.trigger == tokens.trigger == "other"


async def test_what_is_wrong_is_named(intake: Intake) -> None:
    with pytest.raises(NotFound) as unknown:
        await chat(intake, model="other")
    assert unknown.value.param == "model"
    with pytest.raises(InvalidTurn) as empty:
        await chat(intake, messages=[])
    assert empty.value.param == "messages"


class Reader:
    def wake(self) -> None:
        pass


async def test_a_farewell_and_a_turn_each_leave_a_record(intake: Intake) -> None:
    farewell = await chat(intake, {"x-dynamo-session-id": "s", **FINAL}, max_tokens=1)
    assert isinstance(farewell, Farewell)
    record = farewell_record(
        farewell, owner=OwnerId("f"), received=1.0, ended=1.5, received_unix_ms=7, now_unix_ms=8
    )
    assert record.request is not None
    assert record.agent_context is not None
    assert (record.request.attempts, record.request.total_time_ms) == (0, 500.0)
    assert record.agent_context.session_final

    intent = await chat(intake, {"x-dynamo-session-id": "s"}, program_id="p")
    assert isinstance(intent, Intent)
    turn = Turn(intent.spec, reader=Reader(), now=1.0, limits=TurnLimits())
    turn.cancel(3.0)
    record = record_of(
        intent, turn, owner=OwnerId("f"), model="m", received=1.0, received_unix_ms=7, now_unix_ms=8, reason="",
        stop=None,
    )  # fmt: skip
    assert record.request is not None
    assert (record.request.outcome, record.request.total_time_ms) == ("cancelled", 2000.0)
    assert record.agent_context is not None
    assert record.agent_context.session_id == "s"

    nobody = await chat(intake, FINAL, max_tokens=1)
    assert isinstance(nobody, Farewell)
    record = farewell_record(
        nobody, owner=OwnerId("f"), received=1.0, ended=1.0, received_unix_ms=7, now_unix_ms=8
    )
    assert record.agent_context is None
