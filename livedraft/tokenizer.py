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
        self.longest_token_bytes = max(len(token.encode()) for token, _ in vocabulary)
        self.special_token_ids = frozenset(hf_tokenizer.all_special_ids) | {
            index for index, token in hf_tokenizer.added_tokens_decoder.items() if token.special
        }
        self._is_byte_level = "ByteLevel" in repr(getattr(hf_tokenizer, "backend_tokenizer", hf_tokenizer).decoder)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def bos_text(self) -> str | None:
        """The token that begins a text, where `encode` adds one."""
        begins = self.encode("")[:1]
        bos: str | None = self._hf.bos_token
        return bos if begins and begins[0] == self._hf.bos_token_id else None

    def encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=True))

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template does anything with `tools`."""
        template = self._hf.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        return any("tools" in text for text in texts)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Apply the chat template and tokenise, ready for the assistant's turn.

        Raises UserError without a template, with `tools` it does not take, or for messages it refuses.
        """
        if not self.has_chat_template:
            raise UserError("This model has no chat template; give a plain prompt instead of messages.")
        if tools and not self.takes_tools:
            raise UserError("This model's chat template takes no tools; leave out tools.")
        from jinja2 import TemplateError

        try:
            token_ids = self._hf.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=True,
                return_dict=False,
            )  # fmt: skip
        except (TemplateError, TypeError, KeyError, AttributeError) as error:  # what templates raise for odd messages
            raise UserError(f"The model's chat template does not take these messages: {error}.") from error
        return list(token_ids)

    def encode_text(self, text: str) -> list[int]:
        """Without the special tokens that begin or end a prompt: for text in the middle of one."""
        return list(self._hf.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """The whole text. `TextStream` gives the same in pieces."""
        # Cleaning up spaces would depend on what comes next, and so on how the text is cut into pieces.
        return str(
            self._hf.decode(
                list(token_ids), skip_special_tokens=not with_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones too; half a character shows as the replacement character."""
        return str(self._hf.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, also where they are only part of a character."""
        token = self._hf.convert_ids_to_tokens(token_id)
        if self._is_byte_level and token is not None and token_id not in self._hf.added_tokens_decoder:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        if token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])  # SentencePiece's byte fallback
        return self.token_text(token_id).encode()

    @property
    def hf_tokenizer(self) -> Any:
        """For libraries that read the vocabulary themselves."""
        return self._hf


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 32
"""No character is spread over this many tokens: text that still looks incomplete is garbage and is let through."""


class TextStream:
    """Tokens in, text out, in pieces that joined are the whole text, whatever the pieces.

    Held back: a character whose bytes are not all there, and text that may turn out to begin a stop string. The engine
    and the server both run one over a request's tokens, one token at a time, and so agree where it stops.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._context, self._read = 0, 0  # decoded together: [context, read) is out already and gives the context
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. Once a stop string has come, tokens are ignored."""
        pieces = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            if token_id in self._tokenizer.special_token_ids:
                continue  # no text, and a long run of them would have to be decoded again and again
            self._token_ids.append(token_id)
            pieces.append(self._scan(self._newly_complete()))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back, at the end of the output. A stop string in it counts like any other."""
        if self.stopped_by is not None:
            return ""
        rest = self._decode(self._context)[len(self._decode(self._context, self._read)) :]
        text = self._scan(rest)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._token_ids[start:end])

    def _newly_complete(self) -> str:
        known = self._decode(self._context, self._read)
        text = self._decode(self._context)
        is_incomplete = text.endswith(_REPLACEMENT) and len(self._token_ids) - self._read <= _MAX_HELD_TOKENS
        if is_incomplete or len(text) <= len(known):
            return ""
        self._context, self._read = self._read, len(self._token_ids)
        return text[len(known) :]

    def _scan(self, new: str) -> str:
        """Cut at the first stop string; hold back what may begin one."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            position, self.stopped_by = min(found)
            self._held = ""
            return text[:position]
        longest = max(len(stop) for stop in self._stop) - 1
        num_held = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


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
