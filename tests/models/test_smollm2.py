"""The default model itself: our decoder and tokenizer against transformers and the model's own conventions."""

import pytest
import torch

from livedraft import LLM, SamplingParams
from livedraft.bench.reference import transformers_model
from livedraft.config import SpeculationConfig
from livedraft.models.load import load_model
from livedraft.tokenizer import load_tokenizer
from tests.tiny import decoder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_logits_equal_transformers(smollm2_path, tokenizer):
    model = load_model(smollm2_path, torch.float32)
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue? Give 3 reasons."}])
    with torch.inference_mode():
        reference = transformers_model(model.tensors, model.config, torch.float32)(torch.tensor([token_ids])).logits[0]
    rows = list(range(len(token_ids)))
    ours = decoder(model, num_slots=1).forward(token_ids, rows, [0] * len(rows), rows).logits_RV
    assert (ours - reference).abs().max() <= 1e-3


def test_tokenizer_follows_the_models_conventions(tokenizer):
    assert tokenizer.eos_token_ids == (2,)
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert (chat[0], chat.count(1), chat.count(2)) == (1, 3, 2)  # <|im_start|> thrice, <|im_end|> twice
    assert tokenizer.decode(chat).startswith("system\nYou are a helpful AI assistant named SmolLM")
    assert len(tokenizer.encode("12345")) == 5  # digits are split one by one
    for text in ("Grüße, 世界! 🌱", "  two  spaces\n\ttabs", "def f(x):\n    return x ** 2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_speculation_equals_plain_decoding_in_float32(smollm2_path):
    prompts = [[{"role": "user", "content": question}] for question in ("Name three rivers.", "Write a haiku.")]
    sampling = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=4)]
    with LLM(str(smollm2_path), dtype="float32", draft="none") as llm:
        plain = [[o.token_ids for o in llm.generate(prompts, s)] for s in sampling]
    with LLM(str(smollm2_path), dtype="float32", speculation=SpeculationConfig(num_speculative_tokens=3)) as llm:
        assert [[o.token_ids for o in llm.generate(prompts, s)] for s in sampling] == plain
        assert llm.engine.stats.num_draft_tokens > 0
