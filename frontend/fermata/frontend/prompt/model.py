"""All that the prompt path knows of one model folder, in one object for the service to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fermata.core.errors import InvalidTurn
from fermata.core.model_folder import ModelFolder
from fermata.frontend.prompt.detokenizer import Detokenizer, Vocabulary
from fermata.frontend.prompt.path import Prompt, PromptPath
from fermata.frontend.prompt.template import ChatTemplate
from fermata.frontend.prompt.tokenizer import Tokenizer, TokenizerChoice, load_tokenizer
from fermata.frontend.prompt.tool_markup import tool_call_tokens


@dataclass(frozen=True, slots=True)
class PromptModel:
    folder: ModelFolder
    tokenizer: Tokenizer
    choice: TokenizerChoice
    template: ChatTemplate | None
    """None: the folder has none."""
    path: PromptPath
    vocabulary: Vocabulary
    tool_call_tokens: tuple[int, ...] = ()
    """Of these, one is in every answer that calls a tool; empty where the folder does not say."""

    @classmethod
    def load(cls, folder: ModelFolder, *, block_size: int, cache_bytes: int) -> PromptModel:
        """Reads the tokenizer and probes it, compiles the template: three CPU seconds for 150k tokens, once at start.

        ConfigError names file and fix.
        """
        contents = [token.content for token in folder.added_tokens]
        tokenizer, reference, choice = load_tokenizer(folder.tokenizer_file, added_tokens=contents)
        template = None
        if folder.chat_template:
            template = ChatTemplate(
                folder.chat_template,
                special_tokens=folder.special_tokens,
                where=folder.template_source,
            )
        path = PromptPath(
            tokenizer,
            added_tokens=folder.added_tokens,
            block_size=block_size,
            cache_bytes=cache_bytes,
        )
        vocabulary = Vocabulary.load(
            folder.tokenizer_file, reference, added_tokens=folder.added_tokens
        )
        marks = tool_call_tokens(folder.added_tokens)
        return cls(folder, tokenizer, choice, template, path, vocabulary, marks)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `path.prepare` takes. InvalidTurn names what is wrong."""
        if self.template is None:
            raise InvalidTurn(
                "this model has no chat template: use /v1/completions, or name one in model.chatTemplate"
            )
        return self.template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def text_of(self, prompt: Prompt) -> str:
        """Of a prompt that came as ids too; few ask for that, so it is made when they do."""
        if prompt.text or not prompt.tokens:
            return prompt.text
        ids = memoryview(prompt.tokens).cast("I").tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return self.vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)
