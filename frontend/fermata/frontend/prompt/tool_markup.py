"""Which token of a model's output says that it calls a tool.

Models mark a call with an added token of their own before they write it. Where the model folder has one that is known,
an answer without it waits for a person and one with it for a tool; where it has none, an answer's tokens tell nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from fermata.core.model_folder import AddedToken

MARKUP = frozenset({
    "<tool_call>",  # Hermes, Qwen, GLM
    "<|tool_call|>",  # Phi, Granite
    "<tool_calls>",  # Jamba
    "<|tool_calls_section_begin|>",  # Kimi
    "<|tool_call_begin|>",
    "<｜tool▁calls▁begin｜>",  # DeepSeek  # noqa: RUF001
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama
    "<|call|>",  # Harmony
    "<minimax:tool_call>",  # MiniMax
    "<start_function_call>",  # FunctionGemma
    "<|action_start|>",  # InternLM
})  # fmt: skip


def tool_call_tokens(added: Iterable[AddedToken]) -> tuple[int, ...]:
    return tuple([token.id for token in added if token.content in MARKUP])
