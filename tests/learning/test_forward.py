"""Whole small models as drafts: what training computes is what the model itself computes, and it learns."""

import dataclasses

import pytest
import torch
import transformers

from livedraft.config import LearningConfig
from livedraft.drafts.weights import draft_from_hf, draft_from_model, load_draft, save_draft
from livedraft.learning.batches import example_from_trace
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.learning.trainer import Trainer
from tests.learning.toy import MODEL, served_traces
from tests.tiny import TINY, decoder, random_model

TARGET = TargetParts(vocabulary_size=64)
FAMILIES = {
    "pythia": lambda: transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    ),
    "codegen": lambda: transformers.CodeGenConfig(
        vocab_size=72, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=128
    ),  # padded past the target's vocabulary
    "phi": lambda: transformers.PhiConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    ),
    "gpt2 tied": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=128),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    ),
}
TOKENS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=FAMILIES, scope="module")
def module(request):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).float().eval()


def test_a_transformers_draft_is_run_as_transformers_runs_it(module, tmp_path):
    draft = draft_from_hf(module, 64)
    save_draft(draft, tmp_path / "draft.safetensors")
    loaded = load_draft(tmp_path / "draft.safetensors")
    assert loaded.is_whole_model
    assert loaded.vocabulary_size == 64
    forward = forward_of(loaded, TARGET, 128)
    with torch.no_grad():
        expected = module(TOKENS).logits[..., :64].reshape(-1, 64)
        torch.testing.assert_close(forward.head(forward.hidden(TOKENS)), expected, atol=1e-4, rtol=1e-4)
    total = sum(parameter.numel() for parameter in module.parameters())
    assert 0 < forward.num_weights <= total


def test_a_whole_native_model_is_run_as_the_decoder_runs_it(tmp_path):
    small = random_model(dataclasses.replace(TINY, width=16, num_heads=2, num_kv_heads=1, num_layers=2), seed=5)
    save_draft(draft_from_model(small, 64), tmp_path / "draft.safetensors")
    loaded = load_draft(tmp_path / "draft.safetensors")
    assert loaded.config == small.config
    forward = forward_of(loaded, TARGET, 128)
    served = decoder(small)
    with torch.no_grad():
        for row in range(2):
            rows = list(range(11))
            expected = served.forward(TOKENS[row].tolist(), rows, [0] * 11, rows).logits_RV
            found = forward.head(forward.hidden(TOKENS))[11 * row : 11 * (row + 1)]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_whole_models_learn_the_toy_language_and_keep_their_vocabulary(module):
    examples = [example_from_trace(trace, n) for n, trace in enumerate(served_traces(12))]
    config = LearningConfig(learning_rate=5e-3, loss="forward_kl", averaging=0.0, warmup_steps=0)
    made = Trainer(config=config, target=TARGET, draft=draft_from_hf(module, 64), max_positions=128)
    before = sum(score.alpha for score in made.score(examples)) / len(examples)
    made.change_vocabulary([1, 2, 3])
    assert len(made.draft_to_target_W) == 64
    for _ in range(12):
        made.step(examples)
    after = sum(score.alpha for score in made.score(examples)) / len(examples)
    assert after > before + 0.05
    again = Trainer(config=config, target=TARGET, draft=draft_from_hf(module, 64), max_positions=128)
    again.load_state_tensors({name: tensor.clone() for name, tensor in made.state_tensors().items()})
    made.step(examples)
    again.step(examples)
    for name, parameter in made.parameters.items():
        torch.testing.assert_close(again.parameters[name], parameter)
    assert made.snapshot().hf_config == again.snapshot().hf_config is not None


def test_the_targets_own_layers_need_the_target():
    assert MODEL.config.vocabulary_size == 64
    with pytest.raises(AssertionError):
        forward_of(dataclasses.replace(draft_from_model(random_model(), 64), config=None), TARGET, 64)
