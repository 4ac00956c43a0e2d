from __future__ import annotations

from fermata.core.model_folder import AddedToken, ModelFolder, default_model_folder
from fermata.frontend.prompt.tool_markup import MARKUP, tool_call_tokens


def test_the_model_that_ships_opens_tool_calls_with_a_token_of_its_own() -> None:
    folder = ModelFolder.load(default_model_folder())
    (token,) = tool_call_tokens(folder.added_tokens)
    assert next(t.content for t in folder.added_tokens if t.id == token) == "<tool_call>"


def test_only_tokens_that_open_a_call_count() -> None:
    contents = ["</tool_call>", "<tool_response>", "<think>", "[TOOL_CALLS]", "<|python_tag|>"]
    added = [AddedToken(id=i, content=text) for i, text in enumerate(contents)]
    assert tool_call_tokens(added) == (3, 4)
    assert tool_call_tokens([]) == ()
    assert not any(text.startswith("</") for text in MARKUP)
