"""A model's tokenizer as the simulated engine needs it: text to ids, and the id that ends a turn."""

from __future__ import annotations

from array import array
from pathlib import Path

from tokenizers import Tokenizer

from fermata.core.errors import ConfigError
from fermata.core.model_folder import ModelFolder
from fermata.worker.engine.speech import Speech


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder has no usable tokenizer or no end of turn."""
        model = ModelFolder.load(folder)
        if not model.eos_token_ids:
            raise ConfigError(
                "names no token that ends a turn",
                where=str(folder),
                fix="set eos_token in tokenizer_config.json",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ConfigError(
                f"can not be read: {error}",
                where=str(model.tokenizer_file),
                fix="replace the file by a whole one",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ends = frozenset(model.eos_token_ids)
        self.eos = model.eos_token_ids[0]

    def encode(self, text: str) -> array[int]:
        """Added tokens in the text come out as such; none is put around it."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def speech(self, text: str, *, delay_s: float = 0.0) -> Speech:
        """The text, then EOS. A token inside it that ends a turn ends it there, as in a real engine."""
        tokens = self.encode(text)
        for at, token in enumerate(tokens):
            if token in self._ends:
                return Speech(tokens[:at], eos=token, delay_s=delay_s)
        return Speech(tokens, eos=self.eos, delay_s=delay_s)
