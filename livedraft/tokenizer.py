"""Text to tokens and back: tokenizer and chat template from the model's own folder or GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from livedraft.gguf_file import read_gguf
from livedraft.records import UserError

Message = dict[str, Any]

# Pre-tokenizers llama.cpp names in `tokenizer.ggml.pre`. The patterns are part of the models' definitions.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLIT_PATTERNS = {"llama-bpe": _LLAMA3_PATTERN, "qwen2": _QWEN2_PATTERN}
_BYTE_LEVEL_WITH_DIGITS = ("smollm",)
_BYTE_LEVEL = ("gpt-2", "default")

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # GGUF token types


class Tokenizer:
    """Wraps transformers' fast tokenizer; the chat template is applied here and nowhere else."""

    def __init__(self, hf_tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self._hf = hf_tokenizer
        eos = set(eos_token_ids)
        if hf_tokenizer.eos_token_id is not None:
            eos.add(hf_tokenizer.eos_token_id)
        self.eos_token_ids = tuple(sorted(eos))
        vocabulary = sorted(hf_tokenizer.get_vocab().items(), key=lambda item: item[1])
        self.fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
        self.num_tokens = 1 + max(index for _, index in vocabulary)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=True))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Apply the chat template and tokenise, ready for the assistant's turn. Raises UserError without a template."""
        if not self.has_chat_template:
            raise UserError("This model has no chat template; give a plain prompt instead of messages.")
        return list(
            self._hf.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._hf.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(path: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """From a Hugging Face folder or a GGUF file. Raises UserError when there is none or it cannot be read."""
    if path.suffix == ".gguf":
        return Tokenizer(_from_gguf(path), eos_token_ids)
    from transformers import AutoTokenizer

    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder without tokenizer files
        raise UserError(f"{path} has no tokenizer that transformers can read ({type(error).__name__}).") from error
    return Tokenizer(hf_tokenizer, eos_token_ids)


def _from_gguf(path: Path) -> Any:
    """Build the byte-level BPE tokenizer from the file's own vocabulary, merges and template."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    wanted, _ = read_gguf(path)
    tokens, merges = wanted.get("tokenizer.ggml.tokens"), wanted.get("tokenizer.ggml.merges")
    kind, pre = wanted.get("tokenizer.ggml.model"), wanted.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or merges is None or tokens is None:
        raise UserError(
            f"{path} has a tokenizer of kind {kind!r}; livedraft builds byte-level BPE ones from GGUF files. "
            "Use the model's Hugging Face folder instead."
        )
    if pre in _SPLIT_PATTERNS:
        pre_tokenizer: Any = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _BYTE_LEVEL_WITH_DIGITS:
        pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _BYTE_LEVEL:
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join([*_SPLIT_PATTERNS, *_BYTE_LEVEL_WITH_DIGITS, *_BYTE_LEVEL])
        raise UserError(f"{path} asks for pre-tokenizer {pre!r}; livedraft knows {known}. Use the Hugging Face folder.")
    tokenizer = FastTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    types = wanted.get("tokenizer.ggml.token_type") or []
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL_TOKEN]
    )
    tokenizer.add_tokens(
        [AddedToken(token) for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED_TOKEN]
    )

    def special(name: str) -> str | None:
        index = wanted.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        chat_template=wanted.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
