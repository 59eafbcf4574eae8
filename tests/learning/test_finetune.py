"""Plain fine-tuning of a target: it learns the responses, and epochs and rate are what they are called."""

import pytest
import torch
import transformers

from livedraft.learning.finetune import finetune
from livedraft.records import UserError

TEXTS = [([5, 6, 7, n], [n, 20, 21, 22]) for n in range(8, 24)]  # two batches


def tuned(**settings):
    """(losses step by step, how far the weights have moved)."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    before = model.lm_head.weight.detach().clone()
    losses = []
    finetune(model, TEXTS, seed=0, report=lambda _step, _of, loss: losses.append(loss), **settings)
    return losses, float((model.lm_head.weight.detach() - before).norm())


def test_more_epochs_are_more_passes_and_the_responses_are_learnt():
    once, _ = tuned(epochs=1, learning_rate=1e-2)
    often, _ = tuned(epochs=20, learning_rate=1e-2)
    assert len(often) == 20 * len(once) == 40
    assert often[-1] < 0.5 * often[0]


def test_the_rate_is_how_far_a_step_goes():
    _, little = tuned(epochs=1, learning_rate=1e-4)
    _, much = tuned(epochs=1, learning_rate=1e-2)
    assert much > 10 * little > 0


def test_a_loss_that_is_no_number_is_one_sentence():
    with pytest.raises(UserError, match="failed at step"):
        tuned(epochs=50, learning_rate=1e30)
