"""The folder that ships: what its template says, and that its prompts extend one another."""

from __future__ import annotations

from typing import Any

import pytest

from fermata.core.errors import InvalidTurn
from fermata.core.hashing import hash_seed
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.frontend.prompt import PromptModel

SEED = hash_seed()
TOOL = {"type": "function", "function": {"name": "ls", "description": "d\u00e9"}}
CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path":  "/"}'}}
NO_ARGUMENTS = {"id": "2", "type": "function", "function": {"name": "pwd", "arguments": ""}}


@pytest.fixture(scope="module")
def model() -> PromptModel:
    return PromptModel.load(
        ModelFolder.load(default_model_folder()), block_size=16, cache_bytes=1 << 22
    )


def test_a_session_with_tools_and_thinking_reads_as_written_here(model: PromptModel) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "old", "reasoning_content": "dropped"},
        {"role": "user", "content": "list"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [CALL, NO_ARGUMENTS],
        },
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "assistant", "content": "done", "tool_calls": [CALL]},
    ]
    assert model.render(messages, tools=[TOOL]) == (
        "<|im_start|>system\nS\n\n"
        "# Tools\n\nYou can call the functions listed here, one JSON description a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "ls", "description": "d\u00e9"}}\n</tools>\n\n'
        "A call is one JSON object between tags, with the name of the function and its arguments:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\nold<|im_end|>\n"
        "<|im_start|>user\nlist<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "ls", "arguments": {"path":  "/"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "pwd", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\na\n</tool_response><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone\n"
        '<tool_call>\n{"name": "ls", "arguments": {"path":  "/"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_thinking_can_be_switched_off(model: PromptModel) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    off = model.render(messages, variables={"enable_thinking": False})
    assert off == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert model.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


def test_arguments_given_as_an_object_are_written_as_json(model: PromptModel) -> None:
    call = {"function": {"name": "f", "arguments": {"a": "\u00e9"}}}
    text = model.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '{"name": "f", "arguments": {"a": "\u00e9"}}' in text


def test_a_later_system_message_stays_where_it_stands(model: PromptModel) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "system", "content": "late"}]
    text = model.render(messages, add_generation_prompt=False)
    assert text == "<|im_start|>user\nu<|im_end|>\n<|im_start|>system\nlate<|im_end|>\n"


def test_a_role_the_template_does_not_know_is_refused_by_name(model: PromptModel) -> None:
    with pytest.raises(InvalidTurn, match='"critic"'):
        model.render([{"role": "user", "content": "u"}, {"role": "critic", "content": "x"}])


@pytest.mark.parametrize("thinking", [True, False])
def test_a_tool_loop_extends_its_own_prompt_and_answer(model: PromptModel, thinking: bool) -> None:
    variables = {"enable_thinking": thinking}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for step in range(4):
        prompt = model.render(messages, tools=[TOOL], variables=variables)
        said = {"role": "assistant", "content": f"step {step}", "tool_calls": [CALL]}
        answer = f'step {step}\n<tool_call>\n{{"name": "ls", "arguments": {{"path":  "/"}}}}\n</tool_call><|im_end|>\n'
        messages += [said, {"role": "tool", "tool_call_id": "1", "content": "x"}]
        assert model.render(messages, tools=[TOOL], variables=variables).startswith(prompt + answer)


def test_a_new_question_rewrites_the_reasoning_before_it_and_that_is_counted(
    model: PromptModel,
) -> None:
    def turn(messages: list[dict[str, Any]]) -> None:
        model.path.prepare(model.render(messages), seed=SEED, lineage="one")

    long = "word " * 40
    messages: list[dict[str, Any]] = [{"role": "user", "content": long}]
    turn(messages)
    messages += [
        {"role": "assistant", "content": long, "reasoning_content": long},
        {"role": "tool", "content": long},
    ]
    turn(messages)
    assert model.path.counters.prefix_rewrites == 0
    turn([*messages, {"role": "user", "content": long}])
    assert model.path.counters.prefix_rewrites == 1


def test_a_folder_without_a_template_serves_plain_prompts_only(model: PromptModel) -> None:
    bare = PromptModel(
        model.folder, model.tokenizer, model.choice, None, model.path, model.vocabulary
    )
    with pytest.raises(InvalidTurn, match="no chat template"):
        bare.render([{"role": "user", "content": "u"}])


def test_answers_come_back_as_text_without_special_tokens(model: PromptModel) -> None:
    ids = model.tokenizer.encode("<think>\nx\n</think>\n\nh\u00e9<|im_end|>")
    assert model.vocabulary.has_byte_table
    hidden, shown = model.detokenizer(), model.detokenizer(skip_special_tokens=False)
    assert hidden.push(ids) + hidden.flush() == "<think>\nx\n</think>\n\nh\u00e9"
    assert shown.push(ids) + shown.flush() == "<think>\nx\n</think>\n\nh\u00e9<|im_end|>"
