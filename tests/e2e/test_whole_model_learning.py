"""A whole small model as the draft, of a family only transformers knows, for a target of such a family: learnt, promoted,
served."""

import time

import pytest
import torch
import transformers

from livedraft import LLM, SamplingParams
from livedraft.config import LearningConfig, SpeculationConfig
from livedraft.drafts.registry import Registry
from livedraft.records import UserError
from tests.hf_folder import byte_tokenizer

SAMPLING = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """GPT-NeoX again, half as wide, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(1)
    config = transformers.GPTNeoXConfig(
        vocab_size=258, num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32,
        max_position_embeddings=256, eos_token_id=257,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def learning(target, draft, state):
    return LLM(
        str(target), draft=str(draft), state=state, learn=True, dtype="float32", num_threads=1,
        learning=LearningConfig(level="on", learning_rate=1e-2, traces_per_candidate=8, warmup_steps=0),
        speculation=SpeculationConfig(num_speculative_tokens=2),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_transformers_draft_learns_for_a_transformers_target(neox_folder, small_folder, tmp_path):
    state = tmp_path / "state"
    prompts = [f"question number {n}" for n in range(1000)]
    outputs, first = [], 0
    with learning(neox_folder, small_folder, state) as llm:
        start = llm.engine.draft_version
        while Registry(state).in_service("default").id == start:
            assert first < 960, Registry(state).versions()
            outputs += llm.generate(prompts[first : first + 8], SAMPLING)
            first += 8
            time.sleep(1.0)  # the trainer has idle priority, and perhaps this one core
        outputs += llm.generate(prompts[first : first + 8], SAMPLING)
        version = Registry(state).in_service("default").id
    with LLM(str(neox_folder), draft="none", dtype="float32", num_threads=1) as plain:
        expected = plain.generate(prompts[: len(outputs)], SAMPLING)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    decision = Registry(state).version(version)["decision"]
    assert decision["candidate_alpha"] > decision["parent_alpha"]
    with learning(neox_folder, small_folder, state) as llm:  # the next start goes on with it
        assert llm.engine.draft_version == version


def test_a_states_drafts_are_of_one_kind(model_folder, neox_folder, small_folder, tmp_path):
    state = tmp_path / "state"
    with learning(neox_folder, small_folder, state):
        pass
    with pytest.raises(UserError, match="another kind"):
        learning(neox_folder, neox_folder, state)
    with pytest.raises(UserError, match="another target"):
        learning(model_folder, small_folder, state)
    with pytest.raises(UserError, match="whole small model"):
        LLM(str(neox_folder), state=tmp_path / "other", learn=True, num_threads=1)
