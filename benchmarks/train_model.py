"""Makes the small model folder that ships with Fermata, the same bytes every time.

`python benchmarks/train_model.py [--revision COMMIT] [--check]` reads our sources and docs as they stood at a pinned
commit, so that later edits do not move every token id. `--check` writes nothing and fails if the folder differs.
The chat template is written by hand and stays as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from fermata.core.model_folder import default_model_folder

CORPUS_REVISION = "6633f61b53a856295f84d1f631a3cce748a54ae6"
CORPUS_SUFFIXES = (".py", ".md", ".toml")
BASE_VOCABULARY = 4000
CONTEXT_LENGTH = 131_072
# Qwen2's split: contractions, words with one leading mark or space, single digits, punctuation runs, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def corpus(revision: str) -> Iterator[str]:
    """Every source and doc of the repository at that commit, in path order."""
    listing = _git("ls-tree", "-r", "--name-only", revision).splitlines()
    for name in sorted(listing):
        if name.endswith(CORPUS_SUFFIXES):
            yield _git("show", f"{revision}:{name}")


def _git(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def train(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(SPLIT), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCABULARY,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for contents, special in ((SPECIAL, True), (MARKUP, False)):
        tokens = [AddedToken(c, special=special, normalized=False) for c in contents]
        tokenizer.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]  (untyped list in the stub)
    return tokenizer


def folder_files(tokenizer: Tokenizer) -> dict[str, str]:
    end_of_text, end_of_turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _json(
            {
                "add_bos_token": False,
                "bos_token": None,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|im_end|>",
                "model_max_length": CONTEXT_LENGTH,
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": None,
            }
        ),
        "generation_config.json": _json(
            {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}
        ),
        "config.json": _json(
            {
                "architectures": ["FermataSmall"],
                "max_position_embeddings": CONTEXT_LENGTH,
                "model_type": "fermata-small",
                "vocab_size": tokenizer.get_vocab_size(),
            }
        ),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--revision", default=CORPUS_REVISION, help="commit of the corpus")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    folder = default_model_folder()
    different: list[str] = []
    for name, text in folder_files(train(corpus(options.revision))).items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        different.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    state = "differs" if options.check else "written"
    print(f"{folder}: {', '.join(different) + ' ' + state if different else 'up to date'}")
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
