"""A Hugging Face model folder around tiny random weights, with a real byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from livedraft.models.config import ModelConfig, hf_config
from tests.tiny import TINY, random_tensors

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
TEXT_CONFIG = replace(TINY, vocabulary_size=258, eos_token_ids=(257,), max_positions=512)


def write_hf_folder(path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(config)))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(names)}
    for file_name in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file_name}, path / file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, plus <pad> 256 and <eos> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<pad>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def write_text_model(path: Path, config: ModelConfig = TEXT_CONFIG, seed: int = 0) -> Path:
    """A whole folder `livedraft` can serve: config, random weights, tokenizer, chat template."""
    write_hf_folder(path, config, random_tensors(config, seed))
    byte_tokenizer().save_pretrained(path)
    return path
