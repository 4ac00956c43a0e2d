"""A model folder in the Hugging Face layout, read without its heavy libraries.

Reads what a frontend must know before it loads a tokenizer: where `tokenizer.json` is, which ids end a turn, which
special tokens the template may name, how long the context is, and the chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def default_model_folder() -> Path:
    """The small model that ships with Fermata: for simulated engines and tests."""
    return Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    tokenizer_file: Path
    eos_token_ids: tuple[int, ...]
    """Ids that end a turn: of generation_config.json, config.json and tokenizer_config.json, in that order, without repeats."""
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`...: text of each one that the folder names, as templates see them."""
    context_length: int | None
    """None: the folder does not say."""
    vocab_size: int | None
    chat_template: str
    """Jinja source; empty: the folder has none, so only completions and token ids can be served."""
    template_source: str
    """Where the template came from, for messages and logs."""
    named_templates: dict[str, str]
    """Other templates of the folder by name (`tool_use`, `rag`)."""

    @classmethod
    def load(cls, path: Path, *, chat_template: Path | None = None) -> ModelFolder:
        """`chat_template` replaces the folder's own. ConfigError names the file and the fix."""
        raise NotImplementedError
