"""Other transformers families behind the model step: the same lossless behaviour, or a refusal with the reason."""

import pytest
import torch
import transformers

from livedraft.engine.runner import Runner
from livedraft.models.hf_runtime import HFRuntime
from livedraft.records import UserError
from livedraft.speculation.draft_model import DraftModel
from tests.tiny import PROMPTS, engine, request, serve

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
CONFIGS = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, intermediate_size=48, max_position_embeddings=128),
    "opt": lambda: transformers.OPTConfig(
        **SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128, pad_token_id=1
    ),
    "phi": lambda: transformers.PhiConfig(**SIZES, intermediate_size=48, max_position_embeddings=128),
    "codegen": lambda: transformers.CodeGenConfig(
        vocab_size=64, n_layer=2, n_head=2, n_embd=64, n_positions=128, rotary_dim=8
    ),
}


def tiny(name, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def runtime(model, num_slots=4):
    return HFRuntime(model, num_slots=num_slots, max_length=96, device=torch.device("cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_rewind_and_batches(name):
    model = tiny(name)
    served = runtime(model)
    token_ids = list(range(3, 23))
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    rows = list(range(12))
    served.forward([*token_ids[:8], 60, 61, 62, 63], rows, [1] * 12, [])  # four tokens too many in slot 1
    # Slot 1 is rewound to 8 while slot 0 is written whole, in one call.
    logits = served.forward(
        token_ids + token_ids[8:], [*range(20), *range(8, 20)], [0] * 20 + [1] * 12, [19, 20, 31]
    ).logits_RV
    assert torch.allclose(logits, expected[[19, 8, 19]], atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_costs_can_be_measured_before_any_request(name):
    served = Runner(runtime(tiny(name)))
    costs = served.measure_costs(DraftModel(runtime(tiny(name)), torch.arange(64), version="x"), num_repeats=1)
    assert costs.target_seconds(1) > 0
    assert costs.draft_step_seconds(1) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_speculation_changes_nothing(name):
    """Draft: the same model with noise; outputs equal plain decoding, greedy and seeded, in one batch."""
    model, noisy = tiny(name), tiny(name)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) * (parameter.std() if parameter.numel() > 1 else 0))
    requests = [request(p, i, **({} if i % 2 else {"temperature": 0.8, "seed": i})) for i, p in enumerate(PROMPTS)]
    plain = serve(engine(runtime(model), None), requests)
    draft = DraftModel(runtime(noisy), torch.arange(64), version="noisy")
    served = engine(runtime(model), draft, k=3)
    assert serve(served, requests) == plain
    assert served.stats.num_accepted_tokens > 0


def test_recurrent_and_encoder_decoder_models_are_refused_with_the_reason():
    torch.manual_seed(0)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()
    with pytest.raises(UserError, match=r"MambaForCausalLM .*recurrent|cannot be cropped"):
        runtime(mamba)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(UserError, match="encoder-decoder"):
        runtime(t5)


def test_a_model_whose_replay_differs_is_refused(monkeypatch):
    """The self-test, not a list of names, decides: a cache that ignores crop is caught."""
    monkeypatch.setattr(transformers.DynamicCache, "crop", lambda self, length: None)
    with pytest.raises(UserError, match=r"logits differ|cannot be cropped"):
        runtime(tiny("gpt_neox"))
