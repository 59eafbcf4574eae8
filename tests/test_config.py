import pytest

from livedraft.config import DistillConfig, DistillRunConfig, EngineConfig, LearningConfig, SpeculationConfig


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EngineConfig, {"max_num_seqs": 0}),
        (EngineConfig, {"max_model_len": 1}),
        (EngineConfig, {"prefill_token_budget": 0}),
        (SpeculationConfig, {"method": "magic"}),
        (SpeculationConfig, {"num_speculative_tokens": -1}),
        (SpeculationConfig, {"max_num_speculative_tokens": 0}),
        (SpeculationConfig, {"num_draft_layers": 0}),
        (SpeculationConfig, {"draft_vocabulary_size": 0}),
        (LearningConfig, {"loss": "mse"}),
        (LearningConfig, {"learning_rate": 0}),
        (LearningConfig, {"averaging": 1.0}),
        (LearningConfig, {"positions": "some"}),
        (LearningConfig, {"traces_per_chunk": 0}),
        (LearningConfig, {"traces_per_candidate": 0}),
        (LearningConfig, {"max_passes": 0}),
        (LearningConfig, {"max_vocabulary_size": 0}),
        (LearningConfig, {"replay_per_new": -1}),
        (LearningConfig, {"num_threads": 0}),
        (LearningConfig, {"micro_batch_tokens": 0}),
        (LearningConfig, {"jsd_beta": 1.0}),
        (DistillConfig, {"jsd_beta": 0.0}),
    ],
)
def test_wrong_values_are_named(kind, fields):
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        kind(**fields)


@pytest.mark.parametrize("fields", [{"finetune_epochs": 0}, {"finetune_learning_rate": 0.0}])
def test_wrong_values_of_a_distillation_are_named(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        DistillRunConfig(prompts="prompts.jsonl", **fields)


def test_values_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        EngineConfig(8)
    with pytest.raises(AttributeError):
        EngineConfig().max_num_seqs = 3
